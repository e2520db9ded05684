// What the operands of a normalised rotation must be, asked once more before memory is touched: an operator can be
// called without the public Python functions. The sentences are those of kernels/norm_operands.py.
#pragma once

#include <optional>

#include "operands.h"

namespace ropecheck {

using OptionalTensor = std::optional<Tensor>;

struct NormSizes {
  std::int64_t tokens;
  std::int64_t q_heads;
  std::int64_t k_heads;
  std::int64_t head_dim;
  std::int64_t lanes;
};

inline std::string text(std::int64_t value) { return std::to_string(value); }

inline void require_integers(const std::string& name, const Tensor& tensor) {
  const std::int32_t code = dtype_code(tensor);
  require(code == aoti_torch_dtype_int32() || code == aoti_torch_dtype_int64(),
          name + ": expected int32 or int64, got " + dtype_name(tensor));
}

inline void require_device(const std::string& name, const Tensor& tensor, const Tensor& q_gate) {
  require(device_name(tensor) == device_name(q_gate), name + ": expected the device of q_gate, " +
                                                          device_name(q_gate) + ", got " + device_name(tensor));
}

// The head dimension.
inline std::int64_t check_weights(const Tensor& q_gate, const Tensor& q_weight, const Tensor& k_weight) {
  const std::pair<const char*, const Tensor*> weights[] = {{"q_weight", &q_weight}, {"k_weight", &k_weight}};
  for (const auto& [name, weight] : weights) {
    require(weight->dim() == 1, std::string(name) + ": expected one dimension [D], got shape " + shape_text(*weight));
    require(dtype_code(*weight) == dtype_code(q_gate) || dtype_code(*weight) == aoti_torch_dtype_float32(),
            std::string(name) + ": expected the dtype of q_gate, " + dtype_name(q_gate) + ", or float32, got " +
                dtype_name(*weight));
    require(weight->size(0) <= 1 || weight->stride(0) == 1,
            std::string(name) + ": expected elements next to one another, got stride " + text(weight->stride(0)));
    require_device(name, *weight, q_gate);
  }
  const std::int64_t head_dim = q_weight.size(0);
  require(head_dim >= 2 && head_dim <= kMaxHeadDim,
          "q_weight: expected a head dimension from 2 to " + text(kMaxHeadDim) + ", got " + text(head_dim));
  require(k_weight.size(0) == head_dim, "k_weight: expected " + text(head_dim) +
                                            " channels, as many as q_weight has, got " + text(k_weight.size(0)));
  require(dtype_code(k_weight) == dtype_code(q_weight), "k_weight: expected the dtype of q_weight, " +
                                                            dtype_name(q_weight) + ", got " + dtype_name(k_weight));
  return head_dim;
}

// The number of heads of x [T, heads * parts * D].
inline std::int64_t check_rows(const std::string& name, const Tensor& x, std::int64_t head_dim, int parts) {
  require(x.dim() == 2, name + ": expected two dimensions [T, channels of all heads], got shape " + shape_text(x));
  activation_dtype(name, x);
  require(x.size(1) % (parts * head_dim) == 0, name + ": expected a multiple of " + text(parts * head_dim) +
                                                   " channels " + (parts == 2 ? "of a query and a gate" : "of a head") +
                                                   ", got " + text(x.size(1)));
  require(x.size(1) <= 1 || x.stride(1) == 1,
          name + ": expected channels next to one another, got channel stride " + text(x.stride(1)));
  const std::int64_t heads = x.size(1) / (parts * head_dim);
  require(heads <= kMaxHeads, name + ": expected at most " + text(kMaxHeads) + " heads, got " + text(heads));
  return heads;
}

inline void check_table(const Tensor& table, std::int64_t head_dim) {
  const std::string name = "cos_sin_cache";
  require(table.dim() == 2, name + ": expected two dimensions [N, R], got shape " + shape_text(table));
  activation_dtype(name, table);
  const std::int64_t columns = table.size(1);
  require(columns >= 2 && columns % 2 == 0,
          name + ": expected an even number of columns R, at least 2, got " + text(columns));
  require(columns <= head_dim, name + ": expected at most " + text(head_dim) + " columns, the head dimension, got " +
                                   text(columns));
  require(table.stride(1) == 1,
          name + ": expected columns next to one another, got column stride " + text(table.stride(1)));
}

inline void check_positions(const Tensor& positions, const OptionalTensor& axis_map, const NormSizes& sizes) {
  require_integers("positions", positions);
  require(positions.dim() == 1 || (positions.dim() == 2 && positions.size(0) == 3),
          "positions: expected [T] or [3, T], got shape " + shape_text(positions));
  const std::int64_t count = positions.size(positions.dim() - 1);
  require(count == sizes.tokens,
          "positions: expected " + text(sizes.tokens) + ", one for each token, got " + text(count));
  if (!axis_map.has_value()) {
    require(positions.dim() == 1, "axis_map: expected one, since positions has three rows, got None");
    return;
  }
  require(positions.dim() == 2, "axis_map: expected None, since positions has one row, got a tensor");
  require_integers("axis_map", *axis_map);
  require(axis_map->dim() == 1 && axis_map->size(0) == sizes.lanes,
          "axis_map: expected [" + text(sizes.lanes) + "], one for each lane, got shape " + shape_text(*axis_map));
}

inline NormSizes check_norm_operands(const Tensor& q_gate, const Tensor& k, const Tensor& q_weight,
                                     const Tensor& k_weight, const Tensor& table, const Tensor& positions,
                                     const OptionalTensor& axis_map, const OptionalTensor& slots, bool gate) {
  activation_dtype("q_gate", q_gate);
  const std::int64_t head_dim = check_weights(q_gate, q_weight, k_weight);
  const std::int64_t q_heads = check_rows("q_gate", q_gate, head_dim, gate ? 2 : 1);
  const std::int64_t k_heads = check_rows("k", k, head_dim, 1);
  require(dtype_code(k) == dtype_code(q_gate),
          "k: expected the dtype of q_gate, " + dtype_name(q_gate) + ", got " + dtype_name(k));
  check_table(table, head_dim);
  const NormSizes sizes{q_gate.size(0), q_heads, k_heads, head_dim, table.size(1) / 2};
  require(k.size(0) == sizes.tokens,
          "k: expected " + text(sizes.tokens) + " tokens, as many as q_gate has, got " + text(k.size(0)));
  check_positions(positions, axis_map, sizes);
  require_device("k", k, q_gate);
  require_device("cos_sin_cache", table, q_gate);
  require_device("positions", positions, q_gate);
  if (axis_map.has_value()) {
    require_device("axis_map", *axis_map, q_gate);
  }
  if (slots.has_value()) {
    require_integers("slots", *slots);
    require(slots->dim() == 1 && slots->size(0) == sizes.tokens,
            "slots: expected [" + text(sizes.tokens) + "], one for each token, got shape " + shape_text(*slots));
    require_device("slots", *slots, q_gate);
  }
  return sizes;
}

inline void check_incoming(const std::string& name, const Tensor& gradient, std::int64_t width, const Tensor& q_gate) {
  require(gradient.dim() == 2 && gradient.size(0) == q_gate.size(0) && gradient.size(1) == width,
          name + ": expected [" + text(q_gate.size(0)) + ", " + text(width) + "], got shape " + shape_text(gradient));
  require(dtype_code(gradient) == dtype_code(q_gate),
          name + ": expected the dtype of q_gate, " + dtype_name(q_gate) + ", got " + dtype_name(gradient));
  require_device(name, gradient, q_gate);
}

}  // namespace ropecheck
