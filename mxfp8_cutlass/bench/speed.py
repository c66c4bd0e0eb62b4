"""Grouped products: every method on a workload, in one interleaved run, checked; and the chip's ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from mxfp8_cutlass.bench.check import accuracy
from mxfp8_cutlass.bench.methods import Method
from mxfp8_cutlass.bench.operands import Operands, make_operands
from mxfp8_cutlass.bench.peers import METHODS
from mxfp8_cutlass.bench.timing import Spread, Timer, time_interleaved
from mxfp8_cutlass.bench.workloads import Workload

LOAD_MS = 300.0
"""For how long the device works while nvidia-smi asks for its clocks."""
LOAD_CALLS = 1000
"""What the device's queue holds."""


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    reps: int = 20
    budget_s: float = 0.25
    """Seconds for each method of a workload."""


@dataclass(frozen=True)
class Outcome:
    """A method on a workload. Without `ms` there is a `note` that says why."""

    ms: Spread | None = None
    tflops: float | None = None
    error: float | None = None
    """Relative error of the sampled rows against float64, of the values that this very method multiplies."""
    worst_row: float | None = None
    checked_rows: int = 0
    first_call_s: float | None = None
    """With compiling, if there is any."""
    kernel: str = ""
    note: str = ""


@dataclass(frozen=True)
class Row:
    """A workload's outcomes by method."""

    workload: Workload
    sizes: tuple[int, ...]
    outcomes: dict[str, Outcome]
    clocks: dict[str, str]
    """What nvidia-smi says while the first method runs, after the last round."""


@dataclass(frozen=True)
class Ceilings:
    """What this chip reaches on plain work, to hold against the grouped products."""

    fp8_tflops: float | None = None
    """torch._scaled_mm, one scale a tensor, use_fast_accum=True."""
    bf16_tflops: float | None = None
    copy_gbps: float | None = None
    """Device to device, reads and writes counted."""
    notes: tuple[str, ...] = ()


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def measure(
    workload: Workload,
    methods: Iterable[str],
    device: torch.device,
    timer: Timer,
    effort: Effort,
    clocks: Callable[[], dict[str, str]] | None = None,
) -> Row:
    """Time the methods, then check each one's result; one that is wrong or fails keeps no time."""
    x = make_operands(workload, device)
    outcomes: dict[str, Outcome] = {}
    ready: dict[str, Method] = {}
    first_calls: dict[str, float] = {}
    for name in methods:
        try:
            method = METHODS[name](x)
            begin = timer.host_s()
            method.run()
            timer.wait()
            first_calls[name] = timer.host_s() - begin
            method.run()
            timer.wait()
        except Exception as error:  # noqa: BLE001 - a peer may fail in any way; the report names it
            outcomes[name] = Outcome(note=reason(error))
        else:
            ready[name] = method
    times = time_interleaved({name: method.run for name, method in ready.items()}, timer, effort.reps, effort.budget_s)
    busiest = next(iter(times), None)
    seen = (
        {} if clocks is None or busiest is None else _under_load(ready[busiest], times[busiest].median, timer, clocks)
    )
    for name, method in ready.items():
        outcomes[name] = _outcome(method, x, times[name], first_calls[name])
    return Row(workload, x.sizes, {name: outcomes[name] for name in methods}, seen)


def _under_load(method: Method, ms: float, timer: Timer, clocks: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Read clocks while the device works: idle ones would say nothing."""
    for _ in range(max(1, min(LOAD_CALLS, int(LOAD_MS / max(ms, 1e-3))))):
        method.run()
    seen = clocks()
    timer.wait()
    return seen


def _outcome(method: Method, x: Operands, ms: Spread, first_call_s: float) -> Outcome:
    try:
        found = accuracy(method, x)
    except Exception as error:  # noqa: BLE001 - as above
        return Outcome(kernel=method.kernel, note=f"could not be checked: {reason(error)}")
    right = found.worst_row <= method.tolerance  # NaN is not
    return Outcome(
        ms=ms if right else None,
        tflops=1e-9 * x.workload.flops / ms.median if right else None,
        error=found.error,
        worst_row=found.worst_row,
        checked_rows=found.rows,
        first_call_s=first_call_s,
        kernel=method.kernel,
        note=""
        if right
        else f"wrong: a row is off by {found.worst_row:.1e}, at most {method.tolerance:.0e} is rounding",
    )


def measure_ceilings(
    device: torch.device, timer: Timer, effort: Effort, size: int = 8192, copy_bytes: int = 1 << 30
) -> Ceilings:
    """Dense products of size**3 and a copy, interleaved."""
    a = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    b = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    source = torch.randint(256, (copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], object]] = {
        "fp8": lambda: torch._scaled_mm(  # noqa: SLF001 - torch has no public name for it
            a8, b8.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        ),
        "bf16": lambda: a @ b.T,
        "copy": lambda: target.copy_(source),
    }
    notes = []
    for name in list(calls):
        try:
            calls[name]()
            timer.wait()
        except Exception as error:  # noqa: BLE001 - as above
            notes.append(f"ceiling {name}: {reason(error)}")
            del calls[name]
    ms = {name: spread.median for name, spread in time_interleaved(calls, timer, effort.reps, effort.budget_s).items()}
    tflops = {name: 2e-9 * size**3 / ms[name] for name in ("fp8", "bf16") if name in ms}
    copy_gbps = 2e-6 * copy_bytes / ms["copy"] if "copy" in ms else None
    return Ceilings(tflops.get("fp8"), tflops.get("bf16"), copy_gbps, tuple(notes))
