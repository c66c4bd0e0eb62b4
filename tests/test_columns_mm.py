"""Products that offs cuts along the contraction, against float64 products of the exact MXFP8 values."""

from __future__ import annotations

import pytest
import torch
from mx_checks import wild
from products import E4M3, E5M2, generator, is_poisoned, offsets, poisoned
from token_groups import SPLITS, check_columnwise_product, columns_of

import mxfp8_cutlass as mx

OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


def columnwise(tokens, features, sizes, device="cpu", *, dtype=E4M3, fold_rows=0, seed=0, tail=float("nan")):
    """A random operand whose tail is poisoned."""
    x = torch.randn((tokens, features), generator=generator(device, seed), device=device)
    x[sum(sizes) :] = tail
    return mx.quantize_columnwise(x.to(torch.bfloat16), offsets(sizes, device), dtype, fold_rows=fold_rows)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("tokens", [0, 7, 300, 1024])
def test_splits(device, tokens, split, accumulate):
    sizes = SPLITS[split](tokens)
    a, b = columnwise(tokens, 80, sizes, device, seed=1), columnwise(tokens, 48, sizes, device, seed=2)
    out = poisoned((4, 80, 48), torch.float32, device)
    if accumulate:
        out.copy_(torch.randn(out.shape))
    old = out.clone() if accumulate else None
    assert mx.grouped_mm(a, b, offsets(sizes, device), out=out, accumulate=accumulate) is out
    check_columnwise_product(out, a, b, sizes, old)


@pytest.mark.parametrize("folds", [(0, 0), (1, 1), (1, 128)], ids=str)
@pytest.mark.parametrize("out_dtype", [None, *OUTPUTS], ids=str)
@pytest.mark.parametrize("dtype_b", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype_a", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_types(device, dtype_a, dtype_b, out_dtype, folds):
    sizes = [130, 0, 1, 63]
    a = columnwise(200, 144, sizes, device, dtype=dtype_a, fold_rows=folds[0], seed=1)
    b = columnwise(200, 272, sizes, device, dtype=dtype_b, fold_rows=folds[1], seed=2)
    got = mx.grouped_mm(a, b, out_dtype=out_dtype)
    assert got.dtype == (out_dtype or torch.bfloat16)
    check_columnwise_product(got, a, b, sizes)
    assert torch.equal(got, mx.grouped_mm(a, b, out_dtype=out_dtype))


@pytest.mark.parametrize("groups", [1, 2, 130, 1024])
def test_many_groups(device, groups):
    sizes = [(7 * g) % 3 for g in range(groups)]
    tokens = sum(sizes) + 2
    a, b = columnwise(tokens, 16, sizes, device, seed=1), columnwise(tokens, 16, sizes, device, seed=2)
    check_columnwise_product(mx.grouped_mm(a, b, out_dtype=torch.float32), a, b, sizes)


@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_long_groups(device, out_dtype, rows):
    """More than 32 runs, whose scales are loaded as many at a time; several tiles of one group for each CTA."""
    sizes = [4500, 0, 3, 4096]
    a = columnwise(8700, 144, sizes, device, fold_rows=1, seed=1)
    b = columnwise(8700, 272, sizes, device, fold_rows=rows, seed=2)
    check_columnwise_product(mx.grouped_mm(a, b, out_dtype=out_dtype), a, b, sizes)


def test_blocks_that_differ_by_orders_of_magnitude(device):
    sizes = [130, 1, 200]
    a, b = (
        mx.quantize_columnwise(wild((48, 352), torch.bfloat16, seed).mT.contiguous().to(device), offsets(sizes, device))
        for seed in (1, 2)
    )
    check_columnwise_product(mx.grouped_mm(a, b, out_dtype=torch.float32), a, b, sizes)


def test_columns_of_no_group_are_not_used(device):
    """Garbage behind each group's padding, which no quantizer has to write."""
    sizes = [100, 0, 300, 5]
    a, b = columnwise(500, 48, sizes, device, seed=1), columnwise(500, 32, sizes, device, seed=2)
    want = mx.grouped_mm(a, b, out_dtype=torch.float32)
    for x in (a, b):
        used = torch.zeros(x.tensor.K, dtype=torch.bool, device=device)
        for _, columns in columns_of(x, offsets(sizes).tolist()):
            used[columns] = True
        x.tensor.data.view(torch.uint8)[:, ~used] = 0x7F
        x.tensor.scale_bytes[:, ~used[::32]] = 255
    assert torch.equal(mx.grouped_mm(a, b, out_dtype=torch.float32), want)


def test_nan_reaches_its_group_alone(device):
    sizes = [100, 100]
    x = torch.randn(200, 32, generator=generator(device, 1), device=device)
    x[150, 3] = float("nan")
    a = mx.quantize_columnwise(x, offsets(sizes, device))
    got = mx.grouped_mm(a, columnwise(200, 16, sizes, device), out_dtype=torch.float32)
    assert got[1, 3].isnan().all()
    got[1, 3] = 0
    assert torch.isfinite(got).all()


A, B, OFFS = columnwise(64, 32, [30, 2], seed=1), columnwise(64, 16, [30, 2], seed=2), offsets([30, 2])
OUT = poisoned((2, 32, 16), torch.float32)
BAD = [
    (TypeError, "b a MXFP8Tensor", {"b": B.tensor}),
    (TypeError, "a is a MXFP8Tensor", {"a": A.tensor}),
    (ValueError, "b has 60 tokens in 2 groups", {"b": columnwise(60, 16, [30, 2])}),
    (ValueError, "b has 64 tokens in 3 groups", {"b": columnwise(64, 16, [30, 2, 3])}),
    (ValueError, r"offs has shape \(3,\)", {"offs": offsets([1, 1, 1])}),
    (ValueError, r"offs is \[20, 32\]: a was quantized with \[30, 32\]", {"offs": offsets([20, 12])}),
    (TypeError, "offs has dtype", {"offs": OFFS.float()}),
    (ValueError, "counts is given", {"counts": OFFS}),
    (ValueError, "bias is given", {"bias": torch.zeros(2, 16)}),
    (ValueError, "out has shape", {"out": poisoned((2, 16, 32), torch.float32)}),
    (TypeError, "out_dtype is torch.float64", {"out_dtype": torch.float64, "out": None}),
    (ValueError, "accumulate is True and out is None", {"accumulate": True, "out": None}),
]


@pytest.mark.parametrize(("error", "match", "changes"), BAD, ids=[str(case[1]) for case in BAD])
def test_bad_input(error, match, changes):
    with pytest.raises(error, match=match):
        mx.grouped_mm(**({"a": A, "b": B, "offs": OFFS, "out": OUT} | changes))
    assert is_poisoned(OUT)


def test_out_in_an_operand():
    memory = torch.zeros(65536, dtype=torch.uint8)
    data = memory[: A.tensor.data.numel()].view(A.tensor.shape).view(E4M3)
    moved = mx.ColumnwiseMXFP8(mx.MXFP8Tensor(data, A.tensor.scale), OFFS, 64)
    out = memory[128 : 128 + OUT.nbytes].view(torch.float32).view(OUT.shape)
    with pytest.raises(ValueError, match=r"out overlaps a\.data"):
        mx.grouped_mm(moved, B, OFFS, out=out)
