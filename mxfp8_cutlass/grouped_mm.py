"""grouped_mm and grouped_gemm: products of many MXFP8 matrices in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch

from mxfp8_cutlass import checks, env, reference
from mxfp8_cutlass.generator.tile_config import MAX_GROUPS, TileConfig
from mxfp8_cutlass.kernel import target_of
from mxfp8_cutlass.launch import Operands, launch_list, launch_stacked
from mxfp8_cutlass.mxfp8_tensor import DTYPE_NAMES, RUN, TILE_ROWS, MXFP8Tensor
from mxfp8_cutlass.quantize import fold
from mxfp8_cutlass.select import select_kernel, select_stacked


def grouped_mm(
    a: MXFP8Tensor,
    b: MXFP8Tensor,
    offs: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    exact: bool = False,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """Multiply groups of rows of `a` with a matrix of `b` each, contracting the last axis of both.

    (M, K) x (G, N, K) with offs -> (M, N): rows offs[g-1] to offs[g] of `a` are multiplied with b[g]ᵀ.
    (G, M, K) x (G, N, K) -> (G, M, N).

    Nothing is copied to the host, so calls can be captured in CUDA graphs. Rows of no group are left as they are: in a
    new output they are not initialised. On Hopper an operand that is not folded is folded first, into a workspace of
    its size: fold weights once per update with `fold(b, rows=128)`, and activations as they are quantized with
    `quantize(..., fold=True)`. CPU tensors run the reference (float32; exact).

    Args:
        a: (M, K) or (G, M, K).
        b: (G, N, K), G up to 1024, N a multiple of 16.
        offs: int32 or int64 (G,), on the operands' device: the end row of each group; not decreasing, at most M. The
            values are checked only if MXFP8_CUTLASS_CHECK=1, at the price of a sync; wrong ones give wrong numbers, but
            nothing outside `out` is written.
        bias: (G, N), of the output's dtype; added to every row of its group.
        out_dtype: bfloat16 (the default), float16 or float32.
        out: write here instead of into a new tensor: contiguous, of the result's shape; its dtype is the output's.
        accumulate: add to `out` (in float32, rounded once) instead of overwriting it.
        exact: on CUDA, promote every 32 of K and fold nothing: any MXFP8 operand as it is, at less speed.
        config: the kernel to run, instead of the one that `select_kernel` picks.

    Raises:
        TypeError: an argument is of another type or dtype than listed above.
        ValueError: a shape, device, layout, alignment (16 bytes) or value breaks a rule above; `out` overlaps an input;
            the device is neither SM90 nor SM100; `config` is not for this product.
    """
    checks.check_operand("a", a)
    checks.check_operand("b", b)
    if a.ndim == 2 and b.ndim == 2:
        raise ValueError("a and b are both 2D: products that offs cuts along K are not supported yet")
    checks.check_groups(a, b, offs)
    checks.check_product(a, b)
    dtype = checks.check_out_dtype(out_dtype, out)
    groups, n = b.shape[0], b.shape[1]
    shape = (*a.shape[:-1], n)
    if bias is not None:
        checks.check_bias(bias, (groups, n), dtype, a.device)
    if out is None:
        if accumulate:
            raise ValueError("accumulate is True and out is None: there is nothing to add to")
    else:
        inputs = [("a.data", a.data), ("a.scale", a.scale), ("b.data", b.data), ("b.scale", b.scale)]
        inputs += [("b.tile_scale", b.tile_scale)] if b.tile_scale is not None else []
        inputs += [("bias", bias)] if bias is not None else []
        inputs += [("offs", offs)] if offs is not None else []
        checks.check_out("out", out, shape, dtype, a.device, inputs)
    if offs is not None and env.check():
        checks.row_ends(offs, a.shape[0])

    if not a.data.is_cuda:
        if config is not None:
            checks.check_config(config, None, _facts(a, b, dtype, exact=exact))
        return reference.grouped_mm(a, b, offs, bias=bias, out_dtype=dtype, out=out, accumulate=accumulate)
    m, k = a.shape[-2:]
    if config is None:
        facts = _facts(a, b, dtype, exact=exact)
        config = select_stacked(m, n, k, groups, target_of(a.device), *facts.values(), split=offs is not None)
    else:
        checks.check_config(config, target_of(a.device), _facts(a, b, dtype, exact=exact))
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=a.device)
    if a.data.numel():
        a, b = _prepared(config, a, b)
        scales = _scales(config, a, b)
        x = _operands(a, b, scales, out, bias)
        launch_stacked(config, x, offs, groups, accumulate=accumulate, device=a.device.index)
    return out


def grouped_gemm(
    pairs: Sequence[tuple[MXFP8Tensor, MXFP8Tensor]],
    *,
    out_dtype: torch.dtype | None = None,
    outs: Sequence[torch.Tensor] | None = None,
    accumulate: bool = False,
    exact: bool = False,
    config: TileConfig | None = None,
) -> list[torch.Tensor]:
    """Multiply a list of problems in one launch, each with its own M, N and K: (M, K) x (N, K) -> (M, N).

    Args:
        pairs: up to 1024 pairs (a, b) of 2D tensors, all on one device, all a of one element type and all b of one.
            M may be 0; N is a multiple of 16.
        out_dtype: bfloat16 (the default), float16 or float32.
        outs: write here: one contiguous (M, N) tensor per pair, all of one dtype.
        accumulate: add to `outs` instead of overwriting them.
        exact: as in `grouped_mm`.
        config: as in `grouped_mm`.

    Raises:
        TypeError: an argument is of another type or dtype than listed above.
        ValueError: an empty or too long list; otherwise as `grouped_mm`.
    """
    _check_pairs(pairs)
    first_a, first_b = pairs[0]
    device = first_a.device
    dtype = checks.check_out_dtype(out_dtype, outs[0] if isinstance(outs, Sequence) and outs else None)
    shapes = [(a.shape[0], b.shape[0]) for a, b in pairs]
    if outs is None:
        if accumulate:
            raise ValueError("accumulate is True and outs is None: there is nothing to add to")
    else:
        _check_outs(outs, shapes, dtype, pairs)
    facts = _facts(first_a, first_b, dtype, exact=exact)
    if device.type == "cpu":
        if config is not None:
            checks.check_config(config, None, facts)
        return _reference_gemm(pairs, shapes, dtype, outs, accumulate=accumulate)
    if any(b.folded == 1 for _, b in pairs):
        facts["sfb_rows"] = 1  # one kernel for all: tile scales, unless a weight comes without them
    if config is None:
        sizes = tuple((a.shape[0], b.shape[0], a.K) for a, b in pairs)
        config = select_kernel(sizes, target_of(device), **facts)
    else:
        checks.check_config(config, target_of(device), facts)
    results = list(outs) if outs is not None else [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    busy = [(*_prepared(config, a, b), out) for (a, b), out in zip(pairs, results, strict=True) if a.shape[0]]
    if busy:
        scales = [_scales(config, a, b) for a, b, _ in busy]
        problems = [_operands(a, b, s, out, None) for (a, b, out), s in zip(busy, scales, strict=True)]
        launch_list(config, problems, accumulate=accumulate, device=device.index)
    return results


class _Facts(TypedDict):
    """The fields of a TileConfig that the operands fix, in the order in which select.py takes them."""

    promotion_k: int
    sfb_rows: int
    element_a: str
    element_b: str
    out: str


def _facts(a: MXFP8Tensor, b: MXFP8Tensor, dtype: torch.dtype, *, exact: bool) -> _Facts:
    """What the kernel must be like. Weights that were folded along K alone are taken as they are."""
    return {
        "promotion_k": 32 if exact else RUN,
        "sfb_rows": 1 if exact or b.folded == 1 else TILE_ROWS,
        "element_a": DTYPE_NAMES[a.dtype],
        "element_b": DTYPE_NAMES[b.dtype],
        "out": DTYPE_NAMES[dtype],
    }


def _prepared(config: TileConfig, a: MXFP8Tensor, b: MXFP8Tensor) -> tuple[MXFP8Tensor, MXFP8Tensor]:
    """Return the operands folded as far as the kernel needs."""
    if config.promotion_k < RUN:
        return a, b
    a, b = fold(a), fold(b, config.sfb_rows)
    if env.check():
        checks.check_folded_values("a", a)
        checks.check_folded_values("b", b)
    return a, b


def _scales(config: TileConfig, a: MXFP8Tensor, b: MXFP8Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales as the kernel reads them; to be held until it is launched."""
    return a.scale_by_run(config.promotion_k), b.scale_by_run(config.promotion_k)


