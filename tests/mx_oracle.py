"""MXFP8 once more, from the formats' definitions, in float64 and by brute force. Shares nothing with the package."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

ONE_OVER = {torch.float8_e4m3fn: np.float32(1 / 448), torch.float8_e5m2: np.float32(1 / 57344)}
POWERS = np.ldexp(1.0, np.arange(255) - 127)  # of the E8M0 bytes


@dataclass(frozen=True)
class Format:
    mantissa: int
    bias: int
    finite: int  # number of non-negative finite bytes
    emax: int
    limit: int

    @property
    def table(self):
        """Values of the bytes 0, 1, 2, ... that are finite and not negative."""
        byte = np.arange(self.finite)
        exponent, fraction = byte >> self.mantissa, (byte & ((1 << self.mantissa) - 1)) / (1 << self.mantissa)
        return np.where(
            exponent == 0, fraction * 2.0 ** (1 - self.bias), (1 + fraction) * 2.0 ** (exponent - self.bias)
        )


FORMATS = {
    torch.float8_e4m3fn: Format(mantissa=3, bias=7, finite=0x7F, emax=8, limit=8),
    torch.float8_e5m2: Format(mantissa=2, bias=15, finite=0x7C, emax=15, limit=22),
}


def encode(values, fmt):
    """Finite float64 values to bytes: nearest, ties to the even byte, saturating, the sign kept."""
    table, magnitude = fmt.table, np.abs(values)
    above = np.searchsorted(table, magnitude).clip(1, len(table) - 1)
    low, high = magnitude - table[above - 1], table[above] - magnitude
    byte = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return (byte | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def decode(data, fmt):
    """Bytes to float64; Inf and NaN bytes to NaN."""
    magnitude = data & 0x7F
    value = np.append(fmt.table, np.nan)[np.minimum(magnitude, fmt.finite)]
    return np.where(data & 0x80, -value, value)


def quantize(x: torch.Tensor, dtype: torch.dtype, scaling: str):
    """Element and scale bytes."""
    fmt = FORMATS[dtype]
    blocks = x.double().numpy().reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    amax = np.abs(blocks).max(-1)  # NaN if there is one
    bad = ~np.isfinite(amax)
    amax = np.where(bad, 0, amax)
    if scaling == "rceil":
        d = (amax.astype(np.float32) * ONE_OVER[dtype]).astype(np.float64)
        scale = (d[..., None] > POWERS).sum(-1)
    else:
        scale = (np.frexp(amax)[1] - 1 - fmt.emax + 127).clip(0) * (amax > 0)
    data = encode(np.where(bad[..., None], 0, blocks) / POWERS[scale][..., None], fmt)
    data[bad], scale[bad] = 0x7F, 255
    return data.reshape(x.shape), scale.astype(np.uint8)


def fold(data, scale, dtype: torch.dtype, rows: int):
    """Element, scale and tile bytes, and the number of elements that changed their value."""
    fmt = FORMATS[dtype]
    *matrices, n_rows, k = data.shape
    value = decode(data, fmt).reshape(*matrices, n_rows, k // 32, 32) * np.append(POWERS, np.nan)[scale][..., None]
    size = np.nan_to_num(np.abs(value), nan=0.0).reshape(*matrices, n_rows, k)
    padded = np.zeros((*matrices, -(-n_rows // 128) * 128, -(-k // 128) * 128))
    padded[..., :n_rows, :k] = size
    largest = padded.reshape(*padded.shape[:-1], -(-k // 128), 128).max(-1)
    counts = largest > 0
    row_scale = np.where(counts, np.argmax(largest[..., None] <= fmt.table[-1] * POWERS, axis=-1), 127)
    tile_scale = None
    if rows == 128:
        tiles, tile_counts = (a.reshape(*matrices, -(-n_rows // 128), 128, a.shape[-1]) for a in (row_scale, counts))
        highest = np.where(tile_counts, tiles, -1).max(-2, initial=-1)
        lowest = np.where(tile_counts, tiles, 255).min(-2, initial=255)
        mixed = highest - lowest > fmt.limit
        one = np.where(highest < 0, 127, highest)
        row_scale = np.where(mixed[..., None, :], tiles, one[..., None, :]).reshape(row_scale.shape)
        tile_scale = np.where(mixed, 255, one).astype(np.uint8)
    shared = np.repeat(row_scale[..., :n_rows, :], 4, axis=-1)[..., : k // 32]
    wanted = value / POWERS[shared][..., None]
    out = encode(np.nan_to_num(wanted, nan=0.0), fmt)
    blocks = data.reshape(out.shape)
    survives = (blocks & 0x7F) >= fmt.finite
    out = np.where(survives, blocks, out)
    out[scale == 255] = 0x7F
    changed = (decode(out, fmt) != wanted) & ~np.isnan(wanted)
    return out.reshape(data.shape), shared.astype(np.uint8), tile_scale, int(changed.sum())
