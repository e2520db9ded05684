// What a launch hands to the kernel. Strides count elements and, like every offset made of them, have 64 bits.
#pragma once

#include <cstdint>

namespace ropecheck {

enum class Dtype { kFloat32, kFloat16, kBFloat16 };

struct Strides {
  std::int64_t batch;
  std::int64_t token;
  std::int64_t head;
  std::int64_t channel;
};

// One tensor to be rotated, [B, S, heads, D]. Source and destination may be the same memory with the same strides.
struct Activations {
  const void* source;
  void* destination;
  Strides source_strides;
  Strides destination_strides;
  int heads;
};

// One fp32 table, [B, S, R / 2]; a table that the samples share has batch stride 0.
struct Table {
  const float* values;
  std::int64_t batch_stride;
  std::int64_t token_stride;
  std::int64_t lane_stride;
};

struct RotationArguments {
  Activations q;
  Activations k;  // of no heads where one tensor alone is rotated
  Table cosine;
  Table sine;
  std::int64_t batch;
  std::int64_t sequence;
  int head_dim;
  int lanes;
  bool conjugate;
};

// How the work lies on the grid. A block has `groups` x `heads` x `tokens` threads; each thread has one group of
// channels of one token and passes over the heads of the block, `heads` apart, those of k after those of q. The grid
// has one dimension: blocks of tokens, and within each the parts into which the heads are split.
struct LaunchConfiguration {
  int groups;
  int heads;
  int tokens;
  int heads_per_block;
  int head_blocks;
  std::int64_t token_blocks;
  bool wide;  // every access of every tensor has 16 bytes (a table's 8 where a thread has two lanes)
};

}  // namespace ropecheck
