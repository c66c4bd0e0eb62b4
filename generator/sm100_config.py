"""Sm100Config: everything that distinguishes one grouped GEMM kernel for Blackwell from another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import ClassVar

from mxfp8_cutlass.generator.tile_config import CUTLASS_ELEMENT, GemmConfig

CUTLASS_OUTPUT = {"bf16": "cutlass::bfloat16_t", "fp16": "cutlass::half_t", "fp32": "float"}
SM100_TARGETS = ("100a",)
SHARED_MEMORY_LIMIT = 227 * 1024
"""Dynamic shared memory that one CTA may have, in bytes."""

SM100_TILES = [
    # (tile_m, tile_n, cluster_m, cluster_n)
    (128, 64, 1, 1),  # decode: little weight per CTA, so that few tiles still fill the chip
    (128, 128, 1, 1),
    (128, 192, 1, 1),
    (128, 256, 1, 1),
    (128, 128, 1, 2),  # two tiles of the same tokens
    (256, 64, 2, 1),  # one MMA of two SMs, each with half of A and half of B
    (256, 128, 2, 1),
    (256, 192, 2, 1),
    (256, 256, 2, 1),
    (256, 128, 2, 2),
    (256, 256, 2, 2),
    (256, 256, 4, 1),
]


@dataclass(frozen=True, order=True)
class Sm100Config(GemmConfig):
    """One SM100 grouped GEMM kernel, made of CUTLASS's collectives. Groups may be rows, runs of K, or a batch."""

    target_sm: str
    """Architecture, "100a"."""
    tile_m: int
    """Rows of A (tokens) of one MMA's tile: 128, or 256 across the two SMs of a pair."""
    tile_n: int
    """Rows of B (output features) of one tile."""
    cluster_m: int
    """CTAs of a cluster along M; a pair's two SMs lie along M."""
    cluster_n: int
    """CTAs of a cluster along N."""
    element_a: str
    """"e4m3" or "e5m2"."""
    element_b: str
    """"e4m3" or "e5m2"."""
    out: str
    """Output type, "bf16", "fp16" or "fp32"."""

    tile_k: ClassVar[int] = 128
    template: ClassVar[str] = "sm100_grouped_gemm.cu.j2"

    @property
    def name(self) -> str:
        """The kernel's name and entry point; derived, never parsed."""
        tile = f"{self.tile_m}x{self.tile_n}x{self.tile_k}_{self.cluster_m}x{self.cluster_n}x1"
        return f"sm100_mxfp8_grouped_gemm_{tile}_{self.sms}sm_{self.element_a}_{self.element_b}_{self.out}"

    @property
    def sms(self) -> int:
        """SMs that work on one MMA."""
        return 2 if self.tile_m == 256 else 1

    @property
    def threads(self) -> int:
        """Threads of a CTA: a warp each for MMA, scheduling, loads of operands and of C, and four that store."""
        return 256

    @property
    def shared_memory(self) -> int:
        """Dynamic shared memory of a CTA in bytes: all there is, which CUTLASS divides into stages."""
        return SHARED_MEMORY_LIMIT

    @property
    def cutlass_out(self) -> str:
        """CUTLASS's type of the output."""
        return CUTLASS_OUTPUT[self.out]

    def check(self) -> str | None:
        """Why this config cannot be built, or None. The single statement of the constraints."""
        if self.target_sm not in SM100_TARGETS:
            return f"target_sm={self.target_sm!r}: this template is for {', '.join(SM100_TARGETS)}"
        if (reason := self.unknown_elements()) is not None:
            return reason
        if self.out not in CUTLASS_OUTPUT:
            return f"out={self.out!r}: outputs are {', '.join(CUTLASS_OUTPUT)}"
        if self.tile_m not in (128, 256):
            return f"tile_m={self.tile_m}: a block-scaled MMA has 128 rows on one SM and 256 on a pair"
        if self.tile_n not in (64, 128, 192, 256):
            return f"tile_n={self.tile_n}: 64, 128, 192 or 256, whose scales CUTLASS can place in tensor memory"
        if self.cluster_m not in (1, 2, 4) or self.cluster_n not in (1, 2, 4):
            return f"cluster {self.cluster_m}x{self.cluster_n}: scales are too few to multicast to more than 4 CTAs"
        if self.cluster_size > 8:
            return f"cluster {self.cluster_m}x{self.cluster_n}: more than 8 CTAs are not portable"
        if self.sms == 2 and self.cluster_m == 1:
            return f"cluster_m={self.cluster_m}: a pair's two SMs lie along M"
        return None


@cache
def sm100_configs() -> tuple[Sm100Config, ...]:
    """Every grouped GEMM kernel for Blackwell."""
    kinds = product(SM100_TILES, CUTLASS_ELEMENT, CUTLASS_ELEMENT, CUTLASS_OUTPUT)
    return tuple(Sm100Config("100a", *tile, a, b, out) for tile, a, b, out in kinds)
