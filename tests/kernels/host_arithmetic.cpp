// The arithmetic of the CUDA kernels, rotation.h, as functions that Python can call on plain memory.
#include <cstdint>

#include "rotation.h"

using namespace ropecheck;

namespace {

// `values` holds for each group its vectors one after another; `cosine` and `sine` hold a group's lanes.
template <typename Element, Pairing pairing>
void rotate_groups(void* values, const float* cosine, const float* sine, std::int64_t groups, bool conjugate) {
  constexpr int vectors = pairing == Pairing::kAdjacent ? 1 : 2;
  constexpr int lanes = kLanes<Element, pairing>;
  auto* const group = static_cast<Vector(*)[vectors]>(values);
  for (std::int64_t i = 0; i < groups; ++i) {
    const auto& group_cosine = *reinterpret_cast<const float(*)[lanes]>(cosine + i * lanes);
    const auto& group_sine = *reinterpret_cast<const float(*)[lanes]>(sine + i * lanes);
    rotate_group<Element, pairing>(group[i], group_cosine, group_sine, conjugate);
  }
}

template <typename Element>
void widen_all(const std::uint16_t* narrow, float* wide, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    wide[i] = Element::widen(narrow[i]);
  }
}

template <typename Element>
void narrow_all(const float* wide, std::uint16_t* narrow, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    narrow[i] = Element::narrow(wide[i]);
  }
}

}  // namespace

#define ROTATION(name, Element, pairing)                                                                        \
  extern "C" void name(void* values, const float* cosine, const float* sine, std::int64_t groups, bool conjugate) { \
    rotate_groups<Element, pairing>(values, cosine, sine, groups, conjugate);                                   \
  }

ROTATION(rotate_float32_adjacent, Float32, Pairing::kAdjacent)
ROTATION(rotate_float32_half_split, Float32, Pairing::kHalfSplit)
ROTATION(rotate_float16_adjacent, Float16, Pairing::kAdjacent)
ROTATION(rotate_float16_half_split, Float16, Pairing::kHalfSplit)
ROTATION(rotate_bfloat16_adjacent, BFloat16, Pairing::kAdjacent)
ROTATION(rotate_bfloat16_half_split, BFloat16, Pairing::kHalfSplit)

#define CONVERSIONS(dtype, Element)                                                              \
  extern "C" void widen_##dtype(const std::uint16_t* narrow, float* wide, std::int64_t count) {  \
    widen_all<Element>(narrow, wide, count);                                                     \
  }                                                                                              \
  extern "C" void narrow_##dtype(const float* wide, std::uint16_t* narrow, std::int64_t count) { \
    narrow_all<Element>(wide, narrow, count);                                                    \
  }

CONVERSIONS(float16, Float16)
CONVERSIONS(bfloat16, BFloat16)
