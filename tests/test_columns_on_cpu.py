"""The kernel that quantizes along tokens and features against the oracle, bit for bit, without a GPU: its own code."""

from __future__ import annotations

import ctypes
import importlib

import kernel_emulator
import numpy as np
import pytest
import torch
from mx_checks import FP8, INPUTS, SCALINGS, check_scale_by_run, random_floats, raw, wild
from products import E4M3, E5M2, offsets
from test_columnwise import check_columns, check_sums
from token_groups import SPLITS, columns_of, with_poisoned_tail

from mxfp8_cutlass import columnwise, elementwise
from mxfp8_cutlass.columnwise import both_directions
from mxfp8_cutlass.generator.elementwise_config import QuantizeTilesConfig, elementwise_configs
from mxfp8_cutlass.quantize import fold, quantize

COMPILER = kernel_emulator.find_compiler()
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ with _Float16")
CONFIGS = [config for config in elementwise_configs("90a") if isinstance(config, QuantizeTilesConfig)]
launches = importlib.import_module("mxfp8_cutlass.quantize_tiles")  # as an attribute, this name may be the function

RAGGED = [130, 0, 1, 63, 66, 0]
POISON, GUARD = 0xA5, 4096


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return kernel_emulator.Kernels(COMPILER, tmp_path_factory.mktemp("kernels"), CONFIGS)


@pytest.fixture(autouse=True)
def kernels(compiled, monkeypatch):
    """CPU tensors take the way of CUDA tensors, up to the launch. Results lie in memory that was used before."""
    pools = []

    class Torch:
        """torch, but for torch.empty."""

        @staticmethod
        def empty(size, dtype, device):
            count = torch.Size(size).numel() * dtype.itemsize
            pool = torch.full((count + 2 * GUARD,), POISON, dtype=torch.uint8)
            pools.append(pool)
            return pool[GUARD : GUARD + count].view(dtype).view(size)

        def __getattr__(self, name):
            return getattr(torch, name)

    monkeypatch.setattr(elementwise, "launch", compiled.launch)
    monkeypatch.setattr(launches, "target_of", lambda device: "90a")
    monkeypatch.setattr(columnwise, "_on_cuda", lambda x: True)
    monkeypatch.setattr(launches, "torch", Torch())
    compiled.launched.clear()
    yield compiled
    for pool in pools:  # nothing else is written
        assert (pool[:GUARD] == POISON).all()
        assert (pool[-GUARD:] == POISON).all()


def tokens_first(x):
    """Blocks of `x` become those of tokens."""
    return x.mT.contiguous()


def check_rows(got, x, dtype=E4M3, scaling="rceil", fold_rows=0):
    want = quantize(x, dtype, scaling)
    want = fold(want, fold_rows) if fold_rows else want
    assert got.folded == fold_rows
    for a, b in zip(raw(got), raw(want), strict=True):
        np.testing.assert_array_equal(a, b)
    if fold_rows:
        check_scale_by_run(got)
    if fold_rows == 128:
        assert torch.equal(got.tile_scale, want.tile_scale)


