"""grouped_mm of a batch whose matrices have as many rows as a tensor of counts says (decode), on either device."""

from __future__ import annotations

import bounds
import pytest
import torch
from products import E4M3, E5M2, folded, generator, is_poisoned, operand, poisoned

import mxfp8_cutlass as mx
from mxfp8_cutlass import env
from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor

OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
M = 200


def poisoned_rows(xq, counts) -> MXFP8Tensor:
    """The same with NaN elements and NaN scales in the rows from counts[g] on."""
    data, scale = xq.data.view(torch.uint8).clone(), xq.scale_bytes.clone()
    for g, count in enumerate(counts):
        data[g, count:], scale[g, count:] = 0x7F, 255
    return MXFP8Tensor(data.view(xq.dtype), scale)


def run(
    a, b, given, *, dtype=torch.int32, state=0, out_dtype=torch.bfloat16, bias=False, accumulate=False, **options
) -> torch.Tensor:
    """Call grouped_mm with counts `given`, NaN in the rows behind them and sentinels in the output's; check all of it.

    state: how a is folded.
    """
    groups, m, n = *a.shape[:2], b.shape[1]
    used = [min(max(count, 0), m) for count in given]
    a = folded(poisoned_rows(a, used), state)
    source = generator(a.device, 99)
    out = poisoned((groups, m, n), out_dtype, a.device)
    if accumulate:
        for g, count in enumerate(used):
            out[g, :count] = torch.randn((count, n), generator=source, device=a.device).to(out_dtype)
    old = out.clone() if accumulate else None
    bias = torch.randn((groups, n), generator=source, device=a.device).to(out_dtype) if bias else None
    counts = torch.tensor(given, dtype=dtype, device=a.device)
    got = mx.grouped_mm(a, b, counts=counts, bias=bias, out=out, accumulate=accumulate, **options)
    assert got is out
    exact = options.get("exact", False)
    assert bounds.check_product(out, a, b, None, counts=used, exact=exact, bias=bias, old=old) == sum(used)
    for g, count in enumerate(used):
        assert is_poisoned(out[g, count:]), f"rows of group {g} were written that it does not have"
    return out


@pytest.mark.parametrize("exact", [False, True], ids=["folded", "exact"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "counts",
    [
        [0] * 5,
        [M] * 5,
        [1] * 5,
        [0, M, 0, M, 0],
        [63, 64, 65, 127, 128],
        [0, 0, 0, 0, 1],
        [M, 0, 0, 0, 0],
        [5, 129, 0, 1, 190],
    ],
    ids=str,
)
def test_counts(device, counts, dtype, exact):
    a, b = operand((5, M, 288), E4M3, 1, device), operand((5, 144, 288), E4M3, 2, device)
    run(a, b, counts, dtype=dtype, exact=exact)


@pytest.mark.parametrize("exact", [False, True], ids=["folded", "exact"])
@pytest.mark.parametrize(
    ("counts", "dtype"),
    [
        ([-1, 201, 7], torch.int32),
        ([2**31 - 1, -(2**31), 1000], torch.int32),
        ([2**32 + 5, -(2**40), 2**63 - 1], torch.int64),
    ],
    ids=str,
)
def test_counts_out_of_range_are_clamped(device, counts, dtype, exact):
    a, b = operand((3, M, 160), E4M3, 1, device), operand((3, 48, 160), E4M3, 2, device)
    run(a, b, counts, dtype=dtype, exact=exact)


@pytest.mark.parametrize("state_b", [0, 1, 128])
@pytest.mark.parametrize("state_a", [0, 1, 128])
def test_folded_states(device, state_a, state_b):
    a, b = operand((3, M, 544), E4M3, 1, device), folded(operand((3, 208, 544), E4M3, 2, device), state_b)
    for exact in (False, True):
        run(a, b, [130, 0, 3], state=state_a, exact=exact)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out_dtype", OUTPUTS, ids=str)
def test_bias_and_accumulate(device, out_dtype, accumulate, bias):
    a, b = operand((3, M, 160), E5M2, 1, device), operand((3, 96, 160), E4M3, 2, device)
    run(a, b, [1, 0, 150], out_dtype=out_dtype, bias=bias, accumulate=accumulate)


@pytest.mark.parametrize("exact", [False, True], ids=["folded", "exact"])
@pytest.mark.parametrize("groups", [1, 33, 1024])
def test_many_groups(device, groups, exact):
    a, b = operand((groups, 4, 64), E4M3, 1, device), operand((groups, 16, 64), E4M3, 2, device)
    run(a, b, [(7 * g) % 5 for g in range(groups)], exact=exact)


@pytest.mark.parametrize("expected_m", [None, 1, 70, 128, 10**9])
def test_any_expectation_is_right(device, expected_m):
    a, b = operand((4, 300, 288), E4M3, 1, device), folded(operand((4, 400, 288), E4M3, 2, device), 128)
    run(a, b, [300, 0, 129, 1], state=1, expected_m=expected_m)


def test_new_output(device):
    a, b = operand((3, 40, 160), E4M3, 1, device), operand((3, 48, 160), E4M3, 2, device)
    out = mx.grouped_mm(a, b, counts=torch.tensor([40, 1, 0], device=device), out_dtype=torch.float32)
    assert (out.shape, out.dtype, out.device) == ((3, 40, 48), torch.float32, a.device)
    bounds.check_product(out, a, b, None, counts=[40, 1, 0])


def test_no_room(device):
    a, b = operand((3, 0, 160), device=device), operand((3, 48, 160), device=device)
    assert mx.grouped_mm(a, b, counts=torch.tensor([0, 1, 0], device=device)).shape == (3, 0, 48)


def test_check_reads_the_counts(device, monkeypatch):
    monkeypatch.setenv(env.CHECK, "1")
    a, b = operand((3, 40, 160), E4M3, 1, device), operand((3, 48, 160), E4M3, 2, device)
    run(a, b, [40, 0, 3])
    for wrong in ([-1, 2, 3], [1, 2, 41]):
        out = poisoned((3, 40, 48), device=device)
        with pytest.raises(ValueError, match=r"counts is .* 0 to M = 40") as error:
            mx.grouped_mm(a, b, counts=torch.tensor(wrong, device=device), out=out)
        assert str(wrong) in str(error.value)
        assert is_poisoned(out)
