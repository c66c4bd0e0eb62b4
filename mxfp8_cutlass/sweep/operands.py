"""A problem's tensors, a call that takes any kernel, and what its result must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

from mxfp8_cutlass import grouped_gemm, grouped_mm
from mxfp8_cutlass.bench.check import sampled_groups, sampled_rows
from mxfp8_cutlass.bench.methods import ROW_TOLERANCE
from mxfp8_cutlass.bench.operands import expert_values, values
from mxfp8_cutlass.bench.workloads import MASKED_ROWS
from mxfp8_cutlass.generator.config_space import GroupedGemmConfig
from mxfp8_cutlass.mxfp8_tensor import BLOCK, DTYPE_NAMES, RUN, MXFP8Tensor
from mxfp8_cutlass.quantize import fold, quantize
from mxfp8_cutlass.sweep.problems import Facts, Problem

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Sample:
    """Some rows of a result, and the float64 product of the exact values."""

    out: torch.Tensor
    rows: torch.Tensor
    expected: torch.Tensor


@dataclass(frozen=True)
class Prepared:
    """A problem on the device, folded as its kernels need it."""

    run: Callable[[GroupedGemmConfig], object]
    """Computes into `outs`."""
    outs: list[torch.Tensor]
    """(rows, N) each."""
    samples: list[Sample]
    written: torch.Tensor | None = None
    """The rows of the only result that are to be written, if not all are."""


class WrongResultError(Exception):
    """A kernel computes something else."""


def prepare(problem: Problem, facts: Facts, device: torch.device, seed: int = 0) -> Prepared:
    """Draw Gaussian operands, quantize, fold, and multiply sampled rows in float64."""
    generator = torch.Generator(device).manual_seed(seed)
    return (_list if problem.layout == "list" else _stack)(problem, facts, generator)


def worst_row(x: Prepared, config: GroupedGemmConfig) -> float:
    """Run a kernel over results of NaN. Returns the largest relative error of a sampled row (Euclidean norms).

    Raises:
        WrongResultError: it is larger than rounding can be, or an element is not finite, or one of no group is written.
    """
    for out in x.outs:
        out.fill_(torch.nan)
    x.run(config)
    live = x.outs if x.written is None else [x.outs[0][x.written]]
    unfinished = sum(int((~torch.isfinite(out)).sum()) for out in live)
    if unfinished:
        raise WrongResultError(f"wrong: {unfinished} elements were not written or are not finite")
    stray = sum(int((~out.isnan()).sum()) for out in x.outs) - sum(out.numel() for out in live)
    if stray:
        raise WrongResultError(f"wrong: {stray} elements of no group were written")
    worst = 0.0
    for sample in x.samples:
        errors = (sample.out[sample.rows].double() - sample.expected).norm(dim=1) / sample.expected.norm(dim=1)
        worst = max(worst, float(errors.max()))
    if worst > ROW_TOLERANCE:
        raise WrongResultError(f"wrong: a row is off by {worst:.1e}, at most {ROW_TOLERANCE:.0e} is rounding")
    return worst


def _stack(problem: Problem, facts: Facts, generator: torch.Generator) -> Prepared:
    rows = [m for m, _, _ in problem.sizes]
    masked = problem.layout == "masked"
    rooms = [-(-max(rows) // MASKED_ROWS) * MASKED_ROWS] * len(rows) if masked else rows
    starts = list(accumulate(rooms, initial=0))
    _, n, k = problem.sizes[0]
    device = generator.device
    x = _gaussian(starts[-1], k, 1.0, generator)
    for start, m, room in zip(starts, rows, rooms, strict=False):
        x[start + m : start + room] = torch.nan  # nothing may come of rows that are no group's
    stack = (len(rows), rooms[0])
    # Quantized in its final shape: the kernels' layout of scales is made with it.
    xq = _quantized(x.view(*stack, k) if masked else x, str(facts["element_a"]), facts, 1)
    flat = MXFP8Tensor(xq.data.view(-1, k), xq.scale_bytes.view(-1, k // BLOCK))
    data = torch.empty(len(rows), n, k, dtype=torch.uint8, device=device)
    scale = torch.empty(len(rows), n, k // BLOCK, dtype=torch.uint8, device=device)
    dtype = DTYPES[str(facts["element_b"])]
    for group in range(len(rows)):
        expert = quantize(_gaussian(n, k, 0.05, generator), dtype)
        data[group] = expert.data.view(torch.uint8)
        scale[group] = expert.scale_bytes
    wq = _folded(MXFP8Tensor(data.view(dtype), scale), facts, int(facts["sfb_rows"]))
    out = torch.empty(starts[-1], n, dtype=DTYPES[str(facts["out"])], device=device)
    samples = []
    for group in sampled_groups(tuple(rows)):
        picked = torch.tensor(sampled_rows(starts[group], rows[group]), device=device)
        samples.append(Sample(out, picked, values(flat, picked) @ expert_values(wq, group).mT))
    exact = facts["promotion_k"] != RUN
    if not masked:
        offs = torch.tensor(starts[1:], dtype=torch.int32, device=device)
        return Prepared(lambda config: grouped_mm(xq, wq, offs, out=out, exact=exact, config=config), [out], samples)
    counts, m = torch.tensor(rows, dtype=torch.int32, device=device), problem.expected_m
    written = torch.cat([torch.arange(start, start + m) for start, m in zip(starts, rows, strict=False)]).to(device)
    return Prepared(
        lambda config: grouped_mm(
            xq, wq, counts=counts, expected_m=m, out=out.view(*stack, n), exact=exact, config=config
        ),
        [out],
        samples,
        written,
    )


def _list(problem: Problem, facts: Facts, generator: torch.Generator) -> Prepared:
    device = generator.device
    pairs, outs = [], []
    for m, n, k in problem.sizes:
        a = _quantized(_gaussian(m, k, 1.0, generator), str(facts["element_a"]), facts, 1)
        b = _quantized(_gaussian(n, k, 0.05, generator), str(facts["element_b"]), facts, int(facts["sfb_rows"]))
        pairs.append((a, b))
        outs.append(torch.empty(m, n, dtype=DTYPES[str(facts["out"])], device=device))
    samples = []
    for group in sampled_groups(tuple(m for m, _, _ in problem.sizes)):
        a, b = pairs[group]
        picked = torch.tensor(sampled_rows(0, a.shape[0]), device=device)
        samples.append(Sample(outs[group], picked, values(a, picked) @ b.dequantize(torch.float64).mT))
    exact = facts["promotion_k"] != RUN
    return Prepared(lambda config: grouped_gemm(pairs, outs=outs, exact=exact, config=config), outs, samples)


def _gaussian(rows: int, columns: int, deviation: float, generator: torch.Generator) -> torch.Tensor:
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=generator.device)
    return x.normal_(0.0, deviation, generator=generator)


def _quantized(x: torch.Tensor, element: str, facts: Facts, rows: int) -> MXFP8Tensor:
    return _folded(quantize(x, DTYPES[element]), facts, rows)


def _folded(xq: MXFP8Tensor, facts: Facts, rows: int) -> MXFP8Tensor:
    return fold(xq, rows) if facts["promotion_k"] == RUN else xq
