"""Choosing a target and launching, without a GPU."""

from __future__ import annotations

import ctypes

import pytest
import torch
from axpy_kernel import AxpyParams

from mxfp8_cutlass import kernel
from mxfp8_cutlass.kernel import Kernel, LaunchError, target_of


@pytest.fixture(autouse=True)
def forget_devices():
    yield
    kernel._target_of_index.cache_clear()


@pytest.mark.parametrize(("capability", "target"), [((9, 0), "90a"), ((10, 0), "100a")])
def test_target_of_a_device(monkeypatch, capability, target):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert target_of(torch.device("cuda", 3)) == target_of(3) == target


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 3), (12, 0)])
def test_other_device_is_refused_by_name(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    with pytest.raises(ValueError, match=rf"device=cuda:1 is a Some GPU of compute capability {capability[0]}\."):
        target_of(1)


def test_cpu_is_no_cuda_device():
    with pytest.raises(ValueError, match="device=cpu must be a CUDA device"):
        target_of(torch.device("cpu"))


@pytest.fixture
def loaded(monkeypatch):
    """A kernel as load() leaves it, whose launches a fake driver notes; (kernel, launches)."""
    one = Kernel.__new__(Kernel)
    one.name, one.device, one.threads, one.shared_memory = "axpy", 0, 128, 512
    one.params_size, one._function = ctypes.sizeof(AxpyParams), "function"
    launches = []

    def launch(function, *rest):
        *shape, shared_memory, stream, parameters, extra = rest
        address = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
        launches.append((function, shape, shared_memory, stream, AxpyParams.from_address(address).n, extra))
        return (launch.status,)

    launch.status = kernel.driver.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(kernel.driver, "cuLaunchKernel", launch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return one, launches, launch


def test_launch_hands_over_the_structs_address(loaded):
    one, launches, _ = loaded
    one.launch(AxpyParams(n=1 << 40), 7, 99)
    one.launch(AxpyParams(n=2), 1, 0, shared_memory=64)
    assert launches == [
        ("function", [7, 1, 1, 128, 1, 1], 512, 99, 1 << 40, 0),
        ("function", [1, 1, 1, 128, 1, 1], 64, 0, 2, 0),
    ]


def test_struct_of_another_size_is_refused_before_the_launch(loaded):
    one, launches, _ = loaded
    with pytest.raises(ValueError, match="params=c_int has 4 bytes; axpy takes 32"):
        one.launch(ctypes.c_int(), 1, 0)
    assert not launches


def test_what_the_driver_refuses_is_an_error(loaded, monkeypatch):
    one, _, launch = loaded
    launch.status = kernel.driver.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(kernel.driver, "cuGetErrorString", lambda status: (0, b"invalid argument"))
    with pytest.raises(LaunchError, match="launching axpy with grid 5: CUDA_ERROR_INVALID_VALUE: invalid argument"):
        one.launch(AxpyParams(), 5, 0)
