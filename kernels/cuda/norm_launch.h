// Launching the normalised rotation and its derivative. Neither torch nor the CUDA toolkit is needed to include this.
#pragma once

#include <string>

#include "norm_configuration.h"

namespace ropecheck {

// What the execution trace says of a configuration.
std::string description(const NormConfiguration& configuration);
std::string description(const NormBackwardConfiguration& configuration);

// Queues the forward kernel on a stream of the current device. Throws std::runtime_error with CUDA's name and message,
// as the others do.
void launch(const NormArguments& arguments, const NormConfiguration& configuration, Dtype dtype, void* stream);

// Queues the kernel for the gradients of queries, keys and gates, and for the sums of the weights'.
void launch(const NormBackwardArguments& arguments, const NormBackwardConfiguration& configuration, Dtype dtype,
            void* stream);

// Queues the kernel that adds up these sums to the weights' gradients, of the given dtype.
void launch_sums(const WeightSums& q, const WeightSums& k, int head_dim, Dtype dtype, void* stream);

}  // namespace ropecheck
