// MXFP8 to MXFP8 with one scale per run of four blocks, or per tile of 128 rows x 128 elements. Persistent CTAs: while one
// shifts the elements of a box in shared memory in place, the copy engine fills and empties its other stages. A thread has
// a whole run, so that nothing is exchanged to find its scale.
#pragma once

#include "mxfp8/copy_engine.cuh"
#include "mxfp8/fold_run.cuh"
#include "mxfp8/run_map.cuh"

namespace mxfp8 {

struct FoldParams {
  TensorMap data, data_out;  // (matrices, rows, K) in pieces of (1, box rows, 128) with a 128-byte swizzle
  const u8* scale;
  u8* scale_out;
  u8* run_scale;   // the shared scales once more, (matrices, runs of a row, padded rows)
  u8* tile_scale;  // (matrices, row_boxes, runs of a row); tiles only
  u64* changed;    // counter of elements whose value changed; with statistics only
  u32 rows;        // of one matrix
  u32 row_boxes;   // boxes that the rows of one matrix take
  u32 row_blocks, runs_per_row;  // of a row
  u32 run_boxes;   // boxes that a row takes
  u32 boxes;       // of all matrices: matrices * row_boxes * run_boxes
};

// What a stage of shared memory holds: Rows rows of Runs runs, as one piece of Rows x 128 bytes for each run.
template <int Rows, int Runs, int Stages>
struct FoldBox {
  static_assert(32 % Runs == 0 && Rows % 8 == 0);  // a warp has whole rows; pieces are whole swizzle patterns
  static constexpr int kRows = Rows, kRuns = Runs, kStages = Stages, kWarps = Rows * Runs / 32;
  static constexpr u32 kPieceBytes = Rows * 128, kBytes = Runs * kPieceBytes;
};

template <class Format, class Box, bool Tiles, bool Stats>
struct Fold {
  static_assert(!Tiles || Box::kRows == 128);

  struct Place {
    u32 matrix, first_row, first_run;
  };

  static __device__ void run(const FoldParams& params) {
    u8* const memory = ptx::dynamic_shared();
    u64* const full = reinterpret_cast<u64*>(memory + Box::kStages * Box::kBytes);
    int* const of_warps = reinterpret_cast<int*>(full + Box::kStages);
    const bool leader = threadIdx.x == 0;
    if (leader) {
      for (int i = 0; i < Box::kStages; ++i) ptx::barrier_init(&full[i], 1);
      ptx::barrier_fence();
    }
    __syncthreads();
    if (leader) {
      for (u32 i = 0; i < Box::kStages - 1; ++i)
        load(params, blockIdx.x + i * gridDim.x, memory + i * Box::kBytes, &full[i]);
    }

    const u32 run_in_box = threadIdx.x % Box::kRuns, row_in_box = threadIdx.x / Box::kRuns;
    u32 stage = 0, phase = 0, changed = 0;
    Place place = locate_box(params, blockIdx.x);
    u32 scales = load_scales(params, place, row_in_box, run_in_box);
    for (u32 box = blockIdx.x; box < params.boxes; box += gridDim.x) {
      const Place next = locate_box(params, box + gridDim.x);
      const u32 next_scales = load_scales(params, next, row_in_box, run_in_box);
      const u32 row = place.first_row + row_in_box, run = place.first_run + run_in_box;
      u8* const bytes = memory + stage * Box::kBytes;
      ptx::barrier_wait(&full[stage], phase);
      FoldRun<Format, Stats> its(bytes + run_in_box * Box::kPieceBytes + row_in_box * 128, row_in_box, scales);
      const int needed = its.needed();
      int shared = shared_scale(needed);
      if constexpr (Tiles) {
        const int tile = tile_scale(needed, of_warps, run_in_box);
        if (tile != kScaleNan) shared = tile;
        if (row_in_box == 0 && run < params.runs_per_row)
          params.tile_scale[(place.matrix * params.row_boxes + place.first_row / Box::kRows) * params.runs_per_row + run] =
              static_cast<u8>(tile);
      }
      const u32 its_changed = its.shift(shared);
      if (row < params.rows && run < params.runs_per_row) {  // beyond a row's last run, memory holds what it held before
        changed += its_changed;
        params.run_scale[run_scale_index(place.matrix * params.runs_per_row + run, row, params.rows)] =
            static_cast<u8>(shared);
        store_scales(params, (place.matrix * params.rows + row) * params.row_blocks, run, shared);
      }
      ptx::fence_writes();
      __syncthreads();
      if (leader) {
        store(params, place, bytes);
        ptx::wait_for_stores<1>();  // the stage before this one is free then
        const u32 free = (stage + Box::kStages - 1) % Box::kStages;
        load(params, box + (Box::kStages - 1) * gridDim.x, memory + free * Box::kBytes, &full[free]);
      }
      place = next;
      scales = next_scales;
      if (++stage == Box::kStages) stage = 0, phase ^= 1;
    }
    if (leader) ptx::wait_for_stores<0>();
    if constexpr (Stats) {
      const u32 of_warp = __reduce_add_sync(kAllLanes, changed);
      if (threadIdx.x % 32 == 0 && of_warp != 0) atomicAdd(params.changed, static_cast<u64>(of_warp));
    }
  }

