"""Results as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from mxfp8_cutlass.bench.peers import LABELS
from mxfp8_cutlass.bench.results import Results
from mxfp8_cutlass.bench.speed import Ceilings, Outcome, Row
from mxfp8_cutlass.bench.timing import Spread

NONE = "-"
SKIPPED = Outcome(note="not run")

HOW = """Medians [first quartile, third quartile] of CUDA-event timings on one stream; all methods of a row interleaved,
in an order that rotates; L2 flushed before each timing by reading 256 MB or 4 times its size; outputs of `grouped_mm`
and DeepGEMM preallocated, torch's allocated by its caching allocator. Operands are Gaussian. TFLOP/s count 2 M N K,
without padding."""

RATIOS_ARE = """Ratios of times, above 1 where this package is faster. Emulation's floor: torch BF16, and 3 bytes an
element at copy bandwidth. Reading the weights: once, at copy bandwidth."""

ERRORS_ARE = """Relative errors of sampled rows of up to five groups, first and last rows among them, each against the
float64 product of the values that the method multiplies; kernels; clock and power while
the first method runs:"""

MOVES_ARE = """bfloat16 to or from E4M3, inputs larger than L2, interleaved. Up to 128 rows of each were compared with
the reference, bit for bit. Bytes count each operand and result once."""

RATIOS: dict[str, Callable[[Row, Ceilings], float | None]] = {
    "DeepGEMM / folded": lambda row, _: ratio(row, "DeepGEMM", "folded"),
    "torch FP8 rowwise / folded": lambda row, _: ratio(row, "torch FP8 rowwise", "folded"),
    "torch BF16 / exact": lambda row, _: ratio(row, "torch BF16", "exact"),
    "emulation's floor / fold activations": lambda row, ceilings: over(
        emulation_floor(row, ceilings), time_of(row, "fold activations")
    ),
    "dequantize + BF16 / fold activations": lambda row, _: ratio(row, "dequantize + BF16", "fold activations"),
    "reading the weights / folded": lambda row, ceilings: over(weights_ms(row, ceilings), time_of(row, "folded")),
}
"""Times of something else over times of ours: above 1, ours is faster."""


def time_of(row: Row, method: str) -> float | None:
    """Median in ms, if the method has one."""
    spread = row.outcomes.get(method, SKIPPED).ms
    return None if spread is None else spread.median


def over(numerator: float | None, denominator: float | None) -> float | None:
    """Their quotient, if both are known."""
    return None if numerator is None or not denominator else numerator / denominator


def ratio(row: Row, theirs: str, ours: str) -> float | None:
    """Time of a method over that of another."""
    return over(time_of(row, theirs), time_of(row, ours))


def emulation_floor(row: Row, ceilings: Ceilings) -> float | None:
    """BF16 grouped product, plus dequantizing both operands, 3 bytes an element, at copy bandwidth; in ms."""
    bf16, w = time_of(row, "torch BF16"), row.workload
    if bf16 is None or ceilings.copy_gbps is None:
        return None
    return bf16 + 3e-6 * (w.m + w.groups * w.n) * w.k / ceilings.copy_gbps


def weights_ms(row: Row, ceilings: Ceilings) -> float | None:
    """The weights once at copy bandwidth, in ms."""
    return None if ceilings.copy_gbps is None else 1e-6 * row.workload.weight_bytes / ceilings.copy_gbps


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; its first column is text, the others are numbers."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash."""
    return NONE if value is None else f"{value:.{digits}f}"


def spread(value: Spread | None, digits: int = 3) -> str:
    """Median and quartiles."""
    return NONE if value is None else f"{value.median:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def to_markdown(results: Results) -> str:
    """Everything that was measured, and how."""
    parts = ["# Benchmark", "; ".join(f"{name}: {value}" for name, value in results.about.items())]
    if results.failure:
        parts.append(f"**The run ended early: {results.failure}**")
    if results.speed or results.scaling:
        parts.append(HOW + f" At most {results.effort.reps} timings, {results.effort.budget_s} s per method.")
    if results.speed:
        parts += _speed(results)
    if results.memory:
        parts += _memory(results)
    if results.host or results.cold_start:
        parts += _host(results)
    for series, rows in results.scaling.items():
        parts += _scaling(series, rows)
    return "\n\n".join(parts) + "\n"


def methods_of(rows: Sequence[Row]) -> list[str]:
    """The methods that have a time on some row, in their order."""
    names = list(dict.fromkeys(name for row in rows for name in row.outcomes))
    return [name for name in names if any(time_of(row, name) is not None for row in rows)]


