"""The blocked layout of scales is CUTLASS's, by its own functions: at random shapes, and for ragged groups."""

from __future__ import annotations

import json
import shutil

import cutlass_layout
import numpy as np
import pytest
import torch

from mxfp8_cutlass.scale_layout import swizzle_scales


def positions(shape, **keywords):
    """Where the package puts each scale of `shape`, found with its own index as the scale, a byte at a time."""
    index = np.arange(1, np.prod(shape) + 1).reshape(shape)
    swizzled = (
        sum(
            swizzle_scales(torch.from_numpy((index >> 8 * i).astype(np.uint8)), **keywords).long() << 8 * i
            for i in range(3)
        )
        .numpy()
        .ravel()
    )
    where = np.flatnonzero(swizzled)
    out = np.empty(index.size, int)
    out[swizzled[where] - 1] = where
    return swizzled.size, out.reshape(shape)


@pytest.fixture(scope="module")
def cutlass(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    return cutlass_layout.CutlassLayout(compiler, tmp_path_factory.mktemp("cutlass"))


def test_table_from_cutlass():
    table = json.loads(cutlass_layout.TABLE.read_text())
    assert {tuple(entry["shape"]) for entry in table} == set(cutlass_layout.TABLE_SHAPES)
    for entry in table:
        matrices, rows, k = entry["shape"]
        size, found = positions((matrices, rows, k // 32))
        assert size == entry["bytes"]
        assert [found.ravel()[i] for i, _ in entry["offsets"]] == [offset for _, offset in entry["offsets"]]


def test_table_is_what_cutlass_says(cutlass):
    assert json.loads(json.dumps(cutlass_layout.summary(cutlass))) == json.loads(cutlass_layout.TABLE.read_text())


@pytest.mark.parametrize("operand", ["A", "B"])
def test_layout_of_cutlass(cutlass, operand):
    random = np.random.default_rng(1)
    shapes = [
        (int(random.integers(1, 4)), int(random.integers(1, 600)), int(random.integers(1, 60)) * 32) for _ in range(40)
    ]
    for shape, (size, offsets) in zip(shapes, cutlass(operand, shapes), strict=True):
        assert positions(offsets.shape)[0] == size, shape
        np.testing.assert_array_equal(positions(offsets.shape)[1], offsets)


@pytest.mark.parametrize("operand", ["A", "B"])
@pytest.mark.parametrize("groups", ["rows", "blocks"])
def test_ragged_groups_of_cutlass(cutlass, operand, groups):
    """Each group is a problem of its own; its buffer starts where those before it end."""
    random = np.random.default_rng(2)
    for _ in range(20):
        n_groups, other = int(random.integers(1, 7)), int(random.integers(1, 12))
        sizes = random.integers(0, 400, n_groups) * random.integers(0, 2, n_groups)
        if groups == "rows":
            problems = [(1, int(size), 32 * other) for size in sizes if size]
            shape = (int(sizes.sum()) + 3, other)
        else:
            problems = [(1, 50 * other, int(size)) for size in sizes if size]
            shape = (50 * other, sum(-(-int(size) // 32) for size in sizes) + 3)
        offs = torch.from_numpy(sizes.cumsum())
        _, found = positions(shape, offs=offs, groups=groups) if sizes.any() else (0, None)
        base = place = 0
        for size, offsets in cutlass(operand, problems):
            count = offsets.shape[1 if groups == "rows" else 2]
            part = found[place : place + count] if groups == "rows" else found[:, place : place + count]
            np.testing.assert_array_equal(part, base + offsets[0])
            base, place = base + size, place + count
