// Scales for kernels that take weights in tile form: one multiply-add per element.
//
// A stage's activation scales come by bulk copy, as bytes. Weight tiles' scales are few: each lane of a consumer warp holds
// those of one run in 32, loaded 32 runs ahead, the next tile's too, and a shuffle hands them out. The sum of two bytes is
// the exponent of a product of scales, so no conversion is needed.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "promotion.cuh"
#include "ring.cuh"
#include "tile_scheduler.cuh"

namespace mxfp8 {

inline constexpr int kWeightTile = 128;   // rows of B with one scale
inline constexpr int kScaleColumns = 64;  // columns of a CTA's tile that share one for certain

// Bulk copies move aligned pieces of 16 bytes; a group may start in between.
inline constexpr int kCopyAlignment = 16;

template <int TileM, int Stages>
struct CopiedScales {
  static constexpr int kBytes = TileM + kCopyAlignment;
  alignas(16) uint8_t sfa[Stages][kBytes];
};

// First row whose scale is fetched for a tile. A cluster's second CTA may have no rows; what it fetches is not used.
__device__ inline int first_scale_row(const Tile& tile, int m) { return min(tile.m0, m - 1); }

// The activation scales of a tile, run after run.
class ScaleCopy {
 public:
  template <class AnyTile>
  __device__ ScaleCopy(const GroupedGemmParams& params, const AnyTile& tile) {
    const int m = problem_of(params, tile.group, &Problem::m), runs = runs_of(params, tile.group);
    step_ = padded_rows(m);
    const int64_t batch = batch_of_a(params, tile.group);
    next_ = problem_of(params, tile.group, &Problem::sfa) + batch * runs * step_ +
            first_scale_row(tile, m) / kCopyAlignment * kCopyAlignment;
    if constexpr (AnyTile::kOfRuns) next_ += static_cast<int64_t>(tile.first_run) * step_;
  }
  template <int Bytes>
  __device__ void start(uint64_t* barrier, uint8_t (&destination)[Bytes]) {
    cute::SM90_BULK_COPY_G2S::copy(next_, barrier, destination, Bytes);
    next_ += step_;
  }

 private:
  const uint8_t* next_;
  int step_;
};

// Scales of a consumer thread's two rows times those of its warp group's columns, for one run after the other.
template <int TileN>
class TileScales {
  static constexpr int kBlocks = TileN / kScaleColumns;
  static constexpr bool kTwoTiles = TileN > kWeightTile;  // a CTA's tile touches two weight tiles
  static_assert(kWeightTile % TileN == 0 || TileN % kScaleColumns == 0 && TileN <= kWeightTile + kScaleColumns);

 public:
  // Starts the loads for 32 runs of a tile; they arrive while earlier ones are used.
  template <class AnyTile>
  __device__ void prefetch(const GroupedGemmParams& params, const AnyTile& tile, int first_run) {
    const int runs = runs_of(params, tile.group);
    int last_run = runs - 1;
    if constexpr (AnyTile::kOfRuns) first_run += tile.first_run, last_run = tile.first_run + tile.runs - 1;
    const int tiles = (problem_of(params, tile.group, &Problem::n) + kWeightTile - 1) / kWeightTile;
    const int weight_tile = min(tile.n0 / kWeightTile, tiles - 1);  // a cluster's second CTA may lie past the end
    const uint8_t* bytes = problem_of(params, tile.group, &Problem::sfb_tiles) +
                           (static_cast<int64_t>(batch_of_b(params, tile)) * tiles + weight_tile) * runs +
                           min(first_run + static_cast<int>(threadIdx.x % 32), last_run);
    ahead_[0] = __ldg(bytes);
    if constexpr (kTwoTiles) ahead_[1] = __ldg(bytes + (weight_tile + 1 < tiles ? runs : 0));
  }
  __device__ void use_prefetched() { now_ = kTwoTiles ? ahead_[0] | ahead_[kTwoTiles] << 8 : ahead_[0]; }

