"""What a sweep has found so far, and its file: written anew after each measurement, so that a run can go on."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mxfp8_cutlass.storage import write_atomically
from mxfp8_cutlass.sweep.problems import Facts, Problem, parse_text

FORMAT = 1
ATTEMPTS = 2
"""How often a kernel may end the process before that counts as its own failure, not as an interruption."""


@dataclass
class Record:
    """A kernel on a problem."""

    source: str
    """What the kernel was built from: a record of another source is void."""
    predicted_us: float
    samples_us: list[float] = field(default_factory=list)
    worst_row: float | None = None
    """Largest relative error of the rows that were checked."""
    registers: int | None = None
    spill_bytes: int | None = None
    crashes: int = 0
    """How often a process ended while this kernel ran."""
    error: str = ""
    """Why it has no time."""

    @property
    def us(self) -> float | None:
        """The median, unless there is none or the kernel failed."""
        return statistics.median(self.samples_us) if self.samples_us and not self.error else None


@dataclass
class Outcome:
    """A problem, the kernels that were to be timed, and their records by name."""

    problem: Problem
    kernels: int = 0
    """How many compute it; those that are not planned are pruned."""
    planned: list[str] = field(default_factory=list)
    model: str = ""
    """The cost model's choice."""
    selected: str = ""
    """The choice of select_kernel with the tuned table of that time."""
    records: dict[str, Record] = field(default_factory=dict)

    def times(self) -> dict[str, float]:
        """Medians in microseconds of the planned kernels that have one, fastest first."""
        found = {name: us for name in self.planned if (us := self._us(name)) is not None}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def failures(self) -> dict[str, str]:
        """Errors by kernel."""
        return {name: record.error for name, record in self.records.items() if record.error and name in self.planned}

    def is_complete(self, samples: int) -> bool:
        """Whether each planned kernel was timed often enough, or failed."""
        return bool(self.planned) and all(self.is_done(name, samples) for name in self.planned)

    def is_done(self, name: str, samples: int) -> bool:
        """Whether nothing is left to do for a kernel."""
        record = self.records.get(name)
        return record is not None and (bool(record.error) or len(record.samples_us) >= samples)

    def _us(self, name: str) -> float | None:
        record = self.records.get(name)
        return None if record is None else record.us


@dataclass
class Pending:
    """What runs right now. If a file has it, a process ended there."""

    layout: str
    problem: str
    config: str


@dataclass
class Sweep:
    """All results of one GPU model and one set of facts."""

    gpu: str
    target_sm: str
    facts: Facts
    samples: int
    """Timings of each kernel that make it complete."""
    runs: list[dict[str, str]] = field(default_factory=list)
    """GPU, driver, clocks and versions of each run that added to it."""
    outcomes: list[Outcome] = field(default_factory=list)
    pending: Pending | None = None

    def outcome(self, problem: Problem) -> Outcome:
        """The outcome of a problem; a new one if there is none."""
        for outcome in self.outcomes:
            if outcome.problem.key == problem.key:
                return outcome
        self.outcomes.append(Outcome(problem))
        return self.outcomes[-1]

    def note_crash(self) -> None:
        """If a process ended while a kernel ran, count that; the second time it is the kernel's failure."""
        if self.pending is None:
            return
        for outcome in self.outcomes:
            record = outcome.records.get(self.pending.config)
            if record is not None and outcome.problem.key == (self.pending.layout, self.pending.problem):
                record.crashes += 1
                if record.crashes >= ATTEMPTS:
                    record.error = f"the process ended {record.crashes} times while it ran"
        self.pending = None

    def save(self, path: Path) -> None:
        """Replace the file."""
        found = asdict(self)
        for row, outcome in zip(found["outcomes"], self.outcomes, strict=True):
            row["problem"] = {
                "name": outcome.problem.name,
                "layout": outcome.problem.layout,
                "sizes": outcome.problem.text,
            }
            for name, record in outcome.records.items():
                row["records"][name]["samples_us"] = [round(us, 2) for us in record.samples_us]
        write_atomically(path, (json.dumps({"format": FORMAT, **found}, allow_nan=False) + "\n").encode())


def load(path: Path) -> Sweep:
    """Read a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else, or results of another format.
    """
    try:
        found = json.loads(path.read_text())
        if (version := found.pop("format")) != FORMAT:
            raise ValueError(f"its format is {version!r}, not {FORMAT}")  # noqa: TRY301 - worded once, below
        outcomes, pending = found.pop("outcomes"), found.pop("pending")
        sweep = Sweep(**found)
        sweep.outcomes = [_outcome(row) for row in outcomes]
        sweep.pending = None if pending is None else Pending(**pending)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no results of a sweep: {type(error).__name__}: {error}") from error
    return sweep


def _outcome(row: dict[str, Any]) -> Outcome:
    problem, records = row.pop("problem"), row.pop("records")
    return Outcome(
        parse_text(problem["name"], problem["sizes"], problem["layout"]),
        records={name: Record(**record) for name, record in records.items()},
        **row,
    )


def merge(sweeps: Iterable[Sweep]) -> Sweep:
    """Join results of parts of one sweep. Of two records of a kernel the failed one stays, else the longer one.

    Raises:
        ValueError: they are of different GPUs, facts or numbers of samples, or of different sources of one kernel.
    """
    first, *others = sweeps
    merged = Sweep(first.gpu, first.target_sm, first.facts, first.samples)
    for sweep in (first, *others):
        for name in ("gpu", "target_sm", "facts", "samples"):
            if getattr(sweep, name) != getattr(first, name):
                raise ValueError(
                    f"{name} is {getattr(sweep, name)!r} in one file and {getattr(first, name)!r} in another"
                )
        merged.runs += [run for run in sweep.runs if run not in merged.runs]
        for outcome in sweep.outcomes:
            _merge_outcome(merged.outcome(outcome.problem), outcome)
    return merged


def _merge_outcome(into: Outcome, outcome: Outcome) -> None:
    into.kernels, into.model, into.selected = outcome.kernels, outcome.model, outcome.selected
    into.planned += [name for name in outcome.planned if name not in into.planned]
    for name, record in outcome.records.items():
        old = into.records.get(name)
        if old is not None and old.source != record.source:
            raise ValueError(f"{name} was built from different sources")
        if old is None or (bool(record.error), len(record.samples_us)) > (bool(old.error), len(old.samples_us)):
            into.records[name] = record
