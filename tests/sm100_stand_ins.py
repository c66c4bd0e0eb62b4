"""An SM100 that is played: real launches up to CUTLASS's kernel, of which a few lines of torch take the place.

The kernels that lay out scales and write arrays are their own code on the CPU (kernel_emulator). What stands for the
GEMM finds in its parameter where the arrays lie, and all else in these.
"""

from __future__ import annotations

import ctypes
import struct

import cuda_stand_ins
import torch
from cuda_stand_ins import on_cuda

from mxfp8_cutlass import columns_mm, scale_layout, sm100_launch
from mxfp8_cutlass.generator.sm100_config import Sm100Config
from mxfp8_cutlass.kernel import _target_of_index
from mxfp8_cutlass.sm100_arguments import GroupArrays
from mxfp8_cutlass.sm100_params import Facts, Parameter

FIELDS = [field for field, _, _ in GroupArrays.FIELDS]
GRID, WORKSPACE, STREAM = (4, 1, 1), 640, 77
ELEMENT = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
OUT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parameter_of(builder, groups, device, *, accumulate, bias) -> Parameter:
    """The arrays' places, then groups and beta."""
    arrays = GroupArrays(groups)
    places = [0 if field == "bias" and not bias else arrays.places[field] for field in FIELDS]
    addresses = tuple(8 * i for i, field in enumerate(FIELDS) if field != "bias" or bias)
    data = struct.pack(f"<{len(FIELDS)}Qqd", *places, groups, float(accumulate))
    return Parameter(data, addresses, Facts(len(data), WORKSPACE, 0, *GRID))


def memory_at(address: int, nbytes: int) -> torch.Tensor:
    """Bytes of this process."""
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


def array_at(address: int, groups: int, field: str) -> list[list[int]]:
    """An array of arguments."""
    count, dtype = next(facts for name, *facts in GroupArrays.FIELDS if name == field)
    return memory_at(address, groups * count * dtype.itemsize).view(dtype).view(groups, count).tolist()


def matrix_at(address: int, rows: int, columns: int, stride: int, dtype: torch.dtype) -> torch.Tensor:
    """A row-major matrix, not copied."""
    memory = memory_at(address, ((rows - 1) * stride + columns) * dtype.itemsize)
    return memory.view(dtype).as_strided((rows, columns), (stride, 1))


def scales_at(address: int, layout: list[int], rows: int, blocks: int) -> torch.Tensor:
    """2**(byte - 127) of scales in the blocked layout, (rows, blocks), float64."""
    row_tiles, quads, matrices, row_tile_bytes, matrix_bytes = layout
    assert (row_tiles, quads, matrices) == (-(-rows // 128), -(-blocks // 4), 1)
    assert matrix_bytes == row_tiles * row_tile_bytes
    r, c = torch.arange(rows)[:, None], torch.arange(blocks)
    at = r // 128 * row_tile_bytes + c // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    scale = memory_at(address, int(at.max()) + 1)[at].double()
    return torch.where(scale == 255, torch.nan, torch.exp2(scale - 127))


class PlayedGemm:
    """D = A Bᵀ + bias + beta C for each group, in float64, rounded once."""

    def __init__(self, config: Sm100Config) -> None:
        self.config = config

    def launch(self, params, grid, stream) -> None:
        assert (grid, stream) == (GRID, STREAM)
        *addresses, groups, beta = struct.unpack(f"<{len(FIELDS)}Qqd", bytes(params))
        at = dict(zip(FIELDS, addresses, strict=True))
        arrays = {name: array_at(place, groups, name) for name, place in at.items() if place}
        out_dtype = OUT[self.config.out]
        for g, (m, n, k) in enumerate(arrays["shapes"]):
            if m == 0:
                continue
            a, b = (
                self._values(arrays, g, rows, k, operand, element)
                for operand, rows, element in (("a", m, self.config.element_a), ("b", n, self.config.element_b))
            )
            out = matrix_at(arrays["out"][g][0], m, n, arrays["stride_out"][g][0], out_dtype)
            result = a @ b.mT
            if at["bias"]:
                result += matrix_at(arrays["bias"][g][0], 1, n, n, out_dtype).double()
            out.copy_(result + beta * out.double() if beta else result)

    @staticmethod
    def _values(arrays, g, rows, k, operand, element) -> torch.Tensor:
        data = matrix_at(arrays[operand][g][0], rows, k, arrays[f"stride_{operand}"][g][0], ELEMENT[element])
        blocks = -(-k // 32)
        scale = scales_at(arrays[f"sf{operand}"][g][0], arrays[f"layout_sf{operand}"][g], rows, blocks)
        return data.double() * scale.repeat_interleave(32, -1)[:, :k]


class EmulatedKernel:
    """A kernel's own code on the CPU."""

    def __init__(self, kernels, config) -> None:
        self.kernels, self.config = kernels, config

    def launch(self, params, grid, stream) -> None:
        assert stream == STREAM
        self.kernels.launch(self.config, params, grid, None)


def install(monkeypatch, kernels, loaded: list) -> None:
    """Let products of tensors that say they are on CUDA run so; `loaded` becomes the configs of what was loaded."""
    cuda_stand_ins.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (10, 0))
    _target_of_index.cache_clear()
    columns_mm._launch.cache_clear()
    empty = torch.empty

    def empty_on_cpu(*shape, dtype, device=None, pin_memory=False):
        made = empty(*shape, dtype=dtype)
        made.view(torch.uint8).fill_(0xA5)
        return made if device is None else on_cuda(made)

    def load(config, device):
        loaded.append(config)
        return PlayedGemm(config) if isinstance(config, Sm100Config) else EmulatedKernel(kernels, config)

    monkeypatch.setattr(torch, "empty", empty_on_cpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(scale_layout, "launch", kernels.launch)
    monkeypatch.setattr(sm100_launch, "load", load)
    monkeypatch.setattr(sm100_launch, "parameter_of", parameter_of)
    monkeypatch.setattr(sm100_launch, "multiprocessors", lambda device: 3)
