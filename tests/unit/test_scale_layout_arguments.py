"""swizzle_scales and unswizzle_scales refuse bad arguments: one error that names argument, value and rule."""

from __future__ import annotations

import pytest
import torch

from mxfp8_cutlass.generator.tile_config import MAX_GROUPS
from mxfp8_cutlass.scale_layout import swizzle_scales, unswizzle_scales

SCALE, OFFS = torch.zeros((9, 7), dtype=torch.uint8), torch.tensor([4, 9])
BAD = {
    "no tensor": ([SCALE.tolist()], {}, TypeError, "scale is a list"),
    "dtype": ([SCALE.float()], {}, TypeError, "scale has dtype torch.float32"),
    "1D": ([SCALE[0]], {}, ValueError, r"scale has shape \(7,\)"),
    "strides": ([SCALE.mT], {}, ValueError, r"scale has strides \(1, 7\)"),
    "device": ([SCALE.to("meta")], {}, ValueError, "scale is on meta"),
    "groups": ([SCALE, OFFS], {"groups": "m"}, ValueError, "groups is 'm'"),
    "blocks without offs": ([SCALE], {"groups": "blocks"}, ValueError, "offs is None and groups is 'blocks'"),
    "offs of matrices": ([SCALE[None], OFFS], {}, ValueError, r"offs is given and scale has shape \(1, 9, 7\)"),
    "offs a list": ([SCALE, [4, 9]], {}, TypeError, "offs is a list"),
    "offs float": ([SCALE, OFFS.float()], {}, TypeError, "offs has dtype torch.float32"),
    "offs 2D": ([SCALE, OFFS[None]], {}, ValueError, r"offs has shape \(1, 2\)"),
    "offs empty": ([SCALE, OFFS[:0]], {}, ValueError, r"offs has shape \(0,\)"),
    "offs long": ([SCALE, OFFS.new_zeros(MAX_GROUPS + 1)], {}, ValueError, rf"offs has shape \({MAX_GROUPS + 1},\)"),
    "offs elsewhere": ([SCALE, OFFS.to("meta")], {}, ValueError, "offs is on meta"),
    "offs strided": ([SCALE, torch.tensor([4, 0, 9])[::2]], {}, ValueError, r"offs has strides \(2,\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    arguments, keywords, error, message = BAD[name]
    with pytest.raises(error, match=message):
        swizzle_scales(*arguments, **keywords)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((SCALE.tolist(), (9, 7)), TypeError, "swizzled is a list"),
        (
            (SCALE, (9, 7)),
            ValueError,
            r"swizzled has shape \(9, 7\): for scales of shape \(9, 7\) it must be \(128, 8\)",
        ),
        ((SCALE.new_zeros(128, 8), (9, 7), OFFS), ValueError, r"swizzled has shape \(128, 8\): .* \(256, 8\)"),
        ((SCALE.new_zeros(128, 8), (9,)), ValueError, r"shape is \(9,\)"),
        ((SCALE.new_zeros(128, 8), (9, -7)), ValueError, r"shape is \(9, -7\)"),
        ((SCALE.new_zeros(128, 8), (9, 7.0)), ValueError, r"shape is \(9, 7.0\)"),
        ((SCALE.new_zeros(128, 8), (2**31, 7)), ValueError, r"shape has shape"),
        ((SCALE.new_zeros(1, 128, 8), (1, 9, 7), OFFS), ValueError, r"offs is given and shape"),
    ],
)
def test_bad_arguments_on_the_way_back(arguments, error, message):
    with pytest.raises(error, match=message):
        unswizzle_scales(*arguments)
