#!/usr/bin/env python
"""Look at the kernels, compile them ahead of time, and time them. Only bench and sweep need a GPU.

python build.py list --target 90a
python build.py explain --target 90a 4096x14336x4096 17x14336x4096
python build.py generate --target 90a --all --out sources
python build.py compile --target 90a --all --out bundle -j 8
python build.py bench --out results
python build.py sweep --out results --apply
"""

from __future__ import annotations

import difflib
import fnmatch
import multiprocessing
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mxfp8_cutlass import bundle, cache
from mxfp8_cutlass.generator.config_space import all_configs
from mxfp8_cutlass.generator.render import KernelConfig, render
from mxfp8_cutlass.inputs import inputs_of
from mxfp8_cutlass.storage import write_atomically

if TYPE_CHECKING:
    from mxfp8_cutlass.select import Choice

TARGETS = ("90a", "100a")

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__, rich_markup_mode=None
)
# Without a terminal rich would wrap a table at 80 columns and cut the kernels' names.
console = Console(width=None if sys.stdout.isatty() else 240)


def _target(value: str) -> str:
    if value not in TARGETS:
        raise typer.BadParameter(f"{value!r} must be one of {', '.join(TARGETS)}")
    return value


Target = Annotated[str, typer.Option("--target", callback=_target, help="90a (Hopper) or 100a (Blackwell)")]
ConfigName = Annotated[str | None, typer.Option("--config", help="a kernel's name, or a pattern with * and ?")]
All = Annotated[bool, typer.Option("--all", help="every kernel of the target")]
Out = Annotated[Path, typer.Option("--out", help="directory to write to")]


@app.command("list")
def list_(
    target: Target,
    bundled: Annotated[Path | None, typer.Option("--bundle", help="show what this bundle's kernels need")] = None,
) -> None:
    """List the kernels of a target with their resources; registers and spills are known once they are compiled."""
    try:
        entries = bundle.manifest(bundled) if bundled else {}
    except bundle.BundleError as error:
        raise typer.BadParameter(str(error)) from error
    columns = ("kernel", "threads", "dynamic shared", "static shared", "registers", "spill bytes")
    table = Table(*columns, title=f"sm_{target}")
    for column in table.columns[1:]:
        column.justify = "right"
    for config in all_configs(target):
        entry = entries.get(f"{target}/{config.name}", {})
        compiled = [str(entry.get(fact, "")) for fact in ("static_shared", "registers", "spill_bytes")]
        table.add_row(config.name, str(config.threads), str(config.shared_memory), *compiled)
    console.print(table)


@app.command()
def explain(
    problems: Annotated[list[str], typer.Argument(help="problem sizes as MxNxK, one for each group")],
    target: Target,
    top: Annotated[int, typer.Option(help="how many candidates to show")] = 10,
) -> None:
    """Rank the kernels for some problem sizes, with the terms of the cost model, and say which one is picked."""
    from mxfp8_cutlass.cost_model import CHIPS, TERMS  # noqa: PLC0415 - the other commands do without the cost model
    from mxfp8_cutlass.select import choose, rank  # noqa: PLC0415

    sizes = [_problem(text) for text in problems]
    candidates = rank(sizes, target)[:top]
    table = Table("kernel", *TERMS, title=f"sm_{target}, best first")
    for candidate in candidates:
        table.add_row(candidate.config.name, *(_cell(getattr(candidate, term)) for term in TERMS))
    console.print(table)
    _say(f"the cost model's constants: {CHIPS[target].source}")
    _explain_choice(choose(sizes, target), target)


def _explain_choice(choice: Choice, target: str) -> None:
    from mxfp8_cutlass.tuned import table  # noqa: PLC0415 - as above

    found = table.load(target)
    by = "the tuned table" if choice.tuned else "the cost model"
    _say(f"picked by {by}: {choice.config.name}")
    if choice.match is not None:
        s = choice.match.entry.shape
        shape = f"G {s.groups}, M {s.m}, N {s.n}, K {s.k}"
        where = f"{shape} ({choice.match.entry.config}), distance {choice.match.distance:.3f}, radius {table.RADIUS}"
        _say(f"nearest entry: {where}")
    else:
        _say(f"no entry to compare with, of {len(found.entries)} in the tuned table")
    for entry in table.stale(found):
        _say(f"stale: the tuned table's {entry.config} does not exist, so its entry for {entry.shape} counts as absent")


