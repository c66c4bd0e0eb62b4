"""grouped_linear: a linear layer of experts in MXFP8, forward and backward."""

from __future__ import annotations

from typing import Any, Literal

import torch

from mxfp8_cutlass import linear_ops
from mxfp8_cutlass.columns import check_offs
from mxfp8_cutlass.columnwise import check_row_factors
from mxfp8_cutlass.delayed_wgrad import DelayedWgrad, WeightGrad, queue_of
from mxfp8_cutlass.grouped_mxfp8 import GroupedMXFP8
from mxfp8_cutlass.mxfp8_tensor import BLOCK, FP8_DTYPES
from mxfp8_cutlass.quantize import INPUT_DTYPES, SCALINGS
from mxfp8_cutlass.weight_cache import WeightCache

WGRADS = ("mxfp8", "bf16")


def grouped_linear(
    x: torch.Tensor | GroupedMXFP8,
    weight: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    bias_scale: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None,
    wgrad: Literal["mxfp8", "bf16"] = "mxfp8",
    element_dtype: torch.dtype = torch.float8_e4m3fn,
    grad_element_dtype: torch.dtype = torch.float8_e4m3fn,
    scaling: Literal["rceil", "floor"] = "rceil",
    weight_cache: WeightCache | None = None,
    delayed_wgrad: DelayedWgrad | None = None,
) -> torch.Tensor:
    """Multiply each expert's tokens with its weight: y[i] = x[i] weight[g]ᵀ + bias[g] for the rows i of group g.

    Differentiable in x, weight, bias and bias_scale, once; each of the three products is in MXFP8. What is saved for
    backward is x as quantized columns, not x, and nothing of x if the weight needs no gradient. Nothing is copied to
    the host; results are the same in each run. Rows of no group have no meaning in y and in x's gradient, reach no
    result, and have 0 in bias_scale's gradient.

    Args:
        x: bfloat16, float16 or float32, (M, K), K a multiple of 32. Or a GroupedMXFP8 of `element_dtype`: it is used as
            it is, requantized along tokens for the weight's gradient, and its own gradient goes to its `carrier`; y is
            of the carrier's dtype, bfloat16 without one.
        weight: bfloat16, float16 or float32, (G, N, K), contiguous, N a multiple of 32.
        offs: int32 or int64 (G,): the end row of each group. None: those of x, if it is a GroupedMXFP8.
        bias: floating, (G, N).
        bias_scale: floating, (M,), such as routing probabilities: y[i] += bias_scale[i] * bias[g] instead.
        main_grad: floating, (G, N, K), contiguous: the weight's gradient is added to it, and `weight.grad` stays None.
        wgrad: "bf16" computes the weight's gradient in bfloat16, and saves x as it is: quantizing along tokens, or
            requantizing what arrived quantized, may cost convergence.
        element_dtype: float8_e4m3fn or float8_e5m2, of x and weight.
        grad_element_dtype: the same for y's gradient.
        scaling: as of `quantize`.
        weight_cache: where the quantized weight is kept until its version changes; without one it is quantized in
            forward and again in backward.
        delayed_wgrad: where weight gradients wait to be computed; not within torch.compile. See `GroupedLinear`.

    Raises:
        TypeError: an argument is of another type or dtype than listed above.
        ValueError: a shape, layout, device or value breaks a rule above; x has swizzled scales and the weight needs a
            gradient, for which they would have to be dequantized.
    """
    if isinstance(x, GroupedMXFP8):
        offs = x.offs if offs is None else offs
        values, data, scale, swizzled = _arrived(x, element_dtype)
    elif isinstance(x, torch.Tensor):
        values, data, scale, swizzled = x.contiguous(), None, None, False
    else:
        raise TypeError(f"x is a {type(x).__name__}: it must be a torch.Tensor or a GroupedMXFP8")
    _check(values, weight, offs, bias, bias_scale, main_grad)
    _check_options(wgrad, element_dtype, grad_element_dtype, scaling, weight_cache, delayed_wgrad)
    save = torch.is_grad_enabled() and weight.requires_grad
    if save and swizzled:
        raise ValueError(
            "x has swizzled scales and weight needs a gradient, which takes compact ones: unswizzle_scales"
        )
    y: torch.Tensor = linear_ops.forward(
        values,
        data,
        scale,
        weight,
        offs,
        bias,
        bias_scale,
        main_grad,
        swizzled,
        element_dtype,
        grad_element_dtype,
        scaling,
        wgrad,
        save,
        torch.is_grad_enabled() and values.requires_grad,
        0 if weight_cache is None else weight_cache.handle,
        0 if delayed_wgrad is None else delayed_wgrad.handle,
    )[0]
    return y


