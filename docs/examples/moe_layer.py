"""The forward pass of a small Mixture-of-Experts layer in MXFP8, beside the same layer in float64.

Runs on a Hopper GPU if there is one, else on the reference. Exits with 1 if a product is less exact than it should be.

python docs/examples/moe_layer.py
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import torch
from report import describe, error, pick_device, relative_error
from torch.nn import functional

import mxfp8_cutlass as mx
from mxfp8_cutlass.cache import get_cubin

BF16_ROUNDING = 2.0**-8
"""Largest relative error of rounding to bfloat16; a product's own error has to drown in it."""


@dataclass(frozen=True)
class Experts:
    """Weights of all experts: in bfloat16 as trained, and in MXFP8 as multiplied."""

    gate_up: torch.Tensor
    """(G, 2 * intermediate, hidden): the gate's rows, then the up projection's."""
    down: torch.Tensor
    """(G, hidden, intermediate)."""
    gate_up_mx: mx.MXFP8Tensor
    down_mx: mx.MXFP8Tensor


@dataclass(frozen=True)
class Forward:
    """The layer's output, and what its two grouped products worked on."""

    y: torch.Tensor
    offs: torch.Tensor
    fc1: tuple[mx.MXFP8Tensor, mx.MXFP8Tensor, torch.Tensor]
    fc2: tuple[mx.MXFP8Tensor, mx.MXFP8Tensor, torch.Tensor]


def make_experts(groups: int, hidden: int, intermediate: int, device: torch.device) -> Experts:
    """Random weights. A training step would fold them again after each update of the weights."""
    gate_up = torch.randn(groups, 2 * intermediate, hidden).mul(hidden**-0.5).to(device, torch.bfloat16)
    down = torch.randn(groups, hidden, intermediate).mul(intermediate**-0.5).to(device, torch.bfloat16)
    folded = [mx.fold(mx.quantize(w), rows=128) for w in (gate_up, down)]
    return Experts(gate_up, down, *folded)


def route(x: torch.Tensor, router: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose experts. Returns, sorted by expert: each row's token, its weight, and the end row of each expert.

    Nothing is copied to the host, so the layer can be captured in a CUDA graph.
    """
    weight, expert = (x.float() @ router.T).softmax(-1).topk(top_k, dim=-1)
    weight = weight / weight.sum(-1, keepdim=True)
    by_expert, order = expert.flatten().sort(stable=True)
    offs = torch.searchsorted(by_expert, torch.arange(router.shape[0], device=x.device), right=True)
    return order // top_k, weight.flatten()[order], offs


def forward(x: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor, torch.Tensor], experts: Experts) -> Forward:
    """Permute, quantize, multiply, SwiGLU, quantize, multiply, combine."""
    token, weight, offs = routing
    xq = mx.quantize(x[token], fold=True)
    h = mx.grouped_mm(xq, experts.gate_up_mx, offs)
    gate, up = h.chunk(2, dim=-1)
    hq = mx.quantize(functional.silu(gate) * up, fold=True)
    z = mx.grouped_mm(hq, experts.down_mx, offs)
    y = torch.zeros(x.shape, device=x.device).index_add_(0, token, z * weight[:, None])
    return Forward(y.to(x.dtype), offs, (xq, experts.gate_up_mx, h), (hq, experts.down_mx, z))


def product(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The grouped product in float64, a group at a time."""
    ends = offs.tolist()
    groups = zip([0, *ends], ends, b, strict=False)
    return torch.cat([a[begin:end].double() @ w.double().T for begin, end, w in groups])


def forward_float64(
    x: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor, torch.Tensor], experts: Experts
) -> torch.Tensor:
    """The same layer without MXFP8."""
    token, weight, offs = routing
    gate, up = product(x[token], experts.gate_up, offs).chunk(2, dim=-1)
    z = product(functional.silu(gate) * up, experts.down, offs)
    return torch.zeros(x.shape, dtype=torch.float64, device=x.device).index_add_(0, token, z * weight[:, None].double())


def main() -> None:
    """Run the layer and print its errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (("tokens", 500), ("hidden", 1024), ("intermediate", 768), ("experts", 8), ("top-k", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", help="cpu or cuda; without it, a Hopper GPU if there is one")
    options = parser.parse_args()
    device = pick_device(options.device)

    torch.manual_seed(0)
    experts = make_experts(options.experts, options.hidden, options.intermediate, device)
    x = torch.randn(options.tokens, options.hidden).to(device, torch.bfloat16)
    router = torch.randn(options.experts, options.hidden).to(device)
    routing = route(x, router, options.top_k)
    result = forward(x, routing, experts)

    rows = result.offs.diff(prepend=result.offs.new_zeros(1)).tolist()
    print(f"{describe(device)}; {options.tokens} tokens, top {options.top_k} of {options.experts} experts, rows {rows}")
    worst = 0.0
    for name, (a, b, out) in (("fc1", result.fc1), ("fc2", result.fc2)):
        n, k = b.shape[-2:]
        config = mx.select_kernel([(m, n, k) for m in rows], "90a")
        cubin = get_cubin(config)  # from the bundle or the cache, or compiled now; needs no GPU
        exact = product(a.dequantize(torch.float64), b.dequantize(torch.float64), result.offs)
        worst = max(worst, deviation := relative_error(out, exact))
        print(f"{name}: {tuple(a.shape)} x {tuple(b.shape)}, error {error(deviation)} against float64")
        print(
            f"     for these sizes on Hopper: {config.name}, {cubin.registers} registers, {cubin.spill_bytes} B spilled"
        )
    whole = relative_error(result.y, forward_float64(x, routing, experts))
    print(f"layer: error {error(whole)} against float64 without MXFP8, nearly all of it MXFP8's own noise")
    if not worst < BF16_ROUNDING:
        sys.exit(f"a product's error, {error(worst)}, exceeds that of rounding to bfloat16, {error(BF16_ROUNDING)}")


if __name__ == "__main__":
    main()
