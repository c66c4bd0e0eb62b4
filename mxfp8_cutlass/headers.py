"""Which headers a compile reads: where they lie, and a digest of those that a source can reach."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cuda.pathfinder import find_nvidia_header_directory

from mxfp8_cutlass import env
from mxfp8_cutlass.cutlass_patches import patched_directory, wants_patches
from mxfp8_cutlass.templates import INCLUDE

# CUDA 13.0 ships CCCL 3.0. Later ones change how tuples are specialised, which breaks CuTe in CUTLASS 4.2.
CCCL_WANTED = (3, 0)

# CUTLASS hides where libcu++ lies in a macro. Only Thrust has other computed includes, and no kernel here uses it.
_INCLUDE_LINE = re.compile(
    rb'^[ \t]*#[ \t]*include[ \t]*(?:([<"])([^>"\n]+)[>"]|CUDA_STD_HEADER\((\w+)\))', re.MULTILINE
)
_CCCL_VERSION = re.compile(r"#\s*define\s+CCCL_VERSION\s+(\d+)")

# An include: (whether the name stands in quotes, the name).
Directive = tuple[bool, str]


class HeadersNotFoundError(RuntimeError):
    """The headers of CUDA or CUTLASS are not on this machine."""


@dataclass(frozen=True)
class Toolchain:
    """The directories of the headers that others wrote, and the version of CCCL among them."""

    cutlass: Path
    cuda: Path
    cccl: Path
    cccl_version: tuple[int, int] | None

    @property
    def warning(self) -> str | None:
        """Why a compile with these headers may fail, or ``None``."""
        if self.cccl_version == CCCL_WANTED:
            return None
        found = ".".join(map(str, self.cccl_version)) if self.cccl_version else "of unknown version"
        return (
            f"the CCCL headers in {self.cccl} are {found}, and CUTLASS 4.2 needs those of CUDA 13.0 (CCCL 3.0): "
            'install "cuda-toolkit[cccl,crt,cudart,nvrtc]==13.0.*" or set CUDA_HOME to a CUDA 13.0 toolkit'
        )


@cache
def toolchain() -> Toolchain:
    """Find the headers of CUTLASS and CUDA: wheels first (also torch's), then conda, CUDA_HOME and system installs.

    CUDA 13.0 wins over an earlier match of another version.

    Raises:
        HeadersNotFoundError: one of them is nowhere to be found; the message says how to install it.
    """
    cuda, cccl, version = _find_cuda()
    return Toolchain(_find_cutlass(), cuda, cccl, version)


def include_path(source: str = "") -> tuple[Path, ...]:
    """Return the directories that a compile of ``source`` searches, first to last.

    CUTLASS names libcu++ both as ``cuda/std/...`` and as ``cccl/cuda/std/...``, and CCCL may lie apart from the rest.
    """
    found = toolchain()
    patched = (patched_directory(found.cutlass),) if wants_patches(source) else ()
    return INCLUDE, *patched, found.cutlass, found.cuda, found.cccl, found.cccl.parent


def _find_cutlass() -> Path:
    spec = importlib.util.find_spec("cutlass_library")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / "source" / "include"
        if (path / "cute" / "tensor.hpp").is_file():
            return path
    raise HeadersNotFoundError('no CUTLASS headers: install "nvidia-cutlass==4.2.0.0"')


def _find_cuda() -> tuple[Path, Path, tuple[int, int] | None]:
    wheels = find_nvidia_header_directory("cudart"), find_nvidia_header_directory("cccl")
    pairs = [(Path(wheels[0]), Path(wheels[1]))] if wheels[0] and wheels[1] else []
    pairs += [(home / "include", home / "include" / "cccl") for home in env.cuda_homes()]
    candidates = [
        (cuda, cccl, _cccl_version(cccl))
        for cuda, cccl in pairs
        if (cuda / "cuda_fp8.h").is_file() and (cccl / "cuda" / "std").is_dir()
    ]
    if not candidates:
        raise HeadersNotFoundError(
            'no CUDA 13 headers: install "cuda-toolkit[cccl,crt,cudart,nvrtc]==13.0.*" or set CUDA_HOME '
            f"(looked at {', '.join(str(cuda) for cuda, _ in pairs)})"
        )
    return next((c for c in candidates if c[2] == CCCL_WANTED), candidates[0])


def _cccl_version(cccl: Path) -> tuple[int, int] | None:
    try:
        text = (cccl / "cuda" / "std" / "__cccl" / "version.h").read_text()
    except OSError:
        return None
    match = _CCCL_VERSION.search(text)
    return divmod(int(match[1]) // 1000, 1000) if match else None


def digest(source: str, directories: Sequence[Path]) -> str:
    """Return the SHA-256 of every header in ``directories`` that ``source`` includes, directly or not.

    The preprocessor's conditions are ignored, so no header that a compile reads is left out. Paths enter relative to
    their include directory: equal headers give equal digests on all machines, whatever else lies beside them.
    """
    roots = tuple(map(str, directories))
    seen: dict[str, str] = {}
    queue: list[tuple[str | None, Directive]] = [(None, directive) for directive in _directives(source.encode())]
    while queue:
        found = _resolve(*queue.pop(), roots)
        if found is not None and found[1] not in seen:
            root, path = found
            checksum, directives = _scan(path)
            seen[path] = f"{os.path.relpath(path, root)} {checksum}"
            queue += [(os.path.dirname(path), inner) for inner in directives]
    return sha256("\n".join(sorted(seen.values())).encode())


def sha256(data: bytes) -> str:
    """Return the SHA-256 of ``data`` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _directives(text: bytes) -> list[Directive]:
    return [
        (quote == b'"', name.decode() if name else f"cuda/std/{standard.decode()}")
        for quote, name, standard in _INCLUDE_LINE.findall(text)
    ]


@cache
def _scan(path: str) -> tuple[str, list[Directive]]:
    text = Path(path).read_bytes()
    return sha256(text), _directives(text)


@cache
def _resolve(including: str | None, directive: Directive, roots: tuple[str, ...]) -> tuple[str, str] | None:
    """Find a header as the compiler does: (include directory, path), or ``None`` if it is in none of them."""
    quoted, name = directive
    for place in (including, *roots) if including and quoted else roots:
        path = os.path.normpath(os.path.join(place, name))
        if os.path.isfile(path):
            # CCCL's directory lies inside CUDA's: the longest match is the one that is meant.
            return max((root for root in roots if path.startswith(root + os.sep)), key=len, default=place), path
    return None
