"""The parameters of SM100 kernels, against those of CUTLASS's own host code: it needs nvcc, and the device's a GPU."""

from __future__ import annotations

import pytest
import torch
from cutlass_params import HostParams, find_nvcc
from sm100_groups import BASES

from mxfp8_cutlass.cache import get_cubin
from mxfp8_cutlass.generator.sm100_config import Sm100Config
from mxfp8_cutlass.generator.sm100_launch_config import Sm100ParamsConfig
from mxfp8_cutlass.sm100_arguments import GroupArrays, Sm100ArgumentsParams
from mxfp8_cutlass.sm100_params import Facts, MapRequest, Sm100BuildParams, build, encoded, requests

CONFIGS = [
    Sm100Config("100a", 128, 128, 1, 1, "e4m3", "e4m3", "bf16"),
    Sm100Config("100a", 256, 256, 2, 1, "e5m2", "e4m3", "fp32"),
]
WORKSPACE = 6 << 40
SMS = 148


def arrays_of(groups: int) -> Sm100ArgumentsParams:
    """Addresses that need not be those of any memory: nothing is read."""
    arrays = GroupArrays(groups, torch.device("cpu")).params((1024, 512, 256), BASES, None)
    for i, (field, _, _) in enumerate(GroupArrays.FIELDS):
        setattr(arrays, field, (7 << 40) + (i << 20))
    return arrays


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda config: config.name)
def host(request, tmp_path_factory):
    """A kernel's config, and CUTLASS's host code for it."""
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc")
    config = request.param
    return config, HostParams(nvcc, tmp_path_factory.mktemp("params"), Sm100ParamsConfig("100a", config))


@pytest.mark.slow
@pytest.mark.parametrize("target_sm", ["90a", "100a"])
def test_builder_compiles_for_either_device(target_sm):
    assert get_cubin(Sm100ParamsConfig(target_sm, CONFIGS[0])).code


@pytest.mark.slow
def test_host_code_asks_for_the_tensor_maps_of_one_tile(host):
    config, run = host
    built = run(Sm100BuildParams(arrays_of(8), None, None, WORKSPACE, 0.0, SMS))
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
@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("groups", [1, 8, 1000])
def test_device_makes_the_bytes_of_the_host(host, groups, accumulate):
    config, run = host
    arrays = arrays_of(groups)
    expected = run(Sm100BuildParams(arrays, None, None, WORKSPACE, float(accumulate), SMS))
    built = build(config, arrays, WORKSPACE, accumulate=accumulate, sms=SMS, device=torch.cuda.current_device())
    assert built.facts == expected.facts
    assert requests(built.params) == requests(expected.params)
    assert built.params == expected.params
    assert not requests(encoded(built.params))
