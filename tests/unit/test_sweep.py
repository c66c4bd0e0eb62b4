"""build.py sweep without a GPU: tiny problems on the reference, a played clock, kernels that fail."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest
import torch
from sweep_stand_ins import FACTS, LIST, MASKED, STACKED, Kernels, Steps, plan

from mxfp8_cutlass.bench.workloads import WORKLOADS
from mxfp8_cutlass.generator.config_space import sm90_configs
from mxfp8_cutlass.select import make_facts
from mxfp8_cutlass.sweep import command, compiling, report, run, supervise
from mxfp8_cutlass.sweep.problems import parse_list, parse_stacked, parse_text, workloads
from mxfp8_cutlass.sweep.results import load
from mxfp8_cutlass.sweep.timing import HostReplayTimer, replay_timer_for

CPU = torch.device("cpu")


@pytest.fixture
def kernels(monkeypatch):
    """Each kernel has a time of its own here, unlike the model's."""
    return Kernels(monkeypatch, ms=lambda config: 2000 - sm90_configs().index(config))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out" / "sweep.json"


def names(problem=STACKED, facts=FACTS):
    return [candidate.config.name for candidate in problem.ranked("90a", facts)]


def sweep(path, kernels, a_plan=None, steps=None):
    return run.run(a_plan or plan(), path, CPU, steps or Steps(), kernels.timer)


def test_each_kernel_that_fits_is_checked_then_timed_in_turns(path, kernels):
    steps = Steps()
    found = sweep(path, kernels, steps=steps)
    (outcome,) = found.outcomes
    every = names()
    assert len(every) > 3
    assert set(outcome.records) == set(outcome.planned) == set(every)
    assert outcome.is_complete(6)
    assert not outcome.failures()
    assert all(len(record.samples_us) == 6 and record.worst_row < 6e-3 for record in outcome.records.values())
    # One checked call and the capture's two; then three rounds of two launches, each round from another start.
    setup = [name for name in every for _ in range(3)]
    rounds = [name for shift in range(3) for name in every[shift:] + every[:shift] for _ in range(2)]
    assert kernels.calls == setup + rounds
    flushes = [kernels.timer.events[i - 2] for i, event in enumerate(kernels.timer.events) if event == "call"]
    assert flushes.count("flush") == len(kernels.calls) - len(every)  # all but the checked calls
    best = [config for config in sm90_configs() if config.name in every][-1]
    assert next(iter(outcome.times())) == best.name
    assert outcome.times()[best.name] == 1000 * (1 + kernels.ms(best))
    assert steps.done == steps.expected == len(every) * (1 + 3)


@pytest.mark.parametrize(
    "facts", [FACTS, make_facts(32, 1, "e5m2", "e4m3", "fp32"), make_facts(128, 1, "e4m3", "e5m2", "fp16")]
)
def test_lists_and_other_facts(path, kernels, facts):
    found = sweep(path, kernels, plan(STACKED, LIST, MASKED, facts=facts, rounds=1))
    assert [outcome.is_complete(2) for outcome in found.outcomes] == [True] * 3
    assert not report.failures(found)


def test_the_model_prunes_but_not_what_select_takes(path, kernels, monkeypatch):
    predicted = {c.config.name: c.total_us for c in STACKED.ranked("90a", FACTS)}
    least, most = min(predicted.values()), max(predicted.values())
    keep = (least + most) / (2 * least)
    limit = keep * least
    found = sweep(path, kernels, plan(keep=keep, rounds=1))
    assert set(found.outcomes[0].planned) == {name for name, us in predicted.items() if us <= limit}
    assert 0 < len(found.outcomes[0].planned) < found.outcomes[0].kernels == len(predicted)
    slowest = STACKED.ranked("90a", FACTS)[-1].config
    monkeypatch.setattr(type(STACKED), "selected", lambda *_: slowest)
    assert slowest in [c.config for c in run.candidates(plan(keep=1.0), STACKED)[0]]


def test_an_interrupted_run_goes_on_and_a_complete_one_does_nothing(path, kernels):
    every = names()
    stop = 3 * len(every) + 2 * len(every) + 3  # in the second round, at the second kernel

    def interrupt(_):
        raise KeyboardInterrupt

    ms, kernels.ms = kernels.ms, lambda c: interrupt(c) if len(kernels.calls) == stop else ms(c)
    with pytest.raises(KeyboardInterrupt):
        sweep(path, kernels)
    kernels.ms = ms
    left = load(path)
    assert left.pending is None
    counts = [len(record.samples_us) for record in left.outcomes[0].records.values()]
    assert sorted(counts) == [2] * (len(every) - 1) + [4]
    kernels.calls.clear()
    found = sweep(path, kernels)
    assert found.outcomes[0].is_complete(6)
    assert {len(record.samples_us) for record in found.outcomes[0].records.values()} == {6}
    assert len(kernels.calls) == 3 * len(every) + 6 * len(every) - sum(counts)
    kernels.calls.clear()
    steps = Steps()
    again = sweep(path, kernels, steps=steps)
    assert kernels.calls == []
    assert steps.expected == 0
    assert (len(found.runs), len(again.runs)) == (2, 2)
    assert load(path) == again


