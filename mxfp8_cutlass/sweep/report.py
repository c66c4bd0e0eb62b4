"""Results of a sweep as tables and as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxfp8_cutlass.bench.report import geometric_mean, number, table
from mxfp8_cutlass.sweep.results import Outcome, Sweep

HEADER = (
    "problem",
    "best",
    "us",
    "TFLOP/s",
    "model's",
    "us",
    "loss",
    "selected: loss",
    "timed",
    "failed",
    "pruned",
)

HOW = """Medians of launches in CUDA graphs, L2 flushed before each by reading 256 MB or 4 times its size, timed by
events around each launch alone; a problem's kernels take turns. Operands are Gaussian. Each kernel's result was
compared with float64 products of sampled rows first. Loss: time beyond the best kernel's. Selected: what
`select_kernel` took when this was measured, with the tuned table of that time."""


@dataclass(frozen=True)
class Verdict:
    """A problem's best kernel, and what the choices cost. Times in microseconds; None where nothing was measured."""

    outcome: Outcome
    best: str | None
    us: float | None
    model_us: float | None
    selected_us: float | None

    @property
    def model_loss(self) -> float | None:
        """By how much the model's choice is slower than the best kernel, as a share of the latter."""
        return _loss(self.model_us, self.us)

    @property
    def selected_loss(self) -> float | None:
        """The same of select_kernel's choice."""
        return _loss(self.selected_us, self.us)

    def row(self) -> list[str]:
        """Cells below HEADER."""
        o, failed = self.outcome, self.outcome.failures()
        return [
            f"{o.problem.name}",
            self.best or "-",
            number(self.us, 1),
            number(1e-6 * o.problem.flops / self.us if self.us else None, 0),
            o.model,
            number(self.model_us, 1),
            _percent(self.model_loss),
            _percent(self.selected_loss),
            str(len(o.times())),
            str(len(failed)),
            str(o.kernels - len(o.planned)),
        ]


def verdict(outcome: Outcome) -> Verdict:
    """Judge a problem."""
    times = outcome.times()
    best = next(iter(times), None)
    return Verdict(outcome, best, times[best] if best else None, times.get(outcome.model), times.get(outcome.selected))


def verdicts(sweep: Sweep) -> list[Verdict]:
    """Of each problem that was planned."""
    return [verdict(outcome) for outcome in sweep.outcomes if outcome.planned]


def failures(sweep: Sweep) -> list[str]:
    """A line for each kernel and error, with the problems."""
    where: dict[tuple[str, str], list[str]] = {}
    for outcome in sweep.outcomes:
        for name, error in outcome.failures().items():
            where.setdefault((name, error), []).append(outcome.problem.name)
    return [f"{name}: {error} ({'; '.join(problems)})" for (name, error), problems in where.items()]


def short_name(sweep: Sweep, name: str) -> str:
    """A kernel's name without what all of the sweep have in common."""
    names = [name for outcome in sweep.outcomes for name in outcome.planned]
    prefix = _common(names)
    suffix = _common([name[::-1] for name in names])[::-1]
    if len(set(names)) < 2 or not name.startswith(prefix) or not name.endswith(suffix):
        return name
    return name[prefix.rfind("_") + 1 : len(name) - len(suffix) + suffix.find("_")] if "_" in suffix else name


def _common(names: list[str]) -> str:
    low, high = min(names, default=""), max(names, default="")
    length = next((i for i, (x, y) in enumerate(zip(low, high, strict=False)) if x != y), min(len(low), len(high)))
    return low[:length]


