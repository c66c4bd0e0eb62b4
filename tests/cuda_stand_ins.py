"""CPU tensors that say they lie on a GPU, and kernels that note what they are launched with."""

from __future__ import annotations

import ctypes
import sys

import torch

from mxfp8_cutlass import launch
from mxfp8_cutlass.kernel import _target_of_index
from mxfp8_cutlass.launch import GroupedGemmParams, TensorMap
from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor

grouped_mm = sys.modules["mxfp8_cutlass.grouped_mm"]  # the package's attribute of this name is the function
DEVICE = torch.device("cuda:0")


class CudaTensor(torch.Tensor):
    """As fast as a tensor, nearly: nothing is dispatched to Python."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True
    device = DEVICE

    def get_device(self):
        return DEVICE.index


def on_cuda(x):
    """A tensor or an MXFP8Tensor with its memory where it is."""
    if x is None:
        return None
    if isinstance(x, torch.Tensor):
        return x.as_subclass(CudaTensor)
    run_scale = on_cuda(x.scale_by_run()) if x.folded else None
    moved = MXFP8Tensor.unchecked(x.data, x.scale, x.folded, on_cuda(x.tile_scale), run_scale)
    moved.data, moved.scale = on_cuda(x.data), on_cuda(x.scale)
    return moved


class NotedKernel:
    """Notes (config, a copy of the argument, the argument itself, grid) of each launch."""

    def __init__(self, config, launches):
        self.config, self.launches = config, launches

    def launch(self, params, grid, stream):
        assert stream == 77
        self.launches.append((self.config, GroupedGemmParams.from_buffer_copy(params), params, grid))


def install(monkeypatch) -> list:
    """Let grouped_mm run on such tensors; returns the list of launches."""
    launches: list = []
    empty_strided = torch.empty_strided
    monkeypatch.setattr(
        torch, "empty_strided", lambda *layout, dtype, device: on_cuda(empty_strided(*layout, dtype=dtype))
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    monkeypatch.setattr(launch, "load", lambda config, device: NotedKernel(config, launches))
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(
        launch, "tensor_map", lambda address, shape, *_: TensorMap((ctypes.c_uint64 * 16)(address, *shape))
    )
    monkeypatch.setattr(grouped_mm, "_PLANS", {})
    _target_of_index.cache_clear()
    return launches
