"""grouped_mm against a float64 product of the exact MXFP8 values, on either device. The bounds: tests/bounds.py."""

from __future__ import annotations

import bounds
import pytest
import torch
from products import E4M3, E5M2, folded, is_poisoned, mixed_tiles, offsets, operand, poisoned, run

import mxfp8_cutlass as mx
from mxfp8_cutlass import env
from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor

OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
RAGGED = [130, 0, 1, 63, 0, 66]


@pytest.mark.parametrize("exact", [False, True], ids=["folded", "exact"])
@pytest.mark.parametrize("out_dtype", OUTPUTS, ids=str)
@pytest.mark.parametrize("dtype_b", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype_a", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_types(device, dtype_a, dtype_b, out_dtype, exact):
    a, b = operand((267, 320), dtype_a, 1, device), operand((6, 80, 320), dtype_b, 2, device)
    run(a, b, RAGGED, out_dtype=out_dtype, bias=True, accumulate=True, exact=exact)
    run(operand((6, 70, 320), dtype_a, 3, device), b, out_dtype=out_dtype, bias=True, accumulate=True, exact=exact)


@pytest.mark.parametrize("state_b", [0, 1, 128, "mixed"])
@pytest.mark.parametrize("state_a", [0, 1, 128])
def test_folded_states(device, state_a, state_b):
    a, b = operand((267, 544), E4M3, 1, device), operand((6, 208, 544), E4M3, 2, device)
    if state_b == "mixed":
        b, state_b = mixed_tiles(b), 128
    a, b = folded(a, state_a), folded(b, state_b)
    if b.tile_scale is not None:
        mixed = b.tile_scale == 255
        assert not mixed.all()
    for exact in (False, True):
        run(a, b, RAGGED, exact=exact)
    run(folded(operand((6, 5, 544), E4M3, 3, device), state_a), b)


def test_mixed_tiles_are_mixed():
    b = folded(mixed_tiles(operand((6, 208, 544), E4M3, 2)), 128)
    mixed = b.tile_scale == 255
    assert mixed.any()
    assert not mixed.all()


@pytest.mark.parametrize("exact", [False, True], ids=["folded", "exact"])
@pytest.mark.parametrize("N", [16, 48, 208, 400])
@pytest.mark.parametrize("K", [32, 96, 128, 576, 2880])
def test_shapes(device, K, N, exact):
    a, b = operand((300, K), E4M3, K + N, device), operand((6, N, K), E4M3, K + N + 1, device)
    run(a, b, RAGGED, exact=exact)
    if K == 2880:
        run(a, folded(b, 1), RAGGED, exact=exact)


@pytest.mark.parametrize("M", [1, 63, 64, 65, 129, 300])
def test_batched(device, M):
    a, b = operand((3, M, 288), E4M3, M, device), operand((3, 144, 288), E4M3, M + 1, device)
    for exact in (False, True):
        run(a, b, exact=exact)


def test_swizzled_scales(device):
    a, b = operand((267, 544), E4M3, 1, device), operand((6, 208, 544), E4M3, 2, device)
    offs = offsets(RAGGED, device)
    rows = int(offs[-1])
    for exact in (False, True):
        want = mx.grouped_mm(a, b, offs, exact=exact)[:rows]
        for x, w in ((a.swizzle(offs), b), (a, b.swizzle()), (a.swizzle(offs), b.swizzle())):
            assert torch.equal(mx.grouped_mm(x, w, offs, exact=exact)[:rows], want)
    for wrong, laid_out in ((a.swizzle(), "each matrix"), (a.swizzle(offs[-2:].contiguous()), "2 groups of rows")):
        with pytest.raises(ValueError, match=f"a has scales swizzled for {laid_out}: .* 6 groups of rows"):
            mx.grouped_mm(wrong, b, offs)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out_dtype", OUTPUTS, ids=str)
def test_bias_and_accumulate(device, out_dtype, accumulate, bias):
    a, b = operand((267, 160), E4M3, 1, device), operand((6, 96, 160), E4M3, 2, device)
    run(a, b, RAGGED, out_dtype=out_dtype, bias=bias, accumulate=accumulate)
    run(operand((6, 66, 160), E4M3, 3, device), b, out_dtype=out_dtype, bias=bias, accumulate=accumulate)


@pytest.mark.parametrize("out_dtype", [None, *OUTPUTS], ids=str)
def test_new_output(device, out_dtype):
    a, b = operand((260, 160), E4M3, 1, device), operand((6, 96, 160), E4M3, 2, device)
    out = mx.grouped_mm(a, b, offsets(RAGGED, device), out_dtype=out_dtype)
    assert out.dtype == (out_dtype or torch.bfloat16)
    assert out.shape == (260, 96)
    assert out.device == a.device
    bounds.check_product(out, a, b, offsets(RAGGED).tolist())


@pytest.mark.parametrize("offs_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [[0, 0, 0, 0], [0, 0, 0, 5], [5, 0, 0, 0], [1, 1, 1, 1], [0, 200, 0, 1], [64, 64, 64, 64], [1, 127, 129, 0]],
    ids=str,
)
def test_group_sizes(device, sizes, offs_dtype):
    a, b = operand((270, 160), E4M3, 1, device), operand((4, 48, 160), E4M3, 2, device)
    for exact in (False, True):
        run(a, b, sizes, offs_dtype=offs_dtype, exact=exact)


@pytest.mark.parametrize("exact", [False, True], ids=["folded", "exact"])
@pytest.mark.parametrize("groups", [1, 33, 130, 1024])
def test_many_groups(device, groups, exact):
    sizes = [(7 * g) % 3 for g in range(groups)]
    a, b = operand((sum(sizes) + 2, 64), E4M3, 1, device), operand((groups, 16, 64), E4M3, 2, device)
    run(a, b, sizes, exact=exact)


def test_no_rows(device):
    b = operand((4, 48, 160), E4M3, 2, device)
    out = mx.grouped_mm(operand((0, 160), device=device), b, offsets([0] * 4, device))
    assert out.shape == (0, 48)
    assert mx.grouped_mm(operand((4, 0, 160), device=device), b).shape == (4, 0, 48)


@pytest.mark.parametrize("exact", [False, True], ids=["folded", "exact"])
@pytest.mark.parametrize("used", [0, 1, 100, 128, 190])
def test_rows_beyond_the_last_group_are_neither_used_nor_written(device, used, exact):
    a, b = operand((200, 160), E4M3, 1, device), operand((2, 48, 160), E4M3, 2, device)
    data, scale = a.data.view(torch.uint8).clone(), a.scale_bytes.clone()
    data[used:], scale[used:] = 0x7F, 255
    a = MXFP8Tensor(data.view(E4M3), scale)
    run(a, b, [used // 3, used - used // 3], exact=exact)
    run(a, b, [0, used], accumulate=True, exact=exact)


@pytest.mark.parametrize("exact", [False, True], ids=["folded", "exact"])
def test_views_that_start_at_odd_rows(device, exact):
    """Scales at odd addresses, elements and output at multiples of 32 bytes."""
    whole_a, whole_b = operand((301, 96), E4M3, 1, device), operand((7, 48, 96), E4M3, 2, device)
    a = MXFP8Tensor(whole_a.data[1:268], whole_a.scale_bytes[1:268])
    b = MXFP8Tensor(whole_b.data[1:], whole_b.scale_bytes[1:])
    run(a, b, RAGGED, exact=exact)
    memory = poisoned((303, 48), device=a.device)
    offs = torch.cat([torch.zeros(1), offsets(RAGGED)]).to(device, torch.int64)[1:]
    mx.grouped_mm(a, b, offs, out=memory[3:270], exact=exact)
    bounds.check_product(memory[3:270], a, b, offs.tolist(), exact=exact)
    assert is_poisoned(memory[:3])
    assert is_poisoned(memory[263:])


def test_positive_data(device):
    """Every loss of the tensor cores has one sign here, so that a rarer promotion would show as a bias."""
    K = 8192
    a = operand((64, K), E4M3, 1, device, spread=0, positive=True)
    b = operand((1, 256, K), E4M3, 2, device, spread=0, positive=True)
    exact = bounds.values(a) @ bounds.values(b)[0].mT
    offs = offsets([64], device)
    for options, limit in (({}, 1e-3), ({"exact": True}, 1e-4)):
        out = mx.grouped_mm(a, b, offs, out_dtype=torch.float32, **options)
        bias = ((out.double() - exact).mean() / exact.mean()).item()
        assert -limit < bias < 2e-5
        bounds.check_product(out, a, b, [64], positive=True, **options)


@pytest.mark.parametrize("value", ["0", "1"])
def test_check_reads_the_offsets(device, monkeypatch, value):
    monkeypatch.setenv(env.CHECK, value)
    a, b = operand((267, 160), E4M3, 1, device), operand((6, 48, 160), E4M3, 2, device)
    run(a, b, RAGGED)
    run(a, mx.fold(b, 128), RAGGED)
    if value == "0":
        return
    for wrong in ([1, 0, 2, 3, 4, 5], [-1, 0, 1, 2, 3, 4], [0, 0, 0, 0, 0, 268]):
        out = poisoned((267, 48), device=a.device)
        with pytest.raises(ValueError, match="offs is ") as error:
            mx.grouped_mm(a, b, torch.tensor(wrong, device=device), out=out)
        assert str(wrong) in str(error.value)
        assert is_poisoned(out)


@pytest.mark.parametrize("claim", [1, 128])
def test_check_reads_the_scales_of_operands_that_claim_to_be_folded(device, monkeypatch, claim):
    monkeypatch.setenv(env.CHECK, "1")
    if device.type == "cpu":
        pytest.skip("the reference does not rely on folded")
    a, b = operand((10, 160), E4M3, 1, device), operand((1, 48, 160), E4M3, 2, device)
    tiles = torch.full((1, 1, 2), 120, dtype=torch.uint8, device=device) if claim == 128 else None
    claimed = MXFP8Tensor(b.data, b.scale, folded=claim, tile_scale=tiles)
    with pytest.raises(ValueError, match="b has folded = "):
        mx.grouped_mm(a, claimed, offsets([10], device))
