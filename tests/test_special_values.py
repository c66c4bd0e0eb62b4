"""grouped_mm with scales at the ends of their range, zeros beside them, NaN and Inf; on either device."""

from __future__ import annotations

import bounds
import pytest
import torch
from products import E4M3, E5M2, folded, offsets, operand, run

import mxfp8_cutlass as mx
from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor

WAYS = {"unfolded": (0, 0, False), "runs": (1, 1, False), "tiles": (1, 128, False), "exact": (0, 0, True)}
K = 160  # a run, and one block of the next


@pytest.fixture(params=WAYS)
def way(request):
    """How to fold a and b, and whether to multiply exactly."""
    return WAYS[request.param]


def with_scales(xq, byte):
    """xq with one scale byte everywhere, or one per block."""
    scale = torch.empty_like(xq.scale_bytes)
    scale[...] = byte
    return MXFP8Tensor(xq.data, scale)


def blocks(*bytes_, device):
    return torch.tensor(bytes_, dtype=torch.uint8, device=device)


def multiply(a, b, way, out_dtype=torch.float32, *, positive=False):
    state_a, state_b, exact = way
    a, b = folded(a, state_a), folded(b, state_b)
    return run(a, b, [33, 37], out_dtype=out_dtype, exact=exact, positive=positive)


def operands(device, dtype=E4M3):
    return operand((72, K), dtype, 1, device), operand((2, 96, K), dtype, 2, device)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize(
    ("byte_a", "byte_b"),
    [
        (0, 254),
        (254, 0),
        (1, 253),
        (20, 234),
        (64, 190),
        (65, 189),
        (189, 65),
        (190, 64),
        (0, 130),
        (127, 0),
        (100, 30),
    ],
)
def test_extreme_scales_whose_product_is_ordinary(device, way, dtype, byte_a, byte_b):
    a, b = operands(device, dtype)
    out = multiply(with_scales(a, byte_a), with_scales(b, byte_b), way)
    assert torch.isfinite(out[:70]).all()
    if abs(byte_a + byte_b - 254) < 100:
        assert (out[:70] != 0).float().mean() > 0.99  # a few cancel, the tensor cores' truncation helping


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("byte_a", "byte_b"), [(254, 254), (0, 0), (127, 120), (180, 200), (60, 60), (121, 127)])
def test_products_at_the_ends_of_the_output(device, way, out_dtype, byte_a, byte_b):
    """Overflow gives Inf of the right sign, underflow zero or subnormals: tests/bounds.py."""
    a, b = operands(device)
    a, b = with_scales(a, byte_a), with_scales(b, byte_b)
    multiply(a, b, way, out_dtype)
    a.data.copy_(a.data.float().abs().to(E4M3))
    b.data.copy_(b.data.float().abs().to(E4M3))
    out = multiply(MXFP8Tensor(a.data, a.scale), MXFP8Tensor(b.data, b.scale), way, out_dtype, positive=True)
    if byte_a == byte_b == 254:
        assert (out[:70] == float("inf")).all()
    if byte_a == byte_b == 0:
        assert (out[:70] == 0).all()


def test_blocks_of_all_magnitudes(device, way):
    """Each block's scales cancel between a and b, though not with its neighbours'."""
    a, b = operands(device)
    scale_a = blocks(0, 254, 127, 30, 200, device=device)
    scale_b = blocks(254, 0, 127, 224, 54, device=device)
    out = multiply(with_scales(a, scale_a), with_scales(b, scale_b), way)
    if way[2]:  # folding to one scale per run keeps the largest alone
        assert torch.isfinite(out[:70]).all()


def test_zero_times_a_large_scale_is_zero(device, way):
    a, b = operands(device)
    zero = MXFP8Tensor(torch.zeros_like(a.data.view(torch.uint8)).view(E4M3), a.scale)
    for byte_a, byte_b in ((254, 254), (254, 0), (200, 254), (0, 0)):
        assert (multiply(with_scales(zero, byte_a), with_scales(b, byte_b), way)[:70] == 0).all()
    # Zeros in part of a run only; what is left has a product of an ordinary size.
    data, scale = a.data.view(torch.uint8).clone(), a.scale_bytes.clone()
    data[:, 32:64] = 0
    scale[:, 1] = 254
    multiply(MXFP8Tensor(data.view(E4M3), scale), with_scales(b, blocks(120, 254, 121, 119, 120, device=device)), way)


