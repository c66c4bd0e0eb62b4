"""What grouped_mm and grouped_gemm demand of their arguments. Each error names the argument, its value and the rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from mxfp8_cutlass.generator.tile_config import MAX_GROUPS, TileConfig
from mxfp8_cutlass.mxfp8_tensor import TILE_ROWS, MXFP8Tensor

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

MAX_ROWS = 2**31 - 1024
"""Kernels count rows in 32 bits, up to the end of the last tile."""


def check_operand(name: str, x: MXFP8Tensor) -> None:
    """Raise unless x is an MXFP8Tensor whose parts the kernels can read."""
    if not isinstance(x, MXFP8Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}: it must be an MXFP8Tensor")
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {x.device}: it must be on the CPU or a CUDA device")
    check_aligned(f"{name}.data", x.data)


def check_aligned(name: str, x: torch.Tensor) -> None:
    """Raise unless x starts where the copy engine and 16-byte accesses can."""
    if x.is_cuda and x.data_ptr() % 16:
        raise ValueError(f"{name} starts at address {x.data_ptr():#x}: it must be aligned to 16 bytes")


def check_product(a: MXFP8Tensor, b: MXFP8Tensor, a_name: str = "a", b_name: str = "b") -> None:
    """Raise unless a's and b's last axes can be contracted by one kernel."""
    if a.device != b.device:
        raise ValueError(f"{b_name} is on {b.device}: it must be on the device of {a_name}, {a.device}")
    if a.K != b.K:
        raise ValueError(
            f"{b_name} has shape {tuple(b.shape)}: its K = {b.K} must equal that of {a_name}, "
            f"K = {a.K} of shape {tuple(a.shape)}"
        )
    for name, x in ((a_name, a), (b_name, b)):
        if x.shape[-2] > MAX_ROWS:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: it must have at most {MAX_ROWS} rows")
    n = b.shape[-2]
    if n == 0 or n % 16:
        raise ValueError(f"{b_name} has shape {tuple(b.shape)}: N = {n} must be a positive multiple of 16")


def check_groups(a: MXFP8Tensor, b: MXFP8Tensor, offs: torch.Tensor | None) -> None:
    """Raise unless a, b and offs describe groups: (M, K) with offs or (G, M, K) without, and (G, N, K)."""
    if b.ndim != 3:
        raise ValueError(f"b has shape {tuple(b.shape)}: it must be (G, N, K)")
    groups = b.shape[0]
    if not 1 <= groups <= MAX_GROUPS:
        raise ValueError(f"b has shape {tuple(b.shape)}: G = {groups} must be 1 to {MAX_GROUPS}")
    if a.ndim == 3:
        if offs is not None:
            raise ValueError(f"offs is given and a has shape {tuple(a.shape)}: offs goes with a of shape (M, K) alone")
        if a.shape[0] != groups:
            raise ValueError(f"a has shape {tuple(a.shape)}: its G must be that of b, {groups}")
        return
    if offs is None:
        raise ValueError(f"offs is None and a has shape {tuple(a.shape)}: (M, K) needs the end row of each group")
    check_offs(offs, "a", a.device)
    if tuple(offs.shape) != (groups,):
        raise ValueError(f"offs has shape {tuple(offs.shape)}: it must be ({groups},), an end row for each group of b")


def check_offs(offs: torch.Tensor, owner: str, device: torch.device) -> None:
    """Raise unless offs is a tensor that kernels can read beside `owner`, which lies on `device`. Any shape will do."""
    if not isinstance(offs, torch.Tensor):
        raise TypeError(f"offs is a {type(offs).__name__}: it must be a torch.Tensor")
    if offs.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"offs has dtype {offs.dtype}: it must be int32 or int64")
    if offs.device != device:
        raise ValueError(f"offs is on {offs.device}: it must be on the device of {owner}, {device}")
    if not offs.is_contiguous():
        raise ValueError(f"offs has strides {offs.stride()}: it must be contiguous")


def rising_ends(offs: torch.Tensor) -> list[int]:
    """Return the values of offs; raise unless they rise from 0 or more. Reads them back from the device."""
    ends: list[int] = offs.tolist()
    if any(end < begin for begin, end in zip([0, *ends], ends, strict=False)):
        raise ValueError(f"offs is {ends}: its values must not decrease, nor be negative")
    return ends


def row_ends(offs: torch.Tensor, m: int) -> list[int]:
    """Return the values of offs; raise unless they rise from 0 or more to m at most. Reads them back."""
    ends = rising_ends(offs)
    if ends and ends[-1] > m:
        raise ValueError(f"offs is {ends}: its values must not exceed M = {m}")
    return ends


def check_folded_values(name: str, x: MXFP8Tensor) -> None:
    """Raise unless the scales of x are what `folded` claims. Reads the answer back from the device."""
    scale = x.scale_bytes
    by_run = x.scale_by_run(128)[..., : scale.shape[-2]].mT.repeat_interleave(4, dim=-1)[..., : scale.shape[-1]]
    if not torch.equal(by_run, scale):
        raise ValueError(f"{name} has folded = {x.folded} and blocks of one run of 128 whose scales differ")
    if x.tile_scale is not None:
        rows = x.tile_scale.repeat_interleave(TILE_ROWS, -2)[..., : scale.shape[-2], :]
        runs = rows.repeat_interleave(4, -1)[..., : scale.shape[-1]]
        if not bool(((runs == scale) | (runs == 255)).all()):
            raise ValueError(f"{name} has folded = 128 and rows whose scales are not those of their tile")


def check_out_dtype(out_dtype: torch.dtype | None, out: torch.Tensor | None) -> torch.dtype:
    """Return the output's dtype: that of `out`, else `out_dtype`, else bfloat16."""
    dtype = out_dtype if out_dtype is not None else out.dtype if isinstance(out, torch.Tensor) else torch.bfloat16
    if dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype is {dtype}: it must be bfloat16, float16 or float32")
    return dtype


