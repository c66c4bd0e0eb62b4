"""The exact kernel's conversion of FP8 to BF16, compiled for a CPU: values, the order of K, banks of shared memory."""

from __future__ import annotations

import ctypes
import subprocess

import mx_oracle as oracle
import numpy as np
import pytest
from kernel_emulator import EMULATOR, OPTIONS, find_compiler

from mxfp8_cutlass.templates import INCLUDE

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no g++ that knows _Float16")
both_types = pytest.mark.parametrize("dtype", oracle.FORMATS, ids=str)

SOURCE = """
#include "cuda_on_cpu.h"
#include "mxfp8/fp8_to_bf16.cuh"
using namespace mxfp8;

template <class F> void facts(u32* out) { out[0] = ToBf16<F>::kLowest; out[1] = ToBf16<F>::kHighest; }
template <class F> u32 range(u32 bytes) { return ToBf16<F>::too_high(bytes) >> 7 | ToBf16<F>::too_low(bytes) >> 6; }
template <class F> void b_row(const u8* row, u32 scales, u8* out, int index) {
  uint4 raw[4];
  for (int t = 0; t < 4; ++t) raw[t] = *reinterpret_cast<const uint4*>(row + 16 * t);
  convert_row<F>(raw, scales, out, index);
}
template <class F, int Steps> void a_steps(const u8* row0, const u8* row1, const u32* scales, int first, u32* out) {
  uint4 raw[2] = {*reinterpret_cast<const uint4*>(row0), *reinterpret_cast<const uint4*>(row1)};
  u32 factors[2] = {ToBf16<F>::factor(scales[0]), ToBf16<F>::factor(scales[1])};
  u32 (&fragments)[4 * Steps] = *reinterpret_cast<u32 (*)[4 * Steps]>(out);
  if (ToBf16<F>::nonfinite(convert_steps<F, Steps>(raw, factors, first, fragments)))
    mend_steps<F, Steps>(raw, first, fragments);
}
extern "C" {
void facts_e4m3(u32* out) { facts<E4M3>(out); }
void facts_e5m2(u32* out) { facts<E5M2>(out); }
u32 range_e4m3(u32 bytes) { return range<E4M3>(bytes); }
u32 range_e5m2(u32 bytes) { return range<E5M2>(bytes); }
void b_row_e4m3(const u8* row, u32 scales, u8* out, int index) { b_row<E4M3>(row, scales, out, index); }
void b_row_e5m2(const u8* row, u32 scales, u8* out, int index) { b_row<E5M2>(row, scales, out, index); }
void a_steps_e4m3(const u8* x, const u8* y, const u32* s, int w, u32* out) { a_steps<E4M3, 2>(x, y, s, w, out); }
void a_steps_e5m2(const u8* x, const u8* y, const u32* s, int w, u32* out) { a_steps<E5M2, 2>(x, y, s, w, out); }
int place(int row, int chunk) { return swizzled(row, chunk); }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exact")
    source, target = folder / "exact.cpp", folder / "exact.so"
    source.write_text(SOURCE)
    command = [find_compiler(), *OPTIONS, f"-I{EMULATOR}", f"-I{INCLUDE}", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(target))


class Converter:
    """The functions of one format, on numpy arrays."""

    def __init__(self, library, dtype):
        self.name = "e4m3" if "e4m3" in str(dtype) else "e5m2"
        self.library, self.format = library, oracle.FORMATS[dtype]
        self.lowest, self.highest = self._facts()

    def _call(self, function, *arguments):
        pointers = [a.ctypes.data_as(ctypes.c_void_p) if isinstance(a, np.ndarray) else a for a in arguments]
        return getattr(self.library, f"{function}_{self.name}")(*pointers)

    def _facts(self):
        out = np.zeros(2, dtype=np.uint32)
        self._call("facts", out)
        return (int(value) for value in out)

    def too_high_or_low(self, word):
        return self._call("range", ctypes.c_uint(word)) & 0xFFFFFFFF

    def values(self, data, scales):
        """In float64: elements (..., K) times the scales of their blocks (..., K / 32)."""
        magnitude = np.append(self.format.table, [np.nan] * 128)[:128]
        if self.name == "e5m2":
            magnitude[0x7C] = np.inf
        return np.where(data & 0x80, -1.0, 1.0) * magnitude[data & 0x7F] * (2.0 ** (scales - 127.0)).repeat(32, -1)

    def b_row(self, row, scales, index=0):
        """64 elements of a row to the tile's row of that index: BF16 as wgmma reads it, step by step."""
        out = np.zeros((8, 128), dtype=np.uint8)
        self._call("b_row", row, int(scales[0]) | int(scales[1]) << 8, out, index)
        assert not np.delete(out, index, 0).any()
        chunks = out[index].reshape(8, 16)[[chunk ^ index for chunk in range(8)]]
        return as_doubles(chunks.reshape(-1).view(np.uint16)).reshape(4, 16)

    def a_steps(self, rows, scales, first):
        """16 elements each of two rows to the fragments of two steps: (step, register, half)."""
        out = np.zeros(8, dtype=np.uint32)
        scales = np.asarray(scales, dtype=np.uint32)
        self._call("a_steps", rows[0], rows[1], scales, first, out)
        return as_doubles(out.view(np.uint16)).reshape(2, 4, 2)


