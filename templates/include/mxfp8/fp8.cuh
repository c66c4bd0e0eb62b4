// FP8 elements as bytes: conversion, classification, and the E8M0 scales that go with them. Needs no CUDA header, which
// keeps the elementwise kernels' compile time well under a second.
#pragma once

namespace mxfp8 {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int kBlock = 32;       // elements that share one E8M0 scale
constexpr int kBlocksPerRun = 4;  // blocks that share one scale once folded
constexpr int kBias = 127;
constexpr int kScaleNan = 255;
constexpr u32 kNanBytes = 0x7F7F7F7Fu;
constexpr int kNoScale = -1000;  // below every scale: nothing in here needs one
constexpr u32 kAllLanes = 0xFFFFFFFFu;

struct E4M3 {
  static constexpr int kEmax = 8;            // exponent of the largest value, 448
  static constexpr float kDmaxInverse = 1.0f / 448.0f;
  static constexpr u32 kFirstNonFinite = 0x7F;  // NaN
  static constexpr int kTileLimit = 8;

  // Two floats to two bytes, `low` in bits 0-7: round to nearest even, saturating.
  static __device__ u16 pack2(float low, float high) {
    u16 out;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
    return out;
  }
  static __device__ u32 to_half2(u16 bytes) {
    u32 out;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(bytes));
    return out;
  }
};

struct E5M2 {
  static constexpr int kEmax = 15;  // 57344
  static constexpr float kDmaxInverse = 1.0f / 57344.0f;
  static constexpr u32 kFirstNonFinite = 0x7C;  // Inf, then NaN
  static constexpr int kTileLimit = 22;

  static __device__ u16 pack2(float low, float high) {
    u16 out;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
    return out;
  }
  static __device__ u32 to_half2(u16 bytes) {
    u32 out;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(out) : "h"(bytes));
    return out;
  }
};

__device__ inline float half_to_float(u16 bits) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
  return out;
}

// Exact: every FP8 value is a half.
template <class Format>
__device__ void unpack4(u32 bytes, float (&out)[4]) {
  const u32 low = Format::to_half2(static_cast<u16>(bytes));
  const u32 high = Format::to_half2(static_cast<u16>(bytes >> 16));
  out[0] = half_to_float(static_cast<u16>(low));
  out[1] = half_to_float(static_cast<u16>(low >> 16));
  out[2] = half_to_float(static_cast<u16>(high));
  out[3] = half_to_float(static_cast<u16>(high >> 16));
}

template <class Format>
__device__ u32 pack4(const float (&x)[4]) {
  return Format::pack2(x[0], x[1]) | static_cast<u32>(Format::pack2(x[2], x[3])) << 16;
}

// 0xFF in each byte that is Inf or NaN. The addition carries into a byte's sign bit, and never beyond it.
template <class Format>
__device__ u32 nonfinite_mask(u32 bytes) {
  const u32 carry = (bytes & 0x7F7F7F7Fu) + 0x01010101u * (0x80u - Format::kFirstNonFinite);
  return __byte_perm(carry, 0, 0xBA98);  // replicates each byte's sign bit
}

// 2^exponent, exact for -127..127 (2^-127 is a float subnormal).
__device__ inline float power_of_two(int exponent) {
  return __int_as_float(exponent > -kBias ? (exponent + kBias) << 23 : 1 << 22);
}

__device__ inline u32 max_u16x2(u32 a, u32 b) {
  u32 out;
  asm("max.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// The largest finite magnitude among 16 elements, as an FP8 byte. Bytes order like the values that they encode.
template <class Format>
__device__ u32 finite_max16(uint4 raw) {
  const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
  u32 even = 0, odd = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 finite = words[i] & ~nonfinite_mask<Format>(words[i]);
    even = max_u16x2(even, finite & 0x007F007Fu);
    odd = max_u16x2(odd, finite & 0x7F007F00u);
  }
  even = max_u16x2(even, odd >> 8);
  return max(even & 0xFFFFu, even >> 16);
}

// The smallest shared scale under which `magnitude` * 2^(scale - 127) does not exceed the format's maximum, which is
// 1.75 * 2^emax: the exponent, plus one for mantissas above 1.75. May be negative; kNoScale where nothing needs one.
template <class Format>
__device__ int needed_scale(u32 magnitude, int scale) {
  if (magnitude == 0 || scale == kScaleNan) return kNoScale;
  const u32 bits = __float_as_uint(half_to_float(static_cast<u16>(Format::to_half2(static_cast<u16>(magnitude)))));
  return scale - kBias - Format::kEmax + static_cast<int>((bits + 0x1FFFFF) >> 23);
}

// The E8M0 byte of a shared scale.
__device__ inline int shared_scale(int needed) { return needed == kNoScale ? kBias : max(needed, 0); }

// Four elements from scale byte `from` to scale byte `to`, rounded to nearest even; Inf and NaN stay as they are and a
// NaN scale makes all of them NaN. Beyond 64 either way every element is 0, or would overflow, which callers exclude;
// within it the product is exact in float.
template <class Format>
__device__ u32 shift4(u32 bytes, int from, int to) {
  const float factor = power_of_two(min(max(from - to, -64), 64));
  float x[4];
  unpack4<Format>(bytes, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] *= factor;
  const u32 survives = nonfinite_mask<Format>(bytes);
  const u32 shifted = (pack4<Format>(x) & ~survives) | (bytes & survives);
  return from == kScaleNan ? kNanBytes : shifted;
}

// How many of four elements have another value after shift4 than before.
template <class Format>
__device__ u32 changed4(u32 before, int from, u32 after, int to) {
  if (from == kScaleNan) return 0;
  const float factor = power_of_two(min(max(to - from, -64), 64));
  float x[4], y[4];
  unpack4<Format>(before, x);
  unpack4<Format>(after, y);
  u32 count = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) count += (((before ^ after) >> (8 * i)) & 0xFF) != 0 && x[i] != y[i] * factor;
  return count;
}

}  // namespace mxfp8
