"""What grouped_mm works out once and what it does at each call, with stand-ins for the GPU."""

from __future__ import annotations

import sys
from dataclasses import replace

import cuda_stand_ins
import pytest
import torch
from cuda_stand_ins import grouped_mm as module
from cuda_stand_ins import on_cuda
from products import E4M3, folded, offsets, operand

import mxfp8_cutlass as mx
from mxfp8_cutlass import columns_mm, kernel
from mxfp8_cutlass.select import select_k_groups, select_stacked

FACTS = (128, 128, "e4m3", "e4m3", "bf16")
CALLS, CALLS_FOR_ADDRESSES = 50, 30
"""Functions that a warm call may call, C functions counted, and how many more for an output at an address that it has
not had: host time by a measure that is the same on every machine."""


@pytest.fixture
def launches(monkeypatch):
    columns_mm._launch.cache_clear()
    yield cuda_stand_ins.install(monkeypatch)
    columns_mm._launch.cache_clear()
    kernel._target_of_index.cache_clear()


def tensors(M=40, N=64, K=288, G=3, seed=1):
    """Folded operands, offs and an output."""
    a, b = folded(operand((M, K), E4M3, seed), 1), folded(operand((G, N, K), E4M3, seed + 1), 128)
    out = torch.zeros((M, N), dtype=torch.bfloat16)
    return on_cuda(a), on_cuda(b), on_cuda(offsets([M // G] * G)), on_cuda(out)


def batch(M=40, N=64, K=288, G=3):
    b = tensors(G, N, K, G)[1]
    a = on_cuda(folded(operand((G, M, K)), 1))
    return a, b, on_cuda(torch.zeros((G, M, N), dtype=torch.bfloat16))


def calls_of(function):
    """How many functions are called, Python's and C's."""
    events = []
    sys.setprofile(lambda frame, event, argument: events.append(event) if event in ("call", "c_call") else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(events)


def test_a_warm_call_does_little(launches, monkeypatch):
    a, b, offs, out = tensors()
    other = on_cuda(torch.zeros_like(out))
    mx.grouped_mm(a, b, offs, out=out)
    for name in ("_plan", "prepared", "select_stacked", "target_of"):
        monkeypatch.setattr(module, name, None)
    warm = calls_of(lambda: mx.grouped_mm(a, b, offs, out=out))
    assert warm <= CALLS
    assert calls_of(lambda: mx.grouped_mm(a, b, offs, out=other)) <= warm + CALLS_FOR_ADDRESSES
    assert calls_of(lambda: mx.grouped_mm(a, b, offs, out=other)) == warm
    assert len(launches) == 4


def addresses_in(params):
    problem = params.problem
    names = ("sfa", "sfb", "sfb_tiles", "out", "bias")
    maps = [problem.map_a.opaque[0], problem.map_b.opaque[0]]
    return [*maps, *(getattr(problem, name) for name in names), params.offs, params.counts]


def test_the_kernels_argument(launches):
    a, b, offs, out = tensors()
    bias = on_cuda(torch.zeros((3, 64), dtype=torch.bfloat16))
    mx.grouped_mm(a, b, offs.long().as_subclass(type(offs)), bias=bias, out=out, accumulate=True)
    mx.grouped_mm(a, b, offs, out=out)
    parts = [x.data_ptr() for x in (a.data, b.data, a.scale_by_run(), b.scale_by_run(), b.tile_scale, out)]
    (_, first, _, grid), (_, second, _, _) = launches
    assert addresses_in(first)[:-2] == [*parts, bias.data_ptr()]
    assert addresses_in(second) == [*parts, None, offs.data_ptr(), None]
    assert (first.groups, first.index_is_int64, first.accumulate) == (3, 1, 1)
    assert (second.groups, second.index_is_int64, second.accumulate) == (3, 0, 0)
    assert (second.problem.m, second.problem.n, second.problem.k) == (40, 64, 288)
    assert list(second.problem.map_a.opaque)[1:4] == [1, 40, 288]
    assert list(second.problem.map_b.opaque)[1:4] == [3, 64, 288]
    assert 1 <= grid <= 132


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_kernels_argument_for_counts(launches, dtype):
    a, b, out = batch()
    counts = on_cuda(torch.tensor([1, 2, 3], dtype=dtype))
    mx.grouped_mm(a, b, counts=counts, out=out)
    mx.grouped_mm(a, b, out=out)
    (_, masked, _, _), (_, whole, _, _) = launches
    assert addresses_in(masked)[-2:] == [None, counts.data_ptr()]
    assert masked.index_is_int64 == (dtype == torch.int64)
    assert list(masked.problem.map_a.opaque)[1:4] == [3, 40, 288]
    assert addresses_in(whole)[-2:] == [None, None]


def test_arguments_of_earlier_launches_stay(launches):
    """Other addresses get a struct of their own: a thread may be launching with the first one."""
    a, b, offs, out = tensors()
    others = [on_cuda(torch.zeros_like(out)) for _ in range(3)]
    for one in (out, *others, out):
        mx.grouped_mm(a, b, offs, out=one)
    assert [params.problem.out for _, params, _, _ in launches] == [x.data_ptr() for x in (out, *others, out)]
    for _, then, now, _ in launches:
        assert bytes(then) == bytes(now)
    assert launches[0][2] is launches[-1][2]


def test_an_address_that_a_tensor_of_another_shape_has_now(launches):
    memory = torch.zeros((40, 96), dtype=torch.bfloat16)
    a, b, offs, _ = tensors()
    mx.grouped_mm(a, b, offs, out=on_cuda(memory.view(-1)[: 40 * 64].view(40, 64)))
    other = folded(operand((3, 96, 288), E4M3, 7), 128)
    mx.grouped_mm(a, on_cuda(other), offs, out=on_cuda(memory))
    assert [(params.problem.n, params.problem.out) for _, params, _, _ in launches] == [
        (64, memory.data_ptr()),
        (96, memory.data_ptr()),
    ]


def test_addresses_are_checked_when_they_are_new(launches):
    a, b, offs, out = tensors()
    mx.grouped_mm(a, b, offs, out=out)
    inside = b.data.view(torch.uint8).view(-1)[: 40 * 64 * 2].view(torch.bfloat16).view(40, 64)
    memory = torch.zeros(40 * 64 + 8, dtype=torch.bfloat16)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"out overlaps b\.data"):
            mx.grouped_mm(a, b, offs, out=on_cuda(inside))
        with pytest.raises(ValueError, match=r"out starts at address .* 16 bytes"):
            mx.grouped_mm(a, b, offs, out=on_cuda(memory[1:-7].view(40, 64)))
    assert len(launches) == 1


def test_traits_are_checked_when_they_are_new(launches):
    a, b, offs, out = tensors()
    mx.grouped_mm(a, b, offs, out=out)
    for _ in range(2):
        with pytest.raises(ValueError, match="offs has shape"):
            mx.grouped_mm(a, b, on_cuda(offs[:2]), out=out)
        with pytest.raises(ValueError, match="out has strides"):
            mx.grouped_mm(a, b, offs, out=on_cuda(torch.zeros((64, 40), dtype=torch.bfloat16).mT))
        with pytest.raises(TypeError, match="config is a dict"):
            mx.grouped_mm(a, b, offs, out=out, config={})
        with pytest.raises(ValueError, match="offs is on cpu"):
            mx.grouped_mm(a, b, offsets([10, 10, 20]), out=out)
    assert len(launches) == 1


def test_plans_are_not_kept_without_end(launches, monkeypatch):
    monkeypatch.setattr(module, "MAX_PLANS", 4)
    monkeypatch.setattr("mxfp8_cutlass.launch.MAX_KNOWN", 4)
    _, b, offs, _ = tensors()
    outs = []
    for m in range(30, 42):
        a = on_cuda(folded(operand((m, 288)), 1))
        outs += [mx.grouped_mm(a, b, offs) for _ in range(7)]
        assert len(module._PLANS) <= 4
        assert all(len(plan.launch.known) <= 4 for plan in module._PLANS.values())
    assert [params.problem.out for _, params, _, _ in launches] == [out.data_ptr() for out in outs]


@pytest.mark.parametrize(("expected_m", "rows"), [(None, 1024), (8, 8), (100, 100), (5000, 1024)])
def test_the_kernel_is_picked_for_the_expected_rows(launches, expected_m, rows):
    G, M, N, K = 4, 1024, 512, 256
    a, b, _ = batch(M, N, K, G)
    counts = on_cuda(torch.zeros(G, dtype=torch.int32))
    mx.grouped_mm(a, b, counts=counts, expected_m=expected_m)
    assert launches[0][0] == select_stacked(rows, N, K, G, "90a", *FACTS, split=False)


def test_an_explicit_kernel_has_a_plan_of_its_own(launches):
    a, b, offs, out = tensors()
    config = select_stacked(40, 64, 288, 3, "90a", *FACTS, split=True)
    fewer = replace(config, stages=config.stages - 1)
    for one in (None, fewer, None, config):
        mx.grouped_mm(a, b, offs, out=out, config=one)
    assert [used for used, *_ in launches] == [config, fewer, config, config]


def columnwise(features, sizes, tokens, rows, seed):
    """A folded operand of groups of such sizes, on the device."""
    x = torch.randn((tokens, features), generator=torch.Generator().manual_seed(seed))
    made = mx.quantize_columnwise(x, offsets(sizes), fold_rows=rows)
    return mx.ColumnwiseMXFP8(on_cuda(made.tensor), on_cuda(made.offs), tokens)


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_kernels_argument_where_offs_cuts_k(launches, accumulate):
    a, b = columnwise(48, [130, 0, 20], 170, 1, 1), columnwise(64, [130, 0, 20], 170, 128, 2)
    out = on_cuda(torch.zeros((3, 48, 64), dtype=torch.bfloat16))
    offs = on_cuda(offsets([130, 0, 20]).long())
    for _ in range(2):
        assert mx.grouped_mm(a, b, offs, out=out, accumulate=accumulate) is out
    (config, params, first, grid), (_, _, second, _) = launches
    assert first is second
    assert config.k_groups
    assert config is select_k_groups(48, 64, 170, 3, "90a", *FACTS)
    parts = [a.tensor.data, b.tensor.data, a.tensor.scale_by_run(), b.tensor.scale_by_run(), b.tensor.tile_scale, out]
    assert addresses_in(params) == [*(x.data_ptr() for x in parts), None, offs.data_ptr(), None]
    assert (params.groups, params.index_is_int64, params.accumulate, params.tokens) == (3, 1, accumulate, 170)
    assert (params.problem.m, params.problem.n, params.problem.k) == (48, 64, 512)
    assert list(params.problem.map_a.opaque)[1:4] == [1, 48, 512]
    assert list(params.problem.map_b.opaque)[1:4] == [1, 64, 512]
    assert list(params.problem.map_out.opaque)[1:4] == [3, 48, 64]
    assert grid == 3 * config.cluster_size


def test_a_config_for_the_other_kind_of_groups(launches):
    a, b = columnwise(48, [130, 0, 20], 170, 1, 1), columnwise(64, [130, 0, 20], 170, 128, 2)
    of_rows, of_runs = (
        select_stacked(40, 64, 288, 3, "90a", *FACTS, split=True),
        select_k_groups(48, 64, 170, 3, "90a", *FACTS),
    )
    with pytest.raises(ValueError, match="is for groups that are rows: no ColumnwiseMXFP8"):
        mx.grouped_mm(a, b, config=of_rows)
    rows, weights, offs, out = tensors()
    with pytest.raises(ValueError, match="is for groups that are runs of K: two ColumnwiseMXFP8"):
        mx.grouped_mm(rows, weights, offs, out=out, config=of_runs)
    assert not launches
