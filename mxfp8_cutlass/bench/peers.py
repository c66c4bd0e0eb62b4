"""What else computes grouped products on Hopper. Set-up lies outside the timed calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import torch

from mxfp8_cutlass.bench.methods import (
    Method,
    UnavailableError,
    exact,
    fold_activations,
    folded,
    places,
    result_buffer,
)
from mxfp8_cutlass.bench.operands import Operands, expert_values, values
from mxfp8_cutlass.mxfp8_tensor import BLOCK, RUN, SCALE_NAN
from mxfp8_cutlass.quantize import dequantize

PEER_TOLERANCE = 2e-2
"""Relative error of a row: peers may sum with less care than this package, but not compute something else."""
FAST_TOLERANCE = 1e-1
"""The same with use_fast_accum: all of K within the tensor cores' short sums."""

E4M3_MAX = 448.0
DEEP_GEMM_ROWS = 128
"""Rows to which DeepGEMM's contiguous layout pads each group, unless the module asks for others."""


def torch_bf16(x: Operands) -> Method:
    """Torch's BF16 grouped product, of the values before quantizing."""
    weights = x.w.mT
    return Method(
        run=lambda: torch._grouped_mm(x.x, weights, offs=x.offs),  # noqa: SLF001 - public in newer torch only
        a=lambda rows: x.x[rows].double(),
        b=lambda group: x.w[group].double(),
        tolerance=PEER_TOLERANCE,
    )


def emulated(x: Operands) -> Method:
    """Dequantize both operands, then BF16: what MXFP8 costs without kernels for it."""

    def run() -> torch.Tensor:
        a, b = dequantize(x.xq, torch.bfloat16), dequantize(x.wq, torch.bfloat16)
        return torch._grouped_mm(a, b.mT, offs=x.offs)  # noqa: SLF001 - as above

    return Method(
        run=run,
        a=lambda rows: values(x.xq, rows),
        b=lambda group: expert_values(x.wq, group),
        tolerance=PEER_TOLERANCE,
    )


def torch_rowwise(x: Operands) -> Method:
    """Torch's FP8 grouped product with a scale per row, promoting to FP32 on the way."""
    return _rowwise(x, fast=False)


def torch_rowwise_fast(x: Operands) -> Method:
    """The same within the tensor cores' short sums: too inaccurate for training, hence only a ceiling."""
    return _rowwise(x, fast=True)


def _rowwise(x: Operands, *, fast: bool) -> Method:
    a, scale_a = _quantize_rows(x.x)
    b = torch.empty(x.w.shape, dtype=torch.float8_e4m3fn, device=x.w.device)
    scale_b = torch.empty(x.w.shape[:2], device=x.w.device)
    for group, expert in enumerate(x.w):
        data, scale_b[group] = _quantize_rows(expert)
        b[group].view(torch.uint8).copy_(data.view(torch.uint8))
    return Method(
        run=lambda: torch._scaled_grouped_mm(  # noqa: SLF001 - as above
            a, b.mT, scale_a, scale_b, offs=x.offs, out_dtype=torch.bfloat16, use_fast_accum=fast
        ),
        a=lambda rows: a.view(torch.uint8)[rows].view(a.dtype).double() * scale_a[rows].double()[:, None],
        b=lambda group: b[group].double() * scale_b[group].double()[:, None],
        tolerance=FAST_TOLERANCE if fast else PEER_TOLERANCE,
    )


def _quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(-1).float().clamp(min=2.0**-100) / E4M3_MAX
    return (x.float() / scale[:, None]).to(torch.float8_e4m3fn), scale


