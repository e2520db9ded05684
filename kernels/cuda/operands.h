// What the operands of a rotation must be, asked once more before memory is touched: an operator can be called
// without the public Python functions. The sentences are those of kernels/operands.py.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "arguments.h"

namespace ropecheck {

using torch::stable::Tensor;

constexpr std::int64_t kMaxHeadDim = 256;
constexpr std::int64_t kMaxHeads = 1 << 30;

// pybind11 turns std::invalid_argument into ValueError.
inline void require(bool condition, const std::string& sentence) {
  if (!condition) {
    throw std::invalid_argument(sentence);
  }
}

inline std::int32_t dtype_code(const Tensor& tensor) {
  std::int32_t code;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  return code;
}

inline std::string dtype_name(const Tensor& tensor) {
  const std::int32_t code = dtype_code(tensor);
  if (code == aoti_torch_dtype_float32()) return "torch.float32";
  if (code == aoti_torch_dtype_float16()) return "torch.float16";
  if (code == aoti_torch_dtype_bfloat16()) return "torch.bfloat16";
  if (code == aoti_torch_dtype_float64()) return "torch.float64";
  return "another dtype";
}

inline std::string device_name(const Tensor& tensor) {
  return tensor.is_cuda() ? "cuda:" + std::to_string(tensor.get_device_index())
                          : (tensor.is_cpu() ? "cpu" : "another device");
}

inline std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i ? ", " : "") + std::to_string(tensor.size(i));
  }
  return text + "]";
}

inline bool same_shape(const Tensor& a, const Tensor& b) {
  bool same = a.dim() == b.dim();
  for (std::int64_t i = 0; same && i < a.dim(); ++i) {
    same = a.size(i) == b.size(i);
  }
  return same;
}

inline Dtype activation_dtype(const std::string& name, const Tensor& x) {
  const std::int32_t code = dtype_code(x);
  if (code == aoti_torch_dtype_float32()) return Dtype::kFloat32;
  if (code == aoti_torch_dtype_float16()) return Dtype::kFloat16;
  if (code == aoti_torch_dtype_bfloat16()) return Dtype::kBFloat16;
  throw std::invalid_argument(name + ": expected float32, float16 or bfloat16, got " + dtype_name(x));
}

// One tensor and its tables; `name` is that of the tensor's argument.
inline void check_operands(const std::string& name, const Tensor& x, const Tensor& cos, const Tensor& sin) {
  require(x.dim() == 4, name + ": expected 4 dimensions [B, S, H, D], got shape " + shape_text(x));
  activation_dtype(name, x);
  for (const Tensor* table : {&cos, &sin}) {
    const std::string table_name = table == &cos ? "cos" : "sin";
    require(table->dim() == 2 || table->dim() == 3,
            table_name + ": expected [S, R/2] (2 dimensions) or [B, S, R/2] (3), got shape " + shape_text(*table));
    require(dtype_code(*table) == aoti_torch_dtype_float32(),
            table_name + ": expected float32, got " + dtype_name(*table));
    require(device_name(*table) == device_name(x), table_name + ": expected the device of " + name + ", " +
                                                       device_name(x) + ", got " + device_name(*table));
  }
  require(same_shape(cos, sin), "sin: expected the shape of cos, " + shape_text(cos) + ", got " + shape_text(sin));
  const std::int64_t positions = cos.size(cos.dim() - 2);
  const std::int64_t lanes = cos.size(cos.dim() - 1);
  require(positions == x.size(1), "cos: expected " + std::to_string(x.size(1)) + " positions, as many as " + name +
                                      " has tokens, got " + std::to_string(positions));
  require(cos.dim() == 2 || cos.size(0) == x.size(0), "cos: expected " + std::to_string(x.size(0)) +
                                                          " samples, as many as " + name + " has, got " +
                                                          std::to_string(cos.size(0)));
  const std::int64_t head_dim = x.size(3);
  require(head_dim <= kMaxHeadDim, name + ": expected a head dimension of at most " + std::to_string(kMaxHeadDim) +
                                       ", got " + std::to_string(head_dim));
  require(lanes > 0, "cos: expected a last dimension of at least one lane, got shape " + shape_text(cos));
  require(2 * lanes <= head_dim, "cos: expected at most " + std::to_string(head_dim / 2) +
                                     " lanes for the head dimension " + std::to_string(head_dim) + " of " + name +
                                     ", got " + std::to_string(lanes));
  require(x.size(2) <= kMaxHeads, name + ": expected at most " + std::to_string(kMaxHeads) + " heads, got " +
                                      std::to_string(x.size(2)));
}

// What k must share with q.
inline void check_pair(const Tensor& q, const Tensor& k) {
  require(k.dim() == 4, "k: expected 4 dimensions [B, S, H, D], got shape " + shape_text(k));
  require(dtype_code(k) == dtype_code(q), "k: expected the dtype of q, " + dtype_name(q) + ", got " + dtype_name(k));
  require(device_name(k) == device_name(q),
          "k: expected the device of q, " + device_name(q) + ", got " + device_name(k));
  require(k.size(3) <= kMaxHeadDim, "k: expected a head dimension of at most " + std::to_string(kMaxHeadDim) +
                                        ", got " + std::to_string(k.size(3)));
  const std::pair<int, const char*> shared[] = {{0, "samples"}, {1, "tokens"}, {3, "channels per head"}};
  for (const auto& [dimension, meaning] : shared) {
    require(k.size(dimension) == q.size(dimension), "k: expected " + std::to_string(q.size(dimension)) + " " + meaning +
                                                        ", as many as q has, got " +
                                                        std::to_string(k.size(dimension)));
  }
  require(k.size(2) <= kMaxHeads,
          "k: expected at most " + std::to_string(kMaxHeads) + " heads, got " + std::to_string(k.size(2)));
}

// Asked last: tensors of another device are refused for everything else as well, without a GPU.
inline void require_cuda(const std::string& name, const Tensor& x) {
  require(x.is_cuda(), name + ": expected a cuda tensor, got one on " + device_name(x));
}

// What sizes and strides show at a glance; the public Python function asks for every other overlap too.
inline void require_own_memory(const std::string& name, const Tensor& x) {
  for (std::int64_t i = 0; i < x.dim(); ++i) {
    require(x.size(i) <= 1 || x.stride(i) != 0, name + ": elements that share memory are not rotated in place, got " +
                                                    "stride 0 in dimension " + std::to_string(i));
  }
}

}  // namespace ropecheck
