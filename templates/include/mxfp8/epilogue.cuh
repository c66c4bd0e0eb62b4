// Registers to global memory: bias, accumulation, rounding, and the stores. A warp whose 16 rows all belong to the group
// stages them in shared memory for the copy engine, which stores them while the next tile is computed. At a group's ragged
// end, stores are predicated by row and column, so that no padding is needed. Register layout: see promotion.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "tile_copies.cuh"
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

// Shared memory for a tile of 2-byte elements: for each warp, boxes of 16 rows x 64 columns with a 128-byte swizzle. Wider
// elements leave no room for it beside the stages; their direct stores fill sectors as they are.
template <class Out, int TileM, int TileN, bool Wanted>
struct OutputStaging {
  static constexpr bool kUsed = Wanted && sizeof(Out) == 2;
  static constexpr int kBoxes = TileN / 64, kBoxBytes = 16 * 128;
  alignas(kUsed ? 1024 : 16) uint8_t boxes[kUsed ? TileM / 16 : 1][kUsed ? kBoxes : 1][kUsed ? kBoxBytes : 1];

  // Rows 16 * warp to 16 * warp + 15 of a tile, by the warp that has them.
  template <class AnyTile>
  __device__ __forceinline__ void store(const GroupedGemmParams& params, const float* sum, const AnyTile& tile, int warp) {
    const int lane = threadIdx.x % 32, n = problem_of(params, tile.group, &Problem::n);
    uint8_t(&mine)[kBoxes][kBoxBytes] = boxes[warp];
    if (lane == 0) cute::tma_store_wait<0>();  // the tile before has been read
    __syncwarp();
    auto pack = [](float x, float y) {
      const auto pair = Pair<Out>::pack(x, y);
      return *reinterpret_cast<const uint32_t*>(&pair);
    };
    const int row = lane % 16, half = lane / 16;  // of the 8x8 matrix row whose address this lane gives
#pragma unroll
    for (int c = 0; c < TileN / 16; ++c) {
      const float* x = sum + 8 * c;
      uint8_t* address = &mine[c / 4][row * 128 + ((c % 4 * 2 + half) ^ (row % 8)) * 16];
      cute::SM90_U32x4_STSM_N::copy(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]),
                                    *reinterpret_cast<cute::uint128_t*>(address));
    }
    cute::tma_store_fence();
    __syncwarp();
    if (lane == 0) {
      const TensorMap& map = params.problems ? params.problems[tile.group].map_out : params.problem.map_out;
      if (params.problems) cute::tma_descriptor_fence_acquire(as_descriptor(map));
#pragma unroll
      for (int i = 0; i < kBoxes; ++i)
        if (tile.n0 + 64 * i < n)
          cute::SM90_TMA_STORE_3D::copy(&map, mine[i], tile.n0 + 64 * i, tile.m0 + 16 * warp,
                                        batch_of_out(params, tile));
      cute::tma_store_arrive();
    }
  }
  // Before shared memory goes.
  __device__ void finish() const {
    if (kUsed && threadIdx.x % 32 == 0) cute::tma_store_wait<0>();
  }
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

// In what follows `sum` is a warp group's 64 x TileN share and `row` this thread's first row in the tile. Registers stay
// registers only if all of it is inlined.
template <class Out, int TileN, class AnyTile>
__device__ __forceinline__ void add_bias(const GroupedGemmParams& params, float* sum, const AnyTile& tile) {
  const Out* bias = static_cast<const Out*>(problem_of(params, tile.group, &Problem::bias));
  if (!bias) return;
  const int n = problem_of(params, tile.group, &Problem::n);
  bias += static_cast<int64_t>(batch_of_b(params, tile)) * n;
#pragma unroll
  for (int j = 0; j < TileN / 8; ++j) {
    const int column = tile.n0 + 8 * j + 2 * (threadIdx.x % 4);
    if (column < n) {
      const float2 b = Pair<Out>::unpack(*reinterpret_cast<const typename Pair<Out>::Type*>(bias + column));
      sum[4 * j + 0] += b.x, sum[4 * j + 1] += b.y, sum[4 * j + 2] += b.x, sum[4 * j + 3] += b.y;
    }
  }
}

template <class Out, int TileN, class AnyTile>
__device__ __forceinline__ void store_predicated(const GroupedGemmParams& params, float* sum, const AnyTile& tile,
                                                 int row) {
  using PairOut = typename Pair<Out>::Type;
  const int m = problem_of(params, tile.group, &Problem::m), n = problem_of(params, tile.group, &Problem::n);
  const int quad_lane = threadIdx.x % 4;
  const int64_t first_row = static_cast<int64_t>(batch_of_out(params, tile)) * m + tile.m0 + row;
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

template <class Out, int TileN, class AnyTile>
__device__ __forceinline__ void store_tile(const GroupedGemmParams& params, float* sum, const AnyTile& tile, int row) {
  add_bias<Out, TileN>(params, sum, tile);
  store_predicated<Out, TileN>(params, sum, tile, row);
}

// The same, by way of shared memory where a warp's rows are whole.
template <class Out, int TileN, class Staging, class AnyTile>
__device__ __forceinline__ void store_tile(const GroupedGemmParams& params, Staging& staging, float* sum,
                                           const AnyTile& tile, int row) {
  if constexpr (Staging::kUsed) {
    const int warp = row / 16;
    if (!params.accumulate && 16 * warp + 16 <= tile.rows) {
      add_bias<Out, TileN>(params, sum, tile);
      staging.store(params, sum, tile, warp);
      return;
    }
  }
  store_tile<Out, TileN>(params, sum, tile, row);
}

}  // namespace mxfp8
