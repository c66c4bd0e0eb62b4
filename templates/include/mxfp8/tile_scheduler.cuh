// Which tile a CTA computes next. Groups are known on the device alone, so each CTA builds a small table of them in
// shared memory and walks the tiles t = cluster, cluster + clusters, ... in one order over all groups.
#pragma once

#include "grouped_params.cuh"

namespace mxfp8 {

// Where one output tile lies. Row indices count from the top of the matrix (of the batch entry, if there are several).
struct Tile {
  static constexpr bool kOfRuns = false;
  int group;
  int m0, n0;            // first row of A and of B
  int rows;              // rows of A that belong to the group, from m0 on; may be <= 0 for a cluster's second CTA
};

// The same where groups cut K: operands that all groups share, and an output each.
struct TileOfRuns : Tile {
  static constexpr bool kOfRuns = true;
  int first_run, runs;  // of 128 of K; one for a group that is empty
};

template <bool KGroups>
struct TileOf {
  using Type = Tile;
};
template <>
struct TileOf<true> {
  using Type = TileOfRuns;
};

// A fact of a group's problem. The one problem that all groups may share comes from constant memory, not through a pointer:
// that would be a load of some 200 cycles.
template <class T>
__device__ inline T problem_of(const GroupedGemmParams& params, int group, T Problem::*fact) {
  return params.problems ? params.problems[group].*fact : params.problem.*fact;
}

// A group's entry in the batch of matrices that A (and the output) and B are.
__device__ inline int batch_of_a(const GroupedGemmParams& params, int group) {
  return params.problems || params.offs ? 0 : group;
}
__device__ inline int batch_of_b(const GroupedGemmParams& params, int group) { return params.problems ? 0 : group; }

// The same for a tile.
__device__ inline int batch_of_a(const GroupedGemmParams& params, const Tile& tile) { return batch_of_a(params, tile.group); }
__device__ inline int batch_of_b(const GroupedGemmParams& params, const Tile& tile) { return batch_of_b(params, tile.group); }
__device__ inline int batch_of_out(const GroupedGemmParams& params, const Tile& tile) { return batch_of_a(params, tile.group); }
__device__ inline int batch_of_a(const GroupedGemmParams&, const TileOfRuns&) { return 0; }
__device__ inline int batch_of_b(const GroupedGemmParams&, const TileOfRuns&) { return 0; }
__device__ inline int batch_of_out(const GroupedGemmParams&, const TileOfRuns& tile) { return tile.group; }

// Rows from one run's scales to the next one's in the run order: scale_by_run pads them.
__device__ inline int padded_rows(int rows) { return (rows + 15) / 16 * 16; }

// Runs of 128 of K.
__device__ inline int runs_of(const GroupedGemmParams& params, int group) {
  return (problem_of(params, group, &Problem::k) + 127) / 128;
}

// Those that a tile contracts.
__device__ inline int runs_of(const GroupedGemmParams& params, const Tile& tile) { return runs_of(params, tile.group); }
__device__ inline int runs_of(const GroupedGemmParams&, const TileOfRuns& tile) { return tile.runs; }

// Where a group whose first token is `begin` has its first run: mxfp8_cutlass/columns.py, group_bounds.
__device__ inline int first_run_of_columns(int begin, int group) { return begin / 128 + group; }

// KGroups: offs cuts the contracted axis, tokens, whose columns lie as columns.py says.
template <int TileM, int TileN, int ClusterM, int ClusterN, bool KGroups = false>
class TileScheduler {
 public:
  // A group's tiles are walked in stripes of this many rows of clusters, rows fastest. A wave of 132 CTAs reads the fewest
  // rows of both operands if its tiles cover about as many rows as columns: sqrt(132 * 128 * 192) = 1800. A stripe's
  // activations stay in L2 while its weights pass by once.
  static constexpr int kStripe = 2048 / (TileM * ClusterM);
  using FoundTile = typename TileOf<KGroups>::Type;

  struct Group {
    int first_tile;  // running count of cluster tiles before this group
    int begin;       // of its rows, or with KGroups of its runs
    int count;
  };
  // Entries of the table: one more than groups, whose first_tile is the total.
  static constexpr int kEntryBytes = sizeof(Group);

