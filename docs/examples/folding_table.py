"""What folding costs on six kinds of input, in relative errors against a float64 product of the exact MXFP8 values.

python docs/examples/folding_table.py            # K = 4096; M = N = 1024 on a Hopper GPU, 256 on the CPU
python docs/examples/folding_table.py --check    # exits with 1 where a row is not what it should be
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from report import describe, error, pick_device, print_table, relative_error, share
from torch.distributions import StudentT
from torch.nn import functional

import mxfp8_cutlass as mx


@dataclass(frozen=True)
class Row:
    """Errors of the product, and what folding did to the operands, as shares."""

    bf16_rounding: float
    """The exact product rounded to bfloat16: what no kernel with that output can beat."""
    bf16_product: float
    """A bfloat16 product of the dequantized values."""
    fold_runs: float
    """Both operands folded with rows=1, multiplied in float64."""
    fold_tiles: float
    """The weights folded with rows=128."""
    folded_kernel: float
    """grouped_mm of the latter, bfloat16 output."""
    exact_kernel: float
    """grouped_mm(exact=True)."""
    mxfp8_noise: float
    """The exact MXFP8 product against that of the values before quantizing."""
    changed_a: float
    changed_b_runs: float
    changed_b_tiles: float
    mixed_tiles: float


ERRORS = (
    ("bf16 rounding alone", "bf16_rounding"),
    ("dequantized, bf16 product", "bf16_product"),
    ("fold alone, 1x128", "fold_runs"),
    ("fold alone, weights 128x128", "fold_tiles"),
    ("`grouped_mm`, folded", "folded_kernel"),
    ("`grouped_mm`, exact", "exact_kernel"),
    ("MXFP8 noise itself", "mxfp8_noise"),
)
SHARES = (
    ("activations changed, 1x128", "changed_a"),
    ("weights changed, 1x128", "changed_b_runs"),
    ("weights changed, 128x128", "changed_b_tiles"),
    ("mixed tiles", "mixed_tiles"),
)

Input = Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]]


def normal(*shape: int) -> torch.Tensor:
    """Standard normal values. Inputs are drawn on the CPU, so they are the same on every device."""
    return torch.randn(*shape)


def gaussian(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Standard normal activations; weights of standard deviation 0.02."""
    return normal(m, k), 0.02 * normal(n, k)


