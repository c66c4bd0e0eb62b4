"""Which kernel for which problem sizes: a cost model over the valid configs. Pure Python; needs no GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from math import ceil

from mxfp8_cutlass.generator.config_space import sm90_configs
from mxfp8_cutlass.generator.tile_config import MAX_GROUPS, TileConfig


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
    """Time per promotion in which a multiprocessor's tensor cores idle, beside the promotion's instructions."""
    uniform_us: float
    """Time to promote one accumulator of each thread of a warp group with a scale per tile."""
    column_us: float
    """The same with a scale per column."""
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


def rank(
    problem_sizes: Sequence[tuple[int, int, int]],
    target_sm: str = "90a",
    *,
    promotion_k: int = 128,
    sfb_rows: int = 128,
    element_a: str = "e4m3",
    element_b: str = "e4m3",
    out: str = "bf16",
) -> list[Candidate]:
    """Every kernel that computes these problems, best first. Arguments and errors: see `select_kernel`."""
    check_problem_sizes(problem_sizes)
    return _rank_list(problem_sizes, target_sm, _facts(promotion_k, sfb_rows, element_a, element_b, out))


def select_kernel(
    problem_sizes: Sequence[tuple[int, int, int]],
    target_sm: str = "90a",
    *,
    promotion_k: int = 128,
    sfb_rows: int = 128,
    element_a: str = "e4m3",
    element_b: str = "e4m3",
    out: str = "bf16",
) -> TileConfig:
    """Pick the kernel for a list of problems. Pure: needs no GPU; cached.

    Args:
        problem_sizes: (M, N, K) of each group; M may be 0.
        target_sm: "90a".
        promotion_k: 128 for folded operands, 32 for exact products.
        sfb_rows: 128 for weights in tile form, else 1.
        element_a: "e4m3" or "e5m2".
        element_b: "e4m3" or "e5m2".
        out: "bf16", "fp16" or "fp32".

    Raises:
        TypeError: an entry of `problem_sizes` that is not three ints.
        ValueError: an empty list, a size out of range, or facts that no kernel of the target has.
    """
    check_problem_sizes(problem_sizes)
    sizes = tuple((m, n, k) for m, n, k in problem_sizes)
    return _select(sizes, target_sm, promotion_k, sfb_rows, element_a, element_b, out)


@lru_cache(maxsize=4096)
def _select(
    sizes: tuple[tuple[int, int, int], ...], target_sm: str, promotion_k: int, sfb_rows: int, a: str, b: str, out: str
) -> TileConfig:
    return _rank_list(sizes, target_sm, _facts(promotion_k, sfb_rows, a, b, out))[0].config


@lru_cache(maxsize=4096)
def select_stacked(
    m: int,
    n: int,
    k: int,
    groups: int,
    target_sm: str,
    promotion_k: int,
    sfb_rows: int,
    a: str,
    b: str,
    out: str,
    *,
    split: bool,
) -> TileConfig:
    """Pick the kernel for groups that share N and K: m rows each or, if `split`, m rows cut anywhere by the device."""
    facts = _facts(promotion_k, sfb_rows, a, b, out)
    if split:
        return _rank_split(m, n, k, groups, target_sm, facts)[0].config
    return _rank([(groups, m, n, k)], target_sm, facts)[0].config


def check_problem_sizes(problem_sizes: Sequence[tuple[int, int, int]]) -> None:
    """Raise ValueError or TypeError unless there are 1 to MAX_GROUPS problems, each of sizes that the kernels take."""
    if not 1 <= len(problem_sizes) <= MAX_GROUPS:
        raise ValueError(f"problem_sizes has {len(problem_sizes)} entries: there must be 1 to {MAX_GROUPS}")
    for i, sizes in enumerate(problem_sizes):
        if not (isinstance(sizes, Sequence) and len(sizes) == 3 and all(isinstance(size, int) for size in sizes)):
            raise TypeError(f"problem_sizes[{i}] is {sizes!r}: it must be three ints, (M, N, K)")
        m, n, k = sizes
        if m < 0 or n <= 0 or k <= 0:
            raise ValueError(f"problem_sizes[{i}] is {(m, n, k)}: M must not be negative, N and K must be positive")
        if n % 16 or k % 32:
            raise ValueError(f"problem_sizes[{i}] is {(m, n, k)}: N must be a multiple of 16 and K of 32")


def _facts(promotion_k: int, sfb_rows: int, element_a: str, element_b: str, out: str) -> dict[str, int | str]:
    return {
        "promotion_k": promotion_k,
        "sfb_rows": sfb_rows,
        "element_a": element_a,
        "element_b": element_b,
        "out": out,
    }


def _candidates(target_sm: str, facts: dict[str, int | str]) -> list[TileConfig]:
    if target_sm not in CHIPS:
        raise ValueError(f"target_sm is {target_sm!r}: there are grouped GEMM kernels for {', '.join(CHIPS)}")
    configs = [c for c in sm90_configs() if all(getattr(c, name) == value for name, value in facts.items())]
    if not configs:
        for name, value in facts.items():
            allowed = sorted({getattr(c, name) for c in sm90_configs()})
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}: it must be one of {allowed}")
        raise ValueError(f"no kernel has {', '.join(f'{name}={value!r}' for name, value in facts.items())} together")
    return configs


def _rank_list(sizes: Sequence[tuple[int, int, int]], target_sm: str, facts: dict[str, int | str]) -> list[Candidate]:
    """Rank for valid problem sizes, equal ones counted once."""
    counts = Counter((m, n, k) for m, n, k in sizes if m)
    return _rank([(float(count), m, n, k) for (m, n, k), count in counts.items()], target_sm, facts)


def _rank(problems: list[tuple[float, int, int, int]], target_sm: str, facts: dict[str, int | str]) -> list[Candidate]:
    """Rank for (count, m, n, k): `count` groups of m rows."""
    estimates = []
    for config in _candidates(target_sm, facts):
        rows = [count * ceil(m / (config.tile_m * config.cluster_m)) for count, m, _, _ in problems]
        estimates.append(_estimate(config, CHIPS[target_sm], problems, rows))
    return sorted(estimates, key=lambda candidate: candidate.total_us)


def _rank_split(m: int, n: int, k: int, groups: int, target_sm: str, facts: dict[str, int | str]) -> list[Candidate]:
    """Rank for m rows that the device cuts into groups. A group ends anywhere in its last tile: half of it is waste."""
    estimates = []
    for config in _candidates(target_sm, facts):
        rows = max(m / (config.tile_m * config.cluster_m) + groups / 2, min(groups, m))
        estimates.append(_estimate(config, CHIPS[target_sm], [(groups, max(1, m // groups), n, k)], [rows]))
    return sorted(estimates, key=lambda candidate: candidate.total_us)


def _estimate(
    config: TileConfig, chip: Chip, problems: list[tuple[float, int, int, int]], row_clusters: list[float]
) -> Candidate:
    """Time of a persistent launch, given each problem's rows of clusters."""
    # One stage, 128 of K. A consumer waits, multiplies and promotes in turn, and this chain, not the tensor cores, sets
    # the pace, even where two consumers are half a period apart (docs/kernel-notes.md): a promotion adds its time.
    promotions = config.tile_k // config.promotion_k
    slots = config.consumers * config.tile_n / 2
    promote = slots * (chip.uniform_us if config.sfb_rows == 128 else chip.column_us)
    multiply = 2 * config.tile_m * config.tile_n * config.tile_k / chip.flops + promotions * (chip.stage_us + promote)
    shared_bytes = (config.tile_m / config.cluster_n + config.tile_n / config.cluster_m) * config.tile_k
    l2 = shared_bytes / chip.l2_bytes
    stage = max(multiply, l2)
    out_bytes = 4 if config.out == "fp32" else 2
    store = chip.store_us + config.tile_m * config.tile_n * out_bytes / chip.l2_bytes

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
