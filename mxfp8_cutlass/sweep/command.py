"""What the command line does around a sweep: from options to problems, from results to files and a short table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mxfp8_cutlass.storage import write_atomically
from mxfp8_cutlass.sweep import report, tune
from mxfp8_cutlass.sweep.problems import Facts, Problem, parse_list, parse_stacked, workloads
from mxfp8_cutlass.sweep.results import Sweep, load, merge
from mxfp8_cutlass.tuned import table as tuned


def problems(
    names: Sequence[str] | None,
    lists: Sequence[str] | None,
    stacked: Sequence[str] | None,
    masked: Sequence[str] | None,
    facts: Facts,
) -> list[Problem]:
    """What the options ask for, each once; all of bench's workloads, if they ask for nothing.

    Raises:
        ValueError: an unknown workload, a text that is no problem, or facts that no kernel has.
    """
    known = workloads()
    for name in names or ():
        if name not in known:
            raise ValueError(f"--workload {name!r} must be one of: {', '.join(known)}")
    chosen = [known[name] for name in names or (() if lists or stacked or masked else known)]
    chosen += [parse_list(text) for text in lists or ()]
    chosen += [parse_stacked(text) for text in stacked or ()]
    chosen += [parse_stacked(text, masked=True) for text in masked or ()]
    for problem in chosen:
        problem.ranked("90a", facts)
    return list({problem.key: problem for problem in chosen}.values())


def merged(files: Sequence[Path], path: Path) -> Sweep:
    """Join files into one.

    Raises:
        OSError: one cannot be read.
        ValueError: one holds something else, or they do not fit together.
    """
    sweep = merge([load(file) for file in files])
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep.save(path)
    return sweep


def finish(sweep: Sweep, path: Path, table: Path | None, console: Console, *, apply: bool) -> bool:
    """Write tables and picture beside the results, print what matters, and write the tuned table if asked for.

    Returns whether a kernel failed.

    Raises:
        ValueError: the tuned table cannot be written to; see `tune.apply`.
    """

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    write_atomically(path.with_suffix(".md"), report.to_markdown(sweep).encode())
    try:
        report.draw(sweep, path.with_suffix(".png"))
    except ImportError:
        say('no picture without matplotlib: pip install -e ".[bench]"')
    shown = Table(*report.HEADER, title=f"{sweep.gpu}: medians in us; losses are beyond the best")
    for verdict in report.verdicts(sweep):
        shown.add_row(*(report.short_name(sweep, cell) for cell in verdict.row()))
    console.print(shown)
    failures = report.failures(sweep)
    for line in failures:
        say(f"failed and left out: {line}")
    for entry in tuned.stale(tuned.load(sweep.target_sm)):
        say(f"stale: the tuned table's {entry.config} does not exist ({entry.workloads})")
    if apply:
        where = table or tuned.table_path(sweep.target_sm)
        written, notes = tune.apply(sweep, where)
        for note in notes:
            say(note)
        say(f"{where}: {len(written.entries)} entries")
    return bool(failures)
