"""swizzle_scales and unswizzle_scales, bit for bit: reference, the kernels on a CPU, the kernels on a GPU."""

from __future__ import annotations

import ctypes
import itertools
import mmap

import kernel_emulator
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mxfp8_cutlass import env, scale_layout
from mxfp8_cutlass.generator.elementwise_config import swizzle_configs
from mxfp8_cutlass.generator.tile_config import MAX_GROUPS
from mxfp8_cutlass.scale_layout import swizzle_scales, swizzled_shape, unswizzle_scales

EMULATOR_COMPILER = kernel_emulator.find_compiler()
POISON, MARGIN = 0xA5, 1024
SHAPES = [(1, 1), (5, 2), (128, 4), (130, 5), (300, 33), (129, 128), (40, 131), (3, 70, 9), (2, 256, 8), (1, 1, 300)]
hypothesis_settings = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class PoisonedTorch:
    """torch for the module under test: what torch.empty gives is poisoned, and so are the bytes on either side."""

    def __init__(self) -> None:
        self.pools: list[tuple[torch.Tensor, int]] = []

    def empty(self, shape, *, dtype, device):
        count = torch.Size(shape).numel()
        pool = torch.full((count + 2 * MARGIN,), POISON, dtype=torch.uint8, device=device)
        self.pools.append((pool, count))
        return pool[MARGIN : MARGIN + count].view(dtype).view(shape)

    def check_margins(self) -> None:
        for pool, count in self.pools:
            assert (pool[:MARGIN] == POISON).all()
            assert (pool[MARGIN + count :] == POISON).all()
        self.pools.clear()

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    if EMULATOR_COMPILER is None:
        pytest.skip("no g++ with _Float16")
    return kernel_emulator.Kernels(EMULATOR_COMPILER, tmp_path_factory.mktemp("kernels"), swizzle_configs("90a"))


