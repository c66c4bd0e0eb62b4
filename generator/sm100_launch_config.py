"""Configs of the kernels that prepare an SM100 grouped GEMM: its arrays of arguments, and its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mxfp8_cutlass.generator.sm100_config import Sm100Config

DEVICES = ("90a", "100a")
"""Where these kernels run: their results can be checked on Hopper, which cannot run the GEMM."""


@dataclass(frozen=True, order=True)
class _OneCtaConfig:
    """What both kinds have in common."""

    target_sm: str
    """Architecture that it runs on, "90a" or "100a"."""

    @property
    def shared_memory(self) -> int:
        """Dynamic shared memory of the CTA in bytes."""
        return 0

    def check(self) -> str | None:
        """Why this config cannot be built, or None."""
        return None if self.target_sm in DEVICES else f"target_sm={self.target_sm!r}: one of {', '.join(DEVICES)}"


@dataclass(frozen=True, order=True)
class Sm100ArgumentsConfig(_OneCtaConfig):
    """The kernel that writes each group's shape, addresses, strides and layouts of scales from offs."""

    template: ClassVar[str] = "sm100_arguments.cu.j2"

    @property
    def name(self) -> str:
        """The kernel's name and entry point; derived, never parsed."""
        return f"sm{self.target_sm.removesuffix('a')}_mxfp8_sm100_arguments"

    @property
    def threads(self) -> int:
        """Threads of the one CTA."""
        return 256


@dataclass(frozen=True, order=True)
class Sm100ParamsConfig(_OneCtaConfig):
    """The kernel, of one thread, in which CUTLASS's code makes the parameters of a GEMM."""

    gemm: Sm100Config
    """The kernel that the parameters are for."""

    template: ClassVar[str] = "sm100_params.cu.j2"

    @property
    def name(self) -> str:
        """The kernel's name and entry point; derived, never parsed."""
        return f"sm{self.target_sm.removesuffix('a')}_params_of_{self.gemm.name}"

    @property
    def threads(self) -> int:
        """Threads of the one CTA."""
        return 1

    def check(self) -> str | None:
        """Why this config cannot be built, or None."""
        return super().check() or self.gemm.check()
