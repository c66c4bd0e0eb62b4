"""Problems for grouped_linear: arguments with poisoned tails, one training step, and checks of what it gives."""

from __future__ import annotations

from dataclasses import dataclass, field

import bounds
import torch
from products import E4M3, generator, offsets
from token_groups import check_columnwise_product, tokens_of

import mxfp8_cutlass as mx

SIZES = [100, 0, 1, 63, 120]
NAMES = ("x", "weight", "bias", "bias_scale")


@dataclass
class Problem:
    """Leaves, the output's gradient, and groups."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    bias_scale: torch.Tensor | None
    dy: torch.Tensor
    offs: torch.Tensor
    ends: list[int] = field(default_factory=list)

    @property
    def used(self):
        """Rows of groups."""
        return self.ends[-1]

    def leaves(self, needed=NAMES):
        """The arguments, of which those in `needed` require gradients; fresh, without gradients."""
        arguments = {name: getattr(self, name) for name in NAMES}
        return {
            name: None if value is None else value.detach().clone().requires_grad_(name in needed)
            for name, value in arguments.items()
        }


def problem(
    device="cpu", *, M=320, N=96, K=160, sizes=SIZES, dtype=torch.bfloat16, weight_dtype=torch.bfloat16, bias="scaled"
):
    """A random one; bias: None, "plain" or "scaled". Tails of x, dy and bias_scale are NaN."""
    source = generator(device, 7)

    def randn(*shape):
        return torch.randn(shape, generator=source, device=device)

    used = sum(sizes)
    x, dy, scale = randn(M, K), randn(M, N) * 0.01, randn(M).abs()
    for rows in (x, dy, scale):
        rows[used:] = float("nan")
    weight, added = randn(len(sizes), N, K) / 12, randn(len(sizes), N)
    return Problem(
        x.to(dtype),
        weight.to(weight_dtype),
        added.to(weight_dtype) if bias else None,
        scale if bias == "scaled" else None,
        dy.to(dtype),
        offsets(sizes, device),
        offsets(sizes).tolist(),
    )


def step(case, needed=NAMES, *, function=mx.grouped_linear, **options):
    """y and the leaves' gradients (None for those that are not needed)."""
    leaves = case.leaves(needed)
    y = function(leaves["x"], leaves["weight"], case.offs, leaves["bias"], bias_scale=leaves["bias_scale"], **options)
    if y.requires_grad:
        y.backward(case.dy)
    return y.detach(), {name: None if leaf is None else leaf.grad for name, leaf in leaves.items()}


def groups_of(case):
    return [(g, rows) for g, rows in tokens_of(case.ends) if rows.stop > rows.start]


def check_output(y, case, xq=None):
    """Of one product, and where the bias is scaled, of an addition in float32 that is rounded again."""
    xq = mx.quantize(case.x, fold=True) if xq is None else xq
    wq = mx.fold(mx.quantize(case.weight), 128)
    if case.bias_scale is None:
        bias = None if case.bias is None else case.bias.to(y.dtype)
        bounds.check_product(y, xq, wq, case.ends, bias=bias)
        return
    for g, rows in groups_of(case):
        product = (bounds.values(xq)[rows] @ bounds.values(wq)[g].mT).to(y.dtype)
        added = case.bias_scale[rows, None].double() * case.bias[g].double()
        slack = 2 * bounds.half_ulp(product.double(), y.dtype) + bounds.half_ulp(product.double() + added, y.dtype) * 2
        assert bool(((y[rows].double() - product.double() - added).abs() <= slack + 1e-5).all()), f"group {g}"


def check_gradients(grads, case, grad_dtype=E4M3, lhs=None, rhs=None):
    """dX as a product, dW too, db and ds as float32 sums."""
    dyq, wq = mx.quantize(case.dy, grad_dtype, fold=True), mx.fold(mx.quantize(case.weight, dim=-2), 128)
    if grads["x"] is not None:
        assert grads["x"].dtype == case.x.dtype
        bounds.check_product(grads["x"], dyq, wq, case.ends)
    if grads["weight"] is not None:
        lhs = mx.quantize_columnwise(case.dy, case.offs, grad_dtype, fold_rows=1) if lhs is None else lhs
        rhs = mx.quantize_columnwise(case.x, case.offs, fold_rows=128) if rhs is None else rhs
        assert grads["weight"].dtype == case.weight.dtype
        check_columnwise_product(grads["weight"], lhs, rhs, [r.stop - r.start for _, r in tokens_of(case.ends)])
    check_bias_gradients(grads, case)


def check_bias_gradients(grads, case):
    """Float32 sums of dY as it arrived."""
    dy, factors = case.dy.double(), case.bias_scale
    if grads["bias"] is not None:
        rows = dy if factors is None else dy * factors.double()[:, None]
        exact = torch.stack([rows[tokens].sum(0) for _, tokens in tokens_of(case.ends)])
        slack = torch.stack([rows[tokens].abs().sum(0) for _, tokens in tokens_of(case.ends)]) * 400 * 2.0**-24
        got = grads["bias"]
        assert bool((((exact - slack).to(got.dtype) <= got) & (got <= (exact + slack).to(got.dtype))).all())
    if grads["bias_scale"] is not None:
        assert not grads["bias_scale"][case.used :].any()
        for g, tokens in groups_of(case):
            products = dy[tokens] * case.bias[g].double()
            difference = (grads["bias_scale"][tokens].double() - products.sum(-1)).abs()
            assert bool((difference <= 1.01 * products.shape[1] * 2.0**-24 * products.abs().sum(-1)).all())


def same(one, other, case):
    """Whether two results of `step` have the same bits, rows of no group aside."""
    assert torch.equal(one[0][: case.used], other[0][: case.used])
    for name in NAMES:
        if one[1][name] is None:
            assert other[1][name] is None
            continue
        used = slice(case.used if name == "x" else None)
        assert torch.equal(one[1][name][used], other[1][name][used]), name
