"""grouped_mm where only a GPU can tell: streams, graphs, syncs, large operands, stray writes, wrong offsets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import bounds
import pytest
import torch
from products import E4M3, E5M2, folded, is_poisoned, offsets, operand, poisoned, run

import mxfp8_cutlass as mx
from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor

pytestmark = pytest.mark.gpu

SIZES = [300, 0, 1, 411]
WAYS = {"folded": (1, 128, False), "unfolded": (0, 0, False), "exact": (0, 0, True)}


@pytest.fixture(params=WAYS)
def problem(request):
    """(a, b, keyword arguments)."""
    state_a, state_b, exact = WAYS[request.param]
    a, b = operand((900, 1056), E4M3, 1, "cuda"), operand((4, 208, 1056), E4M3, 2, "cuda")
    return folded(a, state_a), folded(b, state_b), {"exact": exact}


def test_runs_on_the_current_stream(problem):
    a, b, options = problem
    offs = offsets(SIZES, "cuda")
    expected = mx.grouped_mm(a, b, offs, **options)
    late = MXFP8Tensor(torch.zeros_like(a.data.view(torch.uint8)).view(E4M3), a.scale, folded=a.folded)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # long enough that a launch on another stream would read zeros
        late.data.copy_(a.data)
        out = mx.grouped_mm(late, b, offs, **options)
    stream.synchronize()
    assert torch.equal(out[:712].view(torch.int16), expected[:712].view(torch.int16))


@contextmanager
def no_sync():
    """Any wait for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_calls_do_not_synchronize(problem):
    a, b, options = problem
    offs, out = offsets(SIZES, "cuda"), poisoned((900, 208), device="cuda")
    bias = torch.zeros((4, 208), dtype=torch.bfloat16, device="cuda")
    pair = MXFP8Tensor(b.data[0], b.scale[0])
    stacked = MXFP8Tensor(a.data[:800].view(4, 200, 1056), a.scale[:800].view(4, 200, 33))
    counts = torch.tensor([5, 0, 200, 77], device="cuda")

    def calls():
        mx.grouped_mm(a, b, offs, bias=bias, out=out, **options)
        mx.grouped_mm(a, b, offs.long(), **options)
        mx.grouped_mm(stacked, b, **options)
        mx.grouped_mm(stacked, b, counts=counts, expected_m=70, **options)
        mx.grouped_gemm([(a, pair)] * 3, **options)

    for _ in range(2):  # the first call loads kernels, and does not wait for the device either
        with no_sync():
            calls()
    bounds.check_product(out, a, b, offs.tolist(), bias=bias, **options)


def test_other_public_calls_do_not_synchronize():
    x, offs = torch.randn((256, 384), device="cuda"), offsets([100, 28, 128], "cuda")

    def calls():
        for fold in (False, True):
            xq = mx.quantize(x, fold=fold)
        mx.fold(mx.quantize(x), 128)
        mx.fold(mx.quantize(x), return_stats=True)
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            mx.dequantize(xq, dtype)
        swizzled = mx.swizzle_scales(xq.scale, offs)
        mx.unswizzle_scales(swizzled, xq.scale.shape, offs)
        MXFP8Tensor(xq.data, xq.scale).to("cuda:0")
        mx.select_kernel([(256, 64, 384)])

    for _ in range(2):
        with no_sync():
            calls()


def test_a_warm_call_in_a_new_thread(problem):
    """The plan is made already, and the thread has no context of its own yet."""
    a, b, options = problem
    offs, out = offsets(SIZES, "cuda"), poisoned((900, 208), device="cuda")
    mx.grouped_mm(a, b, offs, out=out, **options)
    torch.cuda.synchronize()
    out.copy_(poisoned((900, 208), device="cuda"))
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(mx.grouped_mm, a, b, offs, out=out, **options).result()
    torch.cuda.synchronize()
    bounds.check_product(out, a, b, offs.tolist(), **options)


