"""grouped_linear's output and gradients against the formulas, with the operands that it multiplies dequantized."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
import torch
from linear_problems import NAMES, SIZES, check_bias_gradients, check_gradients, check_output, groups_of, problem, step
from products import E4M3, E5M2, is_poisoned, offsets, poisoned
from token_groups import SPLITS, tokens_of

import mxfp8_cutlass as mx
from mxfp8_cutlass import linear_ops
from mxfp8_cutlass.group_sums import add_scaled_bias
from mxfp8_cutlass.grouped_mxfp8 import GroupedMXFP8


@pytest.mark.parametrize("bias", [None, "plain", "scaled"])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("M", [0, 320])
def test_splits(device, M, split, bias):
    case = problem(device, M=M, sizes=SPLITS[split](M), bias=bias)
    y, grads = step(case)
    check_output(y, case)
    check_gradients(grads, case)


@pytest.mark.parametrize("shape", [(1024, 256, 512), (300, 32, 32), (65, 160, 96)], ids=str)
def test_shapes(device, shape):
    M, N, K = shape
    case = problem(device, M=M, N=N, K=K, sizes=[M // 2, 0, M // 3])
    y, grads = step(case)
    check_output(y, case)
    check_gradients(grads, case)


@pytest.mark.parametrize("grad_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_types(device, dtype, weight_dtype, grad_dtype):
    case = problem(device, dtype=dtype, weight_dtype=weight_dtype, bias="plain")
    y, grads = step(case, grad_element_dtype=grad_dtype)
    assert y.dtype == dtype
    check_output(y, case)
    check_gradients(grads, case, grad_dtype)


@pytest.mark.parametrize("wgrad", ["mxfp8", "bf16"])
def test_every_subset_of_gradients(device, wgrad):
    """Each gradient has the same bits, whatever else is asked for."""
    case = problem(device)
    y, grads = step(case, wgrad=wgrad)
    for needed in chain.from_iterable(combinations(NAMES, n) for n in range(5)):
        other_y, others = step(case, needed, wgrad=wgrad)
        assert torch.equal(other_y[: case.used], y[: case.used])
        for name in NAMES:
            if name not in needed:
                assert others[name] is None
                continue
            used = slice(case.used if name == "x" else None)
            assert torch.equal(others[name][used], grads[name][used]), (name, needed)


def test_rows_of_no_group_reach_nothing(device):
    """NaNs in the tails of x, dy and bias_scale."""
    for wgrad in ("mxfp8", "bf16"):
        y, grads = step(problem(device), wgrad=wgrad)
        assert all(torch.isfinite(grads[name]).all() for name in ("weight", "bias", "bias_scale"))
        assert torch.isfinite(y[: sum(SIZES)]).all()


def test_weight_gradient_in_bfloat16(device):
    case = problem(device, weight_dtype=torch.float32)
    y, grads = step(case, wgrad="bf16")
    check_output(y, case)
    check_bias_gradients(grads, case)
    for g, rows in tokens_of(case.ends):
        a, b = case.dy[rows].double().mT, case.x[rows].double().mT
        slack = 300 * 2.0**-24 * (a.abs() @ b.abs().mT) + (2.0**-8 if device.type == "cuda" else 0) * (a @ b.mT).abs()
        assert bool(((grads["weight"][g].double() - a @ b.mT).abs() <= slack).all())


def test_what_is_saved(device):
    """Quantized columns and no bfloat16 activations; nothing of x for a frozen weight."""
    case = problem(device, M=640, N=32, K=256, sizes=[300, 300], bias=None)

    def saved(needed, **options):
        tensors = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: tensors.append(t) or t, lambda t: t):
            leaves = case.leaves(needed)
            mx.grouped_linear(leaves["x"], leaves["weight"], case.offs, **options)
        return [t for t in tensors if t.numel() and t.data_ptr() != leaves["weight"].data_ptr()]

    assert {t.dtype for t in saved(NAMES)} == {torch.uint8, torch.int32}
    assert sum(t.nbytes for t in saved(NAMES)) < 1.05 * 256 * (640 + 2 * 128)
    assert [t.dtype for t in saved(("x",))] == [torch.int32]
    assert torch.bfloat16 in {t.dtype for t in saved(("weight",), wgrad="bf16")}


def test_a_frozen_part_costs_nothing(device, monkeypatch):
    """No columns for a frozen weight, no rows of dY for a frozen input, whose weight may change before backward."""
    case = problem(device, bias=None)
    asked = []
    original = linear_ops.both_directions

    def spy(*arguments, rowwise, columnwise, **options):
        asked.append((rowwise, columnwise))
        return original(*arguments, rowwise=rowwise, columnwise=columnwise, **options)

    monkeypatch.setattr(linear_ops, "both_directions", spy)
    for needed, options, expected in (
        (("x",), {}, [(1, None), (1, None)]),
        (("weight",), {}, [(1, 128), (None, 1)]),
        (("x", "weight"), {}, [(1, 128), (1, 1)]),
        (("weight",), {"wgrad": "bf16"}, [(1, None)]),
        ((), {}, [(1, None)]),
    ):
        asked.clear()
        step(case, needed, **options)
        assert asked == expected, needed
    leaves = case.leaves(("weight",))
    y = mx.grouped_linear(leaves["x"], leaves["weight"], case.offs)
    with torch.no_grad():
        leaves["weight"].zero_()
    y.backward(case.dy)
    assert torch.equal(leaves["weight"].grad, step(case, ("weight",))[1]["weight"])


def test_scaled_bias_leaves_rows_of_no_group_alone(device):
    case = problem(device)
    y = poisoned(case.dy.shape, torch.bfloat16, device)
    y[: case.used] = 0
    add_scaled_bias(y, case.bias, case.bias_scale, case.offs)
    assert is_poisoned(y[case.used :])
    for g, rows in groups_of(case):
        assert torch.equal(y[rows], (case.bias_scale[rows, None] * case.bias[g].float()).to(torch.bfloat16))


@pytest.mark.parametrize("wgrad", ["mxfp8", "bf16"])
def test_main_grad(device, wgrad):
    """Two micro-batches add up in it, in float32; groups without tokens leave it as it is."""
    case = problem(device, bias=None)
    main_grad = torch.randn(case.weight.shape, device=device)
    old = main_grad.clone()
    single = step(case, wgrad=wgrad, main_grad=torch.zeros_like(main_grad))[1]
    assert single["weight"] is None
    total = torch.zeros_like(main_grad)
    step(case, wgrad=wgrad, main_grad=total)
    for _ in range(2):
        _, grads = step(case, wgrad=wgrad, main_grad=main_grad)
        assert grads["weight"] is None
        assert grads["x"] is not None
    torch.testing.assert_close(main_grad, old + 2 * total, rtol=1e-5, atol=1e-5)
    assert torch.equal(main_grad[1], old[1])


def test_micro_batches_that_overlap(device):
    """Forward, forward, backward, backward: main_grad changes in between."""
    case = problem(device, bias=None)
    main_grad = torch.zeros(case.weight.shape, device=device)
    leaves = [case.leaves() for _ in range(2)]
    ys = [mx.grouped_linear(one["x"], one["weight"], case.offs, main_grad=main_grad) for one in leaves]
    for y in ys:
        y.backward(case.dy)
    want = torch.zeros_like(main_grad)
    for _ in range(2):
        step(case, main_grad=want)
    assert torch.equal(main_grad, want)


def arrived(case, dtype=E4M3, *, carrier=True, swizzled=False):
    """case.x as it comes out of an all-to-all in FP8, and the tensor that its gradient flows to."""
    xq = mx.quantize(case.x, dtype)
    leaf = torch.zeros((), dtype=torch.bfloat16, device=case.x.device).expand(case.x.shape).detach().requires_grad_()
    scale = mx.swizzle_scales(xq.scale, case.offs) if swizzled else xq.scale
    return GroupedMXFP8(xq.data, scale, case.offs, swizzled=swizzled, carrier=leaf if carrier else None), leaf, xq


@pytest.mark.parametrize("wgrad", ["mxfp8", "bf16"])
@pytest.mark.parametrize("carrier", [False, True])
def test_tokens_that_arrive_quantized(device, carrier, wgrad):
    case = problem(device)
    x, leaf, xq = arrived(case, carrier=carrier)
    before = xq.data.view(torch.uint8).clone()
    leaves = case.leaves()
    y = mx.grouped_linear(x, leaves["weight"], None, leaves["bias"], bias_scale=leaves["bias_scale"], wgrad=wgrad)
    y.backward(case.dy)
    grads = {"x": leaf.grad} | {name: leaves[name].grad for name in NAMES[1:]}
    assert (grads["x"] is not None) == carrier
    check_output(y, case, xq)
    if wgrad == "mxfp8":
        check_gradients(grads, case, rhs=mx.requantize_columnwise(x, fold_rows=128).columnwise)
    else:
        values = xq.dequantize(torch.float64)
        for g, rows in groups_of(case):
            want = case.dy[rows].double().mT @ values[rows]
            torch.testing.assert_close(grads["weight"][g].double(), want, rtol=2**-7, atol=1e-4)
    assert torch.equal(xq.data.view(torch.uint8), before)


def test_swizzled_tokens(device):
    """Forward and dgrad take them; the weight's gradient does not."""
    case = problem(device, bias=None)
    compact, leaf, xq = arrived(case)
    swizzled, other, _ = arrived(case, swizzled=True)
    weight = case.weight.clone()
    y, z = (mx.grouped_linear(x, weight, case.offs) for x in (compact, swizzled))
    assert torch.equal(y[: case.used], z[: case.used])
    check_output(z, case, xq)
    y.backward(case.dy)
    z.backward(case.dy)
    assert torch.equal(leaf.grad[: case.used], other.grad[: case.used])
    with pytest.raises(ValueError, match="x has swizzled scales and weight needs a gradient"):
        mx.grouped_linear(swizzled, weight.requires_grad_(), case.offs)


