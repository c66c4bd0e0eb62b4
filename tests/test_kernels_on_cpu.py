"""The elementwise kernels' own code against the oracle, without a GPU: lanes, shuffles and all.

test_columns_on_cpu.py has the kernel that quantizes along tokens.
"""

from __future__ import annotations

import importlib

import kernel_emulator
import pytest
import torch
from mx_checks import (
    FP8,
    INPUTS,
    SCALINGS,
    check_fold,
    check_folding_at_once,
    check_quantize,
    random_bits,
    random_floats,
    wild,
)

from mxfp8_cutlass import elementwise, reference
from mxfp8_cutlass.generator.elementwise_config import QuantizeTilesConfig, elementwise_configs

quantize = importlib.import_module("mxfp8_cutlass.quantize")  # as an attribute, this name is the function
COMPILER = kernel_emulator.find_compiler()
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ with _Float16")

CONFIGS = [config for config in elementwise_configs("90a") if not isinstance(config, QuantizeTilesConfig)]

SHAPES = [(1, 32), (3, 96), (2, 5, 160), (70, 256), (2, 129, 416)]
TO_FOLD = [*SHAPES, (2, 300, 544)]
"""The last has more boxes for each CTA than there are stages."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return kernel_emulator.Kernels(COMPILER, tmp_path_factory.mktemp("kernels"), CONFIGS)


@pytest.fixture(autouse=True)
def kernels(compiled, monkeypatch):
    """CPU tensors take the way of CUDA tensors, up to the launch."""
    monkeypatch.setattr(elementwise, "launch", compiled.launch)
    monkeypatch.setattr(elementwise, "tensor_map", kernel_emulator.tensor_map)
    monkeypatch.setattr(elementwise, "resident_ctas", lambda config, device: 2)  # few: CTAs go through their stages
    monkeypatch.setattr(elementwise, "target_of", lambda device: "90a")
    monkeypatch.setattr(quantize, "_on_cuda", lambda name, x: True)
    compiled.launched.clear()
    return compiled


@pytest.mark.parametrize("x_dtype", INPUTS, ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_quantize(x_dtype, dtype, scaling, kernels):
    for seed, shape in enumerate(SHAPES):
        for x in (
            wild(shape, x_dtype, seed),
            wild(shape, x_dtype, seed, spread=0.3),
            random_floats(shape, x_dtype, seed),
        ):
            check_quantize(x, dtype, scaling, "cpu")
            check_folding_at_once(x, dtype, scaling, "cpu")
    assert len(kernels.launched) == 2 * 3 * len(SHAPES)


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("spread", [0, 9, 60, 254])
def test_fold(dtype, rows, spread, kernels):
    for seed, shape in enumerate(TO_FOLD):
        check_fold(*random_bits(shape, dtype, seed, spread), dtype, rows, "cpu")
        check_fold(*random_bits(shape, dtype, seed, spread, nan_share=0.3, zero_share=0.7), dtype, rows, "cpu")
    assert len(kernels.launched) == 2 * 2 * len(TO_FOLD)


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("out_dtype", INPUTS, ids=str)
def test_dequantize(dtype, out_dtype, kernels):
    for shape in SHAPES:
        data, scale = random_bits(shape, dtype, seed=1, spread=254)
        xq = quantize.MXFP8Tensor(torch.from_numpy(data).view(dtype), torch.from_numpy(scale))
        expected = reference.dequantize(xq, out_dtype)
        torch.testing.assert_close(xq.dequantize(out_dtype), expected, rtol=0, atol=0, equal_nan=True)
    assert len(kernels.launched) == len(SHAPES)


def test_every_kernel_is_reached(kernels):
    for dtype in FP8:
        for x_dtype in INPUTS:
            x = wild((2, 32), x_dtype)
            for scaling in SCALINGS:
                for folded in (False, True):
                    xq = quantize.quantize(x, dtype, scaling, fold=folded)
            xq.dequantize(x_dtype)
        xq = quantize.quantize(x, dtype)
        for rows in (1, 128):
            quantize.fold(xq, rows)
            quantize.fold(xq, rows, return_stats=True)
    assert set(kernels.launched) == {config.name for config in CONFIGS}
