// The arithmetic of the rotation, for the device and for the host alike.
//
// For a lane (x0, x1) with cosine c and sine s, all in fp32:
//
//     y0 = RN(RN(x0 * c) - RN(x1 * s))        y1 = RN(RN(x1 * c) + RN(x0 * s))
//
// and one more rounding to the dtype of x. RN is to nearest even, products are never contracted into an fma, and
// subnormals are kept. Nothing of the CUDA toolkit is included, so that a host compiler can build this header alone
// (with -ffp-contract=off) and its results can be compared bit by bit on a machine without a GPU.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define ROPECHECK_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ROPECHECK_HOST_DEVICE inline
#endif

namespace ropecheck {

// The widest access of a thread: 16 bytes, held as four words.
constexpr int kVectorBytes = 16;
constexpr int kVectorWords = 4;

struct alignas(kVectorBytes) Vector {
  std::uint32_t words[kVectorWords];
};

// Which two channels form lane l of R / 2: (2 l, 2 l + 1), or (l, l + R / 2).
enum class Pairing { kAdjacent, kHalfSplit };

ROPECHECK_HOST_DEVICE std::uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

ROPECHECK_HOST_DEVICE float float_of(std::uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

ROPECHECK_HOST_DEVICE float product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

ROPECHECK_HOST_DEVICE float sum(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

ROPECHECK_HOST_DEVICE float difference(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fsub_rn(a, b);
#else
  return a - b;
#endif
}

// Rotates one lane in place. Negating the sine negates its products exactly, so the conjugate negates those: a sine
// negated beforehand would have to arrive before a thread asks for x.
ROPECHECK_HOST_DEVICE void rotate_lane(float& first, float& second, float cosine, float sine, bool conjugate) {
  const float second_turned = product(second, sine);
  const float first_turned = product(first, sine);
  const float rotated_first = difference(product(first, cosine), conjugate ? -second_turned : second_turned);
  const float rotated_second = sum(product(second, cosine), conjugate ? -first_turned : first_turned);
  first = rotated_first;
  second = rotated_second;
}

// The dtypes. Widening is exact; narrowing rounds to nearest even, and makes any NaN of a NaN. The device has an
// instruction for each; the host's integer arithmetic gives the same bits.

struct Float32 {
  using Bits = std::uint32_t;
  static ROPECHECK_HOST_DEVICE float widen(Bits bits) { return float_of(bits); }
  static ROPECHECK_HOST_DEVICE Bits narrow(float value) { return bits_of(value); }
};

struct BFloat16 {
  using Bits = std::uint16_t;

  static ROPECHECK_HOST_DEVICE float widen(Bits bits) { return float_of(static_cast<std::uint32_t>(bits) << 16); }

  static ROPECHECK_HOST_DEVICE Bits narrow(float value) {
#ifdef __CUDA_ARCH__
    Bits result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
#else
    const std::uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
      return static_cast<Bits>(bits >> 16 | 0x0040u);
    }
    // Half of the last place, less one where that place is even: a tie then stays below the carry.
    return static_cast<Bits>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
#endif
  }

  static ROPECHECK_HOST_DEVICE std::uint32_t narrow_two(float low, float high) {
#ifdef __CUDA_ARCH__
    std::uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return static_cast<std::uint32_t>(narrow(low)) | static_cast<std::uint32_t>(narrow(high)) << 16;
#endif
  }
};

struct Float16 {
  using Bits = std::uint16_t;

  static ROPECHECK_HOST_DEVICE float widen(Bits bits) {
#ifdef __CUDA_ARCH__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    const std::uint32_t exponent = bits >> 10 & 0x1fu;
    const std::uint32_t fraction = bits & 0x3ffu;
    if (exponent == 0) {
      return float_of(sign | bits_of(static_cast<float>(fraction) * kSmallest));
    }
    const std::uint32_t widened_exponent = exponent == 0x1fu ? 0xffu : exponent + kExponentShift;
    return float_of(sign | widened_exponent << 23 | fraction << 13);
#endif
  }

  static ROPECHECK_HOST_DEVICE Bits narrow(float value) {
#ifdef __CUDA_ARCH__
    Bits result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
#else
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t sign = bits >> 16 & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const std::uint32_t exponent = magnitude >> 23;
    if (magnitude > 0x7f800000u) {
      return static_cast<Bits>(sign | 0x7e00u);
    }
    if (magnitude >= bits_of(kOverflow)) {
      return static_cast<Bits>(sign | 0x7c00u);
    }
    if (exponent > kExponentShift) {
      const std::uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
      return static_cast<Bits>(sign | (rounded - (kExponentShift << 23)) >> 13);
    }
    // A subnormal is a count of 2^-24, and value = significand * 2^(exponent - 150).
    const std::uint32_t shift = 126u - exponent;
    if (shift > 24u) {
      return static_cast<Bits>(sign);
    }
    const std::uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
    const std::uint32_t remainder = significand & ((1u << shift) - 1u);
    const std::uint32_t half = 1u << (shift - 1u);
    std::uint32_t count = significand >> shift;
    count += remainder > half || (remainder == half && (count & 1u));
    return static_cast<Bits>(sign | count);
#endif
  }

  static ROPECHECK_HOST_DEVICE std::uint32_t narrow_two(float low, float high) {
#ifdef __CUDA_ARCH__
    std::uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return static_cast<std::uint32_t>(narrow(low)) | static_cast<std::uint32_t>(narrow(high)) << 16;
#endif
  }

 private:
  static constexpr float kSmallest = 0x1p-24f;
  // From 65520 on, half-way between the largest finite value and its successor, everything rounds to infinity.
  static constexpr float kOverflow = 65520.0f;
  // The difference of the two exponent biases, 127 - 15.
  static constexpr std::uint32_t kExponentShift = 112u;
};

// Channels in one vector.
template <typename Element>
constexpr int kChannels = kVectorBytes / static_cast<int>(sizeof(typename Element::Bits));

// Lanes in the one vector (adjacent) or the two vectors (half-split) that a thread rotates at a time.
template <typename Element, Pairing pairing>
constexpr int kLanes = pairing == Pairing::kAdjacent ? kChannels<Element> / 2 : kChannels<Element>;

template <typename Element>
ROPECHECK_HOST_DEVICE void widen(const Vector& vector, float (&values)[kChannels<Element>]) {
  using Bits = typename Element::Bits;
  constexpr int per_word = kChannels<Element> / kVectorWords;
  for (int i = 0; i < kChannels<Element>; ++i) {
    values[i] = Element::widen(static_cast<Bits>(vector.words[i / per_word] >> i % per_word * 16));
  }
}

template <typename Element>
ROPECHECK_HOST_DEVICE Vector narrow(const float (&values)[kChannels<Element>]) {
  Vector vector;
  for (int i = 0; i < kVectorWords; ++i) {
    if constexpr (sizeof(typename Element::Bits) == sizeof(std::uint32_t)) {
      vector.words[i] = Element::narrow(values[i]);
    } else {
      vector.words[i] = Element::narrow_two(values[2 * i], values[2 * i + 1]);
    }
  }
  return vector;
}

// Rotates the lanes of one group in place: one vector of neighbours, or a vector of first and one of second members.
template <typename Element, Pairing pairing>
ROPECHECK_HOST_DEVICE void rotate_group(Vector (&group)[pairing == Pairing::kAdjacent ? 1 : 2],
                                        const float (&cosine)[kLanes<Element, pairing>],
                                        const float (&sine)[kLanes<Element, pairing>], bool conjugate) {
  float first[kChannels<Element>];
  widen<Element>(group[0], first);
  if constexpr (pairing == Pairing::kAdjacent) {
    for (int lane = 0; lane < kLanes<Element, pairing>; ++lane) {
      rotate_lane(first[2 * lane], first[2 * lane + 1], cosine[lane], sine[lane], conjugate);
    }
  } else {
    float second[kChannels<Element>];
    widen<Element>(group[1], second);
    for (int lane = 0; lane < kLanes<Element, pairing>; ++lane) {
      rotate_lane(first[lane], second[lane], cosine[lane], sine[lane], conjugate);
    }
    group[1] = narrow<Element>(second);
  }
  group[0] = narrow<Element>(first);
}

}  // namespace ropecheck
