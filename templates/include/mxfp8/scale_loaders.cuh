// Scales for kernels that multiply by a scale per column: three warps bring them to shared memory as FP32 powers of two.
#pragma once

#include "promotion.cuh"
#include "ring.cuh"
#include "tile_scheduler.cuh"

namespace mxfp8 {

inline constexpr int kLoaderWarps = 3;

template <int TileM, int TileN, int Stages>
struct LoadedScales {
  float sfa[Stages][TileM];
  float sfb[Stages][TileN];
  unsigned extreme[Stages];  // a byte from each loader warp: is one of B's scales not moderate (promotion.cuh)?
};

// Byte by byte, since a group may start at any row. The next stages' loads are under way while a stage is stored, and
// nothing but the store depends on a load: the latencies of loads that are waited for one by one would set the kernel's
// pace. Hence no predicates: rows and runs past an end repeat the last one, and the products they scale are zero or
// never stored.
template <int TileM, int TileN, int Stages, class Scheduler>
__device__ inline void load_scales(const GroupedGemmParams& params, LoadedScales<TileM, TileN, Stages>& shared,
                                   RingBarriers<Stages>& barriers, Scheduler& scheduler) {
  constexpr int kThreads = 32 * kLoaderWarps;
  constexpr int kRows = TileM + TileN;
  constexpr int kRowsPerThread = (kRows + kThreads - 1) / kThreads;
  constexpr int kDepth = 2;  // stages under way
  const int thread = threadIdx.x - 32, lane = threadIdx.x % 32, loader = thread / 32;
  RingPosition<Stages> ring;
  typename Scheduler::FoundTile tile;
  while (scheduler.next(tile)) {
    const int m = problem_of(params, tile.group, &Problem::m), n = problem_of(params, tile.group, &Problem::n);
    const int all_runs = runs_of(params, tile.group);
    int runs = all_runs;
    if constexpr (Scheduler::FoundTile::kOfRuns) runs = tile.runs;
    auto stride = [&](int r) { return padded_rows(r < TileM ? m : n); };  // from a run's scales to the next one's
    const uint8_t* sfa = problem_of(params, tile.group, &Problem::sfa);
    const uint8_t* sfb = problem_of(params, tile.group, &Problem::sfb);

    const uint8_t* next[kRowsPerThread];  // the scales of this thread's rows, of A's tile and of B's below it
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int r = min(thread + i * kThreads, kRows - 1);
      const int row = r < TileM ? tile.m0 + min(r, tile.rows - 1) : min(tile.n0 + r - TileM, n - 1);
      const int64_t batch = r < TileM ? batch_of_a(params, tile.group) : batch_of_b(params, tile);
      next[i] = (r < TileM ? sfa : sfb) + batch * all_runs * stride(r) + row;
      if constexpr (Scheduler::FoundTile::kOfRuns) next[i] += static_cast<int64_t>(tile.first_run) * stride(r);
    }
    uint8_t ahead[kDepth][kRowsPerThread];
    auto load = [&](int slot, int run) {
      if (run >= runs) return;
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) {
        ahead[slot][i] = __ldg(next[i]);
        next[i] += stride(min(thread + i * kThreads, kRows - 1));
      }
    };
    auto store = [&](int slot) {
      bool moderate = true;
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) {
        const int r = thread + i * kThreads;
        const unsigned byte = ahead[slot][i];
        if (r < TileM) {
          shared.sfa[ring.stage][r] = e8m0_to_float(byte);
        } else if (r < kRows) {
          shared.sfb[ring.stage][r - TileM] = e8m0_to_float(byte);
          moderate = moderate && (is_moderate(byte) || byte == 255);
        }
      }
      const bool extreme = __any_sync(~0u, !moderate);
      if (lane == 0) {
        auto* flags = reinterpret_cast<uint8_t*>(&shared.extreme[ring.stage]);
        flags[loader] = extreme;
        if (loader == 0) flags[kLoaderWarps] = 0;
      }
    };

#pragma unroll
    for (int slot = 0; slot < kDepth; ++slot) load(slot, slot);
    for (int first = 0; first < runs; first += kDepth) {
#pragma unroll
      for (int slot = 0; slot < kDepth; ++slot) {
        const int run = first + slot;
        if (run >= runs) break;
        barriers.empty(ring.stage).wait(ring.phase ^ 1);
        store(slot);
        barriers.full(ring.stage).arrive();  // each thread for its own stores: racecheck follows that
        load(slot, run + kDepth);
        ring.advance();
      }
    }
  }
}

}  // namespace mxfp8
