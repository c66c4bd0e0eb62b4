"""Compiling with NVRTC, finding headers, and the digest of those that a source reaches."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from mxfp8_cutlass import headers
from mxfp8_cutlass.compiler import CompileError, compile_source, nvrtc_version
from mxfp8_cutlass.headers import CCCL_WANTED, HeadersNotFoundError, Toolchain, digest, include_path, toolchain

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* x) {
  float v[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = x[threadIdx.x + 1024 * i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[threadIdx.x + 1024 * i] = v[63 - i];
}
"""


@pytest.mark.parametrize("target_sm", ["90a", "100a"])
def test_cubin_says_what_the_kernel_needs(target_sm):
    source = """
    #include <cuda_fp8.h>
    extern "C" __global__ void other(float* x) { *x = 1; }
    extern "C" __global__ void kernel(float* x) {
      __shared__ float s[256];
      s[threadIdx.x] = x[threadIdx.x];
      __syncthreads();
      x[threadIdx.x] = s[threadIdx.x ^ 1];
    }"""
    cubin = compile_source(source, "kernel", target_sm)
    assert cubin.code.startswith(b"\x7fELF")
    assert (cubin.name, cubin.target_sm, cubin.spill_bytes) == ("kernel", target_sm, 0)
    # Blackwell reserves 1024 bytes of shared memory for the system in each block, and ptxas counts them.
    assert cubin.static_shared in {1024, 2048}
    assert 4 <= cubin.registers <= 32
    assert cubin.nvrtc_version == nvrtc_version()


def test_spills_are_reported():
    cubin = compile_source(SPILLING, "spill", "90a")
    assert cubin.registers == 32
    assert cubin.spill_bytes > 0


def test_version_names_the_build():
    assert re.fullmatch(r"13\.\d+\.\d+", nvrtc_version())


def test_error_holds_the_kernel_and_the_compilers_log():
    with pytest.raises(CompileError, match=r"broken for sm_90a(.|\n)*broken\(2\): error: identifier \"nonsense\""):
        compile_source('extern "C" __global__ void broken() {\n  nonsense;\n}', "broken", "90a")


def test_missing_entry_is_an_error():
    with pytest.raises(CompileError, match="no entry"):
        compile_source('extern "C" __global__ void one() {}', "two", "90a")


def test_same_source_gives_the_same_code():
    assert compile_source(SPILLING, "spill", "90a") == compile_source(SPILLING, "spill", "90a")


def test_error_with_other_headers_says_which_are_needed(monkeypatch):
    found = toolchain()
    monkeypatch.setattr(
        "mxfp8_cutlass.compiler.toolchain", lambda: Toolchain(found.cutlass, found.cuda, found.cccl, (3, 3))
    )
    with pytest.raises(CompileError, match=r"are 3\.3, and CUTLASS 4\.2 needs those of CUDA 13\.0"):
        compile_source("nonsense", "kernel", "90a")


def fake_cuda(directory: Path, cccl_version: int) -> Path:
    include = directory / "include"
    version = include / "cccl" / "cuda" / "std" / "__cccl" / "version.h"
    version.parent.mkdir(parents=True)
    version.write_text(f"#define CCCL_VERSION {cccl_version}\n")
    (include / "cuda_fp8.h").touch()
    return directory


@pytest.fixture
def no_wheels(monkeypatch):
    monkeypatch.setattr(headers, "find_nvidia_header_directory", lambda library: None)


def test_cuda_13_0_wins_over_an_earlier_match(tmp_path, monkeypatch, no_wheels):
    new, wanted = fake_cuda(tmp_path / "new", 3003001), fake_cuda(tmp_path / "wanted", 3000001)
    monkeypatch.setattr(headers.env, "cuda_homes", lambda: [tmp_path / "absent", new, wanted])
    assert headers._find_cuda() == (wanted / "include", wanted / "include" / "cccl", CCCL_WANTED)
    monkeypatch.setattr(headers.env, "cuda_homes", lambda: [new])
    assert headers._find_cuda()[2] == (3, 3)


def test_no_headers_is_an_error_that_says_what_to_install(tmp_path, monkeypatch, no_wheels):
    monkeypatch.setattr(headers.env, "cuda_homes", lambda: [tmp_path])
    with pytest.raises(HeadersNotFoundError, match=r"cuda-toolkit\[cccl,crt,cudart,nvrtc\]==13\.0\.\*"):
        headers._find_cuda()
    monkeypatch.setattr(headers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HeadersNotFoundError, match="nvidia-cutlass"):
        headers._find_cutlass()


@pytest.fixture
def tree(tmp_path):
    """Two include directories; a.h reaches c.h through b.h, and d.h through CUTLASS's macro."""
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "sub").mkdir(parents=True)
    (second / "cuda" / "std").mkdir(parents=True)
    (first / "sub" / "a.h").write_text('#  include "b.h"\n#include CUDA_STD_HEADER(d)\n#include <nowhere.h>\n')
    (first / "sub" / "b.h").write_text("#if 0\n#include <c.h>\n#endif\n#include <sub/a.h>\n")
    (second / "c.h").touch()
    (second / "cuda" / "std" / "d").touch()
    (second / "unrelated.h").touch()
    return first, second


@pytest.mark.parametrize("path", ["first/sub/a.h", "first/sub/b.h", "second/c.h", "second/cuda/std/d"])
def test_digest_covers_every_header_that_the_source_reaches(tree, tmp_path, path):
    before = digest("#include <sub/a.h>", tree)
    header = tmp_path / path
    header.write_text(header.read_text() + "// changed\n")
    headers._scan.cache_clear()
    assert digest("#include <sub/a.h>", tree) != before


def test_digest_ignores_what_lies_beside_and_where_it_lies(tree, tmp_path):
    before = digest("#include <sub/a.h>", tree)
    (tmp_path / "second" / "unrelated.h").write_text("// changed\n")
    moved = (tmp_path / "first").rename(tmp_path / "moved")
    headers._scan.cache_clear()
    assert digest("#include <sub/a.h>", (moved, tree[1])) == before


def test_a_header_that_appears_earlier_on_the_path_changes_the_digest(tree):
    before = digest("#include <c.h>", tree)
    (tree[0] / "c.h").write_text("// shadows\n")
    headers._resolve.cache_clear()
    assert digest("#include <c.h>", tree) != before


def test_digest_of_a_cutlass_source_is_cheap_the_second_time():
    source = "#include <cute/tensor.hpp>\n#include <cutlass/pipeline/pipeline.hpp>\n"
    digest(source, include_path())
    started = time.perf_counter()
    digest(source, include_path())
    assert time.perf_counter() - started < 0.1
