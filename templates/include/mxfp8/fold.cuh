// MXFP8 to MXFP8 with one scale per run of four blocks, or per tile of 128 rows x 128 elements. The elements stay in
// registers between the search for the shared scale and the shift: each is read once and written once.
#pragma once

#include "mxfp8/memory.cuh"

namespace mxfp8 {

struct FoldParams {
  const u8* data;       // contiguous, 16-byte aligned
  const u8* scale;
  u8* data_out;         // 16-byte aligned
  u8* scale_out;
  u8* tile_scale;       // (matrices, row_tiles, runs of a row); rows=128 only
  u64* changed;         // counter of elements whose value changed; with statistics only
  RunMap map;           // rows=1 only
  u32 rows, row_tiles;  // of one matrix; the rest is for rows=128 only
  u32 row_blocks, runs_per_row;
};

// What both kernels do with the 16 elements of a thread. Eight lanes hold a run, two a block.
template <class Format, bool Stats>
struct FoldLane {
  static constexpr int kElements = 16;
  static constexpr int kRunLanes = 8;
  static constexpr int kLoads = 4;
  static constexpr u64 kNowhere = ~0ull;

  uint4 raw[kLoads];
  int scale[kLoads];
  u64 where[kLoads];  // the thread's first element, or kNowhere
  u32 changed;

  __device__ void load(const FoldParams& params, int i, u64 first_block, int blocks) {
    const int in_run = threadIdx.x % kRunLanes;
    where[i] = in_run / 2 < blocks ? first_block * kBlock + in_run * kElements : kNowhere;
    raw[i] = make_uint4(0, 0, 0, 0);
    scale[i] = 0;
    if (where[i] == kNowhere) return;
    raw[i] = load16(params.data + where[i]);
    scale[i] = params.scale[where[i] / kBlock];
  }

  // The scale that the run of load i needs, in all its lanes; kNoScale if none. All lanes take part.
  __device__ int run_scale(int i) const {
    int needed = needed_scale<Format>(finite_max16<Format>(raw[i]), scale[i]);
    // A scale below 0 cannot be stored, and 0 serves.
    if (needed != kNoScale) needed = max(needed, 0);
#pragma unroll
    for (int distance = 1; distance < kRunLanes; distance *= 2)
      needed = max(needed, __shfl_xor_sync(kAllLanes, needed, distance));
    return needed;
  }

  __device__ void store(const FoldParams& params, int i, int shared) {
    if (where[i] == kNowhere) return;
    uint4 out = raw[i];
    if (shared != scale[i]) {
      out.x = shift(raw[i].x, i, shared);
      out.y = shift(raw[i].y, i, shared);
      out.z = shift(raw[i].z, i, shared);
      out.w = shift(raw[i].w, i, shared);
    }
    *reinterpret_cast<uint4*>(params.data_out + where[i]) = out;
    // Scale rows have no alignment to speak of; the first of a block's two lanes stores the byte.
    if (threadIdx.x % 2 == 0) params.scale_out[where[i] / kBlock] = static_cast<u8>(shared);
  }

  // Adds the thread's count to the total. All lanes take part.
  __device__ void report(const FoldParams& params) const {
    if constexpr (Stats) {
      const u32 of_warp = __reduce_add_sync(kAllLanes, changed);
      if (threadIdx.x % 32 == 0 && of_warp != 0) atomicAdd(params.changed, static_cast<u64>(of_warp));
    }
  }

 private:
  __device__ u32 shift(u32 bytes, int i, int shared) {
    const u32 out = shift4<Format>(bytes, scale[i], shared);
    if constexpr (Stats) changed += changed4<Format>(bytes, scale[i], out, shared);
    return out;
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
    const Run run = locate(params.map, first_run + i * kRunsPerLoad);
    lane.load(params, i, run.first_block, run.blocks);
  }
#pragma unroll
  for (int i = 0; i < Lane::kLoads; ++i) lane.store(params, i, shared_scale(lane.run_scale(i)));
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
  const u32 first_block = run_in_row * kBlocksPerRun;
  const int blocks = min(params.row_blocks - first_block, static_cast<u32>(kBlocksPerRun));

  Lane lane;
  lane.changed = 0;
#pragma unroll
  for (int i = 0; i < Lane::kLoads; ++i) {
    const u32 row = first_row + i * kRowsPerLoad;
    const u64 block = (static_cast<u64>(matrix) * params.rows + row) * params.row_blocks + first_block;
    lane.load(params, i, block, row < params.rows ? blocks : 0);
  }

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
  for (int i = 0; i < Lane::kLoads; ++i) lane.store(params, i, shared_scale(mixed ? needed[i] : highest));
  lane.report(params);
}

}  // namespace mxfp8
