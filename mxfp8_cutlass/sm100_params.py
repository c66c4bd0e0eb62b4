"""Parameters of an SM100 grouped GEMM: CUTLASS's code makes them on the device, the driver encodes their tensor maps.

The bytes depend on the kernel, the number of groups and the addresses of its arrays, not on shapes: they are made once,
and addresses set for each launch. Structs mirror templates/include/mxfp8/sm100_params.cuh, and requests for tensor
maps cutlass_patches.py.
"""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache
from typing import NamedTuple

import torch
from cuda.bindings import driver

from mxfp8_cutlass.generator.render import KernelConfig
from mxfp8_cutlass.kernel import LaunchError, current_stream, load, multiprocessors
from mxfp8_cutlass.sm100_arguments import GroupArrays, Sm100ArgumentsParams

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

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks along x, y and z."""
        return self.grid_x, self.grid_y, self.grid_z


class Built(NamedTuple):
    """A kernel's parameter as CUTLASS makes it, with requests for tensor maps, and what belongs to it."""

    params: bytes
    facts: Facts


class Parameter(NamedTuple):
    """A kernel's parameter for memory that begins at address 0: arrays of arguments, then CUTLASS's workspace."""

    data: bytes
    addresses: tuple[int, ...]
    """Where in `data` there are addresses in that memory."""
    facts: Facts

    def at(self, start: int) -> ctypes.Array[ctypes.c_char]:
        """The parameter for memory that begins at an address."""
        moved = bytearray(self.data)
        for place in self.addresses:
            (address,) = struct.unpack_from("<Q", moved, place)
            struct.pack_into("<Q", moved, place, address + start)
        return (ctypes.c_char * len(moved)).from_buffer(moved)


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


STARTS = (1 << 40, 3 << 41)
"""Where the memory is said to lie, for `relocatable` to see what depends on it. It is not accessed."""


def relocatable(first: Built, second: Built) -> Parameter:
    """Compare the parameters for memory at both of STARTS: words that differ by their distance are addresses in it.

    Other bytes that differ are those of empty members and of padding, which CUTLASS leaves as it finds them: they
    become 0. Tests compare the result with parameters that were made for the very memory.
    """
    data, addresses = bytearray(first.params), []
    words = zip(struct.iter_unpack("<Q", first.params), struct.iter_unpack("<Q", second.params), strict=True)
    for place, ((one,), (two,)) in zip(range(0, len(data), 8), words, strict=True):
        if two - one == STARTS[1] - STARTS[0]:
            struct.pack_into("<Q", data, place, one - STARTS[0])
            addresses.append(place)
        else:
            for at in range(place, place + 8):
                data[at] = data[at] if data[at] == second.params[at] else 0
    return Parameter(bytes(data), tuple(addresses), first.facts)


def request_of(groups: int, start: int, *, accumulate: bool, bias: bool, sms: int) -> Sm100BuildParams:
    """What CUTLASS's code is to be run with for memory that begins at an address."""
    arrays, arguments = GroupArrays(groups), Sm100ArgumentsParams(groups=groups)
    arrays.set_addresses(arguments, start)
    if not bias:
        arguments.bias = None
    return Sm100BuildParams(arguments, None, None, start + arrays.nbytes, float(accumulate), sms)


@lru_cache(maxsize=256)
def parameter_of(builder: KernelConfig, groups: int, device: int, *, accumulate: bool, bias: bool) -> Parameter:
    """Run CUTLASS's code for a GEMM on a device, and let the driver encode its tensor maps. Waits for the device.

    Args:
        builder: the kernel that runs CUTLASS's code; its device need not be able to run the GEMM.
        groups: of the launch.
        device: where this runs; the GEMM's grid is for as many multiprocessors as it has.
        accumulate: whether the GEMM adds to the output.
        bias: whether it adds a bias.

    Raises:
        LaunchError: the first launch for these arguments falls into the capture of a CUDA graph.
    """
    if torch.cuda.is_current_stream_capturing():
        raise LaunchError(f"{builder.name} has to run once before a CUDA graph is captured: call once beforehand")
    first, second = (
        build(builder, request_of(groups, start, accumulate=accumulate, bias=bias, sms=multiprocessors(device)), device)
        for start in STARTS
    )
    found = relocatable(first, second)
    return found._replace(data=encoded(found.data))


def build(builder: KernelConfig, request: Sm100BuildParams, device: int) -> Built:
    """Run CUTLASS's code on a device and return what it made. Waits for the device."""
    memory = torch.zeros(PARAMS_BYTES + 8 * FACTS, dtype=torch.uint8, device=f"cuda:{device}")
    request.params, request.facts = memory.data_ptr(), memory.data_ptr() + PARAMS_BYTES
    load(builder, device).launch(request, 1, current_stream(device))
    data = memory.cpu().numpy().tobytes()
    facts = Facts(*struct.unpack_from(f"<{FACTS}Q", data, PARAMS_BYTES))
    return Built(data[: facts.params_bytes], facts)
