// Compact scales (rows, blocks) to and from the 128x4 blocked layout of cuBLAS and CUTLASS: tiles of 512 bytes for
// 128 rows and a quad of blocks, in which byte r % 32 * 16 + r / 32 * 4 + b belongs to row r and block b. Each group's
// tiles start anew, after those of the groups before it.
//
// A CTA handles 128 rows and up to 32 quads. A warp's lanes take neighbouring words of one row on the compact side and
// neighbouring 16-byte pieces of one tile on the blocked side; shared memory holds the words in between.
#pragma once

#include "mxfp8/fp8.cuh"

namespace mxfp8 {

struct SwizzleParams {
  u8* compact;        // (matrices, rows, blocks) or (rows, blocks)
  u8* blocked;        // tiles, 16-byte aligned
  const void* offs;   // int32 or int64, the end of each group: rows, or elements along the blocked axis; null: matrices
  u32 offs_is_int64;
  u32 groups;         // without offs unused
  u32 rows, blocks;   // of one matrix
  u32 row_tiles;      // of one matrix in `blocked`, padding of groups included
  u32 quads;          // of a row of tiles in `blocked`, padding of groups included
  u32 chunks;         // CTAs for a row of tiles
};

namespace swizzle {

constexpr u32 kThreads = 256;
constexpr u32 kWarps = kThreads / 32;
constexpr u32 kTileRows = 128;
constexpr u32 kQuadBlocks = 4;
constexpr u32 kTileBytes = kTileRows * kQuadBlocks;
constexpr u32 kQuads = 32;          // of a CTA, one a lane
constexpr u64 kNoTile = ~u64{0};

__device__ inline u32 ceil_div(u32 a, u32 b) { return a / b + (a % b != 0); }
template <class T>
__device__ T smaller(T a, T b) { return a < b ? a : b; }

// Rows of the compact tensor that a CTA handles; none in the tail of the blocked buffer.
struct Rows {
  u64 first;
  u32 count;
};

// Blocks of the compact tensor that a lane handles, none in padding, and their tile, if they have one.
struct Quad {
  u32 first, count;
  u64 tile;
};

// What a CTA works on, in shared memory.
struct Work {
  Rows rows;
  Quad quads[kQuads];
};

// Sums of two numbers over the threads before this one. All threads of the CTA take part.
__device__ inline uint2 sums_before(uint2 mine) {
  __shared__ u32 first[kWarps], second[kWarps];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint2 sum = mine;
#pragma unroll
  for (u32 distance = 1; distance < 32; distance *= 2) {
    const u32 x = __shfl_sync(kAllLanes, sum.x, static_cast<int>(lane - distance));
    const u32 y = __shfl_sync(kAllLanes, sum.y, static_cast<int>(lane - distance));
    if (lane >= distance) {
      sum.x += x;
      sum.y += y;
    }
  }
  if (lane == 31) {
    first[warp] = sum.x;
    second[warp] = sum.y;
  }
  __syncthreads();
#pragma unroll
  for (u32 i = 0; i < kWarps; ++i) {
    if (i >= warp) continue;
    sum.x += first[i];
    sum.y += second[i];
  }
  return make_uint2(sum.x - mine.x, sum.y - mine.y);
}

__device__ inline long long group_end(const SwizzleParams& params, u32 group) {
  return params.offs_is_int64 != 0 ? static_cast<const long long*>(params.offs)[group]
                                   : static_cast<const int*>(params.offs)[group];
}

// A group's size in rows or blocks, which is at most `total` whatever stands in offs.
template <u32 Divisor>
__device__ u32 group_size(const SwizzleParams& params, u32 group, u32 total) {
  const long long size = group_end(params, group) - (group == 0 ? 0 : group_end(params, group - 1));
  if (size <= 0) return 0;
  return static_cast<u32>(smaller<u64>((static_cast<u64>(size) + Divisor - 1) / Divisor, total));
}

// Calls visit(first, size, first_unit, units, in_group) for every group, in some thread: its place in the compact
// tensor and, in units of `Unit` rows or blocks, in the blocked layout. What lies behind the last group is visited too, with
// in_group = false: it has no place in the blocked layout. All threads of the CTA take part.
template <u32 Divisor, u32 Unit, class Visit>
__device__ void for_each_group(const SwizzleParams& params, u32 total, Visit visit) {
  const u32 per_thread = ceil_div(params.groups + 1, kThreads);
  const u32 begin = smaller(threadIdx.x * per_thread, params.groups);
  const u32 end = smaller(begin + per_thread, params.groups);
  uint2 mine = make_uint2(0, 0);
  for (u32 group = begin; group < end; ++group) {
    const u32 size = group_size<Divisor>(params, group, total);
    mine.x += size;
    mine.y += ceil_div(size, Unit);
  }
  const uint2 before = sums_before(mine);
  u32 first = smaller(before.x, total), unit = before.y;
  for (u32 group = begin; group < end; ++group) {
    const u32 size = smaller(group_size<Divisor>(params, group, total), total - first);
    visit(first, size, unit, ceil_div(size, Unit), true);
    first += size;
    unit += ceil_div(size, Unit);
  }
  if (threadIdx.x == kThreads - 1) visit(first, total - first, unit, ceil_div(total - first, Unit), false);
}

}  // namespace swizzle

// Groups of rows: cut by offs or, without, the matrices. A row of tiles holds rows of one group.
struct RowGroups {
  static __device__ void find(const SwizzleParams& params, bool tail_has_tiles, swizzle::Work& work) {
    using namespace swizzle;
    __shared__ bool has_tiles;
    const u32 tile = blockIdx.x / params.chunks, chunk = blockIdx.x % params.chunks;
    if (threadIdx.x == 0) {
      work.rows = {0, 0};
      has_tiles = tail_has_tiles;
      if (params.offs == nullptr) {
        const u32 first = tile % params.row_tiles * kTileRows;
        work.rows = {static_cast<u64>(tile / params.row_tiles) * params.rows + first,
                     smaller(params.rows - first, kTileRows)};
        has_tiles = true;
      }
    }
    if (params.offs != nullptr) {
      const auto visit = [&](u32 first, u32 size, u32 first_tile, u32 tiles, bool in_group) {
        if (tile - first_tile >= tiles || (tail_has_tiles && !in_group)) return;
        const u32 skipped = (tile - first_tile) * kTileRows;
        work.rows = {first + skipped, smaller(size - skipped, kTileRows)};
        has_tiles = in_group && tile < params.row_tiles;  // sums over a wrong offs may wrap
      };
      for_each_group<1, kTileRows>(params, params.rows, visit);
    }
    __syncthreads();
    if (threadIdx.x < kQuads) {
      const u32 quad = chunk * kQuads + threadIdx.x;
      const bool inside = quad < params.quads;
      const u32 first = inside ? quad * kQuadBlocks : 0;
      const u32 count = inside ? smaller(params.blocks - first, kQuadBlocks) : 0;
      const u64 its_tile = static_cast<u64>(tile) * params.quads + quad;
      work.quads[threadIdx.x] = {first, count, inside && has_tiles ? its_tile : kNoTile};
    }
    __syncthreads();
  }
};

// Groups of blocks, cut by offs. A column of tiles holds blocks of one group; a group's tiles are row-major among
// themselves.
struct BlockGroups {
  static __device__ void find(const SwizzleParams& params, bool tail_has_tiles, swizzle::Work& work) {
    using namespace swizzle;
    const u32 row_tile = blockIdx.x / params.chunks, begin = blockIdx.x % params.chunks * kQuads;
    if (threadIdx.x == 0) {
      const u32 first = row_tile * kTileRows;
      work.rows = {first, smaller(params.rows - first, kTileRows)};
    }
    if (threadIdx.x < kQuads) {
      const u32 quad = begin + threadIdx.x;  // in the tail, where any order of the tiles serves
      const bool inside = tail_has_tiles && quad < params.quads;
      work.quads[threadIdx.x] = {0, 0, inside ? static_cast<u64>(quad) * params.row_tiles + row_tile : kNoTile};
    }
    const auto visit = [&](u32 first, u32 size, u32 first_quad, u32 quads, bool in_group) {
      const u64 end = static_cast<u64>(first_quad) + quads;
      in_group = in_group && end <= params.quads;  // sums over a wrong offs may wrap
      if (tail_has_tiles && !in_group) return;
      for (u64 quad = first_quad > begin ? first_quad : begin; quad < smaller<u64>(end, begin + kQuads); ++quad) {
        const u64 in_rows = quad - first_quad;
        const u64 tile = static_cast<u64>(first_quad) * params.row_tiles + static_cast<u64>(row_tile) * quads + in_rows;
        const u32 skipped = static_cast<u32>(in_rows) * kQuadBlocks;
        const u32 count = smaller(size - skipped, kQuadBlocks);
        work.quads[quad - begin] = {first + skipped, count, in_group ? tile : kNoTile};
      }
    };
    for_each_group<kBlock, kQuadBlocks>(params, params.blocks, visit);
    __syncthreads();
  }
};

namespace swizzle {

// Row-major with an odd stride, so that neither a row's words nor a column's meet in one bank.
struct Words {
  u32 at[kTileRows][kQuads + 1];
};

// Whether whole words may be moved on the compact side. The same in all lanes of a warp.
__device__ inline bool words_aligned(const SwizzleParams& params, const Quad& quad) {
  const bool aligned = reinterpret_cast<u64>(params.compact) % 4 == 0 && params.blocks % 4 == 0 && quad.first % 4 == 0;
  return __reduce_min_sync(kAllLanes, static_cast<int>(aligned)) != 0;
}

__device__ inline u8* row_of(const SwizzleParams& params, const Rows& rows, u32 row) {
  return params.compact + (rows.first + row) * params.blocks;
}

// The scales of one quad of every kWarps-th row, all loads in flight together. What is padding is loaded from other
// places of the same rows and blocks, and zeroed.
template <bool Aligned, u32 Count>
__device__ void load_rows(const SwizzleParams& params, const Rows& rows, const Quad& quad, u32 first_row,
                          u32 (&out)[Count]) {
  constexpr u32 kLoads = Aligned ? 1 : kQuadBlocks;
  u32 loaded[Count][kLoads];
#pragma unroll
  for (u32 i = 0; i < Count; ++i) {
    const u32 row = first_row + i * kWarps;
    const u8* source = row_of(params, rows, row < rows.count ? row : 0) + quad.first;
#pragma unroll
    for (u32 j = 0; j < kLoads; ++j)
      loaded[i][j] = Aligned ? ptx::load4(source) : ptx::load1(source + (j < quad.count ? j : 0));
  }
  ptx::after_loads();
#pragma unroll
  for (u32 i = 0; i < Count; ++i) {
    u32 word = loaded[i][0];
#pragma unroll
    for (u32 j = 1; j < kLoads; ++j) word |= loaded[i][j] << 8 * j;
    const u32 mask = quad.count < kQuadBlocks ? (1u << 8 * quad.count) - 1 : ~0u;
    out[i] = first_row + i * kWarps < rows.count ? word & mask : 0;
  }
}

template <bool Aligned>
__device__ void load_compact(const SwizzleParams& params, const Rows& rows, const Quad& quad, Words& words) {
  constexpr u32 kRows = Aligned ? 16 : 8;  // at a time
#pragma unroll
  for (u32 row = threadIdx.x / 32; row < kTileRows; row += kRows * kWarps) {
    u32 word[kRows];
    load_rows<Aligned>(params, rows, quad, row, word);
#pragma unroll
    for (u32 i = 0; i < kRows; ++i) words.at[row + i * kWarps][threadIdx.x % 32] = word[i];
  }
}

__device__ inline uint4* piece_of(const SwizzleParams& params, u64 tile) {
  return reinterpret_cast<uint4*>(params.blocked + tile * kTileBytes) + threadIdx.x % 32;
}

}  // namespace swizzle

// Every byte of the blocked buffer is written: padding, and tiles of no group, with zeros.
template <class Groups>
__device__ void swizzle_scales(const SwizzleParams& params) {
  using namespace swizzle;
  __shared__ Work work;
  __shared__ Words words;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Groups::find(params, /*tail_has_tiles=*/true, work);
  const Rows rows = work.rows;
  const Quad quad = work.quads[lane];
  if (rows.count == 0) {
    for (u32 row = warp; row < kTileRows; row += kWarps) words.at[row][lane] = 0;
  } else if (words_aligned(params, quad)) {
    load_compact<true>(params, rows, quad, words);
  } else {
    load_compact<false>(params, rows, quad, words);
  }
  __syncthreads();
  for (u32 i = warp; i < kQuads; i += kWarps) {
    const u64 tile = work.quads[i].tile;
    if (tile == kNoTile) continue;
    *piece_of(params, tile) =
        make_uint4(words.at[lane][i], words.at[lane + 32][i], words.at[lane + 64][i], words.at[lane + 96][i]);
  }
}

// Every byte of the compact tensor is written: rows or blocks of no group with zeros.
template <class Groups>
__device__ void unswizzle_scales(const SwizzleParams& params) {
  using namespace swizzle;
  constexpr u32 kTiles = kQuads / kWarps;  // of a warp
  __shared__ Work work;
  __shared__ Words words;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Groups::find(params, /*tail_has_tiles=*/false, work);
  uint4 piece[kTiles];
#pragma unroll
  for (u32 i = 0; i < kTiles; ++i) {
    const u64 tile = work.quads[warp + i * kWarps].tile;
    piece[i] = make_uint4(0, 0, 0, 0);
    if (tile != kNoTile) piece[i] = ptx::load16(piece_of(params, tile));
  }
  ptx::after_loads();
#pragma unroll
  for (u32 i = 0; i < kTiles; ++i) {
    const u32 column = warp + i * kWarps;
    words.at[lane][column] = piece[i].x;
    words.at[lane + 32][column] = piece[i].y;
    words.at[lane + 64][column] = piece[i].z;
    words.at[lane + 96][column] = piece[i].w;
  }
  const Rows rows = work.rows;
  const Quad quad = work.quads[lane];
  const bool aligned = words_aligned(params, quad) && quad.count == kQuadBlocks;
  __syncthreads();
  for (u32 row = warp; row < rows.count; row += kWarps) {
    u8* target = row_of(params, rows, row) + quad.first;
    const u32 word = words.at[row][lane];
    if (aligned) {
      *reinterpret_cast<u32*>(target) = word;
    } else {
      for (u32 j = 0; j < quad.count; ++j) target[j] = static_cast<u8>(word >> 8 * j);
    }
  }
}

}  // namespace mxfp8