def student(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Heavy tails: activations without a variance."""
    return StudentT(2.0).sample((m, k)), 0.02 * StudentT(3.0).sample((n, k))


def outlier_channels(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One channel of 512 is 200 times as large: a block in 16, a run in 4."""
    x, w = gaussian(m, n, k)
    x[:, ::512] *= 200
    return x, w


def log_normal(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of the activations and rows of the weights that differ by orders of magnitude."""
    x, w = gaussian(m, n, k)
    return x * torch.exp(2 * normal(1, k)), w * torch.exp(1.5 * normal(n, 1))


def swiglu(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Products of a normal value and one that went through SiLU."""
    x, w = gaussian(m, n, k)
    return x * functional.silu(2 * normal(m, k)), w


def gradients(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiny, and nine in ten of them zero."""
    x, w = gaussian(m, n, k)
    return 1e-6 * x * (torch.rand(m, k) < 0.1), w


INPUTS: dict[str, Input] = {
    "Gaussian": gaussian,
    "Student t, 2 d.o.f.": student,
    "outlier channels x200": outlier_channels,
    "log-normal rows and columns": log_normal,
    "SwiGLU-like products": swiglu,
    "gradients, 90 % zeros": gradients,
}

MEASURED = {
    # bf16 rounding, bf16 product, fold alone 1x128, MXFP8 noise
    "Gaussian": (1.657e-3, 1.657e-3, 7.3e-8, 3.7e-2),
    "Student t, 2 d.o.f.": (1.690e-3, 1.690e-3, 4.3e-6, 3.3e-2),
    "outlier channels x200": (1.658e-3, 1.658e-3, 2.4e-6, 3.7e-2),
    "log-normal rows and columns": (1.674e-3, 1.674e-3, 1.0e-5, 3.6e-2),
    "SwiGLU-like products": (1.655e-3, 1.655e-3, 6.0e-7, 3.7e-2),
    "gradients, 90 % zeros": (1.656e-3, 1.656e-3, 6.3e-8, 3.7e-2),
}
"""What --check expects: measured on an H200 with torch's operations, before this package had kernels."""

FOLDED_KERNELS = {
    "Gaussian": 1.662e-3,
    "Student t, 2 d.o.f.": 1.710e-3,
    "outlier channels x200": 1.714e-3,
    "log-normal rows and columns": 1.705e-3,
    "SwiGLU-like products": 1.667e-3,
    "gradients, 90 % zeros": 1.656e-3,
}
"""The same for an FP8 kernel that promotes every 128 of K. Ours may be more exact but not less."""

ROUNDING_FACTOR = 1.05
"""Of errors that rounding to bfloat16 dominates."""
NOISE_FACTOR = 1.25
FOLD_FACTOR = 3.0
"""Of the errors of folding alone, which a few elements make: they depend on the draw."""


def measure(x: torch.Tensor, w: torch.Tensor) -> Row:
    """Measure the product of activations (M, K) with one expert's weights (N, K)."""
    offs = torch.tensor([len(x)], dtype=torch.int32, device=x.device)
    xq, wq = mx.quantize(x), mx.quantize(w[None])
    xf, a = mx.fold(xq, return_stats=True)
    w_runs, b_runs = mx.fold(wq, return_stats=True)
    w_tiles, b_tiles = mx.fold(wq, rows=128, return_stats=True)
    assert w_tiles.tile_scale is not None  # noqa: S101 - tells mypy so

    def product(left: mx.MXFP8Tensor, right: mx.MXFP8Tensor) -> torch.Tensor:
        return left.dequantize(torch.float64) @ right.dequantize(torch.float64)[0].T

    exact = product(xq, wq)
    dequantized = xq.dequantize(torch.bfloat16) @ wq.dequantize(torch.bfloat16)[0].T
    return Row(
        bf16_rounding=relative_error(exact.bfloat16(), exact),
        bf16_product=relative_error(dequantized, exact),
        fold_runs=relative_error(product(xf, w_runs), exact),
        fold_tiles=relative_error(product(xf, w_tiles), exact),
        folded_kernel=relative_error(mx.grouped_mm(xf, w_tiles, offs), exact),
        exact_kernel=relative_error(mx.grouped_mm(xq, wq, offs, exact=True), exact),
        mxfp8_noise=relative_error(exact, x.double() @ w.double().T),
        changed_a=int(a["changed_elements"]) / x.numel(),
        changed_b_runs=int(b_runs["changed_elements"]) / w.numel(),
        changed_b_tiles=int(b_tiles["changed_elements"]) / w.numel(),
        mixed_tiles=int(b_tiles["mixed_tiles"]) / w_tiles.tile_scale.numel(),
    )


def deviations(name: str, row: Row) -> list[str]:
    """Where a row is not as measured before; empty if nowhere."""
    rounding, product, fold_runs, noise = MEASURED[name]
    bounds = {
        "bf16_rounding": (rounding / ROUNDING_FACTOR, rounding * ROUNDING_FACTOR),
        "bf16_product": (product / ROUNDING_FACTOR, product * ROUNDING_FACTOR),
        "fold_runs": (fold_runs / FOLD_FACTOR, fold_runs * FOLD_FACTOR),
        "fold_tiles": (0.0, rounding / 20),
        "folded_kernel": (row.bf16_rounding / ROUNDING_FACTOR, FOLDED_KERNELS[name] * ROUNDING_FACTOR),
        "exact_kernel": (row.bf16_rounding / ROUNDING_FACTOR, row.bf16_rounding * ROUNDING_FACTOR),
        "mxfp8_noise": (noise / NOISE_FACTOR, noise * NOISE_FACTOR),
    }
    return [
        f"{name}: {field} is {error(value)}, expected {error(low)} to {error(high)}"
        for field, (low, high) in bounds.items()
        if not low <= (value := getattr(row, field)) <= high
    ]


def main() -> None:
    """Print two tables: errors, and what folding changed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, help="M and N")
    parser.add_argument("--check", action="store_true", help="compare with earlier measurements")
    parser.add_argument("--device", help="cpu or cuda; without it, a Hopper GPU if there is one")
    options = parser.parse_args()
    device = pick_device(options.device)
    size, k = options.rows or (1024 if device.type == "cuda" else 256), 4096

    rows = {}
    for seed, (name, draw) in enumerate(INPUTS.items()):
        torch.manual_seed(seed)
        rows[name] = measure(*(t.to(device) for t in draw(size, size, k)))
    print(f"{describe(device)}; M = N = {size}, K = {k}\n")
    errors = ((name, *(error(getattr(row, field)) for _, field in ERRORS)) for name, row in rows.items())
    print_table(("input", *(title for title, _ in ERRORS)), errors)
    print()
    shares = ((name, *(share(getattr(row, field)) for _, field in SHARES)) for name, row in rows.items())
    print_table(("input", *(title for title, _ in SHARES)), shares)

    if options.check:
        found = [text for name, row in rows.items() for text in deviations(name, row)]
        if found:
            sys.exit("\n" + "\n".join(found))
        print("\nall rows are as measured before")


if __name__ == "__main__":
    main()
