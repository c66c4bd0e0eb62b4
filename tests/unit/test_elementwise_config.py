"""The configs of kernels that are bound by memory, and that each compiles for each target."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest

from mxfp8_cutlass import elementwise, quantize_tiles, scale_layout
from mxfp8_cutlass.compiler import compile_source
from mxfp8_cutlass.generator.elementwise_config import (
    TARGETS,
    DequantizeConfig,
    FoldConfig,
    QuantizeConfig,
    QuantizeTilesConfig,
    SwizzleConfig,
    elementwise_configs,
    swizzle_configs,
)
from mxfp8_cutlass.generator.render import render

PER_TARGET = 2 * 3 * 2 * 2 + 2 * 3 * 2 + 2 * 2 * 2 + 2 * 3 + 2 * 2


def configs_of(target_sm):
    return (*elementwise_configs(target_sm), *swizzle_configs(target_sm))


def test_all_configs():
    configs = [config for target in TARGETS for config in configs_of(target)]
    assert len({config.name for config in configs}) == len(set(configs)) == len(configs) == PER_TARGET * len(TARGETS)
    assert all(config.check() is None for config in configs)
    for function in (elementwise_configs, swizzle_configs):
        with pytest.raises(ValueError, match="target_sm is '80'"):
            function("80")


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (QuantizeConfig("90a", "e4m3", "bf16", "rceil", fold=True), "target_sm", "90"),
        (QuantizeConfig("90a", "e4m3", "bf16", "rceil", fold=True), "element", "e3m4"),
        (QuantizeConfig("90a", "e4m3", "bf16", "rceil", fold=True), "input", "fp64"),
        (QuantizeConfig("90a", "e4m3", "bf16", "rceil", fold=True), "scaling", "even"),
        (QuantizeTilesConfig("90a", "e4m3", "bf16", "rceil"), "input", "fp64"),
        (QuantizeTilesConfig("90a", "e4m3", "bf16", "rceil"), "scaling", "even"),
        (FoldConfig("90a", "e4m3", 1, stats=False), "rows", 64),
        (DequantizeConfig("90a", "e4m3", "bf16"), "output", "fp64"),
        (SwizzleConfig("90a", "swizzle", "rows"), "target_sm", "90"),
        (SwizzleConfig("90a", "swizzle", "rows"), "direction", "back"),
        (SwizzleConfig("90a", "swizzle", "rows"), "groups", "m"),
    ],
)
def test_reasons(config, field, value):
    assert config.check() is None
    wrong = replace(config, **{field: value})
    assert f"{field}={value!r}" in wrong.check()
    with pytest.raises(ValueError, match=field):
        render(wrong)


@pytest.mark.parametrize("target_sm", TARGETS)
def test_all_compile_without_spills(target_sm):
    for config in configs_of(target_sm):
        cubin = compile_source(render(config), config.name, target_sm)
        assert cubin.spill_bytes == 0, config.name
        ctas = config.ctas_per_sm if isinstance(config, FoldConfig | QuantizeTilesConfig) else 1024 // config.threads
        assert cubin.registers * config.threads * ctas <= 65536, config.name  # of an SM
        assert (cubin.static_shared + config.shared_memory + 1024) * ctas <= 228 * 1024, config.name


STRUCTS = {
    "quantize": [elementwise.QuantizeParams, elementwise.RunMap],
    "quantize_tiles": [quantize_tiles.QuantizeTilesParams, quantize_tiles.TileSide],
    "fold": [elementwise.FoldParams],
    "dequantize": [elementwise.DequantizeParams],
    "swizzle": [scale_layout.SwizzleParams],
}


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_mirror_the_kernels(name):
    """The compiler checks size and offsets. NVRTC's offsetof is no constant; its front end's __INTADDR__ is."""
    lines = [f'#include "mxfp8/{name}.cuh"']
    for mirrored in STRUCTS[name]:
        lines.append(f"static_assert(sizeof(mxfp8::{mirrored.__name__}) == {ctypes.sizeof(mirrored)});")
        for field, _ in mirrored._fields_:
            address = f"__INTADDR__(&static_cast<mxfp8::{mirrored.__name__}*>(nullptr)->{field})"
            lines.append(f"static_assert({address} == {getattr(mirrored, field).offset});")
    compile_source("\n".join([*lines, 'extern "C" __global__ void checked() {}']), "checked", "90a")
