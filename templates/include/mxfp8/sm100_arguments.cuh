// Arrays that an SM100 grouped GEMM reads, an entry for each group, written on the device from offs.
//
// Layouts of scales and strides have the bytes of CUTLASS's types; sm100_params.cuh checks their sizes. A group without
// rows or without contraction has M = 0: no tile, no access to memory. The product of a group without contraction is zero,
// which no tile will write; so this kernel does.
#pragma once

#include "mxfp8/fp8.cuh"

namespace mxfp8 {

// cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>::UnderlyingProblemShape
struct Sm100Shape {
  int m, n, k;
};

// Sm1xxBlockScaledConfig<32>::LayoutSF: what is not known at compile time, in the order of its shape, then its strides.
struct Sm100ScaleLayout {
  int row_tiles, quads, matrices;  // tiles of 128 rows, quads of blocks
  int row_tile_bytes, matrix_bytes;
};

// offs cuts the rows of A and out, (m, k) and (m, n), or cuts K of A and B, (m, k) and (n, k), whose groups begin at
// columns of their own (columns.group_bounds); or is null, for a batch, whose groups have m rows each or as many of these
// as counts says.
struct Sm100ArgumentsParams {
  Sm100Shape* shapes;                           // this and all up to layout_sfb: (groups,)
  u64 *a, *b, *sfa, *sfb, *out, *bias;          // addresses
  long long *stride_a, *stride_b, *stride_out;  // from row to row, in elements
  Sm100ScaleLayout *layout_sfa, *layout_sfb;

