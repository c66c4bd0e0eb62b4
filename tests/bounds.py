"""What a grouped product must give: a float64 product of the exact MXFP8 values, and how far from it a result may lie.

The product y = sum of a b over K is exact to 2^-52 here, so every difference is the kernel's. With M = sum of |a| |b|:

1. *Tensor cores.* Within one chain of FP8 MMAs (a promotion run r: 128 or 32 of K) Hopper aligns the products of 32 of
   K, and the sum so far, to the largest exponent among them, and cuts each off 13 bits below its leading one. So each
   of the 33 addends of a step loses up to 2^-13 of the largest, towards zero. No data come near to the worst case, 33 x
   2^-13 x M a step: most addends have fewer bits than are cut off. On data of one sign losses add up, so they are
   measured against M. On data of both signs they add up like noise, within a run and between runs; they are measured
   against D = sqrt(sum over runs of |a_r|^2 |b_r|^2) (Euclidean norms), which bounds a run's products and sums alike.
   `hopper_chain` emulates it (and reproduces the bias that was measured on positive data: -6e-4 for runs of 128).
   `TRUNCATION` has factors for 2^-13 x M or D, for a single element and for the root mean square of a row, each at
   least twice what the emulation gives over Gaussian, log-normal and random-bit data (tests/unit/test_bounds.py).
2. *Promotion.* Scales are powers of two, so scaling is exact, but where a result is subnormal; each of the
   ceil(K / promotion) additions in FP32 errs by 2^-24 of a partial sum, none of which exceeds M; so do bias and old
   output. A product of a partial sum and a scale below FP32's least number loses up to 2^-149.
3. *CPU reference.* An FP32 product in any order of summation: K x 2^-24 x M, less than 1% of it for second order terms.
4. *Rounding to the output* is monotone, so it needs no bound of its own: if x lies in [y - e, y + e], the result lies
   in [rn(y - e), rn(y + e)], half-way cases, subnormals and overflow included. (In numbers: up to 2^-8, 2^-11, 2^-24 of
   the value for bfloat16, float16, float32.)
5. *A row's root mean square* is checked as well, since a wrong block changes a row a little everywhere. Rounding errors
   are about uniform in +-h, h = ulp / 2, so a mean of n squares is below h^2 (1/3 + 2 / sqrt(n)), which is 6 sigma;
   where h differs within the row, n is (sum of h^2)^2 / sum of h^4.
6. *Overflow on the way.* Where M exceeds FP32's range, a sum of both signs may be Inf or NaN although y is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor
from mxfp8_cutlass.quantize import fold

TRUNCATION = {  # (promotion, whether all products have one sign): factors for an element, for a row's RMS
    (128, False): (8.0, 1.2),  # of 2^-13 D
    (32, False): (8.0, 1.2),
    (128, True): (66.0, 30.0),  # of 2^-13 M
    (32, True): (24.0, 6.0),
}
PRECISION = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
LEAST_EXPONENT = {torch.bfloat16: -126, torch.float16: -14, torch.float32: -126}
FLOAT32_MAX = torch.finfo(torch.float32).max
HALF_ETA = {torch.float8_e4m3fn: 2.0**-10, torch.float8_e5m2: 2.0**-17}  # half the spacing of subnormals


def powers_of_two(device: torch.device) -> torch.Tensor:
    """2**(byte - 127) for each E8M0 byte, in float64."""
    return torch.tensor([math.ldexp(1.0, byte - 127) for byte in range(255)] + [math.nan], device=device).double()


def values(xq: MXFP8Tensor) -> torch.Tensor:
    """The exact values in float64."""
    return xq.data.double() * powers_of_two(xq.device)[xq.scale_bytes.long()].repeat_interleave(32, -1)


@dataclass(frozen=True)
class Expected:
    """y, and what the result before rounding may differ from it: an element, and a row's root mean square."""

    product: torch.Tensor
    magnitude: torch.Tensor
    slack: torch.Tensor
    row_slack: torch.Tensor


