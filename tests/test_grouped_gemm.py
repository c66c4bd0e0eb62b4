"""grouped_gemm, a list of problems of their own shapes, against a float64 product; on either device."""

from __future__ import annotations

import bounds
import pytest
import torch
from products import E4M3, E5M2, folded, generator, is_poisoned, mixed_tiles, operand, poisoned

import mxfp8_cutlass as mx
from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor

SHAPES = [(130, 208, 544), (0, 16, 32), (1, 48, 2880), (63, 16, 96), (257, 400, 128), (5, 1040, 32)]


def problems(device, dtype_a=E4M3, dtype_b=E4M3, shapes=SHAPES, states=(0, 0), seed=0):
    pairs = []
    for i, (m, n, k) in enumerate(shapes):
        a, b = operand((m, k), dtype_a, seed + 2 * i, device), operand((n, k), dtype_b, seed + 2 * i + 1, device)
        b = mixed_tiles(b) if i % 2 else b
        pairs.append((folded(a, states[0]), folded(b, states[1])))
    return pairs


def check(results, pairs, *, exact=False, olds=None):
    sfb_rows = 1 if any(b.folded == 1 for _, b in pairs) else 128
    for i, (a, b) in enumerate(pairs):
        tiles = None if b.tile_scale is None else b.tile_scale[None]
        one = MXFP8Tensor.unchecked(b.data[None], b.scale[None], b.folded, tiles)
        old, m = olds[i] if olds else None, a.shape[0]
        bounds.check_product(results[i], a, one, [m], exact=exact, old=old, sfb_rows=sfb_rows, where=f"problem {i}")


@pytest.mark.parametrize("exact", [False, True], ids=["folded", "exact"])
@pytest.mark.parametrize("dtype_b", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype_a", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_types(device, dtype_a, dtype_b, exact):
    pairs = problems(device, dtype_a, dtype_b)
    results = mx.grouped_gemm(pairs, exact=exact)
    assert [tuple(y.shape) for y in results] == [(m, n) for m, n, _ in SHAPES]
    assert all(y.dtype == torch.bfloat16 for y in results)
    check(results, pairs, exact=exact)


@pytest.mark.parametrize("states", [(1, 1), (1, 128), (128, 128), (0, 1)], ids=str)
def test_folded_states(device, states):
    pairs = problems(device, states=states)
    check(mx.grouped_gemm(pairs), pairs)


def test_states_may_differ(device):
    """A weight without tile scales sends all through the kernel that needs none."""
    pairs = problems(device)
    pairs = [(folded(a, i % 2), folded(b, (0, 1, 128)[i % 3])) for i, (a, b) in enumerate(pairs)]
    for exact in (False, True):
        check(mx.grouped_gemm(pairs, exact=exact), pairs, exact=exact)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_outputs_between_poison(device, out_dtype, accumulate):
    pairs = problems(device)
    memories = [poisoned((m + 4, n), out_dtype, device) for m, n, _ in SHAPES]
    outs = [memory[2:-2] for memory in memories]
    olds = None
    if accumulate:
        olds = [torch.randn(out.shape, generator=generator(device, i), device=device) for i, out in enumerate(outs)]
        olds = [old.to(out_dtype) for old in olds]
        for out, old in zip(outs, olds, strict=True):
            out.copy_(old)
    results = mx.grouped_gemm(pairs, outs=outs, accumulate=accumulate)
    assert all(result is out for result, out in zip(results, outs, strict=True))
    check(results, pairs, olds=olds)
    for memory in memories:
        assert is_poisoned(memory[:2])
        assert is_poisoned(memory[-2:])


def test_no_rows_at_all(device):
    pairs = problems(device, shapes=[(0, 16, 32), (0, 32, 64)])
    assert [tuple(y.shape) for y in mx.grouped_gemm(pairs)] == [(0, 16), (0, 32)]


@pytest.mark.parametrize("count", [1, 32, 33, 1024])
def test_number_of_problems(device, count):
    pairs = problems(device, shapes=[(i % 3, 16 + 16 * (i % 2), 32 + 32 * (i % 5)) for i in range(count)])
    check(mx.grouped_gemm(pairs), pairs)


def test_shared_operands(device):
    """The same weights, and the same activations, in several problems."""
    (a, b), (c, d) = problems(device, shapes=[(70, 48, 160), (9, 32, 160)])
    pairs = [(a, b), (c, b), (a, d), (a, b)]
    results = mx.grouped_gemm(pairs)
    check(results, pairs)
    assert torch.equal(results[0], results[3])


@pytest.mark.gpu
def test_graph_replays_with_other_data():
    pairs = problems("cuda")
    others = [problems("cuda", seed=seed) for seed in (100, 200)]
    mx.grouped_gemm([(MXFP8Tensor(a.data, a.scale), MXFP8Tensor(b.data, b.scale)) for a, b in pairs])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fresh = [(MXFP8Tensor(a.data, a.scale), MXFP8Tensor(b.data, b.scale)) for a, b in pairs]
        results = mx.grouped_gemm(fresh)
    # What follows reuses the memory that an eager call's table had: a replay must not depend on it.
    for other in others:
        mx.grouped_gemm(problems("cuda", shapes=[(3, 16, 32)] * 7))
        for (a, b), (new_a, new_b) in zip(pairs, other, strict=True):
            for old, new in ((a, new_a), (b, new_b)):
                old.data.copy_(new.data)
                old.scale_bytes.copy_(new.scale_bytes)
        graph.replay()
        check(results, other)


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [False, True], ids=["folded", "exact"])
def test_tables_in_quick_succession(exact):
    """The allocator gives each call's table the memory of the last one's, whose tensor maps an SM may still have."""
    lists = []
    for seed in range(8):
        shapes = [
            (1 + (37 * (seed + i)) % 190, 16 * (1 + (seed + i) % 9), 32 * (1 + (5 * seed + i) % 11)) for i in range(6)
        ]
        pairs = problems("cuda", shapes=shapes, seed=100 * seed)
        lists.append(pairs if exact else [(folded(a, 1), folded(b, 128)) for a, b in pairs])
    outputs = []
    torch.cuda.synchronize()
    for _ in range(20):
        outputs += [(pairs, mx.grouped_gemm(pairs, exact=exact)) for pairs in lists]
    for pairs, results in outputs[:8]:
        check(results, pairs, exact=exact)
    for i, (_, results) in enumerate(outputs):
        for got, first in zip(results, outputs[i % 8][1], strict=True):
            assert torch.equal(got.view(torch.int16), first.view(torch.int16))


@pytest.mark.gpu
def test_runs_on_the_current_stream():
    pairs = problems("cuda", states=(1, 128))
    expected = mx.grouped_gemm(pairs)
    late = [
        (MXFP8Tensor(torch.zeros_like(a.data.view(torch.uint8)).view(E4M3), a.scale, folded=1), b) for a, b in pairs
    ]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for (a, _), (source, _) in zip(late, pairs, strict=True):
            a.data.copy_(source.data)
        results = mx.grouped_gemm(late)
    stream.synchronize()
    for got, right in zip(results, expected, strict=True):
        assert torch.equal(got.view(torch.int16), right.view(torch.int16))
