// What the forward and the backward kernel of the normalised rotation share.
//
// A row is one head of one token. Its channels, padded to a power of two, lie with the threads of the block's first
// dimension, neighbours in one warp, kThreadChannels with each. kWide says that the launch has proved three things: every access is an aligned vector, a
// thread's channels are all in the head or none is, and the partners of a thread's lanes are those of one other thread.
#pragma once

#include "norm.h"
#include "norm_arguments.h"
#include "norm_configuration.h"
#include "vector_access.cuh"

namespace ropecheck {

constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr std::int64_t kPaddingSlot = -1;

template <typename Element, bool kWide>
constexpr int kRowsInFlight = rows_in_flight(sizeof(typename Element::Bits), kWide);

__device__ __forceinline__ std::int64_t read(const Integers& integers, std::int64_t index) {
  const std::int64_t offset = index * integers.stride;
  return integers.is_int64 ? __ldg(static_cast<const long long*>(integers.values) + offset)
                           : __ldg(static_cast<const int*>(integers.values) + offset);
}

__device__ __forceinline__ bool is_padding(const NormContext& context, std::int64_t token) {
  return context.slots.values != nullptr && read(context.slots, token) == kPaddingSlot;
}

// The number of a thread in its block, which is one of whole warps.
__device__ __forceinline__ int block_thread() {
  return static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
}

__device__ __forceinline__ int block_threads() { return static_cast<int>(blockDim.x * blockDim.y * blockDim.z); }

__device__ __forceinline__ int warp_lane() { return block_thread() % kWarpThreads; }

// The channels of a row that a thread has.
struct Place {
  int channel;  // the first
  int count;    // how many the head has from there on, at most kThreadChannels; none where it is not positive
};

__device__ __forceinline__ Place place_of(int head_dim) {
  const int channel = static_cast<int>(threadIdx.x) * kThreadChannels;
  return {channel, min(kThreadChannels, head_dim - channel)};
}

template <typename Element, bool kWide>
__device__ __forceinline__ Pack<Element> load_pack(const typename Element::Bits* source, std::int64_t stride,
                                                   int count) {
  Pack<Element> pack;
#pragma unroll
  for (int v = 0; v < Pack<Element>::kVectors; ++v) {
    const int first = v * kChannels<Element>;
    pack.vectors[v] = load_vector<typename Element::Bits, kWide>(source + first * stride, stride,
                                                                 min(kChannels<Element>, count - first));
  }
  return pack;
}

template <typename Element, bool kWide>
__device__ __forceinline__ void store_pack(typename Element::Bits* destination, int count, const Pack<Element>& pack) {
#pragma unroll
  for (int v = 0; v < Pack<Element>::kVectors; ++v) {
    const int first = v * kChannels<Element>;
    store_vector<typename Element::Bits, kWide>(destination + first, 1, min(kChannels<Element>, count - first),
                                                pack.vectors[v]);
  }
}

// A thread's weights as they lie in memory: of the activations' dtype, or of fp32, which fills both vectors.
struct Weights {
  Pack<Float32> words;
};

template <typename Element, bool kWide>
__device__ __forceinline__ Weights load_weights(const NormContext& context, const void* weight, const Place& place) {
  Weights weights = {};
  if (place.count <= 0) {
    return weights;
  }
  if (sizeof(typename Element::Bits) == sizeof(float) || context.weight_is_float32) {
    weights.words = load_pack<Float32, kWide>(static_cast<const Float32::Bits*>(weight) + place.channel, 1, place.count);
  } else {
    const auto* const source = static_cast<const typename Element::Bits*>(weight) + place.channel;
    weights.words.vectors[0] = load_pack<Element, kWide>(source, 1, place.count).vectors[0];
  }
  return weights;
}

// The factors of a thread's channels: the weight, or the weight plus an offset.
template <typename Element>
__device__ __forceinline__ void factors_of(const NormContext& context, const Weights& weights,
                                           float (&factors)[kThreadChannels]) {
  if (sizeof(typename Element::Bits) == sizeof(float) || context.weight_is_float32) {
    widen<Float32>(weights.words, factors);
  } else {
    Pack<Element> narrow;
    narrow.vectors[0] = weights.words.vectors[0];
    widen<Element>(narrow, factors);
  }
  if (context.weight_offset != 0.0f) {
#pragma unroll
    for (int i = 0; i < kThreadChannels; ++i) {
      factors[i] = sum(factors[i], context.weight_offset);
    }
  }
}

__device__ __forceinline__ float table_value(const NormContext& context, std::int64_t offset) {
  switch (context.table_dtype) {
    case Dtype::kFloat16:
      return Float16::widen(__ldg(static_cast<const Float16::Bits*>(context.table) + offset));
    case Dtype::kBFloat16:
      return BFloat16::widen(__ldg(static_cast<const BFloat16::Bits*>(context.table) + offset));
    default:
      return __ldg(static_cast<const float*>(context.table) + offset);
  }
}

// Gathers once for all threads of the block the cosines and sines of `count` tokens, [count, R] in shared memory, and
// whether a position of each is out of range. A lane that is has zeros; of padding nothing is read and nothing written.
// The caller synchronises.
template <bool kMultiAxis>
__device__ __forceinline__ void gather(const NormContext& context, std::int64_t first_token, int count, float* table,
                                       int* outside) {
  const int lanes = context.lanes;
  for (int i = block_thread(); i < count; i += block_threads()) {
    outside[i] = 0;
  }
  __syncthreads();
  for (int i = block_thread(); i < count * lanes; i += block_threads()) {
    const int in_block = count == 1 ? 0 : i / lanes;
    const int lane = i - in_block * lanes;
    const std::int64_t token = first_token + in_block;
    if (token >= context.tokens || is_padding(context, token)) {
      continue;
    }
    std::int64_t position = read(context.positions, token);
    if constexpr (kMultiAxis) {
      // All three are asked for at once: the axis is on its way too.
      Integers row = context.positions;
      const std::int64_t bytes = context.position_row_stride * (row.is_int64 ? 8 : 4);
      row.values = static_cast<const char*>(row.values) + bytes;
      const std::int64_t second = read(row, token);
      row.values = static_cast<const char*>(row.values) + bytes;
      const std::int64_t third = read(row, token);
      const std::int64_t axis = read(context.axis_map, lane);
      position = axis == 0 ? position : axis == 1 ? second : axis == 2 ? third : -1;
    }
    float cosine = 0.0f;
    float sine = 0.0f;
    if (position >= 0 && position < context.table_rows) {
      const std::int64_t offset = position * context.table_stride + lane;
      cosine = table_value(context, offset);
      sine = table_value(context, offset + lanes);
    } else {
      outside[in_block] = 1;
    }
    table[in_block * 2 * lanes + lane] = cosine;
    table[in_block * 2 * lanes + lanes + lane] = sine;
  }
}

// The upper levels of the trees of kRows rows, of which every thread has a sum of its own. Thread l is left with the
// total of row l % kRows. An addition gives both threads of a pair the same bits, so first each level halves the rows
// that a thread still adds up for, and the shuffles with them.
template <int kRows>
__device__ __forceinline__ float row_totals(float (&sums)[kRows]) {
#pragma unroll
  for (int step = 1; step < kRows; step *= 2) {
    const bool odd = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < kRows / (2 * step); ++i) {
      const float kept = odd ? sums[2 * i + 1] : sums[2 * i];
      const float given = odd ? sums[2 * i] : sums[2 * i + 1];
      sums[i] = sum(kept, __shfl_xor_sync(kWholeWarp, given, step));
    }
  }
  float total = sums[0];
  for (unsigned step = kRows; step < blockDim.x; step *= 2) {
    total = sum(total, __shfl_xor_sync(kWholeWarp, total, step));
  }
  return total;
}

