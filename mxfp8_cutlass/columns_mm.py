"""Products that `offs` cuts along the contraction: weight gradients."""

from __future__ import annotations

import torch

from mxfp8_cutlass import checks, env, reference
from mxfp8_cutlass.columns import ColumnwiseMXFP8, group_bounds
from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor

PARTS = ("data", "scale", "tile_scale")


def grouped_mm_columnwise(
    a: MXFP8Tensor | ColumnwiseMXFP8,
    b: MXFP8Tensor | ColumnwiseMXFP8,
    offs: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """(N, tokens) x (K, tokens) -> (G, N, K): out[g] is the sum over the tokens of group g of a[:, t] b[:, t]ᵀ.

    A group without tokens gives zeros, or adds nothing. See `grouped_mm`, which calls this.
    """
    if not isinstance(a, ColumnwiseMXFP8) or not isinstance(b, ColumnwiseMXFP8):
        raise TypeError(f"a is a {type(a).__name__} and b a {type(b).__name__}: both or none must be a ColumnwiseMXFP8")
    if a.device != b.device:
        raise ValueError(f"b is on {b.device}: it must be on the device of a, {a.device}")
    if (a.tokens, a.offs.shape) != (b.tokens, b.offs.shape):
        raise ValueError(
            f"b has {b.tokens} tokens in {b.offs.shape[0]} groups: it must have those of a, {a.tokens} in "
            f"{a.offs.shape[0]}"
        )
    if offs is None:
        offs = a.offs
    checks.check_index("offs", offs, "a", a.device)
    if offs.shape != a.offs.shape:
        raise ValueError(f"offs has shape {tuple(offs.shape)}: it must be that of a's, {tuple(a.offs.shape)}")
    dtype = checks.check_out_dtype(out_dtype, out)
    n, k = a.shape[0], b.shape[0]
    if n % 16 or k % 16:
        raise ValueError(f"a and b have {n} and {k} features: both must be multiples of 16")
    shape = (offs.shape[0], n, k)
    if out is not None:
        checks.check_tensor("out", out, shape, dtype, a.device)
        checks.check_aligned("out", out)
        parts = [(f"{name}.{part}", getattr(x.tensor, part)) for name, x in (("a", a), ("b", b)) for part in PARTS]
        checks.check_apart("out", out, [*parts, ("offs", offs)])
    elif accumulate:
        raise ValueError("accumulate is True and out is None: there is nothing to add to")
    if a.device.type == "cpu" or env.check():
        ends = _checked_ends(offs, a, b)
    if a.device.type != "cpu":
        # A kernel's launch belongs here. It reads the operands and offs, all of which are on the device.
        raise ValueError(f"a is on {a.device}: products that offs cuts along the contraction run on the CPU alone yet")
    columns = group_bounds(offs)[2].tolist()
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return reference.grouped_mm_columnwise(
        a.tensor, b.tensor, columns, sizes, out_dtype=dtype, out=out, accumulate=accumulate
    )


def _checked_ends(offs: torch.Tensor, a: ColumnwiseMXFP8, b: ColumnwiseMXFP8) -> list[int]:
    ends = checks.row_ends(offs, a.tokens)
    for name, x in (("a", a), ("b", b)):
        if x.offs is not offs and x.offs.tolist() != ends:
            raise ValueError(f"offs is {ends}: {name} was quantized with {x.offs.tolist()}")
    return ends