def test_nan_scales_spread_as_far_as_their_row(device, way):
    a, b = operands(device)
    scale_a, scale_b = a.scale_bytes.clone(), b.scale_bytes.clone()
    scale_a[5, 1] = scale_a[40, 4] = scale_b[1, 17, 0] = 255
    out = multiply(MXFP8Tensor(a.data, scale_a), MXFP8Tensor(b.data, scale_b), way)[:70]
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[5] = expected[40] = True
    expected[33:, 17] = True
    assert torch.equal(out.isnan(), expected)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_nan_elements(device, way, dtype):
    a, b = operands(device, dtype)
    a.data.view(torch.uint8)[5, 77] = 0x7F
    b.data.view(torch.uint8)[1, 17, 159] = 0xFF
    out = multiply(a, b, way)[:70]
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[5] = True
    expected[33:, 17] = True
    assert torch.equal(out.isnan(), expected)


def test_infinite_elements(device, way):
    a, b = operands(device, E5M2)
    byte_a, byte_b = a.data.view(torch.uint8), b.data.view(torch.uint8)
    byte_b[0, 3, :], byte_b[0, 4, 10] = 0x3C, 0  # ones; Inf x 0
    byte_a[2, 10] = 0x7C
    byte_a[3, 10] = 0xFC
    byte_a[4, 10], byte_a[4, 150] = 0x7C, 0xFC
    out = multiply(a, b, way)
    inf = float("inf")
    assert out[2, 3] == inf
    assert out[3, 3] == -inf
    assert torch.isnan(out[4, 3])  # Inf - Inf
    assert torch.isnan(out[2, 4])
    assert torch.isfinite(out[[0, 1, *range(5, 70)]]).all()


def test_largest_and_least_elements(device, way):
    for dtype, largest in ((E4M3, 0x7E), (E5M2, 0x7B)):
        for byte_a in (largest, 0x01, largest | 0x80):
            for byte_b in (largest, 0x01):
                a, b = operands(device, dtype)
                a.data.view(torch.uint8).fill_(byte_a)
                b.data.view(torch.uint8).fill_(byte_b)
                a, b = with_scales(a, 127), with_scales(b, 127)
                out = multiply(MXFP8Tensor(a.data, a.scale), b, way)[:70]
                exact = bounds.values(a)[0] @ bounds.values(b)[0, 0]
                torch.testing.assert_close(out.double(), exact.expand_as(out), rtol=2.0**-11, atol=0)


def test_kernels_flags_follow_their_stage(device, way):
    """Ordinary and extreme scales, and tiles with and without one scale, in turn along K, round the ring of stages."""
    a, b = operand((72, 3840), E4M3, 1, device), operand((2, 208, 3840), E4M3, 2, device)
    scale_a, scale_b = a.scale_bytes.clone(), b.scale_bytes.clone()
    for first in range(0, 120, 28):
        scale_a[:, first : first + 4] += 90
        scale_b[..., first : first + 4] -= 90
    for first in range(0, 120, 20):
        scale_b[:, ::3, first : first + 4] -= 20
    out = multiply(MXFP8Tensor(a.data, scale_a), MXFP8Tensor(b.data, scale_b), way, torch.bfloat16)
    assert torch.isfinite(out[:70]).all()


def test_accumulating_onto_special_values(device):
    a, b = operands(device)
    out = torch.zeros((72, 96), dtype=torch.bfloat16, device=device)
    out[3], out[4], out[71] = float("inf"), float("nan"), 5.0
    mx.grouped_mm(a, b, offsets([33, 37], device), out=out, accumulate=True)
    assert (out[3] == float("inf")).all()
    assert torch.isnan(out[4]).all()
    assert (out[71] == 5).all()
    assert torch.isfinite(out[5:]).all()
