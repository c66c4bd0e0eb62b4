"""Inputs for quantize and fold, and comparisons of what they give with the oracle, bit for bit."""

from __future__ import annotations

import mx_oracle as oracle
import numpy as np
import torch

from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor
from mxfp8_cutlass.quantize import fold, quantize

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INPUTS = (torch.bfloat16, torch.float16, torch.float32)
SCALINGS = ("rceil", "floor")


def raw(xq):
    """Element and scale bytes."""
    return xq.data.view(torch.uint8).cpu().numpy(), xq.scale_bytes.cpu().numpy()


def tensor(data, scale, dtype, device="cpu"):
    data, scale = torch.as_tensor(data, dtype=torch.uint8), torch.as_tensor(scale, dtype=torch.uint8)
    return MXFP8Tensor(data.contiguous().view(dtype).to(device), scale.contiguous().to(device))


def wild(shape, dtype, seed=0, spread=4.0):
    """Values whose blocks, rows and elements differ by orders of magnitude, with zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    *outer, k = shape
    x = torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))
    by_block = torch.exp2(torch.randint(-14, 6, (*outer, k // 32, 1), generator=generator).float())
    x = (x.view(*outer, k // 32, 32) * by_block).view(shape)
    x[torch.rand(shape, generator=generator) < 0.1] = -0.0
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def random_floats(shape, dtype, seed):
    """Any bit patterns; NaN and Inf in a third of the rows only, since they fill their blocks."""
    rng = np.random.default_rng(seed)
    *outer, k = shape
    x = torch.from_numpy(rng.integers(0, 256, (*outer, k * dtype.itemsize), dtype=np.uint8)).view(dtype)
    keep = torch.from_numpy(rng.random((*outer, 1)) < 0.3)
    return torch.where(torch.isfinite(x) | keep, x, torch.zeros_like(x))


def random_bits(shape, dtype, seed, spread=30, nan_share=0.02, zero_share=0.2):
    """Any element bytes; scales that differ by up to `spread`; some NaN scales, zero blocks and special elements."""
    rng = np.random.default_rng(seed)
    *outer, k = shape
    blocks = (*outer, k // 32)
    data = rng.integers(0, 256, (*blocks, 32), dtype=np.uint8)
    special = (data & 0x7F) >= oracle.FORMATS[dtype].finite
    data = np.where(special & (rng.random(blocks) < 0.8)[..., None], data & 0xBF, data)
    # Blocks that use a part of the range only, down to zeros of both signs.
    data = np.where((rng.random(blocks) < 0.3)[..., None], data & 0x8F, data)
    data = np.where((rng.random(blocks) < zero_share)[..., None], data & 0x80, data)
    lowest = rng.integers(0, 255 - spread, (*outer[:-1], 1, 1))
    scale = (lowest + rng.integers(0, spread + 1, blocks)).astype(np.uint8)
    scale[rng.random(blocks) < nan_share] = 255
    return data.reshape(shape), scale


def check_quantize(x, dtype, scaling, device):
    data, scale = raw(quantize(x.to(device), dtype, scaling))
    expected_data, expected_scale = oracle.quantize(x, dtype, scaling)
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(data, expected_data)


def check_folding_at_once(x, dtype, scaling, device):
    data, scale = oracle.quantize(x, dtype, scaling)
    expected_data, expected_scale, _, _ = oracle.fold(data, scale, dtype, rows=1)
    at_once = quantize(x.to(device), dtype, scaling, fold=True)
    assert at_once.folded == 1
    check_scale_by_run(at_once)
    got_data, got_scale = raw(at_once)
    np.testing.assert_array_equal(got_scale, expected_scale)
    np.testing.assert_array_equal(got_data, expected_data)


def check_scale_by_run(folded):
    """The kernels write it; elsewhere it is made from the scales."""
    by_run = folded.scale_by_run()
    check_padding(folded, by_run)
    np.testing.assert_array_equal(by_run[..., : folded.shape[-2]].cpu(), np.swapaxes(raw(folded)[1][..., ::4], -1, -2))


def check_padding(xq, by_run):
    """Every run starts at a multiple of 16 bytes, and 256 bytes behind the last may be read."""
    *matrices, rows, k = xq.shape
    assert by_run.shape == (*matrices, -(-k // 128), -(-rows // 16) * 16)
    assert by_run.is_contiguous()
    assert by_run.data_ptr() % 16 == 0
    assert by_run.untyped_storage().nbytes() - by_run.storage_offset() - by_run.numel() >= 256


def check_fold(data, scale, dtype, rows, device):
    folded, statistics = fold(tensor(data, scale, dtype, device), rows, return_stats=True)
    expected_data, expected_scale, expected_tiles, changed = oracle.fold(data, scale, dtype, rows)
    got_data, got_scale = raw(folded)
    np.testing.assert_array_equal(got_scale, expected_scale)
    np.testing.assert_array_equal(got_data, expected_data)
    assert folded.folded == rows
    check_scale_by_run(folded)
    mixed = 0
    if rows == 1:
        assert folded.tile_scale is None
    else:
        np.testing.assert_array_equal(folded.tile_scale.cpu().numpy(), expected_tiles)
        mixed = int((expected_tiles == 255).sum())
    runs = data.size // data.shape[-1] * -(-data.shape[-1] // 128)
    assert all(v.shape == () and v.dtype == torch.int64 for v in statistics.values())
    got = {k: int(v) for k, v in statistics.items()}
    assert got == {"changed_elements": changed, "runs": runs, "mixed_tiles": mixed}
    for a, b in zip(raw(fold(tensor(data, scale, dtype, device), rows)), (got_data, got_scale), strict=True):
        np.testing.assert_array_equal(a, b)  # without statistics: another kernel
