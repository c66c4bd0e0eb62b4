"""The tile scheduler's own code, run on a CPU: every tile of every group once, whatever offs and counts hold."""

from __future__ import annotations

import ctypes
import random
import subprocess
from dataclasses import dataclass
from itertools import pairwise

import kernel_emulator
import pytest
import torch

from mxfp8_cutlass.columns import column_capacity, group_bounds
from mxfp8_cutlass.launch import GroupedGemmParams, Problem

COMPILER = kernel_emulator.find_compiler()
SHAPES = [(64, 64, 1, 1), (128, 128, 2, 1), (128, 192, 1, 2)]
"""tile_m, tile_n, cluster_m, cluster_n."""
N = 400

SOURCE = """
#include "cuda_on_cpu.h"
#define __align__(bytes)
struct { unsigned x; } gridDim;
template <class Value>
Value __shfl_up_sync(unsigned mask, Value value, int distance) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return __shfl_sync(mask, value, lane < distance ? lane : lane - distance);
}
inline unsigned __ballot_sync(unsigned, bool is) {
  return __reduce_add_sync(~0u, is ? 1u << threadIdx.x % 32 : 0u);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
#include "mxfp8/tile_scheduler.cuh"

inline int first_run_of(const mxfp8::Tile&) { return 0; }
inline int first_run_of(const mxfp8::TileOfRuns& tile) { return tile.first_run; }

struct Found { int cta, group, batch_a, batch_b, batch_out, m0, n0, rows, first_run, runs, empty; };

template <int TileM, int TileN, int ClusterM, int ClusterN, bool KGroups>
int walk(const mxfp8::GroupedGemmParams& params, int grid, Found* found, int room) {
  using Scheduler = mxfp8::TileScheduler<TileM, TileN, ClusterM, ClusterN, KGroups>;
  static typename Scheduler::Group table[1025];
  int count = 0;
  gridDim.x = grid;
  emulator::launch([&] {
    Scheduler::build_table(params, table);
    __syncwarp();
    const int rank = blockIdx.x % (ClusterM * ClusterN);
    Scheduler scheduler(params, table, rank % ClusterM, rank / ClusterM);
    typename Scheduler::FoundTile tile;
    while (scheduler.next(tile)) {
      if (threadIdx.x == 0 && count < room)
        found[count++] = {int(blockIdx.x), tile.group, mxfp8::batch_of_a(params, tile), mxfp8::batch_of_b(params, tile),
                          mxfp8::batch_of_out(params, tile), tile.m0, tile.n0, tile.rows, first_run_of(tile),
                          mxfp8::runs_of(params, tile), scheduler.is_empty(tile)};
    }
  }, grid, 32);
  return count;
}
"""

ENTRY = """
extern "C" int walk_%s(const mxfp8::GroupedGemmParams* params, int grid, Found* found, int room) {
  return walk<%s>(*params, grid, found, room);
}
"""

CSTDINT = """
#include <cstdint>
namespace cuda::std { using ::int64_t; using ::uint8_t; using ::uint32_t; using ::uint64_t; }
"""


NAMES = ("cta", "group", "batch_a", "batch_b", "batch_out", "m0", "n0", "rows", "first_run", "runs", "empty")


class Found(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in NAMES)


@dataclass(frozen=True)
class Group:
    """Where a group's rows are said to lie."""

    begin: int
    rows: int


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """(shape, params, grid, whether groups cut K) -> the tiles."""
    if COMPILER is None:
        pytest.skip("no g++ that knows _Float16")
    folder = tmp_path_factory.mktemp("scheduler")
    entries = [
        ENTRY % ("_".join(map(str, (*shape, int(k_groups)))), ", ".join(map(str, (*shape, int(k_groups)))))
        for shape in SHAPES
        for k_groups in (False, True)
    ]
    (folder / "cuda" / "std").mkdir(parents=True)
    (folder / "cuda" / "std" / "cstdint").write_text(CSTDINT)
    source, library = folder / "scheduler.cpp", folder / "scheduler.so"
    source.write_text("\n".join([SOURCE, *entries]))
    includes = [f"-I{path}" for path in (kernel_emulator.EMULATOR, kernel_emulator.INCLUDE, folder)]
    command = [COMPILER, *kernel_emulator.OPTIONS, *includes, str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))

    def call(shape, params, grid, k_groups=False):
        found = (Found * 20000)()
        function = getattr(loaded, "walk_" + "_".join(map(str, (*shape, int(k_groups)))))
        count = function(ctypes.byref(params), grid, found, len(found))
        assert count < len(found)
        return found[:count]

    return call


