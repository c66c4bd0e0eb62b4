"""Which kernel for which problem sizes: the nearest tuned entry, else a cost model. Pure Python; needs no GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from mxfp8_cutlass.cost_model import Candidate, cta_rows, estimate
from mxfp8_cutlass.generator.config_space import GroupedGemmConfig, sm90_configs, sm90_k_group_configs
from mxfp8_cutlass.generator.sm100_config import sm100_configs
from mxfp8_cutlass.generator.tile_config import MAX_GROUPS
from mxfp8_cutlass.tuned import table

FACTS = {
    "90a": ("promotion_k", "sfb_rows", "element_a", "element_b", "out"),
    "100a": ("element_a", "element_b", "out"),  # its tensor cores take scales: nothing is promoted or folded
}
"""By target, the fields of a config that operands and output fix, in the order in which functions here take them."""


@dataclass(frozen=True)
class Choice:
    """A kernel, and what decided."""

    config: GroupedGemmConfig
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
    promotion_k: int | None = None,
    sfb_rows: int | None = None,
    element_a: str = "e4m3",
    element_b: str = "e4m3",
    out: str = "bf16",
) -> list[Candidate]:
    """Every kernel that computes these problems, best first. Arguments and errors: see `select_kernel`."""
    check_problem_sizes(problem_sizes)
    facts = make_facts(promotion_k, sfb_rows, element_a, element_b, out, target_sm)
    return _rank_list(problem_sizes, target_sm, facts)


def rank_stacked(
    m: int, n: int, k: int, groups: int, target_sm: str, facts: dict[str, int | str], *, split: bool
) -> list[Candidate]:
    """The same for groups that share N and K; see `select_stacked`. `facts`: those arguments of `rank` by name."""
    return _rank_split(m, n, k, groups, target_sm, facts) if split else _rank([(groups, m, n, k)], target_sm, facts)


def select_kernel(
    problem_sizes: Sequence[tuple[int, int, int]],
    target_sm: str = "90a",
    *,
    promotion_k: int | None = None,
    sfb_rows: int | None = None,
    element_a: str = "e4m3",
    element_b: str = "e4m3",
    out: str = "bf16",
) -> GroupedGemmConfig:
    """Pick the kernel for a list of problems. Pure: needs no GPU; cached.

    If the problems with rows share N and K, and the tuned table has a kernel with the same facts for a shape within
    `table.RADIUS`, it is that kernel; an entry whose kernel does not exist counts as absent. Otherwise the cost model
    decides. `choose` says which it was.

    Args:
        problem_sizes: (M, N, K) of each group; M may be 0.
        target_sm: "90a" or "100a".
        promotion_k: 128 for folded operands (the default), 32 for exact products; 90a alone.
        sfb_rows: 128 for weights in tile form (the default), else 1; 90a alone.
        element_a: "e4m3" or "e5m2".
        element_b: "e4m3" or "e5m2".
        out: "bf16", "fp16" or "fp32".

    Returns:
        A TileConfig for 90a, an Sm100Config for 100a.

    Raises:
        TypeError: an entry of `problem_sizes` that is not three ints.
        ValueError: an empty list, a size out of range, an unknown target, or facts that no kernel of it has.
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
    promotion_k: int | None = None,
    sfb_rows: int | None = None,
    element_a: str = "e4m3",
    element_b: str = "e4m3",
    out: str = "bf16",
) -> Choice:
    """What `select_kernel` picks, and what decided. Arguments and errors: see there."""
    check_problem_sizes(problem_sizes)
    sizes = tuple((m, n, k) for m, n, k in problem_sizes)
    facts = make_facts(promotion_k, sfb_rows, element_a, element_b, out, target_sm)
    return _choose(sizes, target_sm, *facts.values())


@lru_cache(maxsize=4096)
def _choose(sizes: tuple[tuple[int, int, int], ...], target_sm: str, *facts: int | str) -> Choice:
    ranked = _rank_list(sizes, target_sm, _by_name(target_sm, facts))
    return _decide(ranked, table.shape_of(sizes), target_sm)


