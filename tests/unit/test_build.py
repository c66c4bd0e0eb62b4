"""build.py as its user runs it: in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mxfp8_cutlass import bundle, cache, env
from mxfp8_cutlass.generator.config_space import all_configs
from mxfp8_cutlass.generator.render import render

ROOT = Path(__file__).parents[2]
QUANTIZE = [config for config in all_configs("90a") if "_quantize_bf16_" in config.name]
PATTERN = "*_quantize_bf16_*"


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, ROOT / "build.py", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def build(*arguments):
    """Exit status and output."""
    process = start(*arguments)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def compile_(out, *arguments, config=PATTERN):
    return build("compile", "--target", "90a", "--config", config, "--out", out, "-j", 2, *arguments)


def manifest(out):
    return json.loads((out / bundle.MANIFEST).read_text())["kernels"]


def test_compile_writes_a_bundle_that_the_runtime_uses_and_resumes(cache_dir, tmp_path, monkeypatch):
    out = tmp_path / "bundle"
    status, output = compile_(out)
    assert status == 0, output
    assert f"{len(QUANTIZE)} built, 0 up to date, 0 failed" in output
    assert set(manifest(out)) == {f"90a/{config.name}" for config in QUANTIZE}
    for entry in manifest(out).values():
        assert entry["registers"] > 0
        assert entry["spill_bytes"] == 0
        assert entry["nvrtc_version"].startswith("13.")

    (out / "90a" / f"{QUANTIZE[0].name}.cubin").write_bytes(b"damaged")
    status, output = compile_(out)
    assert status == 0
    assert f"1 built, {len(QUANTIZE) - 1} up to date, 0 failed" in output

    monkeypatch.setenv(env.BUNDLE, str(out))
    monkeypatch.setenv(env.JIT, "0")
    for config in QUANTIZE:
        assert cache.get_cubin(config).name == config.name

    status, output = build("list", "--target", "90a", "--bundle", out)
    assert status == 0
    (line,) = (line for line in output.splitlines() if f" {QUANTIZE[0].name} " in line)
    assert f" {manifest(out)[f'90a/{QUANTIZE[0].name}']['registers']} " in line


def test_shards_that_run_at_once_share_one_manifest(cache_dir, tmp_path):
    out = tmp_path / "bundle"
    command = ("compile", "--target", "90a", "--config", PATTERN, "--out", out, "-j", 2)
    shards = [start(*command, "--shard", f"{i}/3") for i in (1, 2, 3)]
    outputs = [shard.communicate(timeout=300)[0] for shard in shards]
    assert [shard.returncode for shard in shards] == [0, 0, 0], outputs
    assert len(manifest(out)) == len(QUANTIZE)
    assert f"0 built, {len(QUANTIZE)} up to date" in compile_(out)[1]


def test_kill_leaves_a_bundle_that_the_next_run_completes(cache_dir, tmp_path):
    out = tmp_path / "bundle"
    process = start("compile", "--target", "90a", "--config", "*", "--out", out, "-j", 2)
    deadline = time.monotonic() + 120
    while not (out / bundle.MANIFEST).exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    before = set(manifest(out))
    status, output = compile_(out)
    assert status == 0, output
    assert set(manifest(out)) == before | {f"90a/{config.name}" for config in QUANTIZE}


def test_failures_are_listed_and_the_exit_status_tells(cache_dir, tmp_path):
    out = tmp_path / "bundle"
    out.mkdir()
    (out / "90a").write_text("a file where a directory should be")
    status, output = compile_(out, config=QUANTIZE[0].name)
    assert status == 1
    assert "0 built, 0 up to date, 1 failed" in output
    assert f"{QUANTIZE[0].name}\nFileExistsError:" in output


def test_generate_writes_what_the_runtime_compiles(tmp_path):
    status, output = build("generate", "--target", "90a", "--all", "--out", tmp_path)
    assert status == 0, output
    configs = all_configs("90a")
    assert {path.name for path in tmp_path.iterdir()} == {f"{config.name}.cu" for config in configs}
    assert (tmp_path / f"{configs[0].name}.cu").read_text() == render(configs[0])


def test_explain_ranks_kernels():
    status, output = build("explain", "--target", "90a", "--top", "3", "4096x2048x1024", "0x2048x1024", "17x2048x1024")
    assert status == 0, output
    assert output.count("│ sm90_mxfp8_grouped_gemm_") == 3
    assert "picked by the " in output


def test_explain_says_that_nothing_of_blackwell_was_measured():
    status, output = build("explain", "--target", "100a", "--top", "3", "4096x14336x4096")
    assert status == 0, output
    assert output.count("│ sm100_mxfp8_grouped_gemm_") == 3
    assert "constants: a B200's data sheet and assumptions, not fitted: no SM100 was measured" in output
    assert "picked by the cost model: sm100_mxfp8_grouped_gemm_" in output
    assert "no entry to compare with, of 0 in the tuned table" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "--target", "90"], "'90' must be one of 90a, 100a"),
        (["compile", "--target", "90a", "--out", "o"], "give one of --config NAME and --all"),
        (["compile", "--target", "90a", "--all", "--config", "x", "--out", "o"], "give one of --config NAME and --all"),
        (
            ["compile", "--target", "90a", "--config", "sm90_quantise", "--out", "o"],
            "is no kernel of sm_90a. Near: sm90_",
        ),
        (["compile", "--target", "90a", "--all", "--shard", "3/2", "--out", "o"], "--shard '3/2' must be i/n"),
        (["list", "--target", "90a", "--bundle", "nowhere"], "bundle nowhere has no manifest.json"),
        (["explain", "--target", "90a", "1,2,3"], "problem size '1,2,3' must be MxNxK"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    status, output = build(*arguments)
    assert status == 2
    assert message in output