@pytest.fixture(params=["reference", "kernels on CPU", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Where the tensors lie; on the CPU, with the reference or with the kernels' source compiled for it."""
    poisoned = PoisonedTorch()
    monkeypatch.setattr(scale_layout, "torch", poisoned)
    monkeypatch.delenv(env.CHECK, raising=False)
    if request.param == "kernels on CPU":
        emulated = request.getfixturevalue("emulated")
        monkeypatch.setattr(scale_layout, "launch", emulated.launch)
        monkeypatch.setattr(scale_layout, "target_of", lambda device: "90a")
        monkeypatch.setattr(scale_layout, "_on_cuda", lambda x: True)
    yield torch.device("cuda" if request.param == "cuda" else "cpu")
    poisoned.check_margins()


def offset_in_tiles(row: int, block: int, blocks: int) -> int:
    """DESIGN's formula, per byte."""
    return (row // 128 * -(-blocks // 4) + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


def by_formula(pieces: list[np.ndarray], size: int) -> np.ndarray:
    """The blocked buffer for matrices that lie one after the other, each padded by itself."""
    out, begin = np.zeros(size, np.uint8), 0
    for piece in pieces:
        for row, block in itertools.product(*map(range, piece.shape)):
            out[begin + offset_in_tiles(row, block, piece.shape[1])] = piece[row, block]
        begin += -(-piece.shape[0] // 128) * 128 * -(-piece.shape[1] // 4) * 4
    assert begin <= size
    return out


def random_scales(shape, seed=0):
    return np.random.default_rng(seed).integers(1, 256, shape, dtype=np.uint8)


def on(device, array, shift=0):
    """The array in a tensor that starts `shift` bytes after an aligned address."""
    memory = torch.zeros(array.size + shift, dtype=torch.uint8, device=device)
    tensor = memory[shift:].view(array.shape)
    return tensor.copy_(torch.from_numpy(array))


def check(device, compact, pieces, used, offs=None, groups="rows", shift=0, offs_dtype=torch.int32):
    """Both directions: `pieces` are the groups' scales, `used` is the compact tensor without what no group has."""
    n_groups = None
    if offs is not None:
        n_groups, offs = len(offs), torch.tensor(offs, dtype=offs_dtype, device=device)
    swizzled = swizzle_scales(on(device, compact, shift), offs, groups=groups)
    assert tuple(swizzled.shape) == swizzled_shape(compact.shape, n_groups, groups)
    np.testing.assert_array_equal(swizzled.cpu().numpy().ravel(), by_formula(pieces, swizzled.numel()))
    back = unswizzle_scales(swizzled, compact.shape, offs, groups=groups)
    np.testing.assert_array_equal(back.cpu().numpy(), used)


def check_row_groups(device, sizes, blocks, tail, **options):
    compact = random_scales((sum(sizes) + tail, blocks), seed=sum(sizes))
    ends = np.cumsum(sizes)
    pieces = [compact[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    used = compact.copy()
    used[ends[-1] :] = 0
    check(device, compact, pieces, used, ends.tolist(), "rows", **options)


def check_block_groups(device, rows, sizes, tail, **options):
    """Sizes in elements, `tail` in blocks."""
    blocks = [-(-size // 32) for size in sizes]
    compact = random_scales((rows, sum(blocks) + tail), seed=sum(sizes))
    ends = np.cumsum(blocks)
    pieces = [compact[:, end - count : end] for count, end in zip(blocks, ends, strict=True)]
    used = compact.copy()
    used[:, ends[-1] :] = 0
    check(device, compact, pieces, used, np.cumsum(sizes).tolist(), "blocks", **options)


@pytest.mark.parametrize("shift", [0, 1, 4])
def test_without_groups(device, shift):
    for shape in SHAPES:
        compact = random_scales(shape)
        check(device, compact, list(compact.reshape(-1, *shape[-2:])), compact, shift=shift)


ROW_SIZES = st.lists(
    st.one_of(st.just(0), st.integers(1, 5), st.integers(120, 140), st.integers(0, 300)), min_size=1, max_size=6
)
BLOCK_SIZES = st.lists(
    st.one_of(st.just(0), st.integers(1, 33), st.integers(120, 140), st.integers(0, 2000)), min_size=1, max_size=6
)


@hypothesis_settings
@given(ROW_SIZES, st.integers(1, 10), st.integers(0, 300), st.integers(0, 4))
@example([0], 1, 0, 0)
@example([0, 0], 3, 200, 0)
@example([128, 0, 256], 4, 0, 0)
@example([1], 4, 127, 0)
def test_groups_of_rows(device, sizes, blocks, tail, shift):
    check_row_groups(device, sizes, blocks, tail, shift=shift)


@hypothesis_settings
@given(st.integers(0, 300), BLOCK_SIZES, st.integers(0, 9), st.integers(0, 4))
@example(5, [0], 0, 0)
@example(130, [0, 0], 7, 0)
@example(128, [128, 0, 256], 0, 0)
@example(40, [128, 32, 96, 4000], 4, 0)
@example(40, [1], 3, 0)
def test_groups_of_blocks(device, rows, sizes, tail, shift):
    check_block_groups(device, rows, sizes, tail, shift=shift)


def test_many_groups(device):
    """More than there are threads in a CTA."""
    sizes = np.random.default_rng(0).integers(0, 3, 700).tolist()
    check_row_groups(device, [*sizes[:300], 200, *sizes[300:]], 5, 9, offs_dtype=torch.int64)
    check_block_groups(device, 3, [32 * size for size in sizes], 9, offs_dtype=torch.int64)
    check_block_groups(device, 130, [1] * MAX_GROUPS, 0)


@pytest.mark.parametrize("device", ["kernels on CPU"], indirect=True)
def test_every_kernel_is_reached(device, emulated):
    emulated.launched.clear()
    check_row_groups(device, [1], 1, 0)
    check_block_groups(device, 1, [1], 0)
    assert set(emulated.launched) == {config.name for config in swizzle_configs("90a")}


@pytest.mark.parametrize("device", ["kernels on CPU"], indirect=True)
@pytest.mark.parametrize("blocks", [4, 5, 13])
@pytest.mark.parametrize("used", [1, 130, 256])
def test_reads_no_row_behind_the_last_group(device, blocks, used):
    """Those rows, and what follows the tensor, lie in memory that kills a process that reads it."""
    pages = -(-used * blocks // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    compact = whole[pages * mmap.PAGESIZE - used * blocks :][: (used + 9) * blocks].view(-1, blocks)
    values = random_scales((used, blocks))
    compact[:used] = torch.from_numpy(values)
    guard = ctypes.c_void_p(whole.data_ptr() + pages * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    half = used // 2
    for tensor in (compact, compact[:used]):
        swizzled = swizzle_scales(tensor, torch.tensor([half, used]))
        expected = by_formula([values[:half], values[half:]], swizzled.numel())
        np.testing.assert_array_equal(swizzled.numpy().ravel(), expected)


def test_rows_wider_than_a_cta(device):
    check_row_groups(device, [100, 0, 129], 270, 60)
    check_row_groups(device, [3, 200], 264, 0)
    check_block_groups(device, 200, [32 * 130, 5, 0, 32 * 270], 3)
    check_block_groups(device, 100, [128 * 40, 128 * 33], 8)


@pytest.mark.parametrize("dtype", scale_layout.SCALE_DTYPES, ids=str)
def test_types_are_kept(device, dtype):
    compact = on(device, random_scales((50, 6))).view(dtype)
    offs = torch.tensor([20, 50], device=device)
    swizzled = swizzle_scales(compact, offs)
    back = unswizzle_scales(swizzled, (50, 6), offs)
    assert (swizzled.dtype, back.dtype) == (dtype, dtype)
    assert torch.equal(back.view(torch.uint8), compact.view(torch.uint8))


@pytest.mark.parametrize(("rows", "blocks"), [(0, 3), (7, 0), (0, 0)])
def test_nothing(device, rows, blocks):
    compact = random_scales((rows, blocks))
    check(device, compact, [compact], compact)
    check(device, compact, [compact[:0]], compact, [0], "rows") if rows == 0 else None
    check(device, compact, [compact[:, :0]], compact, [0], "blocks") if blocks == 0 else None


@pytest.mark.parametrize("total", range(9))
@pytest.mark.parametrize("n_groups", [1, 2, 3])
@pytest.mark.parametrize("groups", ["rows", "blocks"])
def test_room_is_what_the_worst_sizes_need(total, n_groups, groups, monkeypatch):
    monkeypatch.setattr(scale_layout, "TILE_ROWS", 4)  # as few as blocks, so that all sizes can be tried
    shape = (total, 1) if groups == "rows" else (1, total)
    sizes = [s for s in itertools.product(range(total + 1), repeat=n_groups) if sum(s) <= total]
    worst = max(sum(-(-size // 4) * 4 for size in each) for each in sizes)
    assert swizzled_shape(shape, n_groups, groups)[0 if groups == "rows" else 1] == worst


WRONG_ENDS = [[5, 3, 9], [-4, 4, 8], [8, 200, 9], [300, 300, 300], [9, 2**31 - 1, 0], [1, 0, 1], [-9, -8, -7]]


@pytest.mark.parametrize("ends", WRONG_ENDS, ids=str)
@pytest.mark.parametrize("groups", ["rows", "blocks"])
def test_wrong_ends_touch_nothing_else(device, ends, groups, request):
    """The device fixture looks at what surrounds the results; the emulator's process would not survive wild reads."""
    compact = on(device, random_scales((9, 7)))
    offs = torch.tensor([32 * end if groups == "blocks" and end < 2**20 else end for end in ends], device=device)
    if "reference" in request.node.name:
        with pytest.raises(ValueError, match=r"offs is \["):
            swizzle_scales(compact, offs, groups=groups)
        return
    swizzled = swizzle_scales(compact, offs, groups=groups)
    unswizzle_scales(swizzled, (9, 7), offs, groups=groups)


@pytest.mark.parametrize(
    ("ends", "groups", "message"),
    [
        ([5, 3, 9], "rows", r"offs is \[5, 3, 9\]: its values must not decrease, nor be negative"),
        ([-1, 3, 9], "rows", "must not decrease, nor be negative"),
        ([5, 6, 10], "rows", r"offs is \[5, 6, 10\]: its values must not exceed the rows, 9"),
        ([64, 32, 64], "blocks", "must not decrease, nor be negative"),
        ([1, 2, 194], "blocks", r"offs is \[1, 2, 194\]: its groups have 8 blocks, and the scales have 7"),
    ],
)
def test_values_of_ends_are_checked_on_request(device, ends, groups, message, monkeypatch):
    monkeypatch.setenv(env.CHECK, "1")
    compact, offs = on(device, random_scales((9, 7))), torch.tensor(ends, device=device)
    swizzled = torch.zeros(swizzled_shape((9, 7), 3, groups), dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=message):
        swizzle_scales(compact, offs, groups=groups)
    with pytest.raises(ValueError, match=message):
        unswizzle_scales(swizzled, (9, 7), offs, groups=groups)


@pytest.mark.gpu
def test_needs_an_aligned_buffer():
    swizzled = torch.zeros(512 + 4, dtype=torch.uint8, device="cuda")[4:].view(128, 4)
    with pytest.raises(ValueError, match=r"swizzled starts at address 0x\w+: it must be aligned to 16 bytes"):
        unswizzle_scales(swizzled, (9, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("groups", ["rows", "blocks"])
def test_graph_replays_with_other_sizes(groups):
    """Nothing waits for the device, and the captured launch reads the sizes anew."""
    compact = on("cuda", random_scales((900, 70)))
    first, second = ([100, 100, 700], [1, 513, 900]) if groups == "rows" else ([64, 100, 2000], [0, 1000, 2200])
    offs = torch.tensor(first, device="cuda")
    unswizzle_scales(swizzle_scales(compact, offs, groups=groups), (900, 70), offs, groups=groups)  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            swizzled = swizzle_scales(compact, offs, groups=groups)
            back = unswizzle_scales(swizzled, (900, 70), offs, groups=groups)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    offs.copy_(torch.tensor(second))
    graph.replay()
    expected = swizzle_scales(compact.cpu(), offs.cpu(), groups=groups)
    assert torch.equal(swizzled.cpu(), expected)
    assert torch.equal(back.cpu(), unswizzle_scales(expected, (900, 70), offs.cpu(), groups=groups))
