"""The specification in plain torch: what every kernel must give, bit for bit for quantize and fold.

CPU tensors run this. It is written to be read; docs/numerics.md explains the rules and derives their bounds.
Arguments are checked by the public functions, not here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mxfp8_cutlass.checks import row_ends
from mxfp8_cutlass.mxfp8_tensor import BLOCK, RUN, SCALE_NAN, TILE_ROWS, MXFP8Tensor

BIAS = 127
NAN_BYTE = 0x7F
"""The FP8 NaN that quantize and fold write: what cvt.satfinite gives for any NaN, in both types."""

NO_SCALE_YET = -1000
"""Below every shared scale: stands for a block, run or row without a finite element other than zero."""


@dataclass(frozen=True)
class FP8Format:
    """The facts about an FP8 type that scale rules need."""

    dmax: float
    emax: int
    first_nonfinite: int
    """Smallest byte, sign cleared, that is Inf or NaN."""
    tile_limit: int
    """Largest difference of row scales within a tile that has one scale."""


FORMATS = {
    torch.float8_e4m3fn: FP8Format(dmax=448.0, emax=8, first_nonfinite=0x7F, tile_limit=8),
    torch.float8_e5m2: FP8Format(dmax=57344.0, emax=15, first_nonfinite=0x7C, tile_limit=22),
}


def by_block(x: torch.Tensor) -> torch.Tensor:
    """(..., K) -> (..., K // 32, 32), a view."""
    return x.view(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent in float32, exact for integers in [-127, 127]; made from bits, since exp2 may round."""
    exponent = exponent.to(torch.int32)
    bits = torch.where(exponent > -BIAS, (exponent + BIAS) << 23, 1 << 22)
    return bits.view(torch.float32)


def scale_from_amax(amax: torch.Tensor, dtype: torch.dtype, scaling: str) -> torch.Tensor:
    """E8M0 bytes (int32) for float32 block maxima. NaN and Inf give 255."""
    fmt = FORMATS[dtype]
    if scaling == "rceil":
        bits = (amax * torch.tensor(1.0 / fmt.dmax, dtype=torch.float32, device=amax.device)).view(torch.int32)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        # Byte 0 is 2^-127, the middle of float32's subnormals: those up to it need no rounding up.
        byte = exponent + torch.where(exponent > 0, mantissa > 0, mantissa > 0x400000)
    elif scaling == "floor":
        byte = ((amax.view(torch.int32) >> 23) - fmt.emax).clamp(min=0)
    else:
        raise ValueError(f"scaling is {scaling!r}: it must be 'rceil' or 'floor'")
    return torch.where(torch.isfinite(amax), byte, SCALE_NAN)


@torch.no_grad()
def quantize(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, scaling: str = "rceil", *, fold_runs: bool = False
) -> MXFP8Tensor:
    """Elements x * 2**(127 - byte), rounded to nearest even, saturated; a block whose byte is 255 becomes NaN."""
    dmax = FORMATS[dtype].dmax
    blocks = by_block(x.to(torch.float32))
    # Maxima are taken of the bits: float order for finite values, and Inf < NaN.
    amax = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1).view(torch.float32)
    byte = scale_from_amax(amax, dtype, scaling)
    scaled = blocks * power_of_two(BIAS - byte.clamp(max=SCALE_NAN - 1)).unsqueeze(-1)
    data = scaled.clamp(-dmax, dmax).to(dtype).view(torch.uint8)
    data = data.masked_fill((byte == SCALE_NAN).unsqueeze(-1), NAN_BYTE).view(dtype)
    xq = MXFP8Tensor(data.flatten(-2), byte.to(torch.uint8))
    return fold(xq, 1)[0] if fold_runs else xq


@torch.no_grad()
def fold(xq: MXFP8Tensor, rows: int = 1) -> tuple[MXFP8Tensor, dict[str, torch.Tensor]]:
    """Shared scales per run (rows=1) or per 128 x 128 tile where the rows are close enough (rows=128), and statistics.

    Always computes, even if `xq` says that it is folded.
    """
    shared = _run_scales(xq)
    tile_scale = None
    if rows == TILE_ROWS:
        shared, tile_scale = _tile_scales(shared, FORMATS[xq.dtype].tile_limit)
    shared = torch.where(shared == NO_SCALE_YET, BIAS, shared)
    target = shared.repeat_interleave(RUN // BLOCK, dim=-1)[..., : xq.K // BLOCK]
    data, changed = _shift(xq, target)
    folded = MXFP8Tensor(data, target.to(torch.uint8), folded=rows, tile_scale=tile_scale)
    return folded, fold_statistics(folded, changed)


def fold_statistics(folded: MXFP8Tensor, changed: torch.Tensor) -> dict[str, torch.Tensor]:
    """What fold(..., return_stats=True) reports, as 0-dim int64 tensors on the operand's device."""
    runs = folded.data.numel() // folded.K * -(-folded.K // RUN)
    mixed = changed.new_zeros(()) if folded.tile_scale is None else (folded.tile_scale == SCALE_NAN).sum()
    return {"changed_elements": changed, "runs": torch.full_like(changed, runs), "mixed_tiles": mixed}


def _finite(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return magnitude < FORMATS[dtype].first_nonfinite


def _run_scales(xq: MXFP8Tensor) -> torch.Tensor:
    """Per run the smallest byte E in [0, 254] with max |q| * 2**(s - E) <= dmax, as int32 (..., R, ceil(K / 128))."""
    fmt = FORMATS[xq.dtype]
    magnitude = by_block(xq.data.view(torch.uint8) & 0x7F)
    qmax = magnitude.masked_fill(~_finite(magnitude, xq.dtype), 0).amax(-1).view(xq.dtype).to(torch.float32)
    scale = xq.scale_bytes.to(torch.int32)
    # qmax = m * 2^e and dmax = 0.875 * 2^(emax + 1), with m in [0.5, 1).
    m, e = torch.frexp(qmax)
    needed = (scale + e - (fmt.emax + 1) + (m > 0.875)).clamp(min=0)
    needed = torch.where((qmax > 0) & (scale != SCALE_NAN), needed, NO_SCALE_YET)
    per_run = RUN // BLOCK
    needed = torch.nn.functional.pad(needed, (0, -needed.shape[-1] % per_run), value=NO_SCALE_YET)
    return needed.view(*needed.shape[:-1], -(-xq.K // RUN), per_run).amax(-1)


def _tile_scales(row_scales: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row scales with each tile's own where its rows are close enough, and tile_scale (uint8)."""
    *matrices, n_rows, n_runs = row_scales.shape
    padded = torch.nn.functional.pad(row_scales, (0, 0, 0, -n_rows % TILE_ROWS), value=NO_SCALE_YET)
    tiles = padded.view(*matrices, -(-n_rows // TILE_ROWS), TILE_ROWS, n_runs)
    highest = tiles.amax(-2)
    lowest = torch.where(tiles == NO_SCALE_YET, SCALE_NAN, tiles).amin(-2)
    mixed = highest - lowest > limit
    tile_scale = torch.where(mixed, SCALE_NAN, torch.where(highest == NO_SCALE_YET, BIAS, highest))
    tiles = torch.where(mixed.unsqueeze(-2), tiles, tile_scale.unsqueeze(-2))
    return tiles.flatten(-3, -2)[..., :n_rows, :], tile_scale.to(torch.uint8).contiguous()


def _shift(xq: MXFP8Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements for the scale bytes `target` (..., K // 32), and how many changed their value."""
    q = by_block(xq.data)
    scale = xq.scale_bytes.to(torch.int32).unsqueeze(-1)
    # Beyond 64 either way every element is 0 or would have overflowed; within it the product is exact in float32.
    shift = (scale - target.unsqueeze(-1)).clamp(-64, 64)
    value = q.to(torch.float32)
    shifted = (value * power_of_two(shift)).to(xq.dtype)
    is_nan_block = scale == SCALE_NAN
    survives = ~_finite(q.view(torch.uint8) & 0x7F, xq.dtype)
    changed = ((shifted.to(torch.float32) * power_of_two(-shift) != value) & ~survives & ~is_nan_block).sum()
    out = torch.where(survives, q.view(torch.uint8), shifted.view(torch.uint8)).masked_fill(is_nan_block, NAN_BYTE)
    return out.flatten(-2).view(xq.dtype), changed


@torch.no_grad()
def dequantize(xq: MXFP8Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values q * 2**(s - 127): exact in float64, and in float32 unless too large for it; else rounded from float32.

    A NaN scale gives NaN. The bits of a NaN are not specified.
    """
    scale = power_of_two(xq.scale_bytes.to(torch.int32).clamp(max=SCALE_NAN - 1) - BIAS)
    scale = scale.masked_fill(xq.scale_bytes == SCALE_NAN, float("nan")).unsqueeze(-1)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    return (by_block(xq.data.to(work)) * scale.to(work)).flatten(-2).to(dtype)


@torch.no_grad()
def grouped_mm(
    a: MXFP8Tensor,
    b: MXFP8Tensor,
    offs: torch.Tensor | None = None,
    *,
    counts: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """(M, K) x (G, N, K) with offs -> (M, N), or (G, M, K) x (G, N, K) -> (G, M, N); contraction over the last axes.

    With `counts` (G,), only the first counts[g] rows of a[g] are multiplied; values below 0 or above M count as 0 or M.
    Each group's product plus its row of `bias` (G, N), plus the old `out` if `accumulate`, rounded once to out's dtype.
    Rows of no group are left as they are in `out`; without `out` they are zero.

    Raises:
        ValueError: the values of `offs` decrease, are negative or exceed M; `accumulate` without `out`.
    """
    if accumulate and out is None:
        raise ValueError("accumulate is True and out is None: there is nothing to add to")
    n_groups, n = b.shape[0], b.shape[1]
    if out is None:
        out = torch.zeros((*a.shape[:-1], n), dtype=out_dtype, device=a.device)
    for group, rows in enumerate(_group_rows(a, n_groups, offs, counts)):
        lhs, target = _rows_of(a, rows), out[rows]
        rhs = MXFP8Tensor.unchecked(b.data[group], b.scale_bytes[group])
        _write_product(target, lhs, rhs, bias=None if bias is None else bias[group], accumulate=accumulate)
    return out


@torch.no_grad()
def grouped_mm_columnwise(
    a: MXFP8Tensor,
    b: MXFP8Tensor,
    columns: list[int],
    sizes: list[int],
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """(N, C) x (K, C) -> (G, N, K): the product over the `sizes[g]` columns from `columns[g]` on, a multiple of 32.

    Plus the old `out` if `accumulate`, rounded once to out's dtype. A group of no columns gives zeros.
    """
    if out is None:
        out = torch.zeros((len(sizes), a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    for target, first, size in zip(out, columns, sizes, strict=True):
        if size == 0:
            if not accumulate:
                target.zero_()
            continue
        blocks = slice(first // BLOCK, -(-(first + size) // BLOCK))
        elements = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
        lhs, rhs = (MXFP8Tensor.unchecked(x.data[:, elements], x.scale_bytes[:, blocks]) for x in (a, b))
        _write_product(target, lhs, rhs, accumulate=accumulate)
    return out


def _write_product(
    target: torch.Tensor, lhs: MXFP8Tensor, rhs: MXFP8Tensor, *, bias: torch.Tensor | None = None, accumulate: bool
) -> None:
    """Write (M, K) x (N, K), plus `bias` (N,), plus the old `target` if `accumulate`, rounded once."""
    work = torch.float32 if _fits_float32(lhs) and _fits_float32(rhs) else torch.float64
    product = dequantize(lhs, work) @ dequantize(rhs, work).mT
    if bias is not None:
        product += bias.to(work)
    if accumulate:
        product += target.to(work)
    target.copy_(product)


def _fits_float32(xq: MXFP8Tensor) -> bool:
    """Whether float32 holds every value as a normal number: BLAS libraries may flush subnormals, and Inf is final."""
    byte = xq.scale_bytes
    return not bool((((byte < 16) | (byte > 238)) & (byte != SCALE_NAN)).any())


def _group_rows(
    a: MXFP8Tensor, n_groups: int, offs: torch.Tensor | None, counts: torch.Tensor | None
) -> list[slice | tuple[int, slice]]:
    """The index of each group's rows."""
    if a.ndim == 3:
        used = [a.shape[1]] * n_groups if counts is None else counts.clamp(0, a.shape[1]).tolist()
        return [(group, slice(count)) for group, count in enumerate(used)]
    if offs is None:
        raise ValueError("offs is None: a 2D first operand needs the end row of each group")
    ends = row_ends(offs, a.shape[0])
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _rows_of(a: MXFP8Tensor, rows: slice | tuple[int, slice]) -> MXFP8Tensor:
    return MXFP8Tensor.unchecked(a.data[rows], a.scale_bytes[rows])
