"""Each wrong argument gives one error that names it and its value, before anything runs; outputs stay as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from products import E4M3, E5M2, folded, is_poisoned, offsets, operand, poisoned

import mxfp8_cutlass as mx
from mxfp8_cutlass import checks, reference
from mxfp8_cutlass.generator.config_space import sm90_configs
from mxfp8_cutlass.mxfp8_tensor import MXFP8Tensor

A, B = operand((8, 96), E4M3, 1), operand((3, 32, 96), E4M3, 2)
OFFS = offsets([1, 3, 4])
CONFIG = next(c for c in sm90_configs() if c.promotion_k == 128 and c.sfb_rows == 128)
FP8 = torch.float8_e4m3fn


def meta(xq):
    return MXFP8Tensor(xq.data.to("meta"), xq.scale_bytes.to("meta"))


def tall(rows):
    """Any number of rows, without the memory."""
    return MXFP8Tensor.unchecked(A.data[:1].expand(rows, 96), A.scale_bytes[:1].expand(rows, 3))


def in_memory_of(xq, part, shape=(8, 32)):
    """xq in larger memory, and an output that overlaps one part of it."""
    memory = torch.zeros(16384, dtype=torch.uint8)
    source = getattr(xq, part).view(torch.uint8)
    view = memory[1024 : 1024 + source.numel()].view(source.shape).copy_(source)
    parts = {"data": xq.data, "scale": xq.scale_bytes, "tile_scale": xq.tile_scale} | {part: view}
    moved = MXFP8Tensor(parts["data"].view(xq.dtype), parts["scale"], folded=xq.folded, tile_scale=parts["tile_scale"])
    bytes_out = 2 * torch.Size(shape).numel()
    return moved, memory[1026 - bytes_out : 1026].view(torch.bfloat16).view(shape)


def overlapping(name, part):
    xq = folded(B, 128) if part == "tile_scale" else {"a": A, "b": B}[name]
    moved, out = in_memory_of(xq, part)
    return {name: moved, "out": out}


BATCH = {"a": operand((3, 8, 96)), "offs": None, "counts": OFFS, "out": poisoned((3, 8, 32))}
IN_COUNTS = torch.zeros((3, 8, 32), dtype=torch.bfloat16)
COUNTS = IN_COUNTS.view(-1)[:6].view(torch.int32)

CASES = {
    # name: (arguments that differ from good ones, error, what the message says)
    "a is no MXFP8Tensor": ({"a": A.data}, TypeError, "a is a Tensor"),
    "b is no MXFP8Tensor": ({"b": None}, TypeError, "b is a NoneType"),
    "a on a device of another kind": ({"a": meta(A)}, ValueError, "a is on meta"),
    "operands on different devices": ({"b": meta(B)}, ValueError, "b is on meta"),
    "K differs": ({"b": operand((3, 32, 64))}, ValueError, r"b has shape \(3, 32, 64\): its K = 64 .* K = 96"),
    "N no multiple of 16": ({"b": operand((3, 24, 96))}, ValueError, r"b has shape \(3, 24, 96\): N = 24"),
    "N is 0": ({"b": operand((3, 0, 96))}, ValueError, r"b has shape \(3, 0, 96\): N = 0"),
    "G is 0": ({"b": operand((0, 32, 96))}, ValueError, r"b has shape \(0, 32, 96\): G = 0"),
    "G too large": ({"b": operand((1025, 16, 96))}, ValueError, r"b has shape \(1025, 16, 96\): G = 1025"),
    "M too large": ({"a": tall(2**31)}, ValueError, r"a has shape \(2147483648, 96\): .* at most"),
    "b is 2D": ({"b": operand((32, 96))}, ValueError, "2D"),
    "b is 2D, a 3D": (
        {"a": operand((3, 8, 96)), "b": operand((32, 96)), "offs": None},
        ValueError,
        r"b has shape \(32",
    ),
    "batches differ": ({"a": operand((2, 8, 96)), "offs": None}, ValueError, r"a has shape \(2, 8, 96\): its G .* 3"),
    "offs with a batch": ({"a": operand((3, 8, 96))}, ValueError, r"offs is given and a has shape \(3, 8, 96\)"),
    "no offs": ({"offs": None}, ValueError, r"offs is None and a has shape \(8, 96\)"),
    "offs is a list": ({"offs": [1, 4, 8]}, TypeError, "offs is a list"),
    "offs is float": ({"offs": OFFS.float()}, TypeError, "offs has dtype torch.float32"),
    "offs is int16": ({"offs": OFFS.short()}, TypeError, "offs has dtype torch.int16"),
    "offs too short": ({"offs": OFFS[:2]}, ValueError, r"offs has shape \(2,\): it must be \(3,\)"),
    "offs too long": ({"offs": offsets([1] * 4)}, ValueError, r"offs has shape \(4,\): it must be \(3,\)"),
    "offs is 2D": ({"offs": OFFS[None]}, ValueError, r"offs has shape \(1, 3\)"),
    "offs elsewhere": ({"offs": OFFS.to("meta")}, ValueError, "offs is on meta"),
    "offs with gaps": ({"offs": offsets([1] * 6)[::2]}, ValueError, r"offs has strides \(2,\)"),
    "offs falls": ({"offs": torch.tensor([4, 2, 8])}, ValueError, r"offs is \[4, 2, 8\]"),
    "offs negative": ({"offs": torch.tensor([-1, 2, 8])}, ValueError, r"offs is \[-1, 2, 8\]"),
    "offs beyond M": ({"offs": torch.tensor([1, 2, 9])}, ValueError, r"offs is \[1, 2, 9\]: .* M = 8"),
    "counts with offs": ({"counts": OFFS}, ValueError, r"counts is given and a has shape \(8, 96\)"),
    "counts with offs and a batch": ({**BATCH, "offs": OFFS}, ValueError, "offs is given and a has shape"),
    "counts is a list": ({**BATCH, "counts": [1, 2, 3]}, TypeError, "counts is a list"),
    "counts is float": ({**BATCH, "counts": OFFS.float()}, TypeError, "counts has dtype torch.float32"),
    "counts too short": ({**BATCH, "counts": OFFS[:2]}, ValueError, r"counts has shape \(2,\): it must be \(3,\)"),
    "counts is 2D": ({**BATCH, "counts": OFFS[None]}, ValueError, r"counts has shape \(1, 3\)"),
    "counts elsewhere": ({**BATCH, "counts": OFFS.to("meta")}, ValueError, "counts is on meta"),
    "counts with gaps": ({**BATCH, "counts": offsets([1] * 6)[::2]}, ValueError, r"counts has strides \(2,\)"),
    "out in counts": ({**BATCH, "counts": COUNTS, "out": IN_COUNTS}, ValueError, "out overlaps counts"),
    "expected_m without counts": ({"expected_m": 4}, ValueError, "expected_m is 4 and counts is None"),
    "expected_m is 0": ({**BATCH, "expected_m": 0}, ValueError, "expected_m is 0"),
    "expected_m is a float": ({**BATCH, "expected_m": 4.5}, TypeError, "expected_m is 4.5"),
    "out_dtype": ({"out_dtype": torch.float64, "out": None}, TypeError, "out_dtype is torch.float64"),
    "out_dtype is a string": ({"out_dtype": "bf16", "out": None}, TypeError, "out_dtype is bf16"),
    "out_dtype is not out's": ({"out_dtype": torch.float16}, TypeError, "out has dtype torch.bfloat16: .*float16"),
    "out is an array": ({"out": poisoned((8, 32)).view(torch.int16).numpy()}, TypeError, "out is a ndarray"),
    "out's dtype": ({"out": torch.zeros((8, 32), dtype=torch.int32)}, TypeError, "is torch.int32"),
    "out's shape": ({"out": poisoned((8, 48))}, ValueError, r"out has shape \(8, 48\): it must be \(8, 32\)"),
    "out's dimensions": ({"out": poisoned((1, 8, 32))}, ValueError, r"out has shape \(1, 8, 32\)"),
    "out elsewhere": ({"out": poisoned((8, 32)).to("meta")}, ValueError, "out is on meta"),
    "out transposed": ({"out": poisoned((32, 8)).mT}, ValueError, r"out has strides \(1, 8\)"),
    "out with gaps": ({"out": poisoned((8, 64))[:, ::2]}, ValueError, r"out has strides \(64, 2\)"),
    "out in a.data": (overlapping("a", "data"), ValueError, "out overlaps a.data"),
    "out in a.scale": (overlapping("a", "scale"), ValueError, "out overlaps a.scale"),
    "out in b.data": (overlapping("b", "data"), ValueError, "out overlaps b.data"),
    "out in b.scale": (overlapping("b", "scale"), ValueError, "out overlaps b.scale"),
    "out in b.tile_scale": (overlapping("b", "tile_scale"), ValueError, "out overlaps b.tile_scale"),
    "bias is a list": ({"bias": [0.0]}, TypeError, "bias is a list"),
    "bias's shape": ({"bias": torch.zeros(32).bfloat16()}, ValueError, r"bias has shape \(32,\): it must be \(3, 32\)"),
    "bias's dtype": ({"bias": torch.zeros(3, 32)}, TypeError, "bias has dtype torch.float32: .*bfloat16"),
    "bias elsewhere": ({"bias": torch.zeros(3, 32).bfloat16().to("meta")}, ValueError, "bias is on meta"),
    "bias transposed": ({"bias": torch.zeros(32, 3).bfloat16().mT}, ValueError, r"bias has strides \(1, 3\)"),
    "nothing to add to": ({"accumulate": True, "out": None}, ValueError, "accumulate is True and out is None"),
    "config is a name": ({"config": CONFIG.name}, TypeError, "config is a str"),
    "config that check refuses": ({"config": replace(CONFIG, tile_n=80)}, ValueError, "config=.* tile_n=80"),
    "config for other elements": ({"config": replace(CONFIG, element_b="e5m2")}, ValueError, "has element_b 'e5m2'"),
    "config for another output": ({"config": replace(CONFIG, out="fp32")}, ValueError, "has out 'fp32'"),
    "config for exact": ({"config": CONFIG, "exact": True}, ValueError, "has promotion_k 128"),
}


@pytest.fixture
def nothing_runs(monkeypatch):
    """The reference only checks offs, whose values no check of arguments reads."""
    rows = reference._group_rows
    monkeypatch.setattr(reference, "_rows_of", None)
    monkeypatch.setattr(reference, "_group_rows", lambda *arguments: [*rows(*arguments), None])


@pytest.mark.parametrize("case", CASES)
def test_grouped_mm(case, nothing_runs):
    wrong, error, message = CASES[case]
    out = poisoned((8, 32))
    arguments = {"a": A, "b": B, "offs": OFFS, "out": out} | wrong
    before = arguments["out"].clone() if isinstance(arguments["out"], torch.Tensor) else None
    with pytest.raises(error, match=message) as caught:
        mx.grouped_mm(arguments.pop("a"), arguments.pop("b"), arguments.pop("offs"), **arguments)
    assert type(caught.value) is error
    assert caught.value.__cause__ is None
    assert is_poisoned(out)
    if before is not None and before.device.type == "cpu":
        assert torch.equal(arguments["out"].contiguous().view(torch.uint8), before.contiguous().view(torch.uint8))


def test_good_arguments_pass():
    out = poisoned((8, 32))
    mx.grouped_mm(A, B, OFFS, out=out, config=CONFIG)
    assert not is_poisoned(out)


def test_config_for_another_arch():
    facts = {"promotion_k": 128, "element_a": "e4m3", "element_b": "e4m3", "out": "bf16"}
    checks.check_config(CONFIG, "90a", facts)
    with pytest.raises(ValueError, match="is for sm_90a: this device needs sm_100a"):
        checks.check_config(CONFIG, "100a", facts)


P = (operand((8, 96), E4M3, 1), operand((32, 96), E4M3, 2))


def pair_cases():
    yield "no list", {"pairs": None}, TypeError, "pairs is a NoneType"
    yield "empty list", {"pairs": []}, ValueError, "pairs has 0 entries"
    yield "long list", {"pairs": [P] * 1025}, ValueError, "pairs has 1025 entries"
    yield "no pair", {"pairs": [P, P[0]]}, TypeError, r"pairs\[1\] is MXFP8Tensor"
    yield "three operands", {"pairs": [(*P, P[1])]}, TypeError, r"pairs\[0\] is \(MXFP8Tensor"
    yield "no operand", {"pairs": [P, (P[0], P[1].data)]}, TypeError, r"pairs\[1\]\[1\] is a Tensor"
    yield "3D", {"pairs": [P, (P[0], B)]}, ValueError, r"pairs\[1\]\[1\] has shape \(3, 32, 96\): it must be 2D"
    yield "elements", {"pairs": [P, (operand((8, 96), E5M2), P[1])]}, TypeError, r"pairs\[1\]\[0\] has dtype .*e5m2"
    yield "K", {"pairs": [P, (P[0], operand((32, 64)))]}, ValueError, r"pairs\[1\]\[1\] has shape .* K = 64 .* K = 96"
    yield "N", {"pairs": [P, (P[0], operand((24, 96)))]}, ValueError, r"pairs\[1\]\[1\] has shape \(24, 96\): N = 24"
    yield "device", {"pairs": [P, (P[0], meta(P[1]))]}, ValueError, r"pairs\[1\]\[1\] is on meta"
    yield "out_dtype", {"out_dtype": torch.int8, "outs": None}, TypeError, "out_dtype is torch.int8"
    yield "outs is a tensor", {"outs": poisoned((2, 8, 32))}, TypeError, "outs is a Tensor"
    yield "outs too short", {"outs": [poisoned((8, 32))]}, ValueError, "outs has 1 entries"
    yield "out's shape", {"outs": [poisoned((8, 32)), poisoned((8, 48))]}, ValueError, r"outs\[1\] has shape \(8, 48\)"
    yield "out's dtype", {"outs": [poisoned((8, 32)), torch.zeros(8, 32)]}, TypeError, r"outs\[1\] has dtype"
    yield "no output", {"outs": [poisoned((8, 32)), None]}, TypeError, r"outs\[1\] is a NoneType"
    yield "output twice", {"outs": [poisoned((8, 32))] * 2}, ValueError, r"outs\[1\] overlaps outs\[0\]"
    moved, out = in_memory_of(P[1], "data")
    other = {"pairs": [P, (P[0], moved)], "outs": [poisoned((8, 32)), out]}
    yield "output in input", other, ValueError, r"outs\[1\] overlaps pairs\[1\]\[1\].data"
    yield "nothing to add to", {"outs": None, "accumulate": True}, ValueError, "accumulate is True and outs is None"
    yield "config", {"config": replace(CONFIG, stages=1)}, ValueError, "config=.*stages=1"


@pytest.mark.parametrize(("wrong", "error", "message"), [pytest.param(*c[1:], id=c[0]) for c in pair_cases()])
def test_grouped_gemm(wrong, error, message, nothing_runs):
    outs = [poisoned((8, 32)), poisoned((8, 32))]
    arguments = {"pairs": [P, P], "outs": outs} | wrong
    with pytest.raises(error, match=message) as caught:
        mx.grouped_gemm(arguments.pop("pairs"), **arguments)
    assert type(caught.value) is error
    assert all(is_poisoned(out) for out in outs)


@pytest.mark.parametrize(
    ("data", "scale", "error", "message"),
    [
        (torch.zeros(8, 96), torch.zeros(8, 3).byte(), TypeError, "data has dtype torch.float32"),
        (torch.zeros(8, 96).to(FP8), torch.zeros(8, 3), TypeError, "scale has dtype torch.float32"),
        (torch.zeros(8, 96).to(FP8), torch.zeros(8, 4).byte(), ValueError, r"scale has shape \(8, 4\)"),
        (torch.zeros(8, 80).to(FP8), torch.zeros(8, 2).byte(), ValueError, r"data has shape \(8, 80\)"),
        (torch.zeros(96, 32).to(FP8).mT, torch.zeros(32, 3).byte(), ValueError, "data has .*strides"),
        (torch.zeros(8, 96).to(FP8), torch.zeros(3, 8).byte().mT, ValueError, "scale has strides"),
        (torch.zeros(8, 96).to(FP8), torch.zeros(8, 3).byte().to("meta"), ValueError, "scale is on meta"),
    ],
)
def test_operands_are_checked_where_they_are_made(data, scale, error, message):
    with pytest.raises(error, match=message):
        MXFP8Tensor(data, scale)
