"""Which kernel for which problem sizes: the nearest tuned entry, else a cost model. Pure Python; needs no GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from mxfp8_cutlass.cost_model import CHIPS, Candidate, estimate
from mxfp8_cutlass.generator.config_space import sm90_configs, sm90_k_group_configs
from mxfp8_cutlass.generator.tile_config import MAX_GROUPS, TileConfig
from mxfp8_cutlass.tuned import table


@dataclass(frozen=True)
class Choice:
    """A kernel, and what decided."""

    config: TileConfig
    match: table.Match | None
    """The nearest entry of the tuned table with the same facts, also if it is too far away to decide."""

    @property
    def tuned(self) -> bool:
        """Whether the table decided, not the model."""
        return self.match is not None and self.match.distance <= table.RADIUS


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
    return _rank_list(problem_sizes, target_sm, make_facts(promotion_k, sfb_rows, element_a, element_b, out))


def rank_stacked(
    m: int, n: int, k: int, groups: int, target_sm: str, facts: dict[str, int | str], *, split: bool
) -> list[Candidate]:
    """The same for groups that share N and K; see `select_stacked`. `facts`: those arguments of `rank` by name."""
    return _rank_split(m, n, k, groups, target_sm, facts) if split else _rank([(groups, m, n, k)], target_sm, facts)


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

    If the problems with rows share N and K, and the tuned table has a kernel with the same facts for a shape within
    `table.RADIUS`, it is that kernel; an entry whose kernel does not exist counts as absent. Otherwise the cost model
    decides. `choose` says which it was.

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
    return choose(
        problem_sizes,
        target_sm,
        promotion_k=promotion_k,
        sfb_rows=sfb_rows,
        element_a=element_a,
        element_b=element_b,
        out=out,
    ).config


def choose(
    problem_sizes: Sequence[tuple[int, int, int]],
    target_sm: str = "90a",
    *,
    promotion_k: int = 128,
    sfb_rows: int = 128,
    element_a: str = "e4m3",
    element_b: str = "e4m3",
    out: str = "bf16",
) -> Choice:
    """What `select_kernel` picks, and what decided. Arguments and errors: see there."""
    check_problem_sizes(problem_sizes)
    sizes = tuple((m, n, k) for m, n, k in problem_sizes)
    return _choose(sizes, target_sm, promotion_k, sfb_rows, element_a, element_b, out)


@lru_cache(maxsize=4096)
def _choose(
    sizes: tuple[tuple[int, int, int], ...], target_sm: str, promotion_k: int, sfb_rows: int, a: str, b: str, out: str
) -> Choice:
    ranked = _rank_list(sizes, target_sm, make_facts(promotion_k, sfb_rows, a, b, out))
    return _decide(ranked, table.shape_of(sizes), target_sm)


def _decide(ranked: list[Candidate], shape: table.Shape | None, target_sm: str) -> Choice:
    match = table.nearest(table.load(target_sm), shape, (candidate.config for candidate in ranked))
    by_model = Choice(ranked[0].config, match)
    return Choice(match.config, match) if match is not None and by_model.tuned else by_model


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
    """Pick the kernel for groups that share N and K: m rows each or, if `split`, m rows cut anywhere by the device.

    The table decides before the model, as in `select_kernel`.
    """
    ranked = rank_stacked(m, n, k, groups, target_sm, make_facts(promotion_k, sfb_rows, a, b, out), split=split)
    return _decide(ranked, table.Shape(groups, m if split else groups * m, n, k), target_sm).config


@lru_cache(maxsize=4096)
def select_k_groups(
    m: int, n: int, tokens: int, groups: int, target_sm: str, promotion_k: int, sfb_rows: int, a: str, b: str, out: str
) -> TileConfig:
    """Pick the kernel for `groups` products (m, tokens of the group) x (n, the same); the device alone knows those.

    The model decides: there is no table of such products.
    """
    return rank_k_groups(m, n, tokens, groups, target_sm, make_facts(promotion_k, sfb_rows, a, b, out))[0].config


def rank_k_groups(
    m: int, n: int, tokens: int, groups: int, target_sm: str, facts: dict[str, int | str]
) -> list[Candidate]:
    """Every kernel for them, best first. A group ends anywhere in its last run: half of it is waste."""
    k = max(1, tokens // groups + 64)
    return _rank([(groups, m, n, k)], target_sm, facts, k_groups=True)


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


def make_facts(promotion_k: int, sfb_rows: int, element_a: str, element_b: str, out: str) -> dict[str, int | str]:
    """Fields of TileConfig that operands and output fix, in the order in which functions here take them."""
    return {
        "promotion_k": promotion_k,
        "sfb_rows": sfb_rows,
        "element_a": element_a,
        "element_b": element_b,
        "out": out,
    }


def _candidates(target_sm: str, facts: dict[str, int | str], *, k_groups: bool = False) -> list[TileConfig]:
    if target_sm not in CHIPS:
        raise ValueError(f"target_sm is {target_sm!r}: there are grouped GEMM kernels for {', '.join(CHIPS)}")
    known = sm90_k_group_configs() if k_groups else sm90_configs()
    configs = [c for c in known if all(getattr(c, name) == value for name, value in facts.items())]
    if not configs:
        for name, value in facts.items():
            allowed = sorted({getattr(c, name) for c in known})
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}: it must be one of {allowed}")
        raise ValueError(f"no kernel has {', '.join(f'{name}={value!r}' for name, value in facts.items())} together")
    return configs


def _rank_list(sizes: Sequence[tuple[int, int, int]], target_sm: str, facts: dict[str, int | str]) -> list[Candidate]:
    """Rank for valid problem sizes, equal ones counted once."""
    counts = Counter((m, n, k) for m, n, k in sizes if m)
    return _rank([(float(count), m, n, k) for (m, n, k), count in counts.items()], target_sm, facts)


def _rank(
    problems: list[tuple[float, int, int, int]], target_sm: str, facts: dict[str, int | str], *, k_groups: bool = False
) -> list[Candidate]:
    """Rank for (count, m, n, k): `count` groups of m rows."""
    estimates = []
    for config in _candidates(target_sm, facts, k_groups=k_groups):
        rows = [count * ceil(m / (config.tile_m * config.cluster_m)) for count, m, _, _ in problems]
        estimates.append(estimate(config, CHIPS[target_sm], problems, rows))
    return sorted(estimates, key=lambda candidate: candidate.total_us)


def _rank_split(m: int, n: int, k: int, groups: int, target_sm: str, facts: dict[str, int | str]) -> list[Candidate]:
    """Rank for m rows that the device cuts into groups. A group ends anywhere in its last tile: half of it is waste."""
    estimates = []
    for config in _candidates(target_sm, facts):
        rows = max(m / (config.tile_m * config.cluster_m) + groups / 2, min(groups, m))
        estimates.append(estimate(config, CHIPS[target_sm], [(groups, max(1, m // groups), n, k)], [rows]))
    return sorted(estimates, key=lambda candidate: candidate.total_us)
