"""The kernel that writes an SM100 GEMM's arrays from offs: its own code on a CPU, and on a GPU where there is one."""

from __future__ import annotations

import random

import kernel_emulator
import pytest
import torch
from sm100_groups import BASES, Case, expected, random_case

from mxfp8_cutlass.generator.sm100_launch_config import Sm100ArgumentsConfig
from mxfp8_cutlass.kernel import current_stream, load, target_of
from mxfp8_cutlass.sm100_arguments import GroupArrays, Sm100ArgumentsParams

COMPILER = kernel_emulator.find_compiler()
CONFIG = Sm100ArgumentsConfig("90a")
POISON = 0xA5


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("no g++ with _Float16")
    return kernel_emulator.Kernels(COMPILER, tmp_path_factory.mktemp("kernels"), [CONFIG])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


@pytest.fixture
def run(request, device):
    """A function that runs the kernel on its argument."""
    if device.type == "cpu":
        kernels = request.getfixturevalue("emulated")
        return lambda params, grid=1: kernels.launch(CONFIG, params, grid, device)
    index = torch.cuda.current_device()
    kernel = load(Sm100ArgumentsConfig(target_of(index)), index)
    return lambda params, grid=1: kernel.launch(params, grid, current_stream(index))


def arrays_of(run, case: Case, index: torch.Tensor | None, device: torch.device) -> dict[str, list[list[int]]]:
    """The arrays that the kernel writes."""
    arrays = GroupArrays(case.groups)
    memory = torch.full((arrays.nbytes,), POISON, dtype=torch.uint8, device=device)
    index = None if index is None else index.to(device)
    params = case.params(index)
    arrays.set_addresses(params, memory.data_ptr())
    run(params)
    return {field: arrays.view(memory, field).tolist() for field in arrays.places}


def check(found: dict[str, list[list[int]]], case: Case) -> None:
    for field, entries in expected(case).items():
        assert found[field] == entries, (field, case)


@pytest.mark.parametrize("seed", range(300))
def test_arrays_are_those_of_the_reference(run, device, seed):
    rng = random.Random(seed)
    case = random_case(rng)
    check(arrays_of(run, case, case.index(rng.choice([torch.int32, torch.int64])), device), case)


@pytest.mark.parametrize("cuts_k", [False, True])
@pytest.mark.parametrize("sizes", [[0], [0, 0, 0], [5, 0, 0], [0, 0, 5], [128, 128], [127, 1, 0, 129]])
def test_groups_of_nothing_have_no_tile(run, device, sizes, cuts_k):
    tokens = sum(sizes)
    shape = (64, 48, 128 * (tokens // 128 + len(sizes))) if cuts_k else (tokens, 48, 96)
    case = Case(sizes, len(sizes), shape, cuts_k=cuts_k, tokens=tokens, out_bytes=2)
    found = arrays_of(run, case, case.index(torch.int32), device)
    check(found, case)
    assert [row[0] == 0 for row in found["shapes"]] == [size == 0 for size in sizes]


def test_bytes_beyond_2_to_the_31(run, device):
    case = Case([70_000, 1, 200_000], 3, (300_000, 28_672, 16_384), cuts_k=False, tokens=300_000, out_bytes=4)
    check(arrays_of(run, case, case.index(torch.int64), device), case)


@pytest.mark.parametrize("cuts_k", [False, True])
@pytest.mark.parametrize("ends", [[100, 50, 200], [-5, 100, 1000], [1 << 40, 3, 7]])
def test_wrong_offs_address_nothing_outside(run, device, ends, cuts_k):
    tokens = 200
    shape = (64, 48, 128 * (tokens // 128 + 3)) if cuts_k else (tokens, 48, 96)
    case = Case([0, 0, 0], 3, shape, cuts_k=cuts_k, tokens=tokens, out_bytes=2)
    found = arrays_of(run, case, torch.tensor(ends, dtype=torch.int64), device)
    for (m, _, k), (a,) in zip(found["shapes"], found["a"], strict=True):
        row, column = divmod(a - BASES.a, shape[2])
        assert row >= 0
        assert column >= 0
        assert row + m <= shape[0]
        assert column + k <= shape[2] or m == 0


def test_wrong_counts_address_nothing_outside(run, device):
    case = Case([0, 0, 0], 3, (100, 48, 96), cuts_k=False, tokens=0, out_bytes=2, counted=True)
    found = arrays_of(run, case, torch.tensor([-1, 101, 1 << 40]), device)
    assert [m for m, _, _ in found["shapes"]] == [0, 100, 100]


@pytest.mark.parametrize("grid", [1, 3])
@pytest.mark.parametrize("out_bytes", [2, 4])
def test_products_of_no_tokens_are_written_as_zeros(run, device, out_bytes, grid):
    """And no other: those are a GEMM's to write."""
    sizes, (n, k) = [0, 5, 0, 0, 130], (48, 80)
    shape = (n, k, 128 * (sum(sizes) // 128 + len(sizes)))
    case = Case(sizes, len(sizes), shape, cuts_k=True, tokens=sum(sizes), out_bytes=out_bytes)
    arrays = GroupArrays(case.groups)
    memory = torch.full((arrays.nbytes,), POISON, dtype=torch.uint8, device=device)
    guard, nbytes = 256, n * k * out_bytes
    out = torch.full((guard + len(sizes) * nbytes + guard,), POISON, dtype=torch.uint8, device=device)
    index = case.index(torch.int32).to(device)
    params: Sm100ArgumentsParams = case.params(index, BASES._replace(out=out.data_ptr() + guard))
    params.writes_zeros = 1
    arrays.set_addresses(params, memory.data_ptr())
    run(params, grid)
    assert bool((out[:guard] == POISON).all())
    assert bool((out[-guard:] == POISON).all())
    for size, matrix in zip(sizes, out[guard:-guard].view(len(sizes), nbytes), strict=True):
        assert bool((matrix == (0 if size == 0 else POISON)).all())
