"""The bounds of tests/bounds.py: wide enough for what Hopper's tensor cores do, and too narrow for a wrong block."""

from __future__ import annotations

import bounds
import pytest
import torch
from products import E4M3, E5M2, folded, mixed_tiles, offsets, operand

from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor
from mxfp8_cutlass.quantize import fold

OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


def elements(kind, shape, dtype, seed):
    """FP8 values in float64."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=source)
    if kind == "bits":
        byte = torch.randint(0, 256, shape, generator=source, dtype=torch.uint8)
        value = byte.view(dtype).double()
        return value.where(torch.isfinite(value), 0.0)
    if kind == "log-normal":
        x = torch.exp(1.5 * torch.randn(shape, generator=source)) * x.sign()
    return (16 * x).to(dtype).double()


def losses(kind, dtype, promotion_k, K, positive):
    """What an emulated kernel loses, per element, and per row as a root mean square, in units of 2^-13 M or D."""
    a, b = elements(kind, (16, K), dtype, 1), elements(kind, (64, K), dtype, 2)
    if positive:
        a, b = a.abs(), b.abs()
    unit = 2.0**-13 * bounds.loss_measure(a, b, promotion_k, positive=positive)
    error = (bounds.hopper_chain(a, b, promotion_k) - a @ b.mT) / unit
    return error.abs().max().item(), error.square().mean(1).sqrt().max().item()


@pytest.mark.parametrize("promotion_k", [32, 128])
@pytest.mark.parametrize("positive", [False, True], ids=["signed", "positive"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_twice_what_the_tensor_cores_lose_is_allowed(dtype, positive, promotion_k):
    element, row = bounds.TRUNCATION[promotion_k, positive]
    for kind in ("gaussian", "bits", "log-normal"):
        for K in (32, 96, 128, 384):
            worst, worst_row = losses(kind, dtype, promotion_k, K, positive)
            assert 2 * worst < element, (kind, K)
            assert 2 * worst_row < row, (kind, K)


def test_emulation_has_the_bias_that_was_measured():
    """On an H200: -6.4e-4 with promotion every 128, -9.4e-5 every 32, of which rounding to bfloat16 is 5e-5."""
    a, b = (elements("gaussian", (16, 1024), E4M3, seed).abs() for seed in (1, 2))
    exact = a @ b.mT
    bias = {k: ((bounds.hopper_chain(a, b, k) - exact).mean() / exact.mean()).item() for k in (32, 128, 256)}
    assert -7.5e-4 < bias[128] < -5e-4
    assert -1e-4 < bias[32] < 0
    assert bias[256] < -1.2e-3  # what test_positive_data refuses


def emulated(a, b, promotion_k, out_dtype):
    """One group's result as a right kernel would give it."""
    return bounds.hopper_chain(bounds.values(a), bounds.values(b), promotion_k).float().to(out_dtype)


def problem(K, dtype, promotion_k):
    a, b = operand((20, K), dtype, 1), operand((16, K), dtype, 2)
    return (folded(a, 1), folded(b, 128)) if promotion_k == 128 else (a, b)


def check(got, a, b, promotion_k):
    bounds.check(got, bounds.expect(bounds.values(a), bounds.values(b), promotion_k))