def expect(a, b, promotion_k, *, bias=None, old=None, positive=False, extra=None) -> Expected:
    """The product of float64 matrices a (m, K) and b (N, K). promotion_k None: the CPU reference's."""
    product, magnitude = a @ b.mT, a.abs() @ b.abs().mT
    for addend in (bias, old):
        if addend is not None:
            product, magnitude = product + addend.double(), magnitude + addend.double().abs()
    k = a.shape[-1]
    if promotion_k is None:
        slack = 1.01 * (k + 2) * 2.0**-24 * magnitude
        row_slack = slack
    else:
        additions = -(-k // promotion_k)
        rounding = 1.01 * (additions + 2) * 2.0**-24 * magnitude
        rounding = torch.where(magnitude > 0, rounding + additions * 2.0**-149, rounding)
        element, row = TRUNCATION[promotion_k, positive]
        unit = 2.0**-13 * loss_measure(a, b, promotion_k, positive=positive)
        slack, row_slack = rounding + element * unit, rounding + row * unit
    if extra is not None:
        slack, row_slack = slack + extra, row_slack + extra
    return Expected(product, magnitude, slack, row_slack)


def loss_measure(a: torch.Tensor, b: torch.Tensor, promotion_k: int, *, positive: bool) -> torch.Tensor:
    """M, or for data of both signs D."""
    if positive:
        return a.abs() @ b.abs().mT

    def squared_norms(x):
        padded = torch.nn.functional.pad(x, (0, -x.shape[1] % promotion_k))
        return padded.view(len(x), padded.shape[1] // promotion_k, promotion_k).square().sum(-1)

    return (squared_norms(a) @ squared_norms(b).mT).sqrt()


def half_ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the spacing of dtype's numbers around x (float64)."""
    exponent = (torch.frexp(x)[1] - 1).clamp(min=LEAST_EXPONENT[dtype])
    return torch.ldexp(torch.ones_like(x), exponent - PRECISION[dtype])


def check(got: torch.Tensor, expected: Expected, where: str = "") -> None:
    """Raise AssertionError unless every element and every row of `got` (m, N) is within its bound."""
    assert got.shape == expected.product.shape, f"{where}: shape {tuple(got.shape)}"
    y, slack, dtype = expected.product, expected.slack, got.dtype
    if not y.numel():
        return
    finite = torch.isfinite(expected.magnitude)
    low, high = (y - slack).to(dtype), (y + slack).to(dtype)
    fine = torch.where(finite, (low <= got) & (got <= high), (got.double() == y) | (got.isnan() & y.isnan()))
    mixed = (expected.magnitude > FLOAT32_MAX) & (y.abs() < expected.magnitude)
    fine |= finite & mixed & ~torch.isfinite(got)
    if not bool(fine.all()):
        row, column = (int(i) for i in (~fine).nonzero()[0])
        raise AssertionError(
            f"{where}: {int((~fine).sum())} of {fine.numel()} elements are wrong, {int((~fine).any(1).sum())} rows; "
            f"the first is [{row}, {column}]: {got[row, column].item()!r}, not in [{low[row, column].item()!r}, "
            f"{high[row, column].item()!r}], exactly {y[row, column].item()!r}"
        )
    ordinary = finite & torch.isfinite(got)
    error = (got.double() - y).where(ordinary, 0.0)
    rounding = half_ulp(got.double().where(ordinary, 0.0), dtype).where(ordinary & (expected.magnitude > 0), 0.0)
    allowed = _rms_of_rounding(rounding) + _root_mean_square(expected.row_slack.where(ordinary, 0.0))
    rms = _root_mean_square(error)
    if not bool((rms <= allowed).all()):
        row = int((rms > allowed).nonzero()[0])
        raise AssertionError(
            f"{where}: {int((rms > allowed).sum())} of {len(rms)} rows are wrong; the first is {row}: root mean square "
            f"error {rms[row].item():.3e}, allowed {allowed[row].item():.3e}"
        )


def _root_mean_square(x: torch.Tensor) -> torch.Tensor:
    """Of each row, without overflow."""
    largest = x.abs().amax(1).clamp(min=1e-300)
    return (x / largest[:, None]).square().mean(1).sqrt() * largest


def _rms_of_rounding(half: torch.Tensor) -> torch.Tensor:
    relative = (half / half.amax(1, keepdim=True).clamp(min=1e-300)).square()
    n = relative.sum(1).square() / relative.square().sum(1).clamp(min=1e-300)
    return _root_mean_square(half) * (1 / 3 + 2 / n.clamp(min=1).sqrt()).clamp(max=1.0).sqrt()


def as_run(a: MXFP8Tensor, b: MXFP8Tensor, *, exact: bool, sfb_rows: int | None = None):
    """The operands that the kernel multiplies, and its promotion interval; on the CPU, None."""
    if a.device.type == "cpu":
        return a, b, None
    if exact:
        return a, b, 32
    return fold(a), fold(b, sfb_rows or (1 if b.folded == 1 else 128)), 128


def fold_bound(x: MXFP8Tensor, folded: MXFP8Tensor) -> torch.Tensor:
    """How far each element of `folded` may be from x's: half a subnormal's spacing if it changed, else nothing."""
    before, after = values(x), values(folded)
    bound = powers_of_two(x.device)[folded.scale_bytes.long()].repeat_interleave(32, -1) * HALF_ETA[x.dtype]
    bound = bound.where(before != after, 0.0)
    bad = ((after - before).abs() > bound) & torch.isfinite(before)
    assert not bool(bad.any()), "folding changed an element by more than half a subnormal's spacing"
    return bound


def groups_of(a: MXFP8Tensor, b: MXFP8Tensor, ends: list[int] | None, counts: list[int] | None = None):
    """(group, index of its rows in a and out) of a product; ends: the end row of each group; counts: rows of a[g]."""
    if counts is not None:
        return [(g, (g, slice(count))) for g, count in enumerate(counts)]
    if ends is None:
        return [(g, g) for g in range(b.shape[0])]
    return [(g, slice(begin, end)) for g, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))]


