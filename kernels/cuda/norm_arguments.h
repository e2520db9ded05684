// What a launch of the normalised rotation hands to its kernels. Strides count elements and have 64 bits, like every
// offset made of them.
#pragma once

#include <cstdint>

#include "arguments.h"

namespace ropecheck {

// int32 or int64 values, as far apart as the tensor says.
struct Integers {
  const void* values;
  std::int64_t stride;
  bool is_int64;
};

// The queries or the keys, [T, heads, pitch] with unit stride in a row of all heads: pitch is D, or 2 D where each head
// has its gate behind it. Results are contiguous.
struct NormHeads {
  const void* source;
  std::int64_t token_stride;
  const void* weight;
  int heads;
  int pitch;
};

struct NormResults {
  void* heads;  // [T, heads, D]
  void* gates;  // [T, heads, D], null where there are none
};

// What forward and backward share. `slots` and `axis_map` may have null values: no padding, and one row of positions.
struct NormContext {
  NormHeads q;
  NormHeads k;
  const void* table;  // [N, R]: R / 2 cosines, then as many sines
  std::int64_t table_stride;
  std::int64_t table_rows;
  Dtype table_dtype;
  Integers positions;
  std::int64_t position_row_stride;
  Integers axis_map;
  Integers slots;
  std::int64_t tokens;
  int head_dim;
  int lanes;
  float eps;
  float weight_offset;  // zero: the weights are taken as they are
  bool weight_is_float32;
  bool contracted;
};

struct NormArguments {
  NormContext context;
  NormResults q;
  NormResults k;
  bool round_norm;
};

// An incoming gradient [T, heads * D] of any strides; null where there is none.
struct IncomingGradient {
  const void* values;
  std::int64_t token_stride;
  std::int64_t channel_stride;
};

struct NormGradients {
  IncomingGradient heads;
  IncomingGradient gates;
  void* result;   // the shape of the source, contiguous
  float* sums;    // [chunks, D], null where the weight's gradient is not asked for
};

struct NormBackwardArguments {
  NormContext context;
  NormGradients q;
  NormGradients k;
};

// The forward's block has `threads` x `slots` x `tokens` threads, whole warps of them: `threads` have a row of channels
// between them. A slot is `rows` heads of one token that the same threads hold at once, all of the queries or all of
// the keys; those of the queries come first. The grid has one dimension: blocks of tokens, and within each the parts
// into which a token's slots are split.
struct NormConfiguration {
  int threads;
  int slots;
  int tokens;
  int rows;
  int q_slots;
  int slot_blocks;
  std::int64_t token_blocks;
  bool wide;  // every access to activations and weights has 16 bytes
};

// The rows of q or k, t * heads + h, as chunks of a power of two of them, of which each block takes one.
struct Chunks {
  std::int64_t rows;
  std::int64_t count;
  int size;
};

// The backward's block has `threads` x `slots` threads; a slot is `rows` consecutive rows of the block's chunk. The
// blocks of the queries' chunks precede those of the keys'.
struct NormBackwardConfiguration {
  Chunks q;
  Chunks k;
  int threads;
  int slots;
  int table_tokens;  // the most tokens that the rows of a chunk belong to
  bool wide;
};

// The sums of all chunks, and the gradient of the weight that they add up to.
struct WeightSums {
  float* sums;
  void* gradient;
  std::int64_t chunks;
};

}  // namespace ropecheck
