"""The cache: one compile for all processes, nothing damaged or foreign is ever loaded, bundles, JIT off."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace

import axpy_kernel
import pytest
from axpy_kernel import AxpyConfig

from mxfp8_cutlass import bundle, cache, env
from mxfp8_cutlass.generator import render
from mxfp8_cutlass.inputs import inputs_of
from mxfp8_cutlass.storage import InsecureDirectoryError, private_directory

CONFIG = AxpyConfig()


@pytest.fixture
def compiles(cache_dir, tmp_path, monkeypatch):
    """AxpyConfig, in an empty cache; the list grows by one name for each compile."""
    monkeypatch.setattr(render, "TEMPLATES", tmp_path)
    axpy_kernel.write_template(tmp_path)
    names = []
    compile_source = cache.compile_source

    def counted(source, name, target_sm):
        names.append(name)
        return compile_source(source, name, target_sm)

    monkeypatch.setattr(cache, "compile_source", counted)
    yield names
    render._environment.cache_clear()


@pytest.fixture
def fresh_processes():
    """Processes that have imported the package and nothing more."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["axpy_kernel"])
    return context


def forget():
    cache._MEMORY.clear()


def entry(cache_dir):
    (path,) = cache_dir.glob("*.cubin")
    return path


def test_second_look_up_reads_the_disk_and_third_the_memory(compiles, cache_dir):
    first = cache.get_cubin(CONFIG)
    assert first.code.startswith(b"\x7fELF")
    assert first.registers > 0
    forget()
    second = cache.get_cubin(CONFIG)
    assert second == first
    entry(cache_dir).unlink()
    assert cache.get_cubin(AxpyConfig()) is second
    assert compiles == [CONFIG.name]


def test_sixteen_processes_on_a_cold_cache_compile_once(tmp_path, fresh_processes):
    (tmp_path / AxpyConfig.template).write_text(axpy_kernel.TEMPLATE)
    with ProcessPoolExecutor(16, fresh_processes) as pool:
        futures = [pool.submit(axpy_kernel.get_cubin_in_process, tmp_path, 0.5) for _ in range(16)]
        assert len({future.result(timeout=120) for future in futures}) == 1
    assert len((tmp_path / "compiles").read_text().splitlines()) == 1


def test_threads_on_a_cold_cache_compile_once(compiles):
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(cache.get_cubin, [CONFIG] * 8))) == 1
    assert compiles == [CONFIG.name]


def test_kill_in_mid_compile_leaves_a_working_cache(tmp_path, fresh_processes, compiles):
    victim = fresh_processes.Process(target=axpy_kernel.get_cubin_in_process, args=(tmp_path, 60))
    victim.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "compiles").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    started = time.monotonic()
    assert cache.get_cubin(CONFIG).code.startswith(b"\x7fELF")
    assert time.monotonic() - started < 30
    assert compiles == [CONFIG.name]


def test_what_a_writer_killed_in_mid_write_left_is_never_read(compiles, cache_dir):
    cubin = cache.get_cubin(CONFIG)
    whole = entry(cache_dir).read_bytes()
    entry(cache_dir).with_name(f".{entry(cache_dir).name}.tmp").write_bytes(whole[:100])
    entry(cache_dir).unlink()
    forget()
    assert cache.get_cubin(CONFIG) == cubin
    assert entry(cache_dir).read_bytes() == whole
    assert not list(cache_dir.glob(".*.tmp"))
    assert len(compiles) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data[:64],
        lambda data: data + b"\0",
        lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data.replace(b'"registers": ', b'"registers": 1', 1),
        lambda data: b"\0" * len(data),
    ],
    ids=["empty", "one byte short", "half", "only a checksum", "longer", "bit flip", "last bit", "metadata", "zeros"],
)
def test_damaged_entry_is_a_miss_and_gets_replaced(compiles, cache_dir, damage):
    cubin = cache.get_cubin(CONFIG)
    whole = entry(cache_dir).read_bytes()
    entry(cache_dir).write_bytes(damage(whole))
    forget()
    assert cache.get_cubin(CONFIG) == cubin
    assert len(compiles) == 2
    assert entry(cache_dir).read_bytes() == whole


def test_cache_directory_is_private(compiles, cache_dir):
    old = os.umask(0)
    try:
        cache.get_cubin(CONFIG)
    finally:
        os.umask(old)
    assert cache_dir.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777])
def test_directory_that_others_can_write_is_refused(compiles, cache_dir, mode):
    cache_dir.mkdir()
    cache_dir.chmod(mode)
    with pytest.raises(InsecureDirectoryError, match=env.CACHE_DIR):
        cache.get_cubin(CONFIG)
    assert not compiles


