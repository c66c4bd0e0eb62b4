"""What a grouped GEMM kernel takes of its operands: the facts that pick it, folding, scales, addresses.

Hopper's kernels fold operands or take each scale, and read compact scales; Blackwell's take each and read blocked ones.
"""

from __future__ import annotations

from typing import TypedDict

import torch

from mxfp8_cutlass import checks
from mxfp8_cutlass.generator.config_space import GroupedGemmConfig
from mxfp8_cutlass.generator.sm100_config import Sm100Config
from mxfp8_cutlass.kernel import target_of
from mxfp8_cutlass.launch import Addresses
from mxfp8_cutlass.mxfp8_tensor import DTYPE_NAMES, RUN, TILE_ROWS, MXFP8Tensor
from mxfp8_cutlass.quantize import fold


class Facts(TypedDict, total=False):
    """The fields of a config that operands fix, in select.py's order. The first two are Hopper's."""

    promotion_k: int
    sfb_rows: int
    element_a: str
    element_b: str
    out: str


def facts_of(a: MXFP8Tensor, b: MXFP8Tensor, dtype: torch.dtype, target_sm: str | None, *, exact: bool) -> Facts:
    """What the kernel must be like. Weights that were folded along K alone are taken as they are.

    target_sm: None for CPU tensors, to which the same rules apply as on Hopper.
    """
    types: Facts = {"element_a": DTYPE_NAMES[a.dtype], "element_b": DTYPE_NAMES[b.dtype], "out": DTYPE_NAMES[dtype]}
    if target_sm == "100a":
        return types
    sfb_rows = 1 if exact or b.folded == 1 else TILE_ROWS
    return {"promotion_k": 32 if exact else RUN, "sfb_rows": sfb_rows, **types}


def folds_for(device: torch.device) -> tuple[int, int]:
    """How far a product's operands are best folded: on Hopper the first per run and the second to tiles."""
    if device.type == "cuda" and target_of(device) == "100a":
        return 0, 0
    return 1, TILE_ROWS


def is_ready(config: GroupedGemmConfig, a: MXFP8Tensor, b: MXFP8Tensor) -> bool:
    """Whether `prepared` would return the operands as they are."""
    if isinstance(config, Sm100Config):
        return True
    if a.swizzled or b.swizzled:
        return False
    return config.promotion_k < RUN or (a.folded > 0 and b.folded >= config.sfb_rows)


def prepared(
    config: GroupedGemmConfig, a: MXFP8Tensor, b: MXFP8Tensor, *, check_values: bool
) -> tuple[MXFP8Tensor, MXFP8Tensor]:
    """Return the operands with elements as the kernel reads them: folded as far as it needs."""
    if isinstance(config, Sm100Config):
        return a, b
    a, b = a.unswizzle(), b.unswizzle()
    if config.promotion_k < RUN:
        return a, b
    a, b = fold(a), fold(b, config.sfb_rows)
    if check_values:
        checks.check_folded_values("a", a)
        checks.check_folded_values("b", b)
    return a, b


def scales_of(
    config: GroupedGemmConfig, a: MXFP8Tensor, b: MXFP8Tensor, offs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales as the kernel reads them; to be kept until it is launched. `offs`: if it cuts the rows of a."""
    if isinstance(config, Sm100Config):
        return a.swizzle(offs).scale, b.swizzle().scale
    if config.promotion_k < RUN:  # as they lie
        return a.scale_bytes, b.scale_bytes
    return a.scale_by_run(), b.scale_by_run()


def addresses_of(
    a: MXFP8Tensor,
    b: MXFP8Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> Addresses:
    """Return where all lie; `scales` as scales_of gives them."""
    return Addresses(
        a.data.data_ptr(),
        scales[0].data_ptr(),
        b.data.data_ptr(),
        scales[1].data_ptr(),
        0 if b.tile_scale is None else b.tile_scale.data_ptr(),
        out.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if offs is None else offs.data_ptr(),
        0 if counts is None else counts.data_ptr(),
    )
