"""The kernel that writes an SM100 GEMM's arrays from offs: its own code on a CPU, and on a GPU where there is one."""

from __future__ import annotations

import random

import kernel_emulator
import pytest
import torch
from sm100_groups import BASES, Case, expected, random_case

from mxfp8_cutlass.generator.sm100_launch_config import Sm100ArgumentsConfig
from mxfp8_cutlass.kernel import current_stream, load, target_of
from mxfp8_cutlass.sm100_arguments import GroupArrays

COMPILER = kernel_emulator.find_compiler()
CONFIG = Sm100ArgumentsConfig("90a")
POISON = 0xA5


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("no g++ with _Float16")
    return kernel_emulator.Kernels(COMPILER, tmp_path_factory.mktemp("kernels"), [CONFIG])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def arrays_of(request):
    """A function that runs the kernel on a case and gives the arrays."""
    device = torch.device(request.param)
    kernels = request.getfixturevalue("emulated") if device.type == "cpu" else None

    def run(case: Case, offs: torch.Tensor | None) -> GroupArrays:
        arrays = GroupArrays(case.groups, device)
        arrays.memory.fill_(POISON)
        offs = None if offs is None else offs.to(device)
        tokens = None if case.sizes is None else case.tokens
        params = arrays.params(case.shape, BASES, offs, cuts_k=case.cuts_k, tokens=tokens, out_bytes=case.out_bytes)
        if kernels is not None:
            kernels.launch(CONFIG, params, 1, device)
        else:
            index = torch.cuda.current_device()
            load(Sm100ArgumentsConfig(target_of(index)), index).launch(params, 1, current_stream(index))
        return arrays

    return run


def check(arrays: GroupArrays, case: Case) -> None:
    for field, entries in expected(case).items():
        assert arrays.view(field).tolist() == entries, (field, case)


@pytest.mark.parametrize("seed", range(300))
def test_arrays_are_those_of_the_reference(arrays_of, seed):
    rng = random.Random(seed)
    case = random_case(rng)
    check(arrays_of(case, case.offs(rng.choice([torch.int32, torch.int64]))), case)


@pytest.mark.parametrize("cuts_k", [False, True])
@pytest.mark.parametrize("sizes", [[0], [0, 0, 0], [5, 0, 0], [0, 0, 5], [128, 128], [127, 1, 0, 129]])
def test_groups_of_nothing_have_no_tile(arrays_of, sizes, cuts_k):
    tokens = sum(sizes)
    shape = (64, 48, 128 * (tokens // 128 + len(sizes))) if cuts_k else (tokens, 48, 96)
    case = Case(sizes, len(sizes), shape, cuts_k=cuts_k, tokens=tokens, out_bytes=2)
    arrays = arrays_of(case, case.offs(torch.int32))
    check(arrays, case)
    assert [row[0] == 0 for row in arrays.view("shapes").tolist()] == [size == 0 for size in sizes]


def test_bytes_beyond_2_to_the_31(arrays_of):
    case = Case([70_000, 1, 200_000], 3, (300_000, 28_672, 16_384), cuts_k=False, tokens=300_000, out_bytes=4)
    check(arrays_of(case, case.offs(torch.int64)), case)


@pytest.mark.parametrize("cuts_k", [False, True])
@pytest.mark.parametrize("ends", [[100, 50, 200], [-5, 100, 1000], [1 << 40, 3, 7]])
def test_wrong_offs_address_nothing_outside(arrays_of, ends, cuts_k):
    tokens = 200
    shape = (64, 48, 128 * (tokens // 128 + 3)) if cuts_k else (tokens, 48, 96)
    case = Case([0, 0, 0], 3, shape, cuts_k=cuts_k, tokens=tokens, out_bytes=2)
    arrays = arrays_of(case, torch.tensor(ends, dtype=torch.int64))
    for (m, _, k), (a,) in zip(arrays.view("shapes").tolist(), arrays.view("a").tolist(), strict=True):
        row, column = divmod(a - BASES.a, shape[2])
        assert row >= 0
        assert column >= 0
        assert row + m <= shape[0]
        assert column + k <= shape[2] or m == 0
