"""Operands for grouped products, and a call of grouped_mm that is checked as a whole."""

from __future__ import annotations

import bounds
import torch

import mxfp8_cutlass as mx
from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor
from mxfp8_cutlass.quantize import fold

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SENTINEL = {  # NaNs whose bits no computation gives
    torch.bfloat16: (torch.int16, 0x7FA5),
    torch.float16: (torch.int16, 0x7EA5),
    torch.float32: (torch.int32, 0x7FA5A5A5),
}


def generator(device, seed: int) -> torch.Generator:
    """Of the device, so that large operands need not travel there."""
    return torch.Generator(device=device).manual_seed(seed)


def operand(shape, dtype=E4M3, seed=0, device="cpu", *, spread=2, positive=False) -> MXFP8Tensor:
    """Gaussian elements; scales within `spread` powers of two of one another; a tenth of the elements zero."""
    source = generator(device, seed)
    x = torch.randn(shape, generator=source, device=device)
    x = x.abs() if positive else x
    x *= torch.rand(shape, generator=source, device=device) > 0.1
    data = (x * 16).to(dtype)
    blocks = (*shape[:-1], shape[-1] // 32)
    scale = torch.randint(120 - spread, 121, blocks, generator=source, device=device, dtype=torch.uint8)
    return MXFP8Tensor(data, scale)


def folded(xq: MXFP8Tensor, rows: int) -> MXFP8Tensor:
    """xq, or what fold gives for 1 or 128 rows."""
    return fold(xq, rows) if rows else xq


def mixed_tiles(xq: MXFP8Tensor) -> MXFP8Tensor:
    """The same with every third row of the first 128 scaled so far down that its tiles cannot have one scale."""
    scale = xq.scale_bytes.clone()
    scale[..., :128:3, :4] -= 30
    return MXFP8Tensor(xq.data, scale)


def poisoned(shape, dtype=torch.bfloat16, device="cpu") -> torch.Tensor:
    """An output that is full of sentinels."""
    integer, bits = SENTINEL[dtype]
    return torch.full(shape, bits, dtype=integer, device=device).view(dtype)


def is_poisoned(out: torch.Tensor) -> bool:
    """Whether every element is a sentinel still."""
    integer, bits = SENTINEL[out.dtype]
    return bool((out.view(integer) == bits).all())


def offsets(sizes, device="cpu", dtype=torch.int32) -> torch.Tensor:
    """End rows of groups of these sizes."""
    return torch.tensor(sizes, device=device).cumsum(0).to(dtype)


def run(
    a,
    b,
    sizes=None,
    *,
    out_dtype=torch.bfloat16,
    bias=False,
    accumulate=False,
    offs_dtype=torch.int32,
    positive=False,
    **options,
):
    """Call grouped_mm with an output whose other rows are poisoned, and check all of it.

    sizes: rows of each group, or None for a batch. bias, accumulate, positive: whether to have a bias,
    to accumulate, and whether all products have one sign.
    """
    ends = None if sizes is None else offsets(sizes).tolist()
    groups, n = b.shape[:2]
    used = a.shape[0] if ends is None else ends[-1]
    shape = (*a.shape[:-1], n)
    source = generator(a.device, 99)
    out = poisoned(shape, out_dtype, a.device)
    if accumulate:
        out[:used] = torch.randn((used, *shape[1:]), generator=source, device=a.device).to(out_dtype)
    old = out.clone() if accumulate else None
    bias = torch.randn((groups, n), generator=source, device=a.device).to(out_dtype) if bias else None
    offs = None if ends is None else offsets(sizes, a.device, offs_dtype)
    got = mx.grouped_mm(a, b, offs, bias=bias, out=out, accumulate=accumulate, **options)
    assert got is out
    exact, config = options.get("exact", False), options.get("config")
    sfb_rows = config.sfb_rows if config else None
    rows = bounds.check_product(out, a, b, ends, exact=exact, bias=bias, old=old, sfb_rows=sfb_rows, positive=positive)
    assert rows == (a.shape[1] * groups if ends is None else used)
    if ends is not None:
        assert is_poisoned(out[used:]), "rows of no group were written"
    return out
