"""quantize, fold and dequantize: the public functions. CPU tensors run the reference, CUDA tensors the kernels."""

from __future__ import annotations

from typing import Literal, overload

import torch

from mxfp8_cutlass import elementwise, reference
from mxfp8_cutlass.mxfp8_tensor import BLOCK, FP8_DTYPES, RUN, TILE_ROWS, MXFP8Tensor, check_blocked

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OUTPUT_DTYPES = (*INPUT_DTYPES, torch.float64)
SCALINGS = ("rceil", "floor")


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scaling: Literal["rceil", "floor"] = "rceil",
    fold: bool = False,  # noqa: FBT001, FBT002 - the public signature
    dim: int = -1,
) -> MXFP8Tensor:
    """Quantize to MXFP8, in blocks of 32 along the last axis, or along the one before and transposed.

    Elements are x * 2**(127 - byte), rounded to nearest even and saturated. A block that holds a NaN or an Inf gets the
    scale byte 255 (NaN), and each of its elements is NaN. Not differentiable.

    Args:
        x: bfloat16, float16 or float32, shape (R, K) or (G, R, K), contiguous, K a positive multiple of 32.
        dtype: float8_e4m3fn or float8_e5m2.
        scaling: "rceil": amax / dmax rounded up to a power of two, so that no block's maximum is cut off; "floor":
            amax's power of two over the format's largest (OCP specification). Named as in torchao; docs/numerics.md.
        fold: whether each run of 128 elements gets one scale, bit for bit as `fold(quantize(x))` would give it, at no
            extra memory traffic.
        dim: -1, or -2 for what `quantize(x.mT.contiguous())` gives: (..., K, R), R a positive multiple of 32.

    Raises:
        TypeError: x is no tensor, or a dtype is not listed above, or `fold` is not a bool.
        ValueError: a shape, layout, alignment (16 bytes on CUDA), device, `scaling` or `dim` breaks a rule above.
    """
    check_quantizer(x, dtype, scaling)
    if not isinstance(fold, bool):
        raise TypeError(f"fold is {fold!r}: it must be True or False; fold(quantize(x), rows=128) gives the tile form")
    if dim != -1:
        x = _transposed(x, dim)
    check_blocked("x", x)
    if not _on_cuda("x", x):
        return reference.quantize(x, dtype, scaling, fold_runs=fold)
    _check_kernel_limits("x", x)
    return elementwise.quantize(x, dtype, scaling, fold=fold)


@overload
def fold(xq: MXFP8Tensor, rows: int = 1, *, return_stats: Literal[False] = False) -> MXFP8Tensor: ...


@overload
def fold(
    xq: MXFP8Tensor, rows: int = 1, *, return_stats: Literal[True]
) -> tuple[MXFP8Tensor, dict[str, torch.Tensor]]: ...


def fold(
    xq: MXFP8Tensor, rows: int = 1, *, return_stats: bool = False
) -> MXFP8Tensor | tuple[MXFP8Tensor, dict[str, torch.Tensor]]:
    """Give blocks a shared scale, which the elements absorb as an exponent shift.

    A shift is exact unless an element becomes subnormal; the error is then at most 2**-10 (E4M3) or 2**-17 (E5M2) times
    the shared scale, and less than 2**-17.8 or 2**-31.8 of the run's largest element. docs/numerics.md has the proof.

    Args:
        xq: any MXFP8 tensor. One that has the shared scales already is returned as it is.
        rows: 1: each run of 128 elements of a row shares a scale. 128: so does each tile of 128 rows x 128 elements,
            except where a row of it could lose more than 1/896 of its largest element there; such a tile keeps a
            scale per run ("mixed", 255 in `tile_scale`).
        return_stats: whether to return (folded, statistics) instead: a dict of 0-dim int64 tensors on xq's device with
            "changed_elements" (finite elements whose value changed), "runs" and "mixed_tiles".

    Raises:
        TypeError: xq is no MXFP8Tensor.
        ValueError: rows is neither 1 nor 128; xq is swizzled; data is not aligned to 16 bytes on CUDA.
    """
    _check_tensor(xq)
    if rows not in (1, TILE_ROWS):
        raise ValueError(f"rows is {rows!r}: it must be 1 or 128")
    if xq.folded >= rows:
        if not return_stats:
            return xq
        return xq, reference.fold_statistics(xq, torch.zeros((), dtype=torch.int64, device=xq.device))
    if not _on_cuda("xq", xq.data):
        folded, statistics = reference.fold(xq, int(rows))
        return (folded, statistics) if return_stats else folded
    _check_kernel_limits("xq", xq.data)
    folded, changed = elementwise.fold(xq, int(rows), stats=return_stats)
    return folded if changed is None else (folded, reference.fold_statistics(folded, changed))