 private:
  // Neighbouring CTAs take neighbouring boxes of the same rows: their scale bytes meet in L2. Past the last box: the last.
  static __device__ Place locate_box(const FoldParams& params, u32 box) {
    box = min(box, params.boxes - 1);
    const u32 rows = box / params.run_boxes;  // over all matrices
    const u32 matrix = rows < params.row_boxes ? 0 : rows / params.row_boxes;
    return {matrix, (rows - matrix * params.row_boxes) * Box::kRows, (box - rows * params.run_boxes) * Box::kRuns};
  }

  // A row's last box may have fewer runs, and the others' pieces would lie outside the tensor.
  static __device__ u32 runs_at(const FoldParams& params, const Place& place) {
    return min(params.runs_per_row - place.first_run, static_cast<u32>(Box::kRuns));
  }

  static __device__ void load(const FoldParams& params, u32 box, u8* to, u64* barrier) {
    if (box >= params.boxes) return;
    const Place place = locate_box(params, box);
    const u32 runs = runs_at(params, place);
    ptx::barrier_expect(barrier, runs * Box::kPieceBytes);
    for (u32 i = 0; i < runs; ++i)
      ptx::load_box(to + i * Box::kPieceBytes, params.data, barrier, (place.first_run + i) * 128, place.first_row,
                    place.matrix);
  }

  static __device__ void store(const FoldParams& params, const Place& place, const u8* from) {
    const u32 runs = runs_at(params, place);
    for (u32 i = 0; i < runs; ++i)
      ptx::store_box(params.data_out, from + i * Box::kPieceBytes, (place.first_run + i) * 128, place.first_row,
                     place.matrix);
    ptx::commit_stores();
  }

  static __device__ bool whole_words(const u8* scale, u32 row_blocks) {
    return (reinterpret_cast<u64>(scale) | row_blocks) % 4 == 0;
  }

  // The four scale bytes of a run; zeros where the row or the tensor has ended, as elements are.
  static __device__ u32 load_scales(const FoldParams& params, const Place& place, u32 row_in_box, u32 run_in_box) {
    const u32 row = place.first_row + row_in_box, run = place.first_run + run_in_box;
    if (row >= params.rows || run >= params.runs_per_row) return 0;
    const u8* scale = params.scale + (place.matrix * params.rows + row) * params.row_blocks + run * kBlocksPerRun;
    if (whole_words(params.scale, params.row_blocks)) return ptx::load4(scale);
    u32 word = 0;
#pragma unroll
    for (u32 i = 0; i < kBlocksPerRun; ++i)
      if (run * kBlocksPerRun + i < params.row_blocks) word |= static_cast<u32>(ptx::load1(scale + i)) << 8 * i;
    return word;
  }

  static __device__ void store_scales(const FoldParams& params, u32 row_start, u32 run, int shared) {
    u8* scale = params.scale_out + row_start + run * kBlocksPerRun;
    if (whole_words(params.scale_out, params.row_blocks)) {
      *reinterpret_cast<u32*>(scale) = static_cast<u32>(shared) * 0x01010101u;
    } else {
#pragma unroll
      for (u32 i = 0; i < kBlocksPerRun; ++i)
        if (run * kBlocksPerRun + i < params.row_blocks) scale[i] = static_cast<u8>(shared);
    }
  }

  // A tile's scale, or kScaleNan for a mixed one, from what its rows need. `of_warps`: the highest and the lowest scale,
  // [warps][runs]. All threads take part.
  static __device__ int tile_scale(int needed, int* of_warps, u32 run_in_box) {
    int highest = needed, lowest = needed == kNoScale ? kScaleNan : needed;
    const auto reduce = [&] {  // over lanes of the same run
#pragma unroll
      for (int distance = Box::kRuns; distance < 32; distance *= 2) {
        highest = max(highest, __shfl_xor_sync(kAllLanes, highest, distance));
        lowest = min(lowest, __shfl_xor_sync(kAllLanes, lowest, distance));
      }
    };
    reduce();
    constexpr u32 kEntries = Box::kWarps * Box::kRuns;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane < Box::kRuns) {
      of_warps[2 * (warp * Box::kRuns + lane)] = highest;
      of_warps[2 * (warp * Box::kRuns + lane) + 1] = lowest;
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < kEntries; i += 32) {
      const u32 entry = i + lane < kEntries ? i + lane : run_in_box;
      highest = max(highest, of_warps[2 * entry]);
      lowest = min(lowest, of_warps[2 * entry + 1]);
    }
    reduce();
    return highest - lowest > Format::kTileLimit ? kScaleNan : shared_scale(highest);
  }
};

}  // namespace mxfp8