def _decide(ranked: list[Candidate], shape: table.Shape | None, target_sm: str) -> Choice:
    match = table.nearest(table.load(target_sm), shape, (candidate.config for candidate in ranked))
    by_model = Choice(ranked[0].config, match)
    return Choice(match.config, match) if match is not None and by_model.tuned else by_model


@lru_cache(maxsize=4096)
def select_stacked(
    m: int, n: int, k: int, groups: int, target_sm: str, *facts: int | str, split: bool
) -> GroupedGemmConfig:
    """Pick the kernel for groups that share N and K: m rows each or, if `split`, m rows cut anywhere by the device.

    The table decides before the model, as in `select_kernel`. `facts`: in the order of FACTS.
    """
    ranked = rank_stacked(m, n, k, groups, target_sm, _by_name(target_sm, facts), split=split)
    return _decide(ranked, table.Shape(groups, m if split else groups * m, n, k), target_sm).config


@lru_cache(maxsize=4096)
def select_k_groups(m: int, n: int, tokens: int, groups: int, target_sm: str, *facts: int | str) -> GroupedGemmConfig:
    """Pick the kernel for `groups` products (m, tokens of the group) x (n, the same); the device alone knows those.

    The model decides: there is no table of such products. `facts`: in the order of FACTS.
    """
    return rank_k_groups(m, n, tokens, groups, target_sm, _by_name(target_sm, facts))[0].config


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


def make_facts(
    promotion_k: int | None, sfb_rows: int | None, element_a: str, element_b: str, out: str, target_sm: str = "90a"
) -> dict[str, int | str]:
    """FACTS of a target by name, in their order. None stands for 128 where the target has such a fact.

    Raises:
        ValueError: an unknown target, or a value for what it does not have.
    """
    _check_target(target_sm)
    facts: dict[str, int | str] = {}
    for name, value in (("promotion_k", promotion_k), ("sfb_rows", sfb_rows)):
        if name in FACTS[target_sm]:
            facts[name] = 128 if value is None else value
        elif value is not None:
            raise ValueError(f"{name} is {value!r}: it must be None for {target_sm}, whose tensor cores take scales")
    return facts | {"element_a": element_a, "element_b": element_b, "out": out}


def _check_target(target_sm: str) -> None:
    if target_sm not in FACTS:
        raise ValueError(f"target_sm is {target_sm!r}: there are grouped GEMM kernels for {', '.join(FACTS)}")


def _by_name(target_sm: str, facts: tuple[int | str, ...]) -> dict[str, int | str]:
    _check_target(target_sm)
    return dict(zip(FACTS[target_sm], facts, strict=True))


def _known(target_sm: str, *, k_groups: bool) -> Sequence[GroupedGemmConfig]:
    _check_target(target_sm)
    if target_sm == "100a":
        return sm100_configs()  # each takes groups of rows as well as of K
    return sm90_k_group_configs() if k_groups else sm90_configs()


def _candidates(target_sm: str, facts: dict[str, int | str], *, k_groups: bool = False) -> list[GroupedGemmConfig]:
    known = _known(target_sm, k_groups=k_groups)
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
        rows = [count * ceil(m / (cta_rows(config) * config.cluster_m)) for count, m, _, _ in problems]
        estimates.append(estimate(config, problems, rows))
    return sorted(estimates, key=lambda candidate: candidate.total_us)


def _rank_split(m: int, n: int, k: int, groups: int, target_sm: str, facts: dict[str, int | str]) -> list[Candidate]:
    """Rank for m rows that the device cuts into groups. A group ends anywhere in its last tile: half of it is waste."""
    estimates = []
    for config in _candidates(target_sm, facts):
        rows = max(m / (cta_rows(config) * config.cluster_m) + groups / 2, min(groups, m))
        estimates.append(estimate(config, [(groups, max(1, m // groups), n, k)], [rows]))
    return sorted(estimates, key=lambda candidate: candidate.total_us)
