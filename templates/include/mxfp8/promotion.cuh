// Promotion: the tensor cores' partial sums, scaled, are added to FP32 sums in registers.
//
// A warp group's wgmma accumulator lies in registers as (column of the pair, row or row + 8, group of 8 columns): element
// 4 j + 2 r + c of a thread is row lane / 4 + 8 r of its warp's 16 rows, column 8 j + 2 (lane % 4) + c.
#pragma once

#include <cuda/std/cstdint>

namespace mxfp8 {

// 2^(byte - 127), exact over all of E8M0: byte 0 is the subnormal 2^-127, byte 255 a NaN.
__device__ inline float e8m0_to_float(unsigned byte) {
  return __uint_as_float(byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : byte << 23);
}

// Splits a power of two from e8m0_to_float into 2^(x / 2) and 2^(x - x / 2); NaN gives NaNs.
__device__ inline float2 split_power(float value) {
  if (!(value == value)) return {value, value};
  const int biased = static_cast<int>(__float_as_uint(value) >> 23);
  const int x = biased - 127;  // the subnormal 2^-127 has a biased exponent of 0 as well
  const int half = x >> 1;
  return {__uint_as_float((half + 127) << 23), __uint_as_float((x - half + 127) << 23)};
}

// Scale bytes in [kModerateMin, kModerateMax] are moderate: the product of two is a normal FP32 number, and a partial sum
// (a multiple of 2^-32, E5M2's least product, below 2^39, 128 of its largest) times one of them neither overflows nor
// loses bits, so that the multiply-add alone rounds.
inline constexpr unsigned kModerateMin = 127 - 62, kModerateMax = 127 + 62;
__device__ inline bool is_moderate(unsigned byte) { return byte - kModerateMin <= kModerateMax - kModerateMin; }

// One weight scale per column, all of them moderate. `sfb` points at the scale of this thread's first column.
template <int TileN>
__device__ inline void promote_columns(float* sum, const float* partial, float a0, float a1, const float* sfb) {
#pragma unroll
  for (int j = 0; j < TileN / 8; ++j) {
    const float2 column = *reinterpret_cast<const float2*>(sfb + 8 * j);
    sum[4 * j + 0] = fmaf(partial[4 * j + 0] * column.x, a0, sum[4 * j + 0]);
    sum[4 * j + 1] = fmaf(partial[4 * j + 1] * column.y, a0, sum[4 * j + 1]);
    sum[4 * j + 2] = fmaf(partial[4 * j + 2] * column.x, a1, sum[4 * j + 2]);
    sum[4 * j + 3] = fmaf(partial[4 * j + 3] * column.y, a1, sum[4 * j + 3]);
  }
}

// Any scales at all. Both are halved in the exponent and the halves paired crosswise, so that both factors stay within
// 2^-127 to 2^127: a zero stays zero, and a result is lost only if it does not fit FP32 itself. Rare, so small rather
// than fast.
template <int TileN>
__device__ inline void promote_extreme(float* sum, const float* partial, float a0, float a1, const float* sfb) {
  const float2 half0 = split_power(a0), half1 = split_power(a1);
#pragma unroll
  for (int j = 0; j < TileN / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float2 column = split_power(sfb[8 * j + c]);
      float& first = sum[4 * j + c];
      float& second = sum[4 * j + 2 + c];
      first = fmaf(partial[4 * j + c] * (half0.x * column.y), half0.y * column.x, first);
      second = fmaf(partial[4 * j + 2 + c] * (half1.x * column.y), half1.y * column.x, second);
    }
  }
}

}  // namespace mxfp8
