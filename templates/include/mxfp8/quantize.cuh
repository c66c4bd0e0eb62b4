// bf16, fp16 or fp32 to MXFP8. Memory-bound: each element is read once, in 16-byte loads of which a thread has 4 or 8 in
// flight, and a warp's 32 scales are computed and stored at once, one by each lane.
#pragma once

#include "mxfp8/quantize_elements.cuh"
#include "mxfp8/run_map.cuh"

namespace mxfp8 {

struct QuantizeParams {
  const u8* input;  // contiguous, 16-byte aligned
  u8* data;         // 8-byte aligned
  u8* scale;
  u8* run_scale;    // folding only: the shared scales once more, (matrices, runs of a row, padded rows)
  RunMap map;       // one row of all blocks, unless folding
  u32 rows;         // of one matrix; folding only
};

template <class Input, class Format, class Scaling, bool Fold>
struct Quantize {
  static constexpr int kElements = Input::kElements;
  static constexpr int kWords = kElements / 4;  // of FP8
  static constexpr int kBlockLanes = kBlock / kElements;
  static constexpr int kLoads = kBlockLanes;  // of a thread: a warp's loads together hold 32 blocks
  static constexpr int kBlocksPerLoad = 32 / kBlockLanes;
  static constexpr int kRunLanes = kBlockLanes * kBlocksPerRun;

  static __device__ void run(const QuantizeParams& params) {
    const int lane = threadIdx.x % 32;
    const int in_block = lane % kBlockLanes;
    const u32 warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;

    uint4 raw[kLoads];
    u32 block[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const u32 nth = (warp * kLoads + i) * kBlocksPerLoad + lane / kBlockLanes;
      if constexpr (Fold) {
        block[i] = locate(params.map, nth / kBlocksPerRun, nth % kBlocksPerRun);
      } else {
        block[i] = nth < params.map.row_blocks ? nth : kNoBlock;
      }
      // Lanes without a block load another's and store nothing: a predicate for each load would serialize the loads.
      const u32 source = block[i] != kNoBlock ? block[i] : 0;
      raw[i] = ptx::load16(params.input + (static_cast<u64>(source) * kBlockLanes + in_block) * 16);
    }
    ptx::after_loads();

    // Lane l of a block takes care of the block's scale in load l.
    u32 my_amax = 0, my_block = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      u32 amax = Input::amax(raw[i]);
#pragma unroll
      for (int distance = 1; distance < kBlockLanes; distance *= 2)
        amax = max(amax, __shfl_xor_sync(kAllLanes, amax, distance));
      if (in_block == i) {
        my_amax = amax;
        my_block = block[i];
      }
    }
    u8 stored;
    const Rounding mine = rounding(my_amax, my_block != kNoBlock, stored);
    if (my_block != kNoBlock) {
      params.scale[my_block] = stored;
      if constexpr (Fold) {
        const u32 nth = (warp * kLoads + in_block) * kBlocksPerLoad + lane / kBlockLanes;
        if (nth % kBlocksPerRun == 0)
          params.run_scale[run_scale_index(params.map, nth / kBlocksPerRun, params.rows)] = stored;
      }
    }

#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int owner = lane - in_block + i;
      Rounding its;
      its.factor = __shfl_sync(kAllLanes, mine.factor, owner);
      its.literal = Fold ? __shfl_sync(kAllLanes, mine.literal, owner) : 0;
      if (block[i] != kNoBlock) store(params.data + static_cast<u64>(block[i]) * kBlock + in_block * kElements, raw[i], its);
    }
  }

 private:
  // One block's scale. All lanes take part, those of a run that share a load with each other.
  static __device__ Rounding rounding(u32 amax, bool counts, u8& stored) {
    const BlockScale<Format, Scaling> block(amax);
    stored = static_cast<u8>(block.scale);
    if constexpr (!Fold) {
      return block.own();
    } else {
      int needed = counts ? block.needed() : kNoScale;
#pragma unroll
      for (int distance = kBlockLanes; distance < kRunLanes; distance *= 2)
        needed = max(needed, __shfl_xor_sync(kAllLanes, needed, distance));
      const int shared = shared_scale(needed);
      stored = static_cast<u8>(shared);
      return block.shared(shared);
    }
  }

  static __device__ void store(u8* address, uint4 raw, Rounding rounding) {
    float x[kElements];
    Input::to_float(raw, x);
    u32 bytes[kWords];
    if constexpr (Fold) {
      round_folded<Format>(x, rounding, bytes);
    } else {
      to_fp8<Format>(x, rounding.factor, bytes);
    }
    if constexpr (kWords == 2) {
      *reinterpret_cast<uint2*>(address) = make_uint2(bytes[0], bytes[1]);
    } else {
      *reinterpret_cast<u32*>(address) = bytes[0];
    }
  }
};

}  // namespace mxfp8
