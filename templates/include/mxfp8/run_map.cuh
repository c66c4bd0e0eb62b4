// Where blocks lie.
#pragma once

#include "mxfp8/fp8.cuh"

namespace mxfp8 {

// Runs of up to four blocks, counted over all rows. Block b's elements start at 32 * b and its scale byte is b, whatever
// the shape; where rows end with a short run, its number does not follow from the run's.
struct RunMap {
  u32 row_blocks;    // blocks of a row; of the tensor fewer than 2^32
  u32 runs;          // of all rows, fewer than 2^30
  u32 runs_per_row;
  u32 multiplier;    // run / runs_per_row == run * multiplier >> shift, for all runs below 2^31
  u32 shift;
};

constexpr u32 kNoBlock = 0xFFFFFFFFu;

__device__ inline u32 row_of(const RunMap& map, u32 run) {
  return static_cast<u32>(static_cast<u64>(run) * map.multiplier >> map.shift);
}

// The block that is `in_run`-th of a run, or kNoBlock past the end of the row or of the tensor.
__device__ inline u32 locate(const RunMap& map, u32 run, u32 in_run) {
  const u32 row = row_of(map, run);
  const u32 in_row = (run - row * map.runs_per_row) * kBlocksPerRun + in_run;
  return run < map.runs && in_row < map.row_blocks ? row * map.row_blocks + in_row : kNoBlock;
}

// Where a row's byte lies in run_scale, (matrices, runs of a row, rows of a matrix). Each run's rows begin at a multiple
// of 16 bytes, as bulk copies need it; what lies between has no meaning.
__device__ inline u64 run_scale_index(u32 run_of_matrices, u32 row_in_matrix, u32 rows) {
  return static_cast<u64>(run_of_matrices) * ((rows + 15) / 16 * 16) + row_in_matrix;
}

__device__ inline u64 run_scale_index(const RunMap& map, u32 run, u32 rows) {
  const u32 row = row_of(map, run);
  const u32 matrix = row / rows;
  return run_scale_index(matrix * map.runs_per_row + run - row * map.runs_per_row, row - matrix * rows, rows);
}

}  // namespace mxfp8
