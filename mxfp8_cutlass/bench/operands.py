"""A workload's tensors: random values, and the same in MXFP8, compact and folded."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from mxfp8_cutlass.bench.workloads import Workload
from mxfp8_cutlass.mxfp8_tensor import BLOCK, TILE_ROWS, MXFP8Tensor
from mxfp8_cutlass.quantize import fold, quantize


@dataclass(frozen=True)
class Operands:
    """What all methods multiply. Ends of groups are kept on the host too, for set-up and checks."""

    workload: Workload
    sizes: tuple[int, ...]
    offs: torch.Tensor
    """int32 (G,): the end row of each group."""
    x: torch.Tensor
    """bfloat16 (M, K)."""
    w: torch.Tensor
    """bfloat16 (G, N, K)."""
    xq: MXFP8Tensor
    wq: MXFP8Tensor
    """Compact: as quantized."""
    xf: MXFP8Tensor
    """Folded along K."""
    wf: MXFP8Tensor
    """Folded to tiles of 128 x 128."""

    @property
    def starts(self) -> list[int]:
        """The first row of each group."""
        return list(accumulate(self.sizes, initial=0))[:-1]


def make_operands(workload: Workload, device: torch.device, seed: int = 0) -> Operands:
    """Draw Gaussian operands on the device. Weights are quantized one expert at a time, so intermediates stay small."""
    groups, m, n, k = workload.groups, workload.m, workload.n, workload.k
    generator = torch.Generator(device).manual_seed(seed)
    sizes = workload.sizes
    x = torch.empty(m, k, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    w = torch.empty(groups, n, k, dtype=torch.bfloat16, device=device)
    data = torch.empty(groups, n, k, dtype=torch.uint8, device=device)
    scale = torch.empty(groups, n, k // BLOCK, dtype=torch.uint8, device=device)
    for group in range(groups):
        w[group].normal_(0.0, 0.05, generator=generator)
        expert = quantize(w[group])
        data[group] = expert.data.view(torch.uint8)
        scale[group] = expert.scale_bytes
    wq = MXFP8Tensor(data.view(torch.float8_e4m3fn), scale)
    return Operands(
        workload=workload,
        sizes=sizes,
        offs=torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device),
        x=x,
        w=w,
        xq=quantize(x),
        wq=wq,
        xf=quantize(x, fold=True),
        wf=fold(wq, TILE_ROWS),
    )


def values(xq: MXFP8Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a 2D tensor, exact in float64."""
    data = xq.data.view(torch.uint8)[rows].view(xq.dtype)
    return MXFP8Tensor(data, xq.scale_bytes[rows]).dequantize(torch.float64)


def expert_values(xq: MXFP8Tensor, group: int) -> torch.Tensor:
    """One matrix of a 3D tensor, exact in float64."""
    return MXFP8Tensor(xq.data[group], xq.scale_bytes[group]).dequantize(torch.float64)
