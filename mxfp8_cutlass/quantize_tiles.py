"""Launches of the kernel that quantizes along either of two axes or both: its argument struct and results.

Arguments are valid here. docs/numerics.md has the layout of tokens as columns.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch

from mxfp8_cutlass import elementwise
from mxfp8_cutlass.columns import ALIGNMENT, column_capacity, group_bounds
from mxfp8_cutlass.generator.elementwise_config import QuantizeTilesConfig
from mxfp8_cutlass.kernel import target_of
from mxfp8_cutlass.mxfp8_tensor import BLOCK, DTYPE_NAMES, TILE_ROWS, MXFP8Tensor, empty_by_run, tile_scale_shape

TILE = 128
"""Tokens, and features, of a CTA."""


class TileSide(ctypes.Structure):
    """mxfp8::TileSide of quantize_tiles.cuh."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("run_scale", ctypes.c_void_p),
        ("tile_scale", ctypes.c_void_p),
        ("fold", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
    )


class QuantizeTilesParams(ctypes.Structure):
    """mxfp8::QuantizeTilesParams of quantize_tiles.cuh."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("offs", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("along_features", TileSide),
        ("along_tokens", TileSide),
        ("offs_is_int64", ctypes.c_uint32),
        ("groups", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        ("features", ctypes.c_uint32),
        ("row_tiles", ctypes.c_uint32),
        ("feature_tiles", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
    )


class Results(NamedTuple):
    """None for what was not asked for."""

    along_features: MXFP8Tensor | None
    along_tokens: MXFP8Tensor | None
    """(..., features, columns)."""
    sums: torch.Tensor | None
    """float32 (G, features)."""


_config = lru_cache(maxsize=None)(QuantizeTilesConfig)


def quantize_tiles(
    x: torch.Tensor,
    offs: torch.Tensor | None,
    dtype: torch.dtype,
    scaling: str,
    *,
    features_fold: int | None,
    tokens_fold: int | None,
    sums: bool = False,
    factors: torch.Tensor | None = None,
) -> Results:
    """Quantize x, (rows, features) cut by offs or a stack of matrices, from one read.

    Args:
        x: contiguous and not empty.
        offs: the end row of each group, or None for matrices.
        dtype: of the elements.
        scaling: the scale rule.
        features_fold: how many rows share a scale along features: 0, 1 or, of matrices alone, 128, since groups do not
            begin at tiles of rows; None leaves the result out.
        tokens_fold: the same along tokens: 0, 1 or 128.
        sums: of groups alone: whether to sum each one's rows.
        factors: of the rows in that sum.
    """
    *matrices, rows, features = x.shape
    columns = rows if offs is None else column_capacity(rows, offs.shape[0])
    row_tiles, feature_tiles = -(-columns // TILE), -(-features // TILE)
    params = QuantizeTilesParams(
        input=x.data_ptr(),
        rows=rows,
        features=features,
        row_tiles=row_tiles,
        feature_tiles=feature_tiles,
        columns=columns,
    )
    tiles = row_tiles * x.shape[:-2].numel()
    if offs is not None:
        offs = offs.contiguous()
        params.offs, params.groups = offs.data_ptr(), offs.shape[0]
        params.offs_is_int64 = offs.dtype == torch.int64
        tiles += features_fold is not None  # tokens of no group may begin in the middle of one
    along_features, along_tokens, tile_sums = None, None, None
    if features_fold is not None:
        along_features, params.along_features = _side(x, x.shape, dtype, features_fold)
    if tokens_fold is not None:
        along_tokens, params.along_tokens = _side(x, (*matrices, features, columns), dtype, tokens_fold)
    if sums:
        tile_sums = torch.empty((row_tiles, features), dtype=torch.float32, device=x.device)
        params.sums = tile_sums.data_ptr()
        if factors is not None:
            factors = factors.to(torch.float32).contiguous()
            params.factors = factors.data_ptr()
    config = _config(target_of(x.device), DTYPE_NAMES[dtype], DTYPE_NAMES[x.dtype], scaling)
    elementwise.launch(config, params, tiles * feature_tiles, x.device)
    return Results(along_features, along_tokens, None if tile_sums is None else _sums_of_groups(tile_sums, offs))


def _side(
    x: torch.Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, fold: int
) -> tuple[MXFP8Tensor, TileSide]:
    """A result without its contents, and where they go."""
    data = torch.empty(shape, dtype=dtype, device=x.device)
    scale = torch.empty((*shape[:-1], shape[-1] // BLOCK), dtype=torch.float8_e8m0fnu, device=x.device)
    side = TileSide(data=data.data_ptr(), scale=scale.data_ptr(), fold=fold)
    run_scale, tile_scale = None, None
    if fold:
        run_scale = empty_by_run(data)
        side.run_scale = run_scale.data_ptr()
    if fold == TILE_ROWS:
        tile_scale = torch.empty(tile_scale_shape(data.shape), dtype=torch.uint8, device=x.device)
        side.tile_scale = tile_scale.data_ptr()
    return MXFP8Tensor.unchecked(data, scale, fold, tile_scale, run_scale), side


def _sums_of_groups(tile_sums: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor | None:
    """The sums of each group's tiles. Those between its last and the next one's first are zero."""
    if offs is None:
        return None
    first_columns = group_bounds(offs)[2]
    end = offs[-1:].to(torch.int64) // ALIGNMENT + offs.shape[0]
    bounds = torch.cat([first_columns // ALIGNMENT, end])
    # unsafe: its check of the offsets would copy them to the host.
    return torch.segment_reduce(tile_sums, "sum", offsets=bounds, axis=0, initial=0, unsafe=True)
