"""grouped_linear under torch's machinery: operator checks, compiling, modules, delayed gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from linear_problems import NAMES, problem, same, step

import mxfp8_cutlass as mx
from mxfp8_cutlass import linear_ops
from mxfp8_cutlass.grouped_mxfp8 import GroupedMXFP8


def forward_arguments(case, leaves, *, wgrad="mxfp8", data=(None, None)):
    x, weight, bias, bias_scale = (leaves[name] for name in NAMES)
    types = (torch.float8_e4m3fn, torch.float8_e4m3fn, "rceil", wgrad)
    needed = (weight.requires_grad, x.requires_grad)
    return (x, *data, weight, case.offs, bias, bias_scale, None, False, *types, *needed, 0, 0)


def clean(**options):
    """A problem without NaNs, which opcheck would compare."""
    case = problem(M=284, sizes=[100, 0, 1, 63, 120], **options)
    assert case.used == 284
    return case


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("bias", [None, "plain", "scaled"])
@pytest.mark.parametrize("wgrad", ["mxfp8", "bf16"])
def test_operator_of_the_layer(wgrad, bias):
    case = clean(bias=bias)
    arguments = forward_arguments(case, case.leaves(), wgrad=wgrad)
    torch.library.opcheck(linear_ops.forward, arguments, test_utils=CHECKS)


def test_operators_of_backward():
    case = clean()
    dtypes = (torch.float8_e4m3fn, torch.float8_e5m2)
    for weight, columns, bias_grad in ((case.weight, True, True), (None, False, True), (None, True, False)):
        arguments = (case.dy, weight, case.offs, case.bias_scale, *dtypes, "rceil", columns, bias_grad, 0)
        torch.library.opcheck(linear_ops.backward, arguments, test_utils=CHECKS)
    torch.library.opcheck(linear_ops.bias_scale_grad, (case.dy, case.bias, case.offs), test_utils=CHECKS)
    dy = mx.quantize_columnwise(case.dy, case.offs, torch.float8_e5m2, fold_rows=1).tensor
    x = mx.quantize_columnwise(case.x, case.offs, fold_rows=128).tensor
    rows = mx.quantize(case.x)
    empty = torch.empty(0, dtype=torch.uint8)
    dy_parts = [dy.data.view(torch.uint8), dy.scale_bytes, empty]
    x_parts = [x.data.view(torch.uint8), x.scale_bytes, x.tile_scale]
    row_parts = [rows.data.view(torch.uint8), rows.scale_bytes]
    for lhs, rhs in ((dy_parts, x_parts), (dy_parts, row_parts), ([case.dy], [case.x]), ([case.dy], row_parts)):
        arguments = (lhs, rhs, case.offs, 284, *dtypes, "rceil")
        torch.library.opcheck(linear_ops.weight_grad, (*arguments, torch.float32), test_utils=CHECKS)
        out = torch.zeros(case.weight.shape)
        torch.library.opcheck(linear_ops.weight_grad_, (out, *arguments), test_utils=CHECKS)


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()


@pytest.mark.parametrize("wgrad", ["mxfp8", "bf16"])
@pytest.mark.parametrize("needed", [NAMES, ("x",), ("weight", "bias"), ()], ids=str)
def test_compiled(device, compiled, needed, wgrad):
    case = problem(device)
    function = compiled(mx.grouped_linear)
    same(step(case, needed, function=function, wgrad=wgrad), step(case, needed, wgrad=wgrad), case)


def test_compiled_for_any_number_of_tokens(device, compiled):
    function = compiled(mx.grouped_linear)
    for M in (320, 300, 450, 0):
        case = problem(device, M=M, sizes=[M // 3, 0, M // 2])
        same(step(case, function=function), step(case), case)


def test_compiled_with_a_cache_and_main_grad(device, compiled):
    case = problem(device, bias=None)
    cache = mx.WeightCache()
    totals = [torch.ones(case.weight.shape, device=device) for _ in range(2)]
    function = compiled(lambda *args, **options: mx.grouped_linear(*args, weight_cache=cache, **options))
    for _ in range(2):
        got = step(case, function=function, main_grad=totals[0])
        same(got, step(case, main_grad=totals[1]), case)
    assert torch.equal(*totals)


def test_compiled_with_tokens_that_arrive_quantized(device, compiled):
    case = problem(device, bias=None)
    xq = mx.quantize(case.x)

    def layer(data, scale, offs, carrier, weight):
        return mx.grouped_linear(GroupedMXFP8(data, scale, offs, carrier=carrier), weight)

    results = []
    for function in (layer, compiled(layer)):
        carrier = torch.zeros(case.x.shape, dtype=torch.bfloat16, device=device, requires_grad=True)
        weight = case.weight.clone().requires_grad_()
        y = function(xq.data, xq.scale, case.offs, carrier, weight)
        y.backward(case.dy)
        results.append((y.detach(), dict.fromkeys(NAMES) | {"x": carrier.grad, "weight": weight.grad}))
    same(*results, case)


def test_module(device):
    case = problem(device)
    layer = mx.GroupedLinear(5, 160, 96, bias=True, device=device)
    with torch.no_grad():
        layer.weight.copy_(case.weight)
        layer.bias.copy_(case.bias)
    x, scale = case.x.clone().requires_grad_(), case.bias_scale.clone().requires_grad_()
    y = layer(x, case.offs, scale)
    y.backward(case.dy)
    grads = {"x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad, "bias_scale": scale.grad}
    same((y.detach(), grads), step(case), case)
    assert repr(layer) == "GroupedLinear(groups=5, in_features=160, out_features=96, bias=True, wgrad='mxfp8')"
    assert set(layer.state_dict()) == {"weight", "bias"}
    twin = copy.deepcopy(layer)
    assert twin.weight_cache is not layer.weight_cache
    assert torch.equal(twin(case.x, case.offs, case.bias_scale)[: case.used], y[: case.used])


def test_initial_values():
    layer = mx.GroupedLinear(4, 64, 96, bias=True, dtype=torch.float32)
    assert layer.weight.abs().max() <= 1 / 8
    assert layer.weight.std() > 0.06
    assert layer.bias.shape == (4, 96)
    assert mx.GroupedLinear(4, 64, 96, cache_weight=False).weight_cache is None


@pytest.mark.parametrize("wgrad", ["mxfp8", "bf16"])
@pytest.mark.parametrize("main_grad", [False, True])
def test_delayed_weight_gradient(device, main_grad, wgrad):
    case = problem(device, weight_dtype=torch.float32)
    layers = [
        mx.GroupedLinear(5, 160, 96, wgrad=wgrad, delay_wgrad=delay, device=device, dtype=torch.float32)
        for delay in (False, True)
    ]
    for layer in layers:
        with torch.no_grad():
            layer.weight.copy_(case.weight)
        if main_grad:
            layer.weight.main_grad = torch.ones_like(layer.weight)
        for _ in range(2):
            layer(case.x, case.offs).backward(case.dy)
    plain, delayed = layers
    assert delayed.weight.grad is None
    assert len(delayed.delayed_wgrad) == 2
    delayed.backward_weight()
    assert len(delayed.delayed_wgrad) == 0
    if main_grad:
        assert delayed.weight.grad is None
        assert torch.equal(delayed.weight.main_grad, plain.weight.main_grad)
    else:
        torch.testing.assert_close(delayed.weight.grad, plain.weight.grad, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="delay_wgrad is False"):
        plain.backward_weight()


def test_delayed_weight_gradients_are_not_compiled(compiled):
    case = problem(bias=None)
    queue = mx.DelayedWgrad()
    with pytest.raises(Exception, match="delayed_wgrad is given within torch"):
        step(case, function=compiled(mx.grouped_linear), delayed_wgrad=queue)


def test_training_reduces_the_loss(device):
    """Experts learn to copy another layer's."""
    case = problem(device, bias=None)
    target = mx.grouped_linear(case.x, case.weight, case.offs)[: case.used].float()
    layer = mx.GroupedLinear(5, 160, 96, device=device, dtype=torch.float32)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        loss = (layer(case.x, case.offs)[: case.used].float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
