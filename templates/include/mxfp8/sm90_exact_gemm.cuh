// Exact MXFP8 grouped GEMM for Hopper: FP8 elements become BF16, scaled, on their way to BF16 tensor cores, which add up in
// FP32 over all of K. Nothing is promoted, and scales may differ every 32 of K. Persistent, warp-specialised.
//
// Producers: warp 0 has the copy engine fill a ring of stages with FP8 tiles, 128 of K at a time; warps 1-3 bring their
// scales. Converter: a warp group turns B into BF16, half a stage (64 of K, a 128-byte row) at a time, in a second ring.
// Consumers: one or two warp groups convert A in registers and run wgmma on these and the converted B.
//
// Shared memory is what limits: wgmma reads 64 bytes a cycle of B whatever its width, so that a tall tile pays. Of a
// 256 x 128 tile's 2048 cycles a stage, shared memory is busy for 2000.
#pragma once

#include "nvrtc_compat.cuh"

#include <cute/tensor.hpp>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/mma_sm90.hpp>
#include <cutlass/arch/reg_reconfig.h>

#include "epilogue.cuh"
#include "exact_extreme.cuh"
#include "fp8_to_bf16.cuh"
#include "ring.cuh"
#include "scale_words.cuh"
#include "tile_copies.cuh"
#include "tile_scheduler.cuh"

namespace mxfp8 {

template <class FormatA, class FormatB, class ElementOut, int TileM, int TileN, int ClusterM, int ClusterN, int Stages,
          int Halves>
struct Sm90ExactGemm {
  static constexpr int kTileK = 128;
  static constexpr int kConsumers = TileM >= 128 ? 2 : 1;
  static constexpr int kBlockRows = 64 * kConsumers;      // rows that all consumers multiply at a time
  static constexpr int kBlocks = TileM / kBlockRows;      // of such rows: a consumer has 64 of each
  static constexpr int kThreads = 128 * (2 + kConsumers);
  static constexpr int kCluster = ClusterM * ClusterN;
  static constexpr bool kManySums = kBlocks * TileN > 192;  // over 96 a thread
  static constexpr int kSteps = kManySums ? 2 : 4;        // of 16 of K that a consumer converts and then multiplies
  static constexpr int kGroups = 4 / kSteps;              // of them in half a stage
  // Registers of a thread: 512 get 128 each at launch, and what the others give back, the consumers take. 384 get enough.
  static constexpr int kProducerRegisters = kManySums ? 40 : 48, kConverterRegisters = kManySums ? 72 : 96;
  static constexpr int kConsumerRegisters = (512 - kProducerRegisters - kConverterRegisters) / 2;
  static constexpr int kLoaderThreads = 96;
  static constexpr unsigned kFullArrivals = 1 + kWarpArrivals * kLoaderThreads / 32;
  static constexpr unsigned kEmptyArrivals = kWarpArrivals * 4 * (1 + kConsumers) * kCluster;  // converter, consumers
  static constexpr unsigned kStageBytes = (TileM + TileN) * kTileK;

  using Scheduler = TileScheduler<TileM, TileN, ClusterM, ClusterN>;
  using Ring = RingPosition<Stages>;
  using HalfRing = RingPosition<Halves>;
  using Mma = decltype(cute::SM90::GMMA::rs_op_selector<cute::bfloat16_t, cute::bfloat16_t, float,
                                                        cute::Shape<cute::_64, cute::Int<TileN>, cute::_16>>());
  using SumIndices = cuda::std::make_integer_sequence<int, TileN / 2>;

  // Of a stage's scales, one byte from each loader warp.
  enum Flag : unsigned {
    kHigh = 0x01010101,  // one is too high for a BF16 factor, or NaN
    kLow = 0x02020202,   // one is so low that BF16 would round its elements, unless they are zeros
  };

  struct Shared {
    alignas(1024) u8 a[Stages][TileM * kTileK];
    alignas(1024) u8 b[Stages][TileN * kTileK];
    alignas(1024) u8 converted[Halves][TileN * kTileK];  // BF16, 64 of K, 128-byte swizzle
    RingBarriers<Stages> stages;
    RingBarriers<Halves> halves;
    alignas(8) u32 scales[Stages][TileM + TileN];  // of a row's four blocks of 32; A's at scale_place
    u32 flags[Stages];
  };  // behind it: the scheduler's table, params.groups + 1 entries

