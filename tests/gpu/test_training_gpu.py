"""grouped_linear where only a GPU can tell: syncs, graphs, streams."""

from __future__ import annotations

import pytest
import torch
from linear_problems import NAMES, problem
from products import offsets

import mxfp8_cutlass as mx

pytestmark = pytest.mark.gpu

WGRADS = ["mxfp8", "bf16"]
SPLITS = ([100, 0, 1, 63, 120], [0, 0, 0, 0, 0], [64, 64, 64, 64, 64], [0, 0, 320, 0, 0], [1, 2, 3, 4, 5])


def train(leaves, offs, dy, **options):
    """Forward and backward: the output, and all gradients."""
    x, weight, bias, bias_scale = (leaves[name] for name in NAMES)
    y = mx.grouped_linear(x, weight, offs, bias, bias_scale=bias_scale, **options)
    grads = torch.autograd.grad(y, [x, weight, bias, bias_scale], dy)
    return y, dict(zip(NAMES, grads, strict=True))


@pytest.mark.parametrize("wgrad", WGRADS)
def test_nothing_waits_for_the_device(wgrad):
    case = problem("cuda")
    leaves = case.leaves()
    cache = mx.WeightCache()
    train(leaves, case.offs, case.dy, wgrad=wgrad, weight_cache=cache)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(leaves, case.offs, case.dy, wgrad=wgrad, weight_cache=cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("wgrad", WGRADS)
def test_graph_replays_with_other_groups_and_weights(wgrad, cached):
    """One capture for any split of the same capacity; a replay quantizes the weight that it finds."""
    case = problem("cuda")
    case.x, case.dy, case.bias_scale = (t.nan_to_num(0.5) for t in (case.x, case.dy, case.bias_scale))
    leaves, offs = case.leaves(), case.offs.clone()
    options = {"wgrad": wgrad, "weight_cache": mx.WeightCache() if cached else None}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            train(leaves, offs, case.dy, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, grads = train(leaves, offs, case.dy, **options)
    for sizes in SPLITS:
        offs.copy_(offsets(sizes, "cuda"))
        with torch.no_grad():
            leaves["weight"].mul_(-1.5)
        graph.replay()
        used = sum(sizes)
        expected_y, expected = train(leaves, offs, case.dy, **options)
        assert torch.equal(y[:used], expected_y[:used])
        for name in NAMES:
            rows = slice(used if name == "x" else None)
            assert torch.equal(grads[name][rows], expected[name][rows]), (sizes, name)


@pytest.mark.parametrize("wgrad", WGRADS)
def test_a_cache_on_two_streams(wgrad):
    """Each stream quantizes for itself, so neither reads what the other is still writing."""
    case = problem("cuda")
    leaves, cache = case.leaves(), mx.WeightCache()
    want, _ = train(leaves, case.offs, case.dy, wgrad=wgrad)
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y, _ = train(leaves, case.offs, case.dy, wgrad=wgrad, weight_cache=cache)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(y[: case.used], want[: case.used])
    assert len(cache) == 2
