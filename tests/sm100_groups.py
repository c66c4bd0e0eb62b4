"""What the arrays of arguments of an SM100 grouped GEMM must be: plain Python integers, group by group."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch

from mxfp8_cutlass.launch import Addresses
from mxfp8_cutlass.sm100_arguments import GroupArrays, Sm100ArgumentsParams
from mxfp8_cutlass.sm100_launch import set_operands

BASES = Addresses(a=1 << 40, b=2 << 40, sfa=3 << 40, sfb=4 << 40, sfb_tiles=0, out=5 << 40, bias=6 << 40)


class Case(NamedTuple):
    """One call. sizes: of the groups that offs ends, or the counts of a batch, or None for a batch of equal groups."""

    sizes: list[int] | None
    groups: int
    shape: tuple[int, int, int]
    cuts_k: bool
    tokens: int
    out_bytes: int
    counted: bool = False

    def index(self, dtype: torch.dtype) -> torch.Tensor | None:
        """offs, or counts."""
        if self.sizes is None:
            return None
        sizes = torch.tensor(self.sizes)
        return (sizes if self.counted else sizes.cumsum(0)).to(dtype)

    def params(self, index: torch.Tensor | None, bases: Addresses = BASES) -> Sm100ArgumentsParams:
        """The kernel's argument, but for the arrays' addresses. `index`: lies where the kernel runs."""
        m, n, k = self.shape
        at = 0 if index is None else index.data_ptr()
        params = Sm100ArgumentsParams(
            m=m,
            n=n,
            k=k,
            tokens=self.tokens if self.cuts_k else m,
            index_is_int64=index is not None and index.dtype == torch.int64,
            groups=self.groups,
            cuts_k=self.cuts_k,
            out_bytes=self.out_bytes,
        )
        set_operands(params, bases._replace(**{"counts" if self.counted else "offs": at}))
        return params


def tiles(n: int) -> int:
    """Units of 128 that hold n."""
    return -(-n // 128)


def expected(case: Case) -> dict[str, list[list[int]]]:
    """Each array's entries."""
    (rows, n, row_k), found = case.shape, {name: [] for name, _, _ in GroupArrays.FIELDS}
    quads = tiles(row_k)
    first = row_tile = 0
    for g in range(case.groups):
        m, k, column = rows, row_k, 0
        if case.sizes is None or case.counted:
            m = rows if case.sizes is None else case.sizes[g]
            row, matrix, out_row = g * rows, g, g * rows
            sfa, sfb = g * tiles(rows) * quads, g * tiles(n) * quads
        elif case.cuts_k:
            k, column = case.sizes[g], 128 * (first // 128 + g)
            row, matrix, out_row, sfa, sfb = 0, 0, g * rows, column // 128, column // 128
        else:
            m = case.sizes[g]
            row, matrix, out_row, sfa, sfb = first, g, first, row_tile * quads, g * tiles(n) * quads
        found["shapes"].append([m if m and n and k else 0, n, k])
        found["a"].append([BASES.a + row * row_k + column])
        found["b"].append([BASES.b + matrix * n * row_k + column])
        found["sfa"].append([BASES.sfa + 512 * sfa])
        found["sfb"].append([BASES.sfb + 512 * sfb])
        found["out"].append([BASES.out + out_row * n * case.out_bytes])
        found["bias"].append([BASES.bias + g * n * case.out_bytes])
        found["stride_a"].append([row_k])
        found["stride_b"].append([row_k])
        found["stride_out"].append([n])
        found["layout_sfa"].append([tiles(m), tiles(k), 1, 512 * quads, 512 * quads * tiles(m)])
        found["layout_sfb"].append([tiles(n), tiles(k), 1, 512 * quads, 512 * quads * tiles(n)])
        if case.sizes is not None and not case.counted:
            first += case.sizes[g]
            row_tile += tiles(case.sizes[g])
    return found


def random_case(rng: random.Random) -> Case:
    """A case of any kind: few or many groups, empty ones, rows behind the last group."""
    groups = rng.choice([1, 2, 3, 8, 31, 128, 255, 256, 257, 700, 1024])
    n, k = 16 * rng.randint(1, 200), 32 * rng.randint(1, 200)
    out_bytes = rng.choice([2, 4])
    if rng.random() < 0.3:
        rows = rng.randint(0, 3000)
        counts = [rng.choice([0, 1, rows, rng.randint(0, rows)]) for _ in range(groups)] if rng.random() < 0.5 else None
        counts = counts and [min(count, rows) for count in counts]
        return Case(
            counts, groups, (rows, n, k), cuts_k=False, tokens=0, out_bytes=out_bytes, counted=counts is not None
        )
    typical = rng.choice([1, 5, 127, 128, 129, 1000])
    sizes = [rng.choice([0, 1, 128, rng.randint(0, 2 * typical)]) for _ in range(groups)]
    tokens = sum(sizes) + rng.choice([0, 0, 1, 500])
    if rng.random() < 0.5:
        capacity = 128 * (tokens // 128 + groups)
        return Case(
            sizes, groups, (16 * rng.randint(1, 200), n, capacity), cuts_k=True, tokens=tokens, out_bytes=out_bytes
        )
    return Case(sizes, groups, (tokens, n, k), cuts_k=False, tokens=tokens, out_bytes=out_bytes)
