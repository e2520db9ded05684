// CUDA's limits, and what every choice of a launch configuration asks. Neither torch nor the CUDA toolkit is needed.
#pragma once

#include <cstdint>
#include <limits>

#include "arguments.h"

namespace ropecheck {

// Of the grid's first dimension, the only one of three beyond 65,535, and of a block's third.
constexpr std::int64_t kMaxBlocks = std::numeric_limits<std::int32_t>::max();
constexpr int kMaxBlockDepth = 64;

template <typename Integer>
constexpr Integer ceiling(Integer dividend, Integer divisor) {
  return (dividend + divisor - 1) / divisor;
}

inline bool is_multiple(const void* pointer, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

constexpr int bytes_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

}  // namespace ropecheck
