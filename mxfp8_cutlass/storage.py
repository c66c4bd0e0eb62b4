"""How files are kept: a directory that only its owner can change, and writes that are seen whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


class InsecureDirectoryError(RuntimeError):
    """A directory of code that will be run can be changed by somebody else."""


def private_directory(path: Path, variable: str) -> Path:
    """Create ``path`` with mode 0700 unless it is there, and return it with its links resolved.

    Args:
        path: the directory.
        variable: the environment variable that chooses another one, for the error.

    Raises:
        InsecureDirectoryError: it belongs to another user, or group or others may write to it.
    """
    path = path.resolve()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid():
        reason = f"belongs to user {status.st_uid}, not to {os.getuid()}"
    elif status.st_mode & 0o022:
        reason = f"has mode {status.st_mode & 0o777:o}, so others may write to it (chmod 700 it)"
    else:
        return path
    raise InsecureDirectoryError(f"{path} {reason}: kernels are loaded from it. Set {variable} to another directory")


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees all of it or none. Writers of one path must hold a lock.

    The temporary name is always the same, so the next writer replaces what a killed one left.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
