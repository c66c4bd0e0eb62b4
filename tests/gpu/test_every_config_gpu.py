"""Every kernel of the space runs. Compile them ahead (`build.py compile --all`) and set MXFP8_CUTLASS_BUNDLE."""

from __future__ import annotations

import pytest
import torch
from products import E4M3, E5M2, folded, mixed_tiles, offsets, operand, run
from token_groups import check_columnwise_product
from torch import bfloat16, float16, float32

import mxfp8_cutlass as mx
from mxfp8_cutlass.generator.config_space import sm90_configs, sm90_k_group_configs

pytestmark = pytest.mark.gpu

ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2}
OUTPUTS = {"bf16": bfloat16, "fp16": float16, "fp32": float32}


def short(config) -> str:
    return config.name.removeprefix("sm90_mxfp8_grouped_gemm_")


@pytest.mark.parametrize("config", sm90_configs(), ids=short)
def test_config(config):
    """Ragged groups beyond a stripe of tiles; K ends within a run; a batch; some weight tiles are mixed."""
    a = operand((8500, 544), ELEMENTS[config.element_a], 1, "cuda")
    b = mixed_tiles(operand((5, 208, 544), ELEMENTS[config.element_b], 2, "cuda"))
    options = {"out_dtype": OUTPUTS[config.out], "exact": config.promotion_k == 32, "config": config}
    run(a, folded(b, config.sfb_rows if config.promotion_k == 128 else 0), [130, 0, 1, 63, 8250], **options)
    batch = operand((5, 70, 544), ELEMENTS[config.element_a], 3, "cuda")
    run(batch, b, bias=True, accumulate=True, **options)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("config", sm90_k_group_configs(), ids=short)
def test_config_for_groups_that_cut_k(config, accumulate):
    """More than 32 runs, groups of none, a tail of NaNs; features that end within a tile; some tiles are mixed."""
    sizes, generator = [130, 0, 1, 63, 4500], torch.Generator("cuda").manual_seed(1)
    x, dy = (torch.randn((4700, features), device="cuda", generator=generator) for features in (400, 656))
    dy[:, :200] *= torch.exp(6 * torch.randn((1, 200), device="cuda", generator=generator))
    for rows in (x, dy):
        rows[sum(sizes) :] = float("nan")
    offs = offsets(sizes, "cuda")
    a = mx.quantize_columnwise(x, offs, ELEMENTS[config.element_a], fold_rows=1)
    b = mx.quantize_columnwise(dy, offs, ELEMENTS[config.element_b], fold_rows=config.sfb_rows)
    out = torch.randn((5, 400, 656), device="cuda", generator=generator).to(OUTPUTS[config.out])
    old = out.clone() if accumulate else None
    mx.grouped_mm(a, b, offs, out=out, accumulate=accumulate, config=config)
    check_columnwise_product(out, a, b, sizes, old)