def test_threads_that_call_at_once(problem):
    """Each with its own addresses, among them ones that another thread had before."""
    a, b, options = problem
    offs = offsets(SIZES, "cuda")
    expected = mx.grouped_mm(a, b, offs, **options)[:712].view(torch.int16)

    def calls(seed):
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [mx.grouped_mm(a, b, offs, **options)[:712].view(torch.int16) for _ in range(40)]
            torch.cuda.current_stream().synchronize()
            return all(torch.equal(out, expected) for out in outs)

    torch.cuda.synchronize()
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(calls, range(16)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_devices_that_are_not_the_current_one(problem):
    a, b, options = problem
    offs = offsets(SIZES, "cuda")
    expected = mx.grouped_mm(a, b, offs, **options)[:712].view(torch.int16).cpu()
    for index in (1, 0, 1):
        where = f"cuda:{index}"
        out = mx.grouped_mm(a.to(where), b.to(where), offs.to(where), **options)
        assert out.device == torch.device(where)
        assert torch.equal(out[:712].view(torch.int16).cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_graph_replays_with_other_counts(dtype):
    a, b = operand((4, 200, 544), E4M3, 1, "cuda"), folded(operand((4, 208, 544), E4M3, 2, "cuda"), 128)
    for state, exact in ((1, False), (0, True)):
        x = folded(a, state)
        counts, out = torch.tensor([5, 0, 200, 64], dtype=dtype, device="cuda"), poisoned((4, 200, 208), device="cuda")
        mx.grouped_mm(x, b, counts=counts, expected_m=64, out=out, exact=exact)  # loads the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            mx.grouped_mm(x, b, counts=counts, expected_m=64, out=out, exact=exact)
        for used in ([0, 0, 0, 0], [200] * 4, [1, 200, 0, 65], [64, 128, 129, 1]):
            counts.copy_(torch.tensor(used))
            out.copy_(poisoned(out.shape, device="cuda"))
            graph.replay()
            bounds.check_product(out, x, b, None, counts=used, exact=exact)
            for g, count in enumerate(used):
                assert is_poisoned(out[g, count:])


@pytest.mark.parametrize("offs_dtype", [torch.int32, torch.int64], ids=str)
def test_graph_replays_with_other_offsets(problem, offs_dtype):
    a, b, options = problem
    offs, out = offsets(SIZES, "cuda", offs_dtype), poisoned((900, 208), device="cuda")
    mx.grouped_mm(a, b, offs, out=out, **options)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mx.grouped_mm(a, b, offs, out=out, **options)
    for sizes in ([0, 900, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [225] * 4, [64, 129, 0, 500]):
        offs.copy_(offsets(sizes, "cuda", offs_dtype))
        out.copy_(poisoned((900, 208), device="cuda"))
        graph.replay()
        bounds.check_product(out, a, b, offs.tolist(), **options)
        assert is_poisoned(out[sum(sizes) :])


def test_graph_replays_with_other_operands():
    """Folding is part of the graph, and so is laying out the scales."""
    sources = [operand((256, 288), E4M3, seed, "cuda") for seed in (1, 2, 3)]
    a, b, offs = (
        operand((256, 288), E4M3, 4, "cuda"),
        operand((2, 64, 288), E4M3, 5, "cuda"),
        offsets([56, 200], "cuda"),
    )
    for exact in (False, True):
        mx.grouped_mm(MXFP8Tensor(a.data, a.scale), b, offs, exact=exact)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = mx.grouped_mm(MXFP8Tensor(a.data, a.scale), b, offs, exact=exact)
        for source in sources:
            a.data.copy_(source.data)
            a.scale_bytes.copy_(source.scale_bytes)
            graph.replay()
            bounds.check_product(out, source, b, [56, 256], exact=exact)


def test_same_bits_every_time(problem):
    a, b, options = problem
    offs = offsets(SIZES, "cuda")
    first = mx.grouped_mm(a, b, offs, **options)[:712].view(torch.int16)
    for _ in range(50):
        assert torch.equal(mx.grouped_mm(a, b, offs, **options)[:712].view(torch.int16), first)


WRONG_OFFSETS = [
    [-5, 3, 100, 200],
    [200, 100, 50, 10],
    [300, 0, 300, 0],
    [0, 301, 302, 303],
    [2**31 - 1] * 4,
    [-(2**31)] * 4,
    [-(2**31), 2**31 - 1, -(2**31), 2**31 - 1],
    [2**32 + 10, 2**32 + 20, 2**33, 2**63 - 1],
    [-(2**63), 2**63 - 1, -(2**32) + 10, 2**40],
]


@pytest.mark.parametrize("exact", [False, True], ids=["folded", "exact"])
@pytest.mark.parametrize("wrong", WRONG_OFFSETS, ids=str)
def test_wrong_offsets_write_nothing_outside_the_output(wrong, exact):
    a, b = operand((300, 288), E4M3, 1, "cuda"), operand((4, 80, 288), E4M3, 2, "cuda")
    fits = all(-(2**31) <= end < 2**31 for end in wrong)
    for out_dtype in (torch.bfloat16, torch.float32):
        for dtype in (torch.int64, torch.int32) if fits else (torch.int64,):
            memory = poisoned((300 + 2 * 300, 80), out_dtype, "cuda")
            out, offs = memory[300:600], torch.tensor(wrong, dtype=dtype, device="cuda")
            for accumulate in (False, True):
                mx.grouped_mm(a, b, offs, out=out, accumulate=accumulate, exact=exact)
            torch.cuda.synchronize()
            assert is_poisoned(memory[:300])
            assert is_poisoned(memory[600:])
    run(a, b, [100, 0, 1, 150], exact=exact)


def random_bytes(shape, seed, dtype=E4M3) -> MXFP8Tensor:
    """Any finite elements, made where they lie."""
    source = torch.Generator("cuda").manual_seed(seed)
    data = torch.randint(0, 256, shape, generator=source, device="cuda", dtype=torch.uint8).bitwise_and_(0xBF)
    blocks = (*shape[:-1], shape[-1] // 32)
    scale = torch.randint(119, 122, blocks, generator=source, device="cuda", dtype=torch.uint8)
    return MXFP8Tensor(data.view(dtype), scale)


def part(xq, *index) -> MXFP8Tensor:
    return MXFP8Tensor(xq.data[index].contiguous(), xq.scale_bytes[index].contiguous())


@pytest.mark.parametrize("way", ["folded", "exact"])
def test_more_than_2_to_the_31_elements_of_a(way):
    K = 4096
    M = 2**32 // K + 1001  # beyond 32 unsigned bits, too
    a, b = random_bytes((M, K), 1), random_bytes((3, 16, K), 2)
    sizes = [2**31 // K - 70, 140, M - 2**31 // K - 70 - 3]
    out = poisoned((M, 16), device="cuda")
    mx.grouped_mm(a, b, offsets(sizes, "cuda"), out=out, exact=way == "exact")
    ends = offsets(sizes).tolist()
    for g, rows in ((0, slice(ends[0] - 50, ends[0])), (1, slice(*ends[:2])), (2, slice(ends[2] - 300, ends[2]))):
        bounds.check_product(out[rows], part(a, rows), part(b, slice(g, g + 1)), [len(out[rows])], exact=way == "exact")
    assert is_poisoned(out[ends[2] :])


@pytest.mark.parametrize("way", ["folded", "exact"])
def test_more_than_2_to_the_31_elements_of_b(way):
    groups, N, K = 130, 4112, 4096
    a, b = random_bytes((groups, K), 1), random_bytes((groups, N, K), 2)
    out = mx.grouped_mm(a, b, torch.arange(1, groups + 1, device="cuda"), exact=way == "exact")
    for g in (0, 63, 127, 128, 129):
        one = slice(g, g + 1)
        bounds.check_product(out[one], part(a, one), part(b, one), [1], exact=way == "exact")


@pytest.mark.parametrize("batched", [False, True], ids=["grouped", "batched"])
def test_more_than_2_to_the_31_elements_of_the_output(batched):
    groups, M, N, K = 5, 2**18, 2**12 + 16, 32
    a = random_bytes((groups, M, K) if batched else (groups * M, K), 1)
    b = random_bytes((groups, N, K), 2)
    out = poisoned((*a.shape[:-1], N), device="cuda")
    mx.grouped_mm(a, b, None if batched else offsets([M] * groups, "cuda"), out=out)
    assert out.numel() > 2**32
    for g, row in ((0, 0), (1, M - 100), (2, M // 2), (3, 7), (4, M - 100)):
        rows = slice(row, row + 100)
        index = (g, rows) if batched else (slice(g * M + row, g * M + row + 100),)
        bounds.check_product(out[index], part(a, *index), part(b, slice(g, g + 1)), [100])


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_second_stripe_of_tiles(dtype):
    """The scheduler walks groups in stripes of 32 rows of cluster tiles."""
    a, b = operand((9000, 160), dtype, 1, "cuda"), operand((2, 400, 160), dtype, 2, "cuda")
    for exact in (False, True):
        run(a, b, [8500, 499], exact=exact)
