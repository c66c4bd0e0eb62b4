// bf16, fp16 or fp32 to MXFP8 along features, along tokens (transposed), or both from one read, folded as far as asked. A CTA
// has a tile of up to 128 tokens of one group (or rows of one matrix) x 128 features: whole runs of either axis, and a tile
// of the tile form.
//
// The input goes to shared memory as it is. Along features, lanes read 16 bytes of a token, as quantize.cuh does from global
// memory. Along tokens, a thread has the 32 tokens of a block in one word of each: two features, or one of fp32. A warp has 8
// words x 4 blocks, so that a run lies within it; each block of 32 tokens begins 32 bytes late, so that 4 blocks x 8 words meet
// 32 banks. Pairs of lanes exchange 16 bytes, so that what they store next to each other is a whole sector.
#pragma once

#include "mxfp8/async_copy.cuh"
#include "mxfp8/quantize_elements.cuh"
#include "mxfp8/run_map.cuh"

namespace mxfp8 {

// One of the results; there is none without `data`.
struct TileSide {
  u8* data;        // 16-byte aligned
  u8* scale;
  u8* run_scale;   // if folded: the shared scales once more, (matrices, runs, padded rows)
  u8* tile_scale;  // in tile form: (matrices, tiles of rows, runs)
  u32 fold;        // rows that share a scale: 1, or 128; 0: blocks keep their own
  u32 padding;
};

struct QuantizeTilesParams {
  const u8* input;       // (matrices, rows, features), 16-byte aligned
  const void* offs;      // end row of each group; null: matrices
  const float* factors;  // of rows in the sums; null: 1
  float* sums;           // of each tile's rows, (row_tiles, features); null: none. With groups alone
  TileSide along_features, along_tokens;
  u32 offs_is_int64, groups;
  u32 rows, features;    // of one matrix; multiples of 16 bytes, of 32 elements along an axis that has blocks
  u32 row_tiles;         // of one matrix; of groups, those that have columns
  u32 feature_tiles;
  u32 columns;           // of a row of along_tokens
  u32 padding;
};

template <class Input, class Format, class Scaling>
struct QuantizeTiles {
  using Scale = BlockScale<Format, Scaling>;
  using Params = QuantizeTilesParams;

  static constexpr u32 kTile = 128;
  static constexpr u32 kElements = Input::kElements;  // of 16 bytes
  static constexpr u32 kPerWord = kElements / 4;
  static constexpr u32 kThreads = kTile / kPerWord * kBlocksPerRun;
  static constexpr u32 kWarps = kThreads / 32;
  static constexpr u32 kRowLanes = kTile / kElements;  // that load a token's features
  static constexpr u32 kPitch = kRowLanes * 16;
  static constexpr u32 kRowsAtOnce = kThreads / kRowLanes;
  static constexpr u32 kLoads = kTile / kRowsAtOnce;
  static constexpr u32 kBlockLanes = kBlock / kElements;
  static constexpr u32 kRunLanes = kBlockLanes * kBlocksPerRun;

  static __device__ void run(const Params& params) {
    const u32 tile = blockIdx.x / params.feature_tiles;
    const Place place = locate_tile(params, tile, blockIdx.x - tile * params.feature_tiles);
    u8* const memory = ptx::dynamic_shared();
    float* const factors = reinterpret_cast<float*>(memory + offset(kTile));
    const bool has_sums = params.sums != nullptr && place.has_columns;
    const bool has_columns = params.along_tokens.data != nullptr && place.has_columns;
    if (place.tokens == 0 || !(has_sums || has_columns || params.along_features.data != nullptr)) {
      if (has_sums && threadIdx.x < kTile) store_sum(params, place, threadIdx.x, 0.0f);
      return;
    }
    load(params, place, memory);
    if (has_sums && threadIdx.x < kTile) factors[factor_index(threadIdx.x)] = factor(params, place, threadIdx.x);
    ptx::wait_for_copies();
    __syncthreads();
    if (params.along_features.data != nullptr) quantize_features(params, place, memory);
    if (has_sums || has_columns) quantize_tokens(params, place, memory, factors);
  }

  // Where a thread's words begin in shared memory, of which it has one every kPitch bytes, and where the 16 bytes of one of its
  // loads are.
  static __device__ u32 place_of_words(u32 thread) { return offset(thread % 32 / 8 * kBlock) + word_in_row(thread) * 4; }
  static __device__ u32 place_of_load(u32 thread, u32 i) {
    return offset(thread / kRowLanes + i * kRowsAtOnce) + thread % kRowLanes * 16;
  }
  static __device__ u32 factor_index(u32 token) { return token + token / kBlock; }  // blocks in different banks