  static __device__ void run(const GroupedGemmParams& params) {
    extern __shared__ __align__(1024) char shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    auto* table = reinterpret_cast<typename Scheduler::Group*>(shared_bytes + sizeof(Shared));
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int warp_group = warp / 4;

    if (warp == 0) {
      Scheduler::build_table(params, table);
    } else if (warp == 1 && cute::elect_one_sync()) {
      shared.stages.init(kFullArrivals, kEmptyArrivals);
      shared.halves.init(kWarpArrivals * 4, kWarpArrivals * 4 * kConsumers);
      cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    if constexpr (kCluster > 1) cute::cluster_sync();  // a peer's barriers exist before anyone arrives there

    const int rank = kCluster > 1 ? cute::block_rank_in_cluster() : 0;
    Scheduler scheduler(params, table, rank % ClusterM, rank / ClusterM);
    if (warp_group == 0) {
      if constexpr (kConsumers == 2) cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (warp == 0) {
        copy_tiles(params, shared, scheduler, rank);
      } else {
        load_scales(params, shared, scheduler);
      }
    } else if (warp_group == 1) {
      if constexpr (kConsumers == 2) cutlass::arch::warpgroup_reg_dealloc<kConverterRegisters>();
      convert_b(params, shared, scheduler);
    } else {
      if constexpr (kConsumers == 2) cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      multiply(params, shared, scheduler, warp_group - 2);
    }
    if constexpr (kCluster > 1) cute::cluster_sync();  // nobody leaves while a peer may still signal its barriers
  }

 private:
  // The calling warp is done with an FP8 stage.
  static __device__ void release(Shared& shared, int stage) {
    arrive_for_warp_at_all<kCluster>(shared.stages.empty(stage), threadIdx.x % 32);
  }

  // Warp 0: FP8 tiles. In a cluster each CTA fetches its share of a tile that several need and multicasts it.
  static __device__ void copy_tiles(const GroupedGemmParams& params, Shared& shared, Scheduler& scheduler, int rank) {
    constexpr int kRowsA = TileM / ClusterN, kRowsB = TileN / ClusterM;
    const int cta_m = rank % ClusterM, cta_n = rank / ClusterM;
    const unsigned elected = cute::elect_one_sync();
    if (elected && !params.problems) {
      cute::prefetch_tma_descriptor(as_descriptor(params.problem.map_a));
      cute::prefetch_tma_descriptor(as_descriptor(params.problem.map_b));
    }
    Ring ring;
    Tile tile;
    while (scheduler.next(tile)) {
      if (elected) {
        const TensorMap& map_a = params.problems ? params.problems[tile.group].map_a : params.problem.map_a;
        const TensorMap& map_b = params.problems ? params.problems[tile.group].map_b : params.problem.map_b;
        if (params.problems) {  // maps in global memory may have been another launch's a moment ago
          cute::tma_descriptor_fence_acquire(as_descriptor(map_a));
          cute::tma_descriptor_fence_acquire(as_descriptor(map_b));
        }
        const int stages = runs_of(params, tile);
        for (int s = 0; s < stages; ++s) {
          shared.stages.empty(ring.stage).wait(ring.phase ^ 1);
          shared.stages.full(ring.stage).arrive_and_expect_tx(kStageBytes);
          // CTAs (0..ClusterM-1, cta_n) share B; CTAs (cta_m, 0..ClusterN-1) share A; rank = m + ClusterM * n.
          copy_box<ClusterN>(map_a, &shared.stages.full_[ring.stage], &shared.a[ring.stage][cta_n * kRowsA * kTileK], s * kTileK,
                             tile.m0 + cta_n * kRowsA, batch_of_a(params, tile.group), every_nth_rank(ClusterN, ClusterM) << cta_m);
          copy_box<ClusterM>(map_b, &shared.stages.full_[ring.stage], &shared.b[ring.stage][cta_m * kRowsB * kTileK], s * kTileK,
                             tile.n0 + cta_m * kRowsB, batch_of_b(params, tile.group), every_nth_rank(ClusterM, 1) << (cta_n * ClusterM));
          ring.advance();
        }
      }
      __syncwarp();  // only the elected thread moved on; it is always the same one
    }
  }

  // Warps 1-3: scales as they lie, (rows, K / 32), four stages at a time; a stage's are stored as soon as it is free, so the
  // latency of loads is hidden by the stages in between. Rows past an end repeat the last one: what they scale is zero or
  // never stored.
  static __device__ void load_scales(const GroupedGemmParams& params, Shared& shared, Scheduler& scheduler) {
    constexpr int kRows = TileM + TileN, kPerThread = (kRows + kLoaderThreads - 1) / kLoaderThreads;
    const int thread = threadIdx.x - 32, lane = threadIdx.x % 32, loader = thread / 32;
    Ring ring;
    Tile tile;
    while (scheduler.next(tile)) {
      const int m = problem_of(params, tile.group, &Problem::m), n = problem_of(params, tile.group, &Problem::n);
      const int blocks = problem_of(params, tile.group, &Problem::k) / kBlock;
      const u8* sfa = problem_of(params, tile.group, &Problem::sfa) + static_cast<int64_t>(batch_of_a(params, tile.group)) * m * blocks;
      const u8* sfb = problem_of(params, tile.group, &Problem::sfb) + static_cast<int64_t>(batch_of_b(params, tile.group)) * n * blocks;
      const bool aligned = ((reinterpret_cast<uint64_t>(sfa) | reinterpret_cast<uint64_t>(sfb) | blocks) & 15) == 0;
      const u8* next[kPerThread];
      int room = 1 << 30;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const int r = min(thread + i * kLoaderThreads, kRows - 1);
        const bool of_a = r < TileM;
        const int row = of_a ? tile.m0 + min(r, tile.rows - 1) : min(tile.n0 + r - TileM, n - 1);
        next[i] = (of_a ? sfa : sfb) + static_cast<int64_t>(row) * blocks;
        room = static_cast<int>(min(static_cast<int64_t>(room), static_cast<int64_t>((of_a ? m : n) - row) * blocks));
      }
      for (int first = 0; first < blocks; first += 16) {
        u32 words[kPerThread][4];
        load_scale_words(next, blocks - first, room - first, aligned, words);
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) next[i] += 16;
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          const int left = blocks - first - 4 * s;
          if (left <= 0) break;
          shared.stages.empty(ring.stage).wait(ring.phase ^ 1);
          const u32 behind = left >= 4 ? 0 : ~0u << (8 * left);  // blocks past K: zeros, whose scale is anything ordinary
          u32 high = 0, low = 0;
#pragma unroll
          for (int i = 0; i < kPerThread; ++i) {
            const int r = thread + i * kLoaderThreads;
            const u32 word = (words[i][s] & ~behind) | (behind & 0x7F7F7F7Fu);
            if (kRows % kLoaderThreads == 0 || r < kRows) shared.scales[ring.stage][r < TileM ? scale_place(r) : r] = word;
            high |= r < TileM ? ToBf16<FormatA>::too_high(word) : ToBf16<FormatB>::too_high(word);
            low |= r < TileM ? ToBf16<FormatA>::too_low(word) : ToBf16<FormatB>::too_low(word);
          }
          high = __any_sync(~0u, high != 0);
          low = __any_sync(~0u, low != 0);
          if (lane == 0) {
            auto* flags = reinterpret_cast<u8*>(&shared.flags[ring.stage]);
            flags[loader] = (high ? 1 : 0) | (low ? 2 : 0);
            if (loader == 0) flags[3] = 0;
          }
          arrive_for_warp(shared.stages.full(ring.stage));
          ring.advance();
        }
      }
    }
  }

  // The converter: B from the ring of stages to the ring of halves. A thread has a row's 64 bytes; it reads the next row's
  // before it converts one.
  static __device__ void convert_b(const GroupedGemmParams& params, Shared& shared, Scheduler& scheduler) {
    constexpr int kRounds = (TileN + 127) / 128;
    const int thread = threadIdx.x % 128;
    Ring ring;
    HalfRing half;
    Tile tile;
    while (scheduler.next(tile)) {
      for (int left = runs_of(params, tile); left > 0; --left) {
        shared.stages.full(ring.stage).wait(ring.phase);
        const u8* source = shared.b[ring.stage];
        const u32* scales = &shared.scales[ring.stage][TileM];
        uint4 raw[2][4];
        auto read = [&](int item) {  // item: half, then round
          const int row = item % kRounds * 128 + thread;
          if (TileN % 128 != 0 && row >= TileN) return;
#pragma unroll
          for (int t = 0; t < 4; ++t)
            raw[item % 2][t] = *reinterpret_cast<const uint4*>(source + swizzled(row, item / kRounds * 4 + t));
        };
        read(0);
#pragma unroll
        for (int item = 0; item < 2 * kRounds; ++item) {
          if (item + 1 < 2 * kRounds) read(item + 1);
          if (item % kRounds == 0) shared.halves.empty(half.stage).wait(half.phase ^ 1);
          const int row = item % kRounds * 128 + thread;
          if (TileN % 128 == 0 || row < TileN)
            convert_row<FormatB>(raw[item % 2], scales[row] >> (item / kRounds * 16), shared.converted[half.stage], row);
          if (item % kRounds == kRounds - 1) {
            cutlass::arch::fence_view_async_shared();  // wgmma reads through the async proxy
            arrive_for_warp(shared.halves.full(half.stage));
            half.advance();
          }
        }
        release(shared, ring.stage);
        ring.advance();
      }
    }
  }

  // Consumer warp groups.
  struct Consumer {
    int row;  // this thread's first row of the tile; it also has the one 8 below, and those of further blocks
    Ring ring;
    HalfRing half;     // next to multiply
    bool multiplying;  // products with the half before are under way
  };

  static __device__ void multiply(const GroupedGemmParams& params, Shared& shared, Scheduler& scheduler, int index) {
    const int lane = threadIdx.x % 32, group = lane / 4;
    // Which row of 8 a group of 4 lanes has is free. With the ends of its bits swapped, each 8 lanes of a 16-byte load have
    // two rows that the swizzle sends to different halves of the 32 banks.
    const int row_of_8 = (group & 2) | (group & 1) << 2 | group >> 2;
    Consumer me{index * 64 + static_cast<int>(threadIdx.x % 128 / 32) * 16 + row_of_8, {}, {}, false};
    Tile tile;
    while (scheduler.next(tile)) {
      float sum[kBlocks][TileN / 2];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = 0; i < TileN / 2; ++i) sum[b][i] = 0.0f;
      const int stages = runs_of(params, tile);
      if (kBlocks == 1 || tile.rows > kBlockRows) {
        multiply_tile<kBlocks>(shared, me, stages, sum);
      } else {
        multiply_tile<1>(shared, me, stages, sum);
      }
      store_tile<ElementOut, TileN>(params, sum[0], tile, me.row);
      if constexpr (kBlocks == 2)
        if (tile.rows > kBlockRows) store_tile<ElementOut, TileN>(params, sum[1], tile, me.row + kBlockRows);
    }
  }

  template <int Blocks>
  static __device__ __forceinline__ void multiply_tile(Shared& shared, Consumer& me, int stages,
                                                       float (&sum)[kBlocks][TileN / 2]) {
    using Convert = ToBf16<FormatA>;
    const int quad_lane = threadIdx.x % 4, place = swizzled(me.row, quad_lane);  // of the thread's first 16 bytes
    u32 fragment[2][4 * kSteps];  // one is being read by wgmma
    uint4 raw[2];
    u32 factors[2];
    auto read = [&](int h, int b) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const u8* a = &shared.a[me.ring.stage][(b * kBlockRows + 8 * r) * 128];
        raw[r] = *reinterpret_cast<const uint4*>(a + (place ^ (h * 64)));
      }
      const uint2 scales =
          *reinterpret_cast<const uint2*>(&shared.scales[me.ring.stage][scale_place(b * kBlockRows + me.row)]);
      factors[0] = Convert::factor(__byte_perm(scales.x, 0, 0x4440 + 2 * h + quad_lane / 2));
      factors[1] = Convert::factor(__byte_perm(scales.y, 0, 0x4440 + 2 * h + quad_lane / 2));
    };
    auto enter_stage = [&] {
      shared.stages.full(me.ring.stage).wait(me.ring.phase);
      read(0, 0);
    };

    enter_stage();
    for (int left = stages; left > 0; --left) {
      const u32 flags = shared.flags[me.ring.stage];
      if (__builtin_expect(flags != 0, 0) && needs_extreme<Blocks>(shared, me, flags)) {
        finish(shared, me);
        multiply_stage_extreme<Blocks>(shared, me, sum);
        release(shared, me.ring.stage);
        me.ring.advance();
        if (left > 1) enter_stage();
        continue;
      }
#pragma unroll
      for (int group = 0; group < 2 * Blocks * kGroups; ++group) {
        const int h = group / (Blocks * kGroups), b = group / kGroups % Blocks, first = group % kGroups * kSteps;
        const bool first_of_half = group % (Blocks * kGroups) == 0;
        const bool last_of_half = group % (Blocks * kGroups) == Blocks * kGroups - 1;
        u32(&mine)[4 * kSteps] = fragment[group % 2];
        const u32 largest = convert_steps<FormatA, kSteps>(raw, factors, first, mine);
        if (__builtin_expect(__any_sync(~0u, Convert::nonfinite(largest)), 0))
          mend_steps<FormatA, kSteps>(raw, first, mine);
        if (first_of_half) shared.halves.full(me.half.stage).wait(me.half.phase);
        const u32 converted = descriptor_low(shared.converted[me.half.stage]);
        cute::warpgroup_arrive();
#pragma unroll
        for (int w = 0; w < kSteps; ++w)
          multiply_step(&mine[4 * w], converted + 2 * (first + w), sum[b], SumIndices{});  // 32 bytes a step
        cute::warpgroup_commit_batch();

        if (first + kSteps == 4) {  // these 16 bytes of each row are used up
          if (!last_of_half) {
            read(h, b + 1);
          } else if (h == 0) {
            read(1, 0);
          } else {
            release(shared, me.ring.stage);
            me.ring.advance();
            if (left > 1) enter_stage();
          }
        }
        cute::warpgroup_wait<1>();  // the products before these
#pragma unroll
        for (int i = 0; i < 4 * kSteps; ++i) cute::warpgroup_fence_operand(fragment[1 - group % 2][i]);
        if (first_of_half && me.multiplying) release_half(shared, me);
        if (last_of_half) {
          me.half.advance();
          me.multiplying = true;
        }
      }
    }
    finish(shared, me);