  u64 base_a, base_b, base_sfa, base_sfb, base_out, base_bias;
  const void *offs, *counts;  // the end of each group; rows of each; one of these or none
  long long m, n, k;          // of all groups together along the axis that offs cuts
  long long tokens;           // that offs may reach: m, or those that k has columns for
  u32 index_is_int64;         // whether offs or counts is, else int32
  u32 groups;
  u32 cuts_k;                 // whether offs cuts K (an output for each group), else M
  u32 out_bytes;              // of an element
  u32 writes_zeros;           // whether products of groups without contraction are written
  u32 padding;
};

namespace sm100 {

constexpr u32 kThreads = 256;
constexpr u32 kWarps = kThreads / 32;
constexpr long long kTileRows = 128, kQuad = 128, kTileBytes = 512;  // a quad is four blocks of 32 elements

__device__ inline long long tiles(long long n, long long unit) { return (n + unit - 1) / unit; }

// An entry of offs or counts within what there is: they may be wrong, and beyond memory is never what is addressed.
__device__ inline long long index_at(const Sm100ArgumentsParams& p, const void* index, u32 group, long long most) {
  const long long value = p.index_is_int64 != 0 ? static_cast<const long long*>(index)[group]
                                                : static_cast<const int*>(index)[group];
  return value < 0 ? 0 : value > most ? most : value;
}

__device__ inline long long group_end(const Sm100ArgumentsParams& p, u32 group) {
  return index_at(p, p.offs, group, p.tokens);
}

// Scales of (rows, k) within a matrix of blocked scales whose rows of tiles have `stride` quads.
__device__ inline Sm100ScaleLayout scale_layout(long long rows, long long k, long long stride) {
  const long long row_tiles = tiles(rows, kTileRows);
  return {static_cast<int>(row_tiles), static_cast<int>(tiles(k, kQuad)), 1, static_cast<int>(kTileBytes * stride),
          static_cast<int>(kTileBytes * stride * row_tiles)};
}

// Sum over the threads before this one. All threads of the CTA take part.
__device__ inline u32 sum_before(u32 mine) {
  __shared__ u32 of_warps[kWarps];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 sum = mine;
  for (u32 distance = 1; distance < 32; distance *= 2) {
    const u32 x = __shfl_sync(kAllLanes, sum, static_cast<int>(lane - distance));
    if (lane >= distance) sum += x;
  }
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  for (u32 i = 0; i < warp; ++i) sum += of_warps[i];
  return sum - mine;
}

struct Group {
  long long first, size;
};

__device__ inline Group group_of(const Sm100ArgumentsParams& p, u32 group) {
  const long long first = group == 0 ? 0 : group_end(p, group - 1);
  const long long size = group_end(p, group) - first;
  return {first, size < 0 ? 0 : size};
}

// Offsets of a group's operands: rows of A and out, matrices of B and out, columns of A and B; tiles of scales.
struct Place {
  long long row, matrix, column, out, sfa, sfb;
};

__device__ inline void write_group(const Sm100ArgumentsParams& p, u32 g, long long m, long long k, const Place& at) {
  const bool empty = m == 0 || p.n == 0 || k == 0;
  const long long quads = tiles(p.k, kQuad);
  p.shapes[g] = {empty ? 0 : static_cast<int>(m), static_cast<int>(p.n), static_cast<int>(k)};
  p.a[g] = p.base_a + at.row * p.k + at.column;
  p.b[g] = p.base_b + at.matrix * p.n * p.k + at.column;
  p.sfa[g] = p.base_sfa + kTileBytes * at.sfa;
  p.sfb[g] = p.base_sfb + kTileBytes * at.sfb;
  p.out[g] = p.base_out + at.out * p.n * p.out_bytes;
  p.bias[g] = p.base_bias + g * p.n * p.out_bytes;
  p.stride_a[g] = p.k;
  p.stride_b[g] = p.k;
  p.stride_out[g] = p.n;
  p.layout_sfa[g] = scale_layout(m, k, quads);
  p.layout_sfb[g] = scale_layout(p.n, k, quads);
}

// One CTA writes all groups.
__device__ inline void write_groups(const Sm100ArgumentsParams& p) {
  const u32 per_thread = (p.groups + kThreads - 1) / kThreads;
  const u32 begin = threadIdx.x * per_thread < p.groups ? threadIdx.x * per_thread : p.groups;
  const u32 end = begin + per_thread < p.groups ? begin + per_thread : p.groups;
  const long long quads = tiles(p.k, kQuad), row_tiles = tiles(p.m, kTileRows), b_tiles = tiles(p.n, kTileRows) * quads;

  if (p.offs == nullptr) {
    for (u32 g = begin; g < end; ++g) {
      const long long m = p.counts == nullptr ? p.m : index_at(p, p.counts, g, p.m);
      write_group(p, g, m, p.k, {g * p.m, g, 0, g * p.m, g * row_tiles * quads, g * b_tiles});
    }
  } else if (p.cuts_k != 0) {
    for (u32 g = begin; g < end; ++g) {
      const Group group = group_of(p, g);
      const long long quad = group.first / kQuad + g;
      write_group(p, g, p.m, group.size, {0, 0, quad * kQuad, g * p.m, quad, quad});
    }
  } else {
    u32 tile = 0;
    for (u32 g = begin; g < end; ++g) tile += static_cast<u32>(tiles(group_of(p, g).size, kTileRows));
    tile = sum_before(tile);
    for (u32 g = begin; g < end; ++g) {
      const Group group = group_of(p, g);
      write_group(p, g, group.size, p.k, {group.first, g, 0, group.first, tile * quads, g * b_tiles});
      tile += static_cast<u32>(tiles(group.size, kTileRows));
    }
  }
}

// All CTAs share the work. Rows of the output are a multiple of 16 bytes long.
__device__ inline void write_zeros(const Sm100ArgumentsParams& p) {
  const long long pieces = p.m * p.n * p.out_bytes / static_cast<long long>(sizeof(uint4));
  for (u32 g = 0; g < p.groups; ++g) {
    if (group_of(p, g).size != 0) continue;
    uint4* out = reinterpret_cast<uint4*>(p.base_out) + g * pieces;
    for (long long i = blockIdx.x * kThreads + threadIdx.x; i < pieces; i += gridDim.x * kThreads) out[i] = {};
  }
}

__device__ inline void write_arguments(const Sm100ArgumentsParams& p) {
  if (blockIdx.x == 0) write_groups(p);
  if (p.writes_zeros != 0) write_zeros(p);
}

}  // namespace sm100
}  // namespace mxfp8
