// The kernel: one launch rotates q, or q and k, out of place or in place.
#pragma once

#include "arguments.h"
#include "vector_access.cuh"

namespace ropecheck {

constexpr int kMaxThreads = 256;

// Heads whose loads a thread issues before its first store: this many vectors in flight hide the memory's latency.
// The narrow kernel, which is there for correctness at any alignment, keeps its code short.
template <Pairing pairing, bool kWide>
constexpr int kHeadsInFlight = !kWide ? 1 : pairing == Pairing::kAdjacent ? 4 : 2;

// The token of a thread, and the heads of its block that it passes over.
struct Rows {
  std::int64_t batch;
  std::int64_t token;
  int first_head;
  int end_head;
};

__device__ __forceinline__ std::int64_t offset_of(const Strides& strides, const Rows& rows, int channel) {
  return rows.batch * strides.batch + rows.token * strides.token + channel * strides.channel;
}

// Where one channel lies in each head of q and then of k. Values are chosen, not addresses of arguments: those would
// move the arguments to local memory. The base of k lies its q.heads heads early, so that one index serves both.
template <typename Bits>
class Channel {
 public:
  __device__ __forceinline__ Channel(const RotationArguments& arguments, const Rows& rows, int channel)
      : arguments_(arguments),
        q_source_(static_cast<const Bits*>(arguments.q.source) + offset_of(arguments.q.source_strides, rows, channel)),
        k_source_(static_cast<const Bits*>(arguments.k.source) + offset_of(arguments.k.source_strides, rows, channel) -
                  arguments.q.heads * arguments.k.source_strides.head),
        q_destination_(static_cast<Bits*>(arguments.q.destination) +
                       offset_of(arguments.q.destination_strides, rows, channel)),
        k_destination_(static_cast<Bits*>(arguments.k.destination) +
                       offset_of(arguments.k.destination_strides, rows, channel) -
                       arguments.q.heads * arguments.k.destination_strides.head) {}

  __device__ __forceinline__ const Bits* source(int head) const {
    const std::int64_t stride = in_q(head) ? arguments_.q.source_strides.head : arguments_.k.source_strides.head;
    return (in_q(head) ? q_source_ : k_source_) + head * stride;
  }

  __device__ __forceinline__ Bits* destination(int head) const {
    const std::int64_t stride =
        in_q(head) ? arguments_.q.destination_strides.head : arguments_.k.destination_strides.head;
    return (in_q(head) ? q_destination_ : k_destination_) + head * stride;
  }

  __device__ __forceinline__ std::int64_t source_stride(int head) const {
    return in_q(head) ? arguments_.q.source_strides.channel : arguments_.k.source_strides.channel;
  }

  __device__ __forceinline__ std::int64_t destination_stride(int head) const {
    return in_q(head) ? arguments_.q.destination_strides.channel : arguments_.k.destination_strides.channel;
  }

 private:
  __device__ __forceinline__ bool in_q(int head) const { return head < arguments_.q.heads; }

