"""Which kernels exist: every valid TileConfig of a target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from mxfp8_cutlass.generator.elementwise_config import elementwise_configs, swizzle_configs
from mxfp8_cutlass.generator.render import KernelConfig
from mxfp8_cutlass.generator.sm100_config import Sm100Config, sm100_configs
from mxfp8_cutlass.generator.sm100_launch_config import Sm100ArgumentsConfig, Sm100ParamsConfig
from mxfp8_cutlass.generator.tile_config import CUDA_OUTPUT, CUTLASS_ELEMENT, TileConfig

GroupedGemmConfig = TileConfig | Sm100Config
"""Of a grouped GEMM kernel of any target."""

SM90_TILES = [
    # (tile_m, tile_n, cluster_m, cluster_n)
    (64, 64, 1, 1),  # decode: little weight per CTA, so that few tiles still fill the chip
    (64, 128, 1, 1),
    (128, 64, 1, 1),
    (128, 128, 1, 1),
    (128, 128, 2, 1),
    (128, 128, 1, 2),
    (128, 192, 1, 1),
    (128, 192, 2, 1),
    (128, 192, 1, 2),
]
SM90_SCALES = [
    # (promotion_k, sfb_rows)
    (128, 128),  # weights in tile form: one multiply-add per element
    (128, 1),  # both operands folded along K alone
]
SM90_K_GROUP_TILES = [  # weight gradients: both axes of the output are features, so large tiles waste little
    (128, 128, 1, 1),
    (128, 128, 2, 1),
    (128, 192, 1, 1),
    (128, 192, 2, 1),
]
SM90_EXACT_TILES = [
    (64, 64, 1, 1),
    (64, 128, 1, 1),
    (128, 128, 1, 1),
    (128, 192, 1, 1),
    (256, 128, 1, 1),  # tall: wgmma reads B from shared memory, which limits this kernel; clusters gained nothing
]
SM90_EXACT_SCALES = (32, 1)


def with_most_stages(config: TileConfig) -> TileConfig:
    """The config with as many stages as shared memory holds."""
    while (more := replace(config, stages=config.stages + 1)).check() is None:
        config = more
    return config


def _sm90_configs() -> Iterator[TileConfig]:
    kinds = [*product(SM90_TILES, SM90_SCALES), *product(SM90_EXACT_TILES, [SM90_EXACT_SCALES])]
    for (tile, scales), a, b, out in product(kinds, CUTLASS_ELEMENT, CUTLASS_ELEMENT, CUDA_OUTPUT):
        config = TileConfig("90a", *tile, 2, *scales, a, b, out)
        if config.check() is None:
            yield with_most_stages(config)


@cache
def sm90_configs() -> tuple[TileConfig, ...]:
    """Every grouped GEMM kernel for Hopper whose groups are rows."""
    return tuple(_sm90_configs())


@cache
def sm90_k_group_configs() -> tuple[TileConfig, ...]:
    """Every one whose groups are runs of K."""
    kinds = product(SM90_K_GROUP_TILES, SM90_SCALES, CUTLASS_ELEMENT, CUTLASS_ELEMENT, CUDA_OUTPUT)
    return tuple(
        with_most_stages(TileConfig("90a", *tile, 2, *scales, a, b, out, k_groups=True))
        for tile, scales, a, b, out in kinds
    )


@cache
def all_configs(target_sm: str) -> tuple[KernelConfig, ...]:
    """Every kernel of a target: grouped GEMM, what prepares its launch, quantize, fold, dequantize, swizzle."""
    if target_sm == "90a":
        gemms: tuple[KernelConfig, ...] = (*sm90_configs(), *sm90_k_group_configs())
    else:
        builders = (Sm100ParamsConfig(target_sm, gemm) for gemm in sm100_configs())
        gemms = (*sm100_configs(), *builders, Sm100ArgumentsConfig(target_sm))
    return (*gemms, *elementwise_configs(target_sm), *swizzle_configs(target_sm))
