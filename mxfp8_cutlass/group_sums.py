"""Sums over the rows of groups, and biases of groups: torch's operations on either device, with no copy to the host.

Rows of no group are not used: what they hold, NaNs too, reaches no result.
"""

from __future__ import annotations

import torch

from mxfp8_cutlass.columns import group_of_token


@torch.no_grad()
def group_sums(x: torch.Tensor, offs: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Sum of each group's rows, times their factors: (M, N) -> float32 (G, N), in an order that sizes alone decide."""
    if x.shape[0] == 0:
        return torch.zeros((offs.shape[0], x.shape[1]), dtype=torch.float32, device=x.device)
    rows = x.to(torch.float32)
    if factors is not None:
        rows = rows * factors.to(torch.float32)[:, None]
    bounds = torch.cat([offs.new_zeros(1), offs]).to(torch.int64)
    # unsafe: its check of the offsets would copy them to the host.
    return torch.segment_reduce(rows, "sum", offsets=bounds, axis=0, initial=0, unsafe=True)


@torch.no_grad()
def add_scaled_bias(y: torch.Tensor, bias: torch.Tensor, bias_scale: torch.Tensor, offs: torch.Tensor) -> None:
    """y[i] += bias_scale[i] * bias[g] for each row i of group g, in float32, rounded once; in place."""
    group, held = group_of_token(offs, y.shape[0])
    total = y.to(torch.float32) + bias_scale.to(torch.float32)[:, None] * bias.to(torch.float32)[group]
    y.copy_(torch.where(held[:, None], total.to(y.dtype), y))


@torch.no_grad()
def bias_scale_grad(dy: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """dy[i] . bias[g] for each row i of group g: float32 (M,), 0 for rows of no group."""
    group, held = group_of_token(offs, dy.shape[0])
    dots = (dy.to(torch.float32) * bias.to(torch.float32)[group]).sum(-1)
    return torch.where(held, dots, dots.new_zeros(()))
