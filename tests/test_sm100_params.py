"""The parameters of SM100 kernels, against those of CUTLASS's own host code: it needs nvcc, and the device's a GPU."""

from __future__ import annotations

import ctypes
from functools import cache

import pytest
import torch
from cutlass_params import HostParams, find_nvcc

from mxfp8_cutlass.cache import get_cubin
from mxfp8_cutlass.generator.sm100_config import Sm100Config
from mxfp8_cutlass.generator.sm100_launch_config import Sm100ParamsConfig
from mxfp8_cutlass.kernel import target_of
from mxfp8_cutlass.sm100_arguments import GroupArrays
from mxfp8_cutlass.sm100_params import STARTS, Built, Facts, MapRequest, build, encoded, relocatable, requests
from mxfp8_cutlass.sm100_params import request_of as request_for

CONFIGS = [
    Sm100Config("100a", 128, 128, 1, 1, "e4m3", "e4m3", "bf16"),
    Sm100Config("100a", 256, 256, 2, 1, "e5m2", "e4m3", "fp32"),
]
SMS = 148
KINDS = [(False, False), (True, False), (False, True), (True, True)]


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda config: config.name)
def host(request, tmp_path_factory):
    """A kernel's config, and CUTLASS's host code for it."""
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc")
    config = request.param
    return config, HostParams(nvcc, tmp_path_factory.mktemp("params"), Sm100ParamsConfig("100a", config))


def request_of(groups, start=STARTS[0], *, accumulate=False, bias=False):
    return request_for(groups, start, accumulate=accumulate, bias=bias, sms=SMS)


@cache
def bytes_without_meaning(run) -> tuple[int, ...]:
    """Those that hold anything: the host's differ from run to run, as its addresses do."""
    runs = [run(request_of(3)).params for _ in range(32)]
    varying = tuple(i for i, values in enumerate(zip(*runs, strict=True)) if len(set(values)) > 1)
    assert len(varying) <= 10, "empty members behind C's and D's tensor maps, padding in the epilogue's parameters"
    return varying


def meaning_of(params: bytes, run) -> bytes:
    kept = bytearray(params)
    for i in bytes_without_meaning(run):
        kept[i] = 0
    return bytes(kept)


@pytest.mark.slow
@pytest.mark.parametrize("target_sm", ["90a", "100a"])
def test_builder_compiles_for_either_device(target_sm):
    assert get_cubin(Sm100ParamsConfig(target_sm, CONFIGS[0])).code


@pytest.mark.slow
def test_host_code_asks_for_the_tensor_maps_of_one_tile(host):
    config, run = host
    built = run(request_of(8))
    asked = list(requests(built.params).values())
    a = MapRequest(0, 3, 0, (128, config.tile_m), asked[0].strides, (128, 128))
    assert asked[0].format == a.format
    assert asked[0].swizzle == a.swizzle
    assert asked[0].dims[:2] == a.dims
    assert asked[0].box[:2] == a.box
    # A, B and their scales, for a cluster and for its fallback, then C and D.
    assert len(asked) == 10
    assert asked[:4] == asked[4:8]
    assert {request.format for request in asked[8:]} == {{"bf16": 9, "fp16": 6, "fp32": 7}[config.out]}
    assert isinstance(built.facts, Facts)
    assert built.facts.shared_bytes <= config.shared_memory
    assert built.facts.grid_x * built.facts.grid_y * built.facts.grid_z <= SMS
    # four maps of operands and two of outputs for each SM
    assert built.facts.workspace_bytes >= 6 * 128 * SMS


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "bias"), KINDS)
@pytest.mark.parametrize("groups", [1, 8, 1000])
def test_parameters_for_any_memory_are_those_for_it(host, groups, accumulate, bias):
    _, run = host
    kind = {"accumulate": accumulate, "bias": bias}
    parameter = relocatable(*(run(request_of(groups, start, **kind)) for start in STARTS))
    start = 0x7F12_3456_7800
    expected = run(request_of(groups, start, **kind))
    assert meaning_of(bytes(parameter.at(start)), run) == meaning_of(expected.params, run)
    assert parameter.facts == expected.facts
    # Each array's address stands in them, but for the bias', and the workspace's in several places.
    arrays = GroupArrays(groups)
    moved = {int.from_bytes(parameter.data[place : place + 8], "little") for place in parameter.addresses}
    named = {place for field, place in arrays.places.items() if field != "bias" or bias}
    assert named <= moved
    others = {place - arrays.nbytes for place in moved - named}
    assert others
    assert all(0 <= place < parameter.facts.workspace_bytes and place % 128 == 0 for place in others)


def test_bytes_that_hold_anything_become_zero():
    one, two = [STARTS[0] + 0x80, 2, 0x7FBC_0000_0001], [STARTS[1] + 0x80, 0x102, 0x1]
    built = [Built(b"".join(n.to_bytes(8, "little") for n in words), Facts(24, 0, 0, 1, 1, 1)) for words in (one, two)]
    parameter = relocatable(*built)
    assert parameter.addresses == (0,)
    assert [int.from_bytes(parameter.data[i : i + 8], "little") for i in (0, 8, 16)] == [0x80, 2, 1]


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize(("accumulate", "bias"), KINDS)
@pytest.mark.parametrize("groups", [1, 8, 1000])
def test_device_makes_the_bytes_of_the_host(host, groups, accumulate, bias):
    config, run = host
    device = torch.cuda.current_device()
    request = request_of(groups, accumulate=accumulate, bias=bias)
    expected = run(request)
    built = build(Sm100ParamsConfig(target_of(device), config), request, device)
    assert built.facts == expected.facts
    assert requests(built.params) == requests(expected.params)
    assert meaning_of(built.params, run) == meaning_of(expected.params, run)
    assert not requests(encoded(built.params))
    assert ctypes.sizeof(relocatable(built, built).at(0)) == built.facts.params_bytes
