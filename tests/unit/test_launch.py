"""Structs against the kernels' own, and the bound on the number of tiles."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxfp8_cutlass import launch
from mxfp8_cutlass.compiler import compile_source
from mxfp8_cutlass.generator.config_space import sm90_configs
from mxfp8_cutlass.generator.tile_config import GROUP_ENTRY_BYTES
from mxfp8_cutlass.launch import Addresses, GroupedGemmParams, Problem, Shapes, TensorMap, clusters_at_most

CONFIGS = sorted({(c.tile_m, c.tile_n, c.cluster_m, c.cluster_n): c for c in sm90_configs()}.values())


def test_structs_mirror_the_kernels():
    """The compiler checks sizes and offsets. NVRTC's offsetof is no constant; its front end's __INTADDR__ is."""
    lines = [
        '#include "mxfp8/tile_scheduler.cuh"',
        f"static_assert(sizeof(mxfp8::TensorMap) == {ctypes.sizeof(TensorMap)});",
        f"static_assert(sizeof(mxfp8::Problem) == {launch.PROBLEM_BYTES});",
        f"static_assert(sizeof(mxfp8::GroupedGemmParams) == {ctypes.sizeof(GroupedGemmParams)});",
        f"static_assert(mxfp8::TileScheduler<64, 64, 1, 1>::kEntryBytes == {GROUP_ENTRY_BYTES});",
    ]
    for struct in (Problem, GroupedGemmParams):
        for field, _ in struct._fields_:
            if field != "padding":
                address = f"__INTADDR__(&static_cast<mxfp8::{struct.__name__}*>(nullptr)->{field})"
                lines.append(f"static_assert({address} == {getattr(struct, field).offset});")
    compile_source("\n".join([*lines, 'extern "C" __global__ void checked() {}']), "checked", "90a")


def test_table_of_problems(monkeypatch):
    """Each problem's bytes stand at its place, whatever became of the structs that they came from."""
    monkeypatch.setattr(
        launch, "tensor_map", lambda address, shape, *_: TensorMap((ctypes.c_uint64 * 16)(address, *shape))
    )
    given = [
        (Shapes(*range(1000 * i, 1000 * i + 5)), Addresses(*range(1000 * i + 5, 1000 * i + 12))) for i in range(40)
    ]
    table = torch.full((len(given) * launch.PROBLEM_BYTES,), 255, dtype=torch.uint8)
    config = next(config for config in sm90_configs() if config.staging_bytes)
    launch.write_table(table, [launch.problem_of(config, *one) for one in given])
    problems = (Problem * len(given)).from_buffer_copy(table.numpy().tobytes())
    for (shapes, x), problem in zip(given, problems, strict=True):
        fields = shapes._asdict() | x._asdict()
        found = {field: getattr(problem, field) or 0 for field in fields if hasattr(problem, field)}
        assert set(fields) - set(found) == {"batch_a", "batch_b", "tokens", "a", "b", "offs", "counts"}
        assert found == {field: fields[field] for field in found}
        assert list(problem.map_a.opaque)[:4] == [x.a, shapes.batch_a, shapes.m, shapes.k]
        assert list(problem.map_b.opaque)[:4] == [x.b, shapes.batch_b, shapes.n, shapes.k]
        assert list(problem.map_out.opaque)[:4] == [x.out, shapes.batch_a, shapes.m, shapes.n]


def row_clusters(config, rows):
    return -(-rows // (config.tile_m * config.cluster_m))


def column_clusters(config, n):
    return -(-n // (config.tile_n * config.cluster_n))


@given(
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=40),
    unused=st.integers(0, 300),
    n=st.integers(1, 100).map(lambda n: 16 * n),
    config=st.sampled_from(CONFIGS),
)
@settings(max_examples=300, deadline=None)
def test_tiles_are_no_more_than_the_bound_however_rows_are_distributed(sizes, unused, n, config):
    tiles = sum(row_clusters(config, size) for size in sizes) * column_clusters(config, n)
    bound = clusters_at_most(config, sum(sizes) + unused, n, len(sizes), split=True)
    assert tiles <= bound
    assert bound <= tiles + (len(sizes) + unused) * column_clusters(config, n)


@given(m=st.integers(0, 5000), groups=st.integers(1, 200), config=st.sampled_from(CONFIGS))
@settings(max_examples=100, deadline=None)
def test_the_bound_is_reached(m, groups, config):
    """One row in each of the first groups and the rest in the last, so that each group wastes what it can."""
    rows = config.tile_m * config.cluster_m
    sizes = [1 if i < min(groups - 1, m) else 0 for i in range(groups)]
    sizes[-1] += m - sum(sizes)
    tiles = sum(row_clusters(config, size) for size in sizes)
    bound = clusters_at_most(config, m, 16, groups, split=True)
    assert tiles <= bound
    assert bound - tiles <= 1 + groups // rows


@given(m=st.integers(0, 5000), groups=st.integers(1, 200), n=st.integers(1, 100), config=st.sampled_from(CONFIGS))
@settings(max_examples=100, deadline=None)
def test_batches_are_counted_exactly(m, groups, n, config):
    tiles = groups * row_clusters(config, m) * column_clusters(config, 16 * n)
    assert clusters_at_most(config, m, 16 * n, groups, split=False) == tiles


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name[24:48])
def test_grid_is_whole_clusters_and_fits_the_chip(config, monkeypatch):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    for clusters in (0, 1, 2, 65, 66, 67, 131, 132, 133, 10**6):
        grid = launch._grid(config, clusters, 0)
        assert grid % config.cluster_size == 0
        assert config.cluster_size <= grid <= 132
        assert grid == 132 // config.cluster_size * config.cluster_size or grid // config.cluster_size == max(
            1, clusters
        )
