"""What grouped_mm and grouped_gemm demand of their arguments. Each error names the argument, its value and the rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from mxfp8_cutlass.generator.config_space import GroupedGemmConfig
from mxfp8_cutlass.generator.tile_config import MAX_GROUPS
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


def check_groups(a: MXFP8Tensor, b: MXFP8Tensor, offs: torch.Tensor | None, counts: torch.Tensor | None) -> None:
    """Raise unless they describe groups: (M, K) with offs or (G, M, K) with or without counts, and (G, N, K)."""
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
    else:
        if counts is not None:
            raise ValueError(f"counts is given and a has shape {tuple(a.shape)}: counts goes with a of shape (G, M, K)")
        if offs is None:
            raise ValueError(f"offs is None and a has shape {tuple(a.shape)}: (M, K) needs the end row of each group")
    for name, index in (("offs", offs), ("counts", counts)):
        if index is not None:
            check_index(name, index, "a", a.device)
            if tuple(index.shape) != (groups,):
                raise ValueError(f"{name} has shape {tuple(index.shape)}: it must be ({groups},), one for each b[g]")


def check_swizzled(a: MXFP8Tensor, offs: torch.Tensor | None) -> None:
    """Raise unless the scales of a, if they are swizzled, are so for groups of the kind of those of the product."""
    if a.swizzled and (None if a.offs is None else a.offs.shape) != (None if offs is None else offs.shape):
        laid_out = "each matrix" if a.offs is None else f"{a.offs.shape[0]} groups of rows"
        needed = "each matrix" if offs is None else f"{offs.shape[0]} groups of rows"
        raise ValueError(f"a has scales swizzled for {laid_out}: this product needs them for {needed}")


def check_expected_m(expected_m: int | None, counts: torch.Tensor | None) -> None:
    """Raise unless expected_m, if given, is a number of rows beside counts."""
    if expected_m is None:
        return
    if not isinstance(expected_m, int):
        raise TypeError(f"expected_m is {expected_m!r}: it must be an int")
    if expected_m < 1:
        raise ValueError(f"expected_m is {expected_m}: it must be positive")
    if counts is None:
        raise ValueError(f"expected_m is {expected_m} and counts is None: it goes with counts alone")


def check_index(name: str, index: torch.Tensor, owner: str, device: torch.device) -> None:
    """Raise unless index is a tensor that kernels can read beside `owner`, which lies on `device`, of any shape."""
    if not isinstance(index, torch.Tensor):
        raise TypeError(f"{name} is a {type(index).__name__}: it must be a torch.Tensor")
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {index.dtype}: it must be int32 or int64")
    if index.device != device:
        raise ValueError(f"{name} is on {index.device}: it must be on the device of {owner}, {device}")
    if not index.is_contiguous():
        raise ValueError(f"{name} has strides {index.stride()}: it must be contiguous")


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


def check_rows(a: MXFP8Tensor, offs: torch.Tensor | None, counts: torch.Tensor | None) -> None:
    """Raise unless the values of offs and counts name rows of a. Reads them back from the device."""
    if offs is not None:
        ends = row_ends(offs, a.shape[0])
        if a.offs is not None and a.offs.tolist() != ends:
            raise ValueError(f"offs is {ends}: the scales of a were swizzled for {a.offs.tolist()}")
    if counts is not None:
        values: list[int] = counts.tolist()
        if not all(0 <= count <= a.shape[1] for count in values):
            raise ValueError(f"counts is {values}: its values must be 0 to M = {a.shape[1]}")


def check_no_others(**arguments: object) -> None:
    """Raise if an argument is given that products of column-wise operands do not take."""
    for name, value in arguments.items():
        if value is not None:
            taken = "out, out_dtype, accumulate and config"
            raise ValueError(f"{name} is given: products of ColumnwiseMXFP8 take {taken} alone")


def check_folded_values(name: str, x: MXFP8Tensor) -> None:
    """Raise unless the scales of x are what `folded` claims. Reads the answer back from the device."""
    scale = x.scale_bytes
    by_run = x.scale_by_run()[..., : scale.shape[-2]].mT.repeat_interleave(4, dim=-1)[..., : scale.shape[-1]]
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


def check_tensor(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless x has the shape, dtype, device and layout that the epilogue reads or writes."""
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


def check_addresses(
    a: MXFP8Tensor,
    b: MXFP8Tensor,
    offs: torch.Tensor | None,
    counts: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Raise unless all start where kernels can access them, and out shares no memory with an input."""
    if a.data.is_cuda:
        for name, x in (("a.data", a.data), ("b.data", b.data), ("bias", bias), ("out", out)):
            if x is not None:
                check_aligned(name, x)
    if out is not None:
        inputs = (
            ("a.data", a.data),
            ("a.scale", a.scale),
            ("b.data", b.data),
            ("b.scale", b.scale),
            ("b.tile_scale", b.tile_scale),
            ("bias", bias),
            ("offs", offs),
            ("counts", counts),
        )
        check_apart("out", out, inputs)


def check_apart(name: str, out: torch.Tensor, inputs: Iterable[tuple[str, torch.Tensor | None]]) -> None:
    """Raise if out shares memory with an input."""
    begin = out.data_ptr()
    end = begin + out.nbytes
    for other, x in inputs:
        if x is not None and (address := x.data_ptr()) < end and begin < address + x.nbytes:
            raise ValueError(
                f"{name} overlaps {other} in memory: it must not, since tiles are written while others are read"
            )


def check_config(
    config: GroupedGemmConfig, target_sm: str | None, facts: Mapping[str, object], *, k_groups: bool = False
) -> None:
    """Raise unless an explicit config computes this product on this target; None: on any, for CPU tensors."""
    if not isinstance(config, GroupedGemmConfig):
        raise TypeError(
            f"config is a {type(config).__name__}: it must be a TileConfig, or for Blackwell an Sm100Config"
        )
    if target_sm is not None and config.target_sm != target_sm:
        raise ValueError(f"config={config.name} is for sm_{config.target_sm}: this device needs sm_{target_sm}")
    reason = config.check()
    if reason is not None:
        raise ValueError(f"config={config.name} is not valid: {reason}")
    if getattr(config, "k_groups", k_groups) != k_groups:  # Blackwell's kernels take either
        needed = "rows: no ColumnwiseMXFP8" if k_groups else "runs of K: two ColumnwiseMXFP8"
        raise ValueError(f"config={config.name} is for groups that are {needed}")
    for fact, value in facts.items():
        # Weights are folded as far as an explicit config asks, so its sfb_rows is free.
        if fact != "sfb_rows" and getattr(config, fact, value) != value:
            raise ValueError(
                f"config={config.name} has {fact} {getattr(config, fact)!r}: these operands and `exact` need {value!r}"
            )
