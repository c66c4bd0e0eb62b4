"""From a kernel's config to its CUDA C++ source. Pure: the same config always gives the same text."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mxfp8_cutlass.templates import TEMPLATES


class KernelConfig(Protocol):
    """What every kernel's config has, GEMM and elementwise alike. Configs are frozen dataclasses, equal by fields."""

    @property
    def template(self) -> str:
        """The template's file name, for instance ``"quantize.cu.j2"``."""

    @property
    def target_sm(self) -> str:
        """``"90a"`` (Hopper) or ``"100a"`` (Blackwell)."""

    @property
    def name(self) -> str:
        """Derived from the fields, never parsed; also the name of the kernel's ``extern "C"`` entry."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    @property
    def shared_memory(self) -> int:
        """Dynamic shared memory of a block, in bytes; 0 if none."""

    def check(self) -> str | None:
        """``None``, or the reason why there can be no such kernel."""

    def __hash__(self) -> int: ...


def render(config: KernelConfig) -> str:
    """Render the CUDA C++ source of one kernel.

    Raises:
        ValueError: ``config.check()`` gives a reason why there can be no such kernel.
        jinja2.UndefinedError: the template asks for something that the config does not have.
    """
    reason = config.check()
    if reason is not None:
        raise ValueError(f"config {config.name!r} is not valid: {reason}")
    return _environment().get_template(config.template).render(config=config)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701 - the output is CUDA C++, not HTML
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
