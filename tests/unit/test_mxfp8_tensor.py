"""MXFP8Tensor: what it accepts, refuses and says."""

from __future__ import annotations

import pytest
import torch
from mx_checks import check_padding

from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor, tile_scale_shape
from mxfp8_cutlass.quantize import fold, quantize


def data(*shape, dtype=torch.float8_e4m3fn):
    return torch.zeros(shape, dtype=torch.uint8).view(dtype)


def scale(*shape, dtype=torch.uint8):
    return torch.full(shape, 127, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("shape", [(4, 96), (3, 4, 64), (0, 32), (2, 0, 32)])
def test_accepts(dtype, scale_dtype, shape):
    elements, scales = data(*shape, dtype=dtype), scale(*shape[:-1], shape[-1] // 32, dtype=scale_dtype)
    xq = MXFP8Tensor(elements, scales)
    assert xq.data is elements
    assert xq.scale.dtype == torch.float8_e8m0fnu
    assert xq.scale.data_ptr() == scales.data_ptr()
    assert xq.scale_bytes.dtype == torch.uint8
    assert (xq.shape, xq.ndim, xq.K, xq.dtype, xq.device) == (shape, len(shape), shape[-1], dtype, torch.device("cpu"))
    assert (xq.folded, xq.tile_scale) == (0, None)
    assert xq.dequantize().dtype == torch.float32
    assert xq.dequantize(torch.bfloat16).shape == shape


def test_tile_form():
    tiles = scale(3, 2, 1)
    xq = MXFP8Tensor(data(3, 130, 96), scale(3, 130, 3), folded=128, tile_scale=tiles)
    assert xq.tile_scale is tiles
    assert tile_scale_shape((3, 130, 160)) == (3, 2, 2)
    assert tile_scale_shape((0, 32)) == (0, 1)


@pytest.mark.parametrize(
    ("error", "match", "args", "kwargs"),
    [
        (TypeError, "data is a list", ([], scale(1, 1)), {}),
        (TypeError, r"data has dtype torch.bfloat16", (torch.zeros((4, 64), dtype=torch.bfloat16), scale(4, 2)), {}),
        (TypeError, r"data has dtype torch.uint8", (torch.zeros((4, 64), dtype=torch.uint8), scale(4, 2)), {}),
        (ValueError, r"data has shape \(64,\)", (data(64), scale(2)), {}),
        (ValueError, r"data has shape \(1, 1, 4, 64\)", (data(1, 1, 4, 64), scale(1, 1, 4, 2)), {}),
        (ValueError, "K = 48", (data(4, 48), scale(4, 1)), {}),
        (ValueError, "K = 0", (data(4, 0), scale(4, 0)), {}),
        (ValueError, r"data .* contiguous", (data(64, 64).t(), scale(64, 2)), {}),
        (TypeError, "scale is a NoneType", (data(4, 64), None), {}),
        (TypeError, r"scale has dtype torch.float32", (data(4, 64), torch.ones((4, 2))), {}),
        (ValueError, r"scale has shape \(4, 3\).* must be \(4, 2\)", (data(4, 64), scale(4, 3)), {}),
        (ValueError, r"scale has shape \(8,\)", (data(4, 64), scale(8)), {}),
        (ValueError, "scale is on meta", (data(4, 64), scale(4, 2).to("meta")), {}),
        (ValueError, r"scale has strides .* contiguous", (data(4, 64), scale(2, 4).t()), {}),
        (ValueError, "folded is 2", (data(4, 64), scale(4, 2)), {"folded": 2}),
        (ValueError, "tile_scale is missing", (data(4, 64), scale(4, 2)), {"folded": 128}),
        (ValueError, "tile_scale is given", (data(4, 64), scale(4, 2)), {"tile_scale": scale(1, 1)}),
        (ValueError, r"tile_scale has shape", (data(4, 64), scale(4, 2)), {"folded": 128, "tile_scale": scale(1, 2)}),
        (
            TypeError,
            r"tile_scale has dtype torch.float8_e8m0fnu",
            (data(4, 64), scale(4, 2)),
            {"folded": 128, "tile_scale": scale(1, 1, dtype=torch.float8_e8m0fnu)},
        ),
    ],
)
def test_refuses(error, match, args, kwargs):
    with pytest.raises(error, match=match):
        MXFP8Tensor(*args, **kwargs)


@pytest.mark.parametrize("shape", [(1, 32), (16, 96), (37, 160), (3, 5, 288), (0, 32), (2, 0, 32)])
def test_scale_by_run(shape):
    """Every run's scale in the kernels' order, as fold writes it or laid out anew; no padding goes astray."""
    blocks = torch.arange(torch.Size(shape).numel() // 32, dtype=torch.uint8).view(*shape[:-1], shape[-1] // 32)
    folded = fold(MXFP8Tensor(data(*shape), blocks))
    for x in (folded, MXFP8Tensor(folded.data, folded.scale, folded=1)):
        check_padding(x, x.scale_by_run())
        assert torch.equal(x.scale_by_run()[..., : shape[-2]], folded.scale_bytes[..., ::4].mT)


def test_to():
    xq = fold(quantize(torch.randn((4, 64))), rows=128)
    assert xq.to("cpu") is xq
    moved = xq.to("meta")
    assert {part.device.type for part in (moved.data, moved.scale, moved.tile_scale)} == {"meta"}
    assert moved.folded == 128
    assert moved.scale_by_run().device.type == "meta"
    with pytest.raises(TypeError, match=r"device is torch.float32"):
        xq.to(torch.float32)


def test_repr():
    text = repr(MXFP8Tensor(data(2, 4, 64), scale(2, 4, 2), folded=1))
    assert text == "MXFP8Tensor((2, 4, 64), torch.float8_e4m3fn, device='cpu', folded=1)"


@pytest.mark.gpu
def test_round_trip_through_the_gpu():
    xq = fold(quantize(torch.randn((4, 64))), rows=128)
    back = xq.to("cuda").to("cpu")
    for part in ("data", "scale", "tile_scale"):
        assert torch.equal(getattr(back, part).view(torch.uint8), getattr(xq, part).view(torch.uint8))
    with pytest.raises(ValueError, match="scale is on cuda"):
        MXFP8Tensor(xq.data, xq.scale.cuda())
