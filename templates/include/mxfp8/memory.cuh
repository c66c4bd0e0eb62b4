// Where blocks lie, and vector accesses to them.
#pragma once

#include "mxfp8/fp8.cuh"

namespace mxfp8 {

// Runs of up to four blocks, counted over all rows. Block b's elements start at 32 * b and its scale byte is b, whatever
// the shape; only where a row's last run is short does its number not follow from the run's. Where runs may cross rows,
// or no row has a short one, the host describes the tensor as one row, and the division gives row 0.
struct RunMap {
  u64 row_blocks;    // blocks of a row
  u32 runs;          // of all rows, below 2^31
  u32 runs_per_row;
  u32 multiplier;    // run / runs_per_row == run * multiplier >> shift
  u32 shift;
};

struct Run {
  u64 first_block;
  int blocks;  // 1 to 4; 0 or less past the last run
};

__device__ inline Run locate(const RunMap& map, u32 run) {
  const u32 row = static_cast<u32>(static_cast<u64>(run) * map.multiplier >> map.shift);
  const u64 in_row = static_cast<u64>(run - row * map.runs_per_row) * kBlocksPerRun;
  const u64 left = map.row_blocks - in_row;
  const int blocks = left < kBlocksPerRun ? static_cast<int>(left) : kBlocksPerRun;
  return {row * map.row_blocks + in_row, run < map.runs ? blocks : 0};
}

// Read once and by nobody else: no room in L1.
__device__ inline uint4 load16(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

__device__ inline uint2 load8(const void* address) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
  return v;
}

__device__ inline u32 load4(const void* address) {
  u32 v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}

}  // namespace mxfp8
