"""Weight gradients that are computed later than the rest of backward, to overlap with communication."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch

from mxfp8_cutlass.linear_ops import weight_grad, weight_grad_


class WeightGrad(NamedTuple):
    """A weight gradient's operands: arguments of the operators `weight_grad` and `weight_grad_`."""

    dy: Sequence[torch.Tensor]
    x: Sequence[torch.Tensor]
    offs: torch.Tensor
    tokens: int
    dtype: torch.dtype
    grad_dtype: torch.dtype
    scaling: str

    def new(self, dtype: torch.dtype) -> torch.Tensor:
        """Compute it."""
        result: torch.Tensor = weight_grad(*self, dtype)
        return result

    def add_to(self, out: torch.Tensor) -> None:
        """Add it to `out`."""
        weight_grad_(out, *self)


class DelayedWgrad:
    """Weight gradients that backward has left to be computed, in its order."""

    def __init__(self) -> None:
        self._waiting: deque[WeightGrad] = deque()
        self.handle = next(_HANDLES)
        """The number by which backward finds it."""
        _QUEUES[self.handle] = self

    def __len__(self) -> int:
        return len(self._waiting)

    def __reduce__(self) -> tuple[type[DelayedWgrad], tuple[()]]:
        return (DelayedWgrad, ())  # what waits belongs to one module, not to its copies

    def append(self, grad: WeightGrad) -> None:
        """Leave one for later."""
        self._waiting.append(grad)

    @torch.no_grad()
    def compute(self, weight: torch.Tensor, main_grad: torch.Tensor | None) -> None:
        """Add all that wait to main_grad, or else to the weight's `grad`, and forget them."""
        while self._waiting:
            grad = self._waiting.popleft()
            if main_grad is not None:
                grad.add_to(main_grad)
            elif weight.grad is not None:
                grad.add_to(weight.grad)
            else:
                weight.grad = grad.new(weight.dtype)


_HANDLES = itertools.count(1)
_QUEUES: WeakValueDictionary[int, DelayedWgrad] = WeakValueDictionary()


def queue_of(handle: int) -> DelayedWgrad:
    """The queue with this handle."""
    queue = _QUEUES.get(handle)
    if queue is None:
        raise ValueError(f"handle is {handle}: the DelayedWgrad that forward was given exists no longer")
    return queue
