"""The shapes that are timed: layers of Mixture-of-Experts models in use, and two scaling series."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

MASKED_ROWS = 64
"""Rows to which rooms of the masked layout are padded: DeepGEMM asks for its tiles' multiples."""


@dataclass(frozen=True)
class Workload:
    """G products of (M_g, K) with (N, K)."""

    name: str
    groups: int
    m: int
    """Rows of all groups together."""
    n: int
    k: int
    kind: Literal["contiguous", "masked"] = "contiguous"
    """The layout of A and the result: rows one after the other, or a fixed room per group (decode)."""
    split: Literal["even", "zipf"] = "even"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each group."""
        if self.split == "zipf":
            return zipf_sizes(self.groups, self.m)
        quotient, rest = divmod(self.m, self.groups)
        return tuple(quotient + (group < rest) for group in range(self.groups))

    @property
    def room(self) -> int:
        """Rows of a group's room in the masked layout."""
        return -(-max(self.sizes) // MASKED_ROWS) * MASKED_ROWS

    @property
    def expected_m(self) -> int:
        """Rows that a group has on average: what decode knows beforehand."""
        return -(-self.m // self.groups)

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.m * self.n * self.k

    @property
    def weight_bytes(self) -> int:
        """FP8 weights of the groups that have rows."""
        return sum(size > 0 for size in self.sizes) * self.n * self.k

    @property
    def least_bytes(self) -> int:
        """FP8 operands and a bfloat16 output, each moved once."""
        return self.weight_bytes + self.m * self.k + 2 * self.m * self.n

    @property
    def text(self) -> str:
        """The sizes in words."""
        split = ", Zipf split" if self.split == "zipf" else ""
        return f"G {self.groups}, M {self.m}, N {self.n}, K {self.k}{split}"


def zipf_sizes(groups: int, m: int, exponent: float = 1.1, seed: int = 0) -> tuple[int, ...]:
    """Rows per group by a shuffled Zipf law: a 16th of the groups empty, a 16th with one row, no multiples of 128."""
    rare = max(1, groups // 16)
    if groups < 3 * rare or m < 4 * groups:
        raise ValueError(f"groups={groups}, m={m}: a Zipf split needs at least 3 groups and 4 rows for each")
    busy = groups - 2 * rare
    weights = [(rank + 1) ** -exponent for rank in range(busy)]
    sizes = [max(2, int(m * weight / sum(weights))) for weight in weights]
    sizes = [size + (size % 128 == 0) for size in sizes]
    sizes[0] += m - rare - sum(sizes)
    if sizes[0] % 128 == 0:
        # One row moves to a group that it does not bring to a multiple of 128.
        other = next(i for i in range(1, busy) if (sizes[i] + 1) % 128)
        sizes[0] -= 1
        sizes[other] += 1
    sizes += [1] * rare + [0] * rare
    random.Random(seed).shuffle(sizes)  # noqa: S311 - a fixed permutation, not a secret
    return tuple(sizes)


WORKLOADS = (
    Workload("mixtral-8x7b fc1", 8, 16384, 14336, 4096),
    Workload("dsv3 fc1 ep32", 8, 32768, 4096, 7168),
    Workload("dsv3 fc2 ep32", 8, 32768, 7168, 2048),
    Workload("llama4-scout fc1", 16, 32768, 8192, 5120),
    Workload("qwen3-235b fc1", 128, 32768, 3072, 4096),
    Workload("gpt-oss-120b fc1", 32, 16384, 5760, 2880),
    Workload("dsv2-lite fc2", 64, 32768, 2048, 1408),
    Workload("qwen3 skewed", 128, 32768, 3072, 4096, split="zipf"),
    Workload("dsv3 decode", 32, 2048, 4096, 7168, kind="masked"),
    Workload("mixtral decode", 8, 128, 14336, 4096, kind="masked"),
)

SCALING = {
    "groups": tuple(Workload(f"G {2**i}", 2**i, 32768, 3072, 4096) for i in range(9)),
    "rows": tuple(
        Workload(f"M {2**i}", 8, 2**i, 4096, 7168, kind="masked" if i < 10 else "contiguous") for i in range(18)
    ),
}
"""Fixed M while G grows, and fixed G while M grows; with fewer than 128 rows a group, DeepGEMM's masked layout."""
