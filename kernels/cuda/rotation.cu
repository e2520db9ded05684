// Which kernel a rotation gets, on which grid, and what is said where it cannot be launched.
#include "launch.h"

#include <algorithm>
#include <stdexcept>

#include "launch_limits.h"
#include "launch_status.cuh"
#include "rotation_kernel.cuh"

namespace ropecheck {
namespace {

// Blocks of this size that fill a large GPU: heads are split over blocks where tokens alone make fewer.
constexpr std::int64_t kEnoughBlocks = 1024;

// Whether every vector of one tensor starts at a multiple of 16 bytes. A stride of a single step is never taken.
bool is_wide(const void* base, const Strides& strides, int heads, const RotationArguments& arguments, int element) {
  const auto steps_are_wide = [element](std::int64_t size, std::int64_t stride) {
    return size == 1 || stride * element % kVectorBytes == 0;
  };
  return is_multiple(base, kVectorBytes) && strides.channel == 1 && steps_are_wide(arguments.batch, strides.batch) &&
         steps_are_wide(arguments.sequence, strides.token) && steps_are_wide(heads, strides.head);
}

bool is_wide(const Table& table, const RotationArguments& arguments, std::int64_t bytes) {
  const std::int64_t values = bytes / static_cast<std::int64_t>(sizeof(float));
  return is_multiple(table.values, bytes) && table.lane_stride == 1 &&
         (arguments.batch == 1 || table.batch_stride % values == 0) &&
         (arguments.sequence == 1 || table.token_stride % values == 0);
}

template <typename Element, Pairing pairing>
void launch_typed(const RotationArguments& arguments, const LaunchConfiguration& configuration, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(configuration.token_blocks * configuration.head_blocks));
  const dim3 block(configuration.groups, configuration.heads, configuration.tokens);
  if (configuration.wide) {
    rotation_kernel<Element, pairing, true><<<grid, block, 0, stream>>>(arguments, configuration);
  } else {
    rotation_kernel<Element, pairing, false><<<grid, block, 0, stream>>>(arguments, configuration);
  }
}

template <typename Element>
void launch_typed(const RotationArguments& arguments, const LaunchConfiguration& configuration, Pairing pairing,
                  cudaStream_t stream) {
  if (pairing == Pairing::kAdjacent) {
    launch_typed<Element, Pairing::kAdjacent>(arguments, configuration, stream);
  } else {
    launch_typed<Element, Pairing::kHalfSplit>(arguments, configuration, stream);
  }
}

}  // namespace

CurrentDevice::CurrentDevice(int device) {
  if (const cudaError_t error = cudaGetDevice(&previous_); error != cudaSuccess) {
    fail("the current CUDA device cannot be read", error);
  }
  changed_ = previous_ != device;
  if (!changed_) {
    return;
  }
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess) {
    fail("the device of the tensor cannot be made current", error);
  }
}

CurrentDevice::~CurrentDevice() {
  if (changed_) {
    cudaSetDevice(previous_);
  }
}

LaunchConfiguration configuration_for(const RotationArguments& arguments, Dtype dtype, Pairing pairing) {
  const int element = bytes_of(dtype);
  const int channels = kVectorBytes / element;
  const int lanes = pairing == Pairing::kAdjacent ? channels / 2 : channels;
  const int tail = arguments.head_dim - 2 * arguments.lanes;
  const std::int64_t table_bytes = std::min<std::int64_t>(kVectorBytes, lanes * sizeof(float));
  const auto tensor_is_wide = [&](const Activations& tensor) {
    return tensor.heads == 0 ||
           (is_wide(tensor.source, tensor.source_strides, tensor.heads, arguments, element) &&
            is_wide(tensor.destination, tensor.destination_strides, tensor.heads, arguments, element));
  };

  LaunchConfiguration configuration;
  configuration.wide = arguments.lanes % lanes == 0 && tail % channels == 0 && tensor_is_wide(arguments.q) &&
                       tensor_is_wide(arguments.k) && is_wide(arguments.cosine, arguments, table_bytes) &&
                       is_wide(arguments.sine, arguments, table_bytes);
  configuration.groups = ceiling(arguments.lanes, lanes) + ceiling(tail, channels);

  // The block's heads, so many that each thread passes over equally many; its tokens fill what is left.
  const int heads = arguments.q.heads + arguments.k.heads;
  const int rows = std::max(1, kMaxThreads / configuration.groups);
  int passes = ceiling(heads, rows);
  configuration.heads = ceiling(heads, passes);
  const std::int64_t tokens = arguments.batch * arguments.sequence;
  configuration.tokens = static_cast<int>(
      std::min<std::int64_t>({tokens, std::max(1, rows / configuration.heads), std::int64_t{kMaxBlockDepth}}));
  configuration.token_blocks = ceiling(tokens, std::int64_t{configuration.tokens});
  const std::int64_t split = std::min<std::int64_t>(passes, ceiling(kEnoughBlocks, configuration.token_blocks));
  passes = ceiling(passes, static_cast<int>(split));
  configuration.heads_per_block = passes * configuration.heads;
  configuration.head_blocks = ceiling(heads, configuration.heads_per_block);
  if (configuration.token_blocks > kMaxBlocks / configuration.head_blocks) {
    throw std::runtime_error("x: " + std::to_string(tokens) + " tokens need more blocks than a CUDA grid has");
  }
  return configuration;
}

std::string description(const LaunchConfiguration& configuration) {
  return "groups=" + std::to_string(configuration.groups) + " heads=" + std::to_string(configuration.heads) +
         " tokens=" + std::to_string(configuration.tokens) +
         " heads_per_block=" + std::to_string(configuration.heads_per_block) +
         " blocks=" + std::to_string(configuration.token_blocks * configuration.head_blocks) +
         (configuration.wide ? " access=16 bytes" : " access=by alignment");
}

void launch(const RotationArguments& arguments, const LaunchConfiguration& configuration, Dtype dtype, Pairing pairing,
            void* stream) {
  require_no_pending_error();
  const auto queue = static_cast<cudaStream_t>(stream);
  switch (dtype) {
    case Dtype::kFloat32:
      launch_typed<Float32>(arguments, configuration, pairing, queue);
      break;
    case Dtype::kFloat16:
      launch_typed<Float16>(arguments, configuration, pairing, queue);
      break;
    case Dtype::kBFloat16:
      launch_typed<BFloat16>(arguments, configuration, pairing, queue);
      break;
  }
  require_launched();
}

}  // namespace ropecheck
