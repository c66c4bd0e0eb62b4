// Enough of CUDA to run the elementwise kernels on a CPU: each thread of a CTA is a fiber, and all fibers go from one
// synchronizing call to the next in turn. Threads of a CTA that synchronize differently often are an error, which is
// stricter than CUDA and holds for these kernels.
#pragma once

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__ static
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulator {

struct Index { unsigned x; };
inline Index thread, block, block_size, grid_size;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  unsigned syncs;  // synchronizing calls so far
  bool done;
};
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline std::function<void()> kernel;
inline unsigned exchanged[2][1024];  // by the parity of `syncs`: a value is read before its slot is written again

inline void run_fiber() {
  kernel();
  fibers[thread.x].done = true;
}

inline void launch(std::function<void()> body, unsigned grid, unsigned threads) {
  kernel = std::move(body);
  block_size.x = threads;
  grid_size.x = grid;
  fibers.resize(threads);
  for (block.x = 0; block.x < grid; ++block.x) {
    for (Fiber& fiber : fibers) {
      fiber.syncs = 0;
      fiber.done = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack = {fiber.stack.data(), 0, fiber.stack.size()};
      fiber.context.uc_link = &scheduler;
      makecontext(&fiber.context, run_fiber, 0);
    }
    while (!fibers[0].done) {
      for (thread.x = 0; thread.x < threads; ++thread.x) swapcontext(&scheduler, &fibers[thread.x].context);
      for (const Fiber& fiber : fibers) {
        if (fiber.done == fibers[0].done && fiber.syncs == fibers[0].syncs) continue;
        std::fprintf(stderr, "threads of CTA %u synchronize differently often\n", block.x);
        std::abort();
      }
    }
  }
}

inline void sync() {
  Fiber& fiber = fibers[thread.x];
  ++fiber.syncs;
  swapcontext(&fiber.context, &scheduler);
}

// Gives every thread's value to the others; returns those of the thread's warp.
inline const unsigned* exchange(unsigned value) {
  unsigned* slots = exchanged[fibers[thread.x].syncs % 2];
  slots[thread.x] = value;
  sync();
  return slots + thread.x / 32 * 32;
}

template <class To, class From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class Value, class Combine>
Value reduce(Value value, Combine combine) {
  const unsigned* values = exchange(bits<unsigned>(value));
  Value result = bits<Value>(values[0]);
  for (int lane = 1; lane < 32; ++lane) result = combine(result, bits<Value>(values[lane]));
  return result;
}

}  // namespace emulator

#define threadIdx emulator::thread
#define blockIdx emulator::block
#define blockDim emulator::block_size

inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline float __uint_as_float(unsigned x) { return emulator::bits<float>(x); }
inline float __int_as_float(int x) { return emulator::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emulator::bits<unsigned>(x); }
inline float __fmul_rn(float a, float b) { return a * b; }

inline void __syncthreads() { emulator::sync(); }
inline void __syncwarp() { emulator::sync(); }

inline int __syncthreads_count(int predicate) {
  const unsigned* values = emulator::exchange(predicate != 0) - threadIdx.x / 32 * 32;
  int count = 0;
  for (unsigned i = 0; i < blockDim.x; ++i) count += values[i];
  return count;
}

template <class Value>
Value __shfl_sync(unsigned, Value value, int lane) {
  return emulator::bits<Value>(emulator::exchange(emulator::bits<unsigned>(value))[lane & 31]);
}
template <class Value>
Value __shfl_xor_sync(unsigned mask, Value value, int distance) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x) ^ distance);
}
inline int __reduce_max_sync(unsigned, int x) { return emulator::reduce(x, [](int a, int b) { return max(a, b); }); }
inline int __reduce_min_sync(unsigned, int x) { return emulator::reduce(x, [](int a, int b) { return min(a, b); }); }
inline unsigned __reduce_add_sync(unsigned, unsigned x) {
  return emulator::reduce(x, [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long x) { return (*address += x) - x; }