def check_bias(bias: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless bias has the shape, dtype, device and layout that the epilogue reads."""
    _check_tensor("bias", bias, shape, dtype, device)


def check_out(
    name: str,
    out: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    inputs: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Raise unless out has the right shape, dtype, device and layout and shares no memory with an input."""
    _check_tensor(name, out, shape, dtype, device)
    for other, tensor in inputs:
        if _overlap(out, tensor):
            raise ValueError(
                f"{name} overlaps {other} in memory: it must not, since tiles are written while others are read"
            )


def check_config(config: TileConfig, target_sm: str | None, facts: Mapping[str, object]) -> None:
    """Raise unless an explicit config computes this product on this target; None: on any, for CPU tensors."""
    if not isinstance(config, TileConfig):
        raise TypeError(f"config is a {type(config).__name__}: it must be a TileConfig")
    if target_sm is not None and config.target_sm != target_sm:
        raise ValueError(f"config={config.name} is for sm_{config.target_sm}: this device needs sm_{target_sm}")
    reason = config.check()
    if reason is not None:
        raise ValueError(f"config={config.name} is not valid: {reason}")
    for fact, value in facts.items():
        # Weights are folded as far as an explicit config asks, so its sfb_rows is free.
        if fact != "sfb_rows" and getattr(config, fact) != value:
            raise ValueError(
                f"config={config.name} has {fact} {getattr(config, fact)!r}: these operands and `exact` need {value!r}"
            )


def _check_tensor(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}: it must be a torch.Tensor")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: it must be {shape}")
    if x.dtype != dtype:
        raise TypeError(f"{name} has dtype {x.dtype}: it must be the output's, {dtype}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}: it must be on the device of the operands, {device}")
    if not x.is_contiguous():
        raise ValueError(f"{name} has strides {x.stride()}: it must be contiguous")
    check_aligned(name, x)


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    begin_x, begin_y = x.data_ptr(), y.data_ptr()
    return begin_x < begin_y + y.nbytes and begin_y < begin_x + x.nbytes