@app.command()
def generate(target: Target, out: Out, config: ConfigName = None, every: All = False) -> None:
    """Write kernels' CUDA source, as the runtime compiles it."""
    out.mkdir(parents=True, exist_ok=True)
    chosen = _chosen(target, config, every=every)
    for one in chosen:
        write_atomically(out / f"{one.name}.cu", render(one).encode())
    console.print(f"{len(chosen)} sources in {out}")


@app.command("compile")
def compile_(
    target: Target,
    out: Out,
    config: ConfigName = None,
    every: All = False,
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=1, help="processes")] = os.cpu_count() or 1,
    shard: Annotated[
        str, typer.Option(help="i/n: the i-th of n parts; machines that share a disk may take one each")
    ] = "1/1",
) -> None:
    """Compile kernels into a bundle. What is up to date is skipped, so a second run goes on where one stopped."""
    index, parts = _shard(shard)
    chosen = _chosen(target, config, every=every)[index - 1 :: parts]
    counts: Counter[str] = Counter()
    failures: dict[str, str] = {}
    for name, outcome, message in _build_all(chosen, out, jobs):
        counts[outcome] += 1
        if outcome == "failed":
            failures[name] = message
    console.print(f"{out}: {counts['built']} built, {counts['up to date']} up to date, {counts['failed']} failed")
    for name, message in sorted(failures.items()):
        console.print(f"\n[bold red]{name}[/]", highlight=False)
        console.print(message, markup=False, highlight=False, soft_wrap=True)
    if failures:
        raise typer.Exit(1)


@app.command()
def bench(
    out: Annotated[Path, typer.Option("--out", help="directory for results.json, table.md, chart.png, scaling.png")],
    part: Annotated[list[str] | None, typer.Option(help="speed, memory, host or scaling; all without it")] = None,
    workload: Annotated[list[str] | None, typer.Option(help="a workload of part speed; all without it")] = None,
    reps: Annotated[int, typer.Option(min=1, help="timings of each method, at most")] = 20,
    budget: Annotated[float, typer.Option(min=0.0, help="seconds for each method of a workload")] = 0.25,
) -> None:
    """Time the products and what else computes them on this machine's GPU, and check the results."""
    import torch  # noqa: PLC0415 - the other commands do without this and all that follows

    from mxfp8_cutlass.bench.run import PARTS, run  # noqa: PLC0415
    from mxfp8_cutlass.bench.speed import Effort  # noqa: PLC0415
    from mxfp8_cutlass.bench.workloads import WORKLOADS  # noqa: PLC0415

    known = {one.name: one for one in WORKLOADS}
    parts = _known("--part", part, PARTS)
    chosen = [known[name] for name in _known("--workload", workload, known)]
    device = torch.device("cuda", _hopper("bench"))
    effort = Effort(reps, budget)
    run(out, device=device, parts=parts, workloads=chosen, effort=effort, say=_say)
    _say(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


@app.command()
def sweep(
    out: Annotated[Path, typer.Option("--out", help="directory for sweep.json, sweep.md, sweep.png")],
    workload: Annotated[list[str] | None, typer.Option(help="a workload of bench; all if no problem is given")] = None,
    problems: Annotated[list[str] | None, typer.Option(help='a list in one launch: "M,N,K;M,N,K"')] = None,
    stacked: Annotated[list[str] | None, typer.Option(help='"G,M,N,K": M rows in all, cut evenly by offs')] = None,
    masked: Annotated[list[str] | None, typer.Option(help="the same in rooms, with counts (decode)")] = None,
    promotion_k: Annotated[int, typer.Option(help="128 (folded) or 32 (exact)")] = 128,
    sfb_rows: Annotated[int, typer.Option(help="128 (weights in tiles) or 1")] = 128,
    element_a: Annotated[str, typer.Option(help="e4m3 or e5m2")] = "e4m3",
    element_b: Annotated[str, typer.Option(help="e4m3 or e5m2")] = "e4m3",
    output: Annotated[str, typer.Option(help="bf16, fp16 or fp32")] = "bf16",
    keep: Annotated[float, typer.Option(min=1.0, help="leave out kernels that the model has this much slower")] = 1.6,
    every: Annotated[bool, typer.Option("--all", help="leave out none")] = False,
    launches: Annotated[int, typer.Option(min=1, help="launches in a graph")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="replays of each graph")] = 4,
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=1, help="processes that compile")] = os.cpu_count() or 1,
    shard: Annotated[str, typer.Option(help="i/n: the i-th of n parts of the problems, to be merged")] = "1/1",
    merge: Annotated[list[Path] | None, typer.Option(help="time nothing, but join these files; repeat it")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="write the tuned table that select_kernel reads")] = False,
    table: Annotated[Path | None, typer.Option(help="the table to write, if not the package's")] = None,
) -> None:
    """Time every kernel that fits on lists of problems, checked first. A second run goes on where one stopped."""
    from mxfp8_cutlass.select import make_facts  # noqa: PLC0415 - the other commands do without torch
    from mxfp8_cutlass.sweep import command, results, run, supervise  # noqa: PLC0415

    index, parts = _shard(shard)
    path = out / ("sweep.json" if parts == 1 else f"sweep.{index}of{parts}.json")
    try:
        if merge:
            found = command.merged(merge, path)
        else:
            facts = make_facts(promotion_k, sfb_rows, element_a, element_b, output)
            chosen = command.problems(workload, problems, stacked, masked, facts)[index - 1 :: parts]
            device = _hopper("sweep")
            limit = None if every else keep
            plan = run.Plan(tuple(chosen), facts, keep=limit, launches=launches, rounds=rounds, jobs=jobs)
            status = supervise.supervise(lambda: supervise.in_a_child(plan, path, device), path)
            if status:
                _say(f"the sweep ended early, with status {status}; the same command goes on from {path}")
                raise typer.Exit(max(status, 1))
            found = results.load(path)
        failed = command.finish(found, path, table, console, apply=apply)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    if failed:
        raise typer.Exit(1)


