"""This package's ways to compute a workload, and what any method gives: a call, and the values that it multiplies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

from mxfp8_cutlass.bench.operands import Operands, expert_values, values
from mxfp8_cutlass.bench.workloads import Workload
from mxfp8_cutlass.generator.config_space import GroupedGemmConfig
from mxfp8_cutlass.grouped_mm import grouped_mm
from mxfp8_cutlass.mxfp8_tensor import BLOCK, RUN, TILE_ROWS, MXFP8Tensor
from mxfp8_cutlass.quantize import quantize
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


def kernel_of(workload: Workload, *, exact: bool) -> GroupedGemmConfig:
    """The kernel that grouped_mm picks on Hopper."""
    promotion, rows = (BLOCK, 1) if exact else (RUN, TILE_ROWS)
    w, masked = workload, workload.kind == "masked"
    m = w.expected_m if masked else w.m
    return select_stacked(m, w.n, w.k, w.groups, "90a", promotion, rows, "e4m3", "e4m3", "bf16", split=not masked)


def result_buffer(x: Operands, rows: int | None = None) -> torch.Tensor:
    """A result of NaN: what a method fails to write cannot look right."""
    shape = (x.workload.m if rows is None else rows, x.workload.n)
    return torch.full(shape, torch.nan, dtype=torch.bfloat16, device=x.x.device)


def places(x: Operands, rooms: list[int]) -> tuple[torch.Tensor, int]:
    """Where each row goes if each group gets its room, and the number of rows with the padding."""
    starts = [0, *accumulate(rooms)]
    parts = [torch.arange(start, start + size) for start, size in zip(starts, x.sizes, strict=False)]
    return torch.cat(parts).to(x.x.device), starts[-1]


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
    a_values = a if exact else x.xf
    place = None
    if x.workload.kind == "masked":
        groups, room = len(x.sizes), x.workload.room
        place, end = places(x, [room] * groups)
        out = result_buffer(x, end)
        stacked, counts = _in_rooms(x, a, place, room), torch.tensor(x.sizes, dtype=torch.int32, device=x.x.device)

        def run() -> torch.Tensor:
            rooms = out.view(groups, room, -1)
            grouped_mm(stacked, b, counts=counts, expected_m=x.workload.expected_m, out=rooms, exact=exact)
            return out
    else:
        out = result_buffer(x)

        def run() -> torch.Tensor:
            return grouped_mm(a, b, x.offs, out=out, exact=exact)

    return Method(
        run=run,
        a=lambda rows: values(a_values, rows),
        b=lambda group: expert_values(b, group),
        place=place,
        out=out,
        kernel=kernel_of(x.workload, exact=exact).name,
    )


def _in_rooms(x: Operands, a: MXFP8Tensor, place: torch.Tensor, room: int) -> MXFP8Tensor:
    """The rows of a 2D tensor in the masked layout, folded if they were; NaN between them: nothing may come of it."""
    rooms = torch.full((len(x.sizes) * room, a.K), torch.nan, dtype=x.x.dtype, device=x.x.device)
    rooms[place] = x.x
    return quantize(rooms.view(len(x.sizes), room, a.K), fold=bool(a.folded))
