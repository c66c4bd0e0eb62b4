"""grouped_linear as torch operators: tensors and plain values in, tensors out, none of them a view of another.

FP8 bytes travel as uint8, which no gradient flows to. What is not asked for is an empty tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch.library import custom_op

from mxfp8_cutlass.columns import ColumnwiseMXFP8, column_capacity
from mxfp8_cutlass.columns_mm import grouped_mm_columnwise
from mxfp8_cutlass.columnwise import both_directions
from mxfp8_cutlass.group_sums import add_scaled_bias
from mxfp8_cutlass.group_sums import bias_scale_grad as scale_grad
from mxfp8_cutlass.grouped_mm import grouped_mm
from mxfp8_cutlass.grouped_mxfp8 import GroupedMXFP8, dequantize_rowwise, prepare_rowwise, requantize_columnwise
from mxfp8_cutlass.high_precision import grouped_mm_of_rows
from mxfp8_cutlass.mxfp8_tensor import BLOCK, RUN, TILE_ROWS, MXFP8Tensor
from mxfp8_cutlass.operands import folds_for
from mxfp8_cutlass.weight_cache import Scaling, quantized_weight

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A column-wise operand: elements, scales, tile scales (empty unless folded to tiles)."""


@custom_op("mxfp8_cutlass::grouped_linear", mutates_args=())
def forward(
    x: torch.Tensor,
    x_data: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    bias_scale: torch.Tensor | None,
    main_grad: torch.Tensor | None,
    swizzled: bool,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    scaling: str,
    wgrad: str,
    save: bool,
    input_grad: bool,
    cache: int,
    queue: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Y, and X as columns where wgrad will need them. x_data and x_scale, if given, stand for x, which is not read.

    save: whether the weight will have a gradient. input_grad: whether x will. main_grad, grad_dtype and queue are
    for the gradients alone.
    """
    rule = cast("Scaling", scaling)
    first, second = folds_for(x.device)
    columns = second if save and wgrad == "mxfp8" and x_data is None else None
    column_part = None
    if x_data is None or x_scale is None:
        parts = both_directions(x, offs, dtype, rule, rowwise=first, columnwise=columns)
        rows, column_part = cast("MXFP8Tensor", parts.rowwise), parts.columnwise
    else:
        arrived = GroupedMXFP8(x_data.view(dtype), x_scale, offs, swizzled=swizzled)
        rows = prepare_rowwise(arrived, dtype)
    quantized = quantized_weight(weight, dtype, rule, transposed=False, both=input_grad, cache=cache)
    added = bias.to(x.dtype).contiguous() if bias is not None and bias_scale is None else None
    y = grouped_mm(rows, quantized, offs, bias=added, out_dtype=x.dtype)
    if bias is not None and bias_scale is not None:
        add_scaled_bias(y, bias, bias_scale, offs)
    return (y, *_parts_of(column_part, x))


@forward.register_fake
def _(
    x: torch.Tensor,
    x_data: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    bias_scale: torch.Tensor | None,
    main_grad: torch.Tensor | None,
    swizzled: bool,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    scaling: str,
    wgrad: str,
    save: bool,
    input_grad: bool,
    cache: int,
    queue: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    columns = save and wgrad == "mxfp8" and x_data is None
    y = x.new_empty((x.shape[0], weight.shape[1]))
    return (y, *_empty_parts(x, offs, folds_for(x.device)[1] if columns else None))


@custom_op("mxfp8_cutlass::grouped_linear_backward", mutates_args=())
def backward(
    dy: torch.Tensor,
    weight: torch.Tensor | None,
    offs: torch.Tensor,
    bias_scale: torch.Tensor | None,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    scaling: str,
    columnwise: bool,
    bias_grad: bool,
    cache: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """DX if there is a weight, dY as columns, and the bias gradient in float32, from one read of dY."""
    rule = cast("Scaling", scaling)
    first, _ = folds_for(dy.device)
    parts = both_directions(
        dy,
        offs,
        grad_dtype,
        rule,
        rowwise=None if weight is None else first,
        columnwise=first if columnwise else None,
        bias_grad=bias_grad,
        bias_scale=bias_scale if bias_grad else None,
    )
    dx = dy.new_empty(0)
    if weight is not None and parts.rowwise is not None:
        quantized = quantized_weight(weight, dtype, rule, transposed=True, cache=cache)
        dx = grouped_mm(parts.rowwise, quantized, offs, out_dtype=dy.dtype)
    sums = dy.new_empty(0, dtype=torch.float32) if parts.bias_grad is None else parts.bias_grad
    return (dx, *_parts_of(parts.columnwise, dy), sums)


@backward.register_fake
def _(
    dy: torch.Tensor,
    weight: torch.Tensor | None,
    offs: torch.Tensor,
    bias_scale: torch.Tensor | None,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    scaling: str,
    columnwise: bool,
    bias_grad: bool,
    cache: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = dy.new_empty((0,) if weight is None else (dy.shape[0], weight.shape[2]))
    sums = dy.new_empty((offs.shape[0], dy.shape[1]) if bias_grad else (0,), dtype=torch.float32)
    return (dx, *_empty_parts(dy, offs, folds_for(dy.device)[0] if columnwise else None), sums)


@custom_op("mxfp8_cutlass::weight_grad", mutates_args=())
def weight_grad(
    dy: Sequence[torch.Tensor],
    x: Sequence[torch.Tensor],
    offs: torch.Tensor,
    tokens: int,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    scaling: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return dW (G, N, K), from dY and X as one tensor each (rows) or as three (columns); or X as two (MXFP8 rows)."""
    return _weight_grad(dy, x, offs, tokens, dtype, grad_dtype, scaling, out_dtype=out_dtype)


@weight_grad.register_fake
def _(
    dy: Sequence[torch.Tensor],
    x: Sequence[torch.Tensor],
    offs: torch.Tensor,
    tokens: int,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    scaling: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    n = dy[0].shape[1] if len(dy) == 1 else dy[0].shape[0]
    k = x[0].shape[0] if len(x) == 3 else x[0].shape[1]
    return offs.new_empty((offs.shape[0], n, k), dtype=out_dtype)


@custom_op("mxfp8_cutlass::weight_grad_", mutates_args=("out",))
def weight_grad_(
    out: torch.Tensor,
    dy: Sequence[torch.Tensor],
    x: Sequence[torch.Tensor],
    offs: torch.Tensor,
    tokens: int,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    scaling: str,
) -> None:
    """Out += dW."""
    _weight_grad(dy, x, offs, tokens, dtype, grad_dtype, scaling, out=out)


@custom_op("mxfp8_cutlass::bias_scale_grad", mutates_args=())
def bias_scale_grad(dy: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """dY[i] . bias[g] for each row i of group g: float32 (M,), 0 for rows of no group."""
    return scale_grad(dy, bias, offs)


@bias_scale_grad.register_fake
def _(dy: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return dy.new_empty(dy.shape[0], dtype=torch.float32)


def _weight_grad(
    dy: Sequence[torch.Tensor],
    x: Sequence[torch.Tensor],
    offs: torch.Tensor,
    tokens: int,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    scaling: str,
    *,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    arrived = GroupedMXFP8(x[0].view(dtype), x[1], offs) if len(x) == 2 else None
    accumulate = out is not None
    if len(dy) == 1:
        rows = x[0] if arrived is None else dequantize_rowwise(arrived, dtype)
        return grouped_mm_of_rows(dy[0], rows, offs, out_dtype=out_dtype, out=out, accumulate=accumulate)
    first, second = folds_for(offs.device)
    lhs = _columns_of(dy, grad_dtype, first, offs, tokens)
    if arrived is None:
        rhs = _columns_of(x, dtype, second, offs, tokens)
    else:
        rhs = requantize_columnwise(arrived, dtype, cast("Scaling", scaling), fold_rows=second).columnwise
    return grouped_mm_columnwise(lhs, rhs, offs, out_dtype=out_dtype, out=out, accumulate=accumulate)


def _parts_of(x: MXFP8Tensor | ColumnwiseMXFP8 | None, like: torch.Tensor) -> Parts:
    if not isinstance(x, ColumnwiseMXFP8):
        return _empty_parts(like, None, None)
    tiles = x.tensor.tile_scale
    return (
        x.tensor.data.view(torch.uint8),
        x.tensor.scale_bytes,
        like.new_empty(0, dtype=torch.uint8) if tiles is None else tiles,
    )


def _empty_parts(like: torch.Tensor, offs: torch.Tensor | None, rows: int | None) -> Parts:
    """Of (M, features) rows as columns that are folded to `rows`; None: nothing."""

    def empty(*shape: int) -> torch.Tensor:
        return like.new_empty(shape, dtype=torch.uint8)

    if offs is None or rows is None:
        return empty(0), empty(0), empty(0)
    features, capacity = like.shape[1], column_capacity(like.shape[0], offs.shape[0])
    tiles = empty(-(-features // TILE_ROWS), capacity // RUN) if rows == TILE_ROWS else empty(0)
    return empty(features, capacity), empty(features, capacity // BLOCK), tiles


def _columns_of(
    parts: Sequence[torch.Tensor], dtype: torch.dtype, rows: int, offs: torch.Tensor, tokens: int
) -> ColumnwiseMXFP8:
    data, scale, tiles = parts
    tensor = MXFP8Tensor.unchecked(data.view(dtype), scale, rows, tiles if rows == TILE_ROWS else None)
    return ColumnwiseMXFP8(tensor, offs, tokens)
