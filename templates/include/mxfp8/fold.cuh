// MXFP8 to MXFP8 with one scale per run of four blocks, or per tile of 128 rows x 128 elements. The elements stay in
// registers between the search for the shared scale and the shift: each is read once and written once.
#pragma once

#include "mxfp8/run_map.cuh"

namespace mxfp8 {

struct FoldParams {
  const u8* data;       // contiguous, 16-byte aligned
  const u8* scale;
  u8* data_out;         // 16-byte aligned
  u8* scale_out;
  u8* run_scale;        // the shared scales once more, (matrices, runs of a row, padded rows)
  u8* tile_scale;       // (matrices, row_tiles, runs of a row); rows=128 only
  u64* changed;         // counter of elements whose value changed; with statistics only
  RunMap map;           // rows=1 only
  u32 rows;             // of one matrix
  u32 row_tiles, row_blocks, runs_per_row;  // rows=128 only: tiles of rows of one matrix; blocks and runs of a row
};

// What both kernels do with the elements of a thread: 16 from each of 4 loads. Eight lanes hold a run, two a block.
template <class Format, bool Stats>
struct FoldLane {
  static constexpr int kRunLanes = 8;
  static constexpr int kBlockLanes = 2;
  static constexpr int kLoads = 4;

  u32 words[kLoads][4];
  int scale[kLoads];
  u32 block[kLoads];
  bool nonfinite[kLoads];
  u32 changed;

  __device__ void load(const FoldParams& params, int i, u32 its_block) {
    block[i] = its_block;
    // Lanes without a block load another's and store nothing: a predicate for each load would serialize the loads.
    const u32 source = its_block != kNoBlock ? its_block : 0;
    const uint4 raw = ptx::load16(params.data + offset(source));
    scale[i] = ptx::load1(params.scale + source);
    words[i][0] = raw.x;
    words[i][1] = raw.y;
    words[i][2] = raw.z;
    words[i][3] = raw.w;
  }

  // The scale that the run of load i needs, in all its lanes; kNoScale if none. All lanes take part.
  __device__ int run_scale(int i) {
    u32 magnitude = magnitude_max16(words[i]);
    nonfinite[i] = magnitude >= Format::kFirstNonFinite;
    if (nonfinite[i]) {
      u32 finite[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) finite[j] = words[i][j] & ~nonfinite_mask<Format>(words[i][j]);
      magnitude = magnitude_max16(finite);
    }
    int needed = block[i] != kNoBlock ? needed_scale<Format>(magnitude, scale[i]) : kNoScale;
    // A scale below 0 cannot be stored, and 0 serves.
    if (needed != kNoScale) needed = max(needed, 0);
#pragma unroll
    for (int distance = 1; distance < kRunLanes; distance *= 2)
      needed = max(needed, __shfl_xor_sync(kAllLanes, needed, distance));
    return needed;
  }

  __device__ void store(const FoldParams& params, int i, int shared) {
    if (block[i] == kNoBlock) return;
    u32 out[4] = {words[i][0], words[i][1], words[i][2], words[i][3]};
    if (shared != scale[i]) shift(out, i, shared);
    *reinterpret_cast<uint4*>(params.data_out + offset(block[i])) = make_uint4(out[0], out[1], out[2], out[3]);
    // Scale rows have no alignment to speak of; the first of a block's two lanes stores the byte.
    if (threadIdx.x % kBlockLanes == 0) params.scale_out[block[i]] = static_cast<u8>(shared);
  }

  // Adds the thread's count to the total. All lanes take part.
  __device__ void report(const FoldParams& params) const {
    if constexpr (Stats) {
      const u32 of_warp = __reduce_add_sync(kAllLanes, changed);
      if (threadIdx.x % 32 == 0 && of_warp != 0) atomicAdd(params.changed, static_cast<u64>(of_warp));
    }
  }

 private:
  // The thread's elements in a block.
  static __device__ u64 offset(u32 block) {
    return static_cast<u64>(block) * kBlock + threadIdx.x % kBlockLanes * (kBlock / kBlockLanes);
  }

  __device__ void shift(u32 (&out)[4], int i, int shared) {
    if (scale[i] == kScaleNan) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[j] = kNanBytes;
      return;
    }
    shift_finite<Format>(out, scale[i] - shared);
    if (nonfinite[i]) {  // these stay as they are
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 mask = nonfinite_mask<Format>(words[i][j]);
        out[j] = (out[j] & ~mask) | (words[i][j] & mask);
      }
    }
    if constexpr (Stats) {
#pragma unroll
      for (int j = 0; j < 4; ++j) changed += changed4<Format>(words[i][j], scale[i], out[j], shared);
    }
  }
};

