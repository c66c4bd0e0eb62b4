// MXFP8 grouped GEMM for Hopper: persistent, warp-specialised.
//
// One producer warp group, of which warp 0 has the copy engine (TMA) fill a ring of shared-memory stages with FP8 tiles, 128
// of K at a time. One or two consumer warp groups of 64 rows each run wgmma on a stage and promote: scale the partial sums
// and add them to FP32 sums in registers. With two of them, one promotes while the other multiplies.
//
// Operands are folded: one scale per 128 of K. SfbRows = 128 takes the weights' tile form, whose scales come with the tiles
// (tile_scales.cuh). SfbRows = 1 multiplies by a scale per column, which the producers' warps 1-3 bring (scale_loaders.cuh).
//
// KGroups: groups are runs of K instead of rows, each with an output of its own (weight gradients). A group of no runs has
// one of zeros, from behind the operands' last column, so that loops over runs have a turn, and none of its scales counts.
#pragma once

#include "nvrtc_compat.cuh"

#include <cute/tensor.hpp>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cutlass/arch/reg_reconfig.h>

#include "epilogue.cuh"
#include "promotion.cuh"
#include "ring.cuh"
#include "scale_loaders.cuh"
#include "tile_copies.cuh"
#include "tile_scales.cuh"
#include "tile_scheduler.cuh"

namespace mxfp8 {

template <class ElementA, class ElementB, class ElementOut, int TileM, int TileN, int ClusterM, int ClusterN, int Stages,
          int SfbRows, bool KGroups = false>
struct Sm90GroupedGemm {
  static constexpr int kTileK = 128;  // bytes of a 128-byte swizzle row, 4 wgmma steps, 4 scale blocks
  static constexpr int kConsumers = TileM / 64;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kCluster = ClusterM * ClusterN;
  static constexpr bool kTileForm = SfbRows == 128;
  static constexpr unsigned kFullArrivals = kTileForm ? 1 : 1 + 32 * kLoaderWarps;
  static constexpr unsigned kEmptyArrivals = kWarpArrivals * 4 * kConsumers * kCluster;

  using Scheduler = TileScheduler<TileM, TileN, ClusterM, ClusterN, KGroups>;
  using Tile = typename Scheduler::FoundTile;
  using Scales = cuda::std::conditional_t<kTileForm, CopiedScales<TileM, Stages>, LoadedScales<TileM, TileN, Stages>>;
  using Staging = OutputStaging<ElementOut, TileM, TileN, kTileForm>;

  using MmaAtom = decltype(cute::SM90::GMMA::ss_op_selector<
                           ElementA, ElementB, float, cute::Shape<cute::_64, cute::Int<TileN>, cute::_32>>());
  using Mma = decltype(cute::make_tiled_mma(MmaAtom{}, cute::Layout<cute::Shape<cute::Int<kConsumers>, cute::_1, cute::_1>>{}));
  template <class Element, int Rows>
  using SmemLayout = decltype(cute::tile_to_shape(cute::SM90::GMMA::Layout_K_SW128_Atom<Element>{},
                                                  cute::Shape<cute::Int<Rows>, cute::Int<kTileK>, cute::Int<Stages>>{}));

  struct Shared {
    alignas(1024) ElementA a[Stages][TileM * kTileK];
    alignas(1024) ElementB b[Stages][TileN * kTileK];
    Staging out;
    Scales scales;
    RingBarriers<Stages> barriers;
    Tile next[4 * kConsumers];  // each consumer warp's, for which its registers have no room
  };  // behind it: the scheduler's table, params.groups + 1 entries

  static constexpr unsigned stage_bytes() {
    unsigned bytes = (TileM + TileN) * kTileK;
    if constexpr (kTileForm) bytes += Scales::kBytes;
    return bytes;
  }

