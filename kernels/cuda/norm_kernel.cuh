// The forward kernel: one launch normalises and rotates queries and keys, and copies the gates.
#pragma once

#include "norm_parts.cuh"

namespace ropecheck {

// Blocks of full size that a multiprocessor holds at once. Without the limit on registers that this is, three rows of
// positions would cost more of them, and a kernel that waits for memory its speed.
constexpr int kNormBlocks = 3;

template <typename Element, bool kMultiAxis, bool kWide>
__global__ void __launch_bounds__(kMaxNormThreads, kNormBlocks)
    norm_rope_gate_kernel(const __grid_constant__ NormArguments arguments,
                          const __grid_constant__ NormConfiguration configuration) {
  using Bits = typename Element::Bits;
  constexpr int rows = kRowsInFlight<Element, kWide>;
  extern __shared__ float4 shared_memory[];
  const NormContext& context = arguments.context;
  const int head_dim = context.head_dim;
  const int lanes = context.lanes;

  // The table follows what turn_by_channel needs.
  float* const exchange = reinterpret_cast<float*>(shared_memory);
  float* const table = exchange + (kWide ? 0 : block_threads() * kThreadChannels);
  int* const outside = reinterpret_cast<int*>(table + blockDim.z * 2 * lanes);

  const unsigned token_block = blockIdx.x / configuration.slot_blocks;
  const int slot_block = static_cast<int>(blockIdx.x - token_block * configuration.slot_blocks);
  const std::int64_t first_token = static_cast<std::int64_t>(token_block) * blockDim.z;
  const std::int64_t token = first_token + threadIdx.z;
  int slot = static_cast<int>(slot_block * blockDim.y + threadIdx.y);
  const bool in_q = slot < configuration.q_slots;
  slot -= in_q ? 0 : configuration.q_slots;

  // Values are chosen, not addresses of arguments: those would move the arguments to local memory.
  const int heads = in_q ? context.q.heads : context.k.heads;
  const int pitch = in_q ? context.q.pitch : context.k.pitch;
  const std::int64_t token_stride = in_q ? context.q.token_stride : context.k.token_stride;
  const void* const weight = in_q ? context.q.weight : context.k.weight;
  Bits* const results = static_cast<Bits*>(in_q ? arguments.q.heads : arguments.k.heads);
  Bits* const gates = static_cast<Bits*>(in_q ? arguments.q.gates : arguments.k.gates);

  const int first_head = slot * configuration.rows;
  const bool written = token < context.tokens && !is_padding(context, token);
  const Place place = place_of(head_dim);
  const int count = written && place.count > 0 ? min(configuration.rows, heads - first_head) : 0;
  const Bits* const source = static_cast<const Bits*>(in_q ? context.q.source : context.k.source) +
                             token * token_stride + static_cast<std::int64_t>(first_head) * pitch + place.channel;
  const std::int64_t destination = (token * heads + first_head) * head_dim + place.channel;

  Pack<Element> x[rows];
  Pack<Element> gate[rows];
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    x[i] = {};
    if (i < count) {
      x[i] = load_pack<Element, kWide>(source + i * pitch, 1, place.count);
    }
  }
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    if (i < count && gates != nullptr) {
      gate[i] = load_pack<Element, kWide>(source + i * pitch + head_dim, 1, place.count);
    }
  }
  const Weights weights = load_weights<Element, kWide>(context, weight, place);
  gather<kMultiAxis>(context, first_token, blockDim.z, table, outside);
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    if (i < count && gates != nullptr) {
      store_pack<Element, kWide>(gates + destination + i * head_dim, place.count, gate[i]);
    }
  }
  const float inverse = inverse_roots<Element, rows>(context, x, tree_width<kWide>(head_dim));
  float factors[kThreadChannels];
  factors_of<Element>(context, weights, factors);
  __syncthreads();

  const float* const turns = table + threadIdx.z * 2 * lanes;
  const float nothing = outside[threadIdx.z] ? float_of(0x7fc00000u) : 1.0f;
  const int partner = partner_lane(place, lanes);
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    if (i >= configuration.rows) {
      break;
    }
    // Of a token out of range everything becomes NaN.
    const float row_inverse = product(of_row<rows>(inverse, i), nothing);
    float y[kThreadChannels];
    widen<Element>(x[i], y);
#pragma unroll
    for (int e = 0; e < kThreadChannels; ++e) {
      y[e] = product(product(y[e], row_inverse), factors[e]);
    }
    Pack<Element> result = pack_of<Element>(y);
    if constexpr (!kWide) {
      if (arguments.round_norm) {
        widen<Element>(result, y);
      }
      turn_by_channel(y, exchange + block_thread() * kThreadChannels - place.channel, turns, place, lanes, true,
                      context.contracted);
      result = pack_of<Element>(y);
    } else {
      float other[kThreadChannels];
      if (sizeof(Bits) == sizeof(float) || arguments.round_norm) {
        widen<Element>(result, y);
        widen<Element>(shuffled(result, partner), other);
      } else {
#pragma unroll
        for (int e = 0; e < kThreadChannels; ++e) {
          other[e] = __shfl_sync(kWholeWarp, y[e], partner);
        }
      }
      if (is_rotated(place, lanes)) {
        turn(y, other, turns, place, lanes, is_first(place, lanes), context.contracted);
        result = pack_of<Element>(y);
      }
    }
    if (i < count) {
      store_pack<Element, kWide>(results + destination + i * head_dim, place.count, result);
    }
  }
}

}  // namespace ropecheck
