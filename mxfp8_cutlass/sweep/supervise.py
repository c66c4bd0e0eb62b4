"""The process that measures is a child: a kernel that takes its context, or the process, along stops no sweep."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mxfp8_cutlass.sweep.results import load
from mxfp8_cutlass.sweep.run import DeviceLostError, Plan, run

LOST = 75
"""Exit status of a child that a new one can take over from."""
INTERRUPTED = 130


class Bar:
    """A bar on the terminal; where there is none, one line at the end."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("sweep"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._console = console
        self._progress = Progress(*columns, TextColumn("{task.description}"), console=console)
        self._task = self._progress.add_task("", total=0)
        self._total = 0

    def expect(self, steps: int) -> None:
        """So many more steps are to come."""
        self._total += steps
        self._progress.update(self._task, total=self._total)

    def step(self, text: str, count: int = 1) -> None:
        """They are done."""
        self._progress.update(self._task, advance=count, description=text)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def measure(plan: Plan, path: Path, device: int) -> None:
    """What the child does. Exits with LOST if a new process is to go on, and INTERRUPTED after Ctrl-C."""
    console = Console(width=None if sys.stdout.isatty() else 240)
    try:
        with Bar(console) as bar:
            run(plan, path, torch.device("cuda", device), bar)
    except DeviceLostError as error:
        console.print(f"{error}; going on in a new process", markup=False, highlight=False, soft_wrap=True)
        sys.exit(LOST)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except ValueError as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


def in_a_child(plan: Plan, path: Path, device: int) -> int:
    """Measure in a new process, and return its exit status."""
    child = multiprocessing.get_context("spawn").Process(target=measure, args=(plan, path, device))
    child.start()
    try:
        child.join()
    except KeyboardInterrupt:  # the child got it too
        child.join()
        return INTERRUPTED
    return child.exitcode or 0


def supervise(start: Callable[[], int], path: Path) -> int:
    """Start processes until one ends by itself, as long as each that a kernel ended brought the file further."""
    before = None
    while True:
        status = start()
        crashed = status == LOST or (status < 0 and status not in {-signal.SIGINT, -signal.SIGTERM})
        if not crashed:
            return status
        now = path.read_bytes() if path.exists() else None
        if now is None or now == before or (status != LOST and load(path).pending is None):
            return status
        before = now