def test_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(InsecureDirectoryError, match="belongs to user"):
        private_directory(tmp_path, env.CACHE_DIR)


def test_link_is_judged_by_its_target(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    target.chmod(0o777)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(InsecureDirectoryError):
        private_directory(tmp_path / "link", env.CACHE_DIR)


def test_key_depends_on_source_headers_options_target_and_compiler(compiles, tmp_path, monkeypatch):
    inputs = inputs_of(CONFIG)
    keys = {inputs.key, inputs_of(AxpyConfig(target_sm="100a")).key, inputs_of(AxpyConfig(threads=64)).key}
    keys |= {replace(inputs, **{field: "other"}).key for field in ("source", "headers", "options", "nvrtc_version")}
    assert len(keys) == 7
    assert inputs_of(CONFIG) == inputs
    axpy_kernel.write_template(tmp_path, axpy_kernel.TEMPLATE + "// changed\n")
    assert inputs_of(CONFIG).source != inputs.source
    assert inputs_of(CONFIG).headers == inputs.headers


def make_bundle(directory):
    inputs = inputs_of(CONFIG)
    cubin = cache.compiled(CONFIG, inputs)
    bundle.write(directory, CONFIG, cubin, inputs)
    forget()
    return cubin


def test_bundle_comes_before_the_disk_and_needs_no_compiler(compiles, tmp_path, monkeypatch):
    cubin = make_bundle(tmp_path / "bundle")
    compiles.clear()
    monkeypatch.setenv(env.BUNDLE, str(tmp_path / "bundle"))
    monkeypatch.setenv(env.JIT, "0")
    monkeypatch.setattr(cache, "inputs_of", lambda config: pytest.fail("asked for headers or NVRTC"))
    assert cache.get_cubin(CONFIG) == cubin
    assert not compiles


def test_manifest_names_resources_and_inputs(compiles, tmp_path):
    cubin = make_bundle(tmp_path)
    manifest = json.loads((tmp_path / bundle.MANIFEST).read_text())
    facts = manifest["kernels"][f"90a/{CONFIG.name}"]
    assert facts["registers"] == cubin.registers
    assert facts["spill_bytes"] == 0
    assert (facts["static_shared"], facts["dynamic_shared"], facts["threads"]) == (0, 0, 128)
    assert facts["nvrtc_version"] == cubin.nvrtc_version
    assert facts["key"] == inputs_of(CONFIG).key
    assert (tmp_path / facts["file"]).read_bytes() == cubin.code


def test_jit_off_names_the_missing_kernel_and_the_command(compiles, monkeypatch):
    monkeypatch.setenv(env.JIT, "0")
    command = f"python build.py compile --target 90a --config {CONFIG.name} --out "
    with pytest.raises(cache.MissingKernelError, match=command):
        cache.get_cubin(CONFIG)
    assert not compiles


@pytest.mark.parametrize("flaw", ["stale", "damaged", "no file", "no manifest", "broken manifest"])
@pytest.mark.parametrize("jit", [True, False])
def test_flawed_bundle_is_never_used_silently(compiles, tmp_path, monkeypatch, flaw, jit):
    directory = tmp_path / "bundle"
    cubin = make_bundle(directory)
    image = directory / "90a" / f"{CONFIG.name}.cubin"
    if flaw == "stale":
        axpy_kernel.write_template(tmp_path, axpy_kernel.TEMPLATE.replace("+=", "-="))
    elif flaw == "damaged":
        image.write_bytes(image.read_bytes()[:-1])
    elif flaw == "no file":
        image.unlink()
    elif flaw == "no manifest":
        (directory / bundle.MANIFEST).unlink()
    else:
        (directory / bundle.MANIFEST).write_text('{"kernels": ')
    monkeypatch.setenv(env.BUNDLE, str(directory))
    monkeypatch.setenv(env.JIT, str(int(jit)))
    if jit:
        with pytest.warns(RuntimeWarning, match="compiled instead"):
            assert (cache.get_cubin(CONFIG).code != cubin.code) == (flaw == "stale")
    else:
        with pytest.raises(cache.MissingKernelError, match=f"--config {CONFIG.name} --out {directory}"):
            cache.get_cubin(CONFIG)


def test_bad_flag_is_an_error(monkeypatch):
    monkeypatch.setenv(env.JIT, "no")
    with pytest.raises(ValueError, match="MXFP8_CUTLASS_JIT='no' must be 0 or 1"):
        env.jit()
