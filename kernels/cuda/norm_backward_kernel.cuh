// The backward kernels: the gradients of queries, keys and gates with the sums of each chunk of rows for the weights',
// and the sums over the chunks. A row is t * heads + h.
#pragma once

#include "norm_parts.cuh"

namespace ropecheck {

template <typename Element, bool kMultiAxis, bool kWide>
__global__ void __launch_bounds__(kMaxNormThreads)
    norm_rope_backward_kernel(const __grid_constant__ NormBackwardArguments arguments,
                              const __grid_constant__ NormBackwardConfiguration configuration) {
  using Bits = typename Element::Bits;
  constexpr int rows = kRowsInFlight<Element, kWide>;
  extern __shared__ float4 shared_memory[];
  const NormContext& context = arguments.context;
  const int head_dim = context.head_dim;
  const int lanes = context.lanes;

  // First what turn_by_channel needs, and at the end the sums of the slots; then the table.
  float* const exchange = reinterpret_cast<float*>(shared_memory);
  float* const own_exchange = exchange + block_thread() * kThreadChannels;
  float* const table = exchange + block_threads() * kThreadChannels;
  int* const outside = reinterpret_cast<int*>(table + configuration.table_tokens * 2 * lanes);

  // Values are chosen, not addresses of arguments: those would move the arguments to local memory.
  const bool in_q = blockIdx.x < configuration.q.count;
  const int heads = in_q ? context.q.heads : context.k.heads;
  const int pitch = in_q ? context.q.pitch : context.k.pitch;
  const std::int64_t source_stride = in_q ? context.q.token_stride : context.k.token_stride;
  const void* const weight = in_q ? context.q.weight : context.k.weight;
  const Bits* const source = static_cast<const Bits*>(in_q ? context.q.source : context.k.source);
  const Bits* const incoming = static_cast<const Bits*>(in_q ? arguments.q.heads.values : arguments.k.heads.values);
  const std::int64_t incoming_stride = in_q ? arguments.q.heads.token_stride : arguments.k.heads.token_stride;
  const std::int64_t channel_stride = in_q ? arguments.q.heads.channel_stride : arguments.k.heads.channel_stride;
  const Bits* const gates = static_cast<const Bits*>(in_q ? arguments.q.gates.values : arguments.k.gates.values);
  const std::int64_t gate_stride = arguments.q.gates.token_stride;
  const std::int64_t gate_channel_stride = arguments.q.gates.channel_stride;
  Bits* const gradient = static_cast<Bits*>(in_q ? arguments.q.result : arguments.k.result);
  float* const sums = in_q ? arguments.q.sums : arguments.k.sums;
  const int chunk_rows = in_q ? configuration.q.size : configuration.k.size;
  const std::int64_t all_rows = in_q ? configuration.q.rows : configuration.k.rows;
  const std::int64_t chunk = blockIdx.x - (in_q ? 0 : configuration.q.count);

  const std::int64_t first_row = chunk * chunk_rows;
  const std::int64_t first_token = first_row / heads;
  const int first_head = static_cast<int>(first_row - first_token * heads);
  const int table_tokens = (first_head + chunk_rows - 1) / heads + 1;
  const Place place = place_of(head_dim);

  Pack<Element> x[rows];
  Pack<Element> g[rows];
  int in_table[rows];
  bool exists[rows];   // and has a gradient to be written
  bool is_read[rows];  // and is not padding
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    const int in_chunk = static_cast<int>(threadIdx.y) * rows + i;
    exists[i] = in_chunk < chunk_rows && first_row + in_chunk < all_rows && place.count > 0;
    in_table[i] = exists[i] ? (first_head + in_chunk) / heads : 0;
    const int head = exists[i] ? first_head + in_chunk - in_table[i] * heads : 0;
    const std::int64_t token = first_token + in_table[i];
    is_read[i] = exists[i] && !is_padding(context, token);
    x[i] = {};
    g[i] = {};
    if (is_read[i]) {
      const std::int64_t channel = static_cast<std::int64_t>(head) * head_dim + place.channel;
      x[i] = load_pack<Element, kWide>(
          source + token * source_stride + static_cast<std::int64_t>(head) * pitch + place.channel, 1, place.count);
      g[i] = load_pack<Element, kWide>(incoming + token * incoming_stride + channel * channel_stride, channel_stride,
                                       place.count);
    }
    if (exists[i] && gates != nullptr) {
      const std::int64_t channel = static_cast<std::int64_t>(head) * head_dim + place.channel;
      Pack<Element> gate = {};
      if (is_read[i]) {
        gate = load_pack<Element, kWide>(gates + token * gate_stride + channel * gate_channel_stride,
                                         gate_channel_stride, place.count);
      }
      store_pack<Element, kWide>(gradient + (first_row + in_chunk) * pitch + head_dim + place.channel, place.count,
                                 gate);
    }
  }
  const Weights weights = load_weights<Element, kWide>(context, weight, place);
  gather<kMultiAxis>(context, first_token, table_tokens, table, outside);
  const int width = tree_width<kWide>(head_dim);
  const float inverse = inverse_roots<Element, rows>(context, x, width);
  float factors[kThreadChannels];
  factors_of<Element>(context, weights, factors);
  __syncthreads();

