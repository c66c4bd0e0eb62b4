"""scaled_grouped_mm: torch's arguments and names give what grouped_mm gives, bit for bit."""

from __future__ import annotations

import inspect

import pytest
import torch
from products import E4M3, E5M2, offsets, operand
from token_groups import SPLITS, tokens_of
from torch.nn.functional import ScalingType, SwizzleType

import mxfp8_cutlass as mx

RECIPE, SWIZZLE = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
RAGGED = [130, 0, 1, 63, 0, 66]


def test_signature_is_torchs():
    ours = inspect.signature(mx.scaled_grouped_mm).parameters
    theirs = inspect.signature(torch.nn.functional.scaled_grouped_mm).parameters
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind
        assert ours[name].default == parameter.default


def call(a, b, offs, *, swizzle, groups="rows", **options):
    """a and b as MXFP8 operands, through torch's signature."""
    scale_a, scale_b, swizzles = a.scale, b.scale, (None, None)
    if swizzle:
        scale_a = mx.swizzle_scales(a.scale, offs if a.ndim == 2 else None, groups=groups)
        scale_b = mx.swizzle_scales(b.scale, offs if b.ndim == 2 else None, groups=groups)
        scale_b = scale_b.flatten(1) if b.ndim == 3 else scale_b
        swizzles = (SWIZZLE, [SWIZZLE])
    return mx.scaled_grouped_mm(
        a.data, b.data.mT, scale_a, RECIPE, [scale_b], [RECIPE], *swizzles, offs=offs, **options
    )


@pytest.mark.parametrize("swizzle", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32], ids=str)
def test_tokens_and_weights(device, dtype, swizzle):
    a, b, offs = operand((267, 160), E4M3, 1, device), operand((6, 48, 160), E5M2, 2, device), offsets(RAGGED, device)
    bias = torch.randn((6, 48), device=device).to(dtype or torch.bfloat16)
    got = call(a, b, offs, swizzle=swizzle, output_dtype=dtype, bias=bias, contraction_dim=[-1, -2])
    want = mx.grouped_mm(a, b, offs, out_dtype=dtype, bias=bias)
    assert got.dtype == (dtype or torch.bfloat16)
    assert torch.equal(got[:260], want[:260])


@pytest.mark.parametrize("swizzle", [False, True])
def test_batches(device, swizzle):
    a, b = operand((3, 70, 160), E4M3, 1, device), operand((3, 48, 160), E4M3, 2, device)
    assert torch.equal(call(a, b, None, swizzle=swizzle), mx.grouped_mm(a, b))


