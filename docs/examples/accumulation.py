"""What adding in the tensor cores costs: FP8 values with scales of 1 at K = 8192, against their float64 product.

python docs/examples/accumulation.py
"""

from __future__ import annotations

import argparse

import torch
from report import describe, error, pick_device, print_table, relative_error

import mxfp8_cutlass as mx


def positive(rows: int, k: int) -> torch.Tensor:
    """All of one sign: nothing cancels, so what is cut off adds up."""
    return (80 * torch.randn(rows, k)).abs()


def shifted(rows: int, k: int) -> torch.Tensor:
    """A mean of one standard deviation."""
    return 60 * torch.randn(rows, k) + 60


def centred(rows: int, k: int) -> torch.Tensor:
    """A mean of zero."""
    return 80 * torch.randn(rows, k)


INPUTS = {"positive": positive, "mean of one sigma": shifted, "mean of zero": centred}


def operand(x: torch.Tensor, device: torch.device) -> mx.MXFP8Tensor:
    """Round to E4M3 and give every block the scale 1."""
    data = x.clamp(-440, 440).to(torch.float8_e4m3fn)
    one = torch.full((*x.shape[:-1], x.shape[-1] // 32), 127, dtype=torch.uint8)
    return mx.MXFP8Tensor(data, one).to(device)


def products(a: mx.MXFP8Tensor, b: mx.MXFP8Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By name: each product of (M, K) and (1, N, K), beside the float64 product of the values that it multiplied."""

    def float64(left: mx.MXFP8Tensor, right: mx.MXFP8Tensor) -> torch.Tensor:
        return left.dequantize(torch.float64) @ right.dequantize(torch.float64)[0].T

    offs = torch.tensor([a.shape[0]], dtype=torch.int32, device=a.device)
    a_folded, b_folded = mx.fold(a), mx.fold(b, rows=128)
    exact, of_folded = float64(a, b), float64(a_folded, b_folded)
    return {
        "bf16 rounding alone": (exact.bfloat16(), exact),
        "`grouped_mm`, folded": (mx.grouped_mm(a_folded, b_folded, offs), of_folded),
        "`grouped_mm`, exact": (mx.grouped_mm(a, b, offs, exact=True), exact),
    }


def bias(y: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean error over mean magnitude."""
    return float((y.double() - expected).mean() / expected.abs().mean())


def main() -> None:
    """Print a table: the bias where the data have a mean, the relative error everywhere."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, help="M and N")
    parser.add_argument("--device", help="cpu or cuda; without it, a Hopper GPU if there is one")
    options = parser.parse_args()
    device = pick_device(options.device)
    size, k = options.rows or (1536 if device.type == "cuda" else 256), 8192

    print(f"{describe(device)}; M = N = {size}, K = {k}\n")
    torch.manual_seed(0)
    rows = []
    for name, draw in INPUTS.items():
        a, b = operand(draw(size, k), device), operand(draw(size, k)[None], device)
        for product, (y, expected) in products(a, b).items():
            rows.append((f"{name}: {product}", error(relative_error(y, expected)), f"{bias(y, expected):+.1e}"))
    print_table(("data: product", "relative error", "mean error / mean magnitude"), rows)


if __name__ == "__main__":
    main()
