"""From CUDA C++ source to a cubin with NVRTC. Needs no GPU and keeps nothing: the cache is another module."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from functools import lru_cache

from cuda.core import Program, ProgramOptions

from mxfp8_cutlass.headers import include_path, toolchain

# Part of the cache's key. ptxas reports each kernel's resources with -v, which does not change the code.
OPTIONS: dict[str, object] = {
    "std": "c++17",
    "device_as_default_execution_space": True,
    # Where there is a driver, NVRTC keeps a cache of its own, and what it finds there comes without ptxas' report.
    "no_cache": True,
    "ptxas_options": ["-v"],
}

_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")
_TOOL_VERSION = re.compile(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)")


class CompileError(RuntimeError):
    """NVRTC refused a source. The message holds its log."""


@dataclass(frozen=True)
class Cubin:
    """One compiled kernel."""

    name: str
    """The ``extern "C"`` entry."""
    target_sm: str
    """``"90a"`` or ``"100a"``."""
    code: bytes
    """The ELF image that the driver loads."""
    registers: int
    """Registers of a thread."""
    spill_bytes: int
    """Bytes of a thread's registers that are stored to and loaded from local memory."""
    static_shared: int
    """Static shared memory of a block, in bytes."""
    nvrtc_version: str
    """The compiler's version with its build, for instance ``"13.0.88"``."""


def compile_source(source: str, name: str, target_sm: str) -> Cubin:
    """Compile one kernel.

    Args:
        source: CUDA C++ with the entry ``extern "C" __global__ void NAME``.
        name: the entry's name.
        target_sm: ``"90a"`` or ``"100a"``.

    Raises:
        CompileError: the source does not compile, or has no such entry.
        HeadersNotFoundError: there are no CUDA or CUTLASS headers on this machine.
        PatchError: the source wants patched CUTLASS headers, and those here are of another version.
    """
    directories = [str(directory) for directory in include_path(source)]
    log = io.StringIO()
    try:
        options = ProgramOptions(name=name, arch=f"sm_{target_sm}", include_path=directories, **OPTIONS)
        code = bytes(Program(source, "c++", options).compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core's own error types are private
        hint = toolchain().warning
        raise CompileError(f"{name} for sm_{target_sm}: {error}" + (f"\nNote: {hint}" if hint else "")) from error
    report = _ptxas_report(log.getvalue(), name)
    if report is None:
        raise CompileError(f'{name} for sm_{target_sm}: the source has no entry extern "C" __global__ void {name}')
    return Cubin(
        name=name,
        target_sm=target_sm,
        code=code,
        registers=_number(_REGISTERS, report),
        spill_bytes=sum(map(int, match.groups())) if (match := _SPILLS.search(report)) else 0,
        static_shared=_number(_STATIC_SHARED, report),
        nvrtc_version=nvrtc_version(),
    )


@lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """NVRTC's version with its build number, for instance ``"13.0.88"``.

    nvrtcVersion() stops at the minor version, but two builds may compile differently; a cubin names the build.
    """
    code = bytes(Program("", "c++", ProgramOptions(arch="sm_90a")).compile("cubin").code)
    match = _TOOL_VERSION.search(code)
    if match is None:
        raise CompileError("NVRTC's cubin does not name the compiler's version")
    return match[1].decode()


def _ptxas_report(log: str, name: str) -> str | None:
    """The part of ptxas' log that is about one entry function."""
    for part in log.split("Compiling entry function ")[1:]:
        if part.startswith(f"'{name}'"):
            return part
    return None


def _number(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    return int(match[1]) if match else 0