#pragma unroll
    for (int b = 0; b < Blocks; ++b)
#pragma unroll
      for (int i = 0; i < TileN / 2; ++i) cute::warpgroup_fence_operand(sum[b][i]);
  }

  // Waits for all products and releases the half that the last ones read.
  static __device__ void finish(Shared& shared, Consumer& me) {
    cute::warpgroup_wait<0>();
    if (me.multiplying) release_half(shared, me);
    me.multiplying = false;
  }

  static __device__ void release_half(Shared& shared, Consumer& me) {
    const int stage = me.half.stage == 0 ? Halves - 1 : me.half.stage - 1;
    arrive_for_warp(shared.halves.empty(stage));
  }

  // A wgmma descriptor's lower half: address and a field that swizzled layouts do not use.
  static __device__ u32 descriptor_low(const void* tile) { return (1u << 16) | (cute::cast_smem_ptr_to_uint(tile) >> 4); }

  template <int... I>
  static __device__ void multiply_step(const u32* a, u32 b, float (&sum)[TileN / 2],
                                       cuda::std::integer_sequence<int, I...>) {
    constexpr uint64_t kHigh = (1ull << 62) | (1024ull / 16 << 32);  // K-major, 128-byte swizzle, 8 rows are 1024 bytes
    Mma::fma(a[0], a[1], a[2], a[3], kHigh | b, sum[I]..., cute::SM90::GMMA::ScaleOut::One);
  }

  // Whether BF16 cannot hold this stage's elements; the same answer for the whole warp group.
  template <int Blocks>
  static __device__ __forceinline__ bool needs_extreme(Shared& shared, const Consumer& me, u32 flags) {
    if (flags & kHigh) return true;
    const int thread = threadIdx.x % 128, index = threadIdx.x / 128 - 2, stage = me.ring.stage;
    const u32* scales = shared.scales[stage];
    unsigned found = 0;
    for (int b = 0; b < Blocks; ++b) {
      const int row = b * kBlockRows + index * 64 + thread % 64;
      if (thread < 64) found |= has_nonzero(shared.a[stage], row, ToBf16<FormatA>::too_low(scales[scale_place(row)]));
    }
    for (int row = thread; row < TileN; row += 128)
      found |= has_nonzero(shared.b[stage], row, ToBf16<FormatB>::too_low(scales[TileM + row]));
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.u32 p, %0, 0;\n barrier.cta.red.or.pred p, %1, 128, p;\n selp.u32 %0, 1, 0, p;\n}"
        : "+r"(found)
        : "r"(1 + index)
        : "memory");
    return found != 0;
  }

  // The stage's products the other way; its converted halves are passed over.
  template <int Blocks>
  static __device__ __forceinline__ void multiply_stage_extreme(Shared& shared, Consumer& me,
                                                                float (&sum)[kBlocks][TileN / 2]) {
    const int stage = me.ring.stage;
#pragma unroll
    for (int b = 0; b < Blocks; ++b)
      multiply_extreme<FormatA, FormatB, TileN>(sum[b], shared.a[stage], shared.b[stage], shared.scales[stage],
                                                &shared.scales[stage][TileM], me.row + b * kBlockRows);
    for (int h = 0; h < 2; ++h) {
      shared.halves.full(me.half.stage).wait(me.half.phase);
      me.half.advance();
      release_half(shared, me);
    }
  }
};

}  // namespace mxfp8
