"""A whole run: parts in turn, results written after each."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from mxfp8_cutlass import bundle, env
from mxfp8_cutlass.bench.about import about, nvidia_smi
from mxfp8_cutlass.bench.chart import draw
from mxfp8_cutlass.bench.host import SMALL, measure_cold_start, measure_host
from mxfp8_cutlass.bench.memory import measure_memory
from mxfp8_cutlass.bench.methods import kernel_of
from mxfp8_cutlass.bench.peers import METHODS
from mxfp8_cutlass.bench.report import to_markdown
from mxfp8_cutlass.bench.results import Results
from mxfp8_cutlass.bench.speed import Effort, Row, measure, measure_ceilings, reason
from mxfp8_cutlass.bench.timing import Timer, timer_for
from mxfp8_cutlass.bench.workloads import SCALING, WORKLOADS, Workload
from mxfp8_cutlass.cache import get_cubin
from mxfp8_cutlass.generator.config_space import GroupedGemmConfig
from mxfp8_cutlass.headers import HeadersNotFoundError
from mxfp8_cutlass.inputs import inputs_of
from mxfp8_cutlass.storage import write_atomically

PARTS = ("speed", "memory", "host", "scaling")
SCALING_METHODS = ("folded", "DeepGEMM", "torch BF16")
COMPILERS = 8
"""Processes at most; each needs 2 GB."""

Say = Callable[[str], None]


def run(
    out: Path,
    *,
    device: torch.device,
    parts: Iterable[str] = PARTS,
    workloads: Sequence[Workload] = WORKLOADS,
    scaling: Mapping[str, Sequence[Workload]] = SCALING,
    effort: Effort | None = None,
    timer: Timer | None = None,
    say: Say = lambda _: None,
) -> Results:
    """Measure, and write results.json, table.md and the charts to `out`, also if something fails in between.

    Args:
        out: directory; made if it is missing.
        device: where to run. The CPU runs the reference, which is of use in tests only.
        parts: of PARTS.
        workloads: of part "speed".
        scaling: of part "scaling", by the name of what grows.
        effort: how long to measure.
        timer: the clock, if not the device's own.
        say: takes lines on the progress.
    """
    out.mkdir(parents=True, exist_ok=True)
    chosen = set(parts)
    results = Results(about(device), effort or Effort())
    series = {name: list(rows) for name, rows in scaling.items()} if "scaling" in chosen else {}
    speed = list(workloads) if "speed" in chosen else []
    if device.type == "cuda":
        grown = [workload for rows in series.values() for workload in rows]
        compile_missing(_kernels(speed, grown, host="host" in chosen), say)
    try:
        _measure(results, chosen, speed, series, device, timer or timer_for(device), out, say)
    except BaseException as error:
        results.failure = reason(error)
        raise
    finally:
        _write(results, out)
        try:
            draw(results, out)
        except ImportError:
            say('no charts without matplotlib: pip install -e ".[bench]"')
    return results


def _measure(
    results: Results,
    chosen: set[str],
    speed: list[Workload],
    series: Mapping[str, list[Workload]],
    device: torch.device,
    timer: Timer,
    out: Path,
    say: Say,
) -> None:
    effort = results.effort
    on_cuda = device.type == "cuda"
    if speed:
        size = {} if on_cuda else {"size": 64, "copy_bytes": 1 << 12}
        results.ceilings = measure_ceilings(device, timer, effort, **size)
    for workload in speed:
        row = measure(workload, METHODS, device, timer, effort, lambda: nvidia_smi(device))
        results.speed.append(row)
        _step(results, row, out, say)
    if "memory" in chosen:
        results.memory = measure_memory(device, timer, effort, *(() if on_cuda else ((256, 256), 2)))
        torch.cuda.empty_cache()
        _write(results, out)
        say("memory: done")
    if "host" in chosen:
        results.host = measure_host(device, timer, *(() if on_cuda else (2, 2)))
        results.cold_start = measure_cold_start(device)
        _write(results, out)
        say("host: done")
    for name, workloads in series.items():
        rows: list[Row] = []
        results.scaling[name] = rows
        for workload in workloads:
            rows.append(measure(workload, SCALING_METHODS, device, timer, effort))
            _step(results, rows[-1], out, say)


def _step(results: Results, row: Row, out: Path, say: Say) -> None:
    """Keep what there is, and free a workload's tensors before the next."""
    torch.cuda.empty_cache()
    _write(results, out)
    times = (f"{name} {o.ms.median:.3f} ms" if o.ms else f"{name}: {o.note}" for name, o in row.outcomes.items())
    say(f"{row.workload.name}: {'; '.join(times)}")


def _write(results: Results, out: Path) -> None:
    write_atomically(out / "results.json", results.to_json().encode())
    write_atomically(out / "table.md", to_markdown(results).encode())


def _kernels(speed: Iterable[Workload], grown: Iterable[Workload], *, host: bool) -> list[GroupedGemmConfig]:
    """The grouped GEMM kernels that will be asked for, each once. The other kernels compile in a tenth of a second."""
    both = [*speed, *([SMALL] if host else [])]
    wanted = [kernel_of(workload, exact=exact) for workload in both for exact in (False, True)]
    return list(dict.fromkeys(wanted + [kernel_of(workload, exact=False) for workload in grown]))


def compile_missing(configs: Sequence[GroupedGemmConfig], say: Say = lambda _: None) -> None:
    """Compile what neither the bundle nor the disk has, in processes; one after the other it would take minutes."""
    if not env.jit():
        return
    try:
        missing = [config for config in configs if not is_compiled(config)]
    except HeadersNotFoundError as error:
        say(f"nothing can be compiled here: {reason(error)}")
        return
    if not missing:
        return
    jobs = min(COMPILERS, os.cpu_count() or 1, len(missing))
    say(f"compiling {len(missing)} kernels in {jobs} processes")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        for config, future in [(config, pool.submit(_compile, config)) for config in missing]:
            failure = future.exception()
            if failure is not None:
                say(f"{config.name}: {reason(failure)}")


def is_compiled(config: GroupedGemmConfig) -> bool:
    """Whether the bundle or the disk has the kernel."""
    directory = env.bundle()
    if directory is not None:
        with suppress(bundle.BundleError):
            if bundle.read(directory, config) is not None:
                return True
    return (env.cache_dir() / f"{inputs_of(config).key}.cubin").exists()


def _compile(config: GroupedGemmConfig) -> None:
    get_cubin(config)
