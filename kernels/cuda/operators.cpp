// The operators that Python defines, implemented for CUDA tensors through torch's stable C++ interface.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "current_stream.h"
#include "launch.h"
#include "operands.h"
#include "operator_call.h"

#define ROPECHECK_EXPORT extern "C" __attribute__((visibility("default"), used))

// What ropecheck.kernels.native reads from the bytes of this file, without loading it; the build defines the values.
ROPECHECK_EXPORT const char ropecheck_native_information[] =
    "ropecheck-native{\"interface\": " ROPECHECK_INTERFACE ", \"torch_target\": \"" ROPECHECK_TORCH_TARGET
    "\", \"architectures\": \"" ROPECHECK_ARCHITECTURES "\", \"source_hash\": \"" ROPECHECK_SOURCE_HASH "\"}";

namespace ropecheck {
namespace {

// What every operator takes after its activations.
struct Call {
  const char* operator_name;
  bool half_split;
  bool conjugate;
  const Text& direction;
  const Text& reason;
};

Tensor contiguous_like(const Tensor& x) {
  return empty_contiguous({x.size(0), x.size(1), x.size(2), x.size(3)}, dtype_code(x), x);
}

Strides strides_of(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2), x.stride(3)}; }

Activations activations(const Tensor& source, const Tensor& destination) {
  return {source.data_ptr(), destination.data_ptr(), strides_of(source), strides_of(destination),
          static_cast<int>(source.size(2))};
}

Table table(const Tensor& values) {
  const bool per_sample = values.dim() == 3;
  return {static_cast<const float*>(values.data_ptr()), per_sample ? values.stride(0) : 0,
          values.stride(per_sample ? 1 : 0), values.stride(per_sample ? 2 : 1)};
}

// Operands that were checked. An input without elements launches nothing and leaves no record.
void rotate(const Tensor& x, const Activations& q, const Activations& k, const Tensor& cos, const Tensor& sin,
            const Call& call) {
  RotationArguments arguments{q, k, table(cos), table(sin), x.size(0), x.size(1), static_cast<int>(x.size(3)),
                              static_cast<int>(cos.size(cos.dim() - 1)), call.conjugate};
  if (arguments.batch == 0 || arguments.sequence == 0 || q.heads + k.heads == 0) {
    return;
  }
  const Dtype dtype = activation_dtype("x", x);
  const Pairing pairing = call.half_split ? Pairing::kHalfSplit : Pairing::kAdjacent;
  const LaunchConfiguration configuration = configuration_for(arguments, dtype, pairing);
  const std::int32_t device = x.get_device_index();
  {
    const CurrentDevice guard(device);
    launch(arguments, configuration, dtype, pairing, current_stream(device));
  }
  report_launch(call.operator_name, call.direction.c_str(), device, call.reason,
                [&] { return description(configuration); });
}

Tensor multi_axis_rope(Tensor x, Tensor cos, Tensor sin, bool half_split, bool conjugate, StringHandle direction,
                       StringHandle reason) {
  const Text direction_text(direction);
  const Text reason_text(reason);
  check_operands("x", x, cos, sin);
  require_cuda("x", x);
  Tensor y = contiguous_like(x);
  rotate(x, activations(x, y), Activations{}, cos, sin,
         {"multi_axis_rope_cuda", half_split, conjugate, direction_text, reason_text});
  return y;
}

std::tuple<Tensor, Tensor> multi_axis_rope_pair(Tensor q, Tensor k, Tensor cos, Tensor sin, bool half_split,
                                                bool conjugate, StringHandle direction, StringHandle reason) {
  const Text direction_text(direction);
  const Text reason_text(reason);
  check_operands("q", q, cos, sin);
  check_pair(q, k);
  require_cuda("q", q);
  Tensor rotated_q = contiguous_like(q);
  Tensor rotated_k = contiguous_like(k);
  rotate(q, activations(q, rotated_q), activations(k, rotated_k), cos, sin,
         {"multi_axis_rope_pair_cuda", half_split, conjugate, direction_text, reason_text});
  return {rotated_q, rotated_k};
}

void multi_axis_rope_pair_in_place(Tensor q, Tensor k, Tensor cos, Tensor sin, bool half_split, bool conjugate,
                                   StringHandle direction, StringHandle reason) {
  const Text direction_text(direction);
  const Text reason_text(reason);
  check_operands("q", q, cos, sin);
  check_pair(q, k);
  require_own_memory("q", q);
  require_own_memory("k", k);
  require_cuda("q", q);
  rotate(q, activations(q, q), activations(k, k), cos, sin,
         {"multi_axis_rope_pair_cuda_", half_split, conjugate, direction_text, reason_text});
}

STABLE_TORCH_LIBRARY_IMPL(ropecheck, CUDA, library) {
  library.impl("multi_axis_rope_cuda", TORCH_BOX(&multi_axis_rope));
  library.impl("multi_axis_rope_pair_cuda", TORCH_BOX(&multi_axis_rope_pair));
  library.impl("multi_axis_rope_pair_cuda_", TORCH_BOX(&multi_axis_rope_pair_in_place));
}

}  // namespace
}  // namespace ropecheck

// Every later launch is reported to the callback, of whichever thread; null turns the reports off.
ROPECHECK_EXPORT void ropecheck_set_launch_callback(ropecheck::LaunchCallback callback) {
  ropecheck::launch_callback.store(callback, std::memory_order_release);
}
