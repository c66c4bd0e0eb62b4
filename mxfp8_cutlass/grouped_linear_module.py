"""GroupedLinear: grouped_linear with parameters."""

from __future__ import annotations

import math
from typing import Literal

import torch

from mxfp8_cutlass.delayed_wgrad import DelayedWgrad
from mxfp8_cutlass.grouped_linear import grouped_linear
from mxfp8_cutlass.grouped_mxfp8 import GroupedMXFP8
from mxfp8_cutlass.weight_cache import WeightCache


class GroupedLinear(torch.nn.Module):
    """A linear layer for each of `groups` experts.

    If the weight has an attribute `main_grad`, its gradient is added to that, and `weight.grad` stays None.

    Args:
        groups: number of experts, G.
        in_features: K, a multiple of 32.
        out_features: N, a multiple of 32.
        bias: whether there is one for each expert.
        wgrad: as of `grouped_linear`.
        element_dtype: as of `grouped_linear`.
        grad_element_dtype: as of `grouped_linear`.
        scaling: as of `grouped_linear`.
        cache_weight: whether the quantized weight is kept until its version changes: `weight_cache`. See `WeightCache`
            for when to call `weight_cache.clear()`.
        delay_wgrad: whether backward leaves the weight's gradient to `backward_weight`.
        device: where the parameters are.
        dtype: of the parameters: bfloat16, float16 or float32.
    """

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        wgrad: Literal["mxfp8", "bf16"] = "mxfp8",
        element_dtype: torch.dtype = torch.float8_e4m3fn,
        grad_element_dtype: torch.dtype = torch.float8_e4m3fn,
        scaling: Literal["rceil", "floor"] = "rceil",
        cache_weight: bool = True,
        delay_wgrad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.wgrad, self.scaling = wgrad, scaling
        self.element_dtype, self.grad_element_dtype = element_dtype, grad_element_dtype
        self.weight_cache = WeightCache() if cache_weight else None
        self.delayed_wgrad = DelayedWgrad() if delay_wgrad else None
        self.weight = torch.nn.Parameter(torch.empty((groups, out_features, in_features), device=device, dtype=dtype))
        self.bias = None
        if bias:
            self.bias = torch.nn.Parameter(torch.empty((groups, out_features), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw as torch.nn.Linear does: uniformly, within 1 / sqrt(in_features)."""
        limit = 1 / math.sqrt(self.weight.shape[2])
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -limit, limit)

    def forward(
        self,
        x: torch.Tensor | GroupedMXFP8,
        offs: torch.Tensor | None = None,
        bias_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`grouped_linear` of x (M, K): (M, N)."""
        return grouped_linear(
            x,
            self.weight,
            offs,
            self.bias,
            bias_scale=bias_scale,
            main_grad=getattr(self.weight, "main_grad", None),
            wgrad=self.wgrad,
            element_dtype=self.element_dtype,
            grad_element_dtype=self.grad_element_dtype,
            scaling=self.scaling,
            weight_cache=self.weight_cache,
            delayed_wgrad=self.delayed_wgrad,
        )

    def backward_weight(self) -> None:
        """Compute the weight gradients that backward has left, and add them to `main_grad` or `weight.grad`."""
        if self.delayed_wgrad is None:
            raise ValueError("delay_wgrad is False: backward has computed the weight's gradient itself")
        self.delayed_wgrad.compute(self.weight, getattr(self.weight, "main_grad", None))

    def extra_repr(self) -> str:
        """The sizes."""
        groups, n, k = self.weight.shape
        return f"groups={groups}, in_features={k}, out_features={n}, bias={self.bias is not None}, wgrad={self.wgrad!r}"
