"""Tokens that arrive quantized: copies and shifts bit for bit, requantizing against its two steps written out."""

from __future__ import annotations

import pytest
import torch
from mx_checks import wild
from products import E4M3, E5M2, offsets
from token_groups import SPLITS, columns_of, padded_transpose, tokens_of

import mxfp8_cutlass as mx
from mxfp8_cutlass.grouped_mxfp8 import GroupedMXFP8

SHAPES = [(0, 512), (1024, 256), (300, 96)]


def bits(x):
    """As integers, so that NaNs equal themselves."""
    return x.contiguous().view(torch.uint8)


def arrived(shape, sizes, device="cpu", *, dtype=E4M3, swizzled=False, seed=0, poison=0x7F):
    """Quantized tokens whose tail is NaN; returns the operand, compact scales and ends."""
    ends = offsets(sizes).tolist()
    xq = mx.quantize(wild(shape, torch.bfloat16, seed).to(device), dtype)
    data, scale = xq.data.view(torch.uint8).clone(), xq.scale_bytes.clone()
    data[ends[-1] :], scale[ends[-1] :] = poison, 255
    offs = offsets(sizes, device)
    laid_out = mx.swizzle_scales(scale, offs) if swizzled else scale
    return GroupedMXFP8(data.view(dtype), laid_out, offs, swizzled=swizzled), scale, ends


def snapshot(x):
    return [bits(part).clone() for part in (x.data, x.scale, x.offs)]


def check_unchanged(x, before):
    for part, old in zip((x.data, x.scale, x.offs), before, strict=True):
        assert torch.equal(bits(part), old)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prepared_for_hopper_is_folded(device, shape, split, swizzled, dtype):
    x, scale, ends = arrived(shape, SPLITS[split](shape[0]), device, dtype=dtype, swizzled=swizzled)
    before = snapshot(x)
    got = mx.prepare_rowwise(x, dtype, target_sm="90a")
    want = mx.fold(mx.MXFP8Tensor(x.data, scale))
    used = slice(ends[-1])
    assert torch.equal(bits(got.data[used]), bits(want.data[used]))
    assert torch.equal(bits(got.scale[used]), bits(want.scale[used]))
    assert got.folded == 1
    check_unchanged(x, before)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prepared_for_blackwell_is_the_very_data(device, shape, split, swizzled):
    x, scale, _ = arrived(shape, SPLITS[split](shape[0]), device, swizzled=swizzled)
    before = snapshot(x)
    got = mx.prepare_rowwise(x, target_sm="100a")
    assert got.data is x.data
    assert got.swizzled
    assert got.offs is x.offs
    assert torch.equal(bits(got.scale), bits(mx.swizzle_scales(scale, x.offs)))
    if swizzled:
        assert got.scale.data_ptr() == x.scale.data_ptr()
    check_unchanged(x, before)


