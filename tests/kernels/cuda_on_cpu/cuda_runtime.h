// Runs csrc/cuda on a CPU, for its logic alone: found by g++ in place of CUDA's own header.
//
// Each thread of a block is a fiber. It runs until it has to wait for its warp or its block, and a
// warp runs as far ahead of the others as it can. Threads that wait for others in vain abort.

#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(threads)

using cudaStream_t = void*;
using cudaError_t = int;

struct dim3 {
  unsigned x;
  explicit dim3(unsigned size) : x(size) {}
};

namespace cuda_on_cpu {

constexpr unsigned kWarp = 32;
constexpr size_t kStack = 1 << 16;

// Where threads wait for each other: all of a warp, or all of a block.
struct Meeting {
  unsigned size = 0, here = 0, round = 0;
};

struct Block {
  unsigned threads, number, grid;
  unsigned current = 0, moves = 0;
  ucontext_t scheduler;
  std::vector<ucontext_t> fibers;
  std::vector<char> done, stacks;
  std::vector<Meeting> warps;
  Meeting all;
  std::vector<uint64_t> values;  // what threads hand to a shuffle
};

inline Block* block = nullptr;

inline void wait(Meeting& meeting) {
  const unsigned round = meeting.round;
  ++block->moves;
  if (++meeting.here == meeting.size) {
    meeting.here = 0;
    ++meeting.round;
  }
  while (meeting.round == round)
    swapcontext(&block->fibers[block->current], &block->scheduler);
}

// The value of another thread of the warp.
template <class V, class Source>
V shuffle(V value, Source source) {
  const unsigned self = block->current, warp = self / kWarp;
  V given = value;
  __builtin_memcpy(&block->values[self], &given, sizeof(V));
  wait(block->warps[warp]);
  V result;
  __builtin_memcpy(&result, &block->values[warp * kWarp + source(self % kWarp)], sizeof(V));
  wait(block->warps[warp]);
  return result;
}

template <class Kernel>
struct Call {
  static inline void (*function)(Kernel);
  static inline const Kernel* kernel;
  static void run() {
    function(*kernel);
    block->done[block->current] = 1;
    ++block->moves;
  }
};

// As far as it gets without other warps, so that none waits for another by chance. Is any left?
inline bool run_warp(Block& one, unsigned warp) {
  bool left = true;
  for (unsigned before = one.moves - 1; left && one.moves != before;) {
    before = one.moves;
    left = false;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      one.current = warp * kWarp + lane;
      if (one.done[one.current]) continue;
      left = true;
      swapcontext(&one.scheduler, &one.fibers[one.current]);
    }
  }
  return left;
}

inline void run_fibers(Block& one, void (*body)()) {
  for (unsigned i = 0; i < one.threads; ++i) {
    getcontext(&one.fibers[i]);
    one.fibers[i].uc_stack.ss_sp = one.stacks.data() + i * kStack;
    one.fibers[i].uc_stack.ss_size = kStack;
    one.fibers[i].uc_link = &one.scheduler;
    makecontext(&one.fibers[i], body, 0);
  }
  for (bool left = true; left;) {
    left = false;
    const unsigned before = one.moves;
    for (unsigned warp = 0; warp < one.threads / kWarp; ++warp) left |= run_warp(one, warp);
    if (left && one.moves == before) {
      std::fprintf(stderr, "cuda_on_cpu: threads of a block wait for others that never come\n");
      std::abort();
    }
  }
}

}  // namespace cuda_on_cpu

template <class Kernel>
cudaError_t cudaLaunchKernel(void (*function)(Kernel), dim3 grid, dim3 threads, void** arguments,
                             size_t, cudaStream_t) {
  using namespace cuda_on_cpu;
  Call<Kernel>::function = function;
  Call<Kernel>::kernel = static_cast<const Kernel*>(arguments[0]);
  Block one;
  one.threads = threads.x;
  one.grid = grid.x;
  one.fibers.resize(threads.x);
  one.stacks.resize(threads.x * kStack);
  one.values.resize(threads.x);
  block = &one;
  for (one.number = 0; one.number < grid.x; ++one.number) {
    one.done.assign(threads.x, 0);
    one.warps.assign(threads.x / kWarp, Meeting{kWarp});
    one.all = Meeting{threads.x};
    run_fibers(one, Call<Kernel>::run);
  }
  block = nullptr;
  return 0;
}

// What kernels see of their place.
struct ThreadIndex {
  struct X {
    operator unsigned() const { return cuda_on_cpu::block->current; }
  } x;
};
struct BlockIndex {
  struct X {
    operator unsigned() const { return cuda_on_cpu::block->number; }
  } x;
};
struct GridSize {
  struct X {
    operator unsigned() const { return cuda_on_cpu::block->grid; }
  } x;
};
inline ThreadIndex threadIdx;
inline BlockIndex blockIdx;
inline GridSize gridDim;

inline void __syncthreads() { cuda_on_cpu::wait(cuda_on_cpu::block->all); }

template <class V>
V __shfl_xor_sync(unsigned, V value, int step) {
  return cuda_on_cpu::shuffle(value, [=](unsigned lane) { return lane ^ step; });
}

template <class V>
V __shfl_up_sync(unsigned, V value, int step) {
  return cuda_on_cpu::shuffle(value, [=](unsigned lane) {
    return lane < static_cast<unsigned>(step) ? lane : lane - step;
  });
}
