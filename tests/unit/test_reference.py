"""reference.grouped_mm against float64 products of the exact values."""

from __future__ import annotations

import pytest
import torch

from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor
from mxfp8_cutlass.quantize import quantize
from mxfp8_cutlass.reference import grouped_mm

G, N, K = 4, 48, 96
ENDS = [3, 3, 10, 11]
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def operands(*shape_a, dtype_a=torch.float8_e4m3fn, dtype_b=torch.float8_e4m3fn):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(shape_a, generator=generator), torch.randn((G, N, K), generator=generator)
    return quantize(a, dtype_a), quantize(b, dtype_b), torch.randn((G, N), generator=generator)


def exact_rows(a, b, bias=None):
    """(M, N) in float64, and which rows belong to a group."""
    left, right = a.dequantize(torch.float64), b.dequantize(torch.float64)
    out, start = torch.zeros((a.shape[0], N), dtype=torch.float64), 0
    for group, end in enumerate(ENDS):
        out[start:end] = left[start:end] @ right[group].T + (0 if bias is None else bias[group].double())
        start = end
    return out, torch.arange(a.shape[0]) < ENDS[-1]


def tolerance(dtype):
    """Output rounding, and float32 sums of 96 products of the size of 1."""
    return {"rtol": torch.finfo(dtype).eps / 2 * 1.01, "atol": 1e-4 if dtype == torch.float16 else 2e-5}


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("offs_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_ragged_groups(out_dtype, offs_dtype, with_bias):
    a, b, bias = operands(14, K, dtype_b=torch.float8_e5m2)
    bias = bias if with_bias else None
    offs = torch.tensor(ENDS, dtype=offs_dtype)
    y = grouped_mm(a, b, offs, bias=bias, out_dtype=out_dtype)
    expected, inside = exact_rows(a, b, bias)
    assert y.dtype == out_dtype
    torch.testing.assert_close(y[inside].double(), expected[inside], **tolerance(out_dtype))
    assert (y[~inside] == 0).all()


def test_rows_of_no_group_are_left_alone():
    a, b, _ = operands(14, K)
    out = torch.full((14, N), float("nan"))
    y = grouped_mm(a, b, torch.tensor(ENDS), out=out)
    assert y is out
    assert y[:11].isfinite().all()
    assert y[11:].isnan().all()


def test_accumulates():
    a, b, bias = operands(14, K)
    out = torch.ones((14, N))
    grouped_mm(a, b, torch.tensor(ENDS), bias=bias, out=out, accumulate=True)
    expected, inside = exact_rows(a, b, bias)
    torch.testing.assert_close(out[inside].double(), expected[inside] + 1, **tolerance(torch.float32))
    assert (out[~inside] == 1).all()
    with pytest.raises(ValueError, match="out is None"):
        grouped_mm(a, b, torch.tensor(ENDS), accumulate=True)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_batches(out_dtype):
    a, b, bias = operands(G, 5, K)
    y = grouped_mm(a, b, bias=bias, out_dtype=out_dtype)
    expected = a.dequantize(torch.float64) @ b.dequantize(torch.float64).mT + bias.double()[:, None]
    torch.testing.assert_close(y.double(), expected, **tolerance(out_dtype))


@pytest.mark.parametrize("ends", [[3, 2, 10, 11], [-1, 2, 3, 4], [0, 1, 2, 15]])
def test_refuses_impossible_offsets(ends):
    a, b, _ = operands(14, K)
    with pytest.raises(ValueError, match="offs is"):
        grouped_mm(a, b, torch.tensor(ends))


def test_refuses_no_offsets():
    a, b, _ = operands(14, K)
    with pytest.raises(ValueError, match="offs is None"):
        grouped_mm(a, b)


@pytest.mark.parametrize(("scale_a", "scale_b"), [(254, 0), (0, 254), (1, 253), (250, 4)])
def test_extreme_scales_that_cancel(scale_a, scale_b):
    """448 * 2**127 exceeds float32 and 2**-127 is subnormal in it; their product is neither."""

    def filled(shape, byte, scale):
        data = torch.full(shape, byte, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return MXFP8Tensor(data, torch.full((*shape[:-1], shape[-1] // 32), scale, dtype=torch.uint8))

    a, b = filled((2, 32), 0x7E, scale_a), filled((1, 16, 32), 0x38, scale_b)
    y = grouped_mm(a, b, torch.tensor([2]), out_dtype=torch.float32)
    assert (y == 448 * 32 * 2.0 ** (scale_a + scale_b - 254)).all()
    zeros = grouped_mm(filled((2, 32), 0x00, scale_a), b, torch.tensor([2]), out_dtype=torch.float32)
    assert (zeros == 0).all()


def test_nan_reaches_its_row_alone():
    a, b, _ = operands(14, K)
    a.scale_bytes[4, 1] = 255
    y = grouped_mm(a, b, torch.tensor(ENDS))
    assert y[4].isnan().all()
    assert y[:4].isfinite().all()
    assert y[5:11].isfinite().all()
