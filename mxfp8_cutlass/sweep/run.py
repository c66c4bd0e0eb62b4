"""A sweep: plan, compile, check, time in turns; the file is written after each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from mxfp8_cutlass.bench.about import CLOCKS, about, nvidia_smi
from mxfp8_cutlass.bench.speed import reason
from mxfp8_cutlass.cache import get_cubin
from mxfp8_cutlass.cost_model import Candidate
from mxfp8_cutlass.generator.config_space import GroupedGemmConfig
from mxfp8_cutlass.sweep.compiling import compile_all, missing, source_of
from mxfp8_cutlass.sweep.operands import Prepared, prepare, worst_row
from mxfp8_cutlass.sweep.problems import Facts, Problem
from mxfp8_cutlass.sweep.results import Outcome, Pending, Record, Sweep, load
from mxfp8_cutlass.sweep.timing import Replay, ReplayTimer, replay_timer_for


class DeviceLostError(RuntimeError):
    """A kernel's fault made the context unusable. It is recorded; a new process can go on."""


class Progress(Protocol):
    """Takes word of how far a run is."""

    def expect(self, steps: int) -> None:
        """So many more steps are to come."""

    def step(self, text: str, count: int = 1) -> None:
        """They are done."""


@dataclass(frozen=True)
class Plan:
    """What to time, and how."""

    problems: tuple[Problem, ...]
    facts: Facts
    target_sm: str = "90a"
    keep: float | None = 1.6
    """Leave out kernels for which the model expects more than so many times its best time; None: leave out none."""
    launches: int = 5
    """Launches in a graph."""
    rounds: int = 4
    """Replays of each graph. A problem's kernels take turns, so that clocks and temperature treat all alike."""
    jobs: int = 8
    """Processes that compile."""

    @property
    def samples(self) -> int:
        """Timings of each kernel."""
        return self.launches * self.rounds


def candidates(plan: Plan, problem: Problem) -> tuple[list[Candidate], list[Candidate]]:
    """The kernels to time, best first by the model, and all that there are. What select picks is always timed."""
    ranked = problem.ranked(plan.target_sm, plan.facts)
    if plan.keep is None:
        return ranked, ranked
    limit, selected = plan.keep * ranked[0].total_us, problem.selected(plan.target_sm, plan.facts)
    return [c for c in ranked if c.total_us <= limit or c.config == selected], ranked


def run(plan: Plan, path: Path, device: torch.device, progress: Progress, timer: ReplayTimer | None = None) -> Sweep:
    """Time all that the plan asks for and the file lacks.

    Args:
        plan: what and how.
        path: the file; made if it is missing, continued otherwise.
        device: where. The CPU runs the reference whatever the kernel, which is of use in tests only.
        progress: is told of each step.
        timer: the clock, if not the device's own.

    Raises:
        ValueError: the file holds results of another GPU or other facts, or is no such file.
        DeviceLostError: the process cannot go on, but a new one can.
    """
    facts = about(device)
    sweep = _open(path, plan, facts)
    work = [(sweep.outcome(problem), _pick(sweep, plan, problem)) for problem in plan.problems]
    sweep.save(path)
    todo = [(outcome, left) for outcome, left in work if left]
    if not todo:
        return sweep
    sweep.runs.append(facts)
    _compile(plan, device, sweep, todo, path, progress)
    clock = timer or replay_timer_for(device)
    try:
        for outcome, _ in todo:
            left = [c for c in candidates(plan, outcome.problem)[0] if not outcome.is_done(c.config.name, plan.samples)]
            if left:
                _Problem(plan, sweep, outcome, path, device, clock, progress).measure([c.config for c in left])
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    except KeyboardInterrupt:
        sweep.pending = None  # it was not the kernel's doing
        sweep.save(path)
        raise
    return sweep


def _open(path: Path, plan: Plan, facts: dict[str, str]) -> Sweep:
    gpu = facts["device"]
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return Sweep(gpu, plan.target_sm, plan.facts, plan.samples)
    sweep = load(path)
    for name, now in (("gpu", gpu), ("target_sm", plan.target_sm), ("facts", plan.facts)):
        if (then := getattr(sweep, name)) != now:
            raise ValueError(f"{path} has results with {name} {then!r}, and now it is {now!r}: write to another place")
    sweep.samples = plan.samples
    sweep.note_crash()
    return sweep


