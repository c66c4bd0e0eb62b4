"""The cost model of a grouped GEMM launch on one chip: how long a kernel takes, and why. Pure Python.

Constants of SM90 are fitted to measurements. Those of SM100 are not, for no SM100 was measured: they come from data
sheets, or are assumptions and say so.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil

from mxfp8_cutlass.generator.config_space import GroupedGemmConfig
from mxfp8_cutlass.generator.sm100_config import Sm100Config
from mxfp8_cutlass.generator.tile_config import TileConfig


@dataclass(frozen=True)
class Chip:
    """What the model knows of a chip, whatever its kernels are like. Rates are per microsecond."""

    source: str
    """Where the numbers come from."""
    multiprocessors: int
    flops: float
    """Dense FP8 operations of one multiprocessor, at the clock that FP8 products settle at."""
    l2_bytes: float
    """Bytes that one multiprocessor gets from L2 while all of them ask."""
    memory_bytes: float
    """Bytes of device memory traffic."""
    store_us: float
    """Latency of a tile's end: the last promotion, the first store, the next tile's place in the order."""


CHIPS = {
    "90a": Chip(
        source="fitted to the kernels' times on an H200 (docs/kernel-notes.md)",
        multiprocessors=132,
        flops=13.1e6,
        l2_bytes=57e3,
        memory_bytes=4.0e6,
        store_us=0.5,
    ),
    "100a": Chip(
        source="a B200's data sheet and assumptions, not fitted: no SM100 was measured",
        multiprocessors=148,
        flops=30.3e6,  # 4.5 PFLOP/s of all, with scales as without: 16384 operations a clock at 1.85 GHz
        l2_bytes=118e3,  # assumed: 64 bytes a clock
        memory_bytes=8.0e6,
        store_us=0.5,  # assumed: Hopper's
    ),
}


@dataclass(frozen=True)
class Sm90Loop:
    """What the main loop of an SM90 kernel costs beside its products, in microseconds."""

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


SM90_LOOP = Sm90Loop(stage_us=0.13, uniform_us=0.0005, column_us=0.0014, exact_share=1.6, exact_us=0.4)
"""Fitted with CHIPS["90a"]."""

SM100_SHARED_BYTES = 237e3
"""Bytes of shared memory that an SM100's tensor cores read in a microsecond; assumed: 128 a clock, at 1.85 GHz."""


@dataclass(frozen=True)
class Candidate:
    """A kernel and what the model expects of it; times in microseconds."""

    config: GroupedGemmConfig
    total_us: float
    """The larger of waves and memory."""
    waves_us: float
    """All waves of tiles, the last one whole, and the end of the last tile where others' are hidden."""
    memory_us: float
    """Operands once through device memory, and the output."""
    waves: float
    """Tiles per CTA, rounded up: whole waves."""
    efficiency: float
    """Share of the computed tiles' elements that belong to the output."""
    stage_us: float
    """128 of K of one tile: the larger of multiply and L2."""
    multiply_us: float
    """The tensor cores' time and, on SM90, the promotion's that they do not hide."""
    l2_us: float
    """The tile's operands from L2, less what a cluster shares."""
    store_us: float
    """One tile's end; on SM100 the next tile's main loop hides it."""


@dataclass(frozen=True)
class Tile:
    """What one CTA's tile costs: terms of a Candidate."""

    multiply_us: float
    l2_us: float
    store_us: float
    hides_store: bool
    """Whether the next tile's main loop runs meanwhile."""


def cta_rows(config: GroupedGemmConfig) -> int:
    """Rows of A of one CTA: the two of a pair have half of their tile's each."""
    return config.tile_m // config.sms if isinstance(config, Sm100Config) else config.tile_m