def notes_of(rows: Sequence[Row]) -> list[str]:
    """Why some have none: one line per method and reason, with the workloads."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, outcome in row.outcomes.items():
            if outcome.note:
                reasons.setdefault((name, outcome.note), []).append(row.workload.name)
    return [
        f"- {name}: {note} ({'every workload' if len(names) == len(rows) else ', '.join(names)})"
        for (name, note), names in reasons.items()
    ]


def _speed(results: Results) -> list[str]:
    rows, ceilings = results.speed, results.ceilings
    methods = methods_of(rows)
    cells = [
        [
            f"{row.workload.name}: {row.workload.text}",
            *(_cell(row.outcomes[name]) if name in row.outcomes else NONE for name in methods),
        ]
        for row in rows
    ]
    ratios = [[row.workload.name, *(number(of(row, ceilings)) for of in RATIOS.values())] for row in rows]
    training = [row for row in rows if row.workload.kind == "contiguous"]
    means = (geometric_mean(of(row, ceilings) for row in training) for of in RATIOS.values())
    ratios.append(["geometric mean without decode", *map(number, means)])
    errors = [
        [
            row.workload.name,
            *(_error(row.outcomes[name]) for name in methods if name in row.outcomes),
            str(max((outcome.checked_rows for outcome in row.outcomes.values()), default=0)),
            *(row.outcomes.get(name, SKIPPED).kernel or NONE for name in ("folded", "exact")),
            row.clocks.get("clocks.sm", NONE),
            row.clocks.get("power.draw", NONE),
        ]
        for row in rows
    ]
    tail = ["rows checked", "kernel, folded", "kernel, exact", "SM clock", "power"]
    return [
        "## Grouped products",
        "\n".join(f"- {name}: {LABELS[name]}." for name in methods),
        "Milliseconds [quartiles] (TFLOP/s):",
        table(["workload", *methods], cells),
        RATIOS_ARE,
        table(["workload", *RATIOS], ratios),
        _ceilings(ceilings),
        ERRORS_ARE,
        table(["workload", *methods, *tail], errors),
        *_skipped([*notes_of(rows), *(f"- {note}" for note in ceilings.notes)]),
    ]


def _ceilings(ceilings: Ceilings) -> str:
    fp8, bf16, copy = (number(value, 0) for value in (ceilings.fp8_tflops, ceilings.bf16_tflops, ceilings.copy_gbps))
    return (
        f"Ceilings in the same run: dense FP8 (`torch._scaled_mm`, use_fast_accum=True) {fp8} TFLOP/s, dense BF16 "
        f"{bf16} TFLOP/s, copy {copy} GB/s (reads and writes)."
    )


def _cell(outcome: Outcome) -> str:
    if outcome.ms is None:
        return "wrong" if outcome.note.startswith("wrong") else NONE
    return f"{spread(outcome.ms)} ({number(outcome.tflops, 0)})"


def _error(outcome: Outcome) -> str:
    return NONE if outcome.error is None else f"{outcome.error:.2e}"


def _memory(results: Results) -> list[str]:
    rows = [
        [move.name, number(move.bytes_per_element, 3), spread(move.ms), number(move.gbps, 0), number(move.of_copy)]
        for move in results.memory
    ]
    return [
        "## Kernels that only move data",
        MOVES_ARE,
        table(["kernel", "bytes per element", "ms [quartiles]", "GB/s", "share of copy"], rows),
        *_skipped([f"- {move.name}: {move.note}" for move in results.memory if move.note]),
    ]


def _host(results: Results) -> list[str]:
    calls = [[time.name, spread(time.us, 1)] for time in results.host]
    steps = list(dict.fromkeys(step for start in results.cold_start for step in start.seconds))
    starts = [
        [start.name, *(number(start.seconds.get(step), 3) for step in steps)]
        for start in results.cold_start
        if start.seconds
    ]
    notes = [f"- {time.name}: {time.note}" for time in results.host if time.note]
    notes += [f"- {start.name}: {start.note}" for start in results.cold_start if start.note]
    return [
        "## Host",
        "Microseconds of the host per warm call [quartiles of batches], small operands, the device not waited for:",
        table(["call", "us"], calls),
        *(["A new process, in seconds:", table(["start", *steps], starts)] if starts else []),
        *_skipped(notes),
    ]


def _scaling(series: str, rows: Sequence[Row]) -> list[str]:
    methods = methods_of(rows)
    cells = [
        [
            row.workload.text,
            *(_cell(row.outcomes[name]) if name in row.outcomes else NONE for name in methods),
            row.outcomes.get("folded", SKIPPED).kernel or NONE,
        ]
        for row in rows
    ]
    title = {"groups": "total M fixed, G grows", "rows": "G fixed, M grows"}.get(series, series)
    return [
        f"## Scaling: {title}",
        table(["sizes", *methods, "kernel, folded"], cells),
        *_skipped(notes_of(rows)),
    ]


def _skipped(notes: list[str]) -> list[str]:
    return ["Not shown:\n\n" + "\n".join(notes)] if notes else []
