// MXFP8 grouped GEMM for Hopper: persistent, warp-specialised.
//
// One producer warp group: warp 0 has the copy engine (TMA) fill a ring of shared-memory stages with FP8 tiles, 128 of K
// at a time; warps 1-3 bring the tiles' scales, as FP32 powers of two. One or two consumer warp groups of 64 rows each
// run wgmma on a stage and promote: scale the partial sums and add them to FP32 sums in registers. With two of them, one
// promotes while the other multiplies.
//
// PromotionK = 128 needs folded operands (one scale per 128 of K); 32 takes any MXFP8 operand and is exact, at less speed.
// SfbRows = 128 expects the weights' tile form and falls back to row scales for the tiles that are marked as mixed.
#pragma once

#include "nvrtc_compat.cuh"

#include <cute/tensor.hpp>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "epilogue.cuh"
#include "promotion.cuh"
#include "tile_scheduler.cuh"

namespace mxfp8 {

// Position in the ring of stages; the phase bit flips with each turn.
template <int Stages>
struct RingPosition {
  int stage = 0;
  unsigned phase = 0;
  __device__ void advance() {
    if (++stage == Stages) stage = 0, phase ^= 1;
  }
};

template <class ElementA, class ElementB, class ElementOut, int TileM, int TileN, int ClusterM, int ClusterN, int Stages,
          int PromotionK, int SfbRows>
struct Sm90GroupedGemm {
  static constexpr int kTileK = 128;  // bytes of a 128-byte swizzle row, 4 wgmma steps, 4 scale blocks
  static constexpr int kConsumers = TileM / 64;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kCluster = ClusterM * ClusterN;
  static constexpr int kPromotions = kTileK / PromotionK;  // per stage
  static constexpr int kLoaderThreads = 96;
  static constexpr unsigned kFullArrivals = 1 + kLoaderThreads / 32;
  static constexpr unsigned kEmptyArrivals = 4 * kConsumers * kCluster;
  static constexpr unsigned kStageBytes = (TileM + TileN) * kTileK;

  using Scheduler = TileScheduler<TileM, TileN, ClusterM, ClusterN>;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;

  using MmaAtom = decltype(cute::SM90::GMMA::ss_op_selector<
                           ElementA, ElementB, float, cute::Shape<cute::_64, cute::Int<TileN>, cute::_32>>());
  using Mma = decltype(cute::make_tiled_mma(MmaAtom{}, cute::Layout<cute::Shape<cute::Int<kConsumers>, cute::_1, cute::_1>>{}));
  template <class Element, int Rows>
  using SmemLayout = decltype(cute::tile_to_shape(cute::SM90::GMMA::Layout_K_SW128_Atom<Element>{},
                                                  cute::Shape<cute::Int<Rows>, cute::Int<kTileK>, cute::Int<Stages>>{}));

  // Per stage, one byte from each loader warp.
  enum Flag : unsigned {
    kMixed = 0x01010101,    // SfbRows = 128: this stage's weight scales are per column after all
    kExtreme = 0x02020202,  // a scale is not moderate (promotion.cuh); where they are per column, one of B's
  };

  struct Shared {
    alignas(1024) ElementA a[Stages][TileM * kTileK];
    alignas(1024) ElementB b[Stages][TileN * kTileK];
    float sfa[Stages][kPromotions][TileM];
    float sfb[Stages][kPromotions][TileN];
    float sfb_uniform[Stages][4];
    unsigned flags[Stages];
    uint64_t full[Stages], empty[Stages];
  };  // behind it: the scheduler's table, params.groups + 1 entries

