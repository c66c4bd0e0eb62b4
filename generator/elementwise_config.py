"""Configs of the kernels that are bound by memory: quantize, fold, dequantize, and the change of the scales' layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import ClassVar, NamedTuple

TARGETS = ("90a", "100a")
FORMATS = {"e4m3": "E4M3", "e5m2": "E5M2"}
INPUTS = {"bf16": "Bf16", "fp16": "Fp16", "fp32": "Fp32"}
SCALINGS = {"rceil": "Rceil", "floor": "Floor"}
SWIZZLE_FUNCTIONS = {"swizzle": "swizzle_scales", "unswizzle": "unswizzle_scales"}
SWIZZLE_GROUPS = {"rows": "RowGroups", "blocks": "BlockGroups"}


class FoldBox(NamedTuple):
    """What a stage of the fold kernel's shared memory holds, and how many stages there are."""

    rows: int
    runs: int
    """Runs of 128 elements of each row."""
    stages: int

    @property
    def bytes(self) -> int:
        """Elements of a stage."""
        return self.rows * self.runs * 128


FOLD_BOXES = {1: FoldBox(64, 2, 4), 128: FoldBox(128, 4, 3)}
"""By rows that share a scale; a tile's rows are those of a box, and its 3 stages fill an SM. Runs side by side share
sectors of scale bytes, rows those of `run_scale`. docs/kernel-notes.md has what other sizes gave."""


@dataclass(frozen=True, order=True)
class MemoryBoundConfig:
    """What all kinds have in common."""

    target_sm: str
    """Architecture, "90a" or "100a"."""

    @property
    def threads(self) -> int:
        """Threads of a CTA: 8 warps, as swizzle.cuh needs; quantize and dequantize would run with any number."""
        return 256

    @property
    def shared_memory(self) -> int:
        """Dynamic shared memory of a CTA in bytes."""
        return 0

    @property
    def prefix(self) -> str:
        """Begin of the kernel's name."""
        return f"sm{self.target_sm.removesuffix('a')}_mxfp8"

    def check(self) -> str | None:
        """Why this config cannot be built, or None."""
        if self.target_sm not in TARGETS:
            return f"target_sm={self.target_sm!r}: one of {', '.join(TARGETS)} (FP8 conversion, packed 16-bit maxima)"
        return None


@dataclass(frozen=True, order=True)
class ElementwiseConfig(MemoryBoundConfig):
    """What the kinds that handle FP8 elements have in common."""

    element: str
    """FP8 type, "e4m3" or "e5m2"."""

    @property
    def cuda_format(self) -> str:
        """The struct of fp8.cuh for the FP8 type."""
        return FORMATS[self.element]

    def check(self) -> str | None:
        """Why this config cannot be built, or None."""
        return super().check() or _unknown("element", self.element, FORMATS)


@dataclass(frozen=True, order=True)
class _QuantizerConfig(ElementwiseConfig):
    """What the kinds from bf16, fp16 or fp32 to MXFP8 have in common."""

    input: str
    """Type of the input, "bf16", "fp16" or "fp32"."""
    scaling: str
    """Scale rule, "rceil" or "floor"."""

    @property
    def cuda_input(self) -> str:
        """The struct of quantize_elements.cuh for the input type."""
        return INPUTS[self.input]

    @property
    def cuda_scaling(self) -> str:
        """The struct of quantize_elements.cuh for the scale rule."""
        return SCALINGS[self.scaling]

    def check(self) -> str | None:
        """Why this config cannot be built, or None."""
        return super().check() or _unknown("input", self.input, INPUTS) or _unknown("scaling", self.scaling, SCALINGS)


@dataclass(frozen=True, order=True)
class QuantizeConfig(_QuantizerConfig):
    """A kernel along the last axis."""

    fold: bool
    """Whether the output has one scale per run of 4 blocks."""

    template: ClassVar[str] = "quantize.cu.j2"

    @property
    def name(self) -> str:
        """The kernel's name and entry point; derived, never parsed."""
        suffix = "_fold" if self.fold else ""
        return f"{self.prefix}_quantize_{self.input}_{self.element}_{self.scaling}{suffix}"

    @property
    def runs_per_cta(self) -> int:
        """Runs of up to 128 elements that one CTA handles: 8 for each warp."""
        return self.threads // 4


@dataclass(frozen=True, order=True)
class QuantizeTilesConfig(_QuantizerConfig):
    """A kernel along either of the last two axes or both, folded as far as its arguments say."""

    template: ClassVar[str] = "quantize_tiles.cu.j2"

    @property
    def name(self) -> str:
        """The kernel's name and entry point; derived, never parsed."""
        return f"{self.prefix}_quantize_tiles_{self.input}_{self.element}_{self.scaling}"

    @property
    def threads(self) -> int:
        """A thread for each block of 32 tokens in each word of a tile's 128 features."""
        return 512 if self.input == "fp32" else 256

    @property
    def ctas_per_sm(self) -> int:
        """What registers are to suffice for: 3 of fp32 fill an SM's shared memory; 6 of the others would spill."""
        return 3 if self.input == "fp32" else 5

    @property
    def shared_memory(self) -> int:
        """128 bytes a thread, 32 more behind each 32 tokens, against bank conflicts; factors, with gaps too."""
        return 128 * self.threads + 4 * 32 + (128 + 4) * 4


