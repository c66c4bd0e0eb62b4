"""What SM100 kernels are compiled to: block-scaled MMA of the right kind, no local memory. None of them has run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sass

from mxfp8_cutlass import bundle, env
from mxfp8_cutlass.cache import get_cubin
from mxfp8_cutlass.compiler import compile_source
from mxfp8_cutlass.generator.sm100_config import Sm100Config, sm100_configs

ONE_SM = Sm100Config("100a", 128, 128, 1, 1, "e4m3", "e4m3", "bf16")

MMA = """
extern "C" __global__ void mma(unsigned d, unsigned long a, unsigned long b, unsigned i, unsigned sfa, unsigned sfb) {{
  asm volatile(
      "{{ .reg .pred p; setp.ne.b32 p, %0, 0; tcgen05.mma.cta_group::{sms}.kind::{kind} [%0], %1, %2, %3{scales}, p; }}"
      :: "r"(d), "l"(a), "l"(b), "r"(i), "r"(sfa), "r"(sfb));
}}"""
LOCAL = """
extern "C" __global__ void local(float* x, int i) {
  float v[64];
  for (int j = 0; j < 64; ++j) v[j * i & 63] = x[j];
  x[0] = v[i];
}"""


def mma(kind: str, sms: int) -> bytes:
    """A kernel of one MMA."""
    scales = ", [%4], [%5]" if kind.endswith("block_scale") else ""
    return compile_source(MMA.format(kind=kind, sms=sms, scales=scales), "mma", "100a").code


@pytest.mark.parametrize("sms", [1, 2])
@pytest.mark.parametrize("kind", ["mxf8f6f4.block_scale", "f8f6f4", "mxf4.block_scale", "i8"])
def test_operation_codes_tell_kinds_of_mma_apart(kind, sms):
    code = mma(kind, sms)
    found = sass.operations(code, "mma")
    block_scaled = kind == "mxf8f6f4.block_scale"
    assert (found[sass.BLOCK_SCALED_MMA], found[sass.PLAIN_MMA]) == (block_scaled, not block_scaled)
    assert sass.pair_mmas(code, "mma") == (block_scaled and sms == 2)


def test_operation_codes_of_local_memory():
    found = sass.operations(compile_source(LOCAL, "local", "100a").code, "local")
    assert found[sass.LOCAL_LOAD] > 0
    assert found[sass.LOCAL_STORE] > 0


def check(code: bytes, config: Sm100Config) -> None:
    """K = 128 of a stage is four MMAs of 32, twice if the first stage stands before the loop (tile_n=256)."""
    found = sass.operations(code, config.name)
    mmas = 8 if config.tile_n == 256 else 4
    assert (found[sass.BLOCK_SCALED_MMA], found[sass.PLAIN_MMA]) == (mmas, 0), config.name
    assert sass.pair_mmas(code, config.name) == (mmas if config.sms == 2 else 0), config.name
    assert (found[sass.LOCAL_LOAD], found[sass.LOCAL_STORE]) == (0, 0), config.name


@pytest.mark.parametrize(
    "config",
    [
        ONE_SM,
        pytest.param(replace(ONE_SM, tile_m=256, tile_n=256, cluster_m=2, element_b="e5m2"), marks=pytest.mark.slow),
    ],
    ids=lambda config: config.name,
)
def test_kernel_has_block_scaled_mma_and_no_local_memory(config):
    cubin = get_cubin(config)
    assert cubin.spill_bytes == 0
    check(cubin.code, config)


def test_every_kernel_of_the_bundle_has_block_scaled_mma_and_no_local_memory():
    """The whole space, where MXFP8_CUTLASS_BUNDLE names what `build.py compile --target 100a --all` wrote."""
    directory = env.bundle()
    if directory is None:
        pytest.skip(f"{env.BUNDLE} is not set")
    have = bundle.manifest(directory)
    configs = [config for config in sm100_configs() if f"100a/{config.name}" in have]
    if not configs:
        pytest.skip(f"{directory} has no SM100 GEMM kernel")
    for config in configs:
        check((directory / have[f"100a/{config.name}"]["file"]).read_bytes(), config)
