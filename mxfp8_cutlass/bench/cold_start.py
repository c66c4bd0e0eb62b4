"""A program: the first calls in a new process, as JSON (seconds). Run by host.py."""

from __future__ import annotations

import json
import sys
import time

_BEGIN = time.perf_counter()

import torch  # noqa: E402 - importing is timed

_TORCH = time.perf_counter()

import mxfp8_cutlass as mx  # noqa: E402

_PACKAGE = time.perf_counter()


def main(device: torch.device) -> None:
    """Quantize, fold and multiply once, then once more."""
    x = torch.randn(256, 512, dtype=torch.bfloat16, device=device)
    w = torch.randn(2, 256, 512, dtype=torch.bfloat16, device=device)
    offs = torch.tensor([100, 256], dtype=torch.int32, device=device)

    def product() -> float:
        begin = time.perf_counter()
        mx.grouped_mm(mx.quantize(x, fold=True), mx.fold(mx.quantize(w), rows=128), offs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    ready = time.perf_counter()
    times = {
        "import torch": _TORCH - _BEGIN,
        "import mxfp8_cutlass": _PACKAGE - _TORCH,
        "CUDA context and operands": ready - _PACKAGE,
        "first calls": product(),
        "same calls again": product(),
    }
    sys.stdout.write(json.dumps(times) + "\n")


if __name__ == "__main__":
    main(torch.device(sys.argv[1]))
