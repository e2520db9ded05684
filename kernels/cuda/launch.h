// Launching the rotation. Neither torch nor the CUDA toolkit is needed to include this.
#pragma once

#include <string>

#include "arguments.h"
#include "rotation.h"

namespace ropecheck {

// Makes a device current, and at its end again the one that was. Throws std::runtime_error.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_;
  bool changed_;
};

// The block and grid that a rotation gets, a function of shapes, strides and addresses alone. Throws
// std::runtime_error where the grid would be too large.
LaunchConfiguration configuration_for(const RotationArguments& arguments, Dtype dtype, Pairing pairing);

// What the execution trace says of a configuration.
std::string description(const LaunchConfiguration& configuration);

// Queues the kernel on a stream of the current device. Throws std::runtime_error with CUDA's name and message.
void launch(const RotationArguments& arguments, const LaunchConfiguration& configuration, Dtype dtype, Pairing pairing,
            void* stream);

}  // namespace ropecheck
