"""Parameters of an SM100 grouped GEMM: CUTLASS's code makes them on the device, the driver encodes their tensor maps.

The bytes depend on the kernel, the number of groups and the addresses of its arrays, not on shapes: they are made once.
Structs mirror templates/include/mxfp8/sm100_params.cuh, and requests for tensor maps cutlass_patches.py.
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import torch
from cuda.bindings import driver

from mxfp8_cutlass.generator.sm100_config import Sm100Config
from mxfp8_cutlass.generator.sm100_launch_config import Sm100ParamsConfig
from mxfp8_cutlass.kernel import LaunchError, current_stream, load, target_of
from mxfp8_cutlass.sm100_arguments import Sm100ArgumentsParams

PARAMS_BYTES = 4096
FACTS = 6
TAG = 0x54534555514552
MAP_BYTES = 128


class Sm100BuildParams(ctypes.Structure):
    """mxfp8::Sm100BuildParams."""

    _fields_ = (
        ("arrays", Sm100ArgumentsParams),
        ("params", ctypes.c_void_p),
        ("facts", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("beta", ctypes.c_float),
        ("sms", ctypes.c_int),
    )


class Facts(NamedTuple):
    """What CUTLASS says about a kernel and a launch of it."""

    params_bytes: int
    workspace_bytes: int
    shared_bytes: int
    grid_x: int
    grid_y: int
    grid_z: int


class Built(NamedTuple):
    """A kernel's parameter, as bytes, and what belongs to it."""

    params: bytes
    facts: Facts


class MapRequest(NamedTuple):
    """A call of cuTensorMapEncodeTiled that CUTLASS would have made. Values of cuda.h's enums; strides in bytes."""

    format: int
    swizzle: int
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    @classmethod
    def read(cls, data: bytes) -> MapRequest | None:
        """Return the request that 128 bytes hold, if they do."""
        tag, kind, address, *numbers = struct.unpack_from("<12Q5H", data)
        if tag != TAG:
            return None
        rank = kind >> 8 & 0xFF
        dims, strides, box = numbers[:5], numbers[5:9], numbers[9:]
        return cls(
            kind & 0xFF, kind >> 16 & 0xFF, address, tuple(dims[:rank]), tuple(strides[: rank - 1]), tuple(box[:rank])
        )

    def encode(self) -> bytes:
        """Let the driver encode it, with what CUTLASS gives all its maps.

        Raises:
            LaunchError: the driver refused.
        """
        rank = len(self.dims)
        status, encoded = driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType(self.format),
            rank,
            self.address,
            [driver.cuuint64_t(n) for n in self.dims],
            [driver.cuuint64_t(n) for n in self.strides],
            [driver.cuuint32_t(n) for n in self.box],
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle(self.swizzle),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        if status:
            raise LaunchError(f"cuTensorMapEncodeTiled for {self}: {status.name}")
        return ctypes.string_at(encoded.getPtr(), MAP_BYTES)


def requests(params: bytes) -> dict[int, MapRequest]:
    """Return the requests in a kernel's parameter, by their place."""
    places = range(0, len(params) - MAP_BYTES + 1, 8)
    return {at: found for at in places if (found := MapRequest.read(params[at : at + MAP_BYTES]))}


def encoded(params: bytes) -> bytes:
    """Replace each request by what the driver encodes."""
    result = bytearray(params)
    for at, request in requests(params).items():
        result[at : at + MAP_BYTES] = request.encode()
    return bytes(result)


def build(
    config: Sm100Config, arrays: Sm100ArgumentsParams, workspace: int, *, accumulate: bool, sms: int, device: int
) -> Built:
    """Run CUTLASS's code on a device and return the parameter with requests. Waits for the device.

    Args:
        config: the GEMM; the device need not be able to run it.
        arrays: of which the arrays' addresses and the number of groups matter.
        workspace: address of `Facts.workspace_bytes`, in which the kernel keeps tensor maps; 0 to ask for the size.
        accumulate: whether the kernel adds to the output.
        sms: multiprocessors that the persistent grid is for.
        device: where this runs.
    """
    where = torch.device("cuda", device)
    memory = torch.zeros(PARAMS_BYTES + 8 * FACTS, dtype=torch.uint8, device=where)
    start = memory.data_ptr()
    params = Sm100BuildParams(arrays, start, start + PARAMS_BYTES, workspace, float(accumulate), sms)
    load(Sm100ParamsConfig(target_of(device), config), device).launch(params, 1, current_stream(device))
    data = memory.cpu().numpy().tobytes()
    facts = Facts(*struct.unpack_from(f"<{FACTS}Q", data, PARAMS_BYTES))
    return Built(data[: facts.params_bytes], facts)
