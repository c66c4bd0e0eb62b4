"""Changes to installed CUTLASS headers, without which NVRTC cannot compile CUTLASS's SM100 kernels.

CUTLASS hides from NVRTC what only a host needs, and some of what a kernel's types need with it. A source that includes
``mxfp8/patched_cutlass.cuh`` is compiled with changed copies of a few headers, which are made from the installed ones
and kept in the cache directory; nothing of CUTLASS's text is part of this package but short anchors.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from mxfp8_cutlass import env
from mxfp8_cutlass.storage import private_directory, write_atomically

MARKER = '#include "mxfp8/patched_cutlass.cuh"'
"""The line of a source that asks for patched headers."""


class PatchError(RuntimeError):
    """A header is not the one that a patch was written for."""


class Patch(NamedTuple):
    """One change of one header: an anchor that stands in it exactly once, and what takes its place."""

    header: str
    why: str
    anchor: str
    replacement: str


_TMA = "cute/atom/copy_traits_sm100_tma.hpp"
_DESCRIPTOR = "cute/atom/copy_traits_sm90_tma.hpp"
_DESCRIPTOR_TYPE = "cute/arch/copy_sm90_desc.hpp"
_HARDWARE = "cutlass/kernel_hardware_info.h"
_TUPLE = "cute/container/tuple.hpp"

# cutlass_request.py reads what this writes. Formats and swizzles are the values of cuda.h's enums.
_REQUEST = """  #if defined(__CUDACC_RTC__)
    {
      using T = TmaInternalType;
      constexpr int format = is_same_v<T, float> ? 7 : is_same_v<T, half_t> ? 6 : is_same_v<T, bfloat16_t> ? 9
                             : sizeof_bits_v<T> == 16 ? 1 : 0;
      static_assert(format || sizeof_bits_v<T> == 8, "cutlass_patches.py: unknown element of a tensor map");
      static_assert(M == 4 && B <= 3, "cutlass_patches.py: unknown swizzle of a tensor map");
      auto word = reinterpret_cast<uint64_t*>(&tma_desc);
      word[0] = 0x54534555514552ull;  // "REQUEST"
      word[1] = format | tma_dim << 8 | B << 16;
      word[2] = reinterpret_cast<uint64_t>(gmem_address);
      for (int i = 0; i < 5; ++i) {
        word[3 + i] = gmem_prob_shape[i];
        if (i) word[7 + i] = gmem_prob_stride[i];
        reinterpret_cast<uint16_t*>(word + 12)[i] = smem_box_shape[i];
      }
    }
  #endif
"""

_TUPLE_ELEMENT = """template <class First, class... Rest>
struct tuple_element<0, cute::tuple<First, Rest...>> { using type = First; };

template <size_t I, class First, class... Rest>
struct tuple_element<I, cute::tuple<First, Rest...>> : tuple_element<I - 1, cute::tuple<Rest...>> {};
"""

PATCHES = (
    Patch(
        _TMA,
        "NVRTC gets make_tma_atom_[AB]_sm100, whose results are types of a kernel's parameters",
        "////////////////////////////////////\n// Experimental Make TMA Atom",
        "#endif\n// Experimental Make TMA Atom",
    ),
    Patch(_TMA, "the same: the guard's end", "\n#endif // !defined(__CUDACC_RTC__)\n\n} // end namespace cute", "\n}"),
    *(
        Patch(
            _TMA,
            "NVRTC has no host functions",
            f"CUTE_HOST\nauto\nmake_tma_atom_{operand}_sm100(",
            f"CUTE_HOST_RTC\nauto\nmake_tma_atom_{operand}_sm100(",
        )
        for operand in "AB"
    ),
    Patch(
        _DESCRIPTOR,
        "a tensor map that is made on the device says what the host shall encode",
        "  #if (__CUDACC_VER_MAJOR__ >= 12) && !defined(__CUDACC_RTC__)\n",
        f"{_REQUEST}  #if (__CUDACC_VER_MAJOR__ >= 12) && !defined(__CUDACC_RTC__)\n",
    ),
    Patch(
        _DESCRIPTOR_TYPE,
        "the alignment of CUDA 13's own type, so that parameters are laid out as nvcc does",
        "  using TmaDescriptor = struct alignas(64)",
        "  using TmaDescriptor = struct alignas(128)",
    ),
    Patch(
        _HARDWARE,
        "the SM count is always given, but the function that asks for it is named",
        "#if !defined(__CUDACC_RTC__)\n  static inline int\n",
        "#if defined(__CUDACC_RTC__)\n  static int query_device_multiprocessor_count(int = 0) { return 0; }\n"
        "#else\n  static inline int\n",
    ),
    Patch(
        _HARDWARE,
        "patched_cutlass.cuh checks this",
        "#pragma once\n",
        "#pragma once\n#define MXFP8_CUTLASS_IS_PATCHED\n",
    ),
    Patch(
        _TUPLE,
        "compile time: CCCL's tuple_element is instantiated ten thousand times",
        "template <size_t I, class... T>\nstruct tuple_element<I, cute::tuple<T...>>\n"
        "    : CUTE_STL_NAMESPACE::tuple_element<I, CUTE_STL_NAMESPACE::tuple<T...>>\n"
        "{};\n\n} // end namespace CUTE_STL_NAMESPACE",
        f"{_TUPLE_ELEMENT}\n}} // end namespace CUTE_STL_NAMESPACE",
    ),
)


def wants_patches(source: str) -> bool:
    """Whether a source is to be compiled with patched headers."""
    return MARKER in source


def patched(cutlass: Path) -> dict[str, str]:
    """Return the changed headers' texts by their names relative to CUTLASS's include directory.

    Raises:
        PatchError: an anchor does not stand in its header exactly once.
    """
    texts: dict[str, str] = {}
    for patch in PATCHES:
        text = texts.get(patch.header)
        if text is None:
            path = cutlass / patch.header
            try:
                text = path.read_text()
            except OSError as error:
                raise PatchError(f"cannot read {path}, which is to be patched: {error}") from error
        if (found := text.count(patch.anchor)) != 1:
            raise PatchError(
                f"{cutlass / patch.header} has the anchor {patch.anchor!r} {found} times, not once ({patch.why}): "
                'the patches are for "nvidia-cutlass==4.2.0.0"'
            )
        texts[patch.header] = text.replace(patch.anchor, patch.replacement)
    return texts


def patched_directory(cutlass: Path) -> Path:
    """Write the changed headers into the cache directory, unless they are there, and return their include directory.

    It is named after its content, so other versions of CUTLASS or of the patches get others.

    Raises:
        PatchError: the headers are not those that the patches were written for.
        InsecureDirectoryError: others may write to the cache directory.
    """
    return _written(cutlass, env.cache_dir())


@lru_cache(maxsize=8)
def _written(cutlass: Path, cache_dir: Path) -> Path:
    texts = patched(cutlass)
    digest = hashlib.sha256("\0".join(part for item in sorted(texts.items()) for part in item).encode()).hexdigest()
    root = private_directory(cache_dir, env.CACHE_DIR)
    directory = root / f"cutlass-{digest[:16]}"
    with FileLock(directory.with_suffix(".lock")):
        for header, text in texts.items():
            path = directory / header
            if not path.is_file() or path.read_text() != text:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_atomically(path, text.encode())
    return directory
