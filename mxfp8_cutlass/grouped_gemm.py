"""grouped_gemm: products of a list of matrices of any sizes, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mxfp8_cutlass import checks, env, reference
from mxfp8_cutlass.generator.config_space import GroupedGemmConfig
from mxfp8_cutlass.generator.sm100_config import Sm100Config
from mxfp8_cutlass.generator.tile_config import MAX_GROUPS
from mxfp8_cutlass.kernel import target_of
from mxfp8_cutlass.launch import Shapes, launch_list
from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor
from mxfp8_cutlass.operands import addresses_of, facts_of, prepared, scales_of
from mxfp8_cutlass.select import select_kernel
from mxfp8_cutlass.sm100_launch import launch_sm100_list


def grouped_gemm(
    pairs: Sequence[tuple[MXFP8Tensor, MXFP8Tensor]],
    *,
    out_dtype: torch.dtype | None = None,
    outs: Sequence[torch.Tensor] | None = None,
    accumulate: bool = False,
    exact: bool = False,
    config: GroupedGemmConfig | None = None,
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
    target = target_of(device) if device.type == "cuda" else None
    facts = facts_of(first_a, first_b, dtype, target, exact=exact)
    if target is None:
        if config is not None:
            checks.check_config(config, None, facts)
        return _reference_gemm(pairs, shapes, dtype, outs, accumulate=accumulate)
    if "sfb_rows" in facts and any(b.folded == 1 for _, b in pairs):
        facts["sfb_rows"] = 1  # one kernel for all: tile scales, unless a weight comes without them
    if config is None:
        sizes = tuple((a.shape[0], b.shape[0], a.K) for a, b in pairs)
        config = select_kernel(sizes, target, **facts)
    else:
        checks.check_config(config, target, facts)
    results = list(outs) if outs is not None else [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    check_values = env.check()
    busy = [
        (*prepared(config, a, b, check_values=check_values), out)
        for (a, b), out in zip(pairs, results, strict=True)
        if a.shape[0]
    ]
    if busy:
        scales = [scales_of(config, a, b) for a, b, _ in busy]
        problems = [
            (Shapes(1, 1, a.shape[0], b.shape[0], a.K), addresses_of(a, b, s, out))
            for (a, b, out), s in zip(busy, scales, strict=True)
        ]
        if isinstance(config, Sm100Config):
            launch_sm100_list(config, problems, accumulate=accumulate, device=device.index)
        else:
            launch_list(config, problems, accumulate=accumulate, device=device.index)
    return results


def _check_pairs(pairs: Sequence[tuple[MXFP8Tensor, MXFP8Tensor]]) -> None:
    if not isinstance(pairs, Sequence):
        raise TypeError(f"pairs is a {type(pairs).__name__}: it must be a list of pairs (a, b)")
    if not 1 <= len(pairs) <= MAX_GROUPS:
        raise ValueError(f"pairs has {len(pairs)} entries: there must be 1 to {MAX_GROUPS}")
    for i, pair in enumerate(pairs):
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"pairs[{i}] is {pair!r}: it must be a pair (a, b)")
        for j, x in enumerate(pair):
            checks.check_operand(f"pairs[{i}][{j}]", x)
            checks.check_aligned(f"pairs[{i}][{j}].data", x.data)
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
        checks.check_tensor(f"outs[{i}]", out, shape, dtype, pairs[0][0].device)
        checks.check_aligned(f"outs[{i}]", out)
        checks.check_apart(f"outs[{i}]", out, inputs + others)


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
        stacked_a = MXFP8Tensor.unchecked(a.data[None], a.unswizzle().scale[None])
        stacked_b = MXFP8Tensor.unchecked(b.data[None], b.unswizzle().scale[None])
        reference.grouped_mm(stacked_a, stacked_b, out=out[None], out_dtype=dtype, accumulate=accumulate)
    return results