def dequantize(xq: MXFP8Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values, q * 2**(byte - 127), in another type.

    Exact in float64; exact in float32 too, but for values above its range, which become Inf; else rounded once.

    Args:
        xq: the tensor.
        dtype: bfloat16, float16, float32 or float64 (on CUDA through torch's own operations: no kernel for it).

    Raises:
        TypeError: xq is no MXFP8Tensor, or dtype is not listed above.
        ValueError: xq is swizzled; data is not aligned to 16 bytes on CUDA.
    """
    _check_tensor(xq)
    if dtype not in OUTPUT_DTYPES:
        raise TypeError(f"dtype is {dtype!r}: it must be bfloat16, float16, float32 or float64")
    if not _on_cuda("xq", xq.data) or dtype == torch.float64:
        return reference.dequantize(xq, dtype)
    _check_kernel_limits("xq", xq.data)
    return elementwise.dequantize(xq, dtype)


def check_quantizer(x: torch.Tensor, dtype: torch.dtype, scaling: str) -> None:
    """Raise unless x is a tensor of a type that can be quantized, to `dtype` and by the rule `scaling`."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}: it must be a torch.Tensor")
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"x has dtype {x.dtype}: it must be bfloat16, float16 or float32")
    if dtype not in FP8_DTYPES:
        raise TypeError(f"dtype is {dtype!r}: it must be float8_e4m3fn or float8_e5m2")
    if scaling not in SCALINGS:
        raise ValueError(f"scaling is {scaling!r}: it must be 'rceil' or 'floor'")


def _transposed(x: torch.Tensor, dim: int) -> torch.Tensor:
    if dim != -2:
        raise ValueError(f"dim is {dim!r}: it must be -1 or -2")
    if x.ndim not in (2, 3) or not x.is_contiguous():
        raise ValueError(f"x has shape {tuple(x.shape)} and strides {tuple(x.stride())}: 2D or 3D, and contiguous")
    if x.shape[-2] == 0 or x.shape[-2] % BLOCK:
        raise ValueError(f"x has shape {tuple(x.shape)} and dim is -2: R = {x.shape[-2]}, a positive multiple of 32")
    return x.detach().mT.contiguous()


def _check_tensor(xq: MXFP8Tensor) -> None:
    if not isinstance(xq, MXFP8Tensor):
        raise TypeError(f"xq is a {type(xq).__name__}: it must be an MXFP8Tensor")
    if xq.swizzled:
        raise ValueError("xq has swizzled scales: it must have compact ones, which unswizzle() gives")


def _on_cuda(name: str, x: torch.Tensor) -> bool:
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {x.device}: it must be on the CPU or a CUDA device")
    return x.is_cuda


def _check_kernel_limits(name: str, x: torch.Tensor) -> None:
    """The rules of the kernels alone: 16-byte loads, and 32-bit block numbers."""
    if x.data_ptr() % 16:
        raise ValueError(f"{name} starts at address {x.data_ptr():#x}: it must be aligned to 16 bytes")
    runs = x.numel() // x.shape[-1] * -(-x.shape[-1] // RUN)
    if runs > elementwise.MAX_RUNS:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, {runs} runs of up to 128: at most {elementwise.MAX_RUNS}")