def as_doubles(bf16):
    with np.errstate(invalid="ignore"):  # signalling NaNs become quiet ones
        return (bf16.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.fixture
def converter(library, dtype):
    return Converter(library, dtype)


@both_types
def test_every_element_under_every_scale_is_exact(converter):
    row = np.arange(64, dtype=np.uint8)
    for first in range(0, 256, 64):
        data = row + np.uint8(first)
        for scale in range(converter.lowest, converter.highest + 1):
            scales = np.array([scale, converter.highest + converter.lowest - scale])
            expected = converter.values(data, scales)
            np.testing.assert_array_equal(np.sort(converter.b_row(data, scales).ravel()), np.sort(expected))


@both_types
def test_limits_of_scales_are_tight(converter):
    """One scale further down rounds the least element away; one further up has no BF16 factor."""
    least = np.full(64, 1, dtype=np.uint8)
    exact = converter.values(least, np.array([converter.lowest] * 2))
    assert (converter.b_row(least, [converter.lowest] * 2) == exact[0]).all()
    below = [converter.lowest - 1] * 2
    assert (converter.b_row(least, below) != converter.values(least, np.array(below))[0]).all()
    bias = 127 - (7 if converter.name == "e4m3" else 15)
    assert bias + converter.highest == 254


@both_types
def test_words_of_scales_out_of_range_are_found(converter):
    for byte in range(256):
        for place in range(4):
            word = (0x7F7F7F7F & ~(0xFF << 8 * place)) | byte << 8 * place
            expected = (byte > converter.highest) | (byte < converter.lowest) << 1
            assert converter.too_high_or_low(word) == expected << 8 * place


@both_types
def test_fragments_and_tile_agree_on_the_order_of_k(converter):
    """Step by step, the products of A's fragments with the row of B that wgmma reads sum up to the dot product."""
    rng = np.random.default_rng(1)
    finite = converter.format.finite
    for index in range(8):
        a, b = (rng.integers(0, finite, (n, 64), dtype=np.uint8) for n in (2, 1))
        a, b = (x | rng.choice([0, 0x80], x.shape).astype(np.uint8) for x in (a, b))
        scales_a, scales_b = rng.integers(110, 126, (2, 2)), rng.integers(110, 126, (1, 2))
        columns = converter.b_row(b[0], scales_b[0], index)
        sums = np.zeros(2)
        for t in range(4):  # a quad's lanes
            mine = np.ascontiguousarray(a[:, 16 * t : 16 * t + 16])
            for first in (0, 2):
                fragments = converter.a_steps(mine, scales_a[:, t // 2], first)
                for step in range(2):
                    for row in range(2):  # registers: rows alternate, the second two are 8 places on
                        sums[row] += fragments[step, row] @ columns[first + step, 2 * t : 2 * t + 2]
                        sums[row] += fragments[step, 2 + row] @ columns[first + step, 8 + 2 * t : 10 + 2 * t]
        expected = converter.values(a, scales_a) @ converter.values(b, scales_b)[0]
        np.testing.assert_allclose(sums, expected, rtol=1e-12)


@both_types
def test_infinities_and_nans_of_fragments(converter):
    for byte in range(256):
        rows = [np.zeros(16, dtype=np.uint8), np.full(16, byte, dtype=np.uint8)]
        rows[0][5] = byte  # step 1, an odd byte
        fragments = converter.a_steps(rows, [120, 120], 0)
        value = converter.values(np.array([byte] * 32, dtype=np.uint8), np.array([120]))[0]
        np.testing.assert_array_equal(fragments[:, 1::2], np.full((2, 2, 2), value))
        expected = np.zeros((2, 2, 2))
        expected[1, 1, 0] = value
        np.testing.assert_array_equal(fragments[:, 0::2], expected)


def conflict_free(addresses, size):
    """Whether each 128 bytes of a warp's access of `size` bytes a lane use each of the 32 banks once."""
    lanes = 128 // size
    return all(
        len({(address + 4 * word) // 4 % 32 for address in addresses[i : i + lanes] for word in range(size // 4)}) == 32
        for i in range(0, 32, lanes)
    )


def test_shared_memory_accesses_have_no_bank_conflicts(library):
    place = library.place
    for warp in range(4):
        for chunk in range(8):  # the converter: a row a lane, whole chunks, read and written
            assert conflict_free([place(32 * warp + lane, chunk) for lane in range(32)], 16)
        for half in range(2):  # a consumer's 16 bytes: a row for each 4 lanes, the ends of its bits swapped
            rows = [(g & 2) | (g & 1) << 2 | g >> 2 for g in range(8)]
            assert sorted(rows) == list(range(8))
            for further in (0, 8):
                lanes = [place(16 * warp + rows[x // 4] + further, 4 * half + x % 4) for x in range(32)]
                assert conflict_free(lanes, 16)
                assert lanes == [
                    (place(16 * warp + rows[x // 4], x % 4) ^ (64 * half)) + 128 * further for x in range(32)
                ]
        for chunk in range(8):  # fragments of the extreme way: words
            assert conflict_free([place(8 * warp + x // 4, chunk) + 4 * (x % 4) for x in range(32)], 4)
