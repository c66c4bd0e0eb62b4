"""Arguments and launches of the grouped GEMM kernels: pointers and shapes in, one kernel launch out.

Tensor maps and argument structs depend on pointers and shapes alone, so both are cached on them: a call whose tensors
lie where an earlier call's did costs a look-up. The structs mirror templates/include/mxfp8/grouped_params.cuh.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from cuda.bindings import driver

from mxfp8_cutlass.generator.tile_config import TileConfig
from mxfp8_cutlass.kernel import Kernel, LaunchError, load


class TensorMap(ctypes.Structure):
    """A CUtensorMap; opaque."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


class Problem(ctypes.Structure):
    """mxfp8::Problem."""

    _fields_ = (
        ("map_a", TensorMap),
        ("map_b", TensorMap),
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
        ("padding", ctypes.c_int * 7),
    )


@dataclass(frozen=True, slots=True)
class Operands:
    """Device addresses and shapes of one product (or a stack of products): A (batch_a, m, k), B (batch_b, n, k)."""

    a: int
    sfa: int
    b: int
    sfb: int
    sfb_tiles: int
    out: int
    bias: int
    batch_a: int
    batch_b: int
    m: int
    n: int
    k: int


@lru_cache(maxsize=4096)
def tensor_map(address: int, batch: int, rows: int, k: int, box_rows: int) -> TensorMap:
    """A map of FP8 data (batch, rows, k), read in boxes of (1, box_rows, 128) with a 128-byte swizzle; zeros outside.

    cuda.core's TensorMapDescriptor does not give out its bytes, which a struct argument needs, hence cuda.bindings.
    """
    status, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        3,
        address,
        [driver.cuuint64_t(k), driver.cuuint64_t(rows), driver.cuuint64_t(batch)],
        [driver.cuuint64_t(k), driver.cuuint64_t(k * rows)],
        [driver.cuuint32_t(128), driver.cuuint32_t(box_rows), driver.cuuint32_t(1)],
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise LaunchError(f"cuTensorMapEncodeTiled for ({batch}, {rows}, {k}) in boxes of {box_rows}: {status.name}")
    return TensorMap((ctypes.c_uint64 * 16)(*[int(word) for word in encoded.opaque]))


def _problem(config: TileConfig, x: Operands) -> Problem:
    return Problem(
        map_a=tensor_map(x.a, x.batch_a, x.m, x.k, config.tile_m // config.cluster_n),
        map_b=tensor_map(x.b, x.batch_b, x.n, x.k, config.tile_n // config.cluster_m),
        sfa=x.sfa,
        sfb=x.sfb,
        sfb_tiles=x.sfb_tiles,
        out=x.out,
        bias=x.bias,
        m=x.m,
        n=x.n,
        k=x.k,
    )


@lru_cache(maxsize=8)
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _grid(config: TileConfig, clusters: int, device: int) -> int:
    """CTAs of a persistent launch: one an SM, in whole clusters, and no more than there are tiles."""
    return config.cluster_size * max(1, min(clusters, _multiprocessors(device) // config.cluster_size))


def clusters_at_most(config: TileConfig, m: int, n: int, groups: int, *, split: bool) -> int:
    """Cluster tiles of groups with (m, n) results each or, if `split`, m rows in all, however they are distributed."""
    rows = config.tile_m * config.cluster_m
    columns = -(-n // (config.tile_n * config.cluster_n))
    row_clusters = min(m, m // rows + groups) if split else -(-m // rows) * groups
    return row_clusters * columns


@lru_cache(maxsize=4096)
def _plan(
    config: TileConfig, x: Operands, offs: int, groups: int, device: int, *, offs_is_int64: bool, accumulate: bool
) -> tuple[Kernel, GroupedGemmParams, int]:
    """Everything that a launch needs but the stream: the kernel, its argument, the grid."""
    kernel = load(config, device)  # first, since it also gives the thread a context
    params = GroupedGemmParams(
        problem=_problem(config, x), offs=offs, groups=groups, index_is_int64=offs_is_int64, accumulate=accumulate
    )
    clusters = clusters_at_most(config, x.m, x.n, groups, split=offs != 0)
    return kernel, params, _grid(config, clusters, device)


def launch_stacked(
    config: TileConfig, x: Operands, offs: torch.Tensor | None, groups: int, *, accumulate: bool, device: int
) -> None:
    """Launch one kernel for groups that share N and K: cut from the rows of A by `offs`, or a batch entry each."""
    address, is_int64 = (offs.data_ptr(), offs.dtype == torch.int64) if offs is not None else (0, False)
    kernel, params, grid = _plan(config, x, address, groups, device, offs_is_int64=is_int64, accumulate=accumulate)
    kernel.launch(params, grid, torch.cuda.current_stream(device).cuda_stream)


_CAPTURED_TABLES: list[torch.Tensor] = []
"""Host tables that CUDA graphs copy from at each replay; they must outlive the graphs, so they are kept for good."""


def write_table(table: torch.Tensor, problems: Sequence[Problem]) -> None:
    """Write problems into a host tensor of bytes as the kernel's array of them."""
    for i, problem in enumerate(problems):
        ctypes.memmove(table.data_ptr() + i * PROBLEM_BYTES, ctypes.addressof(problem), PROBLEM_BYTES)


def launch_list(config: TileConfig, problems: Sequence[Operands], *, accumulate: bool, device: int) -> None:
    """Launch one kernel for problems of any shapes. Their table travels to the device by a copy on the same stream."""
    kernel = load(config, device)
    host = torch.empty(len(problems) * PROBLEM_BYTES, dtype=torch.uint8, pin_memory=True)
    write_table(host, [_problem(config, x) for x in problems])
    if torch.cuda.is_current_stream_capturing():
        _CAPTURED_TABLES.append(host)
    table = host.to(f"cuda:{device}", non_blocking=True)
    params = GroupedGemmParams(problems=table.data_ptr(), groups=len(problems), accumulate=accumulate)
    clusters = sum(clusters_at_most(config, x.m, x.n, 1, split=False) for x in problems)
    kernel.launch(params, _grid(config, clusters, device), torch.cuda.current_stream(device).cuda_stream)