def _sm90_tile(config: TileConfig, chip: Chip) -> Tile:
    # One stage, 128 of K. A consumer waits, multiplies and promotes in turn, and this chain, not the tensor cores, sets
    # the pace, even where two consumers are half a period apart (docs/kernel-notes.md): a promotion adds its time.
    products = 2 * config.tile_m * config.tile_n * config.tile_k / chip.flops
    if config.exact:
        multiply = SM90_LOOP.exact_share * 2 * products + SM90_LOOP.exact_us
    else:
        slots = config.consumers * config.tile_n / 2
        promote = slots * (SM90_LOOP.uniform_us if config.sfb_rows == 128 else SM90_LOOP.column_us)
        multiply = products + SM90_LOOP.stage_us + promote
    shared_bytes = (config.tile_m / config.cluster_n + config.tile_n / config.cluster_m) * config.tile_k
    # A staged output is stored while the next tile is computed.
    stored_bytes = 0 if config.staging_bytes else config.tile_m * config.tile_n * _out_bytes(config)
    return Tile(
        multiply_us=multiply,
        l2_us=shared_bytes / chip.l2_bytes,
        store_us=chip.store_us + stored_bytes / chip.l2_bytes,
        hides_store=False,
    )


def _sm100_tile(config: Sm100Config, chip: Chip, m: int) -> Tile:
    """`m`: rows of the largest group."""
    # Rows beyond a group's last are computed, but neither loaded nor stored. CTAs along M share B: a pair in halves,
    # pairs by multicast. One without rows is assumed to save the others nothing: such a pair is as fast as one SM.
    height = cta_rows(config)
    rows = min(m, height)
    sharing = min(config.cluster_m, ceil(m / height))
    shared_bytes = (rows / config.cluster_n + config.tile_n / sharing) * config.tile_k
    # One stage, 128 of K. Tensor cores scale and accumulate by themselves, and read both operands from shared memory.
    # With 64 columns this is assumed to take longer than the products: 1.5 times as long on one SM.
    products = 2 * height * config.tile_n * config.tile_k / chip.flops
    read_bytes = (height + config.tile_n / min(config.sms, sharing)) * config.tile_k
    stored_bytes = rows * config.tile_n * _out_bytes(config)
    return Tile(
        multiply_us=max(products, read_bytes / SM100_SHARED_BYTES),
        l2_us=shared_bytes / chip.l2_bytes,
        store_us=chip.store_us + stored_bytes / chip.l2_bytes,
        hides_store=True,  # tensor memory holds two accumulators
    )


def _out_bytes(config: GroupedGemmConfig) -> int:
    return 4 if config.out == "fp32" else 2


def estimate(
    config: GroupedGemmConfig, problems: list[tuple[float, int, int, int]], row_clusters: list[float]
) -> Candidate:
    """Time of a persistent launch for (count, m, n, k), `count` groups of m rows, given each one's rows of clusters."""
    chip = CHIPS[config.target_sm]
    if isinstance(config, Sm100Config):
        tile = _sm100_tile(config, chip, max([1, *(m for _, m, _, _ in problems)]))
    else:
        tile = _sm90_tile(config, chip)
    stage = max(tile.multiply_us, tile.l2_us)

    clusters = chip.multiprocessors // config.cluster_size
    tiles = [
        rows * ceil(n / (config.tile_n * config.cluster_n))
        for rows, (_, _, n, _) in zip(row_clusters, problems, strict=True)
    ]
    waves = ceil(sum(tiles) / clusters - 1e-9)
    loops = [ceil(k / config.tile_k) * stage for _, _, _, k in problems]
    if tile.hides_store:
        times, last = [max(loop, tile.store_us) for loop in loops], tile.store_us
    else:
        times, last = [loop + tile.store_us for loop in loops], 0.0
    # Tiles of one length end in whole waves; of several, the last one may start when the others are done.
    work = sum(t * time for t, time in zip(tiles, times, strict=True))
    waves_us = waves * times[0] if len(set(times)) == 1 else work / clusters + max(times, default=0.0)
    waves_us += last

    moved = sum(count * (m * k + n * k + m * n * _out_bytes(config)) for count, m, n, k in problems)
    memory_us = moved / chip.memory_bytes
    useful = sum(count * m * n for count, m, n, _ in problems)
    computed = sum(tiles) * cta_rows(config) * config.tile_n * config.cluster_size
    return Candidate(
        config=config,
        total_us=max(waves_us, memory_us),
        waves_us=waves_us,
        memory_us=memory_us,
        waves=waves,
        efficiency=useful / computed if computed else 1.0,
        stage_us=stage,
        multiply_us=tile.multiply_us,
        l2_us=tile.l2_us,
        store_us=tile.store_us,
    )


TERMS = tuple(field.name for field in fields(Candidate) if field.name != "config")
"""The numbers of a Candidate, in the order in which `build.py explain` shows them."""
