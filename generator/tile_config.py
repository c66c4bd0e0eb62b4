"""TileConfig: everything that distinguishes one grouped GEMM kernel from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

CUTLASS_ELEMENT = {"e4m3": "cutlass::float_e4m3_t", "e5m2": "cutlass::float_e5m2_t"}
CUDA_OUTPUT = {"bf16": "__nv_bfloat16", "fp16": "__half", "fp32": "float"}

MAX_GROUPS = 1024
"""Groups that one launch can serve: each CTA keeps a table of them in shared memory."""

GROUP_ENTRY_BYTES = 12
SHARED_MEMORY_LIMIT = {"90a": 227 * 1024}
"""Dynamic shared memory that one CTA may have, in bytes."""

CONSUMER_REGISTERS = 224
"""Registers of a consumer thread: what 384 threads get at launch (168 each) less 56 for each of the producers' 128."""

WORKING_REGISTERS = 32
"""Registers that a consumer needs beside its accumulators: addresses, scales, loop state (measured)."""

EXACT_CONSUMER_REGISTERS = 200
"""The same in an exact kernel of 512 threads: 128 each at launch, less 40 for producers and 72 for converters."""

EXACT_WORKING_REGISTERS = 72
"""The same for an exact kernel: also A's fragments as BF16, twice (32), and as FP8 (8)."""


class GemmConfig:
    """What follows from facts that the grouped GEMM kernels of all targets have."""

    cluster_m: int
    cluster_n: int
    element_a: str
    element_b: str

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n

    @property
    def cutlass_a(self) -> str:
        """CUTLASS's type of A's elements."""
        return CUTLASS_ELEMENT[self.element_a]

    @property
    def cutlass_b(self) -> str:
        """CUTLASS's type of B's elements."""
        return CUTLASS_ELEMENT[self.element_b]

    def unknown_elements(self) -> str | None:
        """Why the element types cannot be, or None."""
        if self.element_a in CUTLASS_ELEMENT and self.element_b in CUTLASS_ELEMENT:
            return None
        elements = ", ".join(CUTLASS_ELEMENT)
        return f"element_a={self.element_a!r}, element_b={self.element_b!r}: MXFP8 elements are {elements}"


