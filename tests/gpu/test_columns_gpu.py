"""Quantizing along tokens where only a GPU can tell: large tensors, all kernels, graphs, no wait for the device."""

from __future__ import annotations

import pytest
import torch
from mx_checks import FP8, INPUTS, SCALINGS, raw
from products import E4M3, offsets
from token_groups import columns_of, padded_transpose, tokens_of

import mxfp8_cutlass as mx
from mxfp8_cutlass.columnwise import both_directions
from mxfp8_cutlass.quantize import fold, quantize

pytestmark = pytest.mark.gpu

SIZES = [1000, 0, 1, 127, 129, 640, 0, 0, 77]


def random(shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cuda")
    return (x * torch.exp(2 * torch.randn(shape, generator=generator, device="cuda"))).to(dtype)


def assert_same(got, want):
    for a, b in zip(raw(got), raw(want), strict=True):
        assert (a == b).all()
    assert (got.tile_scale is None) == (want.tile_scale is None)
    if want.tile_scale is not None:
        assert torch.equal(got.tile_scale, want.tile_scale)


def assert_columns(got, x, ends, dtype, scaling, rows):
    """Each group's columns are what the other kernels give for its rows alone."""
    for group, columns in columns_of(got, ends):
        tokens = x[tokens_of(ends)[group][1]]
        if not len(tokens):
            continue
        want = quantize(padded_transpose(tokens), dtype, scaling)
        want = fold(want, rows) if rows else want
        blocks, runs = (slice(columns.start // n, columns.stop // n) for n in (32, 128))
        assert torch.equal(got.tensor.data[:, columns].view(torch.uint8), want.data.view(torch.uint8))
        assert torch.equal(got.tensor.scale_bytes[:, blocks], want.scale_bytes)
        if rows:
            features = got.shape[0]
            assert torch.equal(got.tensor.scale_by_run()[runs, :features], want.scale_by_run()[:, :features])
        if rows == 128:
            assert torch.equal(got.tensor.tile_scale[:, runs], want.tile_scale)


@pytest.mark.parametrize("x_dtype", INPUTS, ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_kernel(x_dtype, dtype, scaling):
    offs, ends = offsets(SIZES, "cuda"), offsets(SIZES).tolist()
    x = random((2100, 2080), x_dtype)
    for rows, columns in ((0, 0), (1, 1), (1, 128), (128, 128)):
        got = mx.quantize_both(x, offs, dtype, scaling, fold_rows=rows, columnwise_fold_rows=columns)
        want = quantize(x, dtype, scaling)
        assert_same(got.rowwise, fold(want, rows) if rows else want)
        assert_columns(got.columnwise, x, ends, dtype, scaling, columns)
    for rows, columns in ((0, 1), (1, 0), (128, 128)):
        w = random((3, 416, 544), x_dtype, seed=1)
        got = mx.quantize_both(w, None, dtype, scaling, fold_rows=rows, columnwise_fold_rows=columns)
        for part, values, folded in ((got.rowwise, w, rows), (got.columnwise, w.mT.contiguous(), columns)):
            want = quantize(values, dtype, scaling)
            assert_same(part, fold(want, folded) if folded else want)


def test_more_than_2_to_the_32_elements():
    features = 4096
    sizes = [2**19 - 5, 0, 2**19 + 700]
    x = torch.empty((sum(sizes) + 300, features), dtype=torch.bfloat16, device="cuda").normal_()
    offs, ends = offsets(sizes, "cuda"), offsets(sizes).tolist()
    got = mx.quantize_columnwise(x, offs, fold_rows=1)
    some = torch.tensor([0, 1, 2047, features - 1], device="cuda")
    for group, columns in columns_of(got, ends):
        if not sizes[group]:
            continue
        want = quantize(padded_transpose(x[tokens_of(ends)[group][1]][:, some]), fold=True)
        assert torch.equal(got.tensor.data[some][:, columns].view(torch.uint8), want.data.view(torch.uint8))
        blocks = slice(columns.start // 32, columns.stop // 32)
        assert torch.equal(got.tensor.scale_bytes[some][:, blocks], want.scale_bytes)


@pytest.mark.parametrize("groups", [1, 300, 1024])
def test_many_groups(groups):
    generator = torch.Generator().manual_seed(groups)
    sizes = (torch.randint(0, 40, (groups,), generator=generator) * (groups > 1) + 3).tolist()
    offs, ends = offsets(sizes, "cuda", torch.int64), offsets(sizes).tolist()
    x = random((sum(sizes) + 10, 144))
    got = mx.quantize_columnwise(x, offs, fold_rows=1)
    assert_columns(got, x, ends, E4M3, "rceil", 1)


def test_replay_with_other_groups():
    x, other = random((1024, 512)), random((1024, 512), seed=1)
    sizes = [500, 20, 0, 300]
    offs = offsets([100, 100, 0, 800], "cuda")
    options = {"rowwise": 1, "columnwise": 128, "bias_grad": True}
    both_directions(x, offs, E4M3, "rceil", **options)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both_directions(x, offs, E4M3, "rceil", **options)
    x.copy_(other)
    offs.copy_(offsets(sizes))
    graph.replay()
    assert_same(captured.rowwise, quantize(x, fold=True))
    assert_columns(captured.columnwise, x, offsets(sizes).tolist(), E4M3, "rceil", 128)
    again = both_directions(x, offs, E4M3, "rceil", **options)
    assert torch.equal(captured.bias_grad, again.bias_grad)


def test_waits_for_nothing():
    x, offs = random((1024, 512)), offsets([100, 100, 0, 800], "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mx.quantize_both(
            x, offs, fold_rows=1, columnwise_fold_rows=128, bias_grad=True, bias_scale=x[:, 0].contiguous()
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