def test_a_kernel_whose_source_changed_is_timed_anew(path, kernels, monkeypatch):
    sweep(path, kernels)
    changed = names()[1]
    kernels.calls.clear()
    source = compiling.source_of
    monkeypatch.setattr(run, "source_of", lambda c: "another" if c.name == changed else source(c))
    sweep(path, kernels)
    assert set(kernels.calls) == {changed}


def test_kernels_that_fail_are_recorded_reported_and_left_out(path, kernels, capsys):
    def wrong(keywords):
        keywords["out"].fill_(1.0)

    def raises(_):
        raise RuntimeError("misaligned address\nand more")

    silent, lying, broken = names()[:3]
    kernels.faults = {silent: lambda _: None, lying: wrong, broken: raises}
    steps = Steps()
    found = sweep(path, kernels, steps=steps)
    failures = found.outcomes[0].failures()
    assert set(failures) == {silent, lying, broken}
    assert "elements were not written" in failures[silent]
    assert "wrong: a row is off by" in failures[lying]
    assert failures[broken] == "RuntimeError: misaligned address"
    assert set(found.outcomes[0].times()) == set(names()) - set(failures)
    assert found.outcomes[0].is_complete(6)
    assert steps.done == steps.expected
    assert [kernels.calls.count(name) for name in (silent, lying, broken)] == [1, 1, 1]
    console = supervise.Console(width=240)
    assert command.finish(found, path, None, console, apply=False)
    printed = capsys.readouterr().out
    text = path.with_suffix(".md").read_text()
    for name, error in failures.items():
        assert f"failed and left out: {name}: {error}" in printed
        assert f"- {name}: {error}" in text
    kernels.calls.clear()
    sweep(path, kernels)
    assert kernels.calls == []


def test_rows_of_no_group_are_not_to_be_written(path, kernels):
    name = names(MASKED)[0]
    kernels.faults = {name: lambda keywords: keywords["out"].fill_(0.0)}
    found = sweep(path, kernels, plan(MASKED))
    assert "elements of no group were written" in found.outcomes[0].failures()[name]


def test_a_lost_device_ends_the_process_and_the_next_one_goes_on(path, kernels):
    bad = names()[2]

    def lose(_):
        kernels.timer.lost = True
        raise RuntimeError("an illegal memory access was encountered")

    kernels.faults = {bad: lose}
    with pytest.raises(run.DeviceLostError, match="context is gone"):
        sweep(path, kernels)
    kernels.timer.lost = False
    found = sweep(path, kernels)
    assert found.outcomes[0].failures() == {bad: "RuntimeError: an illegal memory access was encountered"}
    assert found.outcomes[0].is_complete(6)


def test_a_kernel_that_ends_the_process_twice_is_left_out(path, kernels):
    bad = names()[2]

    def die(_):
        raise SystemExit(1)

    kernels.faults = {bad: die}
    for crashes in (0, 1):
        with pytest.raises(SystemExit):
            sweep(path, kernels)
        left = load(path)
        assert (left.pending.config, left.outcomes[0].records[bad].crashes) == (bad, crashes)
    found = sweep(path, kernels)
    assert found.outcomes[0].failures() == {bad: "the process ended 2 times while it ran"}
    assert found.outcomes[0].is_complete(6)


def test_supervisor_starts_anew_only_if_that_helps(path, kernels):
    def statuses(*values, write=True):
        left = list(values)

        def start():
            if write:
                path.parent.mkdir(exist_ok=True)
                path.write_text(f"{len(left)}")
            return left.pop(0)

        return start, left

    for values, status, rest in (
        ((0, 1), 0, 1),
        ((supervise.LOST, supervise.LOST, 0), 0, 0),
        ((1, 0), 1, 1),
        ((supervise.INTERRUPTED, 0), supervise.INTERRUPTED, 1),
        ((-signal.SIGTERM, 0), -signal.SIGTERM, 1),
    ):
        start, left = statuses(*values)
        assert supervise.supervise(start, path) == status
        assert len(left) == rest
    start, left = statuses(supervise.LOST, supervise.LOST, 0, write=False)
    assert supervise.supervise(start, path) == supervise.LOST  # the file stayed as it was
    # Killed while a kernel ran: the file says which.
    kernels.faults = {names()[0]: lambda _: (_ for _ in ()).throw(SystemExit)}

    def killed():
        try:
            sweep(path, kernels)
        except SystemExit:
            return -signal.SIGSEGV
        return 0

    path.unlink()
    assert supervise.supervise(killed, path) == 0
    assert set(load(path).outcomes[0].failures()) == {names()[0]}


