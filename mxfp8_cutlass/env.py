"""The environment variables that steer the package, read here and nowhere else, each time they are asked for."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

CACHE_DIR = "MXFP8_CUTLASS_CACHE_DIR"
BUNDLE = "MXFP8_CUTLASS_BUNDLE"
JIT = "MXFP8_CUTLASS_JIT"
CHECK = "MXFP8_CUTLASS_CHECK"


def cache_dir() -> Path:
    """Where compiled kernels are kept: ``MXFP8_CUTLASS_CACHE_DIR``, or the user's cache directory."""
    value = os.environ.get(CACHE_DIR)
    return Path(value).expanduser() if value else platformdirs.user_cache_path("mxfp8_cutlass", appauthor=False)


def bundle() -> Path | None:
    """The directory of kernels compiled ahead of time: ``MXFP8_CUTLASS_BUNDLE``, or ``None``."""
    value = os.environ.get(BUNDLE)
    return Path(value).expanduser() if value else None


def jit() -> bool:
    """Whether a kernel that the bundle lacks may be compiled. ``MXFP8_CUTLASS_JIT=0`` turns it off."""
    return _flag(JIT, default=True)


def check() -> bool:
    """Whether values that lie on the device (offs) are checked, at the price of a sync. ``MXFP8_CUTLASS_CHECK=1``."""
    return _flag(CHECK, default=False)


def cuda_homes() -> list[Path]:
    """Return the CUDA toolkits that the user points at, then the customary one."""
    named = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return [Path(home) for home in named if home]


def _flag(variable: str, *, default: bool) -> bool:
    value = os.environ.get(variable)
    if value is None:  # each grouped_mm asks
        return default
    value = value.strip().lower()
    if value in {"", "0", "1"}:
        return {"": default, "0": False, "1": True}[value]
    raise ValueError(f"{variable}={value!r} must be 0 or 1")
