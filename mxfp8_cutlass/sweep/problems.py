"""What is timed: stacks of groups that share N and K, cut by `offs` or masked by `counts`, and lists of products."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from mxfp8_cutlass.bench.workloads import WORKLOADS, Workload
from mxfp8_cutlass.cost_model import Candidate
from mxfp8_cutlass.generator.config_space import GroupedGemmConfig
from mxfp8_cutlass.select import check_problem_sizes, rank, rank_stacked, select_kernel, select_stacked
from mxfp8_cutlass.tuned.table import Shape, shape_of

Facts = dict[str, int | str]
"""promotion_k, sfb_rows, element_a, element_b, out, in this order: what all kernels of a sweep have in common."""

Layout = Literal["split", "masked", "list"]
"""Rows of one matrix that offs cuts; a room of rows for each group, with counts; a list of any shapes in one launch."""

LAYOUTS: dict[str, Layout] = {"contiguous": "split", "masked": "masked"}
"""By the kind of bench's workloads. Those of other kinds are not timed here."""


@dataclass(frozen=True)
class Problem:
    """(M, N, K) of each group, and how they lie; but for lists, N and K are all groups'."""

    name: str
    sizes: tuple[tuple[int, int, int], ...]
    layout: Layout

    @property
    def text(self) -> str:
        """The sizes, equal neighbours once: "8*2048x14336x4096 17x512x512"."""
        runs = ((len(list(group)), sizes) for sizes, group in groupby(self.sizes))
        return " ".join((f"{count}*" if count > 1 else "") + "x".join(map(str, sizes)) for count, sizes in runs)

    @property
    def key(self) -> tuple[Layout, str]:
        """What makes it this problem; a name does not."""
        return self.layout, self.text

    @property
    def expected_m(self) -> int:
        """Rows that a group has on average: what decode knows beforehand."""
        return -(-sum(m for m, _, _ in self.sizes) // len(self.sizes))

    @property
    def shape(self) -> Shape | None:
        """What a table's entry is found by: but for lists, the host does not know which groups are empty."""
        if self.layout == "list":
            return shape_of(self.sizes)
        groups, split = len(self.sizes), self.layout == "split"
        m = sum(m for m, _, _ in self.sizes) if split else self.expected_m * groups
        return Shape(groups, m, *self.sizes[0][1:])

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * sum(m * n * k for m, n, k in self.sizes)

    def ranked(self, target_sm: str, facts: Facts) -> list[Candidate]:
        """All kernels that compute it, by the cost model."""
        if self.layout == "list":
            return rank(self.sizes, target_sm, **facts)  # type: ignore[arg-type] # Facts has rank's types by name
        return rank_stacked(*self._stacked(), target_sm, facts, split=self.layout == "split")

    def selected(self, target_sm: str, facts: Facts) -> GroupedGemmConfig:
        """What a call picks as things stand."""
        if self.layout == "list":
            return select_kernel(self.sizes, target_sm, **facts)  # type: ignore[arg-type] # as above
        return select_stacked(*self._stacked(), target_sm, *facts.values(), split=self.layout == "split")

    def _stacked(self) -> tuple[int, int, int, int]:
        """M, N, K and G, as grouped_mm gives them to `select_stacked`."""
        _, n, k = self.sizes[0]
        m = sum(m for m, _, _ in self.sizes) if self.layout == "split" else self.expected_m
        return m, n, k, len(self.sizes)


def of_workload(workload: Workload) -> Problem:
    """One of bench's workloads."""
    return _stack(workload.name, workload)


def workloads() -> dict[str, Problem]:
    """Bench's workloads by name, as far as a sweep can time them."""
    return {workload.name: of_workload(workload) for workload in WORKLOADS if workload.kind in LAYOUTS}


def parse_list(text: str) -> Problem:
    """Problems "M,N,K;M,N,K", each a product of its own, in one launch.

    Raises:
        ValueError: the text is something else, or a size is out of range.
    """
    sizes = tuple(_numbers(part, 3, "M,N,K;M,N,K;...", text) for part in text.split(";"))
    return _checked(Problem(text, tuple((m, n, k) for m, n, k in sizes), "list"))


def parse_stacked(text: str, *, masked: bool = False) -> Problem:
    """A stack "G,M,N,K": M rows in all, distributed evenly to G groups, cut by offs or `masked` by counts.

    Raises:
        ValueError: as for `parse_list`.
    """
    groups, m, n, k = _numbers(text, 4, "G,M,N,K", text)
    if not groups:
        raise ValueError(f"{text!r}: G must be positive")
    return _checked(_stack(text, Workload(text, groups, m, n, k, kind="masked" if masked else "contiguous")))


def parse_text(name: str, text: str, layout: str) -> Problem:
    """The inverse of `Problem.text`.

    Raises:
        ValueError: as for `parse_list`.
    """
    known: dict[str, Layout] = {"split": "split", "masked": "masked", "list": "list"}
    if layout not in known:
        raise ValueError(f"layout {layout!r} must be one of {', '.join(known)}")
    sizes: list[tuple[int, int, int]] = []
    for part in text.split():
        match = re.fullmatch(r"(?:(\d+)\*)?(\d+)x(\d+)x(\d+)", part)
        if match is None:
            raise ValueError(f"{part!r} must be MxNxK or COUNT*MxNxK")
        sizes += [(int(match[2]), int(match[3]), int(match[4]))] * int(match[1] or 1)
    return _checked(Problem(name, tuple(sizes), known[layout]))


def _stack(name: str, w: Workload) -> Problem:
    return Problem(name, tuple((m, w.n, w.k) for m in w.sizes), LAYOUTS[w.kind])


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
