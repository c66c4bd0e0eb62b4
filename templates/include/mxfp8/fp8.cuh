// FP8 elements as bytes: conversion, classification, and the E8M0 scales that go with them.
#pragma once

#include "mxfp8/ptx.cuh"

namespace mxfp8 {

constexpr int kBlock = 32;       // elements that share one E8M0 scale
constexpr int kBlocksPerRun = 4;  // blocks that share one scale once folded
constexpr int kBias = 127;
constexpr int kScaleNan = 255;
constexpr u32 kNanBytes = 0x7F7F7F7Fu;
constexpr int kNoScale = -1000;  // below every scale: nothing in here needs one
constexpr u32 kAllLanes = 0xFFFFFFFFu;

struct E4M3 {
  static constexpr int kEmax = 8;  // exponent of the largest value
  static constexpr float kDmax = 448.0f;
  static constexpr u32 kMinNormal = 0x08;
  static constexpr u32 kFirstNonFinite = 0x7F;  // NaN
  static constexpr int kTileLimit = 8;

  static __device__ u16 pack2(float low, float high) { return ptx::e4m3x2_from_floats(low, high); }
  static __device__ u16 pack2_half(u32 halves) { return ptx::e4m3x2_from_halves(halves); }
  static __device__ u32 to_half2(u16 bytes) { return ptx::halves_from_e4m3x2(bytes); }
};

struct E5M2 {
  static constexpr int kEmax = 15;
  static constexpr float kDmax = 57344.0f;
  static constexpr u32 kMinNormal = 0x04;
  static constexpr u32 kFirstNonFinite = 0x7C;  // Inf, then NaN
  static constexpr int kTileLimit = 22;

  static __device__ u16 pack2(float low, float high) { return ptx::e5m2x2_from_floats(low, high); }
  static __device__ u16 pack2_half(u32 halves) { return ptx::e5m2x2_from_halves(halves); }
  static __device__ u32 to_half2(u16 bytes) { return ptx::halves_from_e5m2x2(bytes); }
};

// Exact: every FP8 value is a half.
template <class Format>
__device__ void unpack4(u32 bytes, float (&out)[4]) {
  const u32 low = Format::to_half2(static_cast<u16>(bytes));
  const u32 high = Format::to_half2(static_cast<u16>(bytes >> 16));
  out[0] = ptx::float_from_half(static_cast<u16>(low));
  out[1] = ptx::float_from_half(static_cast<u16>(low >> 16));
  out[2] = ptx::float_from_half(static_cast<u16>(high));
  out[3] = ptx::float_from_half(static_cast<u16>(high >> 16));
}

template <class Format>
__device__ u32 pack4(const float (&x)[4]) {
  return Format::pack2(x[0], x[1]) | static_cast<u32>(Format::pack2(x[2], x[3])) << 16;
}

// 0xFF in each byte that is Inf or NaN. The addition carries into a byte's sign bit, and never beyond it.
template <class Format>
__device__ u32 nonfinite_mask(u32 bytes) {
  const u32 carry = (bytes & 0x7F7F7F7Fu) + 0x01010101u * (0x80u - Format::kFirstNonFinite);
  return (carry >> 7 & 0x01010101u) * 0xFFu;
}

// 2^exponent, exact for -127..127 (2^-127 is a float subnormal).
__device__ inline float power_of_two(int exponent) {
  return __int_as_float(exponent > -kBias ? (exponent + kBias) << 23 : 1 << 22);
}

// The largest magnitude, as a half's bits: 0x7C00 or more if there are Inf or NaN.
template <int N>
__device__ u32 magnitude_max_halves(const u32 (&halves)[N]) {
  u32 largest = halves[0];
#pragma unroll
  for (int i = 1; i < N; ++i) largest = ptx::max_magnitude_f16x2(largest, halves[i]);
  return ptx::max_magnitude_f16x2(largest, largest >> 16) & 0x7FFF;
}

template <class Format, int N>
__device__ void unpack_halves(const u32 (&words)[N], u32 (&halves)[2 * N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    halves[2 * i] = Format::to_half2(static_cast<u16>(words[i]));
    halves[2 * i + 1] = Format::to_half2(static_cast<u16>(words[i] >> 16));
  }
}

template <class Format, int N>
__device__ void pack_halves(const u32 (&halves)[2 * N], u32 (&words)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    words[i] = Format::pack2_half(halves[2 * i]) | static_cast<u32>(Format::pack2_half(halves[2 * i + 1])) << 16;
}

// The smallest shared scale under which `magnitude` * 2^(scale - 127) does not exceed the format's maximum, which is
// 1.75 * 2^emax: the exponent, plus one for mantissas above 1.75. May be negative; kNoScale where nothing needs one.
template <class Format>
__device__ int needed_scale_of_half(u32 magnitude, int scale) {
  if (magnitude == 0 || scale == kScaleNan) return kNoScale;
  const u32 bits = __float_as_uint(ptx::float_from_half(static_cast<u16>(magnitude)));
  return scale - kBias - Format::kEmax + static_cast<int>((bits + 0x1FFFFF) >> 23);
}

template <class Format>
__device__ int needed_scale(u32 magnitude, int scale) {
  return needed_scale_of_half<Format>(Format::to_half2(static_cast<u16>(magnitude)) & 0xFFFF, scale);
}

// The E8M0 byte of a shared scale.
__device__ inline int shared_scale(int needed) { return needed == kNoScale ? kBias : max(needed, 0); }

// Half's normal powers of two.
constexpr int kFewestSteps = -14, kMostSteps = 15;

template <int N>
__device__ void scale_halves(u32 (&halves)[N], int steps) {
  const u32 factor = static_cast<u32>(steps + 15) * 0x04000400u;
#pragma unroll
  for (int i = 0; i < N; ++i) halves[i] = ptx::mul_f16x2(halves[i], factor);
}

// Words of finite elements times 2^steps, rounded once to nearest even in FP8 and never overflowing, which callers see to.
// In halves: FP8 has few enough bits that a product is exact there unless it is far below half of FP8's smallest value,
// where its last bits decide nothing; the same holds between two steps.
template <class Format, int N>
__device__ void shift_finite(u32 (&words)[N], int steps) {
  u32 halves[2 * N];
  unpack_halves<Format>(words, halves);
  steps = min(max(steps, -48), 48);  // as good as infinite
  do {
    const int step = min(max(steps, kFewestSteps), kMostSteps);
    scale_halves(halves, step);
    steps -= step;
  } while (steps != 0);
  pack_halves<Format>(halves, words);
}

// How many of four elements have another value under scale byte `to` than they had under `from`.
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
