"""MXFP8 on real data: six trained feed-forward layers as six experts, what they see of real sentences as tokens.

python docs/examples/real_data.py                          # needs the realdata extra
python docs/examples/real_data.py --save build/real.npz    # takes the data elsewhere
python docs/examples/real_data.py --data build/real.npz    # needs no extra
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from minilm import FeedForward, capture
from report import describe, error, pick_device, print_table, relative_error, share

import mxfp8_cutlass as mx


@dataclass(frozen=True)
class Product:
    """One grouped product, in every form that is compared."""

    exact: torch.Tensor
    """Float64 product of the MXFP8 values."""
    unquantized: torch.Tensor
    """Float64 product of what was quantized."""
    folded_values: torch.Tensor
    """Float64 product of the folded values."""
    folded: torch.Tensor
    """grouped_mm of folded operands, bfloat16."""
    unfolded: torch.Tensor
    """grouped_mm(exact=True) of operands as quantized, bfloat16."""
    changed_a: float
    """Share of the tokens' elements that folding to runs changed."""
    changed_b: float
    """Share of the weights' elements that folding to tiles changed."""
    mixed_tiles: float
    """Share of the weights' tiles that keep a scale per run."""


def multiply(x: torch.Tensor, w: torch.Tensor) -> Product:
    """Multiply tokens (G, T, K) with weights (G, N, K): quantize, fold, grouped_mm, and the same in float64."""
    groups, per_group, k = x.shape
    offs = torch.arange(1, groups + 1, device=x.device) * per_group
    xq, wq = mx.quantize(x.view(-1, k)), mx.quantize(w)
    xf, x_stats = mx.fold(xq, return_stats=True)
    wf, w_stats = mx.fold(wq, rows=128, return_stats=True)
    assert wf.tile_scale is not None  # noqa: S101 - tells mypy so

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.double().view(x.shape) @ b.double().mT).flatten(0, 1)

    return Product(
        exact=product(xq.dequantize(torch.float64), wq.dequantize(torch.float64)),
        unquantized=product(x, w),
        folded_values=product(xf.dequantize(torch.float64), wf.dequantize(torch.float64)),
        folded=mx.grouped_mm(xf, wf, offs),
        unfolded=mx.grouped_mm(xq, wq, offs, exact=True),
        changed_a=int(x_stats["changed_elements"]) / x.numel(),
        changed_b=int(w_stats["changed_elements"]) / w.numel(),
        mixed_tiles=int(w_stats["mixed_tiles"]) / wf.tile_scale.numel(),
    )


def products(data: FeedForward, device: torch.device) -> dict[str, Product]:
    """Both matrices of the six layers; a layer is a group."""
    return {
        "fc1": multiply(data.tokens.to(device), data.fc1.to(device)),
        "fc2": multiply(data.hidden().to(device), data.fc2.to(device)),
    }


def main() -> None:
    """Print the tables of docs/measurements.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, metavar="FILE", help="read what --save wrote")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write weights and activations, and stop")
    parser.add_argument("--device", help="cpu or cuda; without it, a Hopper GPU if there is one")
    options = parser.parse_args()
    data = FeedForward.read(options.data) if options.data else capture()
    if options.save:
        data.save(options.save)
        print(f"{options.save}: {options.save.stat().st_size / 1e6:.1f} MB")
        return

    device = pick_device(options.device)
    groups, tokens, _ = data.tokens.shape
    print(f"{describe(device)}; {groups} experts, {tokens} tokens each\n")
    header = ("product", "bf16 rounding alone", "fold alone", "`grouped_mm`", "`exact=True`", "MXFP8 noise")
    shares = ("tokens changed", "weights changed", "mixed tiles")
    rows = []
    for name, p in products(data, device).items():
        weight = getattr(data, name)
        errors = (p.exact.bfloat16(), p.folded_values, p.folded, p.unfolded)
        rows.append(
            (
                f"{name}, K = {weight.shape[2]}, N = {weight.shape[1]}",
                *(error(relative_error(y, p.exact)) for y in errors),
                error(relative_error(p.exact, p.unquantized)),
                *(share(s) for s in (p.changed_a, p.changed_b, p.mixed_tiles)),
            )
        )
    print_table((*header, *shares), rows)


if __name__ == "__main__":
    main()