def test_the_device_says_how_to_prepare():
    x, _, _ = arrived((64, 96), [60])
    assert mx.prepare_rowwise(x).folded == 1


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("fold_rows", [0, 1, 128])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_requantized(device, shape, split, fold_rows, dtype):
    """Group by group: dequantize to bfloat16, transpose, pad, quantize, fold."""
    x, scale, ends = arrived(shape, SPLITS[split](shape[0]), device, dtype=dtype)
    before = snapshot(x)
    got = mx.requantize_columnwise(x, dtype, fold_rows=fold_rows, bias_grad=True, return_dequantized=True)
    values = mx.MXFP8Tensor(x.data, scale).dequantize(torch.bfloat16)
    assert got.dequantized.dtype == torch.bfloat16
    assert torch.equal(bits(got.dequantized[: ends[-1]]), bits(values[: ends[-1]]))
    assert (got.columnwise.dtype, got.columnwise.folded) == (dtype, fold_rows)
    for group, columns in columns_of(got.columnwise, ends):
        rows = values[tokens_of(ends)[group][1]]
        if not len(rows):
            continue
        want = mx.quantize(padded_transpose(rows), dtype)
        want = mx.fold(want, fold_rows) if fold_rows else want
        blocks = slice(columns.start // 32, columns.stop // 32)
        assert torch.equal(bits(got.columnwise.tensor.data[:, columns]), bits(want.data))
        assert torch.equal(got.columnwise.tensor.scale_bytes[:, blocks], want.scale_bytes)
        exact, magnitude = rows.double().sum(0), rows.double().abs().sum(0)
        assert bool(((got.bias_grad[group].double() - exact).abs() <= 1.01 * len(rows) * 2.0**-24 * magnitude).all())
    assert torch.isfinite(got.bias_grad).all()
    check_unchanged(x, before)


def test_nothing_is_returned_that_was_not_asked_for(device):
    x, _, _ = arrived((64, 96), [10, 30], device)
    got = mx.requantize_columnwise(x)
    assert got.bias_grad is None
    assert got.dequantized is None


def test_scaled_bias_gradient(device):
    x, scale, ends = arrived((200, 96), [100, 0, 50], device)
    factors = torch.randn(200, device=device)
    factors[150:] = float("nan")
    got = mx.requantize_columnwise(x, bias_grad=True, bias_scale=factors).bias_grad
    rows = mx.MXFP8Tensor(x.data, scale).dequantize(torch.float64) * factors.double()[:, None]
    for group, tokens in tokens_of(ends):
        bound = 102 * 2.0**-24 * rows[tokens].abs().sum(0)
        assert bool(((got[group].double() - rows[tokens].sum(0)).abs() <= bound).all())


def test_swizzled_scales_are_not_dequantized(device):
    x, scale, _ = arrived((200, 96), [100, 0, 50], device, swizzled=True)
    with pytest.raises(ValueError, match=r"swizzled scales: .* unswizzle_scales"):
        mx.requantize_columnwise(x)
    compact = GroupedMXFP8(x.data, mx.unswizzle_scales(x.scale, (200, 3), x.offs), x.offs)
    want = mx.requantize_columnwise(GroupedMXFP8(x.data, scale, x.offs), bias_grad=True)
    got = mx.requantize_columnwise(compact, bias_grad=True)
    assert torch.equal(got.bias_grad, want.bias_grad)
    assert torch.equal(got.columnwise.dequantize(), want.columnwise.dequantize())


def test_rows_that_are_missing_are_refused():
    x, _, _ = arrived((200, 96), [100, 0, 50])
    columns = mx.requantize_columnwise(x).columnwise
    only = GroupedMXFP8(None, None, x.offs, columnwise=columns)
    assert only.shape == (200, 96)
    assert "no rows" in repr(only)
    for function in (mx.prepare_rowwise, mx.requantize_columnwise):
        with pytest.raises(ValueError, match="x has no row-wise data"):
            function(only)


@pytest.mark.parametrize("function", [mx.prepare_rowwise, mx.requantize_columnwise])
def test_element_types_are_not_mixed_up(function):
    x, _, _ = arrived((200, 96), [100, 0, 50], dtype=E5M2)
    with pytest.raises(TypeError, match=r"x has elements of type torch.float8_e5m2: dtype is torch.float8_e4m3fn"):
        function(x)
    with pytest.raises(TypeError, match=r"dtype is torch\.bfloat16"):
        function(x, torch.bfloat16)
    with pytest.raises(TypeError, match="x is a MXFP8Tensor"):
        function(mx.quantize(torch.zeros(2, 32)))


def test_rows_of_no_group_reach_nothing(device):
    """The same results, whatever the tail holds."""
    for swizzled in (False, True):
        (a, _, ends), (b, _, _) = (
            arrived((300, 96), [100, 0, 133], device, swizzled=swizzled, poison=poison) for poison in (0x7F, 0x00)
        )
        one, other = mx.prepare_rowwise(a), mx.prepare_rowwise(b)
        assert torch.equal(bits(one.data[: ends[-1]]), bits(other.data[: ends[-1]]))
        if not swizzled:
            one, other = (mx.requantize_columnwise(x, bias_grad=True) for x in (a, b))
            assert torch.equal(one.columnwise.dequantize(), other.columnwise.dequantize())
            assert torch.equal(one.bias_grad, other.bias_grad)


def test_the_three_products(device):
    """Forward, dgrad and wgrad from quantized tokens and a quantized output gradient."""
    sizes = [100, 0, 133]
    x, x_scale, ends = arrived((300, 96), sizes, device, seed=1)
    dy, dy_scale, _ = arrived((300, 64), sizes, device, dtype=E5M2, seed=2)
    w = torch.randn(3, 64, 96, device=device)
    wq = mx.quantize_both(w, fold_rows=128, columnwise_fold_rows=128)
    y = mx.grouped_mm(mx.prepare_rowwise(x), wq.rowwise, x.offs, out_dtype=torch.float32)
    dx = mx.grouped_mm(mx.prepare_rowwise(dy, E5M2), wq.columnwise, x.offs, out_dtype=torch.float32)
    dw = mx.grouped_mm(
        mx.requantize_columnwise(dy, E5M2, fold_rows=1).columnwise,
        mx.requantize_columnwise(x, fold_rows=128).columnwise,
        out_dtype=torch.float32,
    )
    xs, dys = (mx.MXFP8Tensor(t.data, s).dequantize() for t, s in ((x, x_scale), (dy, dy_scale)))
    for group, tokens in tokens_of(ends):
        if not sizes[group]:
            assert not dw[group].any()
            continue
        for got, want in (
            (y[tokens], xs[tokens] @ w[group].mT),
            (dx[tokens], dys[tokens] @ w[group]),
            (dw[group], dys[tokens].mT @ xs[tokens]),
        ):
            assert (got - want).norm() < 0.1 * want.norm()


X = mx.quantize(torch.zeros(64, 96))
OFFS = offsets([10, 20])
BAD = [
    (ValueError, "data is given and scale is None", {"scale": None}),
    (ValueError, "data and columnwise are None", {"data": None, "scale": None}),
    (TypeError, "data is a list", {"data": []}),
    (TypeError, "data has dtype torch.uint8", {"data": X.data.view(torch.uint8)}),
    (ValueError, r"data has shape \(1, 64, 96\): it must be \(M, K\)", {"data": X.data[None], "scale": X.scale[None]}),
    (TypeError, "scale has dtype torch.float32", {"scale": torch.zeros(64, 3)}),
    (ValueError, r"scale has shape \(64, 3\): .* must be \(256, 4\)", {"swizzled": True}),
    (ValueError, r"scale has shape \(64, 2\): .* must be \(64, 3\)", {"scale": X.scale[:, :2].contiguous()}),
    (TypeError, "scale is a list", {"scale": []}),
    (ValueError, "scale is on meta", {"scale": X.scale.to("meta")}),
    (TypeError, "offs is a list", {"offs": [1]}),
    (TypeError, "columnwise is a MXFP8Tensor", {"columnwise": X}),
    (ValueError, r"carrier has shape \(2, 2\)", {"carrier": torch.zeros(2, 2)}),
]


@pytest.mark.parametrize(("error", "match", "changes"), BAD, ids=[str(case[1]) for case in BAD])
def test_bad_input(error, match, changes):
    with pytest.raises(error, match=match):
        GroupedMXFP8(**({"data": X.data, "scale": X.scale, "offs": OFFS} | changes))


def test_offsets_are_checked_on_the_cpu():
    with pytest.raises(ValueError, match=r"offs is \[30, 20\]"):
        mx.prepare_rowwise(GroupedMXFP8(X.data, X.scale, torch.tensor([30, 20])))
    with pytest.raises(ValueError, match="target_sm is '80'"):
        mx.prepare_rowwise(GroupedMXFP8(X.data, X.scale, OFFS), target_sm="80")