  static __device__ FullBarrier& full(Shared& shared, int stage) {
    return reinterpret_cast<FullBarrier&>(shared.full[stage]);
  }
  static __device__ EmptyBarrier& empty(Shared& shared, int stage) {
    return reinterpret_cast<EmptyBarrier&>(shared.empty[stage]);
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
      for (int s = 0; s < Stages; ++s) {
        full(shared, s).init(kFullArrivals);
        empty(shared, s).init(kEmptyArrivals);
      }
      cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    if constexpr (kCluster > 1) cute::cluster_sync();  // a peer's barriers exist before anyone arrives there

    const int rank = kCluster > 1 ? cute::block_rank_in_cluster() : 0;
    Scheduler scheduler(params, table, rank % ClusterM, rank / ClusterM);
    // 384 threads get 168 registers each at launch; what the producers give back, the consumers take. 256 get enough.
    if (warp_group == 0) {
      if constexpr (kConsumers == 2) cutlass::arch::warpgroup_reg_dealloc<56>();
      if (warp == 0) {
        if (cute::elect_one_sync()) prefetch_maps(params);
        copy_tiles(params, shared, scheduler, rank);
      } else {
        load_scales(params, shared, scheduler);
      }
    } else {
      if constexpr (kConsumers == 2) cutlass::arch::warpgroup_reg_alloc<224>();
      multiply(params, shared, scheduler, warp_group - 1);
    }
    if constexpr (kCluster > 1) cute::cluster_sync();  // nobody leaves while a peer may still signal its barriers
  }

 private:
  static __device__ void prefetch_maps(const GroupedGemmParams& params) {
    if (params.problems) return;
    cute::prefetch_tma_descriptor(as_descriptor(params.problem.map_a));
    cute::prefetch_tma_descriptor(as_descriptor(params.problem.map_b));
  }

