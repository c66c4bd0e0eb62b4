"""From a cubin to a launch."""

from __future__ import annotations

import ctypes
import threading
from functools import cache, lru_cache
from typing import Any

import torch
from cuda.bindings import driver
from cuda.core import Device, ObjectCode

from mxfp8_cutlass.cache import get_cubin
from mxfp8_cutlass.generator.render import KernelConfig

# Compute capability -> target_sm. The "a" targets' instructions run on exactly these devices.
TARGETS = {(9, 0): "90a", (10, 0): "100a"}

_Addresses = ctypes.c_void_p * 1
_NO_CONTEXT = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT

_LOADED: dict[tuple[KernelConfig, int, int], Kernel] = {}
_LOADING = threading.Lock()


class LaunchError(RuntimeError):
    """The driver refused to load or launch a kernel."""


def target_of(device: torch.device | int) -> str:
    """Return the target of a CUDA device: ``"90a"`` or ``"100a"``.

    Raises:
        ValueError: it is not a CUDA device, or one that there are no kernels for.
    """
    where = torch.device("cuda", device) if isinstance(device, int) else device
    if where.type != "cuda":
        raise ValueError(f"device={where} must be a CUDA device")
    return _target_of_index(torch.cuda.current_device() if where.index is None else where.index)


@cache
def _target_of_index(index: int) -> str:
    capability = torch.cuda.get_device_capability(index)
    if capability not in TARGETS:
        raise ValueError(
            f"device=cuda:{index} is a {torch.cuda.get_device_name(index)} of compute capability "
            f"{capability[0]}.{capability[1]}: there are kernels for 9.0 (Hopper) and 10.0 (Blackwell) only"
        )
    return TARGETS[capability]


class Kernel:
    """A kernel that is loaded into one device's context."""

    def __init__(self, config: KernelConfig, device: int) -> None:
        cubin = get_cubin(config)
        self.name = cubin.name
        self.device = device
        self.threads = config.threads
        self.shared_memory = config.shared_memory
        try:
            # The object owns the library: dropping it would unload the code.
            self._code = ObjectCode.from_cubin(cubin.code, name=cubin.name)
            kernel = self._code.get_kernel(cubin.name)
            # A CUfunction belongs to this context and saves the driver a look-up at each launch.
            self._function = _checked(driver.cuKernelGetFunction(driver.CUkernel(int(kernel.handle))))
            if self.shared_memory:
                limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _checked(driver.cuFuncSetAttribute(self._function, limit, self.shared_memory))
            sizes = [parameter.size for parameter in kernel.arguments_info]
        except Exception as error:  # cuda.core's own error types are private
            raise LaunchError(f"loading {cubin.name} on device {device}: {error}") from error
        if len(sizes) != 1:
            raise LaunchError(f"kernel {cubin.name} has {len(sizes)} parameters; it must have one struct")
        self.params_size: int = sizes[0]

    def launch(
        self,
        params: ctypes.Structure | ctypes.Array[ctypes.c_char],
        grid: int | tuple[int, int, int],
        stream: int,
        shared_memory: int | None = None,
    ) -> None:
        """Launch on a stream.

        cuda.core.launch takes no structs, so this goes through cuda.bindings.

        Args:
            params: the kernel's one parameter. The driver copies it before this returns.
            grid: blocks, along x or along x, y and z.
            stream: a stream of this kernel's device, as `current_stream` gives it.
            shared_memory: dynamic shared memory of a block in bytes; the config's, unless given, and at most that.

        Raises:
            ValueError: the struct's size is not the kernel's.
            LaunchError: the driver refused.
        """
        size = ctypes.sizeof(params)
        if size != self.params_size:
            raise ValueError(f"params={type(params).__name__} has {size} bytes; {self.name} takes {self.params_size}")
        if torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.launch(params, grid, stream, shared_memory)
        if shared_memory is None:
            shared_memory = self.shared_memory
        addresses = _Addresses(ctypes.addressof(params))
        # A ready-made array of addresses is what the binding has least to do with.
        blocks = grid if isinstance(grid, tuple) else (grid, 1, 1)
        launch = (self._function, *blocks, self.threads, 1, 1, shared_memory, stream, ctypes.addressof(addresses), 0)
        (status,) = driver.cuLaunchKernel(*launch)
        if status == _NO_CONTEXT:  # a thread's first call; asking beforehand would cost every call
            _context(self.device)
            (status,) = driver.cuLaunchKernel(*launch)
        if status:
            raise LaunchError(f"launching {self.name} with grid {grid}: {_message(status)}")
        return None


@lru_cache(maxsize=8)
def multiprocessors(device: int) -> int:
    """Return how many there are."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def current_stream(device: int) -> int:
    """Return the handle of torch's current stream of a device.

    What torch's own compiler calls in the code that it writes; torch.cuda.current_stream makes an object, at ten times
    the price.
    """
    return int(torch._C._cuda_getCurrentRawStream(device))  # noqa: SLF001 - no public function does the same


def load(config: KernelConfig, device: int) -> Kernel:
    """Return the kernel of ``config`` on a CUDA device, loaded once per device and context.

    Raises:
        ValueError: the config is for another target than the device, or ``config.check()`` refuses it.
        LaunchError: the driver refused to load it.
    """
    if torch.cuda.current_device() != device:
        with torch.cuda.device(device):
            return load(config, device)
    key = (config, device, _context(device))
    kernel = _LOADED.get(key)
    if kernel is None:
        target = target_of(device)
        if config.target_sm != target:
            raise ValueError(
                f"config={config.name} is for sm_{config.target_sm}, and device {device} is an sm_{target}"
            )
        with _LOADING:
            kernel = _LOADED.get(key) or Kernel(config, device)
            _LOADED[key] = kernel
    return kernel


def _context(device: int) -> int:
    """The current context; a thread that has none yet gets the device's primary one, which is the one torch uses."""
    context = int(_checked(driver.cuCtxGetCurrent()))
    if not context:
        Device(device).set_current()
        context = int(_checked(driver.cuCtxGetCurrent()))
    return context


def _checked(result: tuple[Any, ...]) -> Any:  # noqa: ANN401 - the driver's calls return many types
    """Return a driver call's value, or raise what it reports."""
    status, *values = result
    if status:
        raise LaunchError(_message(status))
    return values[0] if values else None


def _message(status: driver.CUresult) -> str:
    _, text = driver.cuGetErrorString(status)
    return f"{status.name}: {text.decode()}"
