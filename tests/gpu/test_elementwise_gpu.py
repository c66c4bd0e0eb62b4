"""The elementwise kernels where only a GPU can tell: large tensors, streams, graphs, stray writes."""

from __future__ import annotations

import pytest
import torch

from mxfp8_cutlass import elementwise, mxfp8_tensor, reference
from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor
from mxfp8_cutlass.quantize import dequantize, fold, quantize

pytestmark = pytest.mark.gpu

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def assert_same(xq, expected, rows=slice(None)):
    for name in ("data", "scale"):
        got = getattr(xq, name).view(torch.uint8)[rows].cpu()
        assert torch.equal(got, getattr(expected, name).view(torch.uint8)), name


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1024, 4096), (1501, 2880), (3, 333, 1056)])
@pytest.mark.parametrize("scaling", ["rceil", "floor"])
def test_large_tensors_equal_the_reference(shape, x_dtype, dtype, scaling):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
    x = x.to(x_dtype)
    expected = reference.quantize(x, dtype, scaling)
    xq = quantize(x.cuda(), dtype, scaling)
    assert_same(xq, expected)
    assert_same(quantize(x.cuda(), dtype, scaling, fold=True), reference.fold(expected)[0])
    for rows in (1, 128):
        folded, statistics = fold(xq, rows, return_stats=True)
        expected_folded, expected_statistics = reference.fold(expected, rows)
        assert_same(folded, expected_folded)
        assert {k: int(v) for k, v in statistics.items()} == {k: int(v) for k, v in expected_statistics.items()}
        if rows == 128:
            assert torch.equal(folded.tile_scale.cpu(), expected_folded.tile_scale)


@pytest.mark.parametrize("K", [4096, 2880])
def test_more_than_2_to_the_31_elements(K):
    n_rows = 2**32 // K + 1000  # beyond 32 unsigned bits, too
    x = torch.empty((n_rows, K), dtype=torch.bfloat16, device="cuda")
    x.normal_().mul_(torch.exp2(torch.arange(n_rows, device="cuda") % 37 - 18.0)[:, None])
    x[:, 32:64] *= 64
    some = torch.tensor([0, 1, 2**31 // K - 1, 2**31 // K, 2**31 // K + 1, 2**32 // K, n_rows - 2, n_rows - 1])
    few = x[some.cuda()].cpu()
    xq = quantize(x)
    expected = reference.quantize(few)
    assert_same(xq, expected, some.cuda())
    assert_same(quantize(x, fold=True), reference.fold(expected)[0], some.cuda())
    assert_same(fold(xq), reference.fold(expected)[0], some.cuda())
    first = n_rows // 128 * 128  # the last tile, which is shorter
    last = MXFP8Tensor(xq.data[first:].cpu(), xq.scale[first:].cpu())
    tiles = fold(xq, rows=128)
    assert_same(tiles, reference.fold(last, 128)[0], slice(first, None))
    assert torch.equal(tiles.tile_scale[-1].cpu(), reference.fold(last, 128)[0].tile_scale[0])
    del tiles
    values = dequantize(xq, torch.bfloat16)
    assert torch.equal(values[some.cuda()].cpu(), reference.dequantize(expected, torch.bfloat16))


def test_runs_on_the_current_stream():
    x = torch.randn((2048, 4096), dtype=torch.bfloat16, device="cuda")
    expected = quantize(x)
    stream = torch.cuda.Stream()
    later = torch.zeros_like(x)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # long enough that a launch on another stream would read zeros
        later.copy_(x)
        xq = quantize(later)
    stream.synchronize()
    assert torch.equal(xq.data.view(torch.uint8), expected.data.view(torch.uint8))


def test_graph_capture():
    x = torch.randn((256, 512), dtype=torch.bfloat16, device="cuda")
    folded = fold(quantize(x), rows=128)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fold(quantize(x), rows=128)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert_same(captured, fold(quantize(x), rows=128).to("cpu"))
    assert not torch.equal(captured.data.view(torch.uint8), folded.data.view(torch.uint8))


@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (129, 160), (2, 127, 2880)])
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_writes_nothing_else(shape, dtype, monkeypatch):
    """Outputs inside larger, poisoned allocations: the bytes on either side stay as they are."""
    x = torch.randn(shape, device="cuda")
    pools = []

    def guarded(*args, **kwargs):
        size, out_dtype = (args[0] if not isinstance(args[0], int) else args), kwargs["dtype"]
        count = torch.Size(size).numel() * out_dtype.itemsize
        pool = torch.full((count + 2048,), 0xA5, dtype=torch.uint8, device="cuda")
        pools.append((pool, count))
        return pool[1024 : 1024 + count].view(out_dtype).view(size)

    class Torch:
        """torch, but for torch.empty and torch.empty_like."""

        empty = staticmethod(guarded)

        @staticmethod
        def empty_like(like):
            return guarded(like.shape, dtype=like.dtype)

        def __getattr__(self, name):
            return getattr(torch, name)

    with monkeypatch.context() as patch:
        for module in (elementwise, mxfp8_tensor):
            patch.setattr(module, "torch", Torch())
        xq = quantize(x, dtype)
        quantize(x, dtype, fold=True)
        fold(xq)
        fold(xq, rows=128)
        dequantize(xq, torch.bfloat16)
        dequantize(xq, torch.float32)
    assert len(pools) == 2 + 3 + 3 + 4 + 1 + 1
    for pool, count in pools:
        assert (pool[:1024] == 0xA5).all()
        assert (pool[1024 + count :] == 0xA5).all()
