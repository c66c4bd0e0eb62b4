"""Results as pictures. Needs matplotlib, the extra `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mxfp8_cutlass.bench.report import methods_of
from mxfp8_cutlass.bench.results import Results
from mxfp8_cutlass.bench.speed import Row

COLOURS = {
    "folded": "#0b6e4f",
    "fold activations": "#3fa34d",
    "exact": "#a1cf6b",
    "DeepGEMM": "#2f5d9b",
    "torch FP8 rowwise": "#7ba4d9",
    "torch FP8 rowwise, fast": "#c9daf0",
    "torch BF16": "#6b6b6b",
    "dequantize + BF16": "#bdbdbd",
}
WIDTH = 0.86
"""Of a workload's bars together."""


def draw(results: Results, directory: Path) -> list[Path]:
    """Write chart.png and scaling.png, as far as there is something to show.

    Raises:
        ImportError: there is no matplotlib.
    """
    import matplotlib as mpl  # noqa: PLC0415 - optional

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the backend is chosen

    paths = []
    if methods_of(results.speed):
        figure, axes = plt.subplots(figsize=(16, 7), layout="constrained")
        _bars(axes, results)
        paths.append(directory / "chart.png")
        figure.savefig(paths[-1], dpi=120)
        plt.close(figure)
    series = {name: rows for name, rows in results.scaling.items() if methods_of(rows)}
    if series:
        figure, all_axes = plt.subplots(
            1, len(series), figsize=(8 * len(series), 6), layout="constrained", squeeze=False
        )
        for axes, (name, rows) in zip(all_axes[0], series.items(), strict=True):
            _lines(axes, name, rows)
        paths.append(directory / "scaling.png")
        figure.savefig(paths[-1], dpi=120)
        plt.close(figure)
    return paths


def _bars(axes: Any, results: Results) -> None:  # noqa: ANN401 - matplotlib's, which may be absent
    rows, ceilings = results.speed, results.ceilings
    methods = [name for name in COLOURS if name in methods_of(rows)]
    width = WIDTH / len(methods)
    highest = 0.0
    for i, name in enumerate(methods):
        for j, row in enumerate(rows):
            outcome = row.outcomes.get(name)
            if outcome is None or outcome.ms is None or outcome.tflops is None:
                continue
            speed, ms = outcome.tflops, outcome.ms
            error = [[speed - speed * ms.median / ms.high], [speed * ms.median / ms.low - speed]]
            axes.bar(j - WIDTH / 2 + (i + 0.5) * width, speed, width, color=COLOURS[name], yerr=error, ecolor="black")
            highest = max(highest, speed)
        axes.bar(0, 0, color=COLOURS[name], label=name)
    for value, style, label in (
        (ceilings.fp8_tflops, "--", "dense FP8, fast accumulation"),
        (ceilings.bf16_tflops, ":", "dense BF16"),
    ):
        if value is not None:
            axes.axhline(value, color="black", linestyle=style, linewidth=1, label=f"{label}: {value:.0f}")
            highest = max(highest, value)
    if ceilings.copy_gbps is not None:
        label = f"operands and output once at copy bandwidth, {ceilings.copy_gbps:.0f} GB/s"
        for j, row in enumerate(rows):
            limit = 1e-3 * row.workload.flops / row.workload.least_bytes * ceilings.copy_gbps
            if limit < 1.1 * highest:
                axes.hlines(limit, j - WIDTH / 2, j + WIDTH / 2, color="#c0392b", linewidth=1.5, label=label)
                label = "_"  # one entry in the legend
    axes.set_ylim(0, 1.1 * highest)
    axes.set_xticks(range(len(rows)), [f"{row.workload.name}\n{_short(row)}" for row in rows], fontsize=8)
    axes.set_ylabel("TFLOP/s (medians; black: quartiles)")
    axes.set_title(f"Grouped products on {results.about.get('device', '?')}")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.figure.legend(loc="outside lower center", ncols=6, fontsize=9)


def _short(row: Row) -> str:
    w = row.workload
    return f"G {w.groups}, M {w.m}\nN {w.n}, K {w.k}"


def _lines(axes: Any, series: str, rows: Sequence[Row]) -> None:  # noqa: ANN401 - as above
    w = rows[0].workload
    for name in [name for name in COLOURS if name in methods_of(rows)]:
        shown = [
            (row.workload.groups if series == "groups" else row.workload.m, row.outcomes[name].ms)
            for row in rows
            if name in row.outcomes
        ]
        points = [(position, ms) for position, ms in shown if ms is not None]
        axes.plot([x for x, _ in points], [ms.median for _, ms in points], "o-", color=COLOURS[name], label=name)
        axes.fill_between(
            [x for x, _ in points],
            [ms.low for _, ms in points],
            [ms.high for _, ms in points],
            color=COLOURS[name],
            alpha=0.25,
        )
    axes.set_xscale("log", base=2)
    if series == "groups":
        axes.set_ylim(bottom=0)  # a flat line is what it should be
    else:
        axes.set_yscale("log")
    fixed = f"M {w.m}" if series == "groups" else f"G {w.groups}"
    axes.set_title(f"{fixed}, N {w.n}, K {w.k}")
    axes.set_xlabel("G" if series == "groups" else "M")
    axes.set_ylabel("ms")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
