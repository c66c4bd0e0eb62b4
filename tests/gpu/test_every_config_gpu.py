"""Every kernel of the space runs. Compile them ahead (`build.py compile --all`) and set MXFP8_CUTLASS_BUNDLE."""

from __future__ import annotations

import pytest
from products import E4M3, E5M2, folded, mixed_tiles, operand, run
from torch import bfloat16, float16, float32

from mxfp8_cutlass.generator.config_space import sm90_configs

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