@pytest.mark.parametrize("out_dtype", OUTPUTS, ids=str)
@pytest.mark.parametrize("promotion_k", [32, 128])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("K", [32, 576, 4096])
class TestFaults:
    """Each fault is put into the operands of a right product, or into its result; N = 16 is the hardest to tell."""

    def test_right_results_pass(self, K, dtype, promotion_k, out_dtype):
        a, b = problem(K, dtype, promotion_k)
        check(emulated(a, b, promotion_k, out_dtype), a, b, promotion_k)

    @pytest.mark.parametrize("step", [-1, 1])
    def test_one_block_with_a_scale_off_by_one(self, K, dtype, promotion_k, out_dtype, step):
        a, b = problem(K, dtype, promotion_k)
        for block in {0, K // 64, K // 32 - 1}:
            scale = a.scale_bytes.clone()
            scale[7, block] += step
            self.refused(MXFP8Tensor(a.data, scale), b, a, b, promotion_k, out_dtype)

    def test_one_column_with_a_scale_off_by_one(self, K, dtype, promotion_k, out_dtype):
        a, b = problem(K, dtype, promotion_k)
        scale = b.scale_bytes.clone()
        run = promotion_k // 32
        scale[5, -run:] += 1
        self.refused(a, MXFP8Tensor(b.data, scale), a, b, promotion_k, out_dtype)

    def test_two_blocks_of_a_row_swapped(self, K, dtype, promotion_k, out_dtype):
        if K == 32:
            pytest.skip("one block")
        a, b = problem(K, dtype, promotion_k)
        data = a.data.view(torch.uint8).clone()
        data[7, :32], data[7, 32:64] = a.data.view(torch.uint8)[7, 32:64], a.data.view(torch.uint8)[7, :32]
        self.refused(MXFP8Tensor(data.view(dtype), a.scale), b, a, b, promotion_k, out_dtype)

    def test_last_block_missed(self, K, dtype, promotion_k, out_dtype):
        a, b = problem(K, dtype, promotion_k)
        data = a.data.view(torch.uint8).clone()
        data[:, -32:] = 0
        self.refused(MXFP8Tensor(data.view(dtype), a.scale), b, a, b, promotion_k, out_dtype)

    def test_tail_row_missed_and_rows_or_columns_swapped(self, K, dtype, promotion_k, out_dtype):
        a, b = problem(K, dtype, promotion_k)
        right = emulated(a, b, promotion_k, out_dtype)
        for wrong in (right.clone(), right[[1, 0, *range(2, 20)]], right[:, [1, 0, *range(2, 16)]], right.roll(1, 0)):
            if torch.equal(wrong, right):
                wrong[-1] = float("nan")
            with pytest.raises(AssertionError, match="wrong"):
                check(wrong, a, b, promotion_k)
        wrong = right.clone()
        wrong[-1] = 0
        with pytest.raises(AssertionError, match="wrong"):
            check(wrong, a, b, promotion_k)

    def refused(self, wrong_a, wrong_b, a, b, promotion_k, out_dtype):
        got = emulated(wrong_a, wrong_b, promotion_k, out_dtype)
        with pytest.raises(AssertionError, match="wrong"):
            check(got, a, b, promotion_k)


def test_one_unit_in_the_last_place_off_everywhere_is_refused():
    """Where the tensor cores lose nothing: one product per element."""
    a, b = (elements("gaussian", (32, 32), E4M3, seed) * (torch.arange(32) == 3) for seed in (1, 2))
    expected = bounds.expect(a, b, 32)
    right = (a @ b.mT).float().bfloat16()
    bounds.check(right, expected)
    off = torch.where(right == 0, right, (right.view(torch.int16) + 2).view(torch.bfloat16))
    with pytest.raises(AssertionError, match="wrong"):
        bounds.check(off, expected)


@pytest.mark.parametrize("out_dtype", OUTPUTS, ids=str)
def test_infinities_nans_and_zeros(out_dtype):
    inf, nan = float("inf"), float("nan")
    a = torch.tensor([[1.0, 0.0], [inf, 1.0], [inf, -inf], [nan, 0.0], [0.0, 0.0]], dtype=torch.float64)
    b = torch.tensor([[1.0, 1.0], [1.0, 0.5]], dtype=torch.float64)
    expected = bounds.expect(a, b, 128)
    right = torch.tensor([[1, 1], [inf, inf], [nan, nan], [nan, nan], [0, 0]], dtype=out_dtype)
    bounds.check(right, expected)
    for row, column, wrong in ((0, 0, nan), (0, 1, inf), (1, 0, nan), (1, 1, -inf), (2, 0, 0), (3, 1, 1), (4, 0, 1e-7)):
        got = right.clone()
        got[row, column] = wrong
        with pytest.raises(AssertionError, match=f"first is \\[{row}, {column}\\]"):
            bounds.check(got, expected)


def test_overflow_must_have_the_right_sign():
    a, b = torch.full((1, 4), 2.0**70, dtype=torch.float64), torch.full((2, 4), 2.0**70, dtype=torch.float64)
    b[1, :2] *= -1
    expected = bounds.expect(a, b, 128)
    for fine in (float("nan"), float("inf"), -float("inf"), 0.0):
        bounds.check(torch.tensor([[float("inf"), fine]]), expected)
    for wrong in (float("nan"), -float("inf"), 3e38):
        with pytest.raises(AssertionError, match="first is \\[0, 0\\]"):
            bounds.check(torch.tensor([[wrong, 0.0]]), expected)


@pytest.mark.parametrize("spread", [2, 12, 40])
@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_products_of_folded_operands(monkeypatch, dtype, rows, spread):
    """As on a GPU: checked against the folded operands closely, and against the given ones within folding's bound."""
    a, b = operand((45, 288), dtype, 1, spread=spread), mixed_tiles(operand((2, 16, 288), dtype, 2, spread=spread))
    run_a, run_b = fold(a), fold(b, rows)
    monkeypatch.setattr(bounds, "as_run", lambda a, b, **options: (run_a, run_b, 128))
    got = torch.empty((45, 16), dtype=torch.bfloat16)
    for g, part in enumerate((slice(0, 40), slice(40, 45))):
        x, y = bounds.values(run_a)[part], bounds.values(run_b)[g]
        got[part] = bounds.hopper_chain(x, y, 128).float().bfloat16()
    ends = offsets([40, 5]).tolist()
    assert bounds.check_product(got, a, b, ends) == 45
    got[44] *= 1.02
    with pytest.raises(AssertionError, match=r"group 1.* wrong"):
        bounds.check_product(got, a, b, ends)


def test_folding_beyond_its_bound_is_refused():
    x = operand((8, 128), E4M3, 1, spread=12)
    right = fold(x)
    bounds.fold_bound(x, right)
    data = right.data.view(torch.uint8).clone()
    data[3, 5] ^= 2
    with pytest.raises(AssertionError, match="folding changed an element"):
        bounds.fold_bound(x, MXFP8Tensor(data.view(E4M3), right.scale))
