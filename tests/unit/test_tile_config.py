"""The space of grouped GEMM kernels, and the reasons why there are no others."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from mxfp8_cutlass.cache import get_cubin
from mxfp8_cutlass.generator.config_space import all_configs, sm90_configs, sm90_k_group_configs, with_most_stages
from mxfp8_cutlass.generator.render import render
from mxfp8_cutlass.generator.tile_config import GROUP_ENTRY_BYTES, MAX_GROUPS, SHARED_MEMORY_LIMIT, TileConfig

EVERY = (*sm90_configs(), *sm90_k_group_configs())
GOOD = TileConfig("90a", 128, 128, 1, 1, 4, 128, 128, "e4m3", "e4m3", "bf16")


def test_every_config_of_the_space_is_valid():
    configs = EVERY
    assert len(sm90_configs()) > 200
    assert all(config.check() is None for config in configs)
    assert len(set(configs)) == len(configs) == len({config.name for config in configs})
    assert not any(config.k_groups for config in sm90_configs())
    assert all(config.k_groups for config in sm90_k_group_configs())


def test_all_configs_of_a_target_have_names_of_their_own():
    for target in ("90a", "100a"):
        names = [config.name for config in all_configs(target)]
        assert len(set(names)) == len(names)
        assert all(config.target_sm == target for config in all_configs(target))
    assert set(EVERY) <= set(all_configs("90a"))


def test_name_is_an_identifier_that_tells_configs_apart():
    for config in EVERY:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", config.name)
        for out in {"bf16", "fp16", "fp32"} - {config.out}:
            assert replace(config, out=out).name != config.name
    name = GOOD.name
    assert name == "sm90_mxfp8_grouped_gemm_128x128x128_1x1x1_4stages_p128_sfb128_e4m3_e4m3_bf16"
    assert replace(GOOD, k_groups=True).name == name.replace("gemm_", "gemm_kgroups_")
    other = replace(GOOD, tile_m=64, tile_n=192, cluster_n=2, stages=3, promotion_k=32, sfb_rows=1, element_b="e5m2")
    assert other.name == "sm90_mxfp8_grouped_gemm_64x192x128_1x2x1_3stages_p32_sfb1_e4m3_e5m2_bf16"


def test_configs_are_frozen_and_compare_by_fields():
    assert replace(GOOD) == GOOD
    assert hash(GOOD) == hash(replace(GOOD))
    with pytest.raises(FrozenInstanceError):
        GOOD.stages = 3


def test_every_field_but_the_target_is_in_the_name():
    """Two kernels of one name would share a place in a bundle."""
    others = {"tile_m": 64, "tile_n": 64, "cluster_m": 2, "cluster_n": 2, "stages": 3, "promotion_k": 32, "sfb_rows": 1}
    others |= {"element_a": "e5m2", "element_b": "e5m2", "out": "fp32", "k_groups": True}
    assert set(others) == {field.name for field in fields(GOOD)} - {"target_sm"}
    names = {replace(GOOD, **{field: value}).name for field, value in others.items()}
    assert len(names | {GOOD.name}) == len(others) + 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target_sm": "100a"}, "target_sm='100a'"),
        ({"target_sm": "90"}, "target_sm='90'"),
        ({"element_a": "e3m2"}, "element_a='e3m2'"),
        ({"element_b": "bf16"}, "element_b='bf16'"),
        ({"out": "fp64"}, "out='fp64'"),
        ({"promotion_k": 64}, "promotion_k=64"),
        ({"sfb_rows": 64}, "sfb_rows=64"),
        ({"promotion_k": 32}, "sfb_rows=128 with promotion_k=32"),
        ({"promotion_k": 32, "sfb_rows": 1, "k_groups": True}, "k_groups=True with promotion_k=32"),
        ({"promotion_k": 32, "sfb_rows": 1, "tile_m": 256, "tile_n": 192}, "192 accumulators"),
        ({"tile_m": 256}, "tile_m=256"),
        ({"tile_m": 192}, "tile_m=192"),
        ({"tile_m": 32}, "tile_m=32"),
        ({"tile_n": 96}, "tile_n=96"),
        ({"tile_n": 0}, "tile_n=0"),
        ({"tile_n": 320}, "tile_n=320"),
        ({"tile_n": 256}, "256 accumulators"),
        ({"cluster_m": 2, "cluster_n": 2}, "cluster 2x2"),
        ({"cluster_m": 0}, "cluster 0x1"),
        ({"cluster_n": 4}, "cluster 1x4"),
        ({"stages": 1}, "stages=1"),
        ({"stages": 40}, "bytes of shared memory"),
    ],
    ids=str,
)
def test_each_constraint_has_its_own_reason(changes, reason):
    assert GOOD.check() is None
    wrong = replace(GOOD, **changes)
    assert reason in wrong.check()
    with pytest.raises(ValueError, match="is not valid"):
        render(wrong)
    with pytest.raises(ValueError, match="is not valid"):
        get_cubin(wrong)


def test_as_many_stages_as_fit():
    for config in EVERY:
        assert config.stages >= 3
        assert "shared memory" in replace(config, stages=config.stages + 1).check()
        assert with_most_stages(replace(config, stages=2)) == config


def test_resources():
    for config in EVERY:
        assert config.shared_memory <= SHARED_MEMORY_LIMIT["90a"]
        assert config.shared_memory == config.table_offset + GROUP_ENTRY_BYTES * (MAX_GROUPS + 1)
        assert config.table_offset >= config.stages * (config.tile_m + config.tile_n) * config.tile_k
        assert config.threads == 128 * (1 + config.exact) + min(2 * config.tile_m, 256)
        assert config.cluster_size in (1, 2)


def test_source_has_an_entry_of_the_name():
    for config in EVERY:
        source = render(config)
        assert source.count(config.name) == 1
        assert source == render(config)
    sources = {render(config).replace(config.name, "") for config in EVERY}
    assert len(sources) == len(EVERY)


REPRESENTATIVE = [
    {"tile_m": 128, "tile_n": 192, "cluster_m": 2, "promotion_k": 128, "sfb_rows": 128, "out": "bf16"},
    {"tile_m": 128, "tile_n": 192, "cluster_n": 2, "promotion_k": 128, "sfb_rows": 1, "out": "fp32"},
    {"tile_m": 128, "tile_n": 128, "cluster_m": 1, "promotion_k": 32, "sfb_rows": 1, "out": "fp16"},
    {"tile_m": 64, "tile_n": 64, "cluster_m": 1, "promotion_k": 128, "sfb_rows": 128, "out": "bf16"},
    {"tile_m": 128, "tile_n": 192, "cluster_m": 2, "sfb_rows": 128, "out": "fp32", "k_groups": True},
    {"tile_m": 128, "tile_n": 128, "cluster_m": 1, "sfb_rows": 1, "out": "bf16", "k_groups": True},
]


@pytest.mark.parametrize("like", REPRESENTATIVE, ids=lambda like: "-".join(str(value) for value in like.values()))
def test_compiles_without_spills(like):
    config = next(c for c in EVERY if all(getattr(c, name) == value for name, value in like.items()))
    cubin = get_cubin(config)
    assert cubin.name == config.name
    assert cubin.spill_bytes == 0
    assert cubin.registers <= 168  # 384 threads have 65536 between them; 256 threads keep within it too
