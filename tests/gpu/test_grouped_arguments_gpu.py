"""What grouped_mm refuses on a GPU alone, and operands that change or that a capture meets first."""

from __future__ import annotations

from dataclasses import replace

import bounds
import pytest
import torch
from products import E4M3, is_poisoned, offsets, operand, poisoned, run

import mxfp8_cutlass as mx
from mxfp8_cutlass import kernel
from mxfp8_cutlass.generator.config_space import sm90_configs
from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor

pytestmark = pytest.mark.gpu

CONFIG = next(c for c in sm90_configs() if c.promotion_k == 128 and c.sfb_rows == 128)


def shifted(x, by):
    """The same values, `by` bytes behind an aligned address."""
    memory = torch.empty(x.nbytes + by, dtype=torch.uint8, device=x.device)
    view = memory[by:].view(x.dtype).view(x.shape)
    return view.copy_(x)


def wrong_arguments():
    a, b = operand((8, 96), E4M3, 1, "cuda"), operand((3, 32, 96), E4M3, 2, "cuda")
    bias = torch.zeros((3, 32), dtype=torch.bfloat16, device="cuda")
    moved_a, moved_b = MXFP8Tensor(shifted(a.data, 8), a.scale), MXFP8Tensor(shifted(b.data, 4), b.scale)
    return (
        a,
        b,
        {
            "a on the CPU": ({"a": a.to("cpu")}, "is on cuda:0: .* device of a, cpu"),
            "b on the CPU": ({"b": b.to("cpu")}, "b is on cpu: .* device of a, cuda:0"),
            "offs on the CPU": ({"offs": offsets([1, 3, 4])}, "offs is on cpu"),
            "out on the CPU": ({"out": poisoned((8, 32))}, "out is on cpu"),
            "bias on the CPU": ({"bias": bias.cpu()}, "bias is on cpu"),
            "a not aligned": ({"a": moved_a}, "a.data starts at address .* 16 bytes"),
            "b not aligned": ({"b": moved_b}, "b.data starts at address .* 16 bytes"),
            "out not aligned": (
                {"out": shifted(poisoned((8, 32), device="cuda"), 2)},
                "out starts at address .* 16 bytes",
            ),
            "bias not aligned": ({"bias": shifted(bias, 2)}, "bias starts at address .* 16 bytes"),
            "config for another arch": (
                {"config": replace(CONFIG, target_sm="100a")},
                "is for sm_100a: .* needs sm_90a",
            ),
        },
    )


@pytest.mark.parametrize("exact", [False, True], ids=["folded", "exact"])
def test_wrong_arguments(exact):
    a, b, cases = wrong_arguments()
    for wrong, message in cases.values():
        out = poisoned((8, 32), device="cuda")
        arguments = {"a": a, "b": b, "offs": offsets([1, 3, 4], "cuda"), "out": out} | wrong
        with pytest.raises(ValueError, match=message):
            mx.grouped_mm(arguments.pop("a"), arguments.pop("b"), arguments.pop("offs"), exact=exact, **arguments)
        assert is_poisoned(out)
    run(a, b, [1, 3, 4], exact=exact)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)], ids=str)
def test_other_devices_are_refused(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    kernel._target_of_index.cache_clear()
    try:
        # Of a shape that no test had before, since a plan once made is not made again.
        a, b = operand((8 + sum(capability), 96), E4M3, 1, "cuda"), operand((3, 32, 96), E4M3, 2, "cuda")
        out = poisoned((a.shape[0], 32), device="cuda")
        with pytest.raises(ValueError, match=f"device=cuda:0 is .* of compute capability {capability[0]}"):
            mx.grouped_mm(a, b, offsets([1, 3, 4], "cuda"), out=out, exact=True)
        assert is_poisoned(out)
    finally:
        kernel._target_of_index.cache_clear()


@pytest.mark.parametrize("exact", [False, True], ids=["folded", "exact"])
def test_operands_that_a_capture_meets_first(exact):
    """What a capture records is not computed until a replay: nothing of it may serve an eager call."""
    run(operand((40, 288), E4M3, 1, "cuda"), operand((2, 64, 288), E4M3, 2, "cuda"), [10, 30], exact=exact)
    a, b = operand((40, 288), E4M3, 3, "cuda"), operand((2, 64, 288), E4M3, 4, "cuda")
    offs = offsets([10, 30], "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mx.grouped_mm(a, b, offs, exact=exact)
    out = mx.grouped_mm(a, b, offs, exact=exact)
    bounds.check_product(out, a, b, [10, 40], exact=exact)
    graph.replay()
    assert torch.equal(captured.view(torch.int16), out.view(torch.int16))


@pytest.mark.parametrize("exact", [False, True], ids=["folded", "exact"])
def test_operands_that_change_in_place(exact):
    a, b = operand((40, 288), E4M3, 1, "cuda"), operand((2, 64, 288), E4M3, 2, "cuda")
    run(a, b, [10, 30], exact=exact)
    other = operand((40, 288), E4M3, 5, "cuda")
    a.data.copy_(other.data)
    a.scale_bytes.copy_(other.scale_bytes)
    run(a, b, [10, 30], exact=exact)


def test_one_operand_on_two_streams():
    """A second stream may use an operand for the first time while the first has not finished laying out its scales."""
    b, offs = operand((2, 64, 288), E4M3, 2, "cuda"), offsets([10, 30], "cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for seed in range(5):
        a = operand((40, 288), E4M3, seed, "cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            torch.cuda._sleep(20_000_000)
            mx.grouped_mm(a, b, offs, exact=True)
        with torch.cuda.stream(second):
            out = mx.grouped_mm(a, b, offs, exact=True)
        torch.cuda.synchronize()
        bounds.check_product(out, a, b, [10, 40], exact=True)