def check_run_scales(got, ends):
    """Those of the groups' runs, in the order that products read."""
    by_run, scale = got.tensor.scale_by_run(), got.tensor.scale_bytes
    for _, columns in columns_of(got, ends):
        runs = slice(columns.start // 128, columns.stop // 128)
        assert torch.equal(by_run[runs, : got.shape[0]], scale[:, columns.start // 32 : columns.stop // 32 : 4].mT)


def check(x, sizes, dtype=E4M3, scaling="rceil", rows=1, columns=1, sums=False, offs_dtype=torch.int32, factors=None):
    offs, ends = offsets(sizes, dtype=offs_dtype), offsets(sizes).tolist()
    before = x.clone()
    options = {"rowwise": rows, "columnwise": columns, "bias_grad": sums, "bias_scale": factors}
    got = both_directions(x, offs, dtype, scaling, **options)
    assert torch.equal(x.view(torch.uint8), before.view(torch.uint8))
    assert (got.rowwise is None) == (rows is None)
    assert (got.columnwise is None) == (columns is None)
    if rows is not None:
        check_rows(got.rowwise, x, dtype, scaling, rows)
    if columns is not None:
        check_columns(got.columnwise, x, ends, dtype, scaling, columns)
        if columns:
            check_run_scales(got.columnwise, ends)
    if sums:
        check_sums(got.bias_grad, x, ends, factors)
    return got


@pytest.mark.parametrize("x_dtype", INPUTS, ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_types(x_dtype, dtype, scaling, kernels):
    for rows, columns in ((0, 128), (1, 0), (0, 1)):
        x = tokens_first(wild((160, 320), x_dtype, seed=rows + columns))
        check(x, [130, 0, 1, 63, 66], dtype, scaling, rows, columns)
    assert set(kernels.launched) == {c.name for c in CONFIGS if c.name == kernels.launched[0]}


@pytest.mark.parametrize("x_dtype", INPUTS, ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("columns", [0, 1, 128])
def test_any_bits(x_dtype, dtype, columns):
    """NaNs and infinities of both signs, subnormals, zeros of both signs."""
    x = tokens_first(random_floats((96, 192), x_dtype, seed=columns))
    check(x, [100, 40, 50], dtype, "floor", columns=columns)
    x = tokens_first(wild((96, 192), x_dtype, seed=columns, spread=0.3))
    x[3, 5], x[40, 6], x[150, 7] = float("nan"), float("inf"), -float("inf")
    check(x, [100, 40, 50], dtype, "rceil", rows=0, columns=columns)


@pytest.mark.parametrize("split", SPLITS)
def test_splits(split):
    """The last tile of features is narrow, the tail of the tokens poisoned and quantized along features alone."""
    for tokens, seed in ((300, 0), (129, 1)):
        sizes = SPLITS[split](tokens)
        x = tokens_first(wild((160, -(-tokens // 32) * 32), torch.bfloat16, seed))[:tokens]
        check(with_poisoned_tail(x, sum(sizes)).contiguous(), sizes, columns=seed, sums=True)


@pytest.mark.parametrize("features", [16, 48, 144])
@pytest.mark.parametrize("x_dtype", INPUTS, ids=str)
def test_features_that_are_no_multiple_of_32(features, x_dtype):
    x = with_poisoned_tail(tokens_first(wild((features, 224), x_dtype)), 194)
    check(x, [130, 0, 1, 63], rows=None, columns=1)
    check(x, [130, 0, 1, 63], rows=None, columns=128)


def test_many_groups():
    """More than a CTA has threads."""
    sizes = [[3, 0, 0, 40, 0][i % 5] if i % 90 < 10 else 0 for i in range(700)]
    x = tokens_first(wild((32, -(-sum(sizes) // 32) * 32), torch.bfloat16))
    check(x, sizes, rows=None, columns=1, offs_dtype=torch.int64)


@pytest.mark.parametrize("x_dtype", INPUTS, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_sums(x_dtype, scaled):
    x = with_poisoned_tail(torch.randn(300, 160).to(x_dtype), sum(RAGGED))
    factors = with_poisoned_tail(torch.randn(300).to(x_dtype), sum(RAGGED)) if scaled else None
    first = check(x, RAGGED, rows=None, columns=1, sums=True, factors=factors, offs_dtype=torch.int64)
    again = check(x, RAGGED, rows=None, columns=None, sums=True, factors=factors)
    assert torch.equal(first.bias_grad, again.bias_grad)


@pytest.mark.parametrize("x_dtype", INPUTS, ids=str)
@pytest.mark.parametrize("shape", [(2, 160, 96), (288, 160), (3, 32, 32)], ids=str)
def test_matrices(shape, x_dtype):
    """Without offs: rows of matrices, that end in the middle of a run."""
    for rows, columns in ((128, 128), (1, 0), (0, 1), (128, None)):
        x = wild(shape, x_dtype, seed=rows)
        x[..., :20, :] *= 2.0**-14  # mixed tiles
        got = both_directions(x, None, E5M2, "rceil", rowwise=rows, columnwise=columns)
        check_rows(got.rowwise, x, E5M2, "rceil", rows)
        if columns is not None:
            check_rows(got.columnwise, tokens_first(x), E5M2, "rceil", columns)


def test_one_launch_each(kernels):
    x = wild((64, 32), torch.bfloat16)
    both_directions(x, offsets([40, 20]), E4M3, "rceil", rowwise=1, columnwise=128, bias_grad=True)
    assert kernels.launched == ["sm90_mxfp8_quantize_tiles_bf16_e4m3_rceil"]


@pytest.mark.parametrize("ends", [[-5, 70], [2**40, 3], [60, 20], [-(2**62), 2**62], [2**31, 2**32]])
def test_wrong_offs_reach_nothing_outside(ends):
    """On CUDA their values are not looked at beforehand."""
    x = wild((64, 32), torch.bfloat16)
    options = {"features_fold": 1, "tokens_fold": 128, "sums": False}
    for offs in (torch.tensor(ends), torch.tensor(ends).to(torch.int32)):
        launches.quantize_tiles(x, offs, E4M3, "rceil", **options)


PLACES = """
#include "cuda_on_cpu.h"
#include "mxfp8/quantize_tiles.cuh"
using namespace mxfp8;
template <class Tiles> void places(u32* words, u32* loads, u32* factors) {
  for (u32 thread = 0; thread < Tiles::kThreads; ++thread) {
    words[thread] = Tiles::place_of_words(thread);
    for (u32 i = 0; i < Tiles::kLoads; ++i) loads[i * Tiles::kThreads + thread] = Tiles::place_of_load(thread, i);
  }
  for (u32 token = 0; token < 128; ++token) factors[token] = 4 * Tiles::factor_index(token);
}
extern "C" void of_16_bits(u32* w, u32* l, u32* f) { places<QuantizeTiles<Bf16, E4M3, Rceil>>(w, l, f); }
extern "C" void of_32_bits(u32* w, u32* l, u32* f) { places<QuantizeTiles<Fp32, E4M3, Rceil>>(w, l, f); }
"""


def conflict_free(addresses, size):
    """Whether each 128 bytes of a warp's access of `size` bytes a lane use each of the 32 banks once."""
    words = addresses.reshape(-1, 128 // size, 1) // 4 + np.arange(size // 4)
    return bool((np.sort(words.reshape(len(words), 32) % 32) == np.arange(32)).all())


@pytest.mark.parametrize(("bits", "threads"), [(16, 256), (32, 512)])
def test_shared_memory_accesses_have_no_bank_conflicts(bits, threads, tmp_path):
    library = kernel_emulator.compile_library(COMPILER, tmp_path, PLACES)
    words, loads, factors = (np.zeros(count, dtype=np.uint32) for count in (threads, 8 * threads, 128))
    getattr(library, f"of_{bits}_bits")(*(array.ctypes.data_as(ctypes.c_void_p) for array in (words, loads, factors)))
    assert conflict_free(words, 4)  # a further token is as many bytes further for all
    assert conflict_free(loads, 16)
    assert len(set(factors[::32] // 4 % 32)) == 4  # lanes of a block read the same word
    chunks = 128 * bits // 8 // 16
    assert sorted(loads - loads // (32 * chunks * 16 + 32) * 32) == list(range(0, 128 * chunks * 16, 16))
