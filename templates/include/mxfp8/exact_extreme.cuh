// The exact kernel's way with scales that BF16 factors cannot express: FP8 products of 32 of K by the warp-wide instruction,
// scaled in FP32 and added to the sums. Right for every scale, and about ten times slower: for single stages.
#pragma once

#include "mxfp8/fp8_to_bf16.cuh"

namespace mxfp8 {

__device__ inline u32 word_at(const u8* base, int offset) { return *reinterpret_cast<const u32*>(base + offset); }

// d = 16 rows of A times 8 of B, 32 of K; registers as wgmma's sums have them.
template <class FormatA, class FormatB>
__device__ inline void multiply_16x8x32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#define MXFP8_MMA(TYPE_A, TYPE_B)                                                                                   \
  asm("mma.sync.aligned.m16n8k32.row.col.f32." TYPE_A "." TYPE_B ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
      "{%10, %10, %10, %10};"                                                                                       \
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                                              \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f))
  constexpr bool kA = FormatA::kEmax == E4M3::kEmax, kB = FormatB::kEmax == E4M3::kEmax;
  if constexpr (kA && kB) MXFP8_MMA("e4m3", "e4m3");
  if constexpr (kA && !kB) MXFP8_MMA("e4m3", "e5m2");
  if constexpr (!kA && kB) MXFP8_MMA("e5m2", "e4m3");
  if constexpr (!kA && !kB) MXFP8_MMA("e5m2", "e5m2");
#undef MXFP8_MMA
}

// sum + partial * 2^(byte_a - 127) * 2^(byte_b - 127). The power is applied in halves, which are normal numbers: a result is
// lost only if it does not fit FP32 itself. Powers below 2^-252 make any partial sum zero.
__device__ inline float add_scaled(float sum, float partial, int byte_a, int byte_b) {
  const int exponent = max(byte_a + byte_b - 254, -252), half = exponent >> 1;
  const float first = byte_a == 255 || byte_b == 255 ? __uint_as_float(0x7fc00000u) : __uint_as_float((half + 127) << 23);
  return fmaf(partial * first, __uint_as_float((exponent - half + 127) << 23), sum);
}

// One stage of 128 K for one warp: 16 x TileN sums. `row` is this thread's first row in A's stage, the other one 8 below.
template <class FormatA, class FormatB, int TileN>
__device__ __forceinline__ void multiply_extreme(float (&sum)[TileN / 2], const u8* a, const u8* b, const u32* scales_a,
                                        const u32* scales_b, int row) {
  const int group = threadIdx.x % 32 / 4, quad_lane = threadIdx.x % 4;
#pragma unroll 1
  for (int block = 0; block < 4; ++block) {
    const int byte0 = scales_a[scale_place(row)] >> (8 * block) & 0xFF;
    const int byte1 = scales_a[scale_place(row + 8)] >> (8 * block) & 0xFF;
    u32 fragment_a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      fragment_a[i] = word_at(a, swizzled(row + 8 * (i % 2), 2 * block + i / 2) + 4 * quad_lane);
#pragma unroll 1
    for (int j = 0; j < TileN / 8; ++j) {
      u32 fragment_b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) fragment_b[i] = word_at(b, swizzled(8 * j + group, 2 * block + i) + 4 * quad_lane);
      float four[4];
      multiply_16x8x32<FormatA, FormatB>(four, fragment_a, fragment_b);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int byte = scales_b[8 * j + 2 * quad_lane + c] >> (8 * block) & 0xFF;
        four[c] = add_scaled(sum[c], four[c], byte0, byte);
        four[2 + c] = add_scaled(sum[2 + c], four[2 + c], byte1, byte);
      }
      // Registers cannot be indexed: the sums move up by four, and are back in place after the last step.
#pragma unroll
      for (int i = 0; i < TileN / 2 - 4; ++i) sum[i] = sum[i + 4];
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[TileN / 2 - 4 + i] = four[i];
    }
  }
}

// Whether a row of 128 elements in shared memory has any but zeros in the blocks whose bytes in `blocks` are not zero.
__device__ inline bool has_nonzero(const u8* tile, int row, u32 blocks) {
  u32 bits = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < 8; ++chunk) {
    if (!(blocks >> (chunk / 2 * 8) & 0xFF)) continue;
    const uint4 v = *reinterpret_cast<const uint4*>(tile + swizzled(row, chunk));
    bits |= v.x | v.y | v.z | v.w;
  }
  return bits & 0x7F7F7F7Fu;
}

}  // namespace mxfp8