// What thread l left at `row` has, of the threads that l % kRows tells apart.
template <int kRows>
__device__ __forceinline__ float of_row(float value, int row) {
  return kRows == 1 ? value : __shfl_sync(kWholeWarp, value, (warp_lane() & ~(kRows - 1)) + row);
}

// 1 / root of kRows rows, left as by row_totals.
template <typename Element, int kRows>
__device__ __forceinline__ float inverse_roots(const NormContext& context, const Pack<Element> (&x)[kRows], int width) {
  float sums[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float values[kThreadChannels];
    widen<Element>(x[i], values);
#pragma unroll
    for (int e = 0; e < kThreadChannels; ++e) {
      values[e] = product(values[e], values[e]);
    }
    sums[i] = pair_tree(values, width);
  }
  return inverse_root(row_totals(sums), context.head_dim, context.eps);
}

// How wide the tree is within a thread: the row's width where one thread has the row.
template <bool kWide>
__device__ __forceinline__ int tree_width(int head_dim) {
  return kWide || head_dim > 4 ? kThreadChannels : head_dim > 2 ? 4 : 2;
}

// Where kWide: whether the channels of a thread are rotated, and whether they are the first members of their lanes.
__device__ __forceinline__ bool is_rotated(const Place& place, int lanes) { return place.channel < 2 * lanes; }
__device__ __forceinline__ bool is_first(const Place& place, int lanes) { return place.channel < lanes; }