def _hopper(command: str) -> int:
    """The current device's index."""
    import torch  # noqa: PLC0415 - as above

    if not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
        console.print(f"{command} needs a Hopper GPU, and torch sees none here")
        raise typer.Exit(1)
    return torch.cuda.current_device()


def _say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _known(option: str, given: list[str] | None, known: Iterable[str]) -> list[str]:
    """What an option that may be repeated names: all that there is, if it is not given."""
    names = list(known)
    for name in given or ():
        if name not in names:
            raise typer.BadParameter(f"{option} {name!r} must be one of: {', '.join(names)}")
    return given or names


def _build_all(configs: list[KernelConfig], out: Path, jobs: int) -> Iterator[tuple[str, str, str]]:
    """Compile in processes; yields (kernel, "built" | "up to date" | "failed", message) as they finish."""
    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    # A fresh interpreter per worker: forking after NVRTC's or torch's threads have started may hang.
    context = multiprocessing.get_context("spawn")
    with Progress(*columns, console=console) as progress, ProcessPoolExecutor(jobs, context) as pool:
        task = progress.add_task("", total=len(configs))
        futures = {pool.submit(_build, config, out): config.name for config in configs}
        try:
            for future in as_completed(futures):
                name = futures[future]
                error = future.exception()
                progress.update(task, advance=1, description=name)
                yield (name, "failed", f"{type(error).__name__}: {error}") if error else (name, future.result(), "")
        finally:
            pool.shutdown(cancel_futures=True)


def _build(config: KernelConfig, out: Path) -> str:
    """Compile one kernel into the bundle, by the path that the runtime takes."""
    inputs = inputs_of(config)
    if bundle.is_current(out, config, inputs):
        return "up to date"
    bundle.write(out, config, cache.compiled(config, inputs), inputs)
    return "built"


def _chosen(target: str, name: str | None, *, every: bool) -> list[KernelConfig]:
    """The configs that --config and --all ask for, in the order of their names."""
    if every == (name is not None):
        raise typer.BadParameter("give one of --config NAME and --all")
    configs = {config.name: config for config in all_configs(target)}
    if name is None:
        return [configs[key] for key in sorted(configs)]
    matches = fnmatch.filter(sorted(configs), name)
    if not matches:
        near = difflib.get_close_matches(name, configs, n=3, cutoff=0.3)
        raise typer.BadParameter(f"--config {name!r} is no kernel of sm_{target}. Near: {', '.join(near) or 'none'}")
    return [configs[key] for key in matches]


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise typer.BadParameter(f"--shard {text!r} must be i/n with 1 <= i <= n")
    return int(match[1]), int(match[2])


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _problem(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if match is None:
        raise typer.BadParameter(f"problem size {text!r} must be MxNxK")
    return int(match[1]), int(match[2]), int(match[3])


if __name__ == "__main__":
    app()
