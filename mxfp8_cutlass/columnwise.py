"""Quantizing along the tokens of groups, and along both axes at once: the public functions.

CPU tensors are gathered and transposed by torch, CUDA tensors read once by one kernel. Nothing is copied to the host.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

import torch

from mxfp8_cutlass import env
from mxfp8_cutlass.checks import MAX_ROWS, check_aligned, row_ends
from mxfp8_cutlass.columns import ColumnwiseMXFP8, check_offs, transposed_groups
from mxfp8_cutlass.group_sums import group_sums
from mxfp8_cutlass.mxfp8_tensor import BLOCK, TILE_ROWS, MXFP8Tensor, check_blocked
from mxfp8_cutlass.quantize import check_quantizer, fold, quantize
from mxfp8_cutlass.quantize_tiles import quantize_tiles

FEATURES = 16
"""Features of a column-wise operand come in multiples of as many: rows of products, and 16-byte accesses."""


class Directions(NamedTuple):
    """The results of quantize_both."""

    rowwise: MXFP8Tensor
    columnwise: MXFP8Tensor | ColumnwiseMXFP8
    bias_grad: torch.Tensor | None


class Parts(NamedTuple):
    """The results of both_directions: None for what was not asked for."""

    rowwise: MXFP8Tensor | None
    columnwise: MXFP8Tensor | ColumnwiseMXFP8 | None
    bias_grad: torch.Tensor | None


def quantize_columnwise(
    x: torch.Tensor,
    offs: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scaling: Literal["rceil", "floor"] = "rceil",
    *,
    fold_rows: int = 0,
) -> ColumnwiseMXFP8:
    """Quantize tokens in blocks along the tokens of each group, transposed: an operand of weight gradients.

    Blocks start at each group's first token. Rows of no group are not used.

    Args:
        x: bfloat16, float16 or float32, (tokens, features), contiguous, features a positive multiple of 16.
        offs: int32 or int64 (G,): the end row of each group; not decreasing, at most `tokens`. The values are checked
            on the CPU, and on CUDA only if MXFP8_CUTLASS_CHECK=1.
        dtype: as of `quantize`.
        scaling: as of `quantize`.
        fold_rows: 0, or 1 or 128, as `fold` with as many `rows` would: 1 for the first operand of a product, and 128
            for the second, are what Hopper's kernels need.

    Raises:
        TypeError: an argument is of another type or dtype than listed above.
        ValueError: a shape, layout, alignment (16 bytes on CUDA), device or value breaks a rule above.
    """
    parts = both_directions(x, offs, dtype, scaling, rowwise=None, columnwise=fold_rows)
    return cast("ColumnwiseMXFP8", parts.columnwise)


def quantize_both(
    x: torch.Tensor,
    offs: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scaling: Literal["rceil", "floor"] = "rceil",
    *,
    fold_rows: int = 0,
    columnwise_fold_rows: int = 0,
    bias_grad: bool = False,
    bias_scale: torch.Tensor | None = None,
) -> Directions:
    """Quantize along both axes: `quantize(x)`, and `quantize_columnwise(x, offs)` or `quantize(x, dim=-2)`.

    Args:
        x: with offs: (tokens, features) as for `quantize_columnwise`, features a multiple of 32. Without: (R, K) or
            (G, R, K), R and K multiples of 32.
        offs: the end row of each group, or None for matrices, such as weights.
        dtype: as of `quantize`.
        scaling: as of `quantize`.
        fold_rows: 0, 1 or 128: how far the row-wise operand is folded.
        columnwise_fold_rows: the same for the column-wise one.
        bias_grad: with offs: whether to sum each group's rows, in float32 and in a fixed order.
        bias_scale: floating, (tokens,): factors of the rows in that sum.

    Returns:
        (rowwise, columnwise, bias_grad): an MXFP8Tensor of x's shape; a ColumnwiseMXFP8, or without offs an MXFP8Tensor
        with the last two axes swapped; the sums, float32 (G, features), or None.

    Raises:
        TypeError: an argument is of another type or dtype than listed above.
        ValueError: a shape, layout, alignment (16 bytes on CUDA), device or value breaks a rule above.
    """
    parts = both_directions(
        x,
        offs,
        dtype,
        scaling,
        rowwise=fold_rows,
        columnwise=columnwise_fold_rows,
        bias_grad=bias_grad,
        bias_scale=bias_scale,
    )
    return Directions(cast("MXFP8Tensor", parts.rowwise), cast("ColumnwiseMXFP8", parts.columnwise), parts.bias_grad)


@torch.no_grad()
def both_directions(
    x: torch.Tensor,
    offs: torch.Tensor | None,
    dtype: torch.dtype,
    scaling: Literal["rceil", "floor"],
    *,
    rowwise: int | None,
    columnwise: int | None,
    bias_grad: bool = False,
    bias_scale: torch.Tensor | None = None,
) -> Parts:
    """Any of the three results, each by its rows to fold, or None to leave it out."""
    _check(x, offs, dtype, scaling, rowwise, columnwise, bias_scale, bias_grad=bias_grad)
    if x.numel() and _on_cuda(x):
        return _by_kernel(x, offs, dtype, scaling, rowwise, columnwise, bias_scale, bias_grad=bias_grad)
    row_part = None if rowwise is None else _folded(quantize(x, dtype, scaling, fold=rowwise == 1), rowwise)
    column_part: MXFP8Tensor | ColumnwiseMXFP8 | None = None
    if columnwise is not None:
        turned = x.mT.contiguous() if offs is None else transposed_groups(x, offs)
        turned_part = _folded(quantize(turned, dtype, scaling, fold=columnwise == 1), columnwise)
        column_part = turned_part if offs is None else ColumnwiseMXFP8(turned_part, offs, x.shape[0])
    sums = group_sums(x, offs, bias_scale) if bias_grad and offs is not None else None
    return Parts(row_part, column_part, sums)


def _by_kernel(
    x: torch.Tensor,
    offs: torch.Tensor | None,
    dtype: torch.dtype,
    scaling: Literal["rceil", "floor"],
    rowwise: int | None,
    columnwise: int | None,
    bias_scale: torch.Tensor | None,
    *,
    bias_grad: bool,
) -> Parts:
    if columnwise is None and not bias_grad and rowwise != TILE_ROWS:  # the simpler kernel has less to do
        return Parts(None if rowwise is None else quantize(x, dtype, scaling, fold=rowwise == 1), None, None)
    # Tiles of the tile form begin at multiples of 128 rows, which groups do not.
    folded_later = rowwise == TILE_ROWS and offs is not None
    results = quantize_tiles(
        x,
        offs,
        dtype,
        scaling,
        features_fold=0 if folded_later else rowwise,
        tokens_fold=columnwise,
        sums=bias_grad,
        factors=bias_scale,
    )
    rows, columns = results.along_features, results.along_tokens
    if rows is not None and folded_later:
        rows = fold(rows, TILE_ROWS)
    if columns is None or offs is None:
        return Parts(rows, columns, results.sums)
    return Parts(rows, ColumnwiseMXFP8(columns, offs, x.shape[0]), results.sums)


def _on_cuda(x: torch.Tensor) -> bool:
    return x.is_cuda


def _folded(xq: MXFP8Tensor, rows: int) -> MXFP8Tensor:
    return fold(xq, rows) if rows else xq


def _check(
    x: torch.Tensor,
    offs: torch.Tensor | None,
    dtype: torch.dtype,
    scaling: str,
    rowwise: int | None,
    columnwise: int | None,
    bias_scale: torch.Tensor | None,
    *,
    bias_grad: bool,
) -> None:
    check_quantizer(x, dtype, scaling)
    for name, rows in (("fold_rows", rowwise), ("columnwise_fold_rows", columnwise)):
        if rows is not None and (isinstance(rows, bool) or rows not in (0, 1, TILE_ROWS)):
            raise ValueError(f"{name} is {rows!r}: it must be 0, 1 or 128")
    if not x.is_contiguous():
        raise ValueError(f"x has shape {tuple(x.shape)} and strides {tuple(x.stride())}: it must be contiguous")
    check_aligned("x", x)
    if offs is None:
        if bias_grad:
            raise ValueError("bias_grad is True and offs is None: there are no groups to sum over")
        if x.ndim not in (2, 3) or x.shape[-2] == 0 or x.shape[-2] % BLOCK:
            raise ValueError(f"x has shape {tuple(x.shape)}: (R, K) or (G, R, K), R a positive multiple of 32")
    else:
        check_offs(offs, "x", x.device)
        if x.ndim != 2 or x.shape[1] == 0 or x.shape[1] % FEATURES:
            raise ValueError(f"x has shape {tuple(x.shape)}: (tokens, features), features a positive multiple of 16")
        if not x.is_cuda or env.check():
            row_ends(offs, x.shape[0])
    if offs is None or rowwise is not None:
        check_blocked("x", x)
    if x.shape[-2] > MAX_ROWS:
        raise ValueError(f"x has shape {tuple(x.shape)}: it must have at most {MAX_ROWS} rows")
    if bias_scale is not None:
        check_row_factors("bias_scale", bias_scale, x)
        if not bias_grad:
            raise ValueError("bias_scale is given and bias_grad is False: it goes with the sums alone")


def check_row_factors(name: str, factors: torch.Tensor, x: torch.Tensor) -> None:
    """Raise unless there is a number for each row of x."""
    if not isinstance(factors, torch.Tensor):
        raise TypeError(f"{name} is a {type(factors).__name__}: it must be a torch.Tensor")
    if not factors.is_floating_point():
        raise TypeError(f"{name} has dtype {factors.dtype}: it must be floating")
    if tuple(factors.shape) != (x.shape[0],):
        raise ValueError(f"{name} has shape {tuple(factors.shape)}: it must be ({x.shape[0]},), one for each row")
    if factors.device != x.device:
        raise ValueError(f"{name} is on {factors.device}: it must be on the device of the rows, {x.device}")
