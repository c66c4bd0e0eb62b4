"""Products that `offs` cuts along the contraction: weight gradients."""

from __future__ import annotations

from functools import lru_cache

import torch

from mxfp8_cutlass import checks, env, reference
from mxfp8_cutlass.columns import ColumnwiseMXFP8, column_capacity, group_bounds
from mxfp8_cutlass.generator.config_space import GroupedGemmConfig
from mxfp8_cutlass.generator.sm100_config import Sm100Config
from mxfp8_cutlass.kernel import target_of
from mxfp8_cutlass.launch import Shapes, StackedLaunch
from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor
from mxfp8_cutlass.operands import addresses_of, facts_of, prepared, scales_of
from mxfp8_cutlass.select import select_k_groups
from mxfp8_cutlass.sm100_launch import Sm100Launch

PARTS = ("data", "scale", "tile_scale")


def grouped_mm_columnwise(
    a: MXFP8Tensor | ColumnwiseMXFP8,
    b: MXFP8Tensor | ColumnwiseMXFP8,
    offs: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    config: GroupedGemmConfig | None = None,
) -> torch.Tensor:
    """(N, tokens) x (K, tokens) -> (G, N, K): out[g] is the sum over the tokens of group g of a[:, t] b[:, t]ᵀ.

    A group without tokens gives zeros, or adds nothing. See `grouped_mm`, which calls this.
    """
    if not isinstance(a, ColumnwiseMXFP8) or not isinstance(b, ColumnwiseMXFP8):
        raise TypeError(f"a is a {type(a).__name__} and b a {type(b).__name__}: both or none must be a ColumnwiseMXFP8")
    if a.device != b.device:
        raise ValueError(f"b is on {b.device}: it must be on the device of a, {a.device}")
    if (a.tokens, a.offs.shape) != (b.tokens, b.offs.shape):
        raise ValueError(
            f"b has {b.tokens} tokens in {b.offs.shape[0]} groups: it must have those of a, {a.tokens} in "
            f"{a.offs.shape[0]}"
        )
    if offs is None:
        offs = a.offs
    checks.check_index("offs", offs, "a", a.device)
    if offs.shape != a.offs.shape:
        raise ValueError(f"offs has shape {tuple(offs.shape)}: it must be that of a's, {tuple(a.offs.shape)}")
    dtype = checks.check_out_dtype(out_dtype, out)
    n, k = a.shape[0], b.shape[0]
    if n % 16 or k % 16:
        raise ValueError(f"a and b have {n} and {k} features: both must be multiples of 16")
    shape = (offs.shape[0], n, k)
    if max(n, k, capacity := column_capacity(a.tokens, shape[0])) > checks.MAX_ROWS:
        raise ValueError(f"a and b have {n} and {k} features and {capacity} columns: at most {checks.MAX_ROWS} of each")
    if out is not None:
        checks.check_tensor("out", out, shape, dtype, a.device)
        checks.check_aligned("out", out)
        parts = [(f"{name}.{part}", getattr(x.tensor, part)) for name, x in (("a", a), ("b", b)) for part in PARTS]
        checks.check_apart("out", out, [*parts, ("offs", offs)])
    elif accumulate:
        raise ValueError("accumulate is True and out is None: there is nothing to add to")
    on_cpu = a.device.type == "cpu"
    if on_cpu or env.check():
        ends = _checked_ends(offs, a, b)
    target = None if on_cpu else target_of(a.device)
    facts = facts_of(a.tensor, b.tensor, dtype, target, exact=False)
    if config is not None:
        checks.check_config(config, target, facts, k_groups=True)
    if target is not None:
        if config is None:
            config = select_k_groups(n, k, a.tokens, shape[0], target, *facts.values())
        launch = _launch(config, *shape, a.tokens, a.device.index, offs.dtype == torch.int64, accumulate)
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=a.device)
        _run(launch, a.tensor, b.tensor, offs, out)
        return out
    columns = group_bounds(offs)[2].tolist()
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return reference.grouped_mm_columnwise(
        a.tensor.unswizzle(), b.tensor.unswizzle(), columns, sizes, out_dtype=dtype, out=out, accumulate=accumulate
    )


@lru_cache(maxsize=4096)
def _launch(
    config: GroupedGemmConfig,
    groups: int,
    n: int,
    k: int,
    tokens: int,
    device: int,
    index_is_int64: bool,  # noqa: FBT001 - keywords would make the look-up of a warm call slower
    accumulate: bool,  # noqa: FBT001
) -> StackedLaunch | Sm100Launch:
    shapes = Shapes(1, 1, n, k, column_capacity(tokens, groups), tokens)
    if isinstance(config, Sm100Config):
        return Sm100Launch(
            config, shapes, groups, device, index_is_int64=index_is_int64, accumulate=accumulate, cuts_k=True
        )
    return StackedLaunch(
        config, shapes, groups, device, split=False, index_is_int64=index_is_int64, accumulate=accumulate
    )


def _run(
    launch: StackedLaunch | Sm100Launch, a: MXFP8Tensor, b: MXFP8Tensor, offs: torch.Tensor, out: torch.Tensor
) -> None:
    # Folded values are not checked: columns of no group hold anything.
    a, b = prepared(launch.config, a, b, check_values=False)
    scales = scales_of(launch.config, a, b)
    addresses = addresses_of(a, b, scales, out, offs=offs)
    if addresses not in launch.known:
        checks.check_addresses(a, b, offs, None, None, out)
    launch(addresses)


def _checked_ends(offs: torch.Tensor, a: ColumnwiseMXFP8, b: ColumnwiseMXFP8) -> list[int]:
    ends = checks.row_ends(offs, a.tokens)
    for name, x in (("a", a), ("b", b)):
        if x.offs is not offs and x.offs.tolist() != ends:
            raise ValueError(f"offs is {ends}: {name} was quantized with {x.offs.tolist()}")
    return ends
