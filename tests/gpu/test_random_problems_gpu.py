"""Random problem lists: 320 of grouped_mm, a quarter of them batches, and 40 of grouped_gemm. Seeded."""

from __future__ import annotations

import random
from itertools import accumulate as running_sum

import bounds
import pytest
import torch
from products import E4M3, E5M2, folded, mixed_tiles, operand, poisoned, run

import mxfp8_cutlass as mx

pytestmark = pytest.mark.gpu

KS = (32, 96, 160, 576, 1024, 2880, 4096)
NS = (16, 48, 64, 80, 208, 256, 320, 400, 768, 1040, 3072)
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
ELEMENTS = 2**25  # of an operand or the output, which the float64 product needs eight bytes for


def group_sizes(rng, most):
    """Rows of 1 to 130 groups: even, skewed, few rows each, or mostly empty; up to `most` in all."""
    groups = rng.choice([1, 2, 3, 5, 8, 16, 32, 33, 64, 128, 130])
    kind = rng.choice(["even", "skewed", "tiny", "empty", "one", "nothing"])
    if kind == "nothing":
        return [0] * groups
    if kind == "one":
        return [rng.choice([0, 1, most]) if g == groups // 2 else 0 for g in range(groups)]
    if kind == "tiny":
        return [rng.randint(0, 3) for _ in range(groups)]
    weights = [rng.random() ** (1 if kind == "even" else 6) for _ in range(groups)]
    if kind == "empty":
        weights = [w if rng.random() < 0.2 else 0.0 for w in weights]
    total = sum(weights) or 1.0
    rows = rng.randint(1, most)
    return [int(rows * w / total) for w in weights]


def random_operands(rng, shape_a, shape_b):
    """Operands in any state of folding, and whether to multiply them exactly."""
    dtype_a, dtype_b = rng.choice([E4M3, E4M3, E5M2]), rng.choice([E4M3, E4M3, E5M2])
    spread = rng.choice([0, 2, 2, 12])
    a = operand(shape_a, dtype_a, rng.getrandbits(32), "cuda", spread=spread)
    b = operand(shape_b, dtype_b, rng.getrandbits(32), "cuda", spread=spread)
    if rng.random() < 0.3:
        b = mixed_tiles(b)
    return folded(a, rng.choice([0, 1, 1, 128])), folded(b, rng.choice([0, 1, 128, 128])), rng.random() < 0.4


def random_list(seed):
    """One call of grouped_mm."""
    rng = random.Random(seed)
    K, N = rng.choice(KS), rng.choice(NS)
    options = {"out_dtype": rng.choice(OUTPUTS), "bias": rng.random() < 0.3, "accumulate": rng.random() < 0.3}
    if rng.random() < 0.25:
        sizes = None
        groups = min(rng.choice([1, 2, 5, 16, 64]), ELEMENTS // (N * K) or 1)
        M = max(1, min(rng.choice([1, 3, 64, 65, 200, 513]), 2**22 // (groups * max(N, K))))
        shape_a = (groups, M, K)
    else:
        sizes = group_sizes(rng, most=min(10000, 2**23 // max(N, K)))
        groups = len(sizes)
        while groups * N * K > 4 * ELEMENTS:
            N = max(n for n in NS if n < N)
        shape_a = (sum(sizes) + rng.choice([0, 0, 1, 100]), K)
        options["offs_dtype"] = rng.choice([torch.int32, torch.int64])
    a, b, exact = random_operands(rng, shape_a, (groups, N, K))
    try:
        run(a, b, sizes, exact=exact, **options)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, a {a}, b {b}, sizes {sizes}, exact {exact}, {options}: {error}") from error


@pytest.mark.parametrize("first", range(0, 320, 10))
def test_random_lists(first):
    for seed in range(first, first + 10):
        random_list(seed)


def random_pairs(seed):
    """One call of grouped_gemm."""
    rng = random.Random(1000 + seed)
    dtypes = rng.choice([E4M3, E5M2]), rng.choice([E4M3, E5M2])
    exact, out_dtype, accumulate = rng.random() < 0.4, rng.choice(OUTPUTS), rng.random() < 0.4
    pairs = []
    for _ in range(rng.choice([1, 2, 7, 33, 100])):
        M, N, K = rng.choice([0, 1, 17, 64, 130, 500]), rng.choice(NS[:9]), rng.choice(KS)
        a = operand((M, K), dtypes[0], rng.getrandbits(32), "cuda")
        b = operand((N, K), dtypes[1], rng.getrandbits(32), "cuda")
        pairs.append((folded(a, rng.choice([0, 1])), folded(b, rng.choice([0, 1, 128]))))
    outs = [poisoned((a.shape[0] + 2, b.shape[0]), out_dtype, "cuda") for a, b in pairs]
    views = [out[1:-1] for out in outs]
    if accumulate:
        for view in views:
            view.normal_()
    olds = [view.clone() if accumulate else None for view in views]
    results = mx.grouped_gemm(pairs, outs=views, accumulate=accumulate, exact=exact)
    sfb_rows = 1 if any(b.folded == 1 for _, b in pairs) else 128
    for i, (a, b) in enumerate(pairs):
        one = mx.MXFP8Tensor.unchecked(
            b.data[None], b.scale[None], b.folded, None if b.tile_scale is None else b.tile_scale[None]
        )
        old = olds[i]
        bounds.check_product(
            results[i], a, one, [a.shape[0]], exact=exact, old=old, sfb_rows=sfb_rows, where=f"pair {i}"
        )
        assert torch.isnan(outs[i][[0, -1]]).all()


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_pairs(first):
    for seed in range(first, first + 10):
        random_pairs(seed)


def test_lists_vary_as_much_as_they_claim():
    """No GPU work: the seeds cover every kind of group."""
    sizes = [group_sizes(random.Random(seed), 1000) for seed in range(320)]
    assert {len(s) for s in sizes} >= {1, 2, 130}
    assert any(sum(s) == 0 for s in sizes)
    assert any(0 in s and sum(s) for s in sizes)
    assert any(1 in s for s in sizes)
    assert any(max(s) > 5 * (sum(s) / len(s)) > 0 for s in sizes)
    assert all(list(running_sum(s))[-1] <= 1000 or max(s) <= 3 for s in sizes)
