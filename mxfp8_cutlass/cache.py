"""From a config to a cubin: memory, then the bundle, then the disk, then one compile that all processes share.

An entry on disk is named after everything that it was built from (:mod:`mxfp8_cutlass.inputs`), so nothing has to be
invalidated: a file is the right one or, if its checksum says otherwise, as good as absent.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import fields
from pathlib import Path

from filelock import FileLock

from mxfp8_cutlass import bundle, env
from mxfp8_cutlass.compiler import Cubin, compile_source
from mxfp8_cutlass.generator.render import KernelConfig
from mxfp8_cutlass.headers import sha256
from mxfp8_cutlass.inputs import Inputs, inputs_of
from mxfp8_cutlass.storage import private_directory, write_atomically

_MEMORY: dict[KernelConfig, Cubin] = {}


class MissingKernelError(RuntimeError):
    """Compiling is turned off and the bundle does not have the kernel."""


def get_cubin(config: KernelConfig) -> Cubin:
    """Return the compiled kernel of a config, compiling it if it is nowhere.

    With ``MXFP8_CUTLASS_JIT=0`` it comes from the bundle or not at all: neither NVRTC nor headers are needed then.

    Raises:
        ValueError: ``config.check()`` refuses it.
        MissingKernelError: compiling is turned off; the message has the command that builds the kernel.
        CompileError: NVRTC refused the source.
        HeadersNotFoundError: there are no CUDA or CUTLASS headers on this machine.
        InsecureDirectoryError: others may write to the cache directory.
    """
    cubin = _MEMORY.get(config)
    if cubin is None:
        cubin = _from_bundle(config) or compiled(config, inputs_of(config))
        _MEMORY[config] = cubin
    return cubin


def compiled(config: KernelConfig, inputs: Inputs) -> Cubin:
    """Return the kernel from the disk, or compile it and keep it there. Processes that start together compile once."""
    directory = private_directory(env.cache_dir(), env.CACHE_DIR)
    path = directory / f"{inputs.key}.cubin"
    cubin = _read(path)
    if cubin is None:
        # The kernel drops a dead process's lock, so one that is killed in mid-compile holds up nobody.
        with FileLock(path.with_suffix(".lock")):
            cubin = _read(path)
            if cubin is None:
                cubin = compile_source(inputs.text, config.name, config.target_sm)
                write_atomically(path, _encode(cubin))
    return cubin


def _from_bundle(config: KernelConfig) -> Cubin | None:
    directory = env.bundle()
    reason = f"{env.BUNDLE} is not set" if directory is None else f"bundle {directory} does not have it"
    if directory is not None:
        try:
            cubin = bundle.read(directory, config)
        except bundle.BundleError as error:
            reason = str(error)
            if env.jit():
                warnings.warn(f"{reason}; it is compiled instead", RuntimeWarning, stacklevel=3)
        else:
            if cubin is not None:
                return cubin
    if env.jit():
        return None
    raise MissingKernelError(
        f"kernel {config.name} for sm_{config.target_sm} is missing and {env.JIT}=0 forbids compiling it: {reason}. "
        f"Build it with: python build.py compile --target {config.target_sm} --config {config.name} "
        f"--out {directory or 'bundle'}" + ("" if directory else f", then set {env.BUNDLE}=bundle")
    )


def _encode(cubin: Cubin) -> bytes:
    """A checksum of the rest, a line of JSON, the code."""
    facts = {field.name: getattr(cubin, field.name) for field in fields(cubin) if field.name != "code"}
    rest = json.dumps(facts).encode() + b"\n" + cubin.code
    return sha256(rest).encode() + b"\n" + rest


def _read(path: Path) -> Cubin | None:
    """Read an entry; ``None`` if it is absent, truncated or otherwise not what was written."""
    try:
        checksum, _, rest = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if sha256(rest).encode() != checksum:
        return None
    facts, _, code = rest.partition(b"\n")
    return Cubin(code=code, **json.loads(facts))
