"""Arguments and launches of the grouped GEMM kernels: pointers and shapes in, one kernel launch out.

What depends on shapes alone is made once (StackedLaunch), a struct of arguments once for each set of addresses, and a
tensor map once for each address, since allocators hand out the same ones again in other sets. The structs mirror
templates/include/mxfp8/grouped_params.cuh.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from cuda.bindings import driver

from mxfp8_cutlass.generator.tile_config import TileConfig
from mxfp8_cutlass.kernel import LaunchError, current_stream, load, multiprocessors


class TensorMap(ctypes.Structure):
    """A CUtensorMap; opaque."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


class Problem(ctypes.Structure):
    """mxfp8::Problem."""

    _fields_ = (
        ("map_a", TensorMap),
        ("map_b", TensorMap),
        ("map_out", TensorMap),
        ("sfa", ctypes.c_void_p),
        ("sfb", ctypes.c_void_p),
        ("sfb_tiles", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("m", ctypes.c_int),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
        ("padding", ctypes.c_int * 19),
    )


PROBLEM_BYTES = ctypes.sizeof(Problem)

MAX_KNOWN = 1024
"""Sets of addresses that a StackedLaunch keeps arguments for, about 1 KB each, before it forgets all."""


class GroupedGemmParams(ctypes.Structure):
    """mxfp8::GroupedGemmParams."""

    _fields_ = (
        ("problem", Problem),
        ("problems", ctypes.c_void_p),
        ("offs", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("groups", ctypes.c_int),
        ("index_is_int64", ctypes.c_int),
        ("accumulate", ctypes.c_int),
        ("tokens", ctypes.c_int),
        ("padding", ctypes.c_int * 6),
    )


class Shapes(NamedTuple):
    """What one product (or a stack of products) multiplies: A (batch_a, m, k), B (batch_b, n, k)."""

    batch_a: int
    batch_b: int
    m: int
    n: int
    k: int
    tokens: int = 0
    """Where groups cut K: the tokens behind its columns."""


class Addresses(NamedTuple):
    """Where the operands lie; 0: there is no such operand."""

    a: int
    sfa: int
    b: int
    sfb: int
    sfb_tiles: int
    out: int
    bias: int
    offs: int = 0
    counts: int = 0


@lru_cache(maxsize=4096)
def tensor_map(address: int, shape: tuple[int, int, int], box: tuple[int, int], element_bytes: int = 1) -> TensorMap:
    """A map of row-major data (batch, rows, columns), moved in boxes of (1, *box), 128 bytes wide, 128-byte swizzled.

    Reads give zeros outside, writes there are dropped. cuda.core's TensorMapDescriptor does not give out its bytes,
    which a struct argument needs, hence cuda.bindings.
    """
    types = driver.CUtensorMapDataType
    batch, rows, columns = shape
    status, encoded = driver.cuTensorMapEncodeTiled(
        types.CU_TENSOR_MAP_DATA_TYPE_UINT8 if element_bytes == 1 else types.CU_TENSOR_MAP_DATA_TYPE_UINT16,
        3,
        address,
        [driver.cuuint64_t(n) for n in (columns, rows, batch)],
        [driver.cuuint64_t(element_bytes * columns), driver.cuuint64_t(element_bytes * columns * rows)],
        [driver.cuuint32_t(n) for n in (box[1], box[0], 1)],
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise LaunchError(f"cuTensorMapEncodeTiled for {shape} in boxes of {box}: {status.name}")
    return TensorMap.from_buffer_copy(TensorMap.from_address(encoded.getPtr()))


def _set_addresses(
    problem: Problem, config: TileConfig, shapes: Shapes, x: Addresses, groups: int | None = None
) -> None:
    """`groups`: the output's batch, where it is not A's."""
    m, n, k = shapes.m, shapes.n, shapes.k
    problem.map_a = tensor_map(x.a, (shapes.batch_a, m, k), (config.tile_m // config.cluster_n, 128))
    problem.map_b = tensor_map(x.b, (shapes.batch_b, n, k), (config.tile_n // config.cluster_m, 128))
    if config.staging_bytes:
        problem.map_out = tensor_map(x.out, (groups or shapes.batch_a, m, n), (16, 64), 2)
    problem.sfa, problem.sfb, problem.sfb_tiles, problem.out, problem.bias = x.sfa, x.sfb, x.sfb_tiles, x.out, x.bias


def problem_of(config: TileConfig, shapes: Shapes, x: Addresses) -> Problem:
    """Return the struct of one product."""
    problem = Problem(m=shapes.m, n=shapes.n, k=shapes.k)
    _set_addresses(problem, config, shapes, x)
    return problem


def _grid(config: TileConfig, clusters: int, device: int) -> int:
    """CTAs of a persistent launch: one an SM, in whole clusters, and no more than there are tiles."""
    return config.cluster_size * max(1, min(clusters, multiprocessors(device) // config.cluster_size))


def clusters_at_most(config: TileConfig, m: int, n: int, groups: int, *, split: bool) -> int:
    """Cluster tiles of groups with (m, n) results each or, if `split`, m rows in all, however they are distributed."""
    rows = config.tile_m * config.cluster_m
    columns = -(-n // (config.tile_n * config.cluster_n))
    row_clusters = min(m, m // rows + groups) if split else -(-m // rows) * groups
    return row_clusters * columns


class StackedLaunch:
    """A launch for groups that share N and K, complete but for its addresses. Threads can share it.

    Args:
        config: the kernel, loaded here.
        shapes: of all groups together.
        groups: how many.
        device: of the operands.
        split: whether `offs` cuts the rows of A into groups; else each batch entry is one, of `counts` rows if given,
            or, if config.k_groups, `offs` cuts K and the output alone is a batch.
        index_is_int64: whether `offs` or `counts` are int64, else int32.
        accumulate: whether to add to the output.
    """

    def __init__(
        self,
        config: TileConfig,
        shapes: Shapes,
        groups: int,
        device: int,
        *,
        split: bool,
        index_is_int64: bool,
        accumulate: bool,
    ) -> None:
        self.config, self._shapes, self._device = config, shapes, device
        self._kernel = load(config, device)
        self._grid = _grid(config, clusters_at_most(config, shapes.m, shapes.n, groups, split=split), device)
        self._params = GroupedGemmParams(
            problem=Problem(m=shapes.m, n=shapes.n, k=shapes.k),
            groups=groups,
            index_is_int64=index_is_int64,
            accumulate=accumulate,
            tokens=shapes.tokens,
        )
        self._batch_out = groups if config.k_groups else None
        self.known: dict[Addresses, GroupedGemmParams] = {}
        """The kernel's argument for the addresses of earlier calls; never changed, since another thread may use it."""

    def __call__(self, x: Addresses) -> None:
        """Launch on the current stream."""
        params = self.known.get(x)
        if params is None:
            params = GroupedGemmParams.from_buffer_copy(self._params)
            _set_addresses(params.problem, self.config, self._shapes, x, self._batch_out)
            params.offs, params.counts = x.offs, x.counts
            if len(self.known) >= MAX_KNOWN:
                self.known.clear()
            self.known[x] = params
        self._kernel.launch(params, self._grid, current_stream(self._device))


_CAPTURED_TABLES: list[torch.Tensor] = []
"""Host tables that CUDA graphs copy from at each replay; they must outlive the graphs, so they are kept for good."""


def keep_for_graphs(table: torch.Tensor) -> None:
    """Keep a host table, if a graph is being captured that will copy from it."""
    if torch.cuda.is_current_stream_capturing():
        _CAPTURED_TABLES.append(table)


def write_table(table: torch.Tensor, problems: Sequence[Problem]) -> None:
    """Write problems into a host tensor of bytes as the kernel's array of them."""
    for i, problem in enumerate(problems):
        ctypes.memmove(table.data_ptr() + i * PROBLEM_BYTES, ctypes.addressof(problem), PROBLEM_BYTES)


def launch_list(
    config: TileConfig, problems: Sequence[tuple[Shapes, Addresses]], *, accumulate: bool, device: int
) -> None:
    """Launch one kernel for problems of any shapes. Their table travels to the device by a copy on the same stream."""
    kernel = load(config, device)
    host = torch.empty(len(problems) * PROBLEM_BYTES, dtype=torch.uint8, pin_memory=True)
    write_table(host, [problem_of(config, shapes, x) for shapes, x in problems])
    keep_for_graphs(host)
    table = host.to(f"cuda:{device}", non_blocking=True)
    params = GroupedGemmParams(problems=table.data_ptr(), groups=len(problems), accumulate=accumulate)
    clusters = sum(clusters_at_most(config, shapes.m, shapes.n, 1, split=False) for shapes, _ in problems)
    kernel.launch(params, _grid(config, clusters, device), current_stream(device))
