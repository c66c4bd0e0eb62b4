"""Arrays that an SM100 grouped GEMM reads, an entry for each group, and the kernel that fills them from offs.

The structs mirror templates/include/mxfp8/sm100_arguments.cuh.
"""

from __future__ import annotations

import ctypes

import torch

ALIGNMENT = 128
"""Bytes that each array, and what follows the last one, begins at a multiple of."""


class Sm100ArgumentsParams(ctypes.Structure):
    """mxfp8::Sm100ArgumentsParams."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("shapes", "a", "b", "sfa", "sfb", "out", "bias", "stride_a", "stride_b", "stride_out"),
                *("layout_sfa", "layout_sfb"),
                *("base_a", "base_b", "base_sfa", "base_sfb", "base_out", "base_bias", "offs", "counts"),
            )
        ),
        ("m", ctypes.c_longlong),
        ("n", ctypes.c_longlong),
        ("k", ctypes.c_longlong),
        ("tokens", ctypes.c_longlong),
        ("index_is_int64", ctypes.c_uint),
        ("groups", ctypes.c_uint),
        ("cuts_k", ctypes.c_uint),
        ("out_bytes", ctypes.c_uint),
        ("writes_zeros", ctypes.c_uint),
        ("padding", ctypes.c_uint),
    )


class GroupArrays:
    """Where the arrays of a number of groups lie in one piece of memory, in the order of the struct's fields."""

    FIELDS = (
        # (field, integers of an entry, their type)
        ("shapes", 3, torch.int32),
        ("a", 1, torch.int64),
        ("b", 1, torch.int64),
        ("sfa", 1, torch.int64),
        ("sfb", 1, torch.int64),
        ("out", 1, torch.int64),
        ("bias", 1, torch.int64),
        ("stride_a", 1, torch.int64),
        ("stride_b", 1, torch.int64),
        ("stride_out", 1, torch.int64),
        ("layout_sfa", 5, torch.int32),
        ("layout_sfb", 5, torch.int32),
    )

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.places: dict[str, int] = {}
        """Each array's first byte."""
        self.nbytes = 0
        for field, count, dtype in self.FIELDS:
            self.places[field] = self.nbytes
            self.nbytes += -(-groups * count * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def view(self, memory: torch.Tensor, field: str) -> torch.Tensor:
        """One array, (groups, integers of an entry), in memory that begins with the arrays."""
        count, dtype = next((count, dtype) for name, count, dtype in self.FIELDS if name == field)
        place, size = self.places[field], self.groups * count * dtype.itemsize
        return memory[place : place + size].view(dtype).view(self.groups, count)

    def set_addresses(self, params: Sm100ArgumentsParams, start: int) -> None:
        """Let a struct's arrays lie in memory that begins at an address."""
        for field, place in self.places.items():
            setattr(params, field, start + place)
