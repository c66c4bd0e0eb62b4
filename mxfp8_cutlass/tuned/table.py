"""The table of a target's fastest kernels, and which of its entries speaks for a shape. Pure Python; needs no GPU.

`build.py sweep --apply` writes it. An entry names its kernel; the kernel's facts (promotion, scales, types) are the
entry's. An entry whose kernel exists no longer is stale: it counts as absent, and `stale` tells.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from mxfp8_cutlass.generator.config_space import GroupedGemmConfig, sm90_configs
from mxfp8_cutlass.generator.tile_config import TileConfig

DIRECTORY = Path(__file__).parent
FILES = {"90a": "h200_90a.json"}
"""One table per target. There need not be one: the cost model does without."""

RADIUS = 0.25
"""How far an entry speaks. 0.25 is one size off by 19%, or each of the four by 9%: tiles and waves that a shape fills
change with its sizes, and the model follows them where a measured neighbour does not."""


@dataclass(frozen=True, order=True)
class Shape:
    """What the host knows of groups that share N and K."""

    groups: int
    m: int
    """Rows of all groups together."""
    n: int
    k: int


def shape_of(sizes: Iterable[tuple[int, int, int]]) -> Shape | None:
    """The shape of a list of (M, N, K), empty ones left out; None if they differ in N or K, or all are empty."""
    busy = [(m, n, k) for m, n, k in sizes if m]
    if len({(n, k) for _, n, k in busy}) != 1:
        return None
    return Shape(len(busy), sum(m for m, _, _ in busy), busy[0][1], busy[0][2])


def distance(a: Shape, b: Shape) -> float:
    """Euclidean norm of the binary logarithms of four ratios: rows per group, N, K, number of groups."""
    pairs = ((a.m / a.groups, b.m / b.groups), (a.n, b.n), (a.k, b.k), (a.groups, b.groups))
    return math.sqrt(sum(math.log2(x / y) ** 2 for x, y in pairs))


@dataclass(frozen=True)
class Entry:
    """A shape and the kernel that was fastest on it."""

    shape: Shape
    config: str
    us: float
    """Its time, as it was measured."""
    workloads: str
    """What was timed."""


@dataclass(frozen=True)
class Table:
    """A target's entries. `about` says where and with what they were measured."""

    entries: tuple[Entry, ...] = ()
    about: Mapping[str, str] | None = None

    def to_json(self) -> str:
        """One line for each entry."""
        lines = (
            json.dumps({**asdict(entry.shape), "config": entry.config, "us": entry.us, "workloads": entry.workloads})
            for entry in self.entries
        )
        body = ",\n  ".join(lines)
        return f'{{"about": {json.dumps(dict(self.about or {}))},\n "entries": [\n  {body}\n]}}\n'


@dataclass(frozen=True)
class Match:
    """The entry that speaks for a shape, and how far away it is."""

    entry: Entry
    config: GroupedGemmConfig
    distance: float


def table_path(target_sm: str) -> Path:
    """Where a target's table lies, or would."""
    return DIRECTORY / FILES[target_sm]


def read(path: Path) -> Table:
    """Read a table; without a file, an empty one.

    Raises:
        ValueError: the file is no table.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return Table()
    try:
        found = json.loads(text)
        entries = tuple(
            Entry(
                Shape(*(int(row[name]) for name in ("groups", "m", "n", "k"))),
                str(row["config"]),
                float(row["us"]),
                str(row["workloads"]),
            )
            for row in found["entries"]
        )
        about = {str(name): str(value) for name, value in found["about"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table of tuned kernels: {type(error).__name__}: {error}") from error
    for entry in entries:
        if min(entry.shape.groups, entry.shape.m, entry.shape.n, entry.shape.k) < 1:
            raise ValueError(f"{path}: the sizes of {entry} must be positive")
    return Table(entries, about)


@lru_cache(maxsize=8)
def load(target_sm: str) -> Table:
    """The table of a target that is shipped; read once."""
    return read(table_path(target_sm)) if target_sm in FILES else Table()


def configs_by_name() -> dict[str, TileConfig]:
    """Every kernel that a table may name."""
    return {config.name: config for config in sm90_configs()}


def stale(table: Table) -> list[Entry]:
    """The entries whose kernel exists no longer."""
    known = configs_by_name()
    return [entry for entry in table.entries if entry.config not in known]


def nearest(table: Table, shape: Shape | None, allowed: Iterable[GroupedGemmConfig]) -> Match | None:
    """The entry nearest to a shape among those whose kernel is allowed, however far; None if there is none."""
    if shape is None or not shape.m or not table.entries:
        return None
    known = {config.name: config for config in allowed}
    matches = [
        Match(entry, known[entry.config], distance(entry.shape, shape))
        for entry in table.entries
        if entry.config in known
    ]
    return min(matches, key=lambda match: match.distance, default=None)
