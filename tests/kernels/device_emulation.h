// Enough of CUDA to run a kernel's source on a host, block after block: its threads are contexts that take turns and
// wait for one another where the kernel says so. Every thread of a warp must come to a shuffle, and of a block to a
// barrier, else the block is given up; shared memory holds NaN before a block starts.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <typename Value>
Value __ldg(const Value* address) {
  return *address;
}

template <typename Value>
Value min(Value a, std::common_type_t<Value> b) {
  return b < a ? b : a;
}

inline dim3 blockDim;
inline dim3 blockIdx;
inline dim3 threadIdx;

namespace emulation {

constexpr int kWarp = 32;
constexpr std::size_t kStackBytes = 64 * 1024;

struct Barrier {
  int arrived = 0;
  int generation = 0;
};

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStackBytes);
  dim3 index;
  bool finished = false;
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Barrier> barriers;  // of each warp, then of the block
  std::vector<std::uint32_t> shuffled;
  ucontext_t scheduler;
  std::function<void()> kernel;
  int current = 0;
  bool moved = false;
};

inline Block block;

inline void resume_scheduler() { swapcontext(&block.threads[block.current].context, &block.scheduler); }

inline void wait(Barrier& barrier, int threads) {
  const int generation = barrier.generation;
  block.moved = true;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) {
    resume_scheduler();
  }
}

inline void run_thread() {
  block.kernel();
  block.threads[block.current].finished = true;
  block.moved = true;
}

inline void wait_for_warp() { wait(block.barriers[block.current / kWarp], kWarp); }

// `backwards` has the last thread go first: what misses a barrier would show in one of the two orders.
inline void run_block(const std::function<void()>& kernel, bool backwards) {
  const int count = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  if (count % kWarp != 0 || count > 1024) {
    throw std::runtime_error("a block has whole warps, at most 32");
  }
  block.threads.resize(count);
  block.barriers.assign(count / kWarp + 1, {});
  block.shuffled.assign(count, 0);
  block.kernel = kernel;
  for (int i = 0; i < count; ++i) {
    Thread& thread = block.threads[i];
    const unsigned row = i / blockDim.x;
    thread.index = {i % blockDim.x, row % blockDim.y, row / blockDim.y};
    thread.finished = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = &block.scheduler;
    makecontext(&thread.context, run_thread, 0);
  }
  for (int left = count; left > 0;) {
    block.moved = false;
    left = count;
    for (int turn = 0; turn < count; ++turn) {
      block.current = backwards ? count - 1 - turn : turn;
      Thread& thread = block.threads[block.current];
      if (!thread.finished) {
        threadIdx = thread.index;
        swapcontext(&block.scheduler, &thread.context);
      }
      left -= thread.finished;
    }
    if (!block.moved) {
      throw std::runtime_error("threads wait for others that do not come");
    }
  }
}

}  // namespace emulation

inline void __syncthreads() {
  emulation::wait(emulation::block.barriers.back(), static_cast<int>(emulation::block.threads.size()));
}

inline void __syncwarp() { emulation::wait_for_warp(); }

template <typename Value>
Value __shfl_sync(unsigned, Value value, int lane) {
  static_assert(sizeof(Value) == sizeof(std::uint32_t));
  using namespace emulation;
  std::memcpy(&block.shuffled[block.current], &value, sizeof(value));
  wait_for_warp();
  std::memcpy(&value, &block.shuffled[block.current / kWarp * kWarp + lane % kWarp], sizeof(value));
  wait_for_warp();
  return value;
}

template <typename Value>
Value __shfl_xor_sync(unsigned mask, Value value, int step) {
  return __shfl_sync(mask, value, emulation::block.current % emulation::kWarp ^ step);
}

// Runs a kernel over a grid of one dimension; `shared` and its bytes are the dynamic shared memory.
template <typename Kernel, typename... Arguments>
void launch_emulated(Kernel kernel, std::int64_t blocks, dim3 threads, void* shared, std::size_t shared_bytes,
                     bool backwards, const Arguments&... arguments) {
  blockDim = threads;
  for (std::int64_t i = 0; i < blocks; ++i) {
    blockIdx = {static_cast<unsigned>(i)};
    std::memset(shared, 0xff, shared_bytes);
    emulation::run_block([&] { kernel(arguments...); }, backwards);
  }
}
