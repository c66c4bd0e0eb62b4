"""grouped_mm: products of groups of rows, or of a batch, with a matrix each, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mxfp8_cutlass import checks, env, reference
from mxfp8_cutlass.columns import ColumnwiseMXFP8
from mxfp8_cutlass.columns_mm import grouped_mm_columnwise
from mxfp8_cutlass.generator.config_space import GroupedGemmConfig
from mxfp8_cutlass.generator.sm100_config import Sm100Config
from mxfp8_cutlass.kernel import target_of
from mxfp8_cutlass.launch import Shapes, StackedLaunch
from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor
from mxfp8_cutlass.operands import addresses_of, facts_of, is_ready, prepared, scales_of
from mxfp8_cutlass.select import select_stacked
from mxfp8_cutlass.sm100_launch import Sm100Launch


def grouped_mm(
    a: MXFP8Tensor | ColumnwiseMXFP8,
    b: MXFP8Tensor | ColumnwiseMXFP8,
    offs: torch.Tensor | None = None,
    *,
    counts: torch.Tensor | None = None,
    expected_m: int | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    exact: bool = False,
    config: GroupedGemmConfig | None = None,
) -> torch.Tensor:
    """Multiply groups of rows of `a` with a matrix of `b` each, contracting the last axis of both.

    (M, K) x (G, N, K) with offs -> (M, N): rows offs[g-1] to offs[g] of `a` are multiplied with b[g]ᵀ.
    (G, M, K) x (G, N, K) -> (G, M, N): all M rows of each a[g], or with counts the first counts[g] of them (decode).
    (N, M) x (K, M) -> (G, N, K) of two ColumnwiseMXFP8: a weight gradient, which offs cuts along the contraction. It
    takes `out`, `out_dtype`, `accumulate` and `config`; a group of no tokens gives zeros, or adds nothing.

    Nothing is copied to the host, so calls can be captured in CUDA graphs. Rows of no group are left as they are: in a
    new output they are not initialised. On Hopper an operand that is not folded is folded first, into a workspace of
    its size: fold weights once per update with `fold(b, rows=128)`, and activations as they are quantized with
    `quantize(..., fold=True)`. On Blackwell, which is compiled for and has not been run on, scales are brought into the
    blocked layout at each call, unless `swizzle` has done so. CPU tensors run the reference (float32; exact).

    Args:
        a: (M, K) or (G, M, K).
        b: (G, N, K), G up to 1024, N a multiple of 16.
        offs: int32 or int64 (G,), on the operands' device: the end row of each group; not decreasing, at most M. The
            values are checked only if MXFP8_CUTLASS_CHECK=1, at the price of a sync; wrong ones give wrong numbers, but
            nothing outside `out` is written.
        counts: int32 or int64 (G,), on the operands' device: how many rows of each a[g] there are, 0 to M. What lies
            behind them is not used, and not written in `out`. Values beyond that range count as 0 or M; they are an
            error if MXFP8_CUTLASS_CHECK=1, at the price of a sync.
        expected_m: with counts: about how many rows a group has, M unless given. The kernel is picked for it; any
            counts are right with any of them.
        bias: (G, N), of the output's dtype; added to every row of its group.
        out_dtype: bfloat16 (the default), float16 or float32.
        out: write here instead of into a new tensor: contiguous, of the result's shape; its dtype is the output's.
        accumulate: add to `out` (in float32, rounded once) instead of overwriting it.
        exact: on Hopper, fold nothing: each element is multiplied with its own scale, at BF16's speed instead of FP8's.
            Blackwell's products are always exact.
        config: the kernel to run, instead of the one that `select_kernel` picks.

    Raises:
        TypeError: an argument is of another type or dtype than listed above.
        ValueError: a shape, device, layout, alignment (16 bytes) or value breaks a rule above; `out` overlaps an input;
            the device is neither SM90 nor SM100; `config` is not for this product.
    """
    if type(a) is ColumnwiseMXFP8 or type(b) is ColumnwiseMXFP8:
        checks.check_no_others(counts=counts, expected_m=expected_m, bias=bias, exact=exact or None)
        return grouped_mm_columnwise(a, b, offs, out_dtype=out_dtype, out=out, accumulate=accumulate, config=config)
    traits = (
        (_traits(a), _traits(b), _traits(offs), _traits(counts), _traits(bias), _traits(out)),
        (out_dtype, accumulate, exact, config, expected_m),
    )
    try:
        plan = _PLANS.get(traits)
    except TypeError:  # an argument that has no hash is none that _plan lets pass
        plan = None
    if plan is None:
        plan = _plan(a, b, offs, counts, bias, out, out_dtype, config, expected_m, accumulate=accumulate, exact=exact)
        if plan.on_cuda:
            if len(_PLANS) >= MAX_PLANS:
                _PLANS.clear()
            _PLANS[traits] = plan
    launch = plan.launch
    if check_values := env.check():
        checks.check_rows(a, offs, counts)
    if check_values or not plan.ready:
        checks.check_addresses(a, b, offs, counts, bias, out)
    if not plan.on_cuda:
        a, b = a.unswizzle(), b.unswizzle()
        return reference.grouped_mm(
            a, b, offs, counts=counts, bias=bias, out_dtype=plan.dtype, out=out, accumulate=accumulate
        )
    if out is None:
        out = torch.empty_strided(plan.shape, plan.strides, dtype=plan.dtype, device=a.data.device)
    if launch is None:
        return out
    if check_values or not plan.ready:
        a, b = prepared(launch.config, a, b, check_values=check_values)
    scales = scales_of(launch.config, a, b, offs)
    addresses = addresses_of(a, b, scales, out, bias, offs, counts)
    if addresses not in launch.known:
        checks.check_addresses(a, b, offs, counts, bias, out)
    launch(addresses)
    return out


class _Plan(NamedTuple):
    """What a call of grouped_mm does, as far as its arguments' traits tell, so that it is worked out once."""

    shape: tuple[int, ...]
    """The output's."""
    strides: tuple[int, ...]
    """The output's; torch.empty, which does without, takes longer by half."""
    dtype: torch.dtype
    """The output's."""
    on_cuda: bool = False
    launch: StackedLaunch | Sm100Launch | None = None
    """None: on the CPU, or if there are no rows."""
    ready: bool = False
    """Whether the operands' elements are as the kernel reads them: nothing is to be folded."""


