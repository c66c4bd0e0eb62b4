"""Kernels compiled ahead of time: a directory of cubins with a manifest, for machines that do not compile.

    DIR/manifest.json      what each kernel was built from, and what it needs
    DIR/90a/NAME.cubin     plain ELF images

A kernel is used only if its source and this package's own headers are still the ones that it was built from. The
headers of CUDA and CUTLASS and the compiler's version are recorded and steer rebuilding, but a machine that runs a
bundle need not have them: a cubin does not depend on them once it is built.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from mxfp8_cutlass.compiler import Cubin
from mxfp8_cutlass.generator.render import KernelConfig, render
from mxfp8_cutlass.headers import sha256
from mxfp8_cutlass.inputs import Inputs, source_digest
from mxfp8_cutlass.storage import write_atomically

MANIFEST = "manifest.json"
Entry = dict[str, Any]


class BundleError(RuntimeError):
    """A bundle cannot give a kernel that it should have: no manifest, stale, or damaged."""


def read(directory: Path, config: KernelConfig) -> Cubin | None:
    """Return the kernel of ``config``, or ``None`` if the bundle does not have it.

    Raises:
        BundleError: there is no manifest, or the kernel was built from another source, or its file is damaged.
    """
    entry = manifest(directory).get(_key(config))
    if entry is None:
        return None
    if entry["source"] != source_digest(render(config)):
        raise BundleError(f"kernel {config.name} in bundle {directory} was built from another version of its source")
    code = _code(directory, entry)
    if code is None:
        raise BundleError(f"kernel {config.name} in bundle {directory} is damaged: its checksum is wrong")
    fields = {name: entry[name] for name in Cubin.__dataclass_fields__ if name != "code"}
    return Cubin(code=code, **fields)


def write(directory: Path, config: KernelConfig, cubin: Cubin, inputs: Inputs) -> None:
    """Add a kernel. Processes on several machines may do so at once: the manifest is merged under a lock."""
    (directory / config.target_sm).mkdir(parents=True, exist_ok=True)
    entry: Entry = {
        "name": cubin.name,
        "target_sm": cubin.target_sm,
        "registers": cubin.registers,
        "spill_bytes": cubin.spill_bytes,
        "static_shared": cubin.static_shared,
        "dynamic_shared": config.shared_memory,
        "threads": config.threads,
        "nvrtc_version": cubin.nvrtc_version,
        "source": inputs.source,
        "headers": inputs.headers,
        "options": inputs.options,
        "key": inputs.key,
        "file": f"{config.target_sm}/{config.name}.cubin",
        "sha256": sha256(cubin.code),
    }
    with FileLock(directory / ".lock"):
        # Read anew: two writes within the clock's resolution look alike to a memory of times.
        kernels = _parse(directory / MANIFEST) if (directory / MANIFEST).exists() else {}
        write_atomically(directory / entry["file"], cubin.code)
        merged = {"kernels": dict(sorted({**kernels, _key(config): entry}.items()))}
        write_atomically(directory / MANIFEST, (json.dumps(merged, indent=1) + "\n").encode())


def is_current(directory: Path, config: KernelConfig, inputs: Inputs) -> bool:
    """Whether the bundle has this kernel, built from exactly these inputs, undamaged."""
    if not (directory / MANIFEST).exists():
        return False
    entry = manifest(directory).get(_key(config))
    return entry is not None and entry["key"] == inputs.key and _code(directory, entry) is not None


def manifest(directory: Path) -> dict[str, Entry]:
    """Return the manifest's entries by ``"TARGET/NAME"``.

    Raises:
        BundleError: there is none, or it cannot be read.
    """
    path = directory / MANIFEST
    try:
        status = path.stat()
    except OSError as error:
        raise BundleError(f"bundle {directory} has no {MANIFEST}: {error}") from error
    return _parse_once(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _parse_once(path: Path, _mtime_ns: int, _size: int) -> dict[str, Entry]:
    return _parse(path)


def _parse(path: Path) -> dict[str, Entry]:
    try:
        kernels: dict[str, Entry] = json.loads(path.read_text())["kernels"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from error
    return kernels


def _key(config: KernelConfig) -> str:
    return f"{config.target_sm}/{config.name}"


def _code(directory: Path, entry: Entry) -> bytes | None:
    """Read a kernel's image; ``None`` if it is not the one that the manifest speaks of."""
    try:
        code = (directory / entry["file"]).read_bytes()
    except OSError:
        return None
    return code if sha256(code) == entry["sha256"] else None