  const RotationArguments& arguments_;
  const Bits* q_source_;
  const Bits* k_source_;
  Bits* q_destination_;
  Bits* k_destination_;
};

template <typename Element, Pairing pairing, bool kWide>
__device__ __forceinline__ void rotate_heads(const RotationArguments& arguments, const Rows& rows) {
  using Bits = typename Element::Bits;
  constexpr int group_lanes = kLanes<Element, pairing>;
  constexpr int vectors = pairing == Pairing::kAdjacent ? 1 : 2;
  constexpr int in_flight = kHeadsInFlight<pairing, kWide>;
  const int lane = threadIdx.x * group_lanes;
  const int lane_count = min(group_lanes, arguments.lanes - lane);
  const int channel = pairing == Pairing::kAdjacent ? 2 * lane : lane;
  const int channel_count = pairing == Pairing::kAdjacent ? 2 * lane_count : lane_count;

  // The table stays in registers for all heads.
  float cosine[group_lanes];
  float sine[group_lanes];
  const Table& cos = arguments.cosine;
  const Table& sin = arguments.sine;
  load_table<group_lanes, kWide>(
      cos.values + rows.batch * cos.batch_stride + rows.token * cos.token_stride + lane * cos.lane_stride,
      cos.lane_stride, lane_count, cosine);
  load_table<group_lanes, kWide>(
      sin.values + rows.batch * sin.batch_stride + rows.token * sin.token_stride + lane * sin.lane_stride,
      sin.lane_stride, lane_count, sine);

  const Channel<Bits> at(arguments, rows, channel);
  for (int first = rows.first_head; first < rows.end_head; first += in_flight * blockDim.y) {
    Vector groups[in_flight][vectors];
#pragma unroll
    for (int i = 0; i < in_flight; ++i) {
      const int head = first + i * blockDim.y;
      if (head < rows.end_head) {
        const Bits* const source = at.source(head);
        const std::int64_t stride = kWide ? 1 : at.source_stride(head);
#pragma unroll
        for (int v = 0; v < vectors; ++v) {
          groups[i][v] = load_vector<Bits, kWide>(source + v * arguments.lanes * stride, stride, channel_count);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < in_flight; ++i) {
      const int head = first + i * blockDim.y;
      if (head < rows.end_head) {
        rotate_group<Element, pairing>(groups[i], cosine, sine, arguments.conjugate);
        Bits* const destination = at.destination(head);
        const std::int64_t stride = kWide ? 1 : at.destination_stride(head);
#pragma unroll
        for (int v = 0; v < vectors; ++v) {
          store_vector<Bits, kWide>(destination + v * arguments.lanes * stride, stride, channel_count, groups[i][v]);
        }
      }
    }
  }
}

// Moves the channels from R on, bit for bit.
template <typename Bits, bool kWide>
__device__ __forceinline__ void copy_heads(const RotationArguments& arguments, const Rows& rows, int tail_group) {
  constexpr int group_channels = kVectorBytes / sizeof(Bits);
  const int channel = 2 * arguments.lanes + tail_group * group_channels;
  const int count = min(group_channels, arguments.head_dim - channel);
  const Channel<Bits> at(arguments, rows, channel);
  for (int head = rows.first_head; head < rows.end_head; head += blockDim.y) {
    const Bits* const source = at.source(head);
    Bits* const destination = at.destination(head);
    if (source != destination) {
      store_vector<Bits, kWide>(destination, at.destination_stride(head), count,
                                load_vector<Bits, kWide>(source, at.source_stride(head), count));
    }
  }
}

template <typename Element, Pairing pairing, bool kWide>
__global__ void __launch_bounds__(kMaxThreads)
    rotation_kernel(const __grid_constant__ RotationArguments arguments,
                    const __grid_constant__ LaunchConfiguration configuration) {
  using Bits = typename Element::Bits;
  constexpr int group_lanes = kLanes<Element, pairing>;
  const unsigned token_block = blockIdx.x / configuration.head_blocks;
  const int head_block = static_cast<int>(blockIdx.x - token_block * configuration.head_blocks);
  const std::int64_t row = static_cast<std::int64_t>(token_block) * blockDim.z + threadIdx.z;
  if (row >= arguments.batch * arguments.sequence) {
    return;
  }
  Rows rows;
  rows.batch = arguments.batch == 1 ? 0 : row / arguments.sequence;
  rows.token = row - rows.batch * arguments.sequence;
  const int block_head = head_block * configuration.heads_per_block;
  rows.first_head = block_head + threadIdx.y;
  rows.end_head = min(block_head + configuration.heads_per_block, arguments.q.heads + arguments.k.heads);

  const int lane_groups = (arguments.lanes + group_lanes - 1) / group_lanes;
  if (static_cast<int>(threadIdx.x) < lane_groups) {
    rotate_heads<Element, pairing, kWide>(arguments, rows);
  } else {
    copy_heads<Bits, kWide>(arguments, rows, static_cast<int>(threadIdx.x) - lane_groups);
  }
}

}  // namespace ropecheck
