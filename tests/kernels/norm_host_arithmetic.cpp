// The kernels of the normalised rotation, whole, on a host: functions that Python can call on plain memory.
#include "device_emulation.h"

namespace ropecheck {
float4 shared_memory[48 * 1024 / sizeof(float4)];
}

#include "norm_backward_kernel.cuh"
#include "norm_kernel.cuh"

using namespace ropecheck;

namespace {

// What a GPU that is busy with one thread gives to each: the configuration of a large input.
constexpr Parallelism kTinyGpu{1, 1};

std::size_t checked(std::size_t bytes) {
  if (bytes > sizeof(shared_memory)) {
    throw std::runtime_error("more shared memory than every GPU has");
  }
  return bytes;
}

template <typename Element, bool kMultiAxis, bool kWide>
void run(const NormArguments& arguments, const NormConfiguration& configuration, bool backwards) {
  const dim3 threads{static_cast<unsigned>(configuration.threads), static_cast<unsigned>(configuration.slots),
                     static_cast<unsigned>(configuration.tokens)};
  launch_emulated(norm_rope_gate_kernel<Element, kMultiAxis, kWide>,
                  configuration.token_blocks * configuration.slot_blocks, threads, shared_memory,
                  checked(shared_bytes(arguments.context, configuration)), backwards, arguments, configuration);
}

template <typename Element, bool kMultiAxis, bool kWide>
void run(const NormBackwardArguments& arguments, const NormBackwardConfiguration& configuration, bool backwards) {
  const dim3 threads{static_cast<unsigned>(configuration.threads), static_cast<unsigned>(configuration.slots)};
  launch_emulated(norm_rope_backward_kernel<Element, kMultiAxis, kWide>,
                  configuration.q.count + configuration.k.count, threads, shared_memory,
                  checked(shared_bytes(arguments.context, configuration)), backwards, arguments, configuration);
}

template <typename Element, typename Arguments, typename Configuration>
void run(const Arguments& arguments, const Configuration& configuration, bool backwards) {
  const bool multi_axis = arguments.context.axis_map.values != nullptr;
  if (multi_axis && configuration.wide) {
    run<Element, true, true>(arguments, configuration, backwards);
  } else if (multi_axis) {
    run<Element, true, false>(arguments, configuration, backwards);
  } else if (configuration.wide) {
    run<Element, false, true>(arguments, configuration, backwards);
  } else {
    run<Element, false, false>(arguments, configuration, backwards);
  }
}

template <typename Arguments, typename Configuration>
void run(const Arguments& arguments, const Configuration& configuration, Dtype dtype, bool backwards) {
  switch (dtype) {
    case Dtype::kFloat32:
      return run<Float32>(arguments, configuration, backwards);
    case Dtype::kFloat16:
      return run<Float16>(arguments, configuration, backwards);
    case Dtype::kBFloat16:
      return run<BFloat16>(arguments, configuration, backwards);
  }
}

}  // namespace

// Whether the kernel for aligned operands ran. `large`: with the configuration that a large input has.
extern "C" bool norm_forward(const NormArguments* arguments, int dtype, bool large, bool backwards) {
  const auto element = static_cast<Dtype>(dtype);
  const NormConfiguration configuration = configuration_for(*arguments, element, large ? kTinyGpu : kLargeGpu);
  run(*arguments, configuration, element, backwards);
  return configuration.wide;
}

// The sums of the chunks are laid out here, where `weight_gradients` has a place for those of q and of k, [D] each.
extern "C" bool norm_backward(NormBackwardArguments* arguments, void* const* weight_gradients, int weight_dtype,
                              int dtype, bool large, bool backwards) {
  const auto element = static_cast<Dtype>(dtype);
  const NormBackwardConfiguration configuration =
      configuration_for(*arguments, element, large ? kTinyGpu : kLargeGpu);
  const int head_dim = arguments->context.head_dim;
  std::vector<float> sums((configuration.q.count + configuration.k.count) * head_dim, float_of(0x7fc00000u));
  if (weight_gradients != nullptr) {
    arguments->q.sums = sums.data();
    arguments->k.sums = sums.data() + configuration.q.count * head_dim;
  }
  run(*arguments, configuration, element, backwards);
  if (weight_gradients != nullptr) {
    const WeightSums q{arguments->q.sums, weight_gradients[0], configuration.q.count};
    const WeightSums k{arguments->k.sums, weight_gradients[1], configuration.k.count};
    const dim3 threads{kSummedChannels, kSummingRows};
    launch_emulated(sum_chunks_kernel, 2 * ceiling(head_dim, kSummedChannels), threads, shared_memory, 0, backwards, q,
                    k, head_dim, static_cast<Dtype>(weight_dtype));
  }
  return configuration.wide;
}