  // One whole warp fills the table; the caller makes it visible to the CTA.
  static __device__ void build_table(const GroupedGemmParams& params, Group* table) {
    const int lane = threadIdx.x % 32;
    int total = 0;
    for (int base = 0; base < params.groups; base += 32) {
      const int g = base + lane;
      const bool in_range = g < params.groups;
      const int m = KGroups ? params.tokens : problem_of(params, in_range ? g : 0, &Problem::m);
      int begin = 0, end = m;
      if (params.offs && in_range) {  // clamped: whatever offs or counts hold, no row outside `out` is named
        begin = g == 0 ? 0 : row_index(params, params.offs, g - 1, m);
        end = row_index(params, params.offs, g, m);
      } else if (params.counts && in_range) {
        end = row_index(params, params.counts, g, m);
      }
      const int rows = in_range ? max(end - begin, 0) : 0;
      // With KGroups they are tokens; of a group without any, zeros are written, or nothing is added.
      const int out_rows = !KGroups ? rows : in_range && (rows || !params.accumulate) ? params.problem.m : 0;
      const int tiles = row_clusters(out_rows) * column_clusters(problem_of(params, in_range ? g : 0, &Problem::n));
      int inclusive = tiles;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, inclusive, distance);
        inclusive += lane >= distance ? other : 0;
      }
      if constexpr (KGroups) {
        if (in_range) table[g] = {total + inclusive - tiles, first_run_of_columns(begin, g), (rows + 127) / 128};
      } else {
        if (in_range) table[g] = {total + inclusive - tiles, begin, rows};
      }
      total += __shfl_sync(~0u, inclusive, 31);
    }
    if (lane == 0) table[params.groups] = {total, 0, 0};
  }

  __device__ TileScheduler(const GroupedGemmParams& params, const Group* table, int cta_m, int cta_n)
      : params_(params), table_(table), cta_m_(cta_m), cta_n_(cta_n),
        index_(blockIdx.x / (ClusterM * ClusterN)) {}

  // KGroups: the first run of a tile's group, and whether it has none.
  __device__ int first_run(const Tile& tile) const { return table_[tile.group].begin; }
  __device__ bool is_empty(const Tile& tile) const { return table_[tile.group].count == 0; }

  // Called by whole warps. Returns false after the last tile.
  __device__ bool next(FoundTile& tile) {
    // Tiles come in rising order, so the search goes on from the last group, 32 groups at a time.
    for (;;) {
      const int g = group_ + threadIdx.x % 32;
      const unsigned passed = __ballot_sync(~0u, g < params_.groups && table_[g + 1].first_tile <= index_);
      group_ += __popc(passed);
      if (passed != ~0u) break;
    }
    if (group_ >= params_.groups) return false;
    const Group group = table_[group_];
    const int rows = KGroups ? params_.problem.m : group.count;
    const int rows_of_clusters = row_clusters(rows);
    const int columns = column_clusters(problem_of(params_, group_, &Problem::n));
    const int local = index_ - group.first_tile;
    const int stripe = local / (kStripe * columns);
    const int within = local - stripe * (kStripe * columns);
    const int stripe_rows = min(kStripe, rows_of_clusters - stripe * kStripe);
    const int column = within / stripe_rows;
    const int row = stripe * kStripe + within - column * stripe_rows;

    const int m_in_group = (row * ClusterM + cta_m_) * TileM;
    tile.group = group_;
    tile.m0 = (KGroups ? 0 : group.begin) + m_in_group;
    tile.n0 = (column * ClusterN + cta_n_) * TileN;
    tile.rows = rows - m_in_group;
    if constexpr (KGroups) tile.first_run = group.begin, tile.runs = max(group.count, 1);
    index_ += gridDim.x / (ClusterM * ClusterN);
    return true;
  }

 private:
  static __device__ int row_clusters(int rows) { return (rows + TileM * ClusterM - 1) / (TileM * ClusterM); }
  static __device__ int column_clusters(int n) { return (n + TileN * ClusterN - 1) / (TileN * ClusterN); }

  static __device__ int row_index(const GroupedGemmParams& params, const void* rows, int g, int m) {
    const int64_t value =
        params.index_is_int64 ? static_cast<const int64_t*>(rows)[g] : static_cast<const int*>(rows)[g];
    return static_cast<int>(value < 0 ? 0 : value > m ? m : value);
  }

  const GroupedGemmParams& params_;
  const Group* table_;
  int cta_m_, cta_n_;
  int index_;
  int group_ = 0;
};

}  // namespace mxfp8