def test_the_same_in_each_run(device):
    case = problem(device)
    one, other = step(case), step(case)
    assert torch.equal(one[0][: case.used], other[0][: case.used])
    for name in NAMES:
        used = slice(case.used if name == "x" else None)
        assert torch.equal(one[1][name][used], other[1][name][used])


CASE = problem(N=32, K=64, M=10, sizes=[3, 4])
BAD = [
    (TypeError, "x is a list", {"x": []}),
    (TypeError, "x has dtype torch.float64", {"x": CASE.x.double()}),
    (ValueError, r"x has shape \(10, 32\): its K must be that of weight, 64", {"x": CASE.x[:, :32]}),
    (ValueError, r"x has shape \(1, 10, 64\)", {"x": CASE.x[None]}),
    (TypeError, "x has elements of type torch.float8_e5m2", {"x": arrived(CASE, E5M2)[0]}),
    (ValueError, r"weight has shape \(2, 16, 64\)", {"weight": CASE.weight[:, :16]}),
    (ValueError, "weight has strides", {"weight": CASE.weight.mT.contiguous().mT}),
    (TypeError, "weight is a NoneType", {"weight": None}),
    (ValueError, "offs is None", {"offs": None}),
    (ValueError, r"offs has shape \(3,\)", {"offs": offsets([1, 1, 1])}),
    (ValueError, r"offs is \[5, 4\]", {"offs": torch.tensor([5, 4])}),
    (ValueError, r"bias has shape \(2, 16\)", {"bias": CASE.bias[:, :16]}),
    (ValueError, "bias_scale is given and bias is None", {"bias": None}),
    (ValueError, r"bias_scale has shape \(3,\)", {"bias_scale": torch.ones(3)}),
    (ValueError, r"main_grad has shape \(2, 32\)", {"main_grad": torch.zeros(2, 32)}),
    (ValueError, "wgrad is 'fp8'", {"wgrad": "fp8"}),
    (ValueError, "scaling is 'up'", {"scaling": "up"}),
    (TypeError, "grad_element_dtype is torch.float32", {"grad_element_dtype": torch.float32}),
    (TypeError, "weight_cache is a dict", {"weight_cache": {}}),
    (TypeError, "delayed_wgrad is a list", {"delayed_wgrad": []}),
]


@pytest.mark.parametrize(("error", "match", "changes"), BAD, ids=[str(case[1]) for case in BAD])
def test_bad_input(error, match, changes):
    good = {"x": CASE.x, "weight": CASE.weight, "offs": CASE.offs, "bias": CASE.bias, "bias_scale": CASE.bias_scale}
    with pytest.raises(error, match=match):
        mx.grouped_linear(**(good | changes))
