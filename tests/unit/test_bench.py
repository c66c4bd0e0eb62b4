"""build.py bench without a GPU: tiny workloads on the reference, a clock that tells set times, played peers."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench_stand_ins import DECODE, EVEN, OURS, SKEWED, FakeTimer

from mxfp8_cutlass.bench import host, memory, methods, peers, report, run
from mxfp8_cutlass.bench.speed import Ceilings, Effort, Outcome, Row
from mxfp8_cutlass.bench.timing import HostTimer, Spread, time_interleaved, timer_for
from mxfp8_cutlass.bench.workloads import SCALING, WORKLOADS, Workload, zipf_sizes

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
GROWING = {
    "groups": [Workload(f"G {g}", g, 32, 32, 128) for g in (1, 2)],
    "rows": [Workload(f"M {m}", 4, m, 32, 128, kind="masked") for m in (1, 8)],
}


def test_workloads_are_the_table_of_the_issue():
    assert len(WORKLOADS) == len({workload.name for workload in WORKLOADS}) == 10
    assert [w.groups for w in SCALING["groups"]] == [2**i for i in range(9)]
    assert len({(w.m, w.n, w.k) for w in SCALING["groups"]}) == 1
    assert [w.m for w in SCALING["rows"]] == [2**i for i in range(18)]
    for workload in (*WORKLOADS, *SCALING["groups"], *SCALING["rows"]):
        assert sum(workload.sizes) == workload.m
        assert len(workload.sizes) == workload.groups
        assert methods.kernel_of(workload, exact=False).promotion_k == 128
        assert methods.kernel_of(workload, exact=True).promotion_k == 32


@pytest.mark.parametrize(("groups", "m"), [(128, 32768), (16, 400), (3, 12), (64, 8192)])
def test_zipf_split_has_empty_and_one_token_groups_and_no_multiples_of_128(groups, m):
    sizes = zipf_sizes(groups, m)
    assert sum(sizes) == m
    assert len(sizes) == groups
    assert 0 in sizes
    assert 1 in sizes
    assert not [size for size in sizes if size and size % 128 == 0]
    assert sizes == zipf_sizes(groups, m)
    with pytest.raises(ValueError, match="Zipf"):
        zipf_sizes(groups, groups)


def test_timing_interleaves_rotates_and_flushes_before_each_call():
    timer, calls = FakeTimer(), []
    functions = {name: lambda name=name: calls.append(name) or timer.events.append("call") for name in "abc"}
    times = time_interleaved(functions, timer, reps=4, budget_s=1.0)
    assert "".join(calls) == "abc" + "bca" + "cab" + "abc"
    assert timer.events == (["flush", "mark", "call", "mark"] * 3 + ["wait"]) * 4
    assert times == {name: Spread(1.0, 1.0, 1.0, 4) for name in "abc"}
    assert time_interleaved({}, timer, 2, 1.0) == {}


def test_timing_stops_when_its_budget_is_spent_but_not_before_three_rounds():
    assert time_interleaved({"a": int}, FakeTimer(), 20, 0.0)["a"].count == 3
    assert time_interleaved({"a": int}, FakeTimer(), 2, 0.0)["a"].count == 2
    assert 3 < time_interleaved({"a": int}, FakeTimer(), 20, 0.02)["a"].count < 20
    assert isinstance(timer_for(CPU), HostTimer)


def test_spread_has_median_and_quartiles():
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)


def test_memory_kernels_are_compared_with_the_reference_and_the_copy(monkeypatch):
    moves = {move.name: move for move in memory.measure_memory(CPU, FakeTimer(), Effort(reps=3), (256, 160), 2)}
    assert len(moves) == 7
    assert {move.note for move in moves.values()} == {""}
    assert moves["copy"].of_copy == 1.0
    assert moves["copy"].gbps == pytest.approx(1e-6 * 4 * 256 * 160)
    assert moves["quantize"].of_copy == pytest.approx((3 + 1 / 32) / 4)

    monkeypatch.setattr(memory, "dequantize", lambda xq, dtype: torch.zeros(xq.shape, dtype=dtype))
    moves = {move.name: move for move in memory.measure_memory(CPU, FakeTimer(), Effort(reps=3), (256, 128), 2)}
    assert moves["dequantize"].ms is None
    assert moves["dequantize"].note.startswith("wrong")


def test_host_time_is_that_of_a_call():
    times = {time.name: time for time in host.measure_host(CPU, FakeTimer(), batches=3, calls=4)}
    assert times["grouped_mm, folded, out given"].us == Spread(250.0, 250.0, 250.0, 3)
    assert times["DeepGEMM"].us is None
    assert times["DeepGEMM"].note


def test_cold_start_runs_in_processes_of_its_own():
    starts = host.measure_cold_start(CPU)
    assert [start.note for start in starts] == [""] * len(starts)
    assert all(start.seconds["first calls"] > 0 and start.seconds["import torch"] > 0.01 for start in starts)
    failed = host.measure_cold_start(torch.device("meta"))
    assert all(start.seconds == {} and start.note for start in failed)


def test_ratios_are_those_of_the_issue():
    workload = Workload("w", 2, 1000, 64, 1000)
    times = {"folded": 2.0, "DeepGEMM": 3.0, "torch BF16": 4.0, "exact": 5.0, "fold activations": 2.5}
    outcomes = {name: Outcome(ms=Spread(ms, ms, ms, 3), tflops=1.0) for name, ms in times.items()}
    row = Row(workload, workload.sizes, outcomes, {})
    values = {name: of(row, Ceilings(copy_gbps=2.0)) for name, of in report.RATIOS.items()}
    assert values["DeepGEMM / folded"] == 1.5
    assert values["torch BF16 / exact"] == 0.8
    assert values["emulation's floor / fold activations"] == pytest.approx((4.0 + 3e-6 * 1128 * 1000 / 2) / 2.5)
    assert values["reading the weights / folded"] == pytest.approx(1e-6 * 2 * 64 * 1000 / 2.0 / 2.0)
    assert values["torch FP8 rowwise / folded"] is None
    assert report.geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)


def test_whole_run_writes_results_table_and_charts(tmp_path):
    lines = []
    run.run(
        tmp_path,
        device=CPU,
        workloads=[EVEN, DECODE],
        scaling=GROWING,
        effort=Effort(reps=3),
        timer=FakeTimer(),
        say=lines.append,
    )
    assert [line.split(":")[0] for line in lines if "matplotlib" not in line] == [
        *("even", "decode", "memory", "host"),
        *("G 1", "G 2", "M 1", "M 8"),
    ]
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["failure"] == ""
    assert found["about"]["torch"] == torch.__version__
    assert [row["workload"]["name"] for row in found["speed"]] == ["even", "decode"]
    assert set(found["speed"][0]["outcomes"]) == set(peers.METHODS)
    assert found["ceilings"]["copy_gbps"] > 0
    text = (tmp_path / "table.md").read_text()
    for heading in ("Grouped products", "Kernels that only move data", "Host", "Scaling: total M", "Scaling: G fixed"):
        assert f"## {heading}" in text
    assert "| even: G 3, M 96, N 48, K 160 | 1.000 [1.000, 1.000]" in text


def test_charts(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    run.run(tmp_path, device=CPU, parts=["speed", "scaling"], workloads=[EVEN, DECODE], scaling=GROWING)
    for name in ("chart.png", "scaling.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_charts_are_left_out_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    lines = []
    run.run(tmp_path, device=CPU, parts=["speed"], workloads=[EVEN], timer=FakeTimer(), say=lines.append)
    assert "[bench]" in lines[-1]
    assert not (tmp_path / "chart.png").exists()


def test_what_was_measured_survives_a_failure(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(run, "measure_host", fail)
    with pytest.raises(RuntimeError, match="gone"):
        run.run(tmp_path, device=CPU, parts=["speed", "host"], workloads=[EVEN], timer=FakeTimer())
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["failure"] == "RuntimeError: the device is gone"
    assert len(found["speed"]) == 1
    assert "ended early: RuntimeError: the device is gone" in (tmp_path / "table.md").read_text()


def test_kernels_that_are_missing_are_compiled_in_processes(cache_dir, monkeypatch):
    config = methods.kernel_of(DECODE, exact=False)
    lines = []
    run.compile_missing([config], lines.append)
    assert lines == ["compiling 1 kernels in 1 processes"]
    run.compile_missing([config], lines.append)
    assert len(lines) == 1
    monkeypatch.setenv("MXFP8_CUTLASS_JIT", "0")
    run.compile_missing([methods.kernel_of(DECODE, exact=True)], lines.append)
    assert len(lines) == 1


def test_kernels_of_a_run_are_listed_once():
    configs = run._kernels(WORKLOADS, SCALING["groups"], host=True)
    assert len(configs) == len(set(configs))
    assert {methods.kernel_of(workload, exact=True) for workload in WORKLOADS} <= set(configs)
    assert {methods.kernel_of(workload, exact=False) for workload in SCALING["groups"]} <= set(configs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "mixtral"], "mixtral-8x7b fc1"),
        (["--part", "all"], "speed, memory, host, scaling"),
        (["--reps", "0"], "--reps"),
    ],
)
def test_command_line_refuses_what_it_does_not_know(tmp_path, arguments, message):
    command = [sys.executable, ROOT / "build.py", "bench", "--out", tmp_path / "out", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert message in " ".join((result.stdout + result.stderr).split())
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_command_line_needs_a_gpu(tmp_path):
    command = [sys.executable, ROOT / "build.py", "bench", "--out", tmp_path / "out"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "needs a Hopper GPU" in result.stdout


@pytest.mark.gpu
def test_a_run_on_the_gpu(tmp_path):
    device = torch.device("cuda", torch.cuda.current_device())
    small = [Workload("small", 8, 2048, 512, 512), dataclasses.replace(SKEWED, n=256, k=512), DECODE]
    results = run.run(tmp_path, device=device, parts=["speed", "host"], workloads=small, effort=Effort(reps=3))
    for row in results.speed:
        assert {name: row.outcomes[name].note for name in OURS} == dict.fromkeys(OURS, "")
    assert results.about["driver_version"]
    assert all(time.us for time in results.host if time.name.startswith("grouped_mm"))
