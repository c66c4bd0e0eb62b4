"""The wheel, installed in a clean environment and used from another folder; what importing does; what CI checks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

USE = """
import importlib.util
import sys
from pathlib import Path

assert importlib.util.find_spec("generator") is None
assert importlib.util.find_spec("templates") is None

import mxfp8_cutlass
from mxfp8_cutlass import cache
from mxfp8_cutlass.generator.config_space import all_configs
from mxfp8_cutlass.generator.elementwise_config import elementwise_configs
from mxfp8_cutlass.generator.render import render

assert Path(mxfp8_cutlass.__file__).is_relative_to(sys.prefix), mxfp8_cutlass.__file__
for config in all_configs("90a"):
    assert config.name in render(config)
cubin = cache.get_cubin(elementwise_configs("90a")[0])
print(cubin.name, len(cubin.code))
"""

IMPORT = """
import sys
import mxfp8_cutlass
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized()
"""


def run(*command, **keywords):
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **keywords)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The project's wheel, built from a copy so that the tree stays as it is."""
    directory = tmp_path_factory.mktemp("build")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*", "build", "dist", "bundle")
    shutil.copytree(ROOT, directory / "tree", ignore=ignored)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "--wheel-dir", directory, directory / "tree")
    (path,) = directory.glob("*.whl")
    return path


def test_wheel_holds_the_package_and_nothing_beside_it(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"mxfp8_cutlass", f"mxfp8_cutlass-{version()}.dist-info"}
    sources = [path for path in ROOT.glob("templates/**/*") if path.suffix in {".j2", ".cuh"}]
    assert sources
    for path in sources:
        assert f"mxfp8_cutlass/{path.relative_to(ROOT)}" in names
    assert "mxfp8_cutlass/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)


def version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_installed_wheel_renders_and_compiles_from_another_folder(wheel, tmp_path):
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    # The dependencies come from this environment. Its own .pth files, an editable install's among them, do not count.
    (site,) = environment.glob("lib/python*/site-packages")
    dependencies = Path(sysconfig.get_path("purelib"))
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    if (dependencies / "nvidia").exists():  # NVRTC's wheel: cuda.pathfinder looks into the environment's own folder
        (site / "nvidia").symlink_to(dependencies / "nvidia")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    out = run(python, "-c", USE, cwd=elsewhere, env={**clean(), "MXFP8_CUTLASS_CACHE_DIR": str(tmp_path / "cache")})
    assert out.startswith("sm90_mxfp8_")


def test_import_does_no_work(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    run(sys.executable, "-B", "-c", IMPORT, cwd=ROOT, env={**clean(), "HOME": str(home)})
    assert not list(home.iterdir())


def clean() -> dict[str, str]:
    """The environment without what steers Python's imports and this package."""
    steering = ("PYTHON", "MXFP8_CUTLASS", "XDG_CACHE_HOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(steering)}


def test_environment_is_read_in_one_module():
    readers = {
        path.relative_to(ROOT).as_posix()
        for folder in ("mxfp8_cutlass", "generator", "templates")
        for path in (ROOT / folder).rglob("*.py")
        if "os.environ" in path.read_text() or "getenv" in path.read_text()
    }
    assert readers == {"mxfp8_cutlass/env.py"}
