"""Launches of the quantize, fold and dequantize kernels: argument structs, grids, streams. Arguments are valid here."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from mxfp8_cutlass.generator.elementwise_config import DequantizeConfig, FoldConfig, QuantizeConfig
from mxfp8_cutlass.generator.render import KernelConfig
from mxfp8_cutlass.kernel import load, target_of
from mxfp8_cutlass.launch import TensorMap, tensor_map
from mxfp8_cutlass.mxfp8_tensor import BLOCK, DTYPE_NAMES, RUN, TILE_ROWS, MXFP8Tensor, empty_by_run, tile_scale_shape

MAX_RUNS = 2**30 - 64
"""Runs that one launch can count: block numbers, with those of the last CTA's idle lanes, have 32 bits."""


class RunMap(ctypes.Structure):
    """mxfp8::RunMap of run_map.cuh."""

    _fields_ = (
        ("row_blocks", ctypes.c_uint32),
        ("runs", ctypes.c_uint32),
        ("runs_per_row", ctypes.c_uint32),
        ("multiplier", ctypes.c_uint32),
        ("shift", ctypes.c_uint32),
    )


class QuantizeParams(ctypes.Structure):
    """mxfp8::QuantizeParams of quantize.cuh."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("run_scale", ctypes.c_void_p),
        ("map", RunMap),
        ("rows", ctypes.c_uint32),
    )


class FoldParams(ctypes.Structure):
    """mxfp8::FoldParams of fold.cuh."""

    _fields_ = (
        ("data", TensorMap),
        ("data_out", TensorMap),
        ("scale", ctypes.c_void_p),
        ("scale_out", ctypes.c_void_p),
        ("run_scale", ctypes.c_void_p),
        ("tile_scale", ctypes.c_void_p),
        ("changed", ctypes.c_void_p),
        ("rows", ctypes.c_uint32),
        ("row_boxes", ctypes.c_uint32),
        ("row_blocks", ctypes.c_uint32),
        ("runs_per_row", ctypes.c_uint32),
        ("run_boxes", ctypes.c_uint32),
        ("boxes", ctypes.c_uint32),
    )


class DequantizeParams(ctypes.Structure):
    """mxfp8::DequantizeParams of dequantize.cuh."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("elements", ctypes.c_uint64),
    )


@lru_cache(maxsize=256)
def run_map(rows: int, row_blocks: int) -> RunMap:
    """Runs of up to 4 blocks that do not cross rows.

    The division by d = runs_per_row becomes a multiplication by ceil(2**shift / d) with shift = 31 + ceil(log2(d)): its
    excess, below d / 2**shift per run, stays below 1 / d for run numbers below 2**31.
    """
    runs_per_row = -(-row_blocks * BLOCK // RUN)
    divisor = max(1, runs_per_row)
    shift = 31 + (divisor - 1).bit_length()
    return RunMap(row_blocks, rows * runs_per_row, divisor, -(-(1 << shift) // divisor), shift)


def quantize(x: torch.Tensor, dtype: torch.dtype, scaling: str, *, fold: bool) -> MXFP8Tensor:
    """See `mxfp8_cutlass.quantize`."""
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty((*x.shape[:-1], x.shape[-1] // BLOCK), dtype=torch.float8_e8m0fnu, device=x.device)
    config = _quantize_config(target_of(x.device), DTYPE_NAMES[dtype], DTYPE_NAMES[x.dtype], scaling, fold)
    params = QuantizeParams(x.data_ptr(), data.data_ptr(), scale.data_ptr())
    run_scale = None
    if fold:
        run_scale = empty_by_run(x)
        params.run_scale, params.rows = run_scale.data_ptr(), x.shape[-2]
        params.map = run_map(scale.numel() // scale.shape[-1], scale.shape[-1])
    else:  # runs may cross rows: all blocks are one row
        params.map = run_map(1, scale.numel())
    launch(config, params, -(-params.map.runs // config.runs_per_cta), x.device)
    return MXFP8Tensor.unchecked(data, scale, int(fold), run_scale=run_scale)


def fold(xq: MXFP8Tensor, rows: int, *, stats: bool) -> tuple[MXFP8Tensor, torch.Tensor | None]:
    """See `mxfp8_cutlass.fold`; also the number of changed elements, if `stats`."""
    data, scale = torch.empty_like(xq.data), torch.empty_like(xq.scale)
    changed = torch.zeros((), dtype=torch.int64, device=xq.device) if stats else None
    tile_scale, run_scale = None, empty_by_run(data)
    if rows == TILE_ROWS:
        tile_scale = torch.empty(tile_scale_shape(xq.shape), dtype=torch.uint8, device=xq.device)
    config = _fold_config(target_of(xq.device), DTYPE_NAMES[xq.dtype], rows, stats)
    n_rows, runs_per_row = xq.shape[-2], run_scale.shape[-2]
    row_boxes, run_boxes = -(-n_rows // config.box.rows), -(-runs_per_row // config.box.runs)
    boxes = xq.shape[:-2].numel() * row_boxes * run_boxes
    if boxes:  # there are no maps of empty tensors
        params = FoldParams(
            data=box_map(xq.data, config.box.rows),
            data_out=box_map(data, config.box.rows),
            scale=xq.scale.data_ptr(),
            scale_out=scale.data_ptr(),
            run_scale=run_scale.data_ptr(),
            tile_scale=None if tile_scale is None else tile_scale.data_ptr(),
            changed=None if changed is None else changed.data_ptr(),
            rows=n_rows,
            row_boxes=row_boxes,
            row_blocks=xq.K // BLOCK,
            runs_per_row=runs_per_row,
            run_boxes=run_boxes,
            boxes=boxes,
        )
        launch(config, params, min(boxes, resident_ctas(config, xq.device)), xq.device)
    return MXFP8Tensor.unchecked(data, scale, rows, tile_scale, run_scale), changed


def box_map(data: torch.Tensor, box_rows: int) -> TensorMap:
    """The map of FP8 data that a fold kernel copies by."""
    rows, k = data.shape[-2:]
    return tensor_map(data.data_ptr(), (data.shape[:-2].numel(), rows, k), (box_rows, RUN))


@lru_cache(maxsize=64)
def resident_ctas(config: FoldConfig, device: torch.device) -> int:
    """As many CTAs as the device holds at once: a persistent kernel's grid."""
    return torch.cuda.get_device_properties(device).multi_processor_count * config.ctas_per_sm


def dequantize(xq: MXFP8Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `mxfp8_cutlass.dequantize`."""
    out = torch.empty(xq.shape, dtype=dtype, device=xq.device)
    config = _dequantize_config(target_of(xq.device), DTYPE_NAMES[xq.dtype], DTYPE_NAMES[dtype])
    params = DequantizeParams(xq.data.data_ptr(), xq.scale.data_ptr(), out.data_ptr(), out.numel())
    launch(config, params, -(-out.numel() // config.elements_per_cta), xq.device)
    return out


# Configs are dataclasses, slow to make beside a launch, and few.
_quantize_config = lru_cache(maxsize=None)(QuantizeConfig)
_fold_config = lru_cache(maxsize=None)(FoldConfig)
_dequantize_config = lru_cache(maxsize=None)(DequantizeConfig)


def launch(config: KernelConfig, params: ctypes.Structure, grid: int, device: torch.device) -> None:
    """Launch a kernel on the current stream of a device; nothing if the grid is empty, as for an empty tensor."""
    if grid == 0:
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    load(config, index).launch(params, grid, torch.cuda.current_stream(device).cuda_stream)
