// Registers to global memory: bias, accumulation, rounding, and stores predicated by row and column, so that a ragged
// group needs no padding. Register layout: see promotion.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "tile_scheduler.cuh"

namespace mxfp8 {

template <class T>
struct Pair;  // two neighbouring output elements

template <>
struct Pair<float> {
  using Type = float2;
  static __device__ float2 pack(float x, float y) { return {x, y}; }
  static __device__ float2 unpack(float2 v) { return v; }
};
template <>
struct Pair<__nv_bfloat16> {
  using Type = __nv_bfloat162;
  static __device__ Type pack(float x, float y) { return __floats2bfloat162_rn(x, y); }
  static __device__ float2 unpack(Type v) { return __bfloat1622float2(v); }
};
template <>
struct Pair<__half> {
  using Type = __half2;
  static __device__ Type pack(float x, float y) { return __floats2half2_rn(x, y); }
  static __device__ float2 unpack(Type v) { return __half22float2(v); }
};

// Transposes 4x4 words among the 4 threads of a quad: thread q ends with word q of each of the four.
__device__ inline void transpose_in_quad(unsigned (&word)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const unsigned other = __shfl_xor_sync(~0u, odd ? word[i] : word[i + 1], 1);
    (odd ? word[i] : word[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned other = __shfl_xor_sync(~0u, high ? word[i] : word[i + 2], 2);
    (high ? word[i] : word[i + 2]) = other;
  }
}

// `sum` is one warp group's 64 x TileN share; `row` this thread's first row in the tile.
template <class Out, int TileN>
__device__ inline void store_tile(const GroupedGemmParams& params, float* sum, const Tile& tile, int row) {
  using PairOut = typename Pair<Out>::Type;
  const int n = problem_of(params, tile.group, &Problem::n);
  const int quad_lane = threadIdx.x % 4;
  const int64_t first_row = static_cast<int64_t>(tile.batch_a) * problem_of(params, tile.group, &Problem::m) + tile.m0 + row;
  const Out* bias = static_cast<const Out*>(problem_of(params, tile.group, &Problem::bias));
  if (bias) {
    bias += static_cast<int64_t>(tile.batch_b) * n;
#pragma unroll
    for (int j = 0; j < TileN / 8; ++j) {
      const int column = tile.n0 + 8 * j + 2 * quad_lane;
      if (column < n) {
        const float2 b = Pair<Out>::unpack(*reinterpret_cast<const PairOut*>(bias + column));
        sum[4 * j + 0] += b.x, sum[4 * j + 1] += b.y, sum[4 * j + 2] += b.x, sum[4 * j + 3] += b.y;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool row_in_group = row + 8 * r < tile.rows;
    Out* out = static_cast<Out*>(problem_of(params, tile.group, &Problem::out)) + (first_row + 8 * r) * n + tile.n0;
    if (params.accumulate && row_in_group) {
#pragma unroll
      for (int j = 0; j < TileN / 8; ++j) {
        const int column = 8 * j + 2 * quad_lane;
        if (tile.n0 + column < n) {
          const float2 old = Pair<Out>::unpack(*reinterpret_cast<const PairOut*>(out + column));
          sum[4 * j + 2 * r] += old.x, sum[4 * j + 2 * r + 1] += old.y;
        }
      }
    }
    if constexpr (sizeof(Out) == 4) {  // a quad's 8-byte stores fill a sector
#pragma unroll
      for (int j = 0; j < TileN / 8; ++j) {
        const int column = 8 * j + 2 * quad_lane;
        if (row_in_group && tile.n0 + column < n)
          *reinterpret_cast<PairOut*>(out + column) = Pair<Out>::pack(sum[4 * j + 2 * r], sum[4 * j + 2 * r + 1]);
      }
    } else {  // 4-byte stores would fill half of one: hand each thread of the quad 8 neighbouring columns
#pragma unroll
      for (int j = 0; j < TileN / 8; j += 4) {
        unsigned word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const PairOut pair = Pair<Out>::pack(sum[4 * (j + i) + 2 * r], sum[4 * (j + i) + 2 * r + 1]);
          word[i] = *reinterpret_cast<const unsigned*>(&pair);
        }
        transpose_in_quad(word);
        const int column = 8 * (j + quad_lane);
        if (row_in_group && tile.n0 + column < n)
          *reinterpret_cast<uint4*>(out + column) = {word[0], word[1], word[2], word[3]};
      }
    }
  }
}

}  // namespace mxfp8