def _operands(
    a: MXFP8Tensor,
    b: MXFP8Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    bias: torch.Tensor | None,
) -> Operands:
    m, k = a.shape[-2:]
    sfa, sfb = scales
    return Operands(
        a=a.data.data_ptr(),
        sfa=sfa.data_ptr(),
        b=b.data.data_ptr(),
        sfb=sfb.data_ptr(),
        sfb_tiles=b.tile_scale.data_ptr() if b.tile_scale is not None else 0,
        out=out.data_ptr(),
        bias=bias.data_ptr() if bias is not None else 0,
        batch_a=a.shape[0] if a.ndim == 3 else 1,
        batch_b=b.shape[0] if b.ndim == 3 else 1,
        m=m,
        n=b.shape[-2],
        k=k,
    )


def _check_pairs(pairs: Sequence[tuple[MXFP8Tensor, MXFP8Tensor]]) -> None:
    if not isinstance(pairs, Sequence):
        raise TypeError(f"pairs is a {type(pairs).__name__}: it must be a list of pairs (a, b)")
    if not 1 <= len(pairs) <= MAX_GROUPS:
        raise ValueError(f"pairs has {len(pairs)} entries: there must be 1 to {MAX_GROUPS}")
    for i, pair in enumerate(pairs):
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"pairs[{i}] is {pair!r}: it must be a pair (a, b)")
        checks.check_operand(f"pairs[{i}][0]", pair[0])
        checks.check_operand(f"pairs[{i}][1]", pair[1])
    first_a, first_b = pairs[0]
    for i, (a, b) in enumerate(pairs):
        for name, x, first in ((f"pairs[{i}][0]", a, first_a), (f"pairs[{i}][1]", b, first_b)):
            if x.ndim != 2:
                raise ValueError(f"{name} has shape {tuple(x.shape)}: it must be 2D")
            if x.dtype != first.dtype:
                raise TypeError(f"{name} has dtype {x.dtype}: it must be that of the first pair's, {first.dtype}")
            if x.device != first_a.device:
                raise ValueError(f"{name} is on {x.device}: it must be on the device of pairs[0][0], {first_a.device}")
        checks.check_product(a, b, f"pairs[{i}][0]", f"pairs[{i}][1]")