def _pick(sweep: Sweep, plan: Plan, problem: Problem) -> list[Candidate]:
    """Note a problem's plan, drop records of other sources, and return the kernels that are left to do."""
    outcome = sweep.outcome(problem)
    chosen, every = candidates(plan, problem)
    outcome.kernels = len(every)
    outcome.planned = [candidate.config.name for candidate in chosen]
    outcome.model = every[0].config.name
    outcome.selected = problem.selected(plan.target_sm, plan.facts).name
    for candidate in chosen:
        name, source = candidate.config.name, source_of(candidate.config)
        if name not in outcome.records or outcome.records[name].source != source:
            outcome.records[name] = Record(source, candidate.total_us)
        outcome.records[name].predicted_us = candidate.total_us
    return [c for c in chosen if not outcome.is_done(c.config.name, plan.samples)]


def _compile(
    plan: Plan,
    device: torch.device,
    sweep: Sweep,
    todo: Sequence[tuple[Outcome, list[Candidate]]],
    path: Path,
    progress: Progress,
) -> None:
    """Compile what is missing. The kernels that cannot be are done with."""
    if device.type == "cuda":
        configs = missing(dict.fromkeys(candidate.config for _, left in todo for candidate in left))
        progress.expect(len(configs))
        failures = compile_all(configs, plan.jobs, lambda name: progress.step(f"compiled {name}"))
        for outcome, left in todo:
            for name in (candidate.config.name for candidate in left):
                if name in failures:
                    outcome.records[name].error = failures[name]
    sweep.save(path)
    rest = sum(not outcome.is_done(c.config.name, plan.samples) for outcome, left in todo for c in left)
    progress.expect(rest * (1 + plan.rounds))


@dataclass
class _Problem:
    """One problem's turn."""

    plan: Plan
    sweep: Sweep
    outcome: Outcome
    path: Path
    device: torch.device
    timer: ReplayTimer
    progress: Progress

    def measure(self, configs: Sequence[GroupedGemmConfig]) -> None:
        x = prepare(self.outcome.problem, self.plan.facts, self.device)
        replays = {config: replay for config in configs if (replay := self._checked(x, config)) is not None}
        for number in range(self.plan.rounds):
            order = list(replays)
            shift = number % len(order) if order else 0
            for config in order[shift:] + order[:shift]:
                if not self._sample(replays[config], config, last=number == self.plan.rounds - 1):
                    del replays[config]
        clocks = nvidia_smi(self.device, CLOCKS)
        if clocks:
            self.sweep.runs[-1][f"after {self.outcome.problem.name}"] = ", ".join(clocks.values())

    def _checked(self, x: Prepared, config: GroupedGemmConfig) -> Replay | None:
        """Check the kernel's result and capture its launches; None if it fails."""
        record = self._begin(config)
        try:
            if self.device.type == "cuda":
                cubin = get_cubin(config)
                record.registers, record.spill_bytes = cubin.registers, cubin.spill_bytes
            record.worst_row = worst_row(x, config)
            replay = Replay(lambda: x.run(config), self.timer, self.plan.launches)
        except Exception as error:  # noqa: BLE001 - whatever a kernel does is its own result
            self._fail(record, error)
            self.progress.step(f"{config.name} failed", 1 + self.plan.rounds)
            return None
        self._end(f"checked {config.name}")
        return replay

    def _sample(self, replay: Replay, config: GroupedGemmConfig, *, last: bool) -> bool:
        """Time one replay, if there are too few timings; whether the kernel is still fine."""
        name = config.name
        if self.outcome.is_done(name, self.plan.samples):
            self.progress.step("")
            return True
        record = self._begin(config)
        try:
            record.samples_us += replay.sample_us()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(record, error)
            self.progress.step(f"{name} failed")
            return False
        self._end(f"{self.outcome.problem.name}: {name}" if not last else f"{self.outcome.problem.name}: last round")
        return True

    def _begin(self, config: GroupedGemmConfig) -> Record:
        self.sweep.pending = Pending(*self.outcome.problem.key, config.name)
        self.sweep.save(self.path)
        return self.outcome.records[config.name]

    def _end(self, text: str) -> None:
        self.sweep.pending = None
        self.sweep.save(self.path)
        self.progress.step(text)

    def _fail(self, record: Record, error: Exception) -> None:
        record.error = reason(error)
        self.sweep.pending = None
        self.sweep.save(self.path)
        try:
            self.timer.wait()
        except Exception as lost:  # noqa: BLE001 - any error here means that the device cannot be used
            raise DeviceLostError(f"the device gave {reason(lost)} after {record.error}") from error
