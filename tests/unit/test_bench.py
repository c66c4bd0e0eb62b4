"""build.py bench without a GPU: tiny workloads on the reference, a clock that tells set times, played peers."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from mxfp8_cutlass.bench import host, memory, methods, peers, report, run, speed
from mxfp8_cutlass.bench.check import accuracy, sampled_groups, sampled_rows
from mxfp8_cutlass.bench.operands import make_operands
from mxfp8_cutlass.bench.speed import Ceilings, Effort, Outcome, Row
from mxfp8_cutlass.bench.timing import HostTimer, Spread, time_interleaved, timer_for
from mxfp8_cutlass.bench.workloads import SCALING, WORKLOADS, Workload, zipf_sizes

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
EVEN = Workload("even", 3, 96, 48, 160)
SKEWED = Workload("skewed", 16, 400, 32, 96, split="zipf")
DECODE = Workload("decode", 4, 6, 32, 256, kind="masked")
OURS = ("folded", "exact", "fold activations")
GROWING = {
    "groups": [Workload(f"G {g}", g, 32, 32, 128) for g in (1, 2)],
    "rows": [Workload(f"M {m}", 4, m, 32, 128, kind="masked") for m in (1, 8)],
}


class FakeTimer:
    """Each mark comes one millisecond after the last one, and so does each look at the host's clock."""

    def __init__(self):
        self.events = []
        self.time = 0

    def mark(self):
        self.time += 1
        self.events.append("mark")
        return self.time

    def elapsed_ms(self, start, stop):
        assert self.events[-1] == "wait", "a mark may not have happened yet"
        return float(stop - start)

    def wait(self):
        self.events.append("wait")

    def flush(self):
        self.events.append("flush")

    def host_s(self):
        self.time += 1
        return self.time / 1000


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


def test_samples_reach_the_ends_of_groups():
    assert sampled_groups((0, 5, 9, 0, 1, 3, 0)) == [1, 2, 4, 5]
    assert sampled_groups((0, 0)) == []
    assert sampled_rows(10, 3) == [10, 11, 12]
    assert sampled_rows(10, 1) == [10]
    rows = sampled_rows(100, 1000)
    assert len(rows) == 32
    assert (rows[0], rows[-1]) == (100, 1099)


@pytest.mark.parametrize("workload", [EVEN, SKEWED, DECODE], ids=lambda workload: workload.name)
def test_our_methods_are_right_on_the_reference(workload):
    row = speed.measure(workload, OURS, CPU, FakeTimer(), Effort(reps=3))
    for outcome in row.outcomes.values():
        assert outcome.note == ""
        assert outcome.ms == Spread(1.0, 1.0, 1.0, 3)
        assert outcome.tflops == pytest.approx(1e-9 * 2 * workload.m * workload.n * workload.k)
        assert 0 < outcome.error <= outcome.worst_row < methods.ROW_TOLERANCE
        assert outcome.kernel.startswith("sm90_mxfp8_grouped_gemm_")


@pytest.mark.parametrize("fault", ["an element", "a row not written", "a NaN"])
def test_wrong_results_are_reported_and_their_times_are_not(monkeypatch, fault):
    def faulty(x):
        method = methods.folded(x)

        def wrong():
            out = method.run()
            last = x.workload.m - 1
            if fault == "an element":
                out[last, 7] += 0.1 * out[last].float().norm()
            else:
                out[last] = torch.nan
            return out

        return dataclasses.replace(method, run=wrong)

    monkeypatch.setitem(peers.METHODS, "folded", faulty)
    row = speed.measure(EVEN, OURS, CPU, FakeTimer(), Effort(reps=3))
    outcome = row.outcomes["folded"]
    assert outcome.ms is None
    assert outcome.tflops is None
    assert outcome.note.startswith("wrong")
    assert row.outcomes["exact"].ms is not None
    results = run.Results({}, Effort(), speed=[row])
    text = report.to_markdown(results)
    assert "folded: wrong: a row is off by" in text
    results.to_json()  # has no NaN, which JSON does not know


def test_what_a_method_does_not_write_is_wrong():
    x = make_operands(EVEN, CPU)
    method = methods.folded(x)
    method.run()
    lazy = dataclasses.replace(method, run=lambda: method.out)
    assert math.isnan(accuracy(lazy, x).worst_row)


def test_methods_that_fail_are_named_with_the_reason(monkeypatch):
    def broken(x):
        raise peers.UnavailableError("out of order")

    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    monkeypatch.setitem(peers.METHODS, "torch BF16", broken)
    row = speed.measure(EVEN, ("exact", "DeepGEMM", "torch BF16"), CPU, FakeTimer(), Effort(reps=3))
    assert list(row.outcomes) == ["exact", "DeepGEMM", "torch BF16"]
    assert row.outcomes["DeepGEMM"].note.startswith("ModuleNotFoundError")
    assert row.outcomes["torch BF16"].note == "UnavailableError: out of order"
    notes = report.notes_of([row])
    assert "- torch BF16: UnavailableError: out of order (every workload)" in notes


