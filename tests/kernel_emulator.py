"""The elementwise kernels on a CPU: their own templates and headers, compiled with g++ over tests/emulator/."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mxfp8_cutlass.generator.render import KernelConfig, render
from mxfp8_cutlass.launch import TensorMap
from mxfp8_cutlass.templates import INCLUDE

EMULATOR = Path(__file__).parent / "emulator"
OPTIONS = ["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC"]


class Kernels:
    """Kernels as functions of a struct and a grid."""

    def __init__(self, compiler: str, folder: Path, configs: Sequence[KernelConfig]) -> None:
        sources = {config: render(config) for config in configs}
        headers = sorted(
            {line for text in sources.values() for line in text.splitlines() if line.startswith("#include")}
        )
        parts = ['#include "cuda_on_cpu.h"', "#define gridDim emulator::grid_size", *headers]
        for config, text in sources.items():
            body = re.sub(r"^#include.*$", "", text, flags=re.MULTILINE).replace('extern "C"', "")
            params = re.search(r"mxfp8::\w+Params", body)[0]
            parts.append(f"namespace of_{config.name} {{ {body} }}")
            call = f"of_{config.name}::{config.name}(*params)"
            parts.append(
                f'extern "C" void {config.name}(const {params}* params, unsigned grid) '
                f"{{ emulator::launch([=] {{ {call}; }}, grid, {config.threads}); }}"
            )
        self._library = compile_library(compiler, folder, "\n".join(parts))
        self.launched: list[str] = []

    def launch(self, config, params, grid, device) -> None:
        """In place of elementwise.launch."""
        if grid:
            self.launched.append(config.name)
            getattr(self._library, config.name)(ctypes.byref(params), ctypes.c_uint(grid))


def compile_library(compiler: str, folder: Path, text: str) -> ctypes.CDLL:
    """C++ that includes the kernels' headers, compiled and loaded."""
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(text)
    includes = [f"-I{EMULATOR}", f"-I{INCLUDE}"]  # the emulator's ptx.cuh first
    subprocess.run([compiler, *OPTIONS, *includes, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def tensor_map(address: int, shape: tuple[int, int, int], box: tuple[int, int]) -> TensorMap:
    """In place of launch.tensor_map: mxfp8::TensorMap of tests/emulator/mxfp8/copy_engine.cuh."""
    assert box[1] == 128
    return TensorMap((ctypes.c_uint64 * 16)(address, *shape, box[0]))


def find_compiler() -> str | None:
    """A g++ that knows _Float16, if there is one."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    command = [compiler, "-x", "c++", "-fsyntax-only", "-"]
    probe = subprocess.run(command, input=b"_Float16 x;", capture_output=True, check=False)
    return compiler if probe.returncode == 0 else None
