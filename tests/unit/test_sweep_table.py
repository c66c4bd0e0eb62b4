"""From results to the tuned table, and from the table to select_kernel: shards, merging, distance, stale entries."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import tuned_tables
from sweep_stand_ins import FACTS, LIST, STACKED, Kernels, Steps, plan

from mxfp8_cutlass.generator.config_space import sm90_configs
from mxfp8_cutlass.select import choose, make_facts, rank, select_kernel, select_stacked
from mxfp8_cutlass.sweep import run, tune
from mxfp8_cutlass.sweep.problems import Problem, parse_list, parse_stacked
from mxfp8_cutlass.sweep.results import Outcome, Record, Sweep, load, merge
from mxfp8_cutlass.tuned import table
from mxfp8_cutlass.tuned.table import RADIUS, Entry, Shape, Table

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SHAPE = Shape(8, 4096, 4096, 2048)
SIZES = [(512, 4096, 2048)] * 8


def another_kernel():
    """One that the model does not pick for SHAPE."""
    return rank(SIZES)[-1].config


@pytest.fixture
def use(monkeypatch, tmp_path):
    yield lambda *entries: tuned_tables.use(monkeypatch, tmp_path, *entries)
    monkeypatch.undo()
    tuned_tables.forget()


def stacked(shape, facts=FACTS):
    return select_stacked(shape.m, shape.n, shape.k, shape.groups, "90a", *facts.values(), split=True)


def result(problem, times, samples=2, **errors):
    """An outcome with set medians, by index of the model's order."""
    ranked = problem.ranked("90a", FACTS)
    names = [c.config.name for c in ranked]
    records = {names[i]: Record("source", ranked[i].total_us, [us] * samples) for i, us in times.items()}
    records |= {names[int(i[1:])]: Record("source", 1.0, [], error=error) for i, error in errors.items()}
    return Outcome(problem, len(names), sorted(records), names[0], names[0], records), names


def test_shipped_table_names_kernels_that_exist():
    for target in table.FILES:
        found = table.load(target)
        assert table.stale(found) == []
        for entry in found.entries:
            match = table.nearest(found, entry.shape, sm90_configs())
            assert match.distance == 0.0
    assert table.load("100a") == Table()
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["package-data"]["mxfp8_cutlass.tuned"] == ["*.json"]


def test_distance_is_that_of_logarithms():
    assert table.distance(SHAPE, SHAPE) == 0
    assert table.distance(SHAPE, replace(SHAPE, n=8192)) == 1
    assert table.distance(SHAPE, replace(SHAPE, m=1024, k=4096)) == pytest.approx(math.sqrt(5))
    assert table.distance(SHAPE, Shape(16, 8192, 4096, 2048)) == 1  # as many rows per group
    assert table.distance(SHAPE, Shape(16, 4096, 4096, 2048)) == pytest.approx(math.sqrt(2))


def test_table_decides_within_the_radius_and_the_model_beyond(use):
    picked, by_model = another_kernel(), rank(SIZES)[0].config
    use()
    assert select_kernel(SIZES) == by_model
    assert picked not in (by_model, stacked(SHAPE))
    assert choose(SIZES).match is None
    use(Entry(SHAPE, picked.name, 1.0, "w"))
    assert select_kernel(SIZES) == stacked(SHAPE) == picked
    choice = choose([*SIZES, (0, 4096, 2048)])  # an empty group does not count where the host knows it
    assert (choice.config, choice.tuned, choice.match.distance) == (picked, True, 0.0)
    assert select_stacked(512, 4096, 2048, 8, "90a", *FACTS.values(), split=False) == picked
    within, beyond = (round(2048 * 2 ** (RADIUS * by) / 32) * 32 for by in (0.9, 1.1))
    assert stacked(replace(SHAPE, k=within)) == picked
    assert stacked(replace(SHAPE, k=beyond)) != picked
    far = choose([(512, 4096, beyond)] * 8)
    assert not far.tuned
    assert far.match.distance > RADIUS
    # Other facts, mixed shapes, nothing to do: the model.
    assert stacked(SHAPE, make_facts(128, 1, "e4m3", "e4m3", "bf16")) != picked
    assert select_kernel(SIZES, promotion_k=32, sfb_rows=1).promotion_k == 32
    assert choose([*SIZES[:-1], (512, 4096, 1024)]).match is None
    assert choose([(0, 4096, 2048)] * 8).match is None
    assert stacked(replace(SHAPE, m=0)) in sm90_configs()


