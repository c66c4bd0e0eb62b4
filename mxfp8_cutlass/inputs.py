"""What decides a cubin's content: everything that goes into a compile, as digests."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from mxfp8_cutlass.compiler import OPTIONS, nvrtc_version
from mxfp8_cutlass.generator.render import KernelConfig, render
from mxfp8_cutlass.headers import digest, include_path, sha256
from mxfp8_cutlass.templates import INCLUDE


@dataclass(frozen=True)
class Inputs:
    """What a cubin is built from. Equal inputs give equal code, on every machine."""

    text: str = field(repr=False)
    """The rendered source: what is compiled is what was digested, whatever happens to the template in between."""
    source: str
    """Digest of the rendered source and of this package's headers that it includes."""
    headers: str
    """Digest of all headers that it includes, CUDA's and CUTLASS's too."""
    options: str
    """Compiler options with the architecture."""
    nvrtc_version: str

    @property
    def key(self) -> str:
        """The name of a cubin in the cache."""
        return sha256(json.dumps([self.source, self.headers, self.options, self.nvrtc_version]).encode())


def inputs_of(config: KernelConfig) -> Inputs:
    """Collect what compiling ``config`` here would be built from.

    Raises:
        ValueError: ``config.check()`` refuses it.
        HeadersNotFoundError: there are no CUDA or CUTLASS headers on this machine.
    """
    text = render(config)
    return Inputs(
        text=text,
        source=source_digest(text),
        headers=digest(text, include_path(text)),
        options=json.dumps({**OPTIONS, "arch": f"sm_{config.target_sm}"}, sort_keys=True),
        nvrtc_version=nvrtc_version(),
    )


def source_digest(text: str) -> str:
    """Digest the part that this package decides: source and own headers. Needs no compiler and no CUDA headers."""
    return sha256(f"{text}\n{digest(text, [INCLUDE])}".encode())