  // The incoming gradient turned back, and the mean of its products with the normalised row.
  float turned_back[rows][kThreadChannels];
  float row_inverse[rows];
  float means[rows];
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    const float* const turns = table + in_table[i] * 2 * lanes;
    row_inverse[i] = of_row<rows>(inverse, i);
    widen<Element>(g[i], turned_back[i]);
    if constexpr (!kWide) {
      turn_by_channel(turned_back[i], own_exchange - place.channel, turns, place, lanes, false, context.contracted);
    } else {
      float other[kThreadChannels];
      widen<Element>(shuffled(g[i], partner_lane(place, lanes)), other);
      if (is_rotated(place, lanes)) {
        turn(turned_back[i], other, turns, place, lanes, !is_first(place, lanes), context.contracted);
      }
    }
    // Of a token out of range everything becomes NaN.
    const float nothing = outside[in_table[i]] ? float_of(0x7fc00000u) : 1.0f;
    float values[kThreadChannels];
    widen<Element>(x[i], values);
#pragma unroll
    for (int e = 0; e < kThreadChannels; ++e) {
      turned_back[i][e] = product(turned_back[i][e], nothing);
      const float scaled = product(turned_back[i][e], factors[e]);
      // What pads the tree is +0, which a root of zero would not leave.
      values[e] = (kWide ? place.count > 0 : e < place.count) ? product(scaled, product(values[e], row_inverse[i])) : 0.0f;
    }
    means[i] = pair_tree(values, width);
  }
  const float mean = quotient(row_totals(means), static_cast<float>(head_dim));

  // The tree over the slot's rows keeps the sum of each level until that of its neighbour is there.
  constexpr int levels = rows == 4 ? 3 : rows;
  float level_sums[levels][kThreadChannels];
  float slot_sums[kThreadChannels] = {};
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    const float row_mean = of_row<rows>(mean, i);
    float values[kThreadChannels];
    float products[kThreadChannels];
    widen<Element>(x[i], values);
#pragma unroll
    for (int e = 0; e < kThreadChannels; ++e) {
      const float unit = product(values[e], row_inverse[i]);
      products[e] = is_read[i] ? product(turned_back[i][e], unit) : 0.0f;
      values[e] = is_read[i] ? norm_gradient(product(turned_back[i][e], factors[e]), unit, row_inverse[i], row_mean)
                             : 0.0f;
    }
    if (exists[i]) {
      const std::int64_t row = first_row + static_cast<int>(threadIdx.y) * rows + i;
      store_pack<Element, kWide>(gradient + row * pitch + place.channel, place.count, pack_of<Element>(values));
    }
#pragma unroll
    for (int level = 0; level < levels; ++level) {
      const bool completes = (i + 1) % (1 << level) == 0;
#pragma unroll
      for (int e = 0; e < kThreadChannels; ++e) {
        if (level > 0 && completes) {
          products[e] = sum(level_sums[level - 1][e], products[e]);
        }
        if (completes && (i >> level) % 2 == 0) {
          level_sums[level][e] = products[e];
        }
      }
    }
    // A chunk of fewer rows has no more levels: one more addition of +0 would lose the sign of a zero.
    if (i + 1 == min(rows, chunk_rows)) {
#pragma unroll
      for (int e = 0; e < kThreadChannels; ++e) {
        slot_sums[e] = products[e];
      }
    }
  }
  if (sums == nullptr) {
    return;
  }