def _played_deep_gemm():
    """DeepGEMM's interface as far as it is used, with float32 products of what it is given."""

    def weights(b, group):
        data, scale = b[0][group].float(), b[1][group]
        return data * scale.repeat_interleave(128, 0)[: data.shape[0]].repeat_interleave(128, 1)[:, : data.shape[1]]

    def rows(data, scale):
        assert scale.stride(-2) == 1, "scales are to be laid out beforehand"
        assert scale.stride(-1) % 4 == 0, "columns are read by TMA"
        return data.float() * scale.repeat_interleave(128, -1)[..., : data.shape[-1]]

    def contiguous(a, b, out, groups, *, disable_ue8m0_cast):
        assert disable_ue8m0_cast
        assert groups.dtype == torch.int32
        assert len(groups) == len(out) == len(a[0])
        assert len(out) % 128 == 0
        for block in range(0, len(out), 128):
            part = slice(block, block + 128)
            (group,) = groups[part].unique().tolist()
            out[part] = rows(a[0][part], a[1][part]) @ weights(b, group).mT

    def masked(a, b, out, counts, expected, *, disable_ue8m0_cast):
        assert disable_ue8m0_cast
        assert counts.dtype == torch.int32
        assert out.shape[1] % 64 == 0
        assert 0 < expected <= out.shape[1]
        for group, count in enumerate(counts.tolist()):
            out[group, :count] = (rows(a[0][group], a[1][group]) @ weights(b, group).mT)[:count].bfloat16()

    return types.SimpleNamespace(
        m_grouped_fp8_fp4_gemm_nt_contiguous=contiguous,
        m_grouped_fp8_gemm_nt_masked=masked,
        get_mk_alignment_for_contiguous_layout=lambda: 128,
    )


@pytest.mark.parametrize("workload", [EVEN, SKEWED, DECODE], ids=lambda workload: workload.name)
def test_deep_gemm_gets_its_layouts_and_computes_the_same_product(monkeypatch, workload):
    monkeypatch.setitem(sys.modules, "deep_gemm", _played_deep_gemm())
    row = speed.measure(workload, ("folded", "DeepGEMM"), CPU, FakeTimer(), Effort(reps=3))
    assert row.outcomes["DeepGEMM"].note == ""
    assert row.outcomes["DeepGEMM"].error == pytest.approx(row.outcomes["folded"].error, rel=0.05)
    assert row.outcomes["DeepGEMM"].checked_rows == row.outcomes["folded"].checked_rows


def test_a_deep_gemm_without_the_functions_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", types.SimpleNamespace())
    row = speed.measure(DECODE, ("DeepGEMM",), CPU, FakeTimer(), Effort(reps=3))
    assert "has none of m_grouped" in row.outcomes["DeepGEMM"].note


@pytest.mark.parametrize("fast", [False, True])
def test_torch_rowwise_gets_a_scale_per_row(monkeypatch, fast):
    def played(a, b, scale_a, scale_b, *, offs, out_dtype, use_fast_accum):
        assert use_fast_accum is fast
        assert b.stride(-2) == 1, "torch takes column-major weights only"
        out = torch.empty(a.shape[0], b.shape[-1], dtype=out_dtype)
        start = 0
        for group, end in enumerate(offs.tolist()):
            product = a[start:end].float() @ b[group].float()
            out[start:end] = product * scale_a[start:end, None] * scale_b[group]
            start = end
        return out

    monkeypatch.setattr(torch, "_scaled_grouped_mm", played)
    name = "torch FP8 rowwise, fast" if fast else "torch FP8 rowwise"
    row = speed.measure(SKEWED, (name, "torch BF16", "dequantize + BF16"), CPU, FakeTimer(), Effort(reps=3))
    assert {outcome.note for outcome in row.outcomes.values()} == {""}
    assert all(outcome.error < 3e-3 for outcome in row.outcomes.values())


def test_clocks_are_read_while_the_device_works(monkeypatch):
    timer = FakeTimer()
    row = speed.measure(EVEN, ("folded",), CPU, timer, Effort(reps=3), lambda: {"clocks.sm": timer.events[-1]})
    assert row.clocks == {"clocks.sm": "wait"}  # after the rounds
    assert speed.measure(EVEN, ("DeepGEMM",), CPU, timer, Effort(reps=3), lambda: {"clocks.sm": "1"}).clocks == {}


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
