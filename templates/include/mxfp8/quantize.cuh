// bf16, fp16 or fp32 to MXFP8. Memory-bound: each element is read once, in 16-byte loads of which a thread has 4 or 8 in
// flight, and a warp's 32 scales are computed and stored at once, one by each lane.
#pragma once

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

struct Rceil {
  // d = amax / dmax in float, rounded up to a power of two. Byte 0 is 2^-127, the middle of float's subnormals.
  template <class Format>
  static __device__ int scale(u32 amax) {
    const u32 bits = __float_as_uint(__fmul_rn(__uint_as_float(amax), 1.0f / Format::kDmax));
    return bits < 0x800000u ? bits > 0x400000u : (bits + 0x7FFFFFu) >> 23;
  }
};

struct Floor {
  template <class Format>
  static __device__ int scale(u32 amax) {
    return max(static_cast<int>(amax >> 23) - Format::kEmax, 0);
  }
};

// What 16 bytes of input hold.
struct Bf16 {
  static constexpr int kElements = 8;
  static __device__ u32 amax(uint4 raw);
  static __device__ void to_float(uint4 raw, float (&out)[8]) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = __uint_as_float(words[i] << 16);
      out[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
};

struct Fp16 {
  static constexpr int kElements = 8;
  static __device__ u32 amax(uint4 raw);
  static __device__ void to_float(uint4 raw, float (&out)[8]) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = ptx::float_from_half(static_cast<u16>(words[i]));
      out[2 * i + 1] = ptx::float_from_half(static_cast<u16>(words[i] >> 16));
    }
  }
};

struct Fp32 {
  static constexpr int kElements = 4;
  static __device__ void to_float(uint4 raw, float (&out)[4]) {
    out[0] = __uint_as_float(raw.x);
    out[1] = __uint_as_float(raw.y);
    out[2] = __uint_as_float(raw.z);
    out[3] = __uint_as_float(raw.w);
  }
  static __device__ u32 amax(uint4 raw) {
    constexpr u32 kMagnitude = 0x7FFFFFFFu;
    return max(max(raw.x & kMagnitude, raw.y & kMagnitude), max(raw.z & kMagnitude, raw.w & kMagnitude));
  }
};

// The largest magnitude as a float's bits. Magnitudes order like their bits, with Inf and NaN at the top.
__device__ inline u32 magnitude_max_u16(uint4 raw) {
  constexpr u32 kMagnitude = 0x7FFF7FFFu;
  const u32 pairs = ptx::max_u16x2(ptx::max_u16x2(raw.x & kMagnitude, raw.y & kMagnitude),
                              ptx::max_u16x2(raw.z & kMagnitude, raw.w & kMagnitude));
  return max(pairs & 0xFFFFu, pairs >> 16);
}

__device__ inline u32 Bf16::amax(uint4 raw) { return magnitude_max_u16(raw) << 16; }
__device__ inline u32 Fp16::amax(uint4 raw) {
  return __float_as_uint(ptx::float_from_half(static_cast<u16>(magnitude_max_u16(raw))));
}

template <class Input, class Format, class Scaling, bool Fold>
struct Quantize {
  static constexpr int kElements = Input::kElements;
  static constexpr int kWords = kElements / 4;  // of FP8
  static constexpr int kBlockLanes = kBlock / kElements;
  static constexpr int kLoads = kBlockLanes;  // of a thread: a warp's loads together hold 32 blocks
  static constexpr int kBlocksPerLoad = 32 / kBlockLanes;
  static constexpr int kRunLanes = kBlockLanes * kBlocksPerRun;

