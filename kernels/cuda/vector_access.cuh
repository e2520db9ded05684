// Moving one vector of channels between memory and registers, as integers: bits are never interpreted here.
//
// kWide says that the launch has proved every access to be a full, aligned vector of neighbours. Otherwise each thread
// sees for itself, and goes element by element where that does not hold.
#pragma once

#include "rotation.h"

namespace ropecheck {

template <int kBytes>
__device__ __forceinline__ bool is_aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % kBytes == 0;
}

__device__ __forceinline__ Vector load_whole(const void* source) {
  const uint4 read = *static_cast<const uint4*>(source);
  return {{read.x, read.y, read.z, read.w}};
}

__device__ __forceinline__ void store_whole(void* destination, const Vector& vector) {
  *static_cast<uint4*>(destination) = make_uint4(vector.words[0], vector.words[1], vector.words[2], vector.words[3]);
}

// Reads `count` channels, `stride` elements apart; the others are zero.
template <typename Bits, bool kWide>
__device__ __forceinline__ Vector load_vector(const Bits* source, std::int64_t stride, int count) {
  if constexpr (kWide) {
    return load_whole(source);
  } else {
    constexpr int channels = kVectorBytes / sizeof(Bits);
    constexpr int per_word = channels / kVectorWords;
    if (count == channels && stride == 1 && is_aligned<kVectorBytes>(source)) {
      return load_whole(source);
    }
    Vector vector = {};
#pragma unroll
    for (int i = 0; i < channels; ++i) {
      if (i < count) {
        vector.words[i / per_word] |= static_cast<std::uint32_t>(source[i * stride]) << i % per_word * 16;
      }
    }
    return vector;
  }
}

template <typename Bits, bool kWide>
__device__ __forceinline__ void store_vector(Bits* destination, std::int64_t stride, int count, const Vector& vector) {
  if constexpr (kWide) {
    store_whole(destination, vector);
  } else {
    constexpr int channels = kVectorBytes / sizeof(Bits);
    constexpr int per_word = channels / kVectorWords;
    if (count == channels && stride == 1 && is_aligned<kVectorBytes>(destination)) {
      store_whole(destination, vector);
      return;
    }
#pragma unroll
    for (int i = 0; i < channels; ++i) {
      if (i < count) {
        destination[i * stride] = static_cast<Bits>(vector.words[i / per_word] >> i % per_word * 16);
      }
    }
  }
}

// The widest access that the table values of one group allow: of two values, 8 bytes.
template <int kCount>
constexpr int kTableBytes = kCount * static_cast<int>(sizeof(float)) < kVectorBytes
                                ? kCount * static_cast<int>(sizeof(float))
                                : kVectorBytes;

template <int kCount>
__device__ __forceinline__ void load_whole(const float* source, float (&values)[kCount]) {
  if constexpr (kTableBytes<kCount> == kVectorBytes) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 read = __ldg(reinterpret_cast<const float4*>(source + i));
      values[i] = read.x;
      values[i + 1] = read.y;
      values[i + 2] = read.z;
      values[i + 3] = read.w;
    }
  } else {
    static_assert(kCount == 2, "a group has two lanes, or a multiple of four");
    const float2 read = __ldg(reinterpret_cast<const float2*>(source));
    values[0] = read.x;
    values[1] = read.y;
  }
}

// Reads `count` table values, `stride` elements apart; the others are zero.
template <int kCount, bool kWide>
__device__ __forceinline__ void load_table(const float* source, std::int64_t stride, int count,
                                           float (&values)[kCount]) {
  if constexpr (kWide) {
    load_whole(source, values);
  } else {
    if (count == kCount && stride == 1 && is_aligned<kTableBytes<kCount>>(source)) {
      load_whole(source, values);
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = i < count ? __ldg(source + i * stride) : 0.0f;
    }
  }
}

}  // namespace ropecheck
