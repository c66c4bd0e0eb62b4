"""Fixtures that all tests share."""

from __future__ import annotations

import pytest
import torch

from mxfp8_cutlass import cache, env


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    """Runs a test on the CPU, and on the GPU where there is one."""
    return torch.device(request.param)


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    """A cache of the test's own, on the disk and in memory, with no bundle and compiling allowed."""
    for variable in (env.BUNDLE, env.JIT, env.CHECK):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_MEMORY", {})
    return tmp_path / "cache"
