"""What the host pays: time of a warm call, and of the first one in a new process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mxfp8_cutlass import env
from mxfp8_cutlass.bench.operands import make_operands
from mxfp8_cutlass.bench.peers import METHODS
from mxfp8_cutlass.bench.speed import reason
from mxfp8_cutlass.bench.timing import Spread, Timer
from mxfp8_cutlass.bench.workloads import Workload
from mxfp8_cutlass.grouped_mm import grouped_mm
from mxfp8_cutlass.quantize import quantize

SMALL = Workload("host", 4, 64, 64, 256)
"""So small that the device is done before the host has made the next call."""

CALLS = 200


@dataclass(frozen=True)
class HostTime:
    """Microseconds per warm call, nothing waited for. Without `us` there is a `note`."""

    name: str
    us: Spread | None
    note: str = ""


@dataclass(frozen=True)
class ColdStart:
    """Seconds in a new process. Empty with a `note` if it failed."""

    name: str
    seconds: dict[str, float]
    note: str = ""


def measure_host(device: torch.device, timer: Timer, batches: int = 15, calls: int = CALLS) -> list[HostTime]:
    """Time batches of calls on the host's clock. The device's queue is empty when a batch begins."""
    x = make_operands(SMALL, device)
    out = torch.empty(SMALL.m, SMALL.n, dtype=torch.bfloat16, device=device)
    cases: dict[str, Callable[[], object]] = {
        "grouped_mm, folded, out given": lambda: grouped_mm(x.xf, x.wf, x.offs, out=out),
        "grouped_mm, folded": lambda: grouped_mm(x.xf, x.wf, x.offs),
        "grouped_mm, exact, out given": lambda: grouped_mm(x.xq, x.wq, x.offs, out=out, exact=True),
        "quantize, folded": lambda: quantize(x.x, fold=True),
    }
    results = []
    for name in ("DeepGEMM", "torch BF16"):
        try:
            cases[name] = METHODS[name](x).run
        except Exception as error:  # noqa: BLE001 - a peer may fail in any way; the report names it
            results.append(HostTime(name, None, reason(error)))
    return [_host_time(name, call, timer, batches, calls) for name, call in cases.items()] + results


def _host_time(name: str, call: Callable[[], object], timer: Timer, batches: int, calls: int) -> HostTime:
    times = []
    try:
        for batch in range(batches + 1):
            begin = timer.host_s()
            for _ in range(calls):
                call()
            end = timer.host_s()
            timer.wait()
            if batch:  # the first one warms up
                times.append(1e6 * (end - begin) / calls)
    except Exception as error:  # noqa: BLE001 - as above
        return HostTime(name, None, reason(error))
    return HostTime(name, Spread.of(times))


def measure_cold_start(device: torch.device) -> list[ColdStart]:
    """Start processes with an empty cache of kernels, with a filled one, and with the bundle if there is one."""
    with tempfile.TemporaryDirectory() as directory:
        own_cache = ["-u", env.BUNDLE, f"{env.JIT}=1", f"{env.CACHE_DIR}={directory}"]
        starts = [
            _cold_start("kernels compiled", own_cache, device),
            _cold_start("kernels on disk", own_cache, device),
        ]
    if env.bundle() is not None:
        starts.append(_cold_start("kernels in a bundle", [f"{env.JIT}=0"], device))
    return starts


def _cold_start(name: str, settings: list[str], device: torch.device) -> ColdStart:
    # env(1) sets variables for the child without this process's reading them. The program runs by its path, since -m
    # would import the package before its clock starts; -P keeps its folder's other modules off the path.
    program = str(Path(__file__).with_name("cold_start.py"))
    command = ["env", *settings, sys.executable, "-P", program, str(device)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603 - ours
        if child.returncode:
            return ColdStart(name, {}, (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1])
        return ColdStart(name, json.loads(child.stdout.splitlines()[-1]))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return ColdStart(name, {}, reason(error))
