"""ColumnwiseMXFP8: tokens as columns, in blocks along the tokens of each group, and where each group's columns lie.

docs/numerics.md has the layout. What is here runs on either device and waits for nothing.
"""

from __future__ import annotations

from typing import final

import torch

from mxfp8_cutlass.checks import check_index
from mxfp8_cutlass.generator.tile_config import MAX_GROUPS
from mxfp8_cutlass.mxfp8_tensor import BLOCK, RUN, MXFP8Tensor

ALIGNMENT = RUN
"""Groups begin at multiples of as many columns, so that no run of 128, and no tile of a kernel, has two groups."""


def column_capacity(tokens: int, groups: int) -> int:
    """Columns that suffice for `tokens` tokens in `groups` groups of any sizes: 128 * (tokens // 128 + groups)."""
    return ALIGNMENT * (tokens // ALIGNMENT + groups)


def group_bounds(offs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First token, end token and first column of each group, int64 (G,).

    Group g begins at column 128 * (first // 128 + g), which needs no sum over the groups before it. It has room for its
    tokens rounded up to 128, since ceil((end - first) / 128) <= end // 128 - first // 128 + 1.
    """
    ends = offs.to(torch.int64)
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    groups = torch.arange(offs.shape[0], device=offs.device)
    return begins, ends, ALIGNMENT * (begins // ALIGNMENT + groups)


def group_of_token(offs: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The group of each token, int64 (tokens,), and whether it has one; without one it counts as of the last."""
    token = torch.arange(tokens, device=offs.device)
    group = torch.searchsorted(offs.to(torch.int64), token, right=True)
    return group.clamp(max=offs.shape[0] - 1), group < offs.shape[0]


def token_of_column(offs: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The token that each column holds, int64 (capacity,), and whether it holds one; else it is padding."""
    begins, ends, first_columns = group_bounds(offs)
    column = torch.arange(column_capacity(tokens, offs.shape[0]), device=offs.device)
    group = (torch.searchsorted(first_columns, column, right=True) - 1).clamp(min=0)
    token = column - first_columns[group] + begins[group]
    return token.clamp(0, max(0, tokens - 1)), token < ends[group].clamp(max=tokens)


def transposed_groups(x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """(tokens, features) -> (features, capacity): each group's tokens at its columns, zeros elsewhere."""
    tokens, features = x.shape
    if tokens == 0:
        return x.new_zeros((features, column_capacity(0, offs.shape[0])))
    token, held = token_of_column(offs, tokens)
    return torch.where(held, x[token].mT, x.new_zeros(())).contiguous()


def columns_of_rows(data: torch.Tensor, scale: torch.Tensor, offs: torch.Tensor) -> ColumnwiseMXFP8:
    """Bring an operand whose groups lie one right after another to the columns that its groups have here.

    data (features, tokens): offs cuts its last axis. scale, bytes (features, blocks): ceil(n / 32) for a group of n
    tokens, right after those of the groups before.
    """
    features, tokens = data.shape
    capacity = column_capacity(tokens, offs.shape[0])
    if tokens == 0:
        empty = data.new_zeros((features, capacity)), scale.new_zeros((features, capacity // BLOCK))
        return ColumnwiseMXFP8(MXFP8Tensor.unchecked(*empty), offs, tokens)
    token, held = token_of_column(offs, tokens)
    begins, ends, first_columns = group_bounds(offs)
    blocks = -(-(ends - begins) // BLOCK)
    first_blocks = blocks.cumsum(0) - blocks
    column = torch.arange(0, capacity, BLOCK, device=offs.device)
    group = (torch.searchsorted(first_columns, column, right=True) - 1).clamp(min=0)
    block = (first_blocks[group] + (column - first_columns[group]) // BLOCK).clamp(0, scale.shape[1] - 1)
    zero = torch.zeros((), dtype=torch.uint8, device=data.device)
    elements = torch.where(held, data.view(torch.uint8)[:, token], zero).view(data.dtype)
    scales = torch.where(held[::BLOCK], scale[:, block], zero)
    return ColumnwiseMXFP8(MXFP8Tensor.unchecked(elements, scales), offs, tokens)


@final
class ColumnwiseMXFP8:
    """Operand of a product that `offs` cuts along the contraction, such as a weight gradient's.

    Element (f, t) of the matrix (features, tokens) stands at column `first column of t's group + t - its first token`
    of `tensor`. The first columns are multiples of 128; a group's last block is filled up with zeros, and so are the
    blocks after it up to a multiple of 128 columns. What lies behind, up to the next group, has no meaning.

    Args:
        tensor: (features, capacity), with the capacity that `column_capacity` gives; `folded` 0, 1 or 128.
        offs: int32 or int64 (G,): the end token of each group, as they were when it was quantized.
        tokens: how many rows the tensor had that was quantized, tokens of no group included.

    Raises:
        TypeError: tensor is no MXFP8Tensor, or offs no tensor of such a dtype.
        ValueError: a shape or device does not fit.
    """

    __slots__ = ("offs", "tensor", "tokens")

    def __init__(self, tensor: MXFP8Tensor, offs: torch.Tensor, tokens: int) -> None:
        if not isinstance(tensor, MXFP8Tensor):
            raise TypeError(f"tensor is a {type(tensor).__name__}: it must be an MXFP8Tensor")
        check_offs(offs, "tensor", tensor.device)
        capacity = column_capacity(tokens, offs.shape[0])
        if tensor.ndim != 2 or tensor.shape[1] != capacity:
            raise ValueError(
                f"tensor has shape {tuple(tensor.shape)}: for {tokens} tokens in {offs.shape[0]} groups it must be "
                f"(features, {capacity})"
            )
        self.tensor, self.offs, self.tokens = tensor, offs, tokens

    @property
    def shape(self) -> torch.Size:
        """(features, tokens), without padding."""
        return torch.Size((self.tensor.shape[0], self.tokens))

    @property
    def device(self) -> torch.device:
        """Where all parts lie."""
        return self.tensor.device

    @property
    def dtype(self) -> torch.dtype:
        """The elements' FP8 type."""
        return self.tensor.dtype

    @property
    def folded(self) -> int:
        """As of `tensor`."""
        return self.tensor.folded

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, (features, tokens), with zeros for tokens of no group."""
        group, held = group_of_token(self.offs, self.tokens)
        begins, _, first_columns = group_bounds(self.offs)
        column = first_columns[group] + torch.arange(self.tokens, device=self.device) - begins[group]
        values = self.tensor.dequantize(dtype)[:, column.clamp(max=self.tensor.K - 1)]
        return torch.where(held, values, values.new_zeros(()))

    def __repr__(self) -> str:
        features, tokens = self.shape
        return (
            f"ColumnwiseMXFP8(({features}, {tokens}), {self.dtype}, groups={self.offs.shape[0]}, "
            f"device={str(self.device)!r}, folded={self.folded})"
        )


def check_offs(offs: torch.Tensor, owner: str, device: torch.device) -> None:
    """Raise unless offs is a tensor that names the ends of groups."""
    check_index("offs", offs, owner, device)
    if offs.ndim != 1 or not 1 <= offs.shape[0] <= MAX_GROUPS:
        raise ValueError(f"offs has shape {tuple(offs.shape)}: it must be (G,), with G from 1 to {MAX_GROUPS}")