  static __device__ void run(const GroupedGemmParams& params) {
    extern __shared__ __align__(1024) char shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    auto* table = reinterpret_cast<typename Scheduler::Group*>(shared_bytes + sizeof(Shared));
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int warp_group = warp / 4;

    if (warp == 0) {
      Scheduler::build_table(params, table);
    } else if (warp == 1 && cute::elect_one_sync()) {
      shared.barriers.init(kFullArrivals, kEmptyArrivals);
      cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    if constexpr (kCluster > 1) cute::cluster_sync();  // a peer's barriers exist before anyone arrives there

    const int rank = kCluster > 1 ? cute::block_rank_in_cluster() : 0;
    Scheduler scheduler(params, table, rank % ClusterM, rank / ClusterM);
    // 384 threads get 168 registers each at launch; what the producers give back, the consumers take. 256 get enough.
    if (warp_group == 0) {
      if constexpr (kConsumers == 2) cutlass::arch::warpgroup_reg_dealloc<kTileForm ? 40 : 56>();
      if (warp == 0) {
        if (cute::elect_one_sync()) prefetch_maps(params);
        copy_tiles(params, shared, scheduler, rank);
      } else if constexpr (!kTileForm) {
        load_scales(params, shared.scales, shared.barriers, scheduler);
      }
    } else {
      if constexpr (kConsumers == 2) cutlass::arch::warpgroup_reg_alloc<kTileForm ? 232 : 224>();
      multiply(params, shared, scheduler, warp_group - 1);
    }
    if constexpr (kCluster > 1) cute::cluster_sync();  // nobody leaves while a peer may still signal its barriers
  }

 private:
  static __device__ void prefetch_maps(const GroupedGemmParams& params) {
    if (params.problems) return;
    cute::prefetch_tma_descriptor(as_descriptor(params.problem.map_a));
    cute::prefetch_tma_descriptor(as_descriptor(params.problem.map_b));
    if (Staging::kUsed) cute::prefetch_tma_descriptor(as_descriptor(params.problem.map_out));
  }

  // Warp 0: FP8 tiles. In a cluster each CTA fetches its share of a tile that several need and multicasts it.
  static __device__ void copy_tiles(const GroupedGemmParams& params, Shared& shared, Scheduler& scheduler, int rank) {
    constexpr int kRowsA = TileM / ClusterN, kRowsB = TileN / ClusterM;
    const int cta_m = rank % ClusterM, cta_n = rank / ClusterM;
    const unsigned elected = cute::elect_one_sync();
    RingPosition<Stages> ring;
    Tile tile;
    while (scheduler.next(tile)) {
      if (elected) {
        const TensorMap& map_a = params.problems ? params.problems[tile.group].map_a : params.problem.map_a;
        const TensorMap& map_b = params.problems ? params.problems[tile.group].map_b : params.problem.map_b;
        if (params.problems) {  // maps in global memory may have been another launch's a moment ago
          cute::tma_descriptor_fence_acquire(as_descriptor(map_a));
          cute::tma_descriptor_fence_acquire(as_descriptor(map_b));
        }
        int first = 0, k = problem_of(params, tile.group, &Problem::k);
        if constexpr (KGroups) {
          first = scheduler.is_empty(tile) ? k : tile.first_run * kTileK;
          k = first + tile.runs * kTileK;
        }
        [[maybe_unused]] ScaleCopy scales(params, tile);
        for (int k0 = first; k0 < k; k0 += kTileK) {
          uint64_t* full = &shared.barriers.full_[ring.stage];
          shared.barriers.empty(ring.stage).wait(ring.phase ^ 1);
          shared.barriers.full(ring.stage).arrive_and_expect_tx(stage_bytes());
          if constexpr (kTileForm) scales.start(full, shared.scales.sfa[ring.stage]);
          // CTAs (0..ClusterM-1, cta_n) share B; CTAs (cta_m, 0..ClusterN-1) share A; rank = m + ClusterM * n.
          copy_box<ClusterN>(map_a, full, &shared.a[ring.stage][cta_n * kRowsA * kTileK], k0,
                             tile.m0 + cta_n * kRowsA, batch_of_a(params, tile), every_nth_rank(ClusterN, ClusterM) << cta_m);
          copy_box<ClusterM>(map_b, full, &shared.b[ring.stage][cta_m * kRowsB * kTileK], k0,
                             tile.n0 + cta_m * kRowsB, batch_of_b(params, tile), every_nth_rank(ClusterM, 1) << (cta_n * ClusterM));
          ring.advance();
        }
      }
      __syncwarp();
      // Only the elected thread moved on; it is always the same one, so the others' positions do not matter.
    }
  }

  // Consumer warp groups.
  static __device__ void multiply(const GroupedGemmParams& params, Shared& shared, Scheduler& scheduler, int consumer) {
    using namespace cute;
    const int lane = threadIdx.x % 32;
    auto first_row = [] {  // of this thread in the tile; read anew each time, since registers are short
      int thread;
      asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
      return (thread - 128) / 32 * 16 + thread % 32 / 4;
    };

    Mma mma;
    auto slice = mma.get_slice(consumer * 128);
    Tensor a = slice.partition_fragment_A(make_tensor(make_smem_ptr(&shared.a[0][0]), SmemLayout<ElementA, TileM>{}));
    Tensor b = slice.partition_fragment_B(make_tensor(make_smem_ptr(&shared.b[0][0]), SmemLayout<ElementB, TileN>{}));
    Tensor partial = partition_fragment_C(mma, Shape<Int<TileM>, Int<TileN>>{});
    Tensor sum = make_fragment_like(partial);
    static_assert(decltype(size(partial))::value == TileN / 2 && decltype(size<2>(a))::value == 4);

    RingPosition<Stages> ring;
    auto start_products = [&] {
      warpgroup_fence_operand(partial);
      warpgroup_arrive();
      mma.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        gemm(mma, a(_, _, i, ring.stage), b(_, _, i, ring.stage), partial);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
    };
    auto finish_products = [&] {
      warpgroup_wait<0>();
      warpgroup_fence_operand(partial);
    };
    auto release = [&] { arrive_for_warp_at_all<kCluster>(shared.barriers.empty(ring.stage), lane); };

    Tile tile;
    bool more = scheduler.next(tile);
    if constexpr (kTileForm) {
      Tile& next = shared.next[threadIdx.x / 32 - 4];
      TileScales<TileN> scales;
      if (more) scales.prefetch(params, tile, 0);
      for (; more; __syncwarp(), tile = next) {
        clear(sum);
        const int runs = runs_of(params, tile);
        const int m = problem_of(params, tile.group, &Problem::m), last_row = max(tile.rows - 1, 0);
        const int first_byte = first_scale_row(tile, m) % kCopyAlignment;
        // Where this thread's rows have their scales, in one register: two more would spill others.
        const int row = first_row();
        const unsigned places = first_byte + min(row, last_row) | first_byte + min(row + 8, last_row) << 16;
        for (int run = 0; run < runs; ++run) {
          shared.barriers.full(ring.stage).wait(ring.phase);
          start_products();
          if (run % 32 == 0) {  // what is needed next is looked up while the tensor cores work
            scales.use_prefetched();
            if (run == 0) {
              Tile found;
              more = scheduler.next(found);
              if (lane == 0) next = found;
              __syncwarp();
            }
            if (run + 32 < runs) {
              if constexpr (KGroups) tile.first_run = scheduler.first_run(tile);  // for which no register is left
              scales.prefetch(params, tile, run + 32);
            } else if (more) {
              scales.prefetch(params, next, 0);
            }
          }
          unsigned place0, place1;  // volatile: the compiler would take them apart once, before the loop
          asm volatile("and.b32 %0, %2, 0xffff; shr.u32 %1, %2, 16;" : "=r"(place0), "=r"(place1) : "r"(places));
          const unsigned a0 = shared.scales.sfa[ring.stage][place0], a1 = shared.scales.sfa[ring.stage][place1];
          if (!scales.combine(a0, a1, run, tile.n0)) {  // asked before the wait: only the promotion is left behind it
            finish_products();
            release();
            scales.promote(sum.data(), partial.data());
          } else {
            finish_products();
            release();
            const uint8_t* sfb = problem_of(params, tile.group, &Problem::sfb) + tile.n0 + 2 * (lane % 4);
            int64_t run_of_all = static_cast<int64_t>(batch_of_b(params, tile)) * runs + run;
            if constexpr (KGroups) run_of_all = scheduler.first_run(tile) + run;
            const int step = padded_rows(problem_of(params, tile.group, &Problem::n));
            promote_rare<TileN>(sum.data(), partial.data(), a0, a1, sfb + run_of_all * step);
          }
          ring.advance();
        }
        if (KGroups && scheduler.is_empty(tile)) clear(sum);
        store_tile<ElementOut, TileN>(params, shared.out, sum.data(), tile, first_row());
      }
      shared.out.finish();
    } else {
      const int row = first_row();
      for (; more; more = scheduler.next(tile)) {
        clear(sum);
        const int runs = runs_of(params, tile);
        for (int run = 0; run < runs; ++run) {
          shared.barriers.full(ring.stage).wait(ring.phase);
          start_products();
          const float a0 = shared.scales.sfa[ring.stage][row], a1 = shared.scales.sfa[ring.stage][row + 8];
          const float* sfb = &shared.scales.sfb[ring.stage][2 * (lane % 4)];
          const bool extreme = shared.scales.extreme[ring.stage];
          finish_products();
          if (!extreme) {
            promote_columns<TileN>(sum.data(), partial.data(), a0, a1, sfb);
          } else {
            promote_extreme<TileN>(sum.data(), partial.data(), a0, a1, sfb);
          }
          release();
          ring.advance();
        }
        if (KGroups && scheduler.is_empty(tile)) clear(sum);
        store_tile<ElementOut, TileN>(params, sum.data(), tile, row);
      }
    }
  }
};

}  // namespace mxfp8
