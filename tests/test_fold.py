"""fold, on the CPU (the reference) and on the GPU (the kernels), against the oracle bit for bit; and its promises."""

from __future__ import annotations

import mx_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mx_checks import FP8, check_fold, random_bits, raw, tensor

from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor
from mxfp8_cutlass.quantize import fold, quantize

both_types = pytest.mark.parametrize("dtype", FP8, ids=str)
both_rows = pytest.mark.parametrize("rows", [1, 128])
SHAPES = [(0, 32), (2, 0, 96), (1, 32), (5, 96), (3, 128), (130, 160), (2, 129, 416), (128, 256), (300, 2880)]
on_any_device = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


@both_types
@both_rows
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spread", [0, 6, 60, 254])
def test_random_bits(shape, dtype, rows, spread, device):
    data, scale = random_bits(shape, dtype, seed=spread, spread=spread)
    check_fold(data, scale, dtype, rows, device)


@both_types
@both_rows
@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
def test_quantized_values(shape, dtype, rows, device):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
    data, scale = raw(quantize(x, dtype))
    check_fold(data, scale, dtype, rows, device)


@on_any_device
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(FP8),
    st.sampled_from([1, 128]),
    st.integers(1, 140),
    st.integers(1, 9),
    st.integers(0, 254),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    st.sampled_from([0.0, 0.1, 1.0]),
)
def test_any_bits(device, seed, dtype, rows, n_rows, blocks, spread, zero_share, nan_share):
    data, scale = random_bits((n_rows, 32 * blocks), dtype, seed, spread, nan_share, zero_share)
    check_fold(data, scale, dtype, rows, device)


@both_types
def test_every_element_with_every_shift(dtype, device):
    """Beside a block that fixes the shared scale, all 256 elements under scales from far below to as high as can be."""
    top = oracle.FORMATS[dtype].finite - 1
    scale = np.full((255, 4, 9), 127, dtype=np.uint8)
    data = np.zeros((255, 4, 9, 32), dtype=np.uint8)
    for i in range(8):
        data[:, :, i + 1] = np.arange(32 * i, 32 * i + 32)
        scale[:, :, i + 1] = np.arange(255)[:, None]
    data[:, :, 0] = np.array([top, 1, 0, 0x80 | top])[None, :, None]  # what fixes it: the maximum, the minimum, nothing
    # Nine blocks: put the first into each run of four.
    order = [0, 1, 2, 3, 0, 4, 5, 6, 0, 7, 8]
    data, scale = data[:, :, order], scale[:, :, order]
    check_fold(data.reshape(-1, 32 * 11), scale.reshape(-1, 11), dtype, 1, device)
    check_fold(data.reshape(-1, 32 * 11), scale.reshape(-1, 11), dtype, 128, device)


def one_run(dtype, blocks, device):
    """Folds one row of blocks (scale byte, element bytes); returns the blocks' element bytes and the shared scale."""
    data = np.zeros((1, len(blocks), 32), dtype=np.uint8)
    for i, (_, elements) in enumerate(blocks):
        data[0, i, : len(elements)] = elements
    folded = fold(tensor(data.reshape(1, -1), [[s for s, _ in blocks]], dtype, device))
    got, scale = raw(folded)
    assert len(set(scale[0])) == 1
    return [list(got.reshape(-1, 32)[i, : len(e)]) for i, (_, e) in enumerate(blocks)], int(scale[0, 0])