def test_a_buffer_with_more_or_less_room(device):
    """Rows of groups padded to 128, exactly, and for another worst case."""
    a, b, offs = operand((267, 160), E4M3, 1, device), operand((6, 48, 160), E4M3, 2, device), offsets(RAGGED, device)
    scale, want = mx.swizzle_scales(a.scale, offs), mx.grouped_mm(a, b, offs)
    padded_rows = sum(-(-size // 128) * 128 for size in RAGGED)
    for rows in (padded_rows, len(scale), len(scale) + 640):
        bytes_ = torch.zeros((rows, scale.shape[1]), dtype=torch.uint8, device=device)
        bytes_[: len(scale)] = scale.view(torch.uint8)[:rows]
        arguments = (bytes_.view(torch.float8_e8m0fnu), RECIPE, b.scale, RECIPE, SWIZZLE)
        got = mx.scaled_grouped_mm(a.data, b.data.mT, *arguments, offs=offs)
        assert torch.equal(got[:260], want[:260])


@pytest.mark.parametrize("swizzle", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_weight_gradients(device, split, aligned, swizzle):
    """offs cuts K: each group quantized by itself, its scales right after those of the groups before."""
    sizes = [size // 32 * 32 if aligned else size for size in SPLITS[split](640)]
    ends, offs = offsets(sizes).tolist(), offsets(sizes, device)
    x = [torch.randn((640, features), generator=torch.Generator().manual_seed(features)) for features in (144, 48)]
    operands = [pieces(rows.to(device), ends) for rows in x]
    scales = [scale for _, scale in operands]
    if swizzle:
        scales = [mx.swizzle_scales(scale, offs, groups="blocks") for scale in scales]
    swizzles = (SWIZZLE, SWIZZLE) if swizzle else (None, None)
    a, b = (data for data, _ in operands)
    got = mx.scaled_grouped_mm(a, b.mT, scales[0], RECIPE, scales[1], RECIPE, *swizzles, offs=offs)
    want = mx.grouped_mm(*(mx.quantize_columnwise(rows.to(device), offs) for rows in x), offs)
    assert torch.equal(got, want)


def pieces(rows, ends):
    """(features, 640) elements, and (features, 20 + groups) scales, as the groups' own columns."""
    features = rows.shape[1]
    data = torch.full((features, 640), 0x7F, dtype=torch.uint8, device=rows.device)
    scale = torch.full((features, 20 + len(ends)), 255, dtype=torch.uint8, device=rows.device)
    block = 0
    for _, tokens in tokens_of(ends):
        size = tokens.stop - tokens.start
        if size:
            quantized = mx.quantize(torch.nn.functional.pad(rows[tokens].mT, (0, -size % 32)).contiguous())
            data[:, tokens] = quantized.data.view(torch.uint8)[:, :size]
            scale[:, block : block + quantized.scale.shape[1]] = quantized.scale_bytes
            block += quantized.scale.shape[1]
    return data.view(E4M3), scale


A, B, OFFS = operand((8, 96), E4M3, 1), operand((3, 32, 96), E4M3, 2), offsets([1, 3, 4])
BAD = [
    (ValueError, "scale_recipe_a is RowWise", {"scale_recipe_a": ScalingType.RowWise}),
    (ValueError, "scale_recipe_b has 2 entries", {"scale_recipe_b": [RECIPE, RECIPE]}),
    (ValueError, "swizzle_a is sideways", {"swizzle_a": "sideways"}),
    (TypeError, "mat_a has dtype torch.float32", {"mat_a": torch.zeros(8, 96)}),
    (ValueError, "mat_b has strides .* column-major", {"mat_b": B.data.mT.contiguous()}),
    (ValueError, "mat_a has strides .* row-major", {"mat_a": A.data.mT.contiguous().mT}),
    (ValueError, r"mat_b has shape \(3, 64, 32\): its K", {"mat_b": operand((3, 32, 64)).data.mT}),
    (ValueError, "mat_a is 3D and mat_b 2D", {"mat_a": A.data[None], "mat_b": B.data[0].mT}),
    (ValueError, "offs is None", {"offs": None}),
    (ValueError, r"scale_a has shape \(8, 2\)", {"scale_a": A.scale[:, :2].contiguous()}),
    (ValueError, "scale_b has 288 bytes", {"swizzle_b": SWIZZLE}),
    (TypeError, "scale_a has dtype torch.float32", {"scale_a": torch.zeros(8, 3)}),
    (TypeError, "output_dtype is|out_dtype is torch.float64", {"output_dtype": torch.float64}),
    (ValueError, "contraction_dim is", {"contraction_dim": [0, 1]}),
    (ValueError, "bias is given and mat_b is 2D", {"mat_b": B.data[0].mT, "bias": torch.zeros(3, 32)}),
]


@pytest.mark.parametrize(("error", "match", "changes"), BAD, ids=[str(case[1]) for case in BAD])
def test_bad_input(error, match, changes):
    good = {
        "mat_a": A.data,
        "mat_b": B.data.mT,
        "scale_a": A.scale,
        "scale_recipe_a": RECIPE,
        "scale_b": B.scale,
        "scale_recipe_b": RECIPE,
        "offs": OFFS,
    }
    with pytest.raises(error, match=match):
        mx.scaled_grouped_mm(**(good | changes))
