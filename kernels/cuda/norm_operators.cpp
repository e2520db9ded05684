// The operators of the normalised rotation that Python defines, implemented for CUDA tensors.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "current_stream.h"
#include "launch.h"
#include "norm_launch.h"
#include "norm_operands.h"
#include "operator_call.h"

namespace ropecheck {
namespace {

constexpr const char* kForward = "qk_norm_rope_gate_cuda";
constexpr const char* kBackward = "qk_norm_rope_gate_backward_cuda";

bool is_empty(const NormSizes& sizes) { return sizes.tokens == 0 || sizes.q_heads + sizes.k_heads == 0; }

Integers integers(const Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(tensor.dim() - 1), dtype_code(tensor) == aoti_torch_dtype_int64()};
}

Integers integers(const OptionalTensor& tensor) {
  return tensor.has_value() ? integers(*tensor) : Integers{nullptr, 0, false};
}

NormHeads norm_heads(const Tensor& x, const Tensor& weight, std::int64_t heads, std::int64_t pitch) {
  return {x.data_ptr(), x.stride(0), weight.data_ptr(), static_cast<int>(heads), static_cast<int>(pitch)};
}

NormContext norm_context(const Tensor& q_gate, const Tensor& k, const Tensor& q_weight, const Tensor& k_weight,
                         const Tensor& table, const Tensor& positions, const OptionalTensor& axis_map,
                         const OptionalTensor& slots, const NormSizes& sizes, double eps, double weight_offset,
                         bool gate, bool contracted) {
  NormContext context;
  context.q = norm_heads(q_gate, q_weight, sizes.q_heads, (gate ? 2 : 1) * sizes.head_dim);
  context.k = norm_heads(k, k_weight, sizes.k_heads, sizes.head_dim);
  context.table = table.data_ptr();
  context.table_stride = table.stride(0);
  context.table_rows = table.size(0);
  context.table_dtype = activation_dtype("cos_sin_cache", table);
  context.positions = integers(positions);
  context.position_row_stride = positions.dim() == 2 ? positions.stride(0) : 0;
  context.axis_map = integers(axis_map);
  context.slots = integers(slots);
  context.tokens = sizes.tokens;
  context.head_dim = static_cast<int>(sizes.head_dim);
  context.lanes = static_cast<int>(sizes.lanes);
  context.eps = static_cast<float>(eps);
  context.weight_offset = static_cast<float>(weight_offset);
  context.weight_is_float32 = dtype_code(q_weight) == aoti_torch_dtype_float32();
  context.contracted = contracted;
  return context;
}

std::tuple<Tensor, Tensor, Tensor> norm_rope_gate(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight,
                                                  Tensor table, Tensor positions, OptionalTensor axis_map,
                                                  OptionalTensor slots, double eps, double weight_offset, bool gate,
                                                  bool round_norm, bool contracted, StringHandle reason) {
  const Text reason_text(reason);
  const NormSizes sizes =
      check_norm_operands(q_gate, k, q_weight, k_weight, table, positions, axis_map, slots, gate);
  require_cuda("q_gate", q_gate);
  const std::int32_t code = dtype_code(q_gate);
  const std::int64_t q_width = sizes.q_heads * sizes.head_dim;
  const Tensor q = empty_contiguous({sizes.tokens, q_width}, code, q_gate);
  const Tensor normed_k = empty_contiguous({sizes.tokens, sizes.k_heads * sizes.head_dim}, code, q_gate);
  const Tensor gates = empty_contiguous({sizes.tokens, gate ? q_width : 0}, code, q_gate);
  if (!is_empty(sizes)) {
    NormArguments arguments;
    arguments.context = norm_context(q_gate, k, q_weight, k_weight, table, positions, axis_map, slots, sizes, eps,
                                     weight_offset, gate, contracted);
    arguments.q = {q.data_ptr(), gate ? gates.data_ptr() : nullptr};
    arguments.k = {normed_k.data_ptr(), nullptr};
    arguments.round_norm = round_norm;
    const Dtype dtype = activation_dtype("q_gate", q_gate);
    const NormConfiguration configuration = configuration_for(arguments, dtype);
    const std::int32_t device = q_gate.get_device_index();
    {
      const CurrentDevice guard(device);
      launch(arguments, configuration, dtype, current_stream(device));
    }
    report_launch(kForward, "forward", device, reason_text, [&] { return description(configuration); });
  }
  return {q, normed_k, gates};
}

IncomingGradient incoming_gradient(const Tensor& gradient) {
  return {gradient.data_ptr(), gradient.stride(0), gradient.stride(1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_rope_gate_backward(
    Tensor q_gradient, Tensor k_gradient, Tensor gate_gradient, Tensor q_gate, Tensor k, Tensor q_weight,
    Tensor k_weight, Tensor table, Tensor positions, OptionalTensor axis_map, OptionalTensor slots, double eps,
    double weight_offset, bool gate, bool contracted, bool weight_gradients, StringHandle reason) {
  const Text reason_text(reason);
  const NormSizes sizes =
      check_norm_operands(q_gate, k, q_weight, k_weight, table, positions, axis_map, slots, gate);
  const std::int64_t q_width = sizes.q_heads * sizes.head_dim;
  check_incoming("q_gradient", q_gradient, q_width, q_gate);
  check_incoming("k_gradient", k_gradient, sizes.k_heads * sizes.head_dim, q_gate);
  check_incoming("gate_gradient", gate_gradient, gate ? q_width : 0, q_gate);
  require_cuda("q_gate", q_gate);

  const std::int32_t code = dtype_code(q_gate);
  const std::int64_t weight_size = weight_gradients ? sizes.head_dim : 0;
  const Tensor q_result = empty_contiguous({sizes.tokens, q_gate.size(1)}, code, q_gate);
  const Tensor k_result = empty_contiguous({sizes.tokens, k.size(1)}, code, q_gate);
  const Tensor q_weight_result = empty_contiguous({weight_size}, dtype_code(q_weight), q_gate);
  const Tensor k_weight_result = empty_contiguous({weight_size}, dtype_code(q_weight), q_gate);

  NormBackwardArguments arguments;
  arguments.context = norm_context(q_gate, k, q_weight, k_weight, table, positions, axis_map, slots, sizes, eps,
                                   weight_offset, gate, contracted);
  arguments.q = {incoming_gradient(q_gradient), gate ? incoming_gradient(gate_gradient) : IncomingGradient{},
                 q_result.data_ptr(), nullptr};
  arguments.k = {incoming_gradient(k_gradient), IncomingGradient{}, k_result.data_ptr(), nullptr};
  const Dtype dtype = activation_dtype("q_gate", q_gate);
  const NormBackwardConfiguration configuration = configuration_for(arguments, dtype);
  const std::int32_t device = q_gate.get_device_index();
  {
    const CurrentDevice guard(device);
    void* const stream = current_stream(device);
    // The kernel for the sums runs where there is no row too: the gradients are then zero.
    const std::int64_t chunks = weight_gradients ? configuration.q.count + configuration.k.count : 0;
    const Tensor sums = empty_contiguous({chunks, sizes.head_dim}, aoti_torch_dtype_float32(), q_gate);
    if (weight_gradients) {
      arguments.q.sums = static_cast<float*>(sums.data_ptr());
      arguments.k.sums = arguments.q.sums + configuration.q.count * sizes.head_dim;
    }
    if (!is_empty(sizes)) {
      launch(arguments, configuration, dtype, stream);
    }
    if (weight_gradients) {
      launch_sums({arguments.q.sums, q_weight_result.data_ptr(), configuration.q.count},
                  {arguments.k.sums, k_weight_result.data_ptr(), configuration.k.count},
                  static_cast<int>(sizes.head_dim), activation_dtype("q_weight", q_weight), stream);
    }
  }
  if (!is_empty(sizes)) {
    report_launch(kBackward, "backward", device, reason_text, [&] { return description(configuration); });
  }
  return {q_result, k_result, q_weight_result, k_weight_result};
}

STABLE_TORCH_LIBRARY_IMPL(ropecheck, CUDA, library) {
  library.impl(kForward, TORCH_BOX(&norm_rope_gate));
  library.impl(kBackward, TORCH_BOX(&norm_rope_gate_backward));
}

}  // namespace
}  // namespace ropecheck
