"""quantize and dequantize, on the CPU (the reference) and on the GPU (the kernels), against the oracle bit for bit."""

from __future__ import annotations

import mx_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mx_checks import FP8, INPUTS, SCALINGS, check_folding_at_once, check_quantize, random_floats, raw, wild

from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor
from mxfp8_cutlass.quantize import dequantize, quantize

every_kind = pytest.mark.parametrize(
    ("x_dtype", "dtype", "scaling"), [(x, d, s) for x in INPUTS for d in FP8 for s in SCALINGS], ids=str
)
every_rule = pytest.mark.parametrize(("dtype", "scaling"), [(d, s) for d in FP8 for s in SCALINGS], ids=str)
on_any_device = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


@every_kind
@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (7, 96), (3, 128), (5, 416), (2, 0, 64), (3, 5, 160), (2, 2880)])
def test_shapes(x_dtype, dtype, scaling, shape, device):
    x = wild(shape, x_dtype)
    check_quantize(x, dtype, scaling, device)
    check_folding_at_once(x, dtype, scaling, device)


@every_rule
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_finite_16_bit_input(x_dtype, dtype, scaling, device):
    x = torch.arange(65536).to(torch.int32).to(torch.int16).view(x_dtype)
    x = x[torch.isfinite(x)]
    x = x[: x.numel() // 128 * 128]
    shuffled = x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))]
    for values in (x, shuffled):  # neighbours of like size, and everything beside everything
        check_quantize(values.view(-1, 128), dtype, scaling, device)
        check_folding_at_once(values.view(-1, 128), dtype, scaling, device)


def around(values):
    """Each float32 with its two neighbours."""
    whole = torch.tensor(values, dtype=torch.float64).float().view(torch.int32)
    return torch.cat([(whole + step).clamp(0, 0x7F7FFFFF).view(torch.float32) for step in (-1, 0, 1)])