def check_product(
    got, a, b, ends, *, counts=None, exact=False, bias=None, old=None, positive=False, sfb_rows=None, where=""
):
    """Check grouped_mm's result: against the operands that its kernel multiplied, and against the operands given.

    Returns the number of rows checked.
    """
    run_a, run_b, promotion_k = as_run(a, b, exact=exact, sfb_rows=sfb_rows)
    folded = run_a is not a or run_b is not b
    values_a, values_b = values(run_a), values(run_b)
    if folded:
        given_a, given_b, change_a, change_b = values(a), values(b), fold_bound(a, run_a), fold_bound(b, run_b)
    rows = 0
    for g, index in groups_of(a, b, ends, counts):
        more = {"bias": None if bias is None else bias[g], "old": None if old is None else old[index]}
        name = f"{where} group {g}"
        check(got[index], expect(values_a[index], values_b[g], promotion_k, positive=positive, **more), name)
        if folded:
            # |a'b' - ab| <= |a' - a| |b| + |a'| |b' - b|, a' and b' being folded.
            extra = change_a[index] @ given_b[g].abs().mT + values_a[index].abs() @ change_b[g].mT
            loose = expect(given_a[index], given_b[g], promotion_k, positive=positive, extra=extra, **more)
            check(got[index], loose, f"{name}, before folding")
        rows += got[index].shape[0]
    return rows


def hopper_chain(a: torch.Tensor, b: torch.Tensor, promotion_k: int) -> torch.Tensor:
    """Products of FP8 values (float64 matrices) as Hopper's tensor cores sum them; promotions are exact."""
    total = torch.zeros((a.shape[0], b.shape[0]), dtype=torch.float64)
    for first in range(0, a.shape[1], promotion_k):
        chain = torch.zeros_like(total)
        for k in range(first, min(first + promotion_k, a.shape[1]), 32):
            x, y = a[:, None, k : k + 32], b[None, :, k : k + 32]
            addends = torch.cat([x * y, chain[..., None]], -1)
            # The exponent of a product is the sum of its factors', before the mantissas' product is normalised.
            exponents = torch.cat([torch.frexp(x)[1] + torch.frexp(y)[1] - 2, torch.frexp(chain[..., None])[1] - 1], -1)
            highest = exponents.where(addends != 0, -900).amax(-1, keepdim=True)
            unit = torch.ldexp(torch.ones_like(addends[..., :1]), highest - 13)
            chain = (torch.trunc(addends / unit) * unit).sum(-1)
        total += chain
    return total
