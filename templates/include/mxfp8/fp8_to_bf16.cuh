// FP8 elements to BF16, scaled, for BF16 tensor cores: exact for every element while the scale is in range.
//
// An FP8 element's exponent and mantissa bits, put into a BF16 pattern at the mantissa's place, read as its value times
// 2^-kBias, subnormals included: both formats' subnormals have the least normal exponent. One multiplication by
// 2^(kBias + scale - 127) puts that right. NaN and Inf come out as numbers and are mended afterwards: they are rare.
//
// The order in which K is summed up is free, so it is one in which 16 contiguous bytes feed the same thread in four wgmma
// steps of 16: within 64 of K, step w has at its place 2 t + i (i = 0, 1; t = 0..3) byte 16 t + 4 w + 2 i, and at its place
// 8 + 2 t + i the byte behind it. Even and odd bytes of a word are what is converted together.
#pragma once

#include "mxfp8/bf16x2.cuh"
#include "mxfp8/fp8.cuh"

namespace mxfp8 {

template <class Format>
struct ToBf16 {
  static constexpr int kMantissa = Format::kMinNormal == 0x08 ? 3 : 2;
  static constexpr int kUp = 7 - kMantissa;  // bits to the place of BF16's mantissa
  static constexpr u32 kMagnitude = (0x7Fu << kUp) * 0x00010001u;
  static constexpr u32 kBias = 127 - (kMantissa == 3 ? 7 : 15);
  // Scale bytes beyond these: no BF16 factor is that large; an element's last bit is below BF16's least number, 2^-133.
  static constexpr u32 kHighest = 254 - kBias;
  static constexpr u32 kLowest = kMantissa == 3 ? 127 - 133 + 9 : 127 - 133 + 16;

  // What a pair of elements is multiplied by, twice. Any byte up to kHighest.
  static __device__ u32 factor(u32 byte) { return byte * 0x00800080u + (kBias << 7) * 0x00010001u; }

  // The patterns of bytes 0 and 2, and of bytes 1 and 3, without signs.
  static __device__ u32 even(u32 word) { return (word << kUp) & kMagnitude; }
  static __device__ u32 odd(u32 word) { return (word >> (8 - kUp)) & kMagnitude; }

  // Lanes of 16 bits that hold Inf or NaN: bit kNonfiniteBit of each.
  static constexpr u32 kNonfiniteBits = 0x00800080u << kUp;
  static __device__ u32 nonfinite(u32 magnitudes) {
    return (magnitudes + ((0x80u - Format::kFirstNonFinite) << kUp) * 0x00010001u) & kNonfiniteBits;
  }

  // Bytes (0, 2) and (1, 3) of a word, times the factor. `largest` becomes the maximum of the magnitudes so far.
  static __device__ void convert(u32 word, u32 factor, u32& even_pair, u32& odd_pair, u32& largest) {
    const u32 low = even(word), high = odd(word);
    largest = ptx::max_u16x2(largest, ptx::max_u16x2(low, high));
    even_pair = ptx::mul_bf16x2(low | ((word << 8) & 0x80008000u), factor);
    odd_pair = ptx::mul_bf16x2(high | (word & 0x80008000u), factor);
  }

  // Makes elements that are Inf or NaN so in a converted pair of theirs. The sign is there already.
  static __device__ void mend(u32 magnitudes, u32& pair) {
    const u32 lanes = (nonfinite(magnitudes) >> (kUp + 7)) * 0x7FFFu;
    pair = (pair & ~lanes) | ((magnitudes | 0x7F807F80u) & lanes);
  }

  // Scale bytes above kHighest, and below kLowest: bit 7 of each.
  static __device__ u32 too_high(u32 bytes) {
    return ((bytes & 0x7F7F7F7Fu) + (0xFFu - kHighest) * 0x01010101u) & bytes & 0x80808080u;
  }
  static __device__ u32 too_low(u32 bytes) {
    return ~(((bytes & 0x7F7F7F7Fu) + (0x80u - kLowest) * 0x01010101u) | bytes) & 0x80808080u;
  }
};

// A 16-byte chunk of a row of 128 bytes in shared memory, as the copy engine's 128-byte swizzle lays it out.
__device__ inline int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// Where a row of A has its scales among a stage's: those of the row 8 below, which the same thread needs, are next to them.
__device__ inline int scale_place(int row) { return (row & ~15) | (row & 7) << 1 | (row >> 3 & 1); }

__device__ inline u32 word_of(const uint4& v, int w) { return w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w; }

// 64 elements of a row, 16 in each of `raw`, to 128 swizzled bytes, as wgmma reads a K-major operand. The two lower bytes of
// `scales` are those of their blocks.
template <class Format>
__device__ inline void convert_row(const uint4 (&raw)[4], u32 scales, u8* destination, int row) {
  using Convert = ToBf16<Format>;
  const u32 factors[2] = {Convert::factor(scales & 0xFF), Convert::factor(scales >> 8 & 0xFF)};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    u32 even[4], odd[4], largest = 0;
#pragma unroll
    for (int t = 0; t < 4; ++t) Convert::convert(word_of(raw[t], w), factors[t / 2], even[t], odd[t], largest);
    if (__builtin_expect(Convert::nonfinite(largest) != 0, 0)) {
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        Convert::mend(Convert::even(word_of(raw[t], w)), even[t]);
        Convert::mend(Convert::odd(word_of(raw[t], w)), odd[t]);
      }
    }
    *reinterpret_cast<uint4*>(destination + swizzled(row, 2 * w)) = {even[0], even[1], even[2], even[3]};
    *reinterpret_cast<uint4*>(destination + swizzled(row, 2 * w + 1)) = {odd[0], odd[1], odd[2], odd[3]};
  }
}

// Words first to first + Steps - 1 of 16 elements each of a thread's two rows, to its fragments of as many wgmma steps. The
// result is the largest magnitude.
template <class Format, int Steps>
__device__ inline u32 convert_steps(const uint4 (&raw)[2], const u32 (&factors)[2], int first, u32 (&fragments)[4 * Steps]) {
  u32 largest = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int w = 0; w < Steps; ++w)
      ToBf16<Format>::convert(word_of(raw[r], first + w), factors[r], fragments[4 * w + r], fragments[4 * w + 2 + r], largest);
  return largest;
}

// The same for elements that are Inf or NaN, afterwards.
template <class Format, int Steps>
__device__ inline void mend_steps(const uint4 (&raw)[2], int first, u32 (&fragments)[4 * Steps]) {
  using Convert = ToBf16<Format>;
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int w = 0; w < Steps; ++w) {
      Convert::mend(Convert::even(word_of(raw[r], first + w)), fragments[4 * w + r]);
      Convert::mend(Convert::odd(word_of(raw[r], first + w)), fragments[4 * w + 2 + r]);
    }
}

}  // namespace mxfp8
