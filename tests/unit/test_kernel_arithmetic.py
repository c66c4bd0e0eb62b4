"""Where a kernel computes otherwise than the reference, that both come to the same. Without a GPU, step for step."""

from __future__ import annotations

import mx_oracle as oracle
import numpy as np
import pytest
import torch

from mxfp8_cutlass.elementwise import MAX_RUNS, run_map

both_types = pytest.mark.parametrize("dtype", oracle.FORMATS, ids=str)


def magnitudes(fmt):
    return np.arange(fmt.finite, dtype=np.uint8)


@both_types
def test_shift_in_halves_rounds_like_a_shift_in_one_step(dtype):
    """fp8.cuh, shift_finite: every finite element, every shift that does not overflow."""
    fmt = oracle.FORMATS[dtype]
    q = oracle.decode(magnitudes(fmt), fmt)
    for steps in range(-254, 48):
        fits = q * 2.0**steps <= fmt.table[-1]
        halves, left = q[fits].astype(np.float16), max(min(steps, 48), -48)
        while True:
            step = min(max(left, -14), 15)
            halves = halves * np.float16(2.0**step)
            left -= step
            if left == 0:
                break
        expected = oracle.encode(q[fits] * 2.0**steps, fmt)
        np.testing.assert_array_equal(oracle.encode(halves.astype(np.float64), fmt), expected)


@both_types
def test_one_rounding_serves_unless_the_result_is_subnormal(dtype):
    """quantize.cuh, store: when it need not round twice, for values up to dmax and larger shared scales."""
    fmt = oracle.FORMATS[dtype]
    bf16 = torch.arange(0, 0x7F80, dtype=torch.int16).view(torch.bfloat16).double().numpy()
    ties = (fmt.table[1:] + fmt.table[:-1]) / 2
    near = np.concatenate(
        [t * (1 + s * 2.0**-b) for t in (ties, fmt.table[1:]) for s in (-1, 1) for b in (3, 4, 5, 12, 23)]
    )
    first = np.concatenate([bf16, ties, fmt.table, near])
    first = first[(first <= fmt.table[-1]) & (first > 2.0**-40)]
    for steps in range(60):
        second_ties = np.concatenate(
            [ties[:16] * 2.0**steps * (1 + s) for s in (-0.06, -(2.0**-12), 0, 2.0**-12, 0.06)]
        )
        x = np.concatenate([first, second_ties[second_ties <= fmt.table[-1]]])
        once = oracle.encode(x * 2.0**-steps, fmt)
        twice = oracle.encode(oracle.decode(oracle.encode(x, fmt), fmt) * 2.0**-steps, fmt)
        trusted = (once == 0) | (once > 1 << fmt.mantissa)
        np.testing.assert_array_equal(once[trusted], twice[trusted])


@both_types
def test_finding_subnormals_in_words(dtype):
    """quantize.cuh, any_subnormal: all pairs of neighbouring bytes."""
    smallest_normal = 1 << oracle.FORMATS[dtype].mantissa
    low, high = (a.astype(np.uint32) for a in np.meshgrid(np.arange(256), np.arange(256)))
    magnitude = (low | high << 8 | low << 16 | high << 24) & 0x7F7F7F7F
    found = (magnitude + 0x7F7F7F7F) & ~(magnitude + 0x01010101 * (0x7F - smallest_normal)) & 0x80808080
    wanted = np.zeros_like(found, dtype=bool)
    for byte in (low & 0x7F, high & 0x7F):
        wanted |= (byte >= 1) & (byte <= smallest_normal)
    np.testing.assert_array_equal(found != 0, wanted)


@both_types
def test_finding_nonfinite_elements_in_words(dtype):
    """fp8.cuh, nonfinite_mask: all pairs of neighbouring bytes."""
    finite = oracle.FORMATS[dtype].finite
    low, high = (a.astype(np.uint32) for a in np.meshgrid(np.arange(256), np.arange(256)))
    word = low | high << 8 | low << 16 | high << 24
    carry = ((word & 0x7F7F7F7F) + 0x01010101 * (0x80 - finite)) & 0x80808080
    wanted = np.where((low & 0x7F) >= finite, 0x00800080, 0) | np.where((high & 0x7F) >= finite, 0x80008000, 0)
    np.testing.assert_array_equal(carry, wanted)


@both_types
def test_needed_scale_from_the_bits(dtype):
    """fp8.cuh, needed_scale: exponent, plus one for mantissas above 1.75, for every magnitude."""
    fmt = oracle.FORMATS[dtype]
    q = oracle.decode(magnitudes(fmt)[1:], fmt)
    by_bits = (q.astype(np.float32).view(np.uint32) + 0x1FFFFF >> 23).astype(int) - 127 - fmt.emax
    smallest = np.ceil(np.log2(q / fmt.table[-1])).astype(int)
    np.testing.assert_array_equal(by_bits, smallest)


@pytest.mark.parametrize(
    "runs_per_row", [1, 2, 3, 5, 7, 23, 127, 128, 129, 1000, 65535, 65537, 2**20 + 1, 2**29 - 1, 2**30]
)
def test_dividing_run_numbers(runs_per_row):
    """run_map.cuh, locate: row = run * multiplier >> shift."""
    runs = run_map(3, 4 * runs_per_row - 1)  # rows that end with a short run
    assert runs.runs_per_row == runs_per_row
    edges = np.array([0, 1, 2**30, MAX_RUNS, 2**31 - 1], dtype=object)
    multiples = np.array(
        [m * runs_per_row + d for m in (1, 2, 3, 1000, 2**31 // runs_per_row - 1) for d in (-1, 0, 1)], dtype=object
    )
    for run in (int(n) for n in np.concatenate([edges, multiples])):
        if 0 <= run < 2**31:
            assert run * runs.multiplier >> runs.shift == run // runs_per_row


def test_run_maps():
    full = run_map(300, 8)
    assert (full.row_blocks, full.runs, full.runs_per_row) == (8, 600, 2)
    short = run_map(300, 5)
    assert (short.row_blocks, short.runs, short.runs_per_row) == (5, 600, 2)
    assert (run_map(0, 5).runs, run_map(0, 8).runs) == (0, 0)
