"""WeightCache: weights quantized once for each of their versions. Explicit: nothing is kept where none is passed."""

from __future__ import annotations

import itertools
import threading
from typing import Literal, NamedTuple, cast
from weakref import WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mxfp8_cutlass.columnwise import both_directions
from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor
from mxfp8_cutlass.operands import folds_for
from mxfp8_cutlass.quantize import fold, quantize

Scaling = Literal["rceil", "floor"]


class _Entry(NamedTuple):
    storage: StorageWeakRef
    """Keeps the storage's identity from being given to another, but not its memory."""
    version: int
    by_direction: dict[bool, MXFP8Tensor]
    """By whether it is transposed: along N, for dgrad."""


class WeightCache:
    """Quantized weights, by storage, view, version and stream. As large as the weights in bfloat16, with dgrad.

    Right under gradient accumulation and activation checkpointing: neither changes a weight's version, and an
    optimizer's step does. Changes that the version does not count must be followed by `clear()`: writes through
    `weight.data`, or a sharded weight gathered anew. While a CUDA graph is captured nothing is looked up or kept, so
    that replays quantize the weights that they find; nor is it for inference tensors, which have no version.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[object, ...], _Entry] = {}
        self._lock = threading.Lock()  # backward runs in threads of its own
        self.handle = next(_HANDLES)
        """The number by which operators find it."""
        _CACHES[self.handle] = self

    def clear(self) -> None:
        """Forget all weights."""
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        """How many weights there are, those that exist no longer aside."""
        with self._lock:
            self._forget_the_dead()
            return len(self._entries)

    def __reduce__(self) -> tuple[type[WeightCache], tuple[()]]:
        return (WeightCache, ())  # a copy of a module quantizes for itself

    def get(
        self, weight: torch.Tensor, dtype: torch.dtype, scaling: Scaling, *, transposed: bool, both: bool
    ) -> MXFP8Tensor:
        """As `quantized_weight`."""
        storage = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
        view = (storage.cdata, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
        stream = torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0
        key = (*view, stream, dtype, scaling)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.version != weight._version:  # noqa: SLF001 - torch has no public name for it
                self._forget_the_dead()
                entry = self._entries[key] = _Entry(storage, weight._version, {})  # noqa: SLF001
            if transposed not in entry.by_direction:
                entry.by_direction.update(_quantized(weight, dtype, scaling, transposed=transposed, both=both))
            return entry.by_direction[transposed]

    def _forget_the_dead(self) -> None:
        for key in [key for key, entry in self._entries.items() if _is_dead(entry)]:
            del self._entries[key]


def _is_dead(entry: _Entry) -> bool:
    return bool(entry.storage.expired())  # type: ignore[no-untyped-call]


_HANDLES = itertools.count(1)
_CACHES: WeakValueDictionary[int, WeightCache] = WeakValueDictionary()


@torch.no_grad()
def quantized_weight(
    weight: torch.Tensor,
    dtype: torch.dtype,
    scaling: Scaling,
    *,
    transposed: bool,
    both: bool = False,
    cache: int = 0,
) -> MXFP8Tensor:
    """(G, N, K) along K, or transposed, (G, K, N) along N; folded to tiles, or for Blackwell swizzled.

    both: whether the other direction will be asked for too, so that one read of the weight may do.
    cache: the handle of a WeightCache, or 0.
    """
    found = _CACHES.get(cache)
    capturing = weight.is_cuda and torch.cuda.is_current_stream_capturing()
    if found is None or capturing or weight.is_inference():
        return _quantized(weight, dtype, scaling, transposed=transposed, both=False)[transposed]
    return found.get(weight, dtype, scaling, transposed=transposed, both=both)


def _quantized(
    weight: torch.Tensor, dtype: torch.dtype, scaling: Scaling, *, transposed: bool, both: bool
) -> dict[bool, MXFP8Tensor]:
    _, rows = folds_for(weight.device)
    if both or transposed:
        parts = both_directions(weight, None, dtype, scaling, rowwise=rows if both else None, columnwise=rows)
        found = {False: parts.rowwise, True: cast("MXFP8Tensor", parts.columnwise)}
    else:
        quantized = quantize(weight, dtype, scaling)
        found = {False: fold(quantized, rows) if rows else quantized}
    return {way: x if rows else x.swizzle() for way, x in found.items() if x is not None}
