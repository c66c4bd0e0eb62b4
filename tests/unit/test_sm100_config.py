"""The space of grouped GEMM kernels for Blackwell, and the reasons why there are no others."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import pytest

from mxfp8_cutlass.generator.config_space import all_configs
from mxfp8_cutlass.generator.render import render
from mxfp8_cutlass.generator.sm100_config import SM100_TILES, Sm100Config, sm100_configs

GOOD = Sm100Config("100a", 128, 128, 1, 1, "e4m3", "e4m3", "bf16")


def test_every_config_of_the_space_is_valid_and_among_the_targets():
    configs = sm100_configs()
    assert len(configs) == len(SM100_TILES) * 2 * 2 * 3
    assert all(config.check() is None for config in configs)
    assert len(set(configs)) == len(configs) == len({config.name for config in configs})
    assert set(configs) <= set(all_configs("100a"))
    assert not set(configs) & set(all_configs("90a"))


def test_space_has_every_pair_of_elements_and_every_output_for_one_sm_and_two():
    have = {(config.sms, config.element_a, config.element_b, config.out) for config in sm100_configs()}
    assert have == set(product((1, 2), ("e4m3", "e5m2"), ("e4m3", "e5m2"), ("bf16", "fp16", "fp32")))


def test_every_field_but_the_target_is_in_the_name():
    assert GOOD.name == "sm100_mxfp8_grouped_gemm_128x128x128_1x1x1_1sm_e4m3_e4m3_bf16"
    others = {"tile_m": 256, "tile_n": 64, "cluster_m": 2, "cluster_n": 2}
    others |= {"element_a": "e5m2", "element_b": "e5m2", "out": "fp32"}
    assert set(others) == {field.name for field in fields(GOOD)} - {"target_sm"}
    names = {replace(GOOD, **{field: value}).name for field, value in others.items()}
    assert len(names | {GOOD.name}) == len(others) + 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target_sm": "90a"}, "target_sm='90a'"),
        ({"element_a": "e2m1"}, "element_a='e2m1'"),
        ({"element_b": "bf16"}, "element_b='bf16'"),
        ({"out": "fp8"}, "out='fp8'"),
        ({"tile_m": 64}, "tile_m=64"),
        ({"tile_n": 32}, "tile_n=32"),
        ({"tile_n": 512}, "tile_n=512"),
        ({"cluster_m": 3}, "cluster 3x1"),
        ({"cluster_n": 8}, "cluster 1x8"),
        ({"cluster_m": 4, "cluster_n": 4}, "cluster 4x4"),
        ({"tile_m": 256}, "cluster_m=1"),
    ],
)
def test_what_cannot_be_built_is_refused_with_a_reason(change, reason):
    config = replace(GOOD, **change)
    assert reason in (config.check() or "")
    with pytest.raises(ValueError, match="is not valid"):
        render(config)


def test_source_asks_for_patched_headers_and_takes_cutlass_params():
    source = render(replace(GOOD, tile_m=256, cluster_m=2, element_b="e5m2", out="fp32"))
    assert '#include "mxfp8/patched_cutlass.cuh"\n' in source
    assert "cutlass::float_e4m3_t, cutlass::float_e5m2_t, float," in source
    assert "__cluster_dims__(2, 1, 1)" in source
    assert "(const __grid_constant__ Gemm::Params params)" in source