def deep_gemm(x: Operands) -> Method:
    """DeepGEMM on the folded operands' own elements and scales, which it can express: 1 x 128 and 128 x 128."""
    module = importlib.import_module("deep_gemm")
    if x.wf.tile_scale is None or bool((x.wf.tile_scale == SCALE_NAN).any()):
        raise UnavailableError("the weights have mixed tiles, which scales per 128 x 128 cannot express")
    scale_a = _powers(x.xf.scale_bytes[:, :: RUN // BLOCK])
    b = (x.wf.data, _powers(x.wf.tile_scale))
    if x.workload.kind == "masked":
        return _deep_gemm_masked(module, x, scale_a, b)
    return _deep_gemm_contiguous(module, x, scale_a, b)


def _deep_gemm_contiguous(
    module: ModuleType, x: Operands, scale_a: torch.Tensor, b: tuple[torch.Tensor, torch.Tensor]
) -> Method:
    product = _function(module, "m_grouped_fp8_fp4_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_contiguous")
    align = int(getattr(module, "get_mk_alignment_for_contiguous_layout", lambda: DEEP_GEMM_ROWS)())
    padded = [-(-size // align) * align for size in x.sizes]
    place, end = places(x, padded)
    groups = torch.repeat_interleave(
        torch.arange(len(padded), dtype=torch.int32, device=x.x.device), torch.tensor(padded, device=x.x.device)
    )
    a = (_scattered(x.xf.data, place, end), _tma_layout(_scattered(scale_a, place, end)))
    out = result_buffer(x, end)

    def run() -> torch.Tensor:
        product(a, b, out, groups, disable_ue8m0_cast=True)
        return out

    return _deep_gemm_method(x, run, out, place)


def _deep_gemm_masked(
    module: ModuleType, x: Operands, scale_a: torch.Tensor, b: tuple[torch.Tensor, torch.Tensor]
) -> Method:
    product = _function(module, "m_grouped_fp8_fp4_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked")
    groups, room = len(x.sizes), x.workload.room
    place, end = places(x, [room] * groups)
    data = _scattered(x.xf.data, place, end).view(groups, room, -1)
    a = (data, _tma_layout(_scattered(scale_a, place, end).view(groups, room, -1)))
    out = result_buffer(x, end)
    stacked = out.view(groups, room, -1)
    counts = torch.tensor(x.sizes, dtype=torch.int32, device=x.x.device)

    def run() -> torch.Tensor:
        product(a, b, stacked, counts, x.workload.expected_m, disable_ue8m0_cast=True)
        return out

    return _deep_gemm_method(x, run, out, place)


def _deep_gemm_method(x: Operands, run: Callable[[], torch.Tensor], out: torch.Tensor, place: torch.Tensor) -> Method:
    return Method(
        run=run,
        a=lambda rows: values(x.xf, rows),
        b=lambda group: expert_values(x.wf, group),
        tolerance=PEER_TOLERANCE,
        place=place,
        out=out,
    )


def _powers(byte: torch.Tensor) -> torch.Tensor:
    """2**(byte - 127) in float32: the byte is the exponent. 0 becomes 0; Gaussian operands have none."""
    return (byte.int() << 23).view(torch.float32)


def _scattered(x: torch.Tensor, place: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows at their places, ones (scales) or zeros (elements) between them."""
    if x.dtype == torch.float32:
        return torch.ones(rows, x.shape[1], device=x.device).index_copy_(0, place, x)
    out = torch.zeros(rows, x.shape[1], dtype=torch.uint8, device=x.device)
    return out.index_copy_(0, place, x.view(torch.uint8)).view(x.dtype)


def _tma_layout(scale: torch.Tensor) -> torch.Tensor:
    """Scales column by column, as DeepGEMM's kernels read them: otherwise each call would lay them out anew.

    Columns have to start at multiples of 16 bytes; rows are padded to more than 4 here, so they do.
    """
    return scale.mT.contiguous().mT


def _function(module: ModuleType, *names: str) -> Callable[..., object]:
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)  # type: ignore[no-any-return]
    raise UnavailableError(f"this deep_gemm has none of {', '.join(names)}")


METHODS: dict[str, Callable[[Operands], Method]] = {
    "folded": folded,
    "exact": exact,
    "fold activations": fold_activations,
    "DeepGEMM": deep_gemm,
    "torch FP8 rowwise": torch_rowwise,
    "torch FP8 rowwise, fast": torch_rowwise_fast,
    "torch BF16": torch_bf16,
    "dequantize + BF16": emulated,
}
"""Every method by its name in tables, this package's first."""

LABELS = {
    "folded": "`grouped_mm`, both operands folded beforehand; for decode in the masked layout, with counts",
    "exact": "`grouped_mm(exact=True)` of compact operands",
    "fold activations": "`grouped_mm` of compact activations, folded within the call; weights folded beforehand",
    "DeepGEMM": (
        "DeepGEMM on the folded operands' own elements and scales (1 x 128, 128 x 128); before the timed call, scales "
        "are laid out, groups padded to 128 rows or, for decode, placed in the masked layout (multiples of 64 rows)"
    ),
    "torch FP8 rowwise": "`torch._scaled_grouped_mm`, one scale per row, use_fast_accum=False",
    "torch FP8 rowwise, fast": "the same with use_fast_accum=True: a ceiling, too inaccurate for training",
    "torch BF16": "`torch._grouped_mm` of the values before quantizing",
    "dequantize + BF16": "`dequantize` of both operands, then `torch._grouped_mm`",
}