 private:
  struct Place {
    u32 matrix;
    u32 tile;         // of the matrix' rows, or of columns that groups share out
    u32 first_token;  // in the matrix
    u32 tokens;       // 0 to 128
    u32 feature_tile;
    bool has_columns; // tokens of no group have none

    __device__ u32 first_feature() const { return feature_tile * kTile; }
  };

  // The end row of a group; tokens of no group are the last one. Ends that exceed the rows would be a caller's mistake.
  static __device__ u32 end_of(const Params& params, u32 group) {
    if (group >= params.groups) return params.rows;
    const u64 end = params.offs_is_int64 ? static_cast<const u64*>(params.offs)[group]
                                         : static_cast<const u32*>(params.offs)[group];
    return end < params.rows ? static_cast<u32>(end) : params.rows;
  }

  // Group g's columns begin at tile end of g - 1 / 128 + g, so that a tile is of the group that as many others' begins
  // precede: no sum over groups.
  static __device__ Place locate_tile(const Params& params, u32 tile, u32 feature_tile) {
    u32 matrix = 0, first = 0, end = params.rows;
    bool has_columns = true;
    if (params.offs == nullptr) {
      matrix = tile / params.row_tiles;
      tile -= matrix * params.row_tiles;
      first = tile * kTile;
    } else {
      u32 group = 0;
      for (u32 i = threadIdx.x; i - threadIdx.x < params.groups; i += kThreads)
        group += __syncthreads_count(i < params.groups && end_of(params, i) / kTile + i < tile);
      const u32 begin = group == 0 ? 0 : end_of(params, group - 1);
      first = begin + (tile - (begin / kTile + group)) * kTile;
      end = end_of(params, group);
      has_columns = group < params.groups && tile < params.row_tiles;
    }
    return {matrix, tile, first, first < end ? min(end - first, kTile) : 0, feature_tile, has_columns};
  }

  static __device__ u32 offset(u32 token) { return token * kPitch + token / kBlock * 32; }
  static __device__ u32 word_in_row(u32 thread) { return thread / 32 * 8 + thread % 8; }

  static __device__ void load(const Params& params, const Place& place, u8* memory) {
    const u32 in_row = threadIdx.x % kRowLanes;
    const u64 pitch = static_cast<u64>(params.features) * (16 / kElements);
    const u64 row = static_cast<u64>(place.matrix) * params.rows + place.first_token;
    const u8* const from = params.input + row * pitch + place.feature_tile * kPitch + in_row * 16;
    const bool inside = place.first_feature() + in_row * kElements < params.features;
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) {
      const u32 token = threadIdx.x / kRowLanes + i * kRowsAtOnce;
      const bool present = inside && token < place.tokens;
      ptx::copy16(memory + place_of_load(threadIdx.x, i), present ? from + token * pitch : params.input, present);
    }
  }

  static __device__ float factor(const Params& params, const Place& place, u32 token) {
    if (token >= place.tokens) return 0.0f;
    return params.factors == nullptr ? 1.0f : params.factors[place.first_token + token];
  }

  static __device__ void store_sum(const Params& params, const Place& place, u32 in_tile, float sum) {
    const u32 feature = place.first_feature() + in_tile;
    if (feature < params.features) params.sums[static_cast<u64>(place.tile) * params.features + feature] = sum;
  }

  // A tile's scale, or kScaleNan for a mixed one, from the highest and the lowest that a thread's runs need. All threads take
  // part, once for each Side.
  template <int Side>
  static __device__ int tile_scale(int highest, int lowest) {
    __shared__ int of_warps[2][kWarps];
    highest = __reduce_max_sync(kAllLanes, highest);
    lowest = __reduce_min_sync(kAllLanes, lowest);
    if (threadIdx.x % 32 == 0) {
      of_warps[0][threadIdx.x / 32] = highest;
      of_warps[1][threadIdx.x / 32] = lowest;
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < kWarps; ++i) {
      highest = max(highest, of_warps[0][i]);
      lowest = min(lowest, of_warps[1][i]);
    }
    return highest - lowest > Format::kTileLimit ? kScaleNan : shared_scale(highest);
  }