template <class Format, bool Stats>
__device__ void fold_runs(const FoldParams& params) {
  using Lane = FoldLane<Format, Stats>;
  constexpr int kRunsPerLoad = 32 / Lane::kRunLanes;
  const u32 warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const u32 first_run = warp * (Lane::kLoads * kRunsPerLoad) + threadIdx.x % 32 / Lane::kRunLanes;

  Lane lane;
  lane.changed = 0;
#pragma unroll
  for (int i = 0; i < Lane::kLoads; ++i) {
    const u32 in_run = threadIdx.x % Lane::kRunLanes / Lane::kBlockLanes;
    lane.load(params, i, locate(params.map, first_run + i * kRunsPerLoad, in_run));
  }
  ptx::after_loads();
#pragma unroll
  for (int i = 0; i < Lane::kLoads; ++i) {
    const u32 run = first_run + i * kRunsPerLoad;
    const int shared = shared_scale(lane.run_scale(i));
    lane.store(params, i, shared);
    if (threadIdx.x % Lane::kRunLanes == 0 && run < params.map.runs)
      params.run_scale[run_scale_index(params.map, run, params.rows)] = static_cast<u8>(shared);
  }
  lane.report(params);
}

// One CTA of 256 threads per tile; neighbouring CTAs take neighbouring tiles of the same rows, so that their scale bytes
// meet in L2.
template <class Format, bool Stats>
__device__ void fold_tiles(const FoldParams& params) {
  using Lane = FoldLane<Format, Stats>;
  constexpr int kWarps = 8;
  constexpr int kRowsPerLoad = kWarps * 32 / Lane::kRunLanes;
  __shared__ int highest_of_warp[kWarps], lowest_of_warp[kWarps];

  const u32 run_in_row = blockIdx.x % params.runs_per_row;
  const u32 row_tile = blockIdx.x / params.runs_per_row;  // over all matrices
  const u32 matrix = row_tile / params.row_tiles;
  const u32 first_row = row_tile % params.row_tiles * 128 + threadIdx.x / Lane::kRunLanes;
  const u32 in_row = run_in_row * kBlocksPerRun + threadIdx.x % Lane::kRunLanes / Lane::kBlockLanes;

  Lane lane;
  lane.changed = 0;
#pragma unroll
  for (int i = 0; i < Lane::kLoads; ++i) {
    const u32 row = first_row + i * kRowsPerLoad;
    const bool inside = row < params.rows && in_row < params.row_blocks;
    lane.load(params, i, inside ? (matrix * params.rows + row) * params.row_blocks + in_row : kNoBlock);
  }
  ptx::after_loads();

  int needed[Lane::kLoads];
  int highest = kNoScale, lowest = kScaleNan;
#pragma unroll
  for (int i = 0; i < Lane::kLoads; ++i) {
    needed[i] = lane.run_scale(i);
    highest = max(highest, needed[i]);
    lowest = min(lowest, needed[i] == kNoScale ? kScaleNan : needed[i]);
  }
  highest = __reduce_max_sync(kAllLanes, highest);
  lowest = __reduce_min_sync(kAllLanes, lowest);
  if (threadIdx.x % 32 == 0) {
    highest_of_warp[threadIdx.x / 32] = highest;
    lowest_of_warp[threadIdx.x / 32] = lowest;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    highest = max(highest, highest_of_warp[i]);
    lowest = min(lowest, lowest_of_warp[i]);
  }

  const bool mixed = highest - lowest > Format::kTileLimit;
  if (threadIdx.x == 0) params.tile_scale[blockIdx.x] = static_cast<u8>(mixed ? kScaleNan : shared_scale(highest));
#pragma unroll
  for (int i = 0; i < Lane::kLoads; ++i) {
    const u32 row = first_row + i * kRowsPerLoad;
    const int shared = shared_scale(mixed ? needed[i] : highest);
    lane.store(params, i, shared);
    if (threadIdx.x % Lane::kRunLanes == 0 && row < params.rows)
      params.run_scale[run_scale_index(matrix * params.runs_per_row + run_in_row, row, params.rows)] =
          static_cast<u8>(shared);
  }
  lane.report(params);
}

}  // namespace mxfp8