@every_rule
def test_amax_around_each_change_of_scale(dtype, scaling, device):
    """Amax at dmax * 2**k, 2**k and the midpoints above FP8's maxima, one step to either side, subnormals included."""
    dmax = oracle.FORMATS[dtype].table[-1]
    amax = around(
        [m * 2.0**e for e in range(-149, 128) for m in (1.0, 1.75, 1.875, 1.9375, dmax / 2**8) if m * 2.0**e < 2.0**128]
    )
    x = torch.rand((amax.numel(), 32), generator=torch.Generator().manual_seed(1)) * amax[:, None]
    x[:, 5] = -amax
    check_quantize(x, dtype, scaling, device)
    runs = x[torch.randperm(x.shape[0] // 4 * 4, generator=torch.Generator().manual_seed(2))].view(-1, 128)
    check_folding_at_once(runs, dtype, scaling, device)


@every_rule
def test_elements_around_each_rounding_boundary(dtype, scaling, device):
    table = oracle.FORMATS[dtype].table
    x = around(np.concatenate([table, (table[1:] + table[:-1]) / 2]).tolist())
    blocks = torch.zeros((-(-x.numel() // 31), 32))
    blocks[:, 0] = float(table[-1])
    blocks[:, 1:] = torch.nn.functional.pad(x, (0, -x.numel() % 31)).view(-1, 31)
    for exponent in (0, 40, -100):
        check_quantize(blocks * 2.0**exponent, dtype, scaling, device)


@every_rule
@pytest.mark.parametrize("neighbour", [0, 1, 2, 3, 5, 8, 9, 12, 17, 23, 24, 60])
def test_folding_at_once_rounds_twice(dtype, scaling, neighbour, device):
    """Beside a block that is 2**neighbour larger, elements near the boundaries of both roundings."""
    table = oracle.FORMATS[dtype].table
    halves = (table[1:] + table[:-1]) / 2
    subnormal_ties = [(n + 0.5) * table[1] * 2.0**neighbour for n in range(9)]
    near = [t * (1 + d) for t in subnormal_ties for d in (-0.06, -0.03, -1e-3, 0, 1e-3, 0.03, 0.06)]
    x = around([v for v in (*near, *halves) if v < table[-1]])
    x = torch.nn.functional.pad(x, (0, -x.numel() % 31)).view(-1, 31)
    rows = torch.zeros((x.shape[0], 4, 32))
    rows[:, 0, 0] = float(table[-1]) * 2.0**neighbour
    rows[:, 1:, 0] = float(table[-1])
    rows[:, 1, 1:], rows[:, 2, 1:], rows[:, 3, 1:] = x, -x, x * 1.03
    rows[:, 3, 0] *= 1.1  # saturates under "floor"
    check_folding_at_once(rows.view(-1, 128), dtype, scaling, device)


@every_kind
def test_rows_of_the_special_value_table(x_dtype, dtype, scaling, device):
    """docs/numerics.md, "Special values": one assertion for each row."""
    inf, nan, tiny = float("inf"), float("nan"), torch.finfo(x_dtype).smallest_normal

    def block(*values):
        x = torch.full((1, 32), 1.0, dtype=x_dtype)
        x[0, : len(values)] = torch.tensor(values, dtype=x_dtype)
        data, scale = raw(quantize(x.to(device), dtype, scaling))
        return data[0], scale[0, 0]

    for values in [(nan,), (-nan,), (inf,), (-inf,), (nan, inf, 0.0)]:
        data, scale = block(*values)
        assert scale == 255
        assert (data == 0x7F).all()
    data, scale = block(*[0.0, -0.0] * 16)
    assert scale == 0
    assert data.tolist() == [0x00, 0x80] * 16
    data, scale = block(-0.0, tiny)
    assert data[0] == 0x80
    largest = torch.finfo(x_dtype).max
    data, scale = block(largest, -largest)
    assert (data[:2] & 0x7F).max() < oracle.FORMATS[dtype].finite
    data, scale = block(*[tiny / 2] * 32)  # an input subnormal
    assert scale == oracle.quantize(torch.full((1, 32), tiny / 2, dtype=x_dtype), dtype, scaling)[1][0, 0]
    if x_dtype != torch.float16:
        data, scale = block(*[2.0**-130] * 32)
        assert scale == 0  # the range's end: the block keeps what 2**-127 leaves of it
        assert (data == oracle.encode(np.float64(2.0**-3), oracle.FORMATS[dtype])).all()
    if scaling == "floor":
        data, scale = block(*[1.99] * 32)  # above dmax after scaling
        assert (data == oracle.FORMATS[dtype].finite - 1).all()


@on_any_device
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(INPUTS),
    st.sampled_from(FP8),
    st.sampled_from(SCALINGS),
    st.integers(1, 9),
    st.integers(1, 13),
)
def test_any_bits(device, seed, x_dtype, dtype, scaling, rows, blocks):
    x = random_floats((rows, 32 * blocks), x_dtype, seed)
    check_quantize(x, dtype, scaling, device)
    check_folding_at_once(x, dtype, scaling, device)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_dequantize_every_element_with_every_scale(dtype, device):
    fmt = oracle.FORMATS[dtype]
    data = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    xq = MXFP8Tensor(data.view(dtype).to(device), scale.to(device))
    exact = oracle.decode(data.numpy(), fmt) * np.append(oracle.POWERS, np.nan)[scale.numpy()].repeat(32, axis=-1)
    infinite = data.view(dtype).double().isinf().numpy() & (scale.numpy().repeat(32, axis=-1) != 255)
    exact = np.where(infinite, np.where(data.numpy() & 0x80, -np.inf, np.inf), exact)
    for out_dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        out = dequantize(xq, out_dtype)
        assert out.dtype == out_dtype
        expected = (
            torch.from_numpy(exact).to(torch.float32).to(out_dtype)
            if out_dtype.itemsize == 2
            else torch.from_numpy(exact).to(out_dtype)
        )
        torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)
        assert (out.cpu().signbit() == expected.signbit())[~expected.isnan()].all()


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (3, 96), (2, 5, 416)])
def test_dequantize_shapes(out_dtype, shape, device):
    xq = quantize(wild(shape, torch.float32), fold=True).to(device)
    torch.testing.assert_close(xq.dequantize(out_dtype).cpu(), dequantize(xq.to("cpu"), out_dtype), rtol=0, atol=0)


@every_rule
def test_error_is_within_half_a_step(dtype, scaling, device):
    """RCEIL: within 2**-(mantissa bits + 1) of the element, or half of its block's smallest subnormal."""
    fmt = oracle.FORMATS[dtype]
    x = torch.randn((64, 416), generator=torch.Generator().manual_seed(0))
    xq = quantize(x.to(device), dtype, scaling)
    step = torch.maximum(
        x.double().abs() * 2.0 ** -(fmt.mantissa + 1),
        torch.from_numpy(oracle.POWERS[xq.scale_bytes.cpu().numpy()]).repeat_interleave(32, -1) * fmt.table[1] / 2,
    )
    if scaling == "floor":  # the largest may be cut off, from just below 2**(emax + 1) to dmax
        step = step * 2
    assert ((xq.dequantize(torch.float64).cpu() - x.double()).abs() <= step).all()


GOOD = torch.zeros((4, 64), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("error", "match", "args", "kwargs"),
    [
        (TypeError, "x is a list", ([1.0],), {}),
        (TypeError, r"x has dtype torch.float64", (GOOD.double(),), {}),
        (TypeError, r"x has dtype torch.int32", (GOOD.int(),), {}),
        (TypeError, r"dtype is torch.float16", (GOOD, torch.float16), {}),
        (TypeError, r"dtype is 'e4m3'", (GOOD, "e4m3"), {}),
        (TypeError, r"fold is 128", (GOOD,), {"fold": 128}),
        (ValueError, r"scaling is 'even'", (GOOD,), {"scaling": "even"}),
        (ValueError, r"x has shape \(64,\)", (GOOD[0],), {}),
        (ValueError, r"x has shape \(1, 1, 4, 64\)", (GOOD[None, None],), {}),
        (ValueError, r"K = 48", (torch.zeros((4, 48)),), {}),
        (ValueError, r"K = 0", (torch.zeros((4, 0)),), {}),
        (ValueError, "contiguous", (torch.zeros((64, 64)).t()[:, :32],), {}),
        (ValueError, "x is on meta", (GOOD.to("meta"),), {}),
    ],
)
def test_bad_input(error, match, args, kwargs):
    with pytest.raises(error, match=match):
        quantize(*args, **kwargs)


def test_bad_input_to_dequantize():
    with pytest.raises(TypeError, match="xq is a Tensor"):
        dequantize(GOOD)
    with pytest.raises(TypeError, match=r"dtype is torch.int8"):
        dequantize(quantize(GOOD), torch.int8)


@pytest.mark.gpu
def test_misaligned_data_is_refused():
    x = torch.zeros(4 * 64 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(4, 64)
    with pytest.raises(ValueError, match="aligned to 16 bytes"):
        quantize(x)


def test_gradients_do_not_flow():
    assert not quantize(GOOD.float().requires_grad_()).dequantize().requires_grad
