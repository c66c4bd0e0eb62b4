"""Problems for grouped_linear: arguments with poisoned tails, and one training step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from products import generator, offsets

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