// The lane of the warp that has the partners.
__device__ __forceinline__ int partner_lane(const Place& place, int lanes) {
  const int away = lanes / kThreadChannels;
  const int own = warp_lane();
  return !is_rotated(place, lanes) ? own : is_first(place, lanes) ? own + away : own - away;
}

template <typename Element>
__device__ __forceinline__ Pack<Element> shuffled(const Pack<Element>& pack, int lane) {
  Pack<Element> result;
#pragma unroll
  for (int i = 0; i < Pack<Element>::kVectors * kVectorWords; ++i) {
    result.vectors[i / kVectorWords].words[i % kVectorWords] =
        __shfl_sync(kWholeWarp, pack.vectors[i / kVectorWords].words[i % kVectorWords], lane);
  }
  return result;
}

// Turns the channels of a thread that has rotated ones, where kWide; one of the two members has its sine negated.
__device__ __forceinline__ void turn(float (&own)[kThreadChannels], const float (&partner)[kThreadChannels],
                                     const float* table, const Place& place, int lanes, bool negated, bool contracted) {
  const int lane = is_first(place, lanes) ? place.channel : place.channel - lanes;
#pragma unroll
  for (int i = 0; i < kThreadChannels; i += 4) {
    const float4 cosine = *reinterpret_cast<const float4*>(table + lane + i);
    const float4 sine = *reinterpret_cast<const float4*>(table + lanes + lane + i);
    own[i] = turned(own[i], partner[i], cosine.x, negated ? -sine.x : sine.x, contracted);
    own[i + 1] = turned(own[i + 1], partner[i + 1], cosine.y, negated ? -sine.y : sine.y, contracted);
    own[i + 2] = turned(own[i + 2], partner[i + 2], cosine.z, negated ? -sine.z : sine.z, contracted);
    own[i + 3] = turned(own[i + 3], partner[i + 3], cosine.w, negated ? -sine.w : sine.w, contracted);
  }
}

// The same channel by channel, by way of shared memory: `row` is that of the thread's row, of as many values as all
// threads of the row have channels.
__device__ __forceinline__ void turn_by_channel(float (&own)[kThreadChannels], float* row, const float* table,
                                                const Place& place, int lanes, bool negate_first, bool contracted) {
#pragma unroll
  for (int i = 0; i < kThreadChannels; ++i) {
    row[place.channel + i] = own[i];
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kThreadChannels; ++i) {
    const int channel = place.channel + i;
    if (channel < 2 * lanes) {
      const bool first = channel < lanes;
      const int lane = first ? channel : channel - lanes;
      const float sine = table[lanes + lane];
      own[i] = turned(own[i], row[first ? channel + lanes : lane], table[lane],
                      first == negate_first ? -sine : sine, contracted);
    }
  }
  __syncwarp();
}

}  // namespace ropecheck