def test_rows_of_the_folding_table(device):
    """docs/numerics.md, "Folding, case by case": one assertion for each row, in E4M3 (0x38 is 1, 0x7E is 448)."""
    e4m3, e5m2 = FP8
    # An all-zero block's scale says nothing, however large.
    assert one_run(e4m3, [(120, [0x7E]), (250, [0x00, 0x80])], device) == ([[0x7E], [0x00, 0x80]], 120)
    # No block counts: 2**0.
    assert one_run(e4m3, [(3, [0x00]), (250, [0x80])], device) == ([[0x00], [0x80]], 127)
    assert one_run(e4m3, [(255, [0x38]), (9, [0x7F, 0xFF])], device) == ([[0x7F], [0x7F, 0xFF]], 127)
    # A block that does not use its range is shifted up: 1 = 2**-8 of the range.
    assert one_run(e4m3, [(127, [0x38])], device) == ([[0x78]], 119)
    # 1.875 does not fit under 448 = 1.75 * 2**8 at the scale where 1 would: one less.
    assert one_run(e4m3, [(127, [0x3F])], device) == ([[0x77]], 120)
    # Exact: 1 beside 448 * 2**3 becomes 2**-3.
    assert one_run(e4m3, [(130, [0x7E]), (127, [0x38])], device) == ([[0x7E], [0x20]], 130)
    # Into the subnormals, ties to even: 1.125 and 1.375 times 2**-9, and half the smallest number.
    assert one_run(e4m3, [(136, [0x7E]), (127, [0x39, 0x3B, 0x3C, 0x34, 0x30])], device)[0][1] == [
        0x01,
        0x01,
        0x02,
        0x01,
        0x00,
    ]
    # Far below: zeros, with their signs.
    assert one_run(e4m3, [(200, [0x7E]), (127, [0x7E, 0xFE])], device) == ([[0x7E], [0x00, 0x80]], 200)
    # NaN and Inf stay as they are, and do not count.
    assert one_run(e4m3, [(130, [0x7E, 0xFF]), (127, [0x7F, 0x38])], device) == ([[0x7E, 0xFF], [0x7F, 0x20]], 130)
    special = [0x7C, 0xFC, 0x7D, 0xFE, 0x3C]
    assert one_run(e5m2, [(130, [0x7B]), (127, special)], device) == ([[0x7B], [*special[:4], 0x30]], 130)
    # A NaN scale: NaN elements, even for zeros; the block takes the others' scale.
    assert one_run(e4m3, [(120, [0x7E]), (255, [0x00, 0x80, 0xFF])], device) == ([[0x7E], [0x7F] * 3], 120)
    # The ends of E8M0's range.
    assert one_run(e4m3, [(254, [0x7E])], device) == ([[0x7E]], 254)
    assert one_run(e4m3, [(2, [0x38])], device) == ([[0x48]], 0)


@both_types
def test_tiles_become_mixed_beyond_the_limit(dtype, device):
    fmt = oracle.FORMATS[dtype]
    data = np.full((300, 256), fmt.finite - 1, dtype=np.uint8)
    scale = np.full((300, 8), 127, dtype=np.uint8)
    scale[5, :4] = 127 - fmt.limit  # tile (0, 0): at the limit
    scale[5, 4:] = 127 - fmt.limit - 1  # tile (0, 1): beyond
    scale[200:, 4:] = 90  # tile (1, 1) has rows of both; tile (2, 1) only of this
    data[130, 128:], scale[130, 4:] = 0, 254  # does not count
    folded = fold(tensor(data, scale, dtype, device), rows=128)
    mixed = 255 if fmt.limit < 127 - 90 else 127
    assert folded.tile_scale.tolist() == [[127, 255], [127, mixed], [127, 90]]
    got_data, got_scale = raw(folded)
    assert (got_scale[:, :4] == 127).all()
    assert got_scale[:128, 4:].tolist() == scale[:128, 4:].tolist()
    assert (got_scale[130, 4:] == (127)).all()
    assert (got_data[:128, 128:] == fmt.finite - 1).all()


@both_types
@both_rows
def test_folded_tensors_come_back_as_they_are(dtype, rows, device):
    xq = quantize(torch.randn((130, 160), generator=torch.Generator().manual_seed(0)).to(device), dtype)
    folded = fold(xq, rows)
    again, statistics = fold(folded, rows, return_stats=True)
    assert again is folded
    assert statistics["changed_elements"] == 0
    assert statistics["runs"] == 260
    assert fold(folded, 1) is folded  # tiles have the shared scales of runs
    assert quantize(torch.zeros((1, 32), device=device), fold=True).folded == 1


seeds = st.integers(0, 2**32 - 1)
properties = settings(max_examples=60, deadline=None)


def random_tensor(seed, dtype, spread, rows=3, k=288, nan_share=0.05):
    return tensor(*random_bits((rows, k), dtype, seed, spread, nan_share), dtype)


def exact(xq):
    return xq.dequantize(torch.float64)


def by_run(x):
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))


def finite_pairs(xq, folded):
    """Values before and after, zero where the value before is not finite; by run; and the shared scales."""
    before, after = exact(xq), exact(folded)
    ok = before.isfinite()
    scales = torch.from_numpy(oracle.POWERS)[folded.scale_bytes.long()].repeat_interleave(32, -1)
    return by_run(before.where(ok, 0)), by_run(after.where(ok, 0)), by_run(scales).amax(-1)


