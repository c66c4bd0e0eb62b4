"""A kernel of a few lines, rendered from a template that a test owns: ``y[i] += a * x[i]``."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from mxfp8_cutlass import cache, env
from mxfp8_cutlass.generator import render

TEMPLATE = """\
#include <cuda_bf16.h>

struct Params { const float* x; float* y; long long n; float a; };

extern "C" __global__ void __launch_bounds__({{ config.threads }}) {{ config.name }}(const __grid_constant__ Params p) {
  long long i = blockIdx.x * {{ config.threads }}ll + threadIdx.x;
{% if config.shared_memory %}
  extern __shared__ float staged[];
  staged[{{ config.shared_memory // 4 }} - 1 - threadIdx.x] = i < p.n ? p.x[i] : 0;
  if (i < p.n) p.y[i] += p.a * staged[{{ config.shared_memory // 4 }} - 1 - threadIdx.x];
{% else %}
  if (i < p.n) p.y[i] += p.a * p.x[i];
{% endif %}
}
"""


class AxpyParams(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("y", ctypes.c_void_p), ("n", ctypes.c_longlong), ("a", ctypes.c_float)]


@dataclass(frozen=True)
class AxpyConfig:
    target_sm: str = "90a"
    threads: int = 128
    shared_memory: int = 0
    template: ClassVar[str] = "axpy.cu.j2"

    @property
    def name(self) -> str:
        return f"axpy_{self.threads}x{self.shared_memory}"

    def check(self) -> str | None:
        return None if self.threads <= 1024 else f"threads={self.threads}: a block has at most 1024"


def write_template(directory: Path, text: str = TEMPLATE) -> None:
    """Write AxpyConfig's template and use it in this process."""
    (directory / AxpyConfig.template).write_text(text)
    use_templates(directory)


def use_templates(directory: Path) -> None:
    """Render from the templates of a directory in this process."""
    render.TEMPLATES = directory
    render._environment.cache_clear()


def get_cubin_in_process(directory: Path, seconds: float) -> bytes:
    """For a fresh process: get AxpyConfig's cubin, adding a line to the file ``compiles`` for each real compile."""
    os.environ[env.CACHE_DIR] = str(directory / "cache")
    use_templates(directory)
    compile_source = cache.compile_source

    def counted(*arguments):
        with (directory / "compiles").open("a") as log:
            log.write(f"{os.getpid()}\n")
        time.sleep(seconds)
        return compile_source(*arguments)

    cache.compile_source = counted
    return cache.get_cubin(AxpyConfig()).code