@dataclass(frozen=True, order=True)
class FoldConfig(ElementwiseConfig):
    """A kernel from MXFP8 to MXFP8 with shared scales."""

    rows: int
    """Rows that share a scale: 1, or 128 for tiles."""
    stats: bool
    """Whether it counts the elements whose value changed."""

    template: ClassVar[str] = "fold.cu.j2"

    @property
    def name(self) -> str:
        """The kernel's name and entry point; derived, never parsed."""
        suffix = "_stats" if self.stats else ""
        return f"{self.prefix}_fold_{self.element}_{self.rows}x128{suffix}"

    @property
    def box(self) -> FoldBox:
        """What a CTA handles at once."""
        return FOLD_BOXES[self.rows]

    @property
    def tiles(self) -> bool:
        """Whether rows share scales."""
        return self.rows > 1

    @property
    def threads(self) -> int:
        """A thread for each run of a box."""
        return self.box.rows * self.box.runs

    @property
    def shared_memory(self) -> int:
        """Stages, a barrier of 8 bytes for each, and two scales of 4 bytes for each warp and run."""
        return self.box.stages * (self.box.bytes + 8) + self.threads // 32 * self.box.runs * 8

    @property
    def ctas_per_sm(self) -> int:
        """What an SM holds, of 228 KiB of shared memory, of which each CTA takes 1 KiB more, and 2048 threads."""
        return min(228 * 1024 // (self.shared_memory + 1024), 2048 // self.threads)

    def check(self) -> str | None:
        """Why this config cannot be built, or None."""
        return super().check() or _unknown("rows", self.rows, FOLD_BOXES)


@dataclass(frozen=True, order=True)
class DequantizeConfig(ElementwiseConfig):
    """A kernel from MXFP8 to bf16, fp16 or fp32."""

    output: str
    """Type of the output, "bf16", "fp16" or "fp32"."""

    template: ClassVar[str] = "dequantize.cu.j2"

    @property
    def name(self) -> str:
        """The kernel's name and entry point; derived, never parsed."""
        return f"{self.prefix}_dequantize_{self.element}_{self.output}"

    @property
    def elements_per_cta(self) -> int:
        """Elements that one CTA handles: a block's worth for each thread."""
        return self.threads * 32

    @property
    def cuda_output(self) -> str:
        """The struct of dequantize.cuh for the output type."""
        return f"To{INPUTS[self.output]}"

    def check(self) -> str | None:
        """Why this config cannot be built, or None."""
        return super().check() or _unknown("output", self.output, INPUTS)


@dataclass(frozen=True, order=True)
class SwizzleConfig(MemoryBoundConfig):
    """A kernel between compact scales and the 128x4 blocked layout."""

    direction: str
    """"swizzle" (to the blocked layout) or "unswizzle" (back)."""
    groups: str
    """The axis that groups are cut along: "rows" (or none is), or "blocks"."""

    template: ClassVar[str] = "swizzle.cu.j2"
    quads_per_cta: ClassVar[int] = 32
    """Groups of 4 blocks that one CTA handles, of 128 rows each: 128 bytes of a row, which a warp reads at once."""

    @property
    def name(self) -> str:
        """The kernel's name and entry point; derived, never parsed."""
        return f"{self.prefix}_{self.direction}_scales_{self.groups}"

    @property
    def function(self) -> str:
        """The function of swizzle.cuh."""
        return SWIZZLE_FUNCTIONS[self.direction]

    @property
    def cuda_groups(self) -> str:
        """The struct of swizzle.cuh for the axis that groups are cut along."""
        return SWIZZLE_GROUPS[self.groups]

    def check(self) -> str | None:
        """Why this config cannot be built, or None."""
        reason = super().check() or _unknown("direction", self.direction, SWIZZLE_FUNCTIONS)
        return reason or _unknown("groups", self.groups, SWIZZLE_GROUPS)


def _unknown(field: str, value: object, known: dict[str, str] | dict[int, FoldBox]) -> str | None:
    return None if value in known else f"{field}={value!r}: one of {', '.join(str(k) for k in known)}"


@cache
def elementwise_configs(
    target_sm: str,
) -> tuple[QuantizeConfig | QuantizeTilesConfig | FoldConfig | DequantizeConfig, ...]:
    """Every quantize, fold and dequantize kernel of a target.

    Raises:
        ValueError: target_sm is neither "90a" nor "100a".
    """
    _check_target(target_sm)
    return (
        *(QuantizeConfig(target_sm, *fields) for fields in product(FORMATS, INPUTS, SCALINGS, (False, True))),
        *(QuantizeTilesConfig(target_sm, *fields) for fields in product(FORMATS, INPUTS, SCALINGS)),
        *(FoldConfig(target_sm, *fields) for fields in product(FORMATS, FOLD_BOXES, (False, True))),
        *(DequantizeConfig(target_sm, *fields) for fields in product(FORMATS, INPUTS)),
    )


@cache
def swizzle_configs(target_sm: str) -> tuple[SwizzleConfig, ...]:
    """Every kernel of a target that changes the layout of scales.

    Raises:
        ValueError: target_sm is neither "90a" nor "100a".
    """
    _check_target(target_sm)
    return tuple(SwizzleConfig(target_sm, *fields) for fields in product(SWIZZLE_FUNCTIONS, SWIZZLE_GROUPS))


def _check_target(target_sm: str) -> None:
    if target_sm not in TARGETS:
        raise ValueError(f"target_sm is {target_sm!r}: it must be one of {', '.join(TARGETS)}")
