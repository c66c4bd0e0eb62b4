"""What a cubin's code consists of, without a disassembler: operation codes of SM100's 16-byte instructions.

The codes are no public knowledge: test_sm100_code.py compiles a single PTX instruction of each kind and looks for them.
"""

from __future__ import annotations

import struct
from collections import Counter

BLOCK_SCALED_MMA = 0xDEA
"""tcgen05.mma.kind::mxf8f6f4.block_scale; UTCQMMA with an address of scales in tensor memory."""
PLAIN_MMA = 0x5EA
"""tcgen05.mma of all other kinds that were tried: f8f6f4, mxf4.block_scale, i8."""
LOCAL_LOAD = 0x983
LOCAL_STORE = 0x387
PAIR = 1 << 21
"""Bit of an MMA's second word: cta_group::2."""


def instructions(code: bytes, kernel: str) -> list[tuple[int, int]]:
    """The two words of each instruction of a kernel, from the section ``.text.KERNEL`` of an ELF image."""
    (table,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names = struct.unpack_from("<HHH", code, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", code, table + i * size) for i in range(count)]
    strings = sections[names][4]
    for name, _, _, _, offset, length in sections:
        start = strings + name
        if code[start : code.index(b"\0", start)].decode() == f".text.{kernel}":
            words = struct.unpack_from(f"<{length // 8}Q", code, offset)
            return list(zip(words[::2], words[1::2], strict=True))
    raise AssertionError(f"no kernel {kernel} in the cubin")


def operations(code: bytes, kernel: str) -> Counter[int]:
    """How often each operation code stands in a kernel."""
    return Counter(first & 0xFFF for first, _ in instructions(code, kernel))


def pair_mmas(code: bytes, kernel: str) -> int:
    """How many block-scaled MMAs of a kernel are those of a pair of SMs."""
    words = instructions(code, kernel)
    return sum(bool(second & PAIR) for first, second in words if first & 0xFFF == BLOCK_SCALED_MMA)
