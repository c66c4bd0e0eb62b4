// What the kernels that quantize share: types of input, scale rules, and elements rounded to FP8 under a block's own scale or
// one that it shares.
#pragma once

#include "mxfp8/fp8.cuh"

namespace mxfp8 {

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

// What 16 bytes of input hold, and what a word of them does: one element or, of 16 bits, two.
struct Bf16 {
  static constexpr int kElements = 8;
  static __device__ u32 larger(u32 a, u32 b) { return ptx::max_u16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu); }
  static __device__ float element(u32 word, int i) {
    return __uint_as_float(i == 0 ? word << 16 : word & 0xFFFF0000u);
  }
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
  static __device__ u32 larger(u32 a, u32 b) { return ptx::max_u16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu); }
  static __device__ float element(u32 word, int i) { return ptx::float_from_half(static_cast<u16>(word >> 16 * i)); }
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
  static __device__ u32 larger(u32 a, u32 b) { return max(a & 0x7FFFFFFFu, b & 0x7FFFFFFFu); }
  static __device__ float element(u32 word, int) { return __uint_as_float(word); }
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

// How a block's elements are rounded.
struct Rounding {
  float factor;  // of the elements, for the scale that is stored; NaN if the block's own scale is
  u32 literal;   // 0 if the block's own scale is stored; else that, the stored one << 8, kAlways if set
};
constexpr u32 kAlways = 1u << 16;

template <class Format, class Scaling>
struct BlockScale {
  bool is_nan;
  int scale;     // its own
  float factor;  // of the elements, for that scale
  float amax;    // times the factor

  BlockScale() = default;
  __device__ explicit BlockScale(u32 magnitude) {
    is_nan = magnitude >= 0x7F800000u;
    scale = is_nan ? kScaleNan : Scaling::template scale<Format>(magnitude);
    factor = is_nan ? nan() : power_of_two(kBias - scale);
    amax = __uint_as_float(magnitude) * factor;
  }

  __device__ Rounding own() const { return {factor, 0}; }

  // The shared scale that it needs. Rounding is monotonic: the block's largest element in FP8 is its amax in FP8.
  __device__ int needed() const { return needed_scale<Format>(Format::pack2(amax, 0.0f), scale); }

  __device__ Rounding shared(int shared) const {
    const bool always = scale < shared ? amax > Format::kDmax : scale > shared;
    const u32 literal = is_nan || scale == shared ? 0 : scale | shared << 8 | (always ? kAlways : 0);
    return {is_nan ? nan() : power_of_two(kBias - shared), literal};
  }

 private:
  static __device__ float nan() { return __uint_as_float(0x7FFFFFFFu); }
};

// N elements under a factor, as FP8; all NaN if that is.
template <class Format, int N>
__device__ void to_fp8(const float (&x)[N], float factor, u32 (&bytes)[N / 4]) {
  const u32 nan = factor != factor ? 0xFFFFFFFFu : 0u;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const float scaled[4] = {x[4 * i] * factor, x[4 * i + 1] * factor, x[4 * i + 2] * factor, x[4 * i + 3] * factor};
    bytes[i] = (pack4<Format>(scaled) & ~nan) | (kNanBytes & nan);
  }
}

// Whether an element is subnormal or the smallest normal number, and not zero. Sums stay within their bytes.
template <class Format, int N>
__device__ bool any_subnormal(const u32 (&bytes)[N]) {
  u32 found = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const u32 magnitude = bytes[i] & 0x7F7F7F7Fu;
    found |= (magnitude + 0x7F7F7F7Fu) & ~(magnitude + 0x01010101u * (0x7F - Format::kMinNormal));
  }
  return (found & 0x80808080u) != 0;
}

// The definition of folding starts from elements that are FP8 under their block's scale, so that each is rounded twice.
// Rounding it once, under the shared scale, gives the same unless
// - the first rounding saturates, or has fewer bits than the second because the shared scale is smaller: kAlways;
// - the second has fewer bits than the first: the result is subnormal, or has just been rounded up from there. (Where
//   it is zero, rounding twice gives zero too: at most half of the smallest value, which is even.)
template <class Format, int N>
__device__ void round_folded(const float (&x)[N], Rounding rounding, u32 (&bytes)[N / 4]) {
  to_fp8<Format>(x, rounding.factor, bytes);
  if (rounding.literal != 0 && ((rounding.literal & kAlways) != 0 || any_subnormal<Format>(bytes))) {
    const int scale = rounding.literal & 0xFF, shared = rounding.literal >> 8 & 0xFF;
    to_fp8<Format>(x, power_of_two(kBias - scale), bytes);
    shift_finite<Format>(bytes, scale - shared);
  }
}

}  // namespace mxfp8