X, WEIGHT, BIAS, BIAS_SCALE, ARGUMENTS = 0, 3, 5, 6, 17
"""Places among the operator's arguments, and their number."""


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:  # noqa: ANN401
    x, x_data, x_scale, weight, offs, bias, bias_scale, ctx.main_grad, _, *options = inputs
    ctx.dtype, ctx.grad_dtype, ctx.scaling, wgrad, save, input_grad, ctx.cache, ctx.queue = options
    ctx.high_precision = wgrad == "bf16"
    ctx.weight_dtype, ctx.tokens = weight.dtype, x.shape[0]
    ctx.bias_dtype = None if bias is None else bias.dtype
    saved: tuple[torch.Tensor, ...] = ()
    if save and x_data is not None:
        saved = (x_data, x_scale)
    elif save:
        saved = (x,) if ctx.high_precision else output[1:]
    scaled = bias_scale is not None
    ctx.save_for_backward(weight if input_grad else None, offs, bias if scaled else None, bias_scale, *saved)


def _backward(ctx: Any, dy: torch.Tensor, *_: object) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
    weight, offs, bias, bias_scale, *x = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dy = dy.contiguous()
    columns = needs[WEIGHT] and not ctx.high_precision
    grads: list[torch.Tensor | None] = [None] * ARGUMENTS
    dy_parts: list[torch.Tensor] = [dy]
    if needs[X] or needs[BIAS] or columns:
        results: tuple[torch.Tensor, ...] = linear_ops.backward(
            dy,
            weight if needs[X] else None,
            offs,
            bias_scale,
            ctx.dtype,
            ctx.grad_dtype,
            ctx.scaling,
            columns,
            needs[BIAS],
            ctx.cache,
        )
        dx, data, scale, tiles, sums = results
        grads[X] = dx if needs[X] else None
        grads[BIAS] = sums.to(ctx.bias_dtype) if needs[BIAS] else None
        dy_parts = [data, scale, tiles] if columns else dy_parts
    if needs[BIAS_SCALE]:
        grads[BIAS_SCALE] = linear_ops.bias_scale_grad(dy, bias, offs).to(bias_scale.dtype)
    if needs[WEIGHT]:
        grad = WeightGrad(dy_parts, x, offs, ctx.tokens, ctx.dtype, ctx.grad_dtype, ctx.scaling)
        if ctx.queue:
            queue_of(ctx.queue).append(grad)
        elif ctx.main_grad is not None:
            grad.add_to(ctx.main_grad)
        else:
            grads[WEIGHT] = grad.new(ctx.weight_dtype)
    return tuple(grads)


linear_ops.forward.register_autograd(_backward, setup_context=_setup_context)


