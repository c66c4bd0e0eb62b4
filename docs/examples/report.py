"""What the example scripts share: where to run, how to compare, how to print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def pick_device(name: str | None = None) -> torch.device:
    """Return the device of that name or, without one, a Hopper GPU if there is one and else the CPU."""
    if name is not None:
        return torch.device(name)
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return torch.device("cuda" if hopper else "cpu")


def describe(device: torch.device) -> str:
    """Say what a device is, and what runs there."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, kernels"
    return "CPU, reference"


def relative_error(x: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of x - reference over that of reference, in float64."""
    return float((x.double() - reference).norm() / reference.norm())


def error(value: float) -> str:
    """Format a relative error."""
    return f"{value:.3e}"


def share(value: float) -> str:
    """Format a share as a percentage."""
    return f"{100 * value:.3g} %"


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table; its first column is text, the others are numbers."""
    print("| " + " | ".join(header) + " |")
    print("|---" + "|---:" * (len(header) - 1) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
