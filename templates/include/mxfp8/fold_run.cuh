// One run of four blocks, a row of a box in shared memory: the scale that it needs, and its shift to the one that it gets.
#pragma once

#include "mxfp8/fp8.cuh"

namespace mxfp8 {

// A thread's run. Boxes are swizzled: the row's n-th 16 bytes lie at n ^ row % 8. The eight threads that read shared memory
// at once begin with different 16 bytes, for the sake of its banks; t counts a thread's blocks in its own order. Elements
// stay in registers as halves between search and shift.
template <class Format, bool Stats>
struct FoldRun {
  u8* bytes;
  u32 first;    // of the eight 16 bytes
  u32 key;      // the t-th block is the row's (t ^ key / 2)-th
  u32 scales;   // the blocks' bytes, in the row's order
  u32 special;  // bit t: Inf or NaN among the elements, or a NaN scale, or a shift too far for one multiplication
  u32 halves[kBlocksPerRun][16];

  __device__ FoldRun(u8* bytes, u32 row, u32 scales)
      : bytes(bytes), first(threadIdx.x % 8), key(first ^ row % 8), scales(scales), special(0) {}

  // The scale that the run needs; kNoScale if none.
  __device__ int needed() {
    int result = kNoScale;
#pragma unroll
    for (int t = 0; t < kBlocksPerRun; ++t) {
      u32 words[8];
      read(t, words);
      unpack_halves<Format>(words, halves[t]);
      const u32 magnitude = magnitude_max_halves(halves[t]);
      const bool is_special = magnitude >= 0x7C00 || scale(t) == kScaleNan;
      special |= is_special << t;
      if (!is_special) result = max(result, needed_scale_of_half<Format>(magnitude, scale(t)));
    }
    if (special != 0) result = max(result, needed_by_special());
    return result == kNoScale ? kNoScale : max(result, 0);  // a scale below 0 cannot be stored, and 0 serves
  }

  // Returns how many elements have got another value; 0 without statistics.
  __device__ u32 shift(int shared) {
    u32 changed = 0;
#pragma unroll
    for (int t = 0; t < kBlocksPerRun; ++t) {
      const int steps = scale(t) - shared;
      if (steps < kFewestSteps || steps > kMostSteps) special |= 1 << t;
      if ((special >> t & 1) == 0) {
        u32 words[8];
        scale_halves(halves[t], steps);
        pack_halves<Format>(halves[t], words);
        changed += replace(t, words, shared);
      }
    }
    return special == 0 ? changed : changed + shift_special(shared);
  }

 private:
  __device__ int scale(int t) const { return scales >> 8 * (t ^ key / 2) & 0xFF; }
  __device__ uint4* chunk(int t, int i) const { return reinterpret_cast<uint4*>(bytes + ((2 * t + i) ^ first) * 16); }

  __device__ void read(int t, u32 (&words)[8]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 raw = *chunk(t, i);
      words[4 * i] = raw.x;
      words[4 * i + 1] = raw.y;
      words[4 * i + 2] = raw.z;
      words[4 * i + 3] = raw.w;
    }
  }

  __device__ u32 replace(int t, const u32 (&words)[8], int shared) const {
    u32 changed = 0;
    if constexpr (Stats) {
      u32 before[8];
      read(t, before);
#pragma unroll
      for (int j = 0; j < 8; ++j) changed += changed4<Format>(before[j], scale(t), words[j], shared);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *chunk(t, i) = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    return changed;
  }

  __device__ int needed_by_special() const {
    int result = kNoScale;
#pragma unroll 1
    for (int t = 0; t < kBlocksPerRun; ++t) {
      if ((special >> t & 1) == 0) continue;
      u32 words[8], finite[16];
      read(t, words);
#pragma unroll
      for (int j = 0; j < 8; ++j) words[j] &= ~nonfinite_mask<Format>(words[j]);
      unpack_halves<Format>(words, finite);
      result = max(result, needed_scale_of_half<Format>(magnitude_max_halves(finite), scale(t)));
    }
    return result;
  }

  __device__ u32 shift_special(int shared) const {
    u32 changed = 0;
#pragma unroll 1
    for (int t = 0; t < kBlocksPerRun; ++t) {
      if ((special >> t & 1) == 0) continue;
      u32 before[8], after[8];
      read(t, before);
#pragma unroll
      for (int j = 0; j < 8; ++j) after[j] = scale(t) == kScaleNan ? kNanBytes : before[j];
      if (scale(t) != kScaleNan) {
        shift_finite<Format>(after, scale(t) - shared);
#pragma unroll
        for (int j = 0; j < 8; ++j) {  // Inf and NaN stay as they are
          const u32 mask = nonfinite_mask<Format>(before[j]);
          after[j] = (after[j] & ~mask) | (before[j] & mask);
        }
      }
      changed += replace(t, after, shared);
    }
    return changed;
  }
};

}  // namespace mxfp8
