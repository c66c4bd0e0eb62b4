"""Arrays that an SM100 grouped GEMM reads, an entry for each group, and the kernel that fills them from offs.

The structs mirror templates/include/mxfp8/sm100_arguments.cuh.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch


class Sm100ArgumentsParams(ctypes.Structure):
    """mxfp8::Sm100ArgumentsParams."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("shapes", "a", "b", "sfa", "sfb", "out", "stride_a", "stride_b", "stride_out"),
                *("layout_sfa", "layout_sfb", "base_a", "base_b", "base_sfa", "base_sfb", "base_out", "offs"),
            )
        ),
        ("m", ctypes.c_longlong),
        ("n", ctypes.c_longlong),
        ("k", ctypes.c_longlong),
        ("tokens", ctypes.c_longlong),
        ("offs_is_int64", ctypes.c_uint),
        ("groups", ctypes.c_uint),
        ("cuts_k", ctypes.c_uint),
        ("out_bytes", ctypes.c_uint),
    )


class Sm100Bases(NamedTuple):
    """Addresses of the operands of all groups."""

    a: int
    b: int
    sfa: int
    sfb: int
    out: int


class GroupArrays:
    """Memory for the arrays, in one tensor, in the order of the struct's fields.

    Args:
        groups: entries of each array.
        device: where the kernels run.
    """

    FIELDS = (
        # (field, integers of an entry, their type)
        ("shapes", 3, torch.int32),
        ("a", 1, torch.int64),
        ("b", 1, torch.int64),
        ("sfa", 1, torch.int64),
        ("sfb", 1, torch.int64),
        ("out", 1, torch.int64),
        ("stride_a", 1, torch.int64),
        ("stride_b", 1, torch.int64),
        ("stride_out", 1, torch.int64),
        ("layout_sfa", 5, torch.int32),
        ("layout_sfb", 5, torch.int32),
    )

    def __init__(self, groups: int, device: torch.device) -> None:
        self.groups = groups
        sizes = [-(-groups * count * dtype.itemsize // 16) * 16 for _, count, dtype in self.FIELDS]
        self.memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self._places = [sum(sizes[:i]) for i in range(len(sizes))]

    def view(self, field: str) -> torch.Tensor:
        """One array, (groups, integers of an entry)."""
        for (name, count, dtype), place in zip(self.FIELDS, self._places, strict=True):
            if name == field:
                size = self.groups * count * dtype.itemsize
                return self.memory[place : place + size].view(dtype).view(self.groups, count)
        raise KeyError(field)

    def params(
        self,
        shape: tuple[int, int, int],
        bases: Sm100Bases,
        offs: torch.Tensor | None,
        *,
        cuts_k: bool = False,
        tokens: int | None = None,
        out_bytes: int = 2,
    ) -> Sm100ArgumentsParams:
        """Return the kernel's argument.

        Args:
            shape: M, N, K of all groups together along the axis that offs cuts. K is the length of a row of A and B.
            bases: where operands lie; scales in the blocked layout, those of groups of rows at padded bases.
            offs: int32 or int64, the end of each group; None for a batch of equal products.
            cuts_k: offs cuts the contraction, of operands as columns (columns.group_bounds), and not rows.
            tokens: what offs may reach; M or K unless given.
            out_bytes: of an element of the output.
        """
        start = self.memory.data_ptr()
        m, n, k = shape
        return Sm100ArgumentsParams(
            *(start + place for place in self._places),
            *bases,
            None if offs is None else offs.data_ptr(),
            m,
            n,
            k,
            (k if cuts_k else m) if tokens is None else tokens,
            offs is not None and offs.dtype == torch.int64,
            self.groups,
            cuts_k,
            out_bytes,
        )