def test_nearest_entry_wins(use):
    first, second = (candidate.config for candidate in rank(SIZES)[-2:])
    use(Entry(SHAPE, first.name, 1.0, "a"), Entry(replace(SHAPE, n=4608), second.name, 1.0, "b"))
    assert stacked(replace(SHAPE, n=4240)) == first
    assert stacked(replace(SHAPE, n=4480)) == second


def test_a_stale_entry_counts_as_absent_and_is_told(use):
    picked = another_kernel()
    gone, near = Entry(SHAPE, "sm90_gone", 1.0, "old"), Entry(replace(SHAPE, n=4224), picked.name, 1.0, "new")
    use(gone)
    assert table.stale(table.load("90a")) == [gone]
    assert select_kernel(SIZES) == rank(SIZES)[0].config
    use(gone, near)
    assert select_kernel(SIZES) == picked


def test_a_file_that_is_no_table_is_an_error(tmp_path):
    path = tmp_path / "table.json"
    assert table.read(path) == Table()
    row = {"groups": 1, "m": 1, "n": 16, "k": 32, "config": "x", "us": 1.0, "workloads": "w"}
    for entries in (["x"], [{**row, "n": None}], [{**row, "m": 0}], {"a": 1}):
        path.write_text(json.dumps({"about": {}, "entries": entries}))
        with pytest.raises(ValueError, match=r"table\.json"):
            table.read(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="no table of tuned kernels"):
        table.read(path)


def test_apply_takes_the_best_for_all_problems_that_look_alike(use, tmp_path):
    even = parse_stacked("2,64,32,128")
    skewed = Problem("skewed", ((60, 32, 128), (4, 32, 128)), "split")
    a, names = result(even, {0: 10.0, 1: 11.0, 2: 30.0}, _3="RuntimeError: x")
    b, _ = result(skewed, {0: 40.0, 1: 20.0, 2: 25.0})
    mixed, _ = result(LIST, {0: 1.0})
    failed, _ = result(parse_list("1,16,32"), {}, _0="RuntimeError: x")
    unfinished, _ = result(parse_list("1,32,32"), {0: 1.0}, samples=1)
    sweep = Sweep("CPU, reference", "90a", FACTS, 2, [{"torch": "2"}], [a, b, mixed, failed, unfinished])
    path = tmp_path / "tuned" / "t.json"
    written, notes = tune.apply(sweep, path)
    # 1.0 and 2.0 beyond the best; 1.1 and 1.0; 3.0 and 1.25.
    (entry,) = written.entries
    assert (entry.shape, entry.config) == (Shape(2, 64, 32, 128), names[1])
    assert entry.workloads == f"{even.name}, skewed"
    assert entry.us == pytest.approx(math.sqrt(11.0 * 20.0), abs=0.01)
    assert table.read(path) == written
    assert written.about == {"target_sm": "90a", "torch": "2", "device": "CPU, reference"}
    assert [note.split(": no entry, ")[1].split(",")[0] for note in notes] == [
        "its problems differ in N or K and the model serves those",
        "every kernel failed",
        "it is not complete",
    ]


def test_apply_replaces_entries_of_its_shapes_and_facts_and_drops_stale_ones(tmp_path):
    path = tmp_path / "t.json"
    problem = parse_stacked("2,64,32,128")
    outcome, names = result(problem, {0: 2.0, 1: 1.0})
    exact = rank([(32, 32, 128)] * 2, promotion_k=32, sfb_rows=1)[0].config.name
    old = (
        Entry(problem.shape, names[0], 1.0, "replaced"),
        Entry(problem.shape, exact, 1.0, "other facts"),
        Entry(SHAPE, names[2], 1.0, "other shape"),
        Entry(SHAPE, "sm90_gone", 1.0, "stale"),
    )
    path.write_text(Table(old, {"device": "CPU, reference"}).to_json())
    written, notes = tune.apply(Sweep("CPU, reference", "90a", FACTS, 2, [], [outcome]), path)
    assert {(e.config, e.workloads) for e in written.entries} == {
        (names[1], problem.name),
        (exact, "other facts"),
        (names[2], "other shape"),
    }
    assert notes == ["stale: dropped, sm90_gone exists no longer"]
    with pytest.raises(ValueError, match="this sweep on 'NVIDIA H100'"):
        tune.apply(Sweep("NVIDIA H100", "90a", FACTS, 2, [], [outcome]), path)


