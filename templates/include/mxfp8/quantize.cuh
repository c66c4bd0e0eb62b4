// bf16, fp16 or fp32 to MXFP8. Memory-bound: each element is read once, in 16-byte loads of which a thread has 4 or 8 in
// flight, and a warp's 32 scale bytes leave in one store.
#pragma once

#include "mxfp8/memory.cuh"

namespace mxfp8 {

struct QuantizeParams {
  const void* input;  // contiguous, 16-byte aligned
  u8* data;           // 8-byte aligned
  u8* scale;
  RunMap map;
};

struct Rceil {
  // d = amax / dmax in float, rounded up to a power of two. Byte 0 is 2^-127, the middle of float's subnormals.
  template <class Format>
  static __device__ int scale(u32 amax) {
    const u32 bits = __float_as_uint(__fmul_rn(__uint_as_float(amax), Format::kDmaxInverse));
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
      out[2 * i] = half_to_float(static_cast<u16>(words[i]));
      out[2 * i + 1] = half_to_float(static_cast<u16>(words[i] >> 16));
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
  const u32 pairs = max_u16x2(max_u16x2(raw.x & kMagnitude, raw.y & kMagnitude),
                              max_u16x2(raw.z & kMagnitude, raw.w & kMagnitude));
  return max(pairs & 0xFFFFu, pairs >> 16);
}

__device__ inline u32 Bf16::amax(uint4 raw) { return magnitude_max_u16(raw) << 16; }
__device__ inline u32 Fp16::amax(uint4 raw) {
  return __float_as_uint(half_to_float(static_cast<u16>(magnitude_max_u16(raw))));
}

template <class Input, class Format, class Scaling, bool Fold>
struct Quantize {
  static constexpr int kElements = Input::kElements;
  static constexpr int kBlockLanes = kBlock / kElements;
  static constexpr int kLoads = kBlockLanes;  // of a thread: a warp's loads together cover 32 blocks
  static constexpr int kRunLanes = kBlockLanes * kBlocksPerRun;
  static constexpr int kRunsPerLoad = 32 / kRunLanes;

  static __device__ void run(const QuantizeParams& params) {
    const int lane = threadIdx.x % 32;
    const u32 warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const u32 first_run = warp * (kLoads * kRunsPerLoad) + lane / kRunLanes;
    const int block = lane % kRunLanes / kBlockLanes;

    uint4 raw[kLoads];
    u64 where[kLoads];  // the thread's first element; kNowhere past the end of a row or of the tensor
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const Run run = locate(params.map, first_run + i * kRunsPerLoad);
      where[i] = block < run.blocks ? run.first_block * kBlock + lane % kRunLanes * kElements : kNowhere;
      raw[i] = make_uint4(0, 0, 0, 0);
      if (where[i] != kNowhere) raw[i] = load16(static_cast<const u8*>(params.input) + where[i] * (16 / kElements));
    }

    // Each lane of a block stores the scale of one of the loads: 32 neighbouring bytes of a warp.
    u64 scale_where = kNowhere;
    int scale_byte = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      u32 bytes[kElements / 4];
      const int scale = block_to_fp8(raw[i], bytes);
      if (where[i] != kNowhere) store(params.data + where[i], bytes);
      if (lane % kBlockLanes == i) {
        scale_where = where[i];
        scale_byte = scale;
      }
    }
    if (scale_where != kNowhere) params.scale[scale_where / kBlock] = static_cast<u8>(scale_byte);
  }

 private:
  static constexpr u64 kNowhere = ~0ull;

  static __device__ void store(u8* address, const u32 (&bytes)[2]) {
    *reinterpret_cast<uint2*>(address) = make_uint2(bytes[0], bytes[1]);
  }
  static __device__ void store(u8* address, const u32 (&bytes)[1]) { *reinterpret_cast<u32*>(address) = bytes[0]; }

  // The thread's elements in FP8; returns their scale byte. All lanes take part.
  static __device__ int block_to_fp8(uint4 raw, u32 (&bytes)[kElements / 4]) {
    u32 amax = Input::amax(raw);
#pragma unroll
    for (int distance = 1; distance < kBlockLanes; distance *= 2)
      amax = max(amax, __shfl_xor_sync(kAllLanes, amax, distance));
    const bool is_nan = amax >= 0x7F800000u;
    const int scale = is_nan ? kScaleNan : Scaling::template scale<Format>(amax);

    float x[kElements];
    Input::to_float(raw, x);
    const float inverse = power_of_two(kBias - min(scale, kScaleNan - 1));
#pragma unroll
    for (int i = 0; i < kElements / 4; ++i) {
      const float scaled[4] = {x[4 * i] * inverse, x[4 * i + 1] * inverse, x[4 * i + 2] * inverse,
                               x[4 * i + 3] * inverse};
      bytes[i] = is_nan ? kNanBytes : pack4<Format>(scaled);
    }
    if constexpr (!Fold) {
      return scale;
    } else {
      // Rounding is monotonic, so the block's largest element in FP8 is its amax in FP8.
      const u32 magnitude = Format::pack2(__uint_as_float(amax) * inverse, 0.0f);
      int needed = needed_scale<Format>(magnitude, scale);
#pragma unroll
      for (int distance = kBlockLanes; distance < kRunLanes; distance *= 2)
        needed = max(needed, __shfl_xor_sync(kAllLanes, needed, distance));
      const int shared = shared_scale(needed);
      // The second rounding is part of the definition: folding starts from FP8 elements.
      if (shared != scale) {
#pragma unroll
        for (int i = 0; i < kElements / 4; ++i) bytes[i] = shift4<Format>(bytes[i], scale, shared);
      }
      return shared;
    }
  }
};

}  // namespace mxfp8
