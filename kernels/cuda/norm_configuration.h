// Which block and grid a normalised rotation gets: functions of shapes, strides and addresses alone.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "launch_limits.h"
#include "norm.h"
#include "norm_arguments.h"

namespace ropecheck {

constexpr int kWarpThreads = 32;
constexpr int kMaxNormThreads = 256;

// Threads and blocks that keep a GPU busy: where there would be fewer, each gets less to do.
struct Parallelism {
  std::int64_t threads;
  std::int64_t blocks;
};
constexpr Parallelism kLargeGpu{32768, 256};

// Threads from which on a block takes no further tokens.
constexpr int kUsualNormThreads = 128;

// The least head dimension whose rows have threads enough to share the sums of four rows among.
constexpr int kLeastWideHeadDim = 17;

// Rows whose loads a thread issues before it computes, a power of two. The kernel for operands that are not aligned is
// there for correctness, and keeps its code short.
constexpr int rows_in_flight(int element_bytes, bool wide) { return !wide ? 1 : element_bytes == 2 ? 4 : 2; }

constexpr std::int64_t next_power_of_two(std::int64_t value) {
  std::int64_t power = 1;
  while (power < value) {
    power *= 2;
  }
  return power;
}

inline int threads_of_row(int head_dim) {
  return static_cast<int>(ceiling<std::int64_t>(next_power_of_two(head_dim), kThreadChannels));
}

inline bool rows_are_wide(const void* base, std::int64_t token_stride, std::int64_t tokens, Dtype dtype) {
  return is_multiple(base, kVectorBytes) && (tokens == 1 || token_stride * bytes_of(dtype) % kVectorBytes == 0);
}

// Whether sizes, activations and weights allow 16 bytes at every access.
inline bool is_wide(const NormContext& context, Dtype dtype) {
  const auto heads_are_wide = [&](const NormHeads& heads) {
    return heads.heads == 0 || (rows_are_wide(heads.source, heads.token_stride, context.tokens, dtype) &&
                                is_multiple(heads.weight, kVectorBytes));
  };
  return context.head_dim >= kLeastWideHeadDim && context.head_dim % kThreadChannels == 0 &&
         context.lanes % kThreadChannels == 0 && heads_are_wide(context.q) && heads_are_wide(context.k);
}

inline bool is_wide(const IncomingGradient& incoming, std::int64_t tokens, Dtype dtype) {
  return incoming.values == nullptr ||
         (incoming.channel_stride == 1 && rows_are_wide(incoming.values, incoming.token_stride, tokens, dtype));
}

inline void require_grid(std::int64_t blocks, std::int64_t parts, std::int64_t tokens) {
  if (blocks > kMaxBlocks / parts) {
    throw std::runtime_error("q_gate: " + std::to_string(tokens) + " tokens need more blocks than a CUDA grid has");
  }
}

// Throws std::runtime_error where the grid would be too large.
inline NormConfiguration configuration_for(const NormArguments& arguments, Dtype dtype,
                                           const Parallelism& enough = kLargeGpu) {
  const NormContext& context = arguments.context;
  NormConfiguration configuration;
  configuration.wide = is_wide(context, dtype) && is_multiple(arguments.q.heads, kVectorBytes) &&
                       is_multiple(arguments.q.gates, kVectorBytes) && is_multiple(arguments.k.heads, kVectorBytes);
  configuration.threads = threads_of_row(context.head_dim);
  const auto slots_of = [&](int rows) { return ceiling(context.q.heads, rows) + ceiling(context.k.heads, rows); };
  int rows = rows_in_flight(bytes_of(dtype), configuration.wide);
  while (rows > 1 && context.tokens * slots_of(rows) * configuration.threads < enough.threads) {
    rows /= 2;
  }
  configuration.rows = rows;
  configuration.q_slots = ceiling(context.q.heads, rows);

  // One slot of as many tokens as fill a warp is the smallest block.
  const int warp_tokens = kWarpThreads / configuration.threads;
  const int slots = slots_of(rows);
  const std::int64_t warps_of_tokens = ceiling<std::int64_t>(context.tokens, warp_tokens);
  const std::int64_t parts = std::max<std::int64_t>(
      ceiling(slots, kMaxNormThreads / kWarpThreads),
      std::min<std::int64_t>(slots, ceiling<std::int64_t>(enough.blocks, warps_of_tokens)));
  configuration.slots = ceiling(slots, static_cast<int>(parts));
  configuration.slot_blocks = ceiling(slots, configuration.slots);
  configuration.tokens = warp_tokens;
  while (configuration.tokens * 2 <= kMaxBlockDepth &&
         configuration.tokens * 2 * configuration.slots * configuration.threads <= kUsualNormThreads &&
         context.tokens > enough.blocks * configuration.tokens * 2) {
    configuration.tokens *= 2;
  }
  configuration.token_blocks = ceiling<std::int64_t>(context.tokens, configuration.tokens);
  require_grid(configuration.token_blocks, configuration.slot_blocks, context.tokens);
  return configuration;
}

// Throws std::runtime_error where the grid would be too large.
inline NormBackwardConfiguration configuration_for(const NormBackwardArguments& arguments, Dtype dtype,
                                                   const Parallelism& enough = kLargeGpu) {
  const NormContext& context = arguments.context;
  NormBackwardConfiguration configuration;
  configuration.wide = is_wide(context, dtype);
  for (const NormGradients* const gradients : {&arguments.q, &arguments.k}) {
    configuration.wide = configuration.wide && is_wide(gradients->heads, context.tokens, dtype) &&
                         is_wide(gradients->gates, context.tokens, dtype) &&
                         is_multiple(gradients->result, kVectorBytes);
  }
  configuration.threads = threads_of_row(context.head_dim);
  const int rows = rows_in_flight(bytes_of(dtype), configuration.wide);
  const std::int64_t q_rows = context.tokens * context.q.heads;
  const std::int64_t k_rows = context.tokens * context.k.heads;
  const int least_slots = kWarpThreads / configuration.threads;
  std::int64_t chunk = kMaxNormThreads / configuration.threads * rows;
  while (chunk > least_slots * rows && (q_rows + k_rows) / chunk < enough.blocks) {
    chunk /= 2;
  }
  const auto chunks_of = [&](std::int64_t count) {
    const std::int64_t size = std::min(chunk, next_power_of_two(count));
    return Chunks{count, ceiling(count, size), static_cast<int>(size)};
  };
  configuration.q = chunks_of(q_rows);
  configuration.k = chunks_of(k_rows);
  configuration.slots = std::max(least_slots, std::max(configuration.q.size, configuration.k.size) / rows);
  configuration.table_tokens = 1;
  for (const auto& [size, heads] :
       {std::pair(configuration.q.size, context.q.heads), std::pair(configuration.k.size, context.k.heads)}) {
    if (heads > 0) {
      configuration.table_tokens = std::max(configuration.table_tokens, (heads - 1 + size - 1) / heads + 1);
    }
  }
  require_grid(configuration.q.count + configuration.k.count, 1, context.tokens);
  return configuration;
}

// Bytes of dynamic shared memory: what channels are exchanged through, the table, and a word for each of its tokens.
inline std::size_t shared_bytes(const NormContext& context, int exchanging_threads, int table_tokens) {
  const std::size_t values = exchanging_threads * kThreadChannels + table_tokens * 2 * context.lanes;
  return values * sizeof(float) + table_tokens * sizeof(int);
}

inline std::size_t shared_bytes(const NormContext& context, const NormConfiguration& configuration) {
  const int threads = configuration.threads * configuration.slots * configuration.tokens;
  return shared_bytes(context, configuration.wide ? 0 : threads, configuration.tokens);
}

inline std::size_t shared_bytes(const NormContext& context, const NormBackwardConfiguration& configuration) {
  return shared_bytes(context, configuration.threads * configuration.slots, configuration.table_tokens);
}

}  // namespace ropecheck
