"""MXFP8 grouped GEMM for Mixture-of-Experts training and inference: a code generator and a Python runtime."""

from __future__ import annotations

from mxfp8_cutlass.columns import ColumnwiseMXFP8
from mxfp8_cutlass.columnwise import quantize_both, quantize_columnwise
from mxfp8_cutlass.delayed_wgrad import DelayedWgrad
from mxfp8_cutlass.generator.sm100_config import Sm100Config
from mxfp8_cutlass.generator.tile_config import TileConfig
from mxfp8_cutlass.grouped_gemm import grouped_gemm
from mxfp8_cutlass.grouped_linear import grouped_linear
from mxfp8_cutlass.grouped_linear_module import GroupedLinear
from mxfp8_cutlass.grouped_mm import grouped_mm
from mxfp8_cutlass.grouped_mxfp8 import GroupedMXFP8, prepare_rowwise, requantize_columnwise
from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor
from mxfp8_cutlass.quantize import dequantize, fold, quantize
from mxfp8_cutlass.scale_layout import swizzle_scales, unswizzle_scales
from mxfp8_cutlass.scaled_grouped_mm import scaled_grouped_mm
from mxfp8_cutlass.select import select_kernel
from mxfp8_cutlass.weight_cache import WeightCache

__all__ = [
    "ColumnwiseMXFP8",
    "DelayedWgrad",
    "GroupedLinear",
    "GroupedMXFP8",
    "MXFP8Tensor",
    "Sm100Config",
    "TileConfig",
    "WeightCache",
    "dequantize",
    "fold",
    "grouped_gemm",
    "grouped_linear",
    "grouped_mm",
    "prepare_rowwise",
    "quantize",
    "quantize_both",
    "quantize_columnwise",
    "requantize_columnwise",
    "scaled_grouped_mm",
    "select_kernel",
    "swizzle_scales",
    "unswizzle_scales",
]
