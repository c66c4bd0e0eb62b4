"""Whether a method computes what it says: sampled rows of several groups against float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mxfp8_cutlass.bench.methods import Method
from mxfp8_cutlass.bench.operands import Operands

ROWS = 32


@dataclass(frozen=True)
class Accuracy:
    """Relative errors (Euclidean norms); NaN if the result has NaN or Inf."""

    error: float
    """Of all sampled rows together."""
    worst_row: float
    rows: int
    groups: int


def sampled_groups(sizes: tuple[int, ...]) -> list[int]:
    """The first, the middle and the last group that has rows, the largest and the smallest."""
    busy = [group for group, size in enumerate(sizes) if size]
    if not busy:
        return []
    picked = {
        busy[0],
        busy[len(busy) // 2],
        busy[-1],
        max(busy, key=sizes.__getitem__),
        min(busy, key=sizes.__getitem__),
    }
    return sorted(picked)


def sampled_rows(start: int, size: int) -> list[int]:
    """Up to 32 of a group's rows, evenly spaced, with the first and the last."""
    count = min(size, ROWS)
    return [start + (i * (size - 1) // (count - 1) if count > 1 else 0) for i in range(count)]


def accuracy(method: Method, x: Operands) -> Accuracy:
    """Run a method once more, over a result of NaN, and compare."""
    if method.out is not None:
        method.out.fill_(torch.nan)
    out = method.run()
    out = out.reshape(-1, out.shape[-1])
    difference = total = worst = torch.zeros((), dtype=torch.float64, device=out.device)
    count, groups = 0, sampled_groups(x.sizes)
    for group in groups:
        rows = torch.tensor(sampled_rows(x.starts[group], x.sizes[group]), device=out.device)
        expected = method.a(rows) @ method.b(group).mT
        got = out[rows if method.place is None else method.place[rows]].double()
        row_errors, row_norms = (got - expected).norm(dim=1), expected.norm(dim=1)
        worst = torch.maximum(worst, (row_errors / row_norms).max())
        difference, total = difference + row_errors.square().sum(), total + row_norms.square().sum()
        count += len(rows)
    return Accuracy(float((difference / total).sqrt()), float(worst), count, len(groups))
