"""Column-wise operands against the layout written out and the oracle, bit for bit."""

from __future__ import annotations

import mx_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mx_checks import FP8, INPUTS, SCALINGS, raw, wild
from products import E4M3, E5M2, offsets
from token_groups import SPLITS, columns_of, first_column, padded_transpose, tokens_of, with_poisoned_tail

import mxfp8_cutlass as mx
from mxfp8_cutlass.columns import column_capacity
from mxfp8_cutlass.columnwise import both_directions

SHAPES = [(0, 512), (1024, 256), (300, 48), (7, 16)]


def check_columns(got, x, ends, dtype=E4M3, scaling="rceil", fold_rows=0):
    """Each group's columns are those that its rows alone give, transposed and padded with zeros."""
    tokens, features = x.shape
    assert got.shape == (features, tokens)
    assert got.tensor.shape == (features, column_capacity(tokens, len(ends)))
    assert (got.dtype, got.folded, got.tokens) == (dtype, fold_rows, tokens)
    data, scale = raw(got.tensor)
    for group, columns in columns_of(got, ends):
        rows = x[tokens_of(ends)[group][1]]
        if not len(rows):
            continue
        want_data, want_scale = oracle.quantize(padded_transpose(rows.cpu()), dtype, scaling)
        if fold_rows:
            want_data, want_scale, want_tiles, _ = oracle.fold(want_data, want_scale, dtype, fold_rows)
        blocks = slice(columns.start // 32, columns.stop // 32)
        np.testing.assert_array_equal(scale[:, blocks], want_scale, f"group {group}")
        np.testing.assert_array_equal(data[:, columns], want_data, f"group {group}")
        if fold_rows == 128:
            runs = slice(columns.start // 128, columns.stop // 128)
            np.testing.assert_array_equal(got.tensor.tile_scale.cpu().numpy()[:, runs], want_tiles)


@pytest.mark.parametrize("fold_rows", [0, 1, 128])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_splits(device, shape, split, fold_rows):
    sizes = SPLITS[split](shape[0])
    ends = offsets(sizes).tolist()
    x = with_poisoned_tail(wild((shape[1], max(32, -(-shape[0] // 32) * 32)), torch.bfloat16).mT[: shape[0]], ends[-1])
    x = x.contiguous().to(device)
    before = x.clone()
    got = mx.quantize_columnwise(x, offsets(sizes, device), fold_rows=fold_rows)
    check_columns(got, x, ends, fold_rows=fold_rows)
    assert torch.equal(x.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("offs_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("x_dtype", INPUTS, ids=str)
def test_types(device, x_dtype, dtype, scaling, offs_dtype):
    x = wild((96, 320), x_dtype, seed=3).mT.contiguous()
    sizes = [130, 0, 1, 63, 66]
    offs = offsets(sizes, device, offs_dtype)
    got = mx.quantize_columnwise(x.to(device), offs, dtype, scaling, fold_rows=1)
    check_columns(got, x, offsets(sizes).tolist(), dtype, scaling, 1)


def test_large(device):
    """(16384, 8192), on the CPU a sixteenth of its features."""
    features = 8192 if device.type == "cuda" else 512
    generator = torch.Generator(device=device).manual_seed(1)
    x = torch.randn((16384, features), generator=generator, device=device, dtype=torch.float32).to(torch.bfloat16)
    sizes = [4095, 0, 1, 8000, 4288]
    ends = offsets(sizes).tolist()
    got = mx.quantize_columnwise(x, offsets(sizes, device))
    for group, columns in columns_of(got, ends):
        want = mx.quantize(padded_transpose(x[tokens_of(ends)[group][1]])) if sizes[group] else None
        if want is not None:
            assert torch.equal(got.tensor.data[:, columns].view(torch.uint8), want.data.view(torch.uint8))
            assert torch.equal(got.tensor.scale_bytes[:, columns.start // 32 : columns.stop // 32], want.scale_bytes)


@given(sizes=st.lists(st.integers(0, 400), min_size=1, max_size=40), tail=st.integers(0, 200))
@settings(max_examples=300, deadline=None)
def test_groups_fit_and_are_apart(sizes, tail):
    ends = offsets(sizes).tolist()
    capacity = column_capacity(ends[-1] + tail, len(sizes))
    free = 0
    for group, size in enumerate(sizes):
        begin = first_column(ends, group)
        assert begin % 128 == 0
        assert begin >= free
        free = begin + -(-size // 128) * 128
    assert free <= capacity


@pytest.mark.parametrize("fold_rows", [0, 1])
def test_dequantize(device, fold_rows):
    sizes = [130, 0, 1, 63]
    x = wild((48, 224), torch.bfloat16).mT.contiguous()
    ends = offsets(sizes).tolist()
    got = mx.quantize_columnwise(x.to(device), offsets(sizes, device), fold_rows=fold_rows)
    values = got.dequantize(torch.float64).cpu()
    assert values.shape == (48, 224)
    for _, tokens in tokens_of(ends):
        rows = x[tokens]
        if len(rows):
            want = mx.quantize(padded_transpose(rows), fold=bool(fold_rows)).dequantize(torch.float64)
            assert torch.equal(values[:, tokens], want[:, : len(rows)])
    assert not values[:, ends[-1] :].any()


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("shape", [(64, 96), (3, 160, 48), (32, 1)], ids=str)
def test_along_the_axis_before_the_last(device, shape, fold):
    x = wild((*shape[:-2], shape[-1], shape[-2]), torch.bfloat16).mT.contiguous().to(device)
    got, want = mx.quantize(x, fold=fold, dim=-2), mx.quantize(x.mT.contiguous(), fold=fold)
    assert got.shape == (*shape[:-2], shape[-1], shape[-2])
    assert got.folded == want.folded
    for a, b in zip(raw(got), raw(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("column_rows", [0, 1, 128])
@pytest.mark.parametrize("row_rows", [0, 1, 128])
def test_both_directions(device, row_rows, column_rows):
    x = wild((300, 96), torch.bfloat16).to(device)
    sizes = [130, 0, 1, 63, 66]
    offs, ends = offsets(sizes, device), offsets(sizes).tolist()
    x[ends[-1] :] = float("nan")
    both = mx.quantize_both(x, offs, fold_rows=row_rows, columnwise_fold_rows=column_rows, bias_grad=True)
    check_columns(both.columnwise, x, ends, fold_rows=column_rows)
    want = mx.quantize(x)
    want = mx.fold(want, row_rows) if row_rows else want
    assert both.rowwise.folded == row_rows
    for a, b in zip(raw(both.rowwise), raw(want), strict=True):
        np.testing.assert_array_equal(a, b)
    check_sums(both.bias_grad, x, ends)


def check_sums(got, x, ends, factors=None):
    """Within what float32 sums in any order may err."""
    assert got.dtype == torch.float32
    assert got.shape == (len(ends), x.shape[1])
    rows = x.double() if factors is None else x.double() * factors.double()[:, None]
    for group, tokens in tokens_of(ends):
        exact, magnitude = rows[tokens].sum(0), rows[tokens].abs().sum(0)
        bound = 1.01 * (tokens.stop - tokens.start + 1) * 2.0**-24 * magnitude
        assert bool(((got[group].double() - exact).abs() <= bound).all()), f"group {group}"


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_bias_gradient(device, dtype, scaled, split):
    sizes = SPLITS[split](500)
    ends = offsets(sizes).tolist()
    x = with_poisoned_tail(torch.randn(500, 64).to(dtype), ends[-1]).to(device)
    factors = with_poisoned_tail(torch.randn(500), ends[-1]).to(device) if scaled else None
    options = {"rowwise": None, "columnwise": None, "bias_grad": True, "bias_scale": factors}
    got = both_directions(x, offsets(sizes, device), E4M3, "rceil", **options).bias_grad
    check_sums(got, x, ends, factors)
    again = both_directions(x, offsets(sizes, device), E4M3, "rceil", **options).bias_grad
    assert torch.equal(got, again)


def test_weights_in_both_directions(device):
    w = wild((3, 64, 160), torch.bfloat16).to(device)
    both = mx.quantize_both(w, fold_rows=128, columnwise_fold_rows=128)
    rows, columns = mx.fold(mx.quantize(w), 128), mx.fold(mx.quantize(w, dim=-2), 128)
    for got, want in ((both.rowwise, rows), (both.columnwise, columns)):
        assert got.shape == want.shape
        for a, b in zip((*raw(got), got.tile_scale.cpu()), (*raw(want), want.tile_scale.cpu()), strict=True):
            np.testing.assert_array_equal(a, b)
    assert both.bias_grad is None


X, OFFS = torch.zeros(64, 32), offsets([30, 2])
BAD = [
    (TypeError, "x is a list", {"x": [1.0]}),
    (TypeError, "x has dtype torch.int64", {"x": torch.zeros(64, 32, dtype=torch.int64)}),
    (TypeError, "dtype is torch.float16", {"dtype": torch.float16}),
    (ValueError, "scaling is 'ceil'", {"scaling": "ceil"}),
    (ValueError, "fold_rows is 2", {"fold_rows": 2}),
    (ValueError, "fold_rows is True", {"fold_rows": True}),
    (ValueError, "contiguous", {"x": X.mT}),
    (ValueError, r"x has shape \(2, 64, 32\)", {"x": X.expand(2, 64, 32).contiguous()}),
    (ValueError, r"x has shape \(64, 24\): .* multiple of 16", {"x": torch.zeros(64, 24)}),
    (ValueError, r"x has shape \(64, 0\)", {"x": torch.zeros(64, 0)}),
    (TypeError, "offs is a list", {"offs": [1, 2]}),
    (TypeError, "offs has dtype torch.float32", {"offs": OFFS.float()}),
    (ValueError, r"offs has shape \(1, 2\)", {"offs": OFFS[None]}),
    (ValueError, r"offs is \[30, 20\]", {"offs": torch.tensor([30, 20])}),
    (ValueError, r"offs is \[30, 65\]: .* M = 64", {"offs": torch.tensor([30, 65])}),
]


@pytest.mark.parametrize(("error", "match", "changes"), BAD, ids=[str(case[1]) for case in BAD])
def test_bad_input(error, match, changes):
    arguments = {"x": X, "offs": OFFS} | changes
    with pytest.raises(error, match=match):
        mx.quantize_columnwise(**arguments)


@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (ValueError, "bias_grad is True and offs is None", {"offs": None, "bias_grad": True}),
        (ValueError, r"x has shape \(33, 32\)", {"offs": None, "x": torch.zeros(33, 32)}),
        (ValueError, r"x has shape \(64, 48\)", {"x": torch.zeros(64, 48)}),
        (ValueError, "bias_scale is given and bias_grad is False", {"bias_scale": torch.ones(64)}),
        (ValueError, r"bias_scale has shape \(3,\)", {"bias_scale": torch.ones(3), "bias_grad": True}),
        (TypeError, "bias_scale has dtype torch.int64", {"bias_scale": torch.ones(64).long(), "bias_grad": True}),
        (TypeError, "bias_scale is a float", {"bias_scale": 1.0, "bias_grad": True}),
        (ValueError, "columnwise_fold_rows is 3", {"columnwise_fold_rows": 3}),
    ],
)
def test_bad_input_to_both(error, match, changes):
    with pytest.raises(error, match=match):
        mx.quantize_both(**({"x": X, "offs": OFFS} | changes))


def test_bad_dim():
    with pytest.raises(ValueError, match="dim is 0"):
        mx.quantize(X, dim=0)
    with pytest.raises(ValueError, match="R = 33"):
        mx.quantize(torch.zeros(33, 32), dim=-2)


def test_parts_that_do_not_fit():
    tensor = mx.quantize(torch.zeros(32, 256))
    assert mx.ColumnwiseMXFP8(tensor, OFFS, 64).shape == (32, 64)
    with pytest.raises(ValueError, match=r"must be \(features, 384\)"):
        mx.ColumnwiseMXFP8(tensor, OFFS, 128)
    with pytest.raises(TypeError, match="tensor is a Tensor"):
        mx.ColumnwiseMXFP8(tensor.data, OFFS, 64)


def test_e5m2_is_kept(device):
    got = mx.quantize_columnwise(torch.ones(64, 32, device=device), offsets([64], device), E5M2)
    assert got.dtype == E5M2
    assert "float8_e5m2" in repr(got)
