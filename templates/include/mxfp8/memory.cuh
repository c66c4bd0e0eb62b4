// Where blocks lie, and vector accesses to them.
#pragma once

#include "mxfp8/fp8.cuh"

namespace mxfp8 {

// Runs of up to four blocks, counted over all rows. Block b's elements start at 32 * b and its scale byte is b, whatever
// the shape; only where rows end with a short run does its number not follow from the run's. Elsewhere the host describes
// the tensor as one row.
struct RunMap {
  u32 row_blocks;    // blocks of a row; of the tensor fewer than 2^32
  u32 runs;          // of all rows, fewer than 2^31
  u32 runs_per_row;
  u32 multiplier;    // run / runs_per_row == run * multiplier >> shift, for all runs below 2^31
  u32 shift;
};

constexpr u32 kNoBlock = 0xFFFFFFFFu;

// The block that is `in_run`-th of a run, or kNoBlock past the end of the row or of the tensor.
__device__ inline u32 locate(const RunMap& map, u32 run, u32 in_run) {
  const u32 row = static_cast<u32>(static_cast<u64>(run) * map.multiplier >> map.shift);
  const u32 in_row = (run - row * map.runs_per_row) * kBlocksPerRun + in_run;
  return run < map.runs && in_row < map.row_blocks ? row * map.row_blocks + in_row : kNoBlock;
}

// A thread has all of its loads in flight at once: that is what hides their latency here. ptxas moves loads of read-only
// memory (ld.global.nc, __ldg) down to their first use, one after the other, so these are plain ones, and after_loads()
// follows the last. The data is read once and by nobody else: no room in L1.
__device__ inline uint4 load16(const void* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

__device__ inline uint2 load8(const void* address) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(address)
               : "memory");
  return v;
}

__device__ inline u32 load4(const void* address) {
  u32 v;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

// Scale bytes have neighbours in the same sector that other lanes read: L1 keeps them.
__device__ inline int load1(const u8* address) {
  u32 v;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return static_cast<int>(v);
}

__device__ inline void after_loads() { __syncwarp(); }

}  // namespace mxfp8
