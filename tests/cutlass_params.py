"""The parameters that CUTLASS's own host code gives an SM100 kernel, by a program that nvcc compiles. Needs no GPU.

The driver's cuTensorMapEncodeTiled is replaced by one that writes down what it was asked for, as cutlass_patches.py has
it on the device.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from mxfp8_cutlass.generator.render import render
from mxfp8_cutlass.generator.sm100_launch_config import Sm100ParamsConfig
from mxfp8_cutlass.headers import include_path
from mxfp8_cutlass.sm100_params import FACTS, PARAMS_BYTES, Built, Facts, Sm100BuildParams

MAIN = """
#include <cstdio>
#include <cstring>

extern "C" CUresult CUDAAPI cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType format, cuuint32_t rank, void* address, const cuuint64_t* dims,
    const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  unsigned long long word[16] = {0x54534555514552ull, format | rank << 8 | swizzle << 16, (unsigned long long)address};
  for (int i = 0; i < 5; ++i) word[3 + i] = dims[i];
  for (int i = 0; i < 4; ++i) word[8 + i] = strides[i];
  for (int i = 0; i < 5; ++i) reinterpret_cast<unsigned short*>(word + 12)[i] = box[i];
  memcpy(map, word, sizeof word);
  return CUDA_SUCCESS;
}

int main() {
  alignas(128) static unsigned char bytes[mxfp8::kSm100ParamsBytes];
  unsigned long long facts[6];
  mxfp8::Sm100BuildParams build;
  if (fread(&build, sizeof build, 1, stdin) != 1) return 1;
  build.params = bytes;
  build.facts = facts;
  mxfp8::build_params<Gemm>(build);
  fwrite(bytes, sizeof bytes, 1, stdout);
  fwrite(facts, sizeof facts, 1, stdout);
}
"""


def find_nvcc() -> str | None:
    """The compiler, if there is one."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


class HostParams:
    """CUTLASS's host code for one kernel."""

    def __init__(self, nvcc: str, folder: Path, config: Sm100ParamsConfig) -> None:
        text = render(config)
        text = re.sub(r'extern "C".*', "", text, flags=re.DOTALL)
        source, self._program = folder / "params.cu", folder / "params"
        source.write_text(f"#include <cuda.h>\n{text}{MAIN}")
        # nvcc has its own CUDA headers; those of the wheels would be mixed with them.
        own, patched, cutlass = include_path(text)[:3]
        options = ["-std=c++17", "-arch=sm_100a", "-w", "--expt-relaxed-constexpr", "-Xcompiler=-O0"]
        options += ["-DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL=1", *(f"-I{path}" for path in (own, patched, cutlass))]
        subprocess.run([nvcc, *options, source, "-o", self._program], check=True)

    def __call__(self, build: Sm100BuildParams) -> Built:
        """The parameters, with tensor maps as requests."""
        output = subprocess.run([self._program], input=bytes(build), capture_output=True, check=True).stdout
        facts = Facts(*(int.from_bytes(output[i : i + 8], "little") for i in range(PARAMS_BYTES, len(output), 8)))
        assert len(output) == PARAMS_BYTES + 8 * FACTS
        return Built(output[: facts.params_bytes], facts)
