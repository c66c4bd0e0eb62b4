"""What is timed: products that `offs` cuts out of one matrix, or lists of products."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby

from mxfp8_cutlass.bench.workloads import WORKLOADS, Workload
from mxfp8_cutlass.cost_model import Candidate
from mxfp8_cutlass.generator.tile_config import TileConfig
from mxfp8_cutlass.select import check_problem_sizes, rank, rank_stacked, select_kernel, select_stacked
from mxfp8_cutlass.tuned.table import Shape, shape_of

Facts = dict[str, int | str]
"""promotion_k, sfb_rows, element_a, element_b, out, in this order: what all kernels of a sweep have in common."""

KINDS = ("contiguous", "masked")
"""Of bench's workloads: those that one call of grouped_mm with `offs` computes."""


@dataclass(frozen=True)
class Problem:
    """(M, N, K) of each group; `split`: rows of one matrix, cut by offs, with N and K in common."""

    name: str
    sizes: tuple[tuple[int, int, int], ...]
    split: bool

    @property
    def text(self) -> str:
        """The sizes, equal neighbours once: "8*2048x14336x4096 17x512x512"."""
        runs = ((len(list(group)), sizes) for sizes, group in groupby(self.sizes))
        return " ".join((f"{count}*" if count > 1 else "") + "x".join(map(str, sizes)) for count, sizes in runs)

    @property
    def key(self) -> tuple[bool, str]:
        """What makes it this problem; a name does not."""
        return self.split, self.text

    @property
    def shape(self) -> Shape | None:
        """What a table's entry is found by: of a split the host does not know which groups are empty."""
        if not self.split:
            return shape_of(self.sizes)
        return Shape(len(self.sizes), sum(m for m, _, _ in self.sizes), *self.sizes[0][1:])

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * sum(m * n * k for m, n, k in self.sizes)

    def ranked(self, target_sm: str, facts: Facts) -> list[Candidate]:
        """All kernels that compute it, by the cost model."""
        if not self.split:
            return rank(self.sizes, target_sm, **facts)  # type: ignore[arg-type] # Facts has rank's types by name
        s = self.shape
        assert s is not None  # noqa: S101 - a split has a shape
        return rank_stacked(s.m, s.n, s.k, s.groups, target_sm, facts, split=True)

    def selected(self, target_sm: str, facts: Facts) -> TileConfig:
        """What a call picks as things stand."""
        if not self.split:
            return select_kernel(self.sizes, target_sm, **facts)  # type: ignore[arg-type] # as above
        s = self.shape
        assert s is not None  # noqa: S101 - as above
        return select_stacked(s.m, s.n, s.k, s.groups, target_sm, *facts.values(), split=True)


def of_workload(workload: Workload) -> Problem:
    """One of bench's workloads."""
    return _split(workload.name, workload)


def workloads() -> dict[str, Problem]:
    """Bench's workloads by name, as far as a sweep can time them."""
    return {workload.name: of_workload(workload) for workload in WORKLOADS if workload.kind in KINDS}


def parse_list(text: str) -> Problem:
    """Problems "M,N,K;M,N,K", each a product of its own, in one launch.

    Raises:
        ValueError: the text is something else, or a size is out of range.
    """
    sizes = tuple(_numbers(part, 3, "M,N,K;M,N,K;...", text) for part in text.split(";"))
    return _checked(Problem(text, tuple((m, n, k) for m, n, k in sizes), split=False))


def parse_stacked(text: str) -> Problem:
    """Rows "G,M,N,K": M in all, split evenly into G groups by offs.

    Raises:
        ValueError: as for `parse_list`.
    """
    groups, m, n, k = _numbers(text, 4, "G,M,N,K", text)
    if not groups:
        raise ValueError(f"{text!r}: G must be positive")
    return _checked(_split(text, Workload(text, groups, m, n, k)))


def parse_text(name: str, text: str, *, split: bool) -> Problem:
    """The inverse of `Problem.text`.

    Raises:
        ValueError: as for `parse_list`.
    """
    sizes: list[tuple[int, int, int]] = []
    for part in text.split():
        match = re.fullmatch(r"(?:(\d+)\*)?(\d+)x(\d+)x(\d+)", part)
        if match is None:
            raise ValueError(f"{part!r} must be MxNxK or COUNT*MxNxK")
        sizes += [(int(match[2]), int(match[3]), int(match[4]))] * int(match[1] or 1)
    return _checked(Problem(name, tuple(sizes), split))


def _split(name: str, w: Workload) -> Problem:
    return Problem(name, tuple((m, w.n, w.k) for m in w.sizes), split=True)


def _numbers(text: str, count: int, form: str, whole: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) != count or not all(re.fullmatch(r"\s*\d+\s*", part) for part in parts):
        raise ValueError(f"{whole!r} must be {form}")
    return tuple(map(int, parts))


def _checked(problem: Problem) -> Problem:
    check_problem_sizes(problem.sizes)
    if not any(m for m, _, _ in problem.sizes):
        raise ValueError(f"{problem.name!r}: no group has rows, so there is nothing to time")
    return problem
