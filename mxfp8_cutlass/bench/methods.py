"""This package's ways to compute a workload, and what any method gives: a call, and the values that it multiplies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mxfp8_cutlass.bench.operands import Operands, expert_values, values
from mxfp8_cutlass.bench.workloads import Workload
from mxfp8_cutlass.generator.tile_config import TileConfig
from mxfp8_cutlass.grouped_mm import grouped_mm
from mxfp8_cutlass.mxfp8_tensor import BLOCK, RUN, TILE_ROWS, MXFP8Tensor
from mxfp8_cutlass.select import select_stacked

ROW_TOLERANCE = 6e-3
"""Relative error of a row: bfloat16 rounds by at most 2**-8; Hopper's short sums add less than 2e-3 on Gaussian data.

One wrong element in a row of 14336 is 8e-3.
"""


class UnavailableError(Exception):
    """A method that cannot run here, with the reason."""


@dataclass(frozen=True)
class Method:
    """One way to compute a workload."""

    run: Callable[[], torch.Tensor]
    """What is timed; returns the result, flattened to rows (..., N)."""
    a: Callable[[torch.Tensor], torch.Tensor]
    """Row numbers of the workload -> the values multiplied, float64 (rows, K)."""
    b: Callable[[int], torch.Tensor]
    """A group -> its weights, float64 (N, K)."""
    tolerance: float = ROW_TOLERANCE
    """Largest relative error of a row."""
    place: torch.Tensor | None = None
    """(M,): where each of the workload's rows lies in the result, if not in its place."""
    out: torch.Tensor | None = None
    """The buffer that `run` writes to, if it is always the same one."""
    kernel: str = ""
    """The kernel's name, where it is known."""


def kernel_of(workload: Workload, *, exact: bool) -> TileConfig:
    """The kernel that grouped_mm picks on Hopper."""
    promotion, rows = (BLOCK, 1) if exact else (RUN, TILE_ROWS)
    w = workload
    return select_stacked(w.m, w.n, w.k, w.groups, "90a", promotion, rows, "e4m3", "e4m3", "bf16", split=True)


def result_buffer(x: Operands, rows: int | None = None) -> torch.Tensor:
    """A result of NaN: what a method fails to write cannot look right."""
    shape = (x.workload.m if rows is None else rows, x.workload.n)
    return torch.full(shape, torch.nan, dtype=torch.bfloat16, device=x.x.device)


def folded(x: Operands) -> Method:
    """Operands folded beforehand."""
    return _ours(x, x.xf, x.wf, exact=False)


def exact(x: Operands) -> Method:
    """Compact operands as they are."""
    return _ours(x, x.xq, x.wq, exact=True)


def fold_activations(x: Operands) -> Method:
    """Compact activations, folded within the call; weights folded beforehand."""
    return _ours(x, x.xq, x.wf, exact=False)


def _ours(x: Operands, a: MXFP8Tensor, b: MXFP8Tensor, *, exact: bool) -> Method:
    out = result_buffer(x)
    a_values = a if exact else x.xf
    return Method(
        run=lambda: grouped_mm(a, b, x.offs, out=out, exact=exact),
        a=lambda rows: values(a_values, rows),
        b=lambda group: expert_values(b, group),
        out=out,
        kernel=kernel_of(x.workload, exact=exact).name,
    )