def test_results_of_another_gpu_or_other_facts_are_not_mixed(path, kernels):
    sweep(path, kernels)
    with pytest.raises(ValueError, match="write to another place"):
        sweep(path, kernels, plan(facts=make_facts(128, 1, "e4m3", "e4m3", "bf16")))
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "gpu": "NVIDIA H100"}))
    with pytest.raises(ValueError, match="gpu 'NVIDIA H100'"):
        sweep(path, kernels)
    for text in ("{", "{}", json.dumps({**found, "format": 0}), json.dumps({**found, "outcomes": [1]})):
        path.write_text(text)
        with pytest.raises(ValueError, match="holds no results of a sweep"):
            load(path)


def test_pictures_and_tables(path, kernels):
    found = sweep(path, kernels, plan(STACKED, LIST))
    text = report.to_markdown(found)
    assert f"## {STACKED.name}: {STACKED.text}" in text
    assert text.count("\n| sm90_") == 2 * len(names())
    (first, _) = report.verdicts(found)
    assert first.model_loss == pytest.approx(first.model_us / first.us - 1)
    assert len({report.short_name(found, name) for name in names()}) == len(names())
    assert all(len(report.short_name(found, name)) < len(name) for name in names())
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    assert report.draw(found, path.with_suffix(".png"))
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_problems():
    assert set(workloads()) == {w.name for w in WORKLOADS if w.kind in ("contiguous", "masked")}
    assert len(workloads()) >= 10
    stacked = parse_stacked("8,16384,14336,4096")
    assert stacked.text == "8*2048x14336x4096"
    assert stacked.key == workloads()["mixtral-8x7b fc1"].key
    for problem in (stacked, LIST, STACKED, MASKED, workloads()["qwen3 skewed"]):
        again = parse_text(problem.name, problem.text, problem.layout)
        assert again == problem
        assert again.shape == problem.shape
    assert LIST.shape is None
    assert parse_list("5,32,128;0,16,64;9,32,128").shape == parse_stacked("2,14,32,128").shape
    assert MASKED.shape == replace(STACKED.shape, m=48)
    assert workloads()["dsv3 decode"] == replace(parse_stacked("32,2048,4096,7168", masked=True), name="dsv3 decode")
    assert workloads()["dsv3 decode"].shape.m == 2048
    every = command.problems(None, None, None, None, FACTS)
    assert [problem.name for problem in every] == list(workloads())
    assert command.problems(["dsv3 decode"], ["1,16,32"], ["1,1,16,32", "1,1,16,32"], ["1,1,16,32"], FACTS) == [
        workloads()["dsv3 decode"],
        parse_list("1,16,32"),
        parse_stacked("1,1,16,32"),
        parse_stacked("1,1,16,32", masked=True),
    ]


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_list, "1,2", "must be M,N,K"),
        (parse_list, "1,16,32;", "must be M,N,K"),
        (parse_list, "1,17,32", "N must be a multiple of 16"),
        (parse_list, "0,16,32", "no group has rows"),
        (parse_stacked, "8,16,32", "must be G,M,N,K"),
        (parse_stacked, "0,1,16,32", "G must be positive"),
        (parse_stacked, "2,0,16,32", "no group has rows"),
        (lambda text: parse_text("", text, "list"), "3*1x16", "must be MxNxK"),
        (lambda text: parse_text("", text, "heap"), "1x16x32", "layout 'heap' must be one of"),
    ],
)
def test_texts_that_are_no_problems(parse, text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_compiling_ahead_in_processes_gives_errors_by_kernel(cache_dir):
    good = STACKED.ranked("90a", FACTS)[0].config
    bad = type(good)(**{**vars(good), "stages": 1})
    done = []
    failures = compiling.compile_all([good, bad], 2, done.append)
    assert set(done) == {good.name, bad.name}
    assert set(failures) == {bad.name}
    assert failures[bad.name].startswith("ValueError")
    assert compiling.missing([good]) == []
    assert compiling.compile_all([], 2, done.append) == {}
    assert isinstance(replay_timer_for(CPU), HostReplayTimer)


@pytest.mark.gpu
def test_two_kernels_on_the_gpu(path, monkeypatch):
    every = run.candidates
    monkeypatch.setattr(run, "candidates", lambda p, problem: (every(p, problem)[0][:2], every(p, problem)[1]))
    device, steps = torch.device("cuda", torch.cuda.current_device()), Steps()
    masked = parse_stacked("4,40,128,256", masked=True)
    problems = (parse_stacked("4,512,256,512"), masked, parse_list("100,256,512;0,256,512;17,128,96"))
    found = run.run(plan(*problems, jobs=4), path, device, steps)
    assert report.failures(found) == []
    for outcome in found.outcomes:
        assert len(outcome.times()) == 2
        assert outcome.is_complete(6)
        assert all(us > 0 for record in outcome.records.values() for us in record.samples_us)
        assert all(record.registers for record in outcome.records.values() if record.samples_us)
    assert steps.done == steps.expected
    assert found.runs[0]["driver_version"]
    assert found.gpu == torch.cuda.get_device_name(device)
