"""The cost model of a grouped GEMM launch on one chip: how long a kernel takes, and why. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil

from mxfp8_cutlass.generator.tile_config import TileConfig


@dataclass(frozen=True)
class Chip:
    """What the model knows of a chip. Rates are per microsecond, at the clock that FP8 products settle at."""

    multiprocessors: int
    flops: float
    """Dense FP8 operations of one multiprocessor."""
    l2_bytes: float
    """Bytes that one multiprocessor gets from L2 while all of them ask."""
    memory_bytes: float
    """Bytes of device memory traffic."""
    stage_us: float
    """Time per 128 of K in which a multiprocessor's tensor cores idle, beside the promotion's instructions."""
    uniform_us: float
    """Time to promote one accumulator of each thread of a warp group with a scale per tile."""
    column_us: float
    """The same with a scale per column."""
    exact_share: float
    """Time of an exact kernel's products as a multiple of what BF16 alone would take: elements are converted."""
    exact_us: float
    """An exact kernel's time per 128 of K beside that."""
    store_us: float
    """Latency of a tile's end: the last promotion, the first store, the next tile's place in the order."""


# Fitted to the kernels' times on an H200 (docs/kernel-notes.md).
CHIPS = {
    "90a": Chip(
        multiprocessors=132,
        flops=13.1e6,
        l2_bytes=57e3,
        memory_bytes=4.0e6,
        stage_us=0.13,
        uniform_us=0.0005,
        column_us=0.0014,
        exact_share=1.6,
        exact_us=0.4,
        store_us=0.5,
    )
}


@dataclass(frozen=True)
class Candidate:
    """A kernel and what the model expects of it; times in microseconds."""

    config: TileConfig
    total_us: float
    """The larger of waves and memory."""
    waves_us: float
    """All waves of tiles, the last one whole."""
    memory_us: float
    """Operands once through device memory, and the output."""
    waves: float
    """Tiles per CTA, rounded up: whole waves."""
    efficiency: float
    """Share of the computed tiles' elements that belong to the output."""
    stage_us: float
    """128 of K of one tile: the larger of multiply and L2."""
    multiply_us: float
    """The tensor cores' time and the promotion's that they do not hide."""
    l2_us: float
    """The tile's operands from L2, less what a cluster shares."""
    store_us: float
    """One tile's end."""


def estimate(
    config: TileConfig, chip: Chip, problems: list[tuple[float, int, int, int]], row_clusters: list[float]
) -> Candidate:
    """Time of a persistent launch, given each problem's rows of clusters."""
    # One stage, 128 of K. A consumer waits, multiplies and promotes in turn, and this chain, not the tensor cores, sets
    # the pace, even where two consumers are half a period apart (docs/kernel-notes.md): a promotion adds its time.
    products = 2 * config.tile_m * config.tile_n * config.tile_k / chip.flops
    if config.exact:
        multiply = chip.exact_share * 2 * products + chip.exact_us
    else:
        slots = config.consumers * config.tile_n / 2
        promote = slots * (chip.uniform_us if config.sfb_rows == 128 else chip.column_us)
        multiply = products + chip.stage_us + promote
    shared_bytes = (config.tile_m / config.cluster_n + config.tile_n / config.cluster_m) * config.tile_k
    l2 = shared_bytes / chip.l2_bytes
    stage = max(multiply, l2)
    out_bytes = 4 if config.out == "fp32" else 2
    # A staged output is stored while the next tile is computed.
    store = chip.store_us + (0 if config.staging_bytes else config.tile_m * config.tile_n * out_bytes / chip.l2_bytes)

    clusters = chip.multiprocessors // config.cluster_size
    tiles = [
        rows * ceil(n / (config.tile_n * config.cluster_n))
        for rows, (_, _, n, _) in zip(row_clusters, problems, strict=True)
    ]
    times = [ceil(k / config.tile_k) * stage + store for _, _, _, k in problems]
    waves = ceil(sum(tiles) / clusters - 1e-9)
    # Tiles of one length end in whole waves; of several, the last one may start when the others are done.
    work = sum(t * time for t, time in zip(tiles, times, strict=True))
    waves_us = waves * times[0] if len(set(times)) == 1 else work / clusters + max(times, default=0.0)

    moved = sum(count * (m * k + n * k + m * n * out_bytes) for count, m, n, k in problems)
    memory_us = moved / chip.memory_bytes
    useful = sum(count * m * n for count, m, n, _ in problems)
    computed = sum(tiles) * config.tile_m * config.tile_n * config.cluster_size
    return Candidate(
        config=config,
        total_us=max(waves_us, memory_us),
        waves_us=waves_us,
        memory_us=memory_us,
        waves=waves,
        efficiency=useful / computed if computed else 1.0,
        stage_us=stage,
        multiply_us=multiply,
        l2_us=l2,
        store_us=store,
    )


TERMS = tuple(field.name for field in fields(Candidate) if field.name != "config")
"""The numbers of a Candidate, in the order in which `build.py explain` shows them."""