  static __device__ const cute::TmaDescriptor* as_descriptor(const TensorMap& map) {
    return reinterpret_cast<const cute::TmaDescriptor*>(&map);
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
        const int k = problem_of(params, tile.group, &Problem::k);
        for (int k0 = 0; k0 < k; k0 += kTileK) {
          empty(shared, ring.stage).wait(ring.phase ^ 1);
          full(shared, ring.stage).arrive_and_expect_tx(kStageBytes);
          // CTAs (0..ClusterM-1, cta_n) share B; CTAs (cta_m, 0..ClusterN-1) share A; rank = m + ClusterM * n.
          copy_box<ClusterN>(map_a, &shared.full[ring.stage], &shared.a[ring.stage][cta_n * kRowsA * kTileK], k0,
                             tile.m0 + cta_n * kRowsA, tile.batch_a, every_nth_rank(ClusterN, ClusterM) << cta_m);
          copy_box<ClusterM>(map_b, &shared.full[ring.stage], &shared.b[ring.stage][cta_m * kRowsB * kTileK], k0,
                             tile.n0 + cta_m * kRowsB, tile.batch_b, every_nth_rank(ClusterM, 1) << (cta_n * ClusterM));
          ring.advance();
        }
      }
      __syncwarp();
      // Only the elected thread moved on; it is always the same one, so the others' positions do not matter.
    }
  }

  static constexpr unsigned every_nth_rank(int count, int stride) {
    unsigned mask = 0;
    for (int i = 0; i < count; ++i) mask |= 1u << (i * stride);
    return mask;
  }

  template <int Sharers>
  static __device__ void copy_box(const TensorMap& map, uint64_t* barrier, void* destination, int k, int row, int batch,
                                  unsigned mask) {
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    if constexpr (Sharers == 1) {
      cute::SM90_TMA_LOAD_3D::copy(&map, barrier, kHint, destination, k, row, batch);
    } else {
      cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&map, barrier, static_cast<uint16_t>(mask), kHint, destination, k, row, batch);
    }
  }

  // Warps 1-3: scales, byte by byte, since a group may start at any row and the copy engine asks for 16-byte alignment.
  // The next stages' loads are under way while a stage is stored, and nothing but the store depends on a load: the
  // latencies of loads that are waited for one by one would set the kernel's pace. Hence no predicates: rows and runs
  // past an end repeat the last one, and the products they scale are zero or never stored.
  static __device__ void load_scales(const GroupedGemmParams& params, Shared& shared, Scheduler& scheduler) {
    constexpr int kRows = SfbRows == 1 ? TileM + TileN : TileM;
    constexpr int kRowsPerThread = (kRows + kLoaderThreads - 1) / kLoaderThreads;
    constexpr int kDepth = kPromotions == 1 ? 2 : 1;  // stages under way
    constexpr int kUniform = TileN / kScaleColumns;
    const int thread = threadIdx.x - 32, lane = threadIdx.x % 32, loader = thread / 32;
    RingPosition<Stages> ring;
    Tile tile;
    while (scheduler.next(tile)) {
      const int m = problem_of(params, tile.group, &Problem::m), n = problem_of(params, tile.group, &Problem::n);
      const int runs = (problem_of(params, tile.group, &Problem::k) + PromotionK - 1) / PromotionK;
      auto stride = [&](int r) { return ((r < TileM ? m : n) + 15) / 16 * 16; };  // from a run's scales to the next one's
      const uint8_t* sfa = problem_of(params, tile.group, &Problem::sfa);
      const uint8_t* sfb = problem_of(params, tile.group, &Problem::sfb);
      auto scale_of = [&](int r) {  // of row r of the A tile with the B tile below it, in the first run
        const int row = r < TileM ? tile.m0 + min(r, tile.rows - 1) : min(tile.n0 + r - TileM, n - 1);
        const int64_t batch = r < TileM ? tile.batch_a : tile.batch_b;
        return (r < TileM ? sfa : sfb) + batch * runs * stride(r) + row;
      };

      const uint8_t* next[kRowsPerThread];
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) next[i] = scale_of(min(thread + i * kLoaderThreads, kRows - 1));
      const uint8_t* next_uniform = nullptr;  // scales of this lane's 64 columns
      if constexpr (SfbRows == 128) {
        const int column = min(tile.n0 + kScaleColumns * (lane % kUniform), n - 1);
        const int64_t tiles_n = (n + 127) / 128;
        next_uniform = problem_of(params, tile.group, &Problem::sfb_tiles) + (tile.batch_b * tiles_n + column / 128) * runs;
      }
      uint8_t ahead[kDepth][kRowsPerThread][kPromotions], uniform_ahead[kDepth];
      auto load = [&](int slot, int run) {
        if (run >= runs) return;
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
          const int64_t step = stride(min(thread + i * kLoaderThreads, kRows - 1));
#pragma unroll
          for (int p = 0; p < kPromotions; ++p) ahead[slot][i][p] = __ldg(next[i] + min(p, runs - 1 - run) * step);
          next[i] += kPromotions * step;
        }
        if constexpr (SfbRows == 128) uniform_ahead[slot] = __ldg(next_uniform++);
      };
      auto store = [&](int slot, int run) {
        bool moderate_a = true, moderate_b = true, mixed = false;
        auto store_row = [&](int r, int p, unsigned byte) {
          if (r < TileM) {
            shared.sfa[ring.stage][p][r] = e8m0_to_float(byte);
            moderate_a = moderate_a && is_moderate(byte);
          } else {
            shared.sfb[ring.stage][p][r - TileM] = e8m0_to_float(byte);
            moderate_b = moderate_b && (is_moderate(byte) || byte == 255);
          }
        };
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
          const int r = thread + i * kLoaderThreads;
#pragma unroll
          for (int p = 0; p < kPromotions; ++p)
            if (r < kRows) store_row(r, p, ahead[slot][i][p]);
        }
        if constexpr (SfbRows == 128) {
          const unsigned byte = uniform_ahead[slot];
          mixed = __any_sync(~0u, byte == 255);
          if (mixed) {  // rare: its rows' scales are fetched only now
#pragma unroll 1
            for (int r = TileM + thread; r < kRows + TileN; r += kLoaderThreads)
              store_row(r, 0, __ldg(scale_of(r) + run * static_cast<int64_t>(stride(r))));
          } else {
            moderate_b = moderate_a && is_moderate(byte);
            if (loader == 0 && lane < kUniform) shared.sfb_uniform[ring.stage][lane] = e8m0_to_float(byte);
          }
        }
        const bool extreme = __any_sync(~0u, !moderate_b);
        if (lane == 0) {
          auto* flags = reinterpret_cast<uint8_t*>(&shared.flags[ring.stage]);
          flags[loader] = (mixed ? 1 : 0) | (extreme ? 2 : 0);
          if (loader == 0) flags[3] = 0;
        }
      };

