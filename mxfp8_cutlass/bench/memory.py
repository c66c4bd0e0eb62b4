"""The kernels that only move data, beside a device-to-device copy; a sample of each is compared with the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mxfp8_cutlass import reference
from mxfp8_cutlass.bench.speed import Effort, reason
from mxfp8_cutlass.bench.timing import Spread, Timer, time_interleaved
from mxfp8_cutlass.mxfp8_tensor import BLOCK, RUN, TILE_ROWS, MXFP8Tensor
from mxfp8_cutlass.quantize import dequantize, fold, quantize

SHAPE = (65536, 8192)
"""0.5 GiB in FP8: far more than L2 holds."""

EXPERTS = 8
"""Into how many matrices the same data is cut where weights are folded."""

BYTE_PER_BLOCK, BYTE_PER_RUN = 1 / BLOCK, 1 / RUN


@dataclass(frozen=True)
class Move:
    """A kernel's traffic. Without `ms` there is a `note`."""

    name: str
    bytes_per_element: float
    """Each operand and result once, scales included."""
    ms: Spread | None
    gbps: float | None
    of_copy: float | None
    """Bandwidth as a share of the copy's."""
    note: str = ""


Call = Callable[[], torch.Tensor | MXFP8Tensor]
Expected = Callable[[], torch.Tensor | MXFP8Tensor]


def measure_memory(
    device: torch.device, timer: Timer, effort: Effort, shape: tuple[int, int] = SHAPE, experts: int = EXPERTS
) -> list[Move]:
    """Time all of them in one interleaved run."""
    rows, k = shape
    x = torch.randn(shape, dtype=torch.bfloat16, device=device)
    heavy = torch.randn(shape, dtype=torch.bfloat16, device=device)
    heavy.mul_(torch.randn(shape, dtype=torch.bfloat16, device=device).abs_().add_(1e-3).pow_(-2))
    target = torch.empty_like(x)
    xq = quantize(x)
    data, scale = xq.data.view(experts, rows // experts, k), xq.scale_bytes.view(experts, rows // experts, k // BLOCK)
    wq = MXFP8Tensor(data, scale)
    part = min(TILE_ROWS, rows // experts)
    x_part, heavy_part = x[:part].cpu(), heavy[:part].cpu()
    xq_part = MXFP8Tensor(xq.data[:part], xq.scale_bytes[:part]).to("cpu")

    def copy() -> torch.Tensor:
        return target.copy_(x)

    written = 1 + BYTE_PER_BLOCK
    cases: dict[str, tuple[Call, float, Expected]] = {
        "copy": (copy, 4.0, lambda: x_part),
        "quantize": (lambda: quantize(x), 2 + written, lambda: reference.quantize(x_part)),
        "quantize, folded": (
            lambda: quantize(x, fold=True),
            2 + written + BYTE_PER_RUN,
            lambda: reference.quantize(x_part, fold_runs=True),
        ),
        "quantize, folded, heavy tails": (
            lambda: quantize(heavy, fold=True),
            2 + written + BYTE_PER_RUN,
            lambda: reference.quantize(heavy_part, fold_runs=True),
        ),
        "fold": (lambda: fold(xq), 2 * written + BYTE_PER_RUN, lambda: reference.fold(xq_part, 1)[0]),
        "fold to tiles": (
            lambda: fold(wq, TILE_ROWS),
            2 * written + BYTE_PER_RUN,
            lambda: reference.fold(xq_part, TILE_ROWS)[0],
        ),
        "dequantize": (
            lambda: dequantize(xq, torch.bfloat16),
            2 + written,
            lambda: reference.dequantize(xq_part, torch.bfloat16),
        ),
    }
    notes: dict[str, str] = {}
    for name, (call, _, expected) in cases.items():
        try:
            same = _same(call(), expected(), part)
            timer.wait()
        except Exception as error:  # noqa: BLE001 - the report names it
            notes[name] = reason(error)
        else:
            notes[name] = "" if same else "wrong: other bits than the reference's"
    times = time_interleaved(
        {name: case[0] for name, case in cases.items() if not notes[name]}, timer, effort.reps, effort.budget_s
    )
    return [_move(name, case[1], times, x.numel(), notes[name]) for name, case in cases.items()]


def _same(got: torch.Tensor | MXFP8Tensor, expected: torch.Tensor | MXFP8Tensor, rows: int) -> bool:
    """Whether the first rows have the same bits."""
    if isinstance(got, MXFP8Tensor) and isinstance(expected, MXFP8Tensor):
        pairs = [(got.data, expected.data), (got.scale_bytes, expected.scale_bytes)]
    elif isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor):
        pairs = [(got, expected)]
    else:
        return False
    return all(
        torch.equal(
            ours.reshape(-1, ours.shape[-1])[:rows].contiguous().view(torch.uint8).cpu(), theirs.view(torch.uint8)
        )
        for ours, theirs in pairs
    )


def _move(name: str, per_element: float, times: dict[str, Spread], elements: int, note: str) -> Move:
    if name not in times:
        return Move(name, per_element, None, None, None, note)
    gbps = 1e-6 * per_element * elements / times[name].median
    copy_gbps = 1e-6 * 4.0 * elements / times["copy"].median if "copy" in times else None
    return Move(name, per_element, times[name], gbps, gbps / copy_gbps if copy_gbps else None, note)