def _arrived(x: GroupedMXFP8, element_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """What stands for the values, elements, scales, and whether these are swizzled."""
    if x.data is None or x.scale is None:
        raise ValueError("x has no row-wise data: forward needs them")
    if x.data.dtype != element_dtype:
        raise TypeError(f"x has elements of type {x.data.dtype}: element_dtype is {element_dtype}")
    carrier = x.carrier
    if carrier is None:
        carrier = torch.empty((1, 1), dtype=torch.bfloat16, device=x.data.device).expand(x.data.shape)
    return carrier, x.data.view(torch.uint8), x.scale.view(torch.uint8), x.swizzled


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    bias_scale: torch.Tensor | None,
    main_grad: torch.Tensor | None,
) -> None:
    for name, tensor, ndim in (("x", x, 2), ("weight", weight, 3)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}: it must be a torch.Tensor")
        if tensor.dtype not in INPUT_DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}: it must be bfloat16, float16 or float32")
        if tensor.ndim != ndim:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: it must have {ndim} dimensions")
    groups, n, k = weight.shape
    if x.shape[1] != k:
        raise ValueError(f"x has shape {tuple(x.shape)}: its K must be that of weight, {k}")
    if n == 0 or n % BLOCK or k == 0 or k % BLOCK:
        raise ValueError(f"weight has shape {tuple(weight.shape)}: N and K must be positive multiples of 32")
    if not weight.is_contiguous():
        raise ValueError(f"weight has strides {tuple(weight.stride())}: it must be contiguous")
    if offs is None:
        raise ValueError("offs is None: it must be the end row of each group")
    check_offs(offs, "x", x.device)
    if offs.shape[0] != groups:
        raise ValueError(f"offs has shape {tuple(offs.shape)}: it must be ({groups},), one for each weight[g]")
    if bias_scale is not None:
        check_row_factors("bias_scale", bias_scale, x)
        if bias is None:
            raise ValueError("bias_scale is given and bias is None: there is nothing to scale")
    for name, part, shape in (("bias", bias, (groups, n)), ("main_grad", main_grad, (groups, n, k))):
        if part is None:
            continue
        if not isinstance(part, torch.Tensor):
            raise TypeError(f"{name} is a {type(part).__name__}: it must be a torch.Tensor")
        if part.dtype not in INPUT_DTYPES:
            raise TypeError(f"{name} has dtype {part.dtype}: it must be bfloat16, float16 or float32")
        if tuple(part.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(part.shape)}: it must be {shape}")
    if main_grad is not None and (main_grad.requires_grad or not main_grad.is_contiguous()):
        raise ValueError("main_grad must be contiguous, and need no gradient itself")
    for name, part in (("weight", weight), ("bias", bias), ("main_grad", main_grad)):
        if part is not None and part.device != x.device:
            raise ValueError(f"{name} is on {part.device}: it must be on the device of x, {x.device}")


def _check_options(
    wgrad: str,
    element_dtype: torch.dtype,
    grad_element_dtype: torch.dtype,
    scaling: str,
    weight_cache: WeightCache | None,
    delayed_wgrad: DelayedWgrad | None,
) -> None:
    if wgrad not in WGRADS:
        raise ValueError(f"wgrad is {wgrad!r}: it must be 'mxfp8' or 'bf16'")
    for name, dtype in (("element_dtype", element_dtype), ("grad_element_dtype", grad_element_dtype)):
        if dtype not in FP8_DTYPES:
            raise TypeError(f"{name} is {dtype!r}: it must be float8_e4m3fn or float8_e5m2")
    if scaling not in SCALINGS:
        raise ValueError(f"scaling is {scaling!r}: it must be 'rceil' or 'floor'")
    if weight_cache is not None and not isinstance(weight_cache, WeightCache):
        raise TypeError(f"weight_cache is a {type(weight_cache).__name__}: it must be a WeightCache")
    if delayed_wgrad is not None:
        if not isinstance(delayed_wgrad, DelayedWgrad):
            raise TypeError(f"delayed_wgrad is a {type(delayed_wgrad).__name__}: it must be a DelayedWgrad")
        if torch.compiler.is_compiling():
            raise ValueError("delayed_wgrad is given within torch.compile: a graph's tensors cannot outlive its run")
