"""Loading and launching a kernel of a few lines on a real device."""

from __future__ import annotations

import ctypes
from threading import Thread

import axpy_kernel
import pytest
import torch
from axpy_kernel import AxpyConfig, AxpyParams

from mxfp8_cutlass import kernel
from mxfp8_cutlass.generator import render

pytestmark = pytest.mark.gpu


@pytest.fixture
def load(cache_dir, tmp_path, monkeypatch):
    """Loads AxpyConfig with some fields for a device."""
    monkeypatch.setattr(render, "TEMPLATES", tmp_path)
    monkeypatch.setattr(kernel, "_LOADED", {})
    axpy_kernel.write_template(tmp_path)
    yield lambda device=0, **fields: kernel.load(AxpyConfig(kernel.target_of(device), **fields), device)
    render._environment.cache_clear()


def run(one, device=0, n=1000, **keywords):
    x = torch.arange(n, dtype=torch.float32, device=f"cuda:{device}")
    y = torch.ones_like(x)
    params = AxpyParams(x.data_ptr(), y.data_ptr(), n, 2.0)
    one.launch(params, -(-n // one.threads), torch.cuda.current_stream(device).cuda_stream, **keywords)
    del params  # the driver has its own copy by now
    torch.testing.assert_close(y, 1 + 2 * x, rtol=0, atol=0)


def test_launch(load):
    run(load())


@pytest.mark.parametrize("shared_memory", [512, 48 * 1024, 48 * 1024 + 4, 200 * 1024])
def test_dynamic_shared_memory_beyond_the_default_limit(load, shared_memory):
    run(load(shared_memory=shared_memory))


def test_loaded_once(load):
    assert load() is load()
    assert load() is not load(threads=64)


def test_config_for_another_target_is_refused(load):
    other = {"90a": "100a", "100a": "90a"}[kernel.target_of(0)]
    with pytest.raises(ValueError, match=f"is for sm_{other}"):
        kernel.load(AxpyConfig(other), 0)


def test_struct_of_another_size_is_refused(load):
    class Longer(ctypes.Structure):
        _fields_ = [("params", AxpyParams), ("more", AxpyParams)]

    with pytest.raises(ValueError, match="params=Longer has 64 bytes"):
        load().launch(Longer(), 1, 0)


def test_refused_launch_is_an_error(load):
    one = load()
    with pytest.raises(kernel.LaunchError, match="CUDA_ERROR_INVALID_VALUE"):
        one.launch(AxpyParams(), 0, torch.cuda.current_stream().cuda_stream)
    run(one)


def test_side_stream_and_graph(load):
    one = load()
    x = torch.arange(512, dtype=torch.float32, device="cuda")
    y = torch.zeros_like(x)
    params = AxpyParams(x.data_ptr(), y.data_ptr(), 512, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.launch(params, 4, torch.cuda.current_stream().cuda_stream)
    for _ in range(3):
        graph.replay()
    torch.testing.assert_close(y, 3 * x, rtol=0, atol=0)


def test_thread_without_a_context(load):
    """A thread that has touched no CUDA call yet has no current context: launching gives it the device's."""
    failures = []

    def work():
        try:
            run(load())
        except Exception as error:  # noqa: BLE001 - reported by the main thread
            failures.append(error)

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert not failures


def test_a_device_that_is_not_current(load):
    if torch.cuda.device_count() < 2:
        pytest.skip("one device only")
    run(load(1), device=1)
    assert torch.cuda.current_device() == 0
