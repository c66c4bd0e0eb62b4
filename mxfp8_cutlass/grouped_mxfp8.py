"""GroupedMXFP8: tokens that arrive quantized, as from an all-to-all in FP8, and what the products need of them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from mxfp8_cutlass import env
from mxfp8_cutlass.checks import row_ends
from mxfp8_cutlass.columns import ColumnwiseMXFP8, check_offs
from mxfp8_cutlass.columnwise import both_directions
from mxfp8_cutlass.kernel import target_of
from mxfp8_cutlass.mxfp8_tensor import FP8_DTYPES, MXFP8Tensor
from mxfp8_cutlass.quantize import fold

TARGETS = ("90a", "100a")


class GroupedMXFP8:
    """Tokens (M, K) sorted by group, in MXFP8 along K, with room behind the last group.

    Args:
        data: float8_e4m3fn or float8_e5m2, (M, K), contiguous; or None if there is a column-wise operand alone.
        scale: float8_e8m0fnu or uint8: (M, K // 32), or as `swizzle_scales(scale, offs)` lays it out; None with data.
        offs: int32 or int64 (G,): the end row of each group. Rows from offs[-1] on may hold anything: they reach no
            result, and are not written.
        swizzled: whether scale is in the blocked layout.
        columnwise: the same tokens as columns, if somebody has quantized them already.
        carrier: bfloat16, float16 or float32, (M, K), of any strides: what gradients with respect to these tokens flow
            to. It is never read, so one element, expanded, will do.

    Raises:
        TypeError: an argument is of another type or dtype than listed above.
        ValueError: a shape, layout or device breaks a rule above.
    """

    __slots__ = ("carrier", "columnwise", "data", "offs", "scale", "swizzled")

    def __init__(
        self,
        data: torch.Tensor | None,
        scale: torch.Tensor | None,
        offs: torch.Tensor,
        *,
        swizzled: bool = False,
        columnwise: ColumnwiseMXFP8 | None = None,
        carrier: torch.Tensor | None = None,
    ) -> None:
        if (data is None) != (scale is None):
            raise ValueError(f"data is {_given(data)} and scale is {_given(scale)}: they go together")
        if columnwise is not None and not isinstance(columnwise, ColumnwiseMXFP8):
            raise TypeError(f"columnwise is a {type(columnwise).__name__}: it must be a ColumnwiseMXFP8")
        if data is not None and scale is not None:
            rowwise = MXFP8Tensor(data, scale, swizzled=swizzled, offs=offs if swizzled else None)
            if rowwise.ndim != 2:
                raise ValueError(f"data has shape {tuple(data.shape)}: it must be (M, K)")
            check_offs(offs, "data", data.device)
            if columnwise is not None and columnwise.shape != data.mT.shape:
                raise ValueError(f"columnwise has shape {tuple(columnwise.shape)}: data has {tuple(data.shape)}")
            if carrier is not None and carrier.shape != data.shape:
                raise ValueError(f"carrier has shape {tuple(carrier.shape)}: it must be data's, {tuple(data.shape)}")
        elif columnwise is None:
            raise ValueError("data and columnwise are None: one must be given")
        self.data, self.scale, self.offs, self.swizzled = data, scale, offs, swizzled
        self.columnwise, self.carrier = columnwise, carrier

    @property
    def shape(self) -> torch.Size:
        """(M, K)."""
        if self.data is not None:
            return self.data.shape
        features, tokens = self._columns().shape
        return torch.Size((tokens, features))

    @property
    def device(self) -> torch.device:
        """Where all parts lie."""
        return self._columns().device if self.data is None else self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """The elements' FP8 type."""
        return self._columns().dtype if self.data is None else self.data.dtype

    def _columns(self) -> ColumnwiseMXFP8:
        if self.columnwise is None:
            raise ValueError("data and columnwise are None: one must be given")
        return self.columnwise

    def __repr__(self) -> str:
        m, k = self.shape
        state = "no rows" if self.data is None else "swizzled" if self.swizzled else "compact"
        return (
            f"GroupedMXFP8(({m}, {k}), {self.dtype}, groups={self.offs.shape[0]}, device={str(self.device)!r}, {state})"
        )


class Requantized(NamedTuple):
    """What requantize_columnwise returns: None for what was not asked for."""

    columnwise: ColumnwiseMXFP8
    bias_grad: torch.Tensor | None
    dequantized: torch.Tensor | None


def prepare_rowwise(
    x: GroupedMXFP8, dtype: torch.dtype = torch.float8_e4m3fn, *, target_sm: Literal["90a", "100a"] | None = None
) -> MXFP8Tensor:
    """Make the operand of forward, or of dgrad for an output gradient: data as they are, scales as the GEMM reads them.

    "90a" (Hopper, and the CPU): compact scales, folded per run of 128 into new tensors; swizzled ones are first brought
    back. "100a" (Blackwell): the very data, and swizzled scales: the very ones if they are swizzled already.

    Args:
        x: the tokens. It is left as it is.
        dtype: the element type that the caller counts on.
        target_sm: None for that of x's device.

    Raises:
        TypeError: x is no GroupedMXFP8, or its elements are of another type than `dtype`.
        ValueError: x has no row-wise data, or target_sm is unknown.
    """
    data, scale = _rowwise_of(x, dtype)
    target = _target_of(x.device) if target_sm is None else target_sm
    if target not in TARGETS:
        raise ValueError(f"target_sm is {target_sm!r}: it must be one of {', '.join(TARGETS)}")
    tensor = MXFP8Tensor(data, scale, swizzled=x.swizzled, offs=x.offs if x.swizzled else None)
    if target == "100a":
        return tensor.swizzle(x.offs)
    return fold(tensor.unswizzle())


def requantize_columnwise(
    x: GroupedMXFP8,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scaling: Literal["rceil", "floor"] = "rceil",
    *,
    fold_rows: int = 0,
    bias_grad: bool = False,
    bias_scale: torch.Tensor | None = None,
    return_dequantized: bool = False,
) -> Requantized:
    """Make the operand of wgrad: dequantized to bfloat16, and quantized along the tokens of each group.

    Values are rounded twice, so this may cost convergence where quantizing once did not: see `wgrad="bf16"` of
    `grouped_linear`. A column-wise operand that x has already is not looked at.

    Args:
        x: the tokens, or an output gradient. It is left as it is.
        dtype: the element type of the result, which must be x's: E5M2 is never read as E4M3.
        scaling: as of `quantize`.
        fold_rows: as of `quantize_columnwise`.
        bias_grad: whether to sum each group's dequantized rows, as in `quantize_both`.
        bias_scale: factors of the rows in that sum.
        return_dequantized: whether to return the bfloat16 tensor (M, K) too; its rows of no group have no meaning.

    Raises:
        TypeError: x is no GroupedMXFP8, or its elements are of another type than `dtype`; or as `quantize_both`.
        ValueError: x has no row-wise data, or its scales are swizzled: pass them compact, or through
            `unswizzle_scales`; or as `quantize_both`.
    """
    dequantized = dequantize_rowwise(x, dtype)
    parts = both_directions(
        dequantized,
        x.offs,
        dtype,
        scaling,
        rowwise=None,
        columnwise=fold_rows,
        bias_grad=bias_grad,
        bias_scale=bias_scale,
    )
    if not isinstance(parts.columnwise, ColumnwiseMXFP8):
        raise TypeError(f"columnwise is a {type(parts.columnwise).__name__}")
    return Requantized(parts.columnwise, parts.bias_grad, dequantized if return_dequantized else None)


def dequantize_rowwise(x: GroupedMXFP8, dtype: torch.dtype) -> torch.Tensor:
    """The bfloat16 values of x, whose elements are of type `dtype`; its rows of no group have no meaning."""
    data, scale = _rowwise_of(x, dtype)
    if x.swizzled:
        raise ValueError("x has swizzled scales: to dequantize takes compact ones, which unswizzle_scales makes")
    return MXFP8Tensor.unchecked(data, scale).dequantize(torch.bfloat16)


def _rowwise_of(x: GroupedMXFP8, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scales, checked."""
    if not isinstance(x, GroupedMXFP8):
        raise TypeError(f"x is a {type(x).__name__}: it must be a GroupedMXFP8")
    if dtype not in FP8_DTYPES:
        raise TypeError(f"dtype is {dtype!r}: it must be float8_e4m3fn or float8_e5m2")
    if x.data is None or x.scale is None:
        raise ValueError("x has no row-wise data, and column-wise data cannot stand in: they were rounded on their own")
    if x.data.dtype != dtype:
        raise TypeError(f"x has elements of type {x.data.dtype}: dtype is {dtype}, and one is never read as another")
    if not x.data.is_cuda or env.check():
        row_ends(x.offs, x.data.shape[0])
    return x.data, x.scale


def _target_of(device: torch.device) -> str:
    return target_of(device) if device.type == "cuda" else "90a"


def _given(x: object) -> str:
    return "None" if x is None else "given"
