"""Scales between the compact layout, a row-major matrix, and the 128x4 blocked layout of cuBLAS and CUTLASS.

docs/scale-layout.md has the formula and a drawing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import torch

from mxfp8_cutlass import env
from mxfp8_cutlass.checks import MAX_ROWS, check_index, rising_ends
from mxfp8_cutlass.elementwise import launch
from mxfp8_cutlass.generator.elementwise_config import SwizzleConfig
from mxfp8_cutlass.generator.tile_config import MAX_GROUPS
from mxfp8_cutlass.kernel import target_of
from mxfp8_cutlass.mxfp8_tensor import BLOCK, SCALE_DTYPES

TILE_ROWS = 128
"""Rows of a tile of the blocked layout, and the multiple that groups of rows are padded to."""

QUAD = 4
"""Blocks of a tile, and the multiple that groups of blocks are padded to."""

Groups = Literal["rows", "blocks"]


class SwizzleParams(ctypes.Structure):
    """mxfp8::SwizzleParams of swizzle.cuh."""

    _fields_ = (
        ("compact", ctypes.c_void_p),
        ("blocked", ctypes.c_void_p),
        ("offs", ctypes.c_void_p),
        ("offs_is_int64", ctypes.c_uint32),
        ("groups", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("row_tiles", ctypes.c_uint32),
        ("quads", ctypes.c_uint32),
        ("chunks", ctypes.c_uint32),
    )


def swizzle_scales(scale: torch.Tensor, offs: torch.Tensor | None = None, *, groups: Groups = "rows") -> torch.Tensor:
    """Lay scales out as block-scaled tensor cores read them: in tiles of 128 rows x 4 blocks.

    Every group's tiles start anew, after those of the groups before it; padding is zero (2**-127), and so is what no
    group uses of the result. Sizes of groups stay on the device: the result has the room for the worst case.

    Args:
        scale: float8_e8m0fnu or uint8, (R, K // 32) or (G, R, K // 32), contiguous.
        offs: the end of each group, (G,), int32 or int64, for a 2D `scale`; rows, or elements along K. Without it, each
            matrix is one group. What lies past the last end is not read.
        groups: the axis that `offs` cuts. "rows": a group has rows offs[g - 1] to offs[g]. "blocks": a group of n
            elements has ceil(n / 32) blocks, which come right after those of the groups before it; unless every n but
            the last is a multiple of 32, they are not those of the elements' position in the whole row.

    Returns:
        The same dtype, of shape `swizzled_shape(...)`: the tiles in memory order, 512 bytes each.

    Raises:
        TypeError: an argument is no tensor, or of another dtype.
        ValueError: a shape, layout, device or alignment breaks a rule above; on the CPU, or if MXFP8_CUTLASS_CHECK=1:
            the values of `offs` decrease, are negative, or need more rows or blocks than there are. Elsewhere such
            values give wrong results, but no access outside the tensors.
    """
    _check_scale("scale", scale)
    check_groups("scale", tuple(scale.shape), scale.device, offs, groups)
    ends = _checked_ends(tuple(scale.shape), offs, groups)
    out_shape = swizzled_shape(scale.shape, None if offs is None else offs.shape[0], groups)
    if not _on_cuda(scale):
        return _swizzle(scale.view(torch.uint8), ends, groups, out_shape).view(scale.dtype)
    out = torch.empty(out_shape, dtype=scale.dtype, device=scale.device)
    _launch("swizzle", scale, out, offs, groups)
    return out


def unswizzle_scales(
    swizzled: torch.Tensor, shape: tuple[int, ...], offs: torch.Tensor | None = None, *, groups: Groups = "rows"
) -> torch.Tensor:
    """Undo `swizzle_scales`: the compact scales, with zero for rows or blocks that no group has. Padding is not read.

    Args:
        swizzled: float8_e8m0fnu or uint8, contiguous, of the shape that `swizzle_scales` gives for `shape`; at a
            multiple of 16 bytes on CUDA.
        shape: the compact scales', (R, K // 32) or (G, R, K // 32).
        offs: as for `swizzle_scales`.
        groups: as for `swizzle_scales`.

    Raises:
        TypeError: as for `swizzle_scales`.
        ValueError: as for `swizzle_scales`, or `swizzled` has not the shape that goes with the other arguments.
    """
    _check_scale("swizzled", swizzled)
    shape = tuple(shape)
    if len(shape) not in (2, 3) or any(not isinstance(size, int) or size < 0 for size in shape):
        raise ValueError(f"shape is {shape}: it must be 2 or 3 sizes, (R, K // 32) or (G, R, K // 32)")
    check_groups("shape", shape, swizzled.device, offs, groups)
    expected = swizzled_shape(shape, None if offs is None else offs.shape[0], groups)
    if tuple(swizzled.shape) != expected:
        raise ValueError(
            f"swizzled has shape {tuple(swizzled.shape)}: for scales of shape {shape} it must be {expected}"
        )
    ends = _checked_ends(shape, offs, groups)
    if not _on_cuda(swizzled):
        return _unswizzle(swizzled.view(torch.uint8), ends, groups, shape).view(swizzled.dtype)
    if swizzled.data_ptr() % 16:
        raise ValueError(f"swizzled starts at address {swizzled.data_ptr():#x}: it must be aligned to 16 bytes")
    out = torch.empty(shape, dtype=swizzled.dtype, device=swizzled.device)
    _launch("unswizzle", out, swizzled, offs, groups)
    return out


def swizzled_shape(
    shape: tuple[int, ...] | torch.Size, n_groups: int | None = None, groups: Groups = "rows"
) -> tuple[int, ...]:
    """Shape of `swizzle_scales`' result: (..., rows to 128, blocks to 4), with room for `n_groups` of whatever sizes.

    n groups of T rows in all need at most n + (T - n) // 128 tiles (each begins one; T if there are fewer rows than
    groups), and no fewer would do for all sizes. The same holds for blocks.
    """
    *batch, rows, blocks = shape
    row_tiles, quads = -(-rows // TILE_ROWS), -(-blocks // QUAD)
    if n_groups is not None and groups == "rows":
        row_tiles = _tiles_at_most(rows, n_groups, TILE_ROWS)
    elif n_groups is not None:
        quads = _tiles_at_most(blocks, n_groups, QUAD)
    return (*batch, row_tiles * TILE_ROWS, quads * QUAD)


def _tiles_at_most(total: int, n_groups: int, unit: int) -> int:
    begun = min(total, n_groups)
    return begun + (total - begun) // unit


def _swizzle(scale: torch.Tensor, ends: list[int] | None, groups: Groups, shape: tuple[int, ...]) -> torch.Tensor:
    """The specification, for bytes on the CPU."""
    if ends is None:
        return _to_tiles(scale).view(shape)
    out = scale.new_zeros(shape)
    begin = 0
    for rows, blocks in _pieces(ends, groups):
        tiles = _to_tiles(scale[rows, blocks]).flatten()
        out.view(-1)[begin : begin + tiles.numel()] = tiles
        begin += tiles.numel()
    return out


def _unswizzle(swizzled: torch.Tensor, ends: list[int] | None, groups: Groups, shape: tuple[int, ...]) -> torch.Tensor:
    """The same for the way back."""
    if ends is None:
        return _from_tiles(swizzled, shape)
    out = swizzled.new_zeros(shape)
    begin = 0
    for rows, blocks in _pieces(ends, groups):
        piece = out[rows, blocks]
        size = torch.Size(swizzled_shape(piece.shape)).numel()
        piece.copy_(_from_tiles(swizzled.view(-1)[begin : begin + size], tuple(piece.shape)))
        begin += size
    return out


def _to_tiles(compact: torch.Tensor) -> torch.Tensor:
    """(..., R, B) -> (..., row tiles, quads, 32, 4, 4): a tile's byte (r % 32) * 16 + r % 128 // 32 * 4 + b % 4."""
    *batch, rows, blocks = compact.shape
    padded = torch.nn.functional.pad(compact, (0, -blocks % QUAD, 0, -rows % TILE_ROWS))
    tiles = padded.view(*batch, -(-rows // TILE_ROWS), 4, 32, -(-blocks // QUAD), QUAD)
    return tiles.transpose(-4, -2).contiguous()


def _from_tiles(tiles: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The inverse of `_to_tiles`: any shape of the same bytes -> (..., R, B) = `shape`."""
    *batch, rows, blocks = shape
    row_tiles, quads = -(-rows // TILE_ROWS), -(-blocks // QUAD)
    padded = tiles.view(*batch, row_tiles, quads, 32, 4, QUAD).transpose(-4, -2)
    return padded.reshape(*batch, row_tiles * TILE_ROWS, quads * QUAD)[..., :rows, :blocks].contiguous()


def _pieces(ends: list[int], groups: Groups) -> Iterator[tuple[slice, slice]]:
    """The rows and the blocks of each group."""
    first_block = 0
    for begin, end in zip([0, *ends], ends, strict=False):
        if groups == "rows":
            yield slice(begin, end), slice(None)
        else:
            blocks = -(-(end - begin) // BLOCK)
            yield slice(None), slice(first_block, first_block + blocks)
            first_block += blocks


def _on_cuda(x: torch.Tensor) -> bool:
    return x.is_cuda


_config = lru_cache(maxsize=None)(SwizzleConfig)


def _launch(
    direction: str, compact: torch.Tensor, blocked: torch.Tensor, offs: torch.Tensor | None, groups: Groups
) -> None:
    *batch, rows, blocks = compact.shape
    n_groups = 0 if offs is None else offs.shape[0]
    params = SwizzleParams(
        compact=compact.data_ptr(),
        blocked=blocked.data_ptr(),
        offs=None if offs is None else offs.data_ptr(),
        offs_is_int64=offs is not None and offs.dtype == torch.int64,
        groups=n_groups,
        rows=rows,
        blocks=blocks,
        row_tiles=blocked.shape[-2] // TILE_ROWS,
        quads=blocked.shape[-1] // QUAD,
    )
    # One CTA a piece of the larger side. On the way back, what follows the last group is a group more, of zeros.
    extra = 1 if direction == "unswizzle" else 0
    padded = swizzled_shape(compact.shape, None if offs is None else n_groups + extra, groups)
    config = _config(target_of(compact.device), direction, groups)
    params.chunks = -(-padded[-1] // QUAD // config.quads_per_cta)
    grid = torch.Size(batch).numel() * (padded[-2] // TILE_ROWS) * params.chunks
    launch(config, params, grid, compact.device)


def _check_scale(name: str, scale: torch.Tensor) -> None:
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"{name} is a {type(scale).__name__}: it must be a torch.Tensor")
    if scale.dtype not in SCALE_DTYPES:
        raise TypeError(f"{name} has dtype {scale.dtype}: it must be float8_e8m0fnu or uint8")
    if scale.ndim not in (2, 3):
        raise ValueError(f"{name} has shape {tuple(scale.shape)}: it must have 2 or 3 dimensions")
    if not scale.is_contiguous():
        raise ValueError(f"{name} has strides {tuple(scale.stride())}: it must be contiguous")
    if scale.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {scale.device}: it must be on the CPU or a CUDA device")


def check_groups(
    name: str, shape: tuple[int, ...], device: torch.device, offs: torch.Tensor | None, groups: str
) -> None:
    """Raise unless `offs` and `groups` cut compact scales of `shape`."""
    if groups not in ("rows", "blocks"):
        raise ValueError(f"groups is {groups!r}: it must be 'rows' or 'blocks'")
    if max(torch.Size(shape[:-1]).numel(), shape[-1]) > MAX_ROWS:
        raise ValueError(f"{name} has shape {shape}: at most {MAX_ROWS} rows, all matrices' together, and blocks")
    if offs is None:
        if groups == "blocks":
            raise ValueError("offs is None and groups is 'blocks': it needs the end of each group")
        return
    check_index("offs", offs, "the scales", device)
    if len(shape) != 2:
        raise ValueError(
            f"offs is given and {name} has shape {shape}: offs goes with scales of shape (R, K // 32) alone"
        )
    if offs.ndim != 1 or not 1 <= offs.shape[0] <= MAX_GROUPS:
        raise ValueError(f"offs has shape {tuple(offs.shape)}: it must be (G,), with G from 1 to {MAX_GROUPS}")


def _checked_ends(shape: tuple[int, ...], offs: torch.Tensor | None, groups: Groups) -> list[int] | None:
    """The values of `offs` after checking them; None without, and on CUDA, where reading them is a sync."""
    if offs is None or (_on_cuda(offs) and not env.check()):
        return None
    ends = rising_ends(offs)
    if groups == "rows" and ends[-1] > shape[0]:
        raise ValueError(f"offs is {ends}: its values must not exceed the rows, {shape[0]}")
    needed = sum(-(-(end - begin) // BLOCK) for begin, end in zip([0, *ends], ends, strict=False))
    if groups == "blocks" and needed > shape[1]:
        raise ValueError(f"offs is {ends}: its groups have {needed} blocks, and the scales have {shape[1]}")
    return ends