#pragma unroll
      for (int slot = 0; slot < kDepth; ++slot) load(slot, slot * kPromotions);
      for (int first = 0; first < runs; first += kDepth * kPromotions) {
#pragma unroll
        for (int slot = 0; slot < kDepth; ++slot) {
          const int run = first + slot * kPromotions;
          if (run >= runs) break;
          empty(shared, ring.stage).wait(ring.phase ^ 1);
          store(slot, run);
          __syncwarp();
          if (lane == 0) full(shared, ring.stage).arrive();
          load(slot, run + kDepth * kPromotions);
          ring.advance();
        }
      }
    }
  }

  // Consumer warp groups.
  static __device__ void multiply(const GroupedGemmParams& params, Shared& shared, Scheduler& scheduler, int consumer) {
    using namespace cute;
    const int lane = threadIdx.x % 32;
    const int row = consumer * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    const int column = 2 * (lane % 4);

    Mma mma;
    auto slice = mma.get_slice(consumer * 128);
    Tensor a = slice.partition_fragment_A(make_tensor(make_smem_ptr(&shared.a[0][0]), SmemLayout<ElementA, TileM>{}));
    Tensor b = slice.partition_fragment_B(make_tensor(make_smem_ptr(&shared.b[0][0]), SmemLayout<ElementB, TileN>{}));
    Tensor partial = partition_fragment_C(mma, Shape<Int<TileM>, Int<TileN>>{});
    Tensor sum = make_fragment_like(partial);
    static_assert(decltype(size(partial))::value == TileN / 2 && decltype(size<2>(a))::value == 4);

    RingPosition<Stages> ring;
    auto release = [&] {
      __syncwarp();
      if (lane < kCluster) empty(shared, ring.stage).arrive(lane);
    };
    Tile tile;
    while (scheduler.next(tile)) {
      clear(sum);
      const int k_end = problem_of(params, tile.group, &Problem::k);
      for (int k0 = 0; k0 < k_end; k0 += kTileK) {
        full(shared, ring.stage).wait(ring.phase);
#pragma unroll
        for (int p = 0; p < kPromotions; ++p) {
          warpgroup_fence_operand(partial);
          warpgroup_arrive();
          mma.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
          for (int i = 0; i < PromotionK / 32; ++i) {
            const int k = p * PromotionK / 32 + i;
            gemm(mma, a(_, _, k, ring.stage), b(_, _, k, ring.stage), partial);
            mma.accumulate_ = GMMA::ScaleOut::One;
          }
          warpgroup_commit_batch();

          const float a0 = shared.sfa[ring.stage][p][row], a1 = shared.sfa[ring.stage][p][row + 8];
          const float* sfb = &shared.sfb[ring.stage][p][column];
          const unsigned flags = shared.flags[ring.stage];
          UniformScales<TileN> scales;
          if (SfbRows == 128) scales.combine(a0, a1, shared.sfb_uniform[ring.stage]);
          warpgroup_wait<0>();
          warpgroup_fence_operand(partial);
          if (SfbRows == 128 && flags == 0) {
            release();
            scales.promote(sum.data(), partial.data());
          } else {
            if (SfbRows == 128 && !(flags & kMixed)) {
              promote_extreme<TileN, kScaleColumns>(sum.data(), partial.data(), a0, a1, shared.sfb_uniform[ring.stage]);
            } else if (!(flags & kExtreme)) {
              promote_columns<TileN>(sum.data(), partial.data(), a0, a1, sfb);
            } else {
              promote_extreme<TileN, 1>(sum.data(), partial.data(), a0, a1, sfb);
            }
            if (p + 1 == kPromotions) release();
          }
        }
        ring.advance();
      }
      store_tile<ElementOut, TileN>(params, sum.data(), tile, row);
    }
  }
};

}  // namespace mxfp8