  // What a run needs, from what its blocks need: the lanes from `Distance` apart on. A scale below 0 cannot be stored, and 0
  // serves.
  template <u32 Distance>
  static __device__ int needed_by_run(int needed) {
#pragma unroll
    for (u32 distance = Distance; distance < Distance * kBlocksPerRun; distance *= 2)
      needed = max(needed, __shfl_xor_sync(kAllLanes, needed, distance));
    return needed == kNoScale ? kNoScale : max(needed, 0);
  }

  static __device__ uint4 read(const u8* memory, u32 i) {
    return *reinterpret_cast<const uint4*>(memory + place_of_load(threadIdx.x, i));
  }

  static __device__ void quantize_features(const Params& params, const Place& place, const u8* memory) {
    const TileSide& side = params.along_features;
    const u32 in_row = threadIdx.x % kRowLanes, first_token = threadIdx.x / kRowLanes;
    const u32 in_block = in_row % kBlockLanes, block = in_row / kBlockLanes;
    const u64 row = static_cast<u64>(place.matrix) * params.rows + place.first_token;
    const bool inside = place.first_feature() + in_row * kElements < params.features;

    // Lane l of a block takes care of its scales in loads l, l + kBlockLanes, ...
    constexpr u32 kOwned = kLoads / kBlockLanes;
    u32 amax[kOwned] = {};
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) {
      u32 its = Input::amax(read(memory, i));
#pragma unroll
      for (u32 distance = 1; distance < kBlockLanes; distance *= 2)
        its = max(its, __shfl_xor_sync(kAllLanes, its, distance));
      if (in_block == i % kBlockLanes) amax[i / kBlockLanes] = its;
    }
    int needed[kOwned] = {}, tile = kScaleNan;
    if (side.fold != 0) {
      int highest = kNoScale, lowest = kScaleNan;
#pragma unroll
      for (u32 i = 0; i < kOwned; ++i) {
        needed[i] = needed_by_run<kBlockLanes>(Scale(amax[i]).needed());
        highest = max(highest, needed[i]);
        if (needed[i] != kNoScale) lowest = min(lowest, needed[i]);
      }
      if (side.fold == kTile) {
        tile = tile_scale<0>(highest, lowest);
        if (threadIdx.x == 0)
          side.tile_scale[(place.matrix * params.row_tiles + place.tile) * params.feature_tiles + place.feature_tile] =
              static_cast<u8>(tile);
      }
    }
    Rounding mine[kOwned];
#pragma unroll
    for (u32 i = 0; i < kOwned; ++i) {
      const u32 token = first_token + (i * kBlockLanes + in_block) * kRowsAtOnce;
      const Stored its = stored(side, Scale(amax[i]), needed[i], tile);
      mine[i] = its.rounding;
      if (!inside || token >= place.tokens) continue;
      side.scale[(row + token) * (params.features / kBlock) + place.feature_tile * kBlocksPerRun + block] = its.scale;
      if (side.fold != 0 && block == 0)
        side.run_scale[run_scale_index(place.matrix * params.feature_tiles + place.feature_tile,
                                       place.first_token + token, params.rows)] = its.scale;
    }
#pragma unroll
    for (u32 i = 0; i < kLoads; ++i) {
      const u32 token = first_token + i * kRowsAtOnce;
      const int owner = threadIdx.x % 32 - in_block + i % kBlockLanes;
      Rounding its;
      its.factor = __shfl_sync(kAllLanes, mine[i / kBlockLanes].factor, owner);
      its.literal = __shfl_sync(kAllLanes, mine[i / kBlockLanes].literal, owner);
      if (!inside || token >= place.tokens) continue;
      float x[kElements];
      Input::to_float(read(memory, i), x);
      u32 bytes[kElements / 4];
      round_folded<Format>(x, its, bytes);
      u8* const to = side.data + (row + token) * params.features + place.first_feature() + in_row * kElements;
      if constexpr (kElements == 8) {
        *reinterpret_cast<uint2*>(to) = make_uint2(bytes[0], bytes[1]);
      } else {
        *reinterpret_cast<u32*>(to) = bytes[0];
      }
    }
  }

  struct Stored {
    u8 scale;
    Rounding rounding;
  };

  static __device__ Stored stored(const TileSide& side, const Scale& block, int needed, int tile) {
    if (side.fold == 0) return {static_cast<u8>(block.scale), block.own()};
    const int shared = tile != kScaleNan ? tile : shared_scale(needed);
    return {static_cast<u8>(shared), block.shared(shared)};
  }

  static __device__ void quantize_tokens(const Params& params, const Place& place, const u8* memory,
                                         const float* factors) {
    const TileSide& side = params.along_tokens;
    const u32 block = threadIdx.x % 32 / 8, in_row = word_in_row(threadIdx.x);
    // Words are read from memory whenever they are needed: 32 of them would cost a CTA its room on the SM.
    const u8* const from = memory + place_of_words(threadIdx.x);
    const auto word = [&](u32 token) { return *reinterpret_cast<const u32*>(from + token * kPitch); };
    u32 largest = 0;
#pragma unroll
    for (u32 i = 0; i < kBlock; ++i) largest = Input::larger(largest, word(i));
    if (params.sums != nullptr) {
      float sums[kPerWord] = {};
#pragma unroll 4
      for (u32 i = 0; i < kBlock; ++i) {
#pragma unroll
        for (u32 j = 0; j < kPerWord; ++j)
          sums[j] += Input::element(word(i), j) * factors[factor_index(block * kBlock) + i];
      }
#pragma unroll
      for (u32 j = 0; j < kPerWord; ++j) {
        sums[j] += __shfl_xor_sync(kAllLanes, sums[j], 8);
        sums[j] += __shfl_xor_sync(kAllLanes, sums[j], 16);
        if (block == 0) store_sum(params, place, in_row * kPerWord + j, sums[j]);
      }
    }
    if (side.data == nullptr) return;

    Scale scale[kPerWord];
    int needed[kPerWord] = {}, tile = kScaleNan;
#pragma unroll
    for (u32 i = 0; i < kPerWord; ++i) scale[i] = Scale(__float_as_uint(Input::element(largest, i)));
    const u32 runs = (params.columns + kTile - 1) / kTile;
    if (side.fold != 0) {
      int highest = kNoScale, lowest = kScaleNan;
#pragma unroll
      for (u32 i = 0; i < kPerWord; ++i) {
        needed[i] = needed_by_run<8>(scale[i].needed());
        highest = max(highest, needed[i]);
        if (needed[i] != kNoScale) lowest = min(lowest, needed[i]);
      }
      if (side.fold == kTile) {
        tile = tile_scale<1>(highest, lowest);
        if (threadIdx.x == 0)
          side.tile_scale[(place.matrix * params.feature_tiles + place.feature_tile) * runs + place.tile] =
              static_cast<u8>(tile);
      }
    }
    Stored its[kPerWord];
#pragma unroll
    for (u32 i = 0; i < kPerWord; ++i) its[i] = stored(side, scale[i], needed[i], tile);
#pragma unroll
    for (u32 i = 0; i < kPerWord; ++i) {
      u32 bytes[2][4];
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        __syncwarp();  // or else the compiler would keep the words
        float x[16];
#pragma unroll
        for (u32 j = 0; j < 16; ++j) x[j] = Input::element(word(16 * half + j), i);
        round_folded<Format>(x, its[i].rounding, bytes[half]);
      }
      exchange(bytes, block % 2 != 0);
      const u32 feature = place.first_feature() + in_row * kPerWord + i;
      const u64 row = static_cast<u64>(place.matrix) * params.features + feature;
      if (feature >= params.features) continue;
      if (place.tile * kBlocksPerRun + block < params.columns / kBlock)
        side.scale[row * (params.columns / kBlock) + place.tile * kBlocksPerRun + block] = its[i].scale;
      if (side.fold != 0 && block == 0)
        side.run_scale[run_scale_index(place.matrix * runs + place.tile, feature, params.features)] = its[i].scale;
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const u32 column = place.tile * kTile + block / 2 * 64 + half * 32 + block % 2 * 16;
        if (column < params.columns)
          *reinterpret_cast<uint4*>(side.data + row * params.columns + column) =
              make_uint4(bytes[half][0], bytes[half][1], bytes[half][2], bytes[half][3]);
      }
    }
  }

  // Of two neighbouring blocks, 2 x 2 x 16 bytes, the first lane gets each block's first half, the other one the second: what
  // both have is a sector then.
  static __device__ void exchange(u32 (&bytes)[2][4], bool odd) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 received = __shfl_xor_sync(kAllLanes, odd ? bytes[0][i] : bytes[1][i], 8);
      if (odd) {
        bytes[0][i] = received;
      } else {
        bytes[1][i] = received;
      }
    }
  }
};

}  // namespace mxfp8