@dataclass(frozen=True, order=True)
class TileConfig(GemmConfig):
    """One SM90 grouped GEMM kernel. Fields are facts; everything else is derived from them."""

    target_sm: str
    """Architecture, "90a"."""
    tile_m: int
    """Rows of A (tokens) of one CTA's tile: 64 for each consumer warp group."""
    tile_n: int
    """Rows of B (output features) of one CTA's tile."""
    cluster_m: int
    """CTAs of a cluster along M; they share weight tiles by multicast."""
    cluster_n: int
    """CTAs of a cluster along N; they share activation tiles by multicast."""
    stages: int
    """Shared-memory stages of 128 K each in flight."""
    promotion_k: int
    """K that one scale may hold for: 128 (folded operands; partial sums are promoted to FP32 as often) or 32 (any MXFP8
    operands, exact: elements become BF16, scaled, and nothing is promoted)."""
    sfb_rows: int
    """Rows of B that share a scale: 1, or 128 (the tile form of fold(rows=128))."""
    element_a: str
    """"e4m3" or "e5m2"."""
    element_b: str
    """"e4m3" or "e5m2"."""
    out: str
    """Output type, "bf16", "fp16" or "fp32"."""
    k_groups: bool = False
    """Whether groups are runs of K, with an output each (weight gradients), instead of rows."""

    tile_k: ClassVar[int] = 128

    @property
    def name(self) -> str:
        """The kernel's name and entry point; derived, never parsed."""
        tile = f"{self.tile_m}x{self.tile_n}x{self.tile_k}_{self.cluster_m}x{self.cluster_n}x1"
        scales = f"p{self.promotion_k}_sfb{self.sfb_rows}"
        kind = "sm90_mxfp8_grouped_gemm" + ("_kgroups" if self.k_groups else "")
        return f"{kind}_{tile}_{self.stages}stages_{scales}_{self.element_a}_{self.element_b}_{self.out}"

    @property
    def exact(self) -> bool:
        """Whether elements are multiplied as BF16: another kernel (sm90_exact_gemm.cuh)."""
        return self.promotion_k == 32

    @property
    def template(self) -> str:
        """The template's file name."""
        return "sm90_exact_grouped_gemm.cu.j2" if self.exact else "sm90_grouped_gemm.cu.j2"

    @property
    def consumers(self) -> int:
        """Warp groups that multiply."""
        return min(self.tile_m // 64, 2)

    @property
    def threads(self) -> int:
        """Threads of a CTA: the producers' warp group, the one that converts B (exact), the consumers."""
        return 128 * (1 + self.exact + self.consumers)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage: FP8 tiles, scales, flags, two barriers.

        Scales are bytes of A's rows in the tile form (and 16 more: bulk copies are aligned), FP32 of all rows
        otherwise; exact kernels have a word of bytes per row.
        """
        rows = self.tile_m + self.tile_n
        scales = self.tile_m + 16 if self.sfb_rows == 128 else 4 * rows + 4
        return rows * self.tile_k + scales + 16

    @property
    def staging_bytes(self) -> int:
        """Shared memory in which a tile of 2-byte outputs waits for the copy engine; others have no room for it."""
        return 2 * self.tile_m * self.tile_n if self.sfb_rows == 128 and self.out != "fp32" else 0

    @property
    def converted_halves(self) -> int:
        """Halves of stages (64 of K) of B as BF16 in flight; exact kernels only."""
        if not self.exact:
            return 0
        return 4 if self.tile_n <= 128 else 3

    @property
    def converted_bytes(self) -> int:
        """Shared memory of all halves of converted B, two barriers each."""
        return self.converted_halves * (self.tile_n * self.tile_k + 16)

    @property
    def table_offset(self) -> int:
        """Bytes of the kernel's struct of shared memory, up to its alignment; the table of groups lies behind it."""
        used = self.stages * self.stage_bytes + self.converted_bytes
        if not self.exact:
            tile = 24 if self.k_groups else 16
            used += max(self.staging_bytes, 16) + tile * 4 * self.consumers  # and each consumer warp's next tile
        return -(-used // 1024) * 1024

    @property
    def shared_memory(self) -> int:
        """Dynamic shared memory of a CTA in bytes, the table of MAX_GROUPS groups included."""
        return self.table_offset + GROUP_ENTRY_BYTES * (MAX_GROUPS + 1)

    @property
    def accumulator_registers(self) -> int:
        """Sums of a consumer thread: 64 x tile_n over 128 threads, partial and promoted; exact: of each 64 rows."""
        return self.tile_n // 2 * (self.tile_m // (64 * self.consumers)) if self.exact else self.tile_n

    @property
    def cuda_out(self) -> str:
        """CUDA's type of the output."""
        return CUDA_OUTPUT[self.out]

    def check(self) -> str | None:
        """Why this config cannot be built, or None. The single statement of the constraints."""
        if self.target_sm not in SHARED_MEMORY_LIMIT:
            return f"target_sm={self.target_sm!r}: this template is for {', '.join(SHARED_MEMORY_LIMIT)}"
        if (reason := self.unknown_elements()) is not None:
            return reason
        if self.out not in CUDA_OUTPUT:
            return f"out={self.out!r}: outputs are {', '.join(CUDA_OUTPUT)}"
        if self.promotion_k not in (32, 128):
            return f"promotion_k={self.promotion_k}: 32 (one scale block) or 128 (one run of folded blocks)"
        if self.sfb_rows not in (1, 128):
            return f"sfb_rows={self.sfb_rows}: 1, or 128 for the tile form"
        if self.sfb_rows == 128 and self.promotion_k != 128:
            return (
                "sfb_rows=128 with promotion_k=32: the tile form is folded, so nothing is gained by promoting every 32"
            )
        if self.k_groups and self.exact:
            return "k_groups=True with promotion_k=32: exact kernels take groups of rows alone"
        if self.tile_m not in ((64, 128, 256) if self.exact else (64, 128)):
            return f"tile_m={self.tile_m}: wgmma takes 64 rows, and registers feed two consumer warp groups at most"
        if self.tile_n % 64 or not 64 <= self.tile_n <= 256:
            return (
                f"tile_n={self.tile_n}: a multiple of 64 (columns that share a tile's scale) up to 256 (TMA box, wgmma)"
            )
        working = EXACT_WORKING_REGISTERS if self.exact else WORKING_REGISTERS
        registers = EXACT_CONSUMER_REGISTERS if self.exact else CONSUMER_REGISTERS
        if self.accumulator_registers + working > registers:
            accumulators = self.accumulator_registers
            return f"tile_n={self.tile_n}: {accumulators} accumulators a thread leave under {working} registers"
        if self.cluster_m < 1 or self.cluster_n < 1 or self.cluster_size > 2:
            return (
                f"cluster {self.cluster_m}x{self.cluster_n}: 132 SMs divide into clusters of 1 or 2 without idle ones"
            )
        if (self.tile_n // self.cluster_m) % 8 or (self.tile_m // self.cluster_n) % 8:
            return "a multicast share must be a multiple of the 8 rows of a swizzle atom"
        if self.stages < 2:
            return f"stages={self.stages}: at least 2, or copies and products never overlap"
        if self.shared_memory > (limit := SHARED_MEMORY_LIMIT[self.target_sm]):
            return f"stages={self.stages}: {self.shared_memory} bytes of shared memory, the limit is {limit}"
        return None
