// The arithmetic of the normalised rotation, for the device and for the host alike.
//
// All of it is fp32, each operation rounded to nearest even, and no product is contracted into an fma but where the
// call asks for one. Like rotation.h, whose operations and dtypes it uses, this builds with a host compiler alone
// (-ffp-contract=off), so that its results can be compared bit by bit on a machine without a GPU.
#pragma once

#include "rotation.h"

#ifndef __CUDA_ARCH__
#include <cmath>
#endif

namespace ropecheck {

// Neighbouring channels of one head that a thread holds: one vector of a 16-bit dtype, two of fp32.
constexpr int kThreadChannels = 8;

template <typename Element>
struct Pack {
  static constexpr int kVectors = kThreadChannels / kChannels<Element>;
  Vector vectors[kVectors];
};

template <typename Element>
ROPECHECK_HOST_DEVICE void widen(const Pack<Element>& pack, float (&values)[kThreadChannels]) {
  constexpr int per_word = kChannels<Element> / kVectorWords;
  for (int i = 0; i < kThreadChannels; ++i) {
    const std::uint32_t word = pack.vectors[i / kChannels<Element>].words[i % kChannels<Element> / per_word];
    values[i] = Element::widen(static_cast<typename Element::Bits>(word >> i % per_word * 16));
  }
}

template <typename Element>
ROPECHECK_HOST_DEVICE Pack<Element> pack_of(const float (&values)[kThreadChannels]) {
  Pack<Element> pack;
  for (int i = 0; i < kThreadChannels / kChannels<Element> * kVectorWords; ++i) {
    std::uint32_t& word = pack.vectors[i / kVectorWords].words[i % kVectorWords];
    if constexpr (sizeof(typename Element::Bits) == sizeof(std::uint32_t)) {
      word = Element::narrow(values[i]);
    } else {
      word = Element::narrow_two(values[2 * i], values[2 * i + 1]);
    }
  }
  return pack;
}

ROPECHECK_HOST_DEVICE float quotient(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

ROPECHECK_HOST_DEVICE float reciprocal(float a) {
#ifdef __CUDA_ARCH__
  return __frcp_rn(a);
#else
  return 1.0f / a;
#endif
}

ROPECHECK_HOST_DEVICE float square_root(float a) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(a);
#else
  return std::sqrt(a);
#endif
}

// a * b + c, rounded once.
ROPECHECK_HOST_DEVICE float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// The first levels of the tree of adjacent pairs: the sum of a thread's channels, or of the first `width`, a power of
// two, where the whole row is no wider.
ROPECHECK_HOST_DEVICE float pair_tree(const float (&values)[kThreadChannels], int width) {
  float total = sum(values[0], values[1]);
  if (width > 2) {
    total = sum(total, sum(values[2], values[3]));
  }
  if (width > 4) {
    total = sum(total, sum(sum(values[4], values[5]), sum(values[6], values[7])));
  }
  return total;
}

// 1 / root(mean square + eps), of the sum of squares over all channels.
ROPECHECK_HOST_DEVICE float inverse_root(float total, int channels, float eps) {
  return reciprocal(square_root(sum(quotient(total, static_cast<float>(channels)), eps)));
}

// One channel of a lane turned: own * c + partner * s, where the sine of one of the two members is negated. Negating is
// exact, so the difference of the contract has the same bytes.
ROPECHECK_HOST_DEVICE float turned(float own, float partner, float cosine, float sine, bool contracted) {
  const float addend = product(partner, sine);
  return contracted ? fused(own, cosine, addend) : sum(product(own, cosine), addend);
}

// The gradient of one channel, of the scaled incoming one and the mean of all products with the normalised channels.
ROPECHECK_HOST_DEVICE float norm_gradient(float scaled, float unit, float inverse, float mean) {
  return product(inverse, difference(scaled, product(unit, mean)));
}

}  // namespace ropecheck