def check(tiles, groups, shape, grid, *, batched):
    """Each tile of each group once; a cluster's CTAs beside one another; the order the same on all CTAs."""
    tile_m, tile_n, cluster_m, cluster_n = shape
    seen = set()
    for tile in tiles:
        group = groups[tile.group]
        row = tile.m0 - group.begin
        assert tile.rows == group.rows - row
        assert row % tile_m == 0
        assert tile.n0 % tile_n == 0
        assert (tile.batch_a, tile.batch_b) == (tile.group if batched else 0, tile.group)
        assert (tile.batch_out, tile.first_run, tile.runs) == (tile.batch_a, 0, 1)
        rank = tile.cta % (cluster_m * cluster_n)
        assert (row // tile_m % cluster_m, tile.n0 // tile_n % cluster_n) == (rank % cluster_m, rank // cluster_m)
        place = (tile.group, row, tile.n0)
        assert place not in seen
        seen.add(place)
    wanted = {
        (g, row, n0)
        for g, group in enumerate(groups)
        for row in range(0, group.rows, tile_m)
        for n0 in range(0, N, tile_n)
    }
    assert {place for place in seen if place[1] < groups[place[0]].rows and place[2] < N} == wanted
    per_cta = [sum(tile.cta == cta for tile in tiles) for cta in range(grid)]
    assert max(per_cta) - min(per_cta) <= 1


def params_for(m, groups, *, offs=None, counts=None, dtype=torch.int32):
    """The struct, and the tensor that it points at."""
    index = torch.tensor(counts if offs is None else offs, dtype=dtype) if offs or counts else None
    params = GroupedGemmParams(problem=Problem(m=m, n=N, k=128), groups=groups, index_is_int64=dtype == torch.int64)
    if index is not None:
        setattr(params, "counts" if offs is None else "offs", index.data_ptr())
    return params, index


def clamped(value, m):
    return min(max(value, 0), m)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("groups", [1, 5, 32, 33, 100])
def test_counts(walk, groups, shape, dtype):
    rng, m = random.Random(groups), 300
    far = 2**40 if dtype == torch.int64 else 2**31 - 1
    counts = [rng.choice([0, 1, rng.randrange(m), m, m + 1, -1, far, -far]) for _ in range(groups)]
    params, _index = params_for(m, groups, counts=counts, dtype=dtype)
    for grid in (2, 6, 12):
        wanted = [Group(0, clamped(count, m)) for count in counts]
        check(walk(shape, params, grid), wanted, shape, grid, batched=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("groups", [1, 5, 33])
def test_batches(walk, groups, shape):
    params, _ = params_for(300, groups)
    check(walk(shape, params, 6), [Group(0, 300)] * groups, shape, 6, batched=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("groups", [1, 5, 33, 100])
def test_offs(walk, groups, shape, right, dtype):
    rng, m = random.Random(groups), 6000
    offs = [rng.randrange(m) if right else rng.randrange(-m, 2 * m) for _ in range(groups)]
    offs = sorted(offs) if right else offs
    params, _index = params_for(m, groups, offs=offs, dtype=dtype)
    ends = [0, *(clamped(end, m) for end in offs)]
    wanted = [Group(begin, max(0, end - begin)) for begin, end in pairwise(ends)]
    check(walk(shape, params, 6), wanted, shape, 6, batched=False)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", ["right", "wrong", "empty", "one"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("groups", [1, 5, 33, 100])
def test_groups_that_cut_k(walk, groups, shape, kind, accumulate, dtype):
    """Every group has the same tiles, runs of its own, and no tiles if there is nothing to add."""
    rng, m, tokens = random.Random(groups), 144, 6000
    limits = {"right": (0, tokens), "wrong": (-tokens, 2 * tokens), "empty": (0, 0), "one": (tokens, tokens)}[kind]
    offs = [rng.randint(*limits) for _ in range(groups)]
    if kind == "right":  # some groups of no tokens, and a tail
        offs = sorted(rng.choice(offs) for _ in offs)
    params, index = params_for(m, groups, offs=offs, dtype=dtype)
    params.tokens, params.accumulate, capacity = tokens, accumulate, column_capacity(tokens, groups)
    params.problem.k = capacity
    ends = [0, *(clamped(end, tokens) for end in offs)]
    sizes = [max(0, end - begin) for begin, end in pairwise(ends)]
    first_columns = group_bounds(index.clamp(0, tokens))[2].tolist()
    for grid in (2, 6):
        tiles = walk(shape, params, grid, k_groups=True)
        places = [(tile.group, tile.m0, tile.n0) for tile in tiles if tile.rows > 0 and tile.n0 < N]
        assert sorted(places) == [
            (g, m0, n0)
            for g, size in enumerate(sizes)
            if size or not accumulate
            for m0 in range(0, m, shape[0])
            for n0 in range(0, N, shape[1])
        ]
        for tile in tiles:
            assert (tile.batch_a, tile.batch_b, tile.batch_out) == (0, 0, tile.group)
            assert tile.rows == m - tile.m0
            assert tile.first_run == first_columns[tile.group] // 128
            assert tile.empty == (sizes[tile.group] == 0)
            assert tile.runs == max(1, -(-sizes[tile.group] // 128))
            assert 0 <= tile.first_run <= tile.first_run + tile.runs <= capacity // 128
        for cta in range(grid):  # the order is one over all groups
            groups_of_cta = [tile.group for tile in tiles if tile.cta == cta]
            assert groups_of_cta == sorted(groups_of_cta)