@properties
@given(seeds, st.sampled_from(FP8), st.sampled_from([0, 3, 9, 40]))
def test_error_bounds(seed, dtype, spread):
    """At most half of the smallest subnormal under the shared scale, and 1/896 * 2**-8 (E4M3) of the run's maximum."""
    xq = random_tensor(seed, dtype, spread)
    before, after, scale = finite_pairs(xq, fold(xq))
    error, fmt = (after - before).abs(), oracle.FORMATS[dtype]
    assert (error <= fmt.table[1] / 2 * scale[..., None]).all()
    assert (error.amax(-1) <= before.abs().amax(-1) * fmt.table[1] / fmt.table[-1]).all()


@properties
@given(seeds, st.sampled_from(FP8), st.sampled_from([0, 3, 9, 40]))
def test_exact_unless_an_element_becomes_subnormal(seed, dtype, spread):
    xq = random_tensor(seed, dtype, spread)
    before, after, scale = finite_pairs(xq, fold(xq))
    fmt = oracle.FORMATS[dtype]
    normal = before.abs() >= 2.0 ** (1 - fmt.bias) * scale[..., None]
    assert (after == before)[normal].all()
    representable = (before / scale[..., None] / fmt.table[1]).frac() == 0
    assert (after == before)[representable].all()


@properties
@given(seeds, st.sampled_from(FP8), st.sampled_from([0, 3, 9, 40]))
def test_shared_scale_is_the_smallest(seed, dtype, spread):
    xq = random_tensor(seed, dtype, spread)
    folded = fold(xq)
    before, after, scale = finite_pairs(xq, folded)
    dmax, largest = oracle.FORMATS[dtype].table[-1], before.abs().amax(-1)
    some = largest > 0
    assert (largest <= dmax * scale)[some].all()
    assert ((largest > dmax * scale / 2) | (scale == oracle.POWERS[0]))[some].all()
    assert torch.equal(after.abs().amax(-1), largest)  # the maximum itself never changes
    blocks = torch.nn.functional.pad(folded.scale_bytes, (0, -folded.scale.shape[-1] % 4), value=255).unflatten(
        -1, (-1, 4)
    )
    assert ((blocks == blocks[..., :1]) | (blocks == 255)).all()


@properties
@given(seeds, st.sampled_from(FP8), st.sampled_from([0, 3, 9, 24, 40]), st.sampled_from([1, 100, 128, 200]))
def test_tile_bounds(seed, dtype, spread, n_rows):
    """An element loses at most 1/896 of its row's maximum in the run, unless that is below E8M0's range."""
    xq = random_tensor(seed, dtype, spread, n_rows, 160)
    folded = fold(xq, rows=128)
    before, after, scale = finite_pairs(xq, folded)
    error, largest = (after - before).abs().amax(-1), before.abs().amax(-1)
    in_range = largest > oracle.FORMATS[dtype].table[-1] / 2 * oracle.POWERS[0]
    assert (error <= largest / 896)[in_range].all()
    tiles = folded.tile_scale.repeat_interleave(128, 0)[:n_rows]
    rows = torch.from_numpy(np.searchsorted(oracle.POWERS, scale.numpy()))
    assert ((tiles == rows) | (tiles == 255)).all()


@properties
@given(seeds, st.sampled_from(FP8), st.sampled_from([0, 9, 60, 254]), st.sampled_from([1, 128]))
def test_idempotent(seed, dtype, spread, rows):
    folded = fold(random_tensor(seed, dtype, spread, 130), rows)
    again = fold(MXFP8Tensor(folded.data, folded.scale), rows)
    assert torch.equal(again.data.view(torch.uint8), folded.data.view(torch.uint8))
    assert torch.equal(again.scale_bytes, folded.scale_bytes)
    if rows == 128:
        assert torch.equal(again.tile_scale, folded.tile_scale)


def test_bad_input():
    xq = quantize(torch.zeros((2, 64)))
    with pytest.raises(TypeError, match="xq is a Tensor"):
        fold(xq.data)
    for rows in (0, 2, 127, "1", None):
        with pytest.raises(ValueError, match=f"rows is {rows!r}"):
            fold(xq, rows)


@pytest.mark.gpu
def test_misaligned_data_is_refused():
    data = torch.zeros(4 * 64 + 1, dtype=torch.uint8, device="cuda")[1:].view(4, 64).view(torch.float8_e4m3fn)
    xq = MXFP8Tensor(data, torch.zeros((4, 2), dtype=torch.uint8, device="cuda"))
    with pytest.raises(ValueError, match="aligned to 16 bytes"):
        fold(xq)
