"""WeightCache: when a weight is quantized, and that it makes no difference to any result."""

from __future__ import annotations

import gc

import pytest
import torch
from linear_problems import problem, same, step
from torch.utils.checkpoint import checkpoint

import mxfp8_cutlass as mx
from mxfp8_cutlass import weight_cache


@pytest.fixture
def quantized(monkeypatch):
    """Calls that quantize a weight: (transposed, both)."""
    calls = []
    original = weight_cache._quantized

    def counting(weight, dtype, scaling, *, transposed, both):
        calls.append((transposed, both))
        return original(weight, dtype, scaling, transposed=transposed, both=both)

    monkeypatch.setattr(weight_cache, "_quantized", counting)
    return calls


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(device, quantized, use_reentrant):
    """The same bits, and one quantization of the weight although forward runs twice."""
    case, cache = problem(device), mx.WeightCache()

    def layer(x, weight, offs, bias, *, bias_scale):
        def run(*arguments):
            return mx.grouped_linear(*arguments[:4], bias_scale=arguments[4], weight_cache=cache)

        return checkpoint(run, x, weight, offs, bias, bias_scale, use_reentrant=use_reentrant)

    got = step(case, function=layer)
    assert len(quantized) <= 2
    same(got, step(case), case)


def test_the_cache_follows_the_version(device, quantized):
    case, cache = problem(device, bias=None), mx.WeightCache()
    weight = torch.nn.Parameter(case.weight.clone())
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def micro_batch():
        x = case.x.clone().requires_grad_()
        y = mx.grouped_linear(x, weight, case.offs, weight_cache=cache)
        y.backward(case.dy)
        return y.detach()[: case.used], x.grad[: case.used]

    one, other = micro_batch(), micro_batch()
    assert quantized == [(False, True)]  # both directions from one read, for two micro-batches
    assert all(map(torch.equal, one, other))
    optimizer.step()
    optimizer.zero_grad()
    after = micro_batch()
    assert len(quantized) == 2
    assert len(cache) == 1
    fresh = mx.grouped_linear(case.x, weight.detach().clone(), case.offs)
    assert torch.equal(after[0], fresh[: case.used])
    assert not torch.equal(after[0], one[0])
    weight.data.mul_(2)  # not counted
    cache.clear()
    fresh = mx.grouped_linear(case.x, weight.detach().clone(), case.offs)
    assert torch.equal(micro_batch()[0], fresh[: case.used])


def test_the_cache_without_dgrad(device, quantized):
    case, cache = problem(device, bias=None), mx.WeightCache()
    for _ in range(2):
        step_weight = case.weight  # the leaf itself: clones have other memory
        mx.grouped_linear(case.x, step_weight, case.offs, weight_cache=cache)
    assert quantized == [(False, False)]
    x = case.x.clone().requires_grad_()
    mx.grouped_linear(x, case.weight, case.offs, weight_cache=cache).backward(case.dy)
    assert quantized == [(False, False), (True, False)]
    with torch.inference_mode():
        made_inside = case.weight.clone()
        mx.grouped_linear(case.x, made_inside, case.offs, weight_cache=cache)
    assert len(cache) == 1


def test_the_cache_forgets_weights_that_are_gone(device):
    """The next one may lie where they lay."""
    case, cache = problem(device, bias=None), mx.WeightCache()
    for factor in (1, 2, 3):
        weight = case.weight * factor
        y = mx.grouped_linear(case.x, weight, case.offs, weight_cache=cache)
        assert torch.equal(y[: case.used], mx.grouped_linear(case.x, weight, case.offs)[: case.used])
        del weight
        gc.collect()
    assert len(cache) == 0


def test_one_cache_for_several_weights(device, quantized):
    case, cache = problem(device, bias=None), mx.WeightCache()
    both = torch.stack([case.weight, case.weight * 3])
    for weight in (case.weight, *both, *both):  # views of one storage, too
        y = mx.grouped_linear(case.x, weight, case.offs, weight_cache=cache)
        assert torch.equal(y[: case.used], mx.grouped_linear(case.x, weight, case.offs)[: case.used])
    for options in ({"element_dtype": torch.float8_e5m2}, {"scaling": "floor"}):
        y = mx.grouped_linear(case.x, case.weight, case.offs, weight_cache=cache, **options)
        assert torch.equal(y[: case.used], mx.grouped_linear(case.x, case.weight, case.offs, **options)[: case.used])
    assert len(cache) == 5
    assert len(quantized) == 5 + 7


def test_no_cache_quantizes_each_time(device, quantized):
    case = problem(device, bias=None)
    step(case)
    assert quantized == [(False, False), (True, False)]
