"""Groups of tokens for tests, and the column-wise layout written out, group by group."""

from __future__ import annotations

import bounds
import torch
from products import offsets

from mxfp8_cutlass.columns import ColumnwiseMXFP8
from mxfp8_cutlass.quantize import fold

SPLITS = {  # name: group sizes of about T tokens; what is left over is the tail of the capacity
    "even": lambda t: [t // 4] * 4,
    "empty first": lambda t: [0, t // 2, t // 4, t // 8],
    "empty middle": lambda t: [t // 2, 0, 0, t // 3],
    "empty last": lambda t: [t // 2, t // 4, t // 8, 0],
    "one": lambda t: [0, 0, t, 0],
    "none": lambda t: [0, 0, 0, 0],
    "ragged": lambda t: [t // 3, 1 if t else 0, t // 7, t // 5],
    "misaligned": lambda t: [min(33, t // 4), min(127, t // 4), min(129, t // 4), min(1, t // 4)],
}


def tokens_of(ends: list[int]):
    """(group, slice of its tokens)."""
    return [(g, slice(begin, end)) for g, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))]


def first_column(ends: list[int], group: int) -> int:
    """Where the documentation says that a group begins."""
    begin = ends[group - 1] if group else 0
    return 128 * (begin // 128 + group)


def columns_of(x: ColumnwiseMXFP8, ends: list[int]):
    """(group, slice of its columns, those that pad it to 128 included)."""
    for group, tokens in tokens_of(ends):
        begin = first_column(ends, group)
        yield group, slice(begin, begin + -(-(tokens.stop - tokens.start) // 128) * 128)


def padded_transpose(rows: torch.Tensor) -> torch.Tensor:
    """(n, features) -> (features, n rounded up to 128), with zeros."""
    return torch.nn.functional.pad(rows.mT, (0, -len(rows) % 128)).contiguous()


def with_poisoned_tail(x: torch.Tensor, used: int) -> torch.Tensor:
    """x with NaNs in the rows from `used` on."""
    x = x.clone()
    x[used:] = float("nan")
    return x


def as_run(a, b):
    """The operands that are multiplied, and the promotion interval."""
    if a.device.type == "cpu":
        return a.tensor, b.tensor, None
    return fold(a.tensor), fold(b.tensor, 1 if b.folded == 1 else 128), 128


def check_columnwise_product(got, a, b, sizes, old=None):
    """Every group, those without tokens too."""
    run_a, run_b, promotion_k = as_run(a, b)
    values_a, values_b = bounds.values(run_a), bounds.values(run_b)
    assert got.shape == (len(sizes), a.shape[0], b.shape[0])
    for group, columns in columns_of(a, offsets(sizes).tolist()):
        before = None if old is None else old[group]
        if sizes[group] == 0:
            assert torch.equal(got[group], torch.zeros_like(got[group]) if old is None else before)
            continue
        expected = bounds.expect(values_a[:, columns], values_b[:, columns], promotion_k, old=before)
        bounds.check(got[group], expected, f"group {group}")
