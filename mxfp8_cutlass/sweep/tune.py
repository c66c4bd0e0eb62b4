"""From a sweep to the table that select_kernel reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from mxfp8_cutlass.storage import write_atomically
from mxfp8_cutlass.sweep.results import Outcome, Sweep
from mxfp8_cutlass.tuned.table import Entry, Shape, Table, configs_by_name, read

ABOUT = ("device", "driver_version", "torch", "torch's CUDA", "nvidia-cuda-nvrtc")
"""What the table keeps of where it was measured."""


def entries_of(sweep: Sweep) -> tuple[list[Entry], list[str]]:
    """An entry for each shape whose problems are complete, and a line for each problem that gives none.

    Problems that look alike to the host (an even and a skewed split) get one kernel: the one with the least geometric
    mean of its times, each over that problem's best, among those that were timed on all of them.
    """
    groups: dict[Shape, list[Outcome]] = {}
    notes = []
    for outcome in sweep.outcomes:
        shape = outcome.problem.shape
        if not outcome.planned:
            continue
        if not outcome.is_complete(sweep.samples):
            notes.append(f"{outcome.problem.name}: no entry, it is not complete")
        elif shape is None:
            notes.append(f"{outcome.problem.name}: no entry, its problems differ in N or K and the model serves those")
        elif not outcome.times():
            notes.append(f"{outcome.problem.name}: no entry, every kernel failed")
        else:
            groups.setdefault(shape, []).append(outcome)
    entries = []
    for shape, outcomes in groups.items():
        times = [outcome.times() for outcome in outcomes]
        common = [name for name in times[0] if all(name in of for of in times)]
        if not common:
            notes.append(f"{', '.join(o.problem.name for o in outcomes)}: no entry, no kernel was timed on all")
            continue
        best = min(common, key=lambda name: _mean([of[name] / min(of.values()) for of in times]))
        names = ", ".join(outcome.problem.name for outcome in outcomes)
        entries.append(Entry(shape, best, round(_mean([of[best] for of in times]), 2), names))
    return entries, notes


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def apply(sweep: Sweep, path: Path) -> tuple[Table, list[str]]:
    """Write the entries of a sweep into a table, in place of those of the same shapes and facts.

    Returns the new table, and lines on what was left out: problems without an entry, and entries dropped as stale.

    Raises:
        ValueError: the file is no table; or it is one of another GPU.
    """
    old, (entries, notes) = read(path), entries_of(sweep)
    if old.entries and (gpu := (old.about or {}).get("device")) != sweep.gpu:
        raise ValueError(f"{path} was measured on {gpu!r} and this sweep on {sweep.gpu!r}: write to another file")
    known = configs_by_name()
    mine = {name for name, config in known.items() if all(getattr(config, f) == v for f, v in sweep.facts.items())}
    shapes = {entry.shape for entry in entries}
    kept = []
    for entry in old.entries:
        if entry.config not in known:
            notes.append(f"{entry.workloads}: dropped, {entry.config} exists no longer")
        elif not (entry.shape in shapes and entry.config in mine):
            kept.append(entry)
    ordered = sorted([*kept, *entries], key=lambda entry: (entry.shape, entry.config))
    last = sweep.runs[-1] if sweep.runs else {}
    about = {"target_sm": sweep.target_sm, **{name: last[name] for name in ABOUT if name in last}}
    table = Table(tuple(ordered), {**about, "device": sweep.gpu})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, table.to_json().encode())
    return table, notes