  // Products of scales of a run, as the exponents' bits of FP32. Returns whether this warp has to promote by column:
  // a mixed tile, or a product that is no normal number.
  __device__ bool combine(unsigned a0, unsigned a1, int run, int n0) {
    const unsigned both = __shfl_sync(~0u, now_, run % 32);
    const unsigned first = both & 255, last = kTwoTiles ? both >> 8 : first;
    const unsigned high = max(a0, a1), low = min(a0, a1), high_b = max(first, last), low_b = min(first, last);
    const bool rare = max(high, high_b) == 255 || high + high_b > 127 + 254 || low + low_b < 127 + 1;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const bool in_last = b + 1 == kBlocks || (b > 0 && n0 % kWeightTile != 0);
      const unsigned byte = in_last ? last : first;
      row0_[b] = __uint_as_float((a0 + byte - 127) << 23);
      row1_[b] = __uint_as_float((a1 + byte - 127) << 23);
    }
    return __any_sync(~0u, rare);
  }

  __device__ void promote(float* sum, const float* partial) const {
#pragma unroll
    for (int j = 0; j < TileN / 8; ++j) {
      const int b = 8 * j / kScaleColumns;
      sum[4 * j + 0] = fmaf(partial[4 * j + 0], row0_[b], sum[4 * j + 0]);
      sum[4 * j + 1] = fmaf(partial[4 * j + 1], row0_[b], sum[4 * j + 1]);
      sum[4 * j + 2] = fmaf(partial[4 * j + 2], row1_[b], sum[4 * j + 2]);
      sum[4 * j + 3] = fmaf(partial[4 * j + 3], row1_[b], sum[4 * j + 3]);
    }
  }

 private:
  unsigned now_, ahead_[1 + kTwoTiles];
  float row0_[kBlocks], row1_[kBlocks];
};

// The rare case: scales by column, from global memory. `sfb` points at this thread's first column in the run.
template <int TileN>
__device__ inline void promote_rare(float* sum, const float* partial, unsigned a0, unsigned a1, const uint8_t* sfb) {
  auto pair = [&](int j) { return __ldg(reinterpret_cast<const uint16_t*>(sfb + 8 * j)); };
  unsigned high = 0, low = 255;
#pragma unroll 4
  for (int j = 0; j < TileN / 8; ++j) {
    const unsigned bytes = pair(j);
    high = max(high, max(bytes & 255, bytes >> 8));
    low = min(low, min(bytes & 255, bytes >> 8));
  }
  const bool extreme = max(high, max(a0, a1)) == 255 || high + max(a0, a1) > 127 + 254 || low + min(a0, a1) < 127 + 1;
  if (!__any_sync(~0u, extreme)) {
#pragma unroll
    for (int j = 0; j < TileN / 8; ++j) {
      const unsigned bytes = pair(j), x = (bytes & 255) - 127, y = (bytes >> 8) - 127;
      sum[4 * j + 0] = fmaf(partial[4 * j + 0], __uint_as_float((a0 + x) << 23), sum[4 * j + 0]);
      sum[4 * j + 1] = fmaf(partial[4 * j + 1], __uint_as_float((a0 + y) << 23), sum[4 * j + 1]);
      sum[4 * j + 2] = fmaf(partial[4 * j + 2], __uint_as_float((a1 + x) << 23), sum[4 * j + 2]);
      sum[4 * j + 3] = fmaf(partial[4 * j + 3], __uint_as_float((a1 + y) << 23), sum[4 * j + 3]);
    }
    return;
  }
  auto add = [](float& s, float p, unsigned a, unsigned b) {  // in two steps, each by a power that FP32 has
    const int x = static_cast<int>(a + b) - 2 * 127, half = x >> 1;
    const bool nan = max(a, b) == 255;
    s = fmaf(p * e8m0_to_float(nan ? 255 : half + 127), e8m0_to_float(x - half + 127), s);
  };
#pragma unroll
  for (int j = 0; j < TileN / 8; ++j) {
    const unsigned bytes = pair(j);
    add(sum[4 * j + 0], partial[4 * j + 0], a0, bytes & 255);
    add(sum[4 * j + 1], partial[4 * j + 1], a0, bytes >> 8);
    add(sum[4 * j + 2], partial[4 * j + 2], a1, bytes & 255);
    add(sum[4 * j + 3], partial[4 * j + 3], a1, bytes >> 8);
  }
}

}  // namespace mxfp8