  // What a block's other lanes learn about it; the factor is NaN if the scale is.
  struct Scales {
    float factor;  // of the elements, for the scale that is stored
    u32 literal;   // folding only: 0 if the block's own scale is stored; else that, the stored one << 8, kAlways if set
  };
  static constexpr u32 kAlways = 1u << 16;

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
    const Scales mine = scales(my_amax, my_block != kNoBlock, stored);
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
      Scales its;
      its.factor = __shfl_sync(kAllLanes, mine.factor, owner);
      its.literal = Fold ? __shfl_sync(kAllLanes, mine.literal, owner) : 0;
      if (block[i] != kNoBlock) store(params.data + static_cast<u64>(block[i]) * kBlock + in_block * kElements, raw[i], its);
    }
  }

 private:
  // One block's scales. All lanes take part, those of a run that share a load with each other.
  static __device__ Scales scales(u32 amax, bool counts, u8& stored) {
    const bool is_nan = amax >= 0x7F800000u;
    const float nan = __uint_as_float(0x7FFFFFFFu);
    const int scale = is_nan ? kScaleNan : Scaling::template scale<Format>(amax);
    const float factor = is_nan ? nan : power_of_two(kBias - scale);
    stored = static_cast<u8>(scale);
    if constexpr (!Fold) {
      return {factor, 0};
    } else {
      // Rounding is monotonic: the block's largest element in FP8 is its amax in FP8.
      const float scaled = __uint_as_float(amax) * factor;
      int needed = counts ? needed_scale<Format>(Format::pack2(scaled, 0.0f), scale) : kNoScale;
#pragma unroll
      for (int distance = kBlockLanes; distance < kRunLanes; distance *= 2)
        needed = max(needed, __shfl_xor_sync(kAllLanes, needed, distance));
      const int shared = shared_scale(needed);
      stored = static_cast<u8>(shared);
      const bool always = scale < shared ? scaled > Format::kDmax : scale > shared;
      const u32 literal = is_nan || scale == shared ? 0 : scale | shared << 8 | (always ? kAlways : 0);
      return {is_nan ? nan : power_of_two(kBias - shared), literal};
    }
  }

  // The definition of folding starts from elements that are FP8 under their block's scale, so that each is rounded twice.
  // Rounding it once, under the shared scale, gives the same unless
  // - the first rounding saturates, or has fewer bits than the second because the shared scale is smaller: kAlways;
  // - the second has fewer bits than the first: the result is subnormal, or has just been rounded up from there. (Where
  //   it is zero, rounding twice gives zero too: at most half of the smallest value, which is even.)
  static __device__ void store(u8* address, uint4 raw, Scales scales) {
    float x[kElements];
    Input::to_float(raw, x);
    u32 bytes[kWords];
    to_fp8(x, scales.factor, bytes);
    if constexpr (Fold) {
      if (scales.literal != 0 && ((scales.literal & kAlways) != 0 || any_subnormal(bytes))) {
        const int scale = scales.literal & 0xFF, shared = scales.literal >> 8 & 0xFF;
        to_fp8(x, power_of_two(kBias - scale), bytes);
        shift_finite<Format>(bytes, scale - shared);
      }
    }
    if constexpr (kWords == 2) {
      *reinterpret_cast<uint2*>(address) = make_uint2(bytes[0], bytes[1]);
    } else {
      *reinterpret_cast<u32*>(address) = bytes[0];
    }
  }

  static __device__ void to_fp8(const float (&x)[kElements], float factor, u32 (&bytes)[kWords]) {
    const u32 nan = factor != factor ? 0xFFFFFFFFu : 0u;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float scaled[4] = {x[4 * i] * factor, x[4 * i + 1] * factor, x[4 * i + 2] * factor, x[4 * i + 3] * factor};
      bytes[i] = (pack4<Format>(scaled) & ~nan) | (kNanBytes & nan);
    }
  }

  // Whether an element is subnormal or the smallest normal number, and not zero. Sums stay within their bytes.
  static __device__ bool any_subnormal(const u32 (&bytes)[kWords]) {
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const u32 magnitude = bytes[i] & 0x7F7F7F7Fu;
      found |= (magnitude + 0x7F7F7F7Fu) & ~(magnitude + 0x01010101u * (0x7F - Format::kMinNormal));
    }
    return (found & 0x80808080u) != 0;
  }
};

}  // namespace mxfp8
