// Which kernel a normalised rotation and its derivative get, and what is said where it cannot be launched.
#include "norm_launch.h"

#include "launch_status.cuh"
#include "norm_backward_kernel.cuh"
#include "norm_kernel.cuh"

namespace ropecheck {
namespace {

template <typename Element, bool kMultiAxis, bool kWide>
void queue_kernel(const NormArguments& arguments, const NormConfiguration& configuration, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(configuration.token_blocks * configuration.slot_blocks));
  const dim3 block(configuration.threads, configuration.slots, configuration.tokens);
  const std::size_t shared = shared_bytes(arguments.context, configuration);
  norm_rope_gate_kernel<Element, kMultiAxis, kWide><<<grid, block, shared, stream>>>(arguments, configuration);
}

template <typename Element, bool kMultiAxis, bool kWide>
void queue_kernel(const NormBackwardArguments& arguments, const NormBackwardConfiguration& configuration,
                  cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(configuration.q.count + configuration.k.count));
  const dim3 block(configuration.threads, configuration.slots);
  const std::size_t shared = shared_bytes(arguments.context, configuration);
  norm_rope_backward_kernel<Element, kMultiAxis, kWide><<<grid, block, shared, stream>>>(arguments, configuration);
}

template <typename Element, typename Arguments, typename Configuration>
void queue_kernel(const Arguments& arguments, const Configuration& configuration, cudaStream_t stream) {
  const bool multi_axis = arguments.context.axis_map.values != nullptr;
  if (multi_axis && configuration.wide) {
    queue_kernel<Element, true, true>(arguments, configuration, stream);
  } else if (multi_axis) {
    queue_kernel<Element, true, false>(arguments, configuration, stream);
  } else if (configuration.wide) {
    queue_kernel<Element, false, true>(arguments, configuration, stream);
  } else {
    queue_kernel<Element, false, false>(arguments, configuration, stream);
  }
}

template <typename Arguments, typename Configuration>
void launch_typed(const Arguments& arguments, const Configuration& configuration, Dtype dtype, void* stream) {
  require_no_pending_error();
  const auto queue = static_cast<cudaStream_t>(stream);
  switch (dtype) {
    case Dtype::kFloat32:
      queue_kernel<Float32>(arguments, configuration, queue);
      break;
    case Dtype::kFloat16:
      queue_kernel<Float16>(arguments, configuration, queue);
      break;
    case Dtype::kBFloat16:
      queue_kernel<BFloat16>(arguments, configuration, queue);
      break;
  }
  require_launched();
}

const char* access(bool wide) { return wide ? " access=16 bytes" : " access=by alignment"; }

}  // namespace

std::string description(const NormConfiguration& configuration) {
  return "threads=" + std::to_string(configuration.threads) + " slots=" + std::to_string(configuration.slots) +
         " tokens=" + std::to_string(configuration.tokens) + " heads_per_slot=" + std::to_string(configuration.rows) +
         " blocks=" + std::to_string(configuration.token_blocks * configuration.slot_blocks) +
         access(configuration.wide);
}

std::string description(const NormBackwardConfiguration& configuration) {
  return "threads=" + std::to_string(configuration.threads) + " slots=" + std::to_string(configuration.slots) +
         " q_chunk=" + std::to_string(configuration.q.size) + " k_chunk=" + std::to_string(configuration.k.size) +
         " blocks=" + std::to_string(configuration.q.count + configuration.k.count) + access(configuration.wide);
}

void launch(const NormArguments& arguments, const NormConfiguration& configuration, Dtype dtype, void* stream) {
  launch_typed(arguments, configuration, dtype, stream);
}

void launch(const NormBackwardArguments& arguments, const NormBackwardConfiguration& configuration, Dtype dtype,
            void* stream) {
  launch_typed(arguments, configuration, dtype, stream);
}

void launch_sums(const WeightSums& q, const WeightSums& k, int head_dim, Dtype dtype, void* stream) {
  require_no_pending_error();
  const dim3 grid(2 * ceiling(head_dim, kSummedChannels));
  const dim3 block(kSummedChannels, kSummingRows);
  sum_chunks_kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(q, k, head_dim, dtype);
  require_launched();
}

}  // namespace ropecheck