#pragma unroll
  for (int e = 0; e < kThreadChannels; ++e) {
    own_exchange[e] = slot_sums[e];
  }
  const int row_channels = static_cast<int>(blockDim.x) * kThreadChannels;
  const int slots = chunk_rows / rows;
  for (int step = 1; step < slots; step *= 2) {
    __syncthreads();
    for (int i = block_thread(); i < slots / (2 * step) * row_channels; i += block_threads()) {
      float* const left = exchange + (i / row_channels * 2 * step) * row_channels + i % row_channels;
      *left = sum(*left, left[step * row_channels]);
    }
  }
  __syncthreads();
  float* const chunk_sums = sums + chunk * head_dim;
  if constexpr (kWide) {
    constexpr int vector = kVectorBytes / sizeof(float);
    for (int channel = block_thread() * vector; channel < head_dim; channel += block_threads() * vector) {
      *reinterpret_cast<float4*>(chunk_sums + channel) = *reinterpret_cast<const float4*>(exchange + channel);
    }
  } else {
    for (int channel = block_thread(); channel < head_dim; channel += block_threads()) {
      chunk_sums[channel] = exchange[channel];
    }
  }
}

// The sums' block has kSummedChannels x kSummingRows threads. A thread sums up to kSummedRows rows of one channel at a
// time, where the first of them lies, and passes on until one row is left.
constexpr int kSummedChannels = 8;
constexpr int kSummingRows = 32;
constexpr int kSummedRows = 8;

// The tree over chunks for kSummedChannels channels of q's or k's weight, within `sums` itself; +0 where there is none.
__global__ void __launch_bounds__(kSummedChannels* kSummingRows)
    sum_chunks_kernel(const __grid_constant__ WeightSums q, const __grid_constant__ WeightSums k, int head_dim,
                      Dtype dtype) {
  const int channel_blocks = (head_dim + kSummedChannels - 1) / kSummedChannels;
  const bool in_q = blockIdx.x < static_cast<unsigned>(channel_blocks);
  float* const sums = in_q ? q.sums : k.sums;
  void* const gradient = in_q ? q.gradient : k.gradient;
  std::int64_t left = in_q ? q.chunks : k.chunks;
  const int block = static_cast<int>(blockIdx.x) - (in_q ? 0 : channel_blocks);
  const int channel = block * kSummedChannels + static_cast<int>(threadIdx.x);
  const bool in_head = channel < head_dim;

  std::int64_t step = head_dim;
  for (; left > 1; left = (left + kSummedRows - 1) / kSummedRows, step *= kSummedRows) {
    // Where fewer rows are left, the tree has fewer levels: one more would lose the sign of a zero.
    const int width = left > 4 ? kSummedRows : left > 2 ? 4 : 2;
    for (std::int64_t first = static_cast<std::int64_t>(threadIdx.y) * kSummedRows; in_head && first < left;
         first += kSummingRows * kSummedRows) {
      float values[kSummedRows];
#pragma unroll
      for (int i = 0; i < kSummedRows; ++i) {
        values[i] = first + i < left ? sums[(first + i) * step + channel] : 0.0f;
      }
      sums[first * step + channel] = pair_tree(values, width);
    }
    __syncthreads();
  }
  if (threadIdx.y == 0 && in_head) {
    const float total = left ? sums[channel] : 0.0f;
    switch (dtype) {
      case Dtype::kFloat16:
        static_cast<Float16::Bits*>(gradient)[channel] = Float16::narrow(total);
        break;
      case Dtype::kBFloat16:
        static_cast<BFloat16::Bits*>(gradient)[channel] = BFloat16::narrow(total);
        break;
      case Dtype::kFloat32:
        static_cast<float*>(gradient)[channel] = total;
        break;
    }
  }
}

}  // namespace ropecheck
