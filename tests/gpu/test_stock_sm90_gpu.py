"""SM100's launch path on Hopper, with CUTLASS's SM90 grouped GEMM in place of its SM100 one.

Arguments, parameters, tensor maps and workspace are those of SM100. Small integers, so that results are exact.
"""

from __future__ import annotations

import pytest
import torch
from products import generator, is_poisoned, offsets, poisoned
from stock_sm90 import StockConfig, StockParamsConfig, use_templates
from token_groups import columns_of, tokens_of

from mxfp8_cutlass import sm100_params
from mxfp8_cutlass.cache import get_cubin
from mxfp8_cutlass.columns import column_capacity
from mxfp8_cutlass.kernel import LaunchError, target_of
from mxfp8_cutlass.launch import Addresses, Shapes
from mxfp8_cutlass.sm100_launch import Sm100Launch

NAN = 0x7F


@pytest.fixture(autouse=True)
def templates(monkeypatch):
    use_templates(monkeypatch)


@pytest.fixture
def hopper():
    """The device, which has to be one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.cuda.current_device()
    if target_of(device) != "90a":
        pytest.skip("a kernel for sm_90a")
    return torch.device("cuda", device)


@pytest.mark.slow
@pytest.mark.parametrize("config", [StockConfig(), StockParamsConfig()], ids=lambda config: config.name)
def test_kernels_compile(config):
    assert get_cubin(config).spill_bytes == 0


def small(shape, device, seed) -> torch.Tensor:
    """FP8 integers from -2 to 2."""
    x = torch.randint(-2, 3, shape, generator=generator(device, seed), device=device)
    return x.float().to(torch.float8_e4m3fn)


def integers(shape, device, seed) -> torch.Tensor:
    return torch.randint(-40, 41, shape, generator=generator(device, seed), device=device).to(torch.bfloat16)


def with_nan(x: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """x with NaN where `held` is not."""
    return torch.where(held, x.view(torch.uint8), NAN).to(torch.uint8).view(x.dtype)


def launch_of(device, shapes, groups, *, cluster_m=1, **options) -> Sm100Launch:
    options = {"index_is_int64": False, "accumulate": False, **options}
    builder = StockParamsConfig(cluster_m)
    return Sm100Launch(StockConfig(cluster_m), shapes, groups, device.index, builder=builder, **options)


def addresses(a, b, out, *, offs=None, counts=None, bias=None) -> Addresses:
    """Scales are those of no one: this GEMM has none."""
    at = [0 if x is None else x.data_ptr() for x in (bias, offs, counts)]
    return Addresses(a.data_ptr(), 0, b.data_ptr(), 0, 0, out.data_ptr(), *at)


def expected(a, b, *, bias=None, old=None) -> torch.Tensor:
    """Rounded once to bfloat16."""
    result = a.double() @ b.double().mT
    for addend in (bias, old):
        if addend is not None:
            result += addend.double()
    return result.to(torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("cluster_m", [1, 2])
@pytest.mark.parametrize("kind", ["", "bias", "accumulate", "bias accumulate"])
@pytest.mark.parametrize("sizes", [[40, 0, 130, 1], [0, 0, 0], [128, 256, 300], [1] * 100], ids=lambda s: f"{len(s)}")
def test_groups_of_rows(hopper, sizes, kind, cluster_m):
    groups, (n, k), used = len(sizes), (144, 288), sum(sizes)
    a, b = small((used + 70, k), hopper, 1), small((groups, n, k), hopper, 2)
    a = with_nan(a, torch.arange(used + 70, device=hopper)[:, None] < used)
    out = poisoned((used + 70, n), device=hopper)
    if "accumulate" in kind:
        out[:used] = integers((used, n), hopper, 3)
    old, bias = out.clone(), integers((groups, n), hopper, 4) if "bias" in kind else None
    launch = launch_of(
        hopper,
        Shapes(1, groups, used + 70, n, k),
        groups,
        cluster_m=cluster_m,
        accumulate="accumulate" in kind,
        bias=bias is not None,
    )
    offs = offsets(sizes, hopper)
    launch(addresses(a, b, out, offs=offs, bias=bias))
    for g, rows in tokens_of(offs.tolist()):
        addends = {
            "bias": None if bias is None else bias[g],
            "old": old[rows] if "accumulate" in kind else None,
        }
        assert torch.equal(out[rows], expected(a[rows], b[g], **addends)), f"group {g}"
    assert is_poisoned(out[used:])


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [None, [0, 130, 7]], ids=["batch", "counts"])
def test_batch(hopper, counts):
    a, b, out = small((3, 130, 96), hopper, 1), small((3, 48, 96), hopper, 2), poisoned((3, 130, 48), device=hopper)
    index = None if counts is None else torch.tensor(counts, device=hopper)
    launch = launch_of(hopper, Shapes(3, 3, 130, 48, 96), 3, index_is_int64=True)
    launch(addresses(a, b, out, counts=index))
    for g, count in enumerate(counts or [130] * 3):
        assert torch.equal(out[g, :count], expected(a[g, :count], b[g]))
        assert is_poisoned(out[g, count:])


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [False, True])
def test_groups_of_columns(hopper, accumulate):
    """NaN in all columns of no group, those that pad a group to 128 too."""
    sizes, (n, k), tokens = [100, 0, 300, 5], (80, 48), 420
    offs, capacity = offsets(sizes, hopper), column_capacity(tokens, len(sizes))
    columns = [(g, slice(c.start, c.start + sizes[g])) for g, c in columns_of(None, offs.tolist())]
    held = torch.zeros(capacity, dtype=torch.bool, device=hopper)
    for _, where in columns:
        held[where] = True
    a, b = with_nan(small((n, capacity), hopper, 1), held), with_nan(small((k, capacity), hopper, 2), held)
    out = integers((4, n, k), hopper, 3) if accumulate else poisoned((4, n, k), device=hopper)
    old = out.clone() if accumulate else None
    launch = launch_of(hopper, Shapes(1, 1, n, k, capacity, tokens), 4, accumulate=accumulate, cuts_k=True)
    launch(addresses(a, b, out, offs=offs))
    for g, where in columns:
        before = None if old is None else old[g]
        assert torch.equal(out[g], expected(a[:, where], b[:, where], old=before)), f"group {g}"


@pytest.mark.gpu
def test_graph_replays_with_other_offs_and_streams_do_not_share_memory(hopper):
    sizes = [[40, 0, 130, 30], [0, 200, 0, 0], [1, 2, 3, 194]]
    a, b = small((200, 288), hopper, 1), small((4, 144, 288), hopper, 2)
    launch = launch_of(hopper, Shapes(1, 4, 200, 144, 288), 4)
    offs, out = offsets(sizes[0], hopper), poisoned((200, 144), device=hopper)
    launch(addresses(a, b, out, offs=offs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(addresses(a, b, out, offs=offs))
    side, other_offs, other = torch.cuda.Stream(), offsets([50] * 4, hopper), poisoned((200, 144), device=hopper)
    torch.cuda.synchronize()
    for each in sizes:
        offs.copy_(offsets(each, hopper))
        out.copy_(poisoned(out.shape, device=hopper))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for _ in range(20):
                launch(addresses(a, b, other, offs=other_offs))
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        for result, ends in ((out, offs), (other, other_offs)):
            for g, rows in tokens_of(ends.tolist()):
                assert torch.equal(result[rows], expected(a[rows], b[g])), f"group {g} of {ends.tolist()}"


@pytest.mark.gpu
def test_nothing_waits_for_the_device(hopper):
    a, b, out = small((200, 96), hopper, 1), small((2, 48, 96), hopper, 2), poisoned((200, 48), device=hopper)
    offs = offsets([150, 50], hopper)
    launch = launch_of(hopper, Shapes(1, 2, 200, 48, 96), 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch(addresses(a, b, out, offs=offs))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_first_launch_during_a_capture_is_refused(hopper):
    sm100_params.parameter_of.cache_clear()
    shapes = Shapes(1, 7, 200, 48, 96)
    launch_of(hopper, shapes, 6)  # loads the kernels
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(LaunchError, match="call once beforehand"):
        launch_of(hopper, shapes, 7)