_PLANS: dict[tuple[object, ...], _Plan] = {}
"""By the traits of valid arguments on CUDA."""

MAX_PLANS = 4096
"""Where each call has another number of rows, plans are forgotten, all at once, rather than kept for good."""


def _traits(x: object) -> object:
    """All that _plan may ask of an argument on CUDA: not where it lies, nor what it holds. Others have device -1."""
    if x is None:
        return None
    if isinstance(x, MXFP8Tensor):
        data = x.data
        return data.shape, data.dtype, data.get_device(), x.folded, x.swizzled if x.offs is None else x.offs.shape
    if isinstance(x, torch.Tensor):
        return x.shape, x.dtype, x.get_device(), x.is_contiguous()
    return type(x)


def _plan(
    a: MXFP8Tensor,
    b: MXFP8Tensor,
    offs: torch.Tensor | None,
    counts: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    config: GroupedGemmConfig | None,
    expected_m: int | None,
    *,
    accumulate: bool,
    exact: bool,
) -> _Plan:
    """Check arguments by their traits, and decide."""
    checks.check_operand("a", a)
    checks.check_operand("b", b)
    if a.ndim == 2 and b.ndim == 2:
        raise ValueError("a and b are both 2D: quantize_columnwise makes the operands that offs cuts along K")
    checks.check_groups(a, b, offs, counts)
    checks.check_product(a, b)
    checks.check_swizzled(a, offs)
    checks.check_expected_m(expected_m, counts)
    dtype = checks.check_out_dtype(out_dtype, out)
    groups, n, k = b.shape
    m = a.shape[-2]
    shape = (*a.shape[:-1], n)
    strides = (n, 1) if a.ndim == 2 else (m * n, n, 1)
    if bias is not None:
        checks.check_tensor("bias", bias, (groups, n), dtype, a.device)
    if out is not None:
        checks.check_tensor("out", out, shape, dtype, a.device)
    elif accumulate:
        raise ValueError("accumulate is True and out is None: there is nothing to add to")
    on_cuda = a.data.is_cuda
    target = target_of(a.device) if on_cuda else None
    facts = facts_of(a, b, dtype, target, exact=exact)
    if config is not None:
        checks.check_config(config, target, facts)
    if target is None or m == 0:
        return _Plan(shape, strides, dtype, on_cuda)
    split = offs is not None
    if config is None:
        rows = m if expected_m is None else min(m, expected_m)
        config = select_stacked(rows, n, k, groups, target, *facts.values(), split=split)
    index = offs if split else counts
    shapes, device = Shapes(1 if split else groups, groups, m, n, k), a.device.index
    is_int64 = index is not None and index.dtype == torch.int64
    launch: StackedLaunch | Sm100Launch
    if isinstance(config, Sm100Config):
        has_bias = bias is not None
        launch = Sm100Launch(
            config, shapes, groups, device, index_is_int64=is_int64, accumulate=accumulate, bias=has_bias
        )
    else:
        launch = StackedLaunch(
            config, shapes, groups, device, split=split, index_is_int64=is_int64, accumulate=accumulate
        )
    return _Plan(shape, strides, dtype, on_cuda, launch, is_ready(config, a, b))