def to_markdown(sweep: Sweep) -> str:
    """A table of problems, one of each problem's kernels, and the failures."""
    parts = [
        f"# Sweep on {sweep.gpu}",
        f"{_facts(sweep)}; {sweep.samples} timings of each kernel",
        HOW,
    ]
    found = verdicts(sweep)
    parts.append(table(HEADER, [v.row() for v in found]))
    worst = max((loss for v in found if (loss := v.model_loss) is not None), default=None)
    mean = geometric_mean(1 + loss for v in found if (loss := v.model_loss) is not None)
    parts.append(
        f"The model's loss: {_percent(mean - 1 if mean else None)} in geometric mean, at most {_percent(worst)}."
    )
    for v in found:
        parts += [f"## {v.outcome.problem.name}: {_sizes(v.outcome)}", _kernels(v.outcome)]
    if lines := failures(sweep):
        parts += ["## Failed, and left out", "\n".join(f"- {line}" for line in lines)]
    for run in sweep.runs:
        parts.append("Run: " + "; ".join(f"{name}: {value}" for name, value in run.items()))
    return "\n\n".join(parts) + "\n"


def _kernels(outcome: Outcome) -> str:
    rows = []
    for name, us in outcome.times().items():
        record = outcome.records[name]
        cells = [number(us, 1), number(min(record.samples_us), 1), number(max(record.samples_us), 1)]
        spills = "-" if record.spill_bytes is None else str(record.spill_bytes)
        rows.append([name, *cells, number(record.predicted_us, 1), f"{record.worst_row or 0:.1e}", spills])
    return table(("kernel", "us", "least", "most", "predicted us", "worst row", "spill bytes"), rows)


def _facts(sweep: Sweep) -> str:
    return ", ".join(f"{name} {value}" for name, value in sweep.facts.items())


def _sizes(outcome: Outcome) -> str:
    text = outcome.problem.text
    return text if len(text) < 100 else f"{text[:80]} ... ({len(outcome.problem.sizes)} groups)"


def _loss(us: float | None, best: float | None) -> float | None:
    return None if us is None or not best else us / best - 1


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def draw(sweep: Sweep, path: Path) -> bool:
    """Draw each problem's kernels, and prediction against measurement; whether there was something to draw.

    Raises:
        ImportError: there is no matplotlib.
    """
    import matplotlib as mpl  # noqa: PLC0415 - optional

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the backend is chosen

    found = [v for v in verdicts(sweep) if v.us]
    if not found:
        return False
    figure, (left, right) = plt.subplots(1, 2, figsize=(16, 2 + 0.5 * max(8, len(found))), layout="constrained")
    _dots(left, found)
    _predictions(right, found)
    figure.suptitle(f"Kernels on {sweep.gpu}: {_facts(sweep)}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _dots(axes: Any, found: Iterable[Verdict]) -> None:  # noqa: ANN401 - matplotlib's, which may be absent
    rows = list(found)
    for y, v in enumerate(rows):
        best = v.us or math.nan
        axes.plot([us / best for us in v.outcome.times().values()], [y] * len(v.outcome.times()), "o", color="#7ba4d9")
        if v.model_us:
            axes.plot(v.model_us / best, y, "o", color="none", markeredgecolor="#c0392b", markersize=12)
        if v.selected_us:
            axes.plot(v.selected_us / best, y, "x", color="black", markersize=9)
    axes.plot([], [], "o", color="#7ba4d9", label="a kernel")
    axes.plot([], [], "o", color="none", markeredgecolor="#c0392b", markersize=12, label="the model's choice")
    axes.plot([], [], "x", color="black", markersize=9, label="select_kernel's choice")
    axes.set_yticks(range(len(rows)), [v.outcome.problem.name for v in rows])
    axes.invert_yaxis()
    axes.set_xlabel("time / time of the best kernel")
    axes.grid(alpha=0.3)
    axes.legend()


def _predictions(axes: Any, found: Iterable[Verdict]) -> None:  # noqa: ANN401 - as above
    limits = []
    for v in found:
        times = v.outcome.times()
        predicted = [v.outcome.records[name].predicted_us for name in times]
        axes.plot(predicted, list(times.values()), "o", label=v.outcome.problem.name, alpha=0.7)
        limits += [*predicted, *times.values()]
    axes.plot([min(limits), max(limits)], [min(limits), max(limits)], color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("predicted us")
    axes.set_ylabel("measured us")
    axes.grid(which="both", alpha=0.3)
    axes.legend(fontsize=8)
