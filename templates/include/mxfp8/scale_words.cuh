// Compact scales, (rows, K / 32) bytes: a row's four of a stage are one word, those of four stages 16 bytes. Rows may start
// at any byte. Loads are volatile for the reason given in ptx.cuh: all of a thread's are in flight at once. They go through
// L1, since the next four stages' bytes lie in the same sector.
#pragma once

#include "mxfp8/ptx.cuh"

namespace mxfp8 {

__device__ inline u32 load_word(const u8* address) {
  u32 word;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(address) : "memory");
  return word;
}

__device__ inline uint4 load_four_words(const u8* address) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
  return v;
}

// The words of four stages for each of Rows rows, which start at `next` and go on for `left` bytes; what lies behind is of no
// meaning. `room`: bytes up to the end of the matrix' scales, of this thread's row that is closest to it; none is read
// behind. `aligned`: every row starts at a multiple of 16 bytes and is a multiple of them long. Called by whole warps.
template <int Rows>
__device__ inline void load_scale_words(const u8* const (&next)[Rows], int left, int room, bool aligned,
                                        u32 (&words)[Rows][4]) {
  if (aligned) {
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      const uint4 v = load_four_words(next[i]);
      words[i][0] = v.x, words[i][1] = v.y, words[i][2] = v.z, words[i][3] = v.w;
    }
  } else if (__any_sync(~0u, room < 20)) {  // rare: byte by byte
#pragma unroll
    for (int i = 0; i < Rows; ++i)
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[i][w] = 0;
#pragma unroll 1
        for (int b = 4 * w; b < min(4 * w + 4, left); ++b) words[i][w] |= static_cast<u32>(ptx::load1(next[i] + b)) << (8 * b % 32);
      }
  } else {  // five aligned words hold four at any byte
    u32 fifth[Rows];
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      const u8* first = next[i] - reinterpret_cast<u64>(next[i]) % 4;
#pragma unroll
      for (int w = 0; w < 4; ++w) words[i][w] = load_word(first + 4 * w);
      fifth[i] = load_word(first + 16);
    }
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      const u32 shift = 8 * (reinterpret_cast<u64>(next[i]) % 4);
#pragma unroll
      for (int w = 0; w < 4; ++w) words[i][w] = __funnelshift_r(words[i][w], w < 3 ? words[i][w + 1] : fifth[i], shift);
    }
  }
}

}  // namespace mxfp8
