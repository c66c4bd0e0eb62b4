"""bench: each method's set-up and check, on the reference and with played peers."""

from __future__ import annotations

import dataclasses
import math
import sys
import types

import pytest
import torch
from bench_stand_ins import DECODE, EVEN, OURS, SKEWED, FakeTimer, played_deep_gemm

from mxfp8_cutlass.bench import methods, peers, report, run, speed
from mxfp8_cutlass.bench.check import accuracy, sampled_groups, sampled_rows
from mxfp8_cutlass.bench.operands import make_operands
from mxfp8_cutlass.bench.speed import Effort
from mxfp8_cutlass.bench.timing import Spread

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("workload", [EVEN, SKEWED, DECODE], ids=lambda workload: workload.name)
def test_deep_gemm_gets_its_layouts_and_computes_the_same_product(monkeypatch, workload):
    monkeypatch.setitem(sys.modules, "deep_gemm", played_deep_gemm())
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


def test_samples_reach_the_ends_of_groups():
    assert sampled_groups((0, 5, 9, 0, 1, 3, 0)) == [1, 2, 4, 5]
    assert sampled_groups((0, 0)) == []
    assert sampled_rows(10, 3) == [10, 11, 12]
    assert sampled_rows(10, 1) == [10]
    rows = sampled_rows(100, 1000)
    assert len(rows) == 32
    assert (rows[0], rows[-1]) == (100, 1099)