def test_merging_keeps_failures_and_the_longer_record():
    problem = parse_stacked("2,64,32,128")
    (a, names), (b, _) = result(problem, {0: 2.0, 1: 1.0}, samples=1), result(problem, {0: 2.0}, _1="wrong")
    one, other = (Sweep("gpu", "90a", FACTS, 2, [{"n": n}], [o]) for n, o in (("1", a), ("2", b)))
    for merged in (merge([one, other]), merge([other, one])):
        (outcome,) = merged.outcomes
        assert outcome.failures() == {names[1]: "wrong"}
        assert outcome.times() == {names[0]: 2.0}
        assert len(merged.runs) == 2
        assert outcome.is_complete(2)
    for change, message in (
        ({"gpu": "x"}, "gpu is 'x'"),
        ({"samples": 3}, "samples is 3"),
        ({"facts": make_facts(128, 1, "e4m3", "e4m3", "bf16")}, "facts is"),
    ):
        with pytest.raises(ValueError, match=message):
            merge([one, replace(other, **change)])
    b.records[names[0]].source = "another"
    with pytest.raises(ValueError, match="different sources"):
        merge([one, other])


def test_shards_merged_and_applied_by_the_command_line(tmp_path, monkeypatch, use):
    use()
    problems = (STACKED, parse_stacked("2,40,16,128"), LIST)
    kernels = Kernels(monkeypatch, ms=lambda config: 1000 - config.tile_m - config.tile_n)
    parts = []
    for index in (1, 2):
        parts.append(tmp_path / f"part{index}.json")
        run.run(plan(*problems[index - 1 :: 2]), parts[-1], CPU, Steps(), kernels.timer)
    out, where = tmp_path / "out", tmp_path / "table.json"
    command = [sys.executable, ROOT / "build.py", "sweep", "--out", out, "--apply", "--table", where]
    for part in parts:
        command += ["--merge", part]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    merged = load(out / "sweep.json")
    assert {outcome.problem.key for outcome in merged.outcomes} == {problem.key for problem in problems}
    assert all(outcome.is_complete(merged.samples) for outcome in merged.outcomes)
    assert len(table.read(where).entries) == 2
    assert f"{LIST.name}: no entry" in done.stdout
    assert f"{where}: 2 entries" in done.stdout
    assert (out / "sweep.md").exists()
    entry = next(e for e in table.read(where).entries if e.shape == STACKED.shape)
    best = {outcome.problem.key: next(iter(outcome.times())) for outcome in merged.outcomes}
    assert entry.config == best[STACKED.key]
    use(*table.read(where).entries)
    assert STACKED.selected("90a", FACTS).name == entry.config


def test_explain_says_what_decided():
    command = [sys.executable, ROOT / "build.py", "explain", "--target", "90a", "77x32x32"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"picked by the cost model: {choose([(77, 32, 32)]).config.name}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "mixtral"], "mixtral-8x7b fc1"),
        (["--problems", "1,2"], "must be M,N,K"),
        (["--promotion-k", "64"], "promotion_k is 64"),
        (["--shard", "3/2"], "--shard '3/2' must be i/n"),
        (["--merge", "nowhere.json"], "nowhere.json"),
        (["--keep", "0.5"], "--keep"),
    ],
)
def test_command_line_refuses_what_it_does_not_know(tmp_path, arguments, message):
    command = [sys.executable, ROOT / "build.py", "sweep", "--out", tmp_path / "out", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert message in " ".join((done.stdout + done.stderr).split())
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_command_line_needs_a_gpu(tmp_path):
    command = [sys.executable, ROOT / "build.py", "sweep", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs a Hopper GPU" in done.stdout
