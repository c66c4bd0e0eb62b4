"""Weight gradients in bfloat16, for `wgrad="bf16"`."""

from __future__ import annotations

import torch

from mxfp8_cutlass.checks import row_ends


@torch.no_grad()
def grouped_mm_of_rows(
    dy: torch.Tensor,
    x: torch.Tensor,
    offs: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """(M, N) and (M, K) -> (G, N, K): dy[rows of g]ᵀ x[rows of g], both rounded to bfloat16 first; plus out.

    On CUDA torch multiplies, and rounds to bfloat16 before a sum with `out`. On the CPU the product is float32's.
    """
    dy, x = dy.to(torch.bfloat16), x.to(torch.bfloat16)
    dtype = out_dtype if out is None else out.dtype
    if dy.is_cuda:
        product = torch._grouped_mm(dy.mT, x, offs=offs.to(torch.int32))  # noqa: SLF001 - public only since torch 2.10
    else:
        product = torch.zeros((offs.shape[0], dy.shape[1], x.shape[1]), dtype=torch.float32)
        ends = row_ends(offs, dy.shape[0])
        for target, begin, end in zip(product, [0, *ends], ends, strict=False):
            torch.mm(dy[begin:end].float().mT, x[begin:end].float(), out=target)
    if out is None:
        return product.to(dtype)
    return out.add_(product) if accumulate else out.copy_(product)
