"""What the arrays of arguments of an SM100 grouped GEMM must be: plain Python integers, group by group."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch

from mxfp8_cutlass.sm100_arguments import GroupArrays, Sm100Bases

BASES = Sm100Bases(1 << 40, 2 << 40, 3 << 40, 4 << 40, 5 << 40)


class Case(NamedTuple):
    """One call: sizes of groups, or None for a batch."""

    sizes: list[int] | None
    groups: int
    shape: tuple[int, int, int]
    cuts_k: bool
    tokens: int
    out_bytes: int

    def offs(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The end of each group."""
        return None if self.sizes is None else torch.tensor(self.sizes).cumsum(0).to(dtype)


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
        if case.sizes is None:
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
        found["stride_a"].append([row_k])
        found["stride_b"].append([row_k])
        found["stride_out"].append([n])
        found["layout_sfa"].append([tiles(m), tiles(k), 1, 512 * quads, 512 * quads * tiles(m)])
        found["layout_sfb"].append([tiles(n), tiles(k), 1, 512 * quads, 512 * quads * tiles(n)])
        if case.sizes is not None:
            first += case.sizes[g]
            row_tile += tiles(case.sizes[g])
    return found


def random_case(rng: random.Random) -> Case:
    """A case of any kind: few or many groups, empty ones, rows behind the last group."""
    groups = rng.choice([1, 2, 3, 8, 31, 128, 255, 256, 257, 700, 1024])
    n, k = 16 * rng.randint(1, 200), 32 * rng.randint(1, 200)
    out_bytes = rng.choice([2, 4])
    if rng.random() < 0.2:
        return Case(None, groups, (rng.randint(0, 3000), n, k), cuts_k=False, tokens=0, out_bytes=out_bytes)
    typical = rng.choice([1, 5, 127, 128, 129, 1000])
    sizes = [rng.choice([0, 1, 128, rng.randint(0, 2 * typical)]) for _ in range(groups)]
    tokens = sum(sizes) + rng.choice([0, 0, 1, 500])
    if rng.random() < 0.5:
        capacity = 128 * (tokens // 128 + groups)
        return Case(
            sizes, groups, (16 * rng.randint(1, 200), n, capacity), cuts_k=True, tokens=tokens, out_bytes=out_bytes
        )
    return Case(sizes, groups, (tokens, n, k), cuts_k=False, tokens=tokens, out_bytes=out_bytes)