def _check_outs(
    outs: Sequence[torch.Tensor],
    shapes: list[tuple[int, int]],
    dtype: torch.dtype,
    pairs: Sequence[tuple[MXFP8Tensor, MXFP8Tensor]],
) -> None:
    if not isinstance(outs, Sequence):
        raise TypeError(f"outs is a {type(outs).__name__}: it must be a list of tensors")
    if len(outs) != len(pairs):
        raise ValueError(f"outs has {len(outs)} entries: there must be one for each of the {len(pairs)} pairs")
    inputs = [
        (f"pairs[{i}][{j}].{part}", getattr(x, part))
        for i, pair in enumerate(pairs)
        for j, x in enumerate(pair)
        for part in ("data", "scale", "tile_scale")
        if getattr(x, part) is not None
    ]
    for i, (out, shape) in enumerate(zip(outs, shapes, strict=True)):
        others = [(f"outs[{j}]", other) for j, other in enumerate(outs[:i])]
        checks.check_out(f"outs[{i}]", out, shape, dtype, pairs[0][0].device, inputs + others)


def _reference_gemm(
    pairs: Sequence[tuple[MXFP8Tensor, MXFP8Tensor]],
    shapes: list[tuple[int, int]],
    dtype: torch.dtype,
    outs: Sequence[torch.Tensor] | None,
    *,
    accumulate: bool,
) -> list[torch.Tensor]:
    results = list(outs) if outs is not None else [torch.empty(shape, dtype=dtype) for shape in shapes]
    for (a, b), out in zip(pairs, results, strict=True):
        stacked_a = MXFP8Tensor.unchecked(a.data[None], a.scale[None])
        stacked_b = MXFP8Tensor.unchecked(b.data[None], b.scale[None])
        reference.grouped_mm(stacked_a, stacked_b, out=out[None], out_dtype=dtype, accumulate=accumulate)
    return results
