"""The whole way of a product on SM100 but for CUTLASS's kernel: sm100_stand_ins.py plays that."""

from __future__ import annotations

from dataclasses import replace

import bounds
import kernel_emulator
import pytest
import sm100_stand_ins
import torch
from cuda_stand_ins import on_cuda
from products import E4M3, E5M2, is_poisoned, offsets, operand, poisoned
from token_groups import SPLITS, check_columnwise_product

import mxfp8_cutlass as mx
from mxfp8_cutlass import columns_mm, kernel, scale_layout
from mxfp8_cutlass.columns import ColumnwiseMXFP8
from mxfp8_cutlass.generator.elementwise_config import swizzle_configs
from mxfp8_cutlass.generator.sm100_config import Sm100Config
from mxfp8_cutlass.generator.sm100_launch_config import Sm100ArgumentsConfig
from mxfp8_cutlass.select import select_kernel

COMPILER = kernel_emulator.find_compiler()
CONFIG = Sm100Config("100a", 128, 128, 1, 1, "e4m3", "e4m3", "bf16")
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("no g++ with _Float16")
    configs = [Sm100ArgumentsConfig("100a"), *swizzle_configs("100a")]
    return kernel_emulator.Kernels(COMPILER, tmp_path_factory.mktemp("kernels"), configs)


@pytest.fixture
def loaded(monkeypatch, kernels):
    configs: list = []
    sm100_stand_ins.install(monkeypatch, kernels, configs)
    yield configs
    columns_mm._launch.cache_clear()
    kernel._target_of_index.cache_clear()


def added(shape, dtype, seed) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("out_dtype", OUTPUTS, ids=str)
@pytest.mark.parametrize("sizes", [[40, 0, 130, 1], [0, 0, 0, 0], [128, 128, 0, 44]], ids=str)
def test_groups_of_rows(loaded, sizes, out_dtype, bias, accumulate):
    a, b = operand((310, 288), seed=1), operand((4, 48, 288), seed=2)
    used = sum(sizes)
    out = poisoned((310, 48), out_dtype)
    if accumulate:
        out[:used] = added((used, 48), out_dtype, 3)
    old = out.clone() if accumulate else None
    biases = added((4, 48), out_dtype, 4) if bias else None
    for _ in range(1 if accumulate else 2):  # a second call finds all prepared
        mx.grouped_mm(
            on_cuda(a),
            on_cuda(b),
            on_cuda(offsets(sizes)),
            out=on_cuda(out),
            bias=on_cuda(biases),
            accumulate=accumulate,
        )
    assert bounds.check_product(out, a, b, offsets(sizes).tolist(), bias=biases, old=old) == used
    assert is_poisoned(out[used:])


@pytest.mark.parametrize("dtypes", [(E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)], ids=str)
def test_element_types_and_int64_offs(loaded, dtypes):
    sizes = [5, 200, 0]
    a, b = operand((300, 96), dtypes[0], seed=1), operand((3, 16, 96), dtypes[1], seed=2)
    out = mx.grouped_mm(on_cuda(a), on_cuda(b), on_cuda(offsets(sizes, dtype=torch.int64)))
    bounds.check_product(out, a, b, offsets(sizes).tolist())
    assert {(c.element_a, c.element_b) for c in loaded if isinstance(c, Sm100Config)} == {
        tuple({E4M3: "e4m3", E5M2: "e5m2"}[dtype] for dtype in dtypes)
    }


def test_kernel_is_the_selected_one(loaded):
    a, b = operand((512, 256), seed=1), operand((2, 256, 256), seed=2)
    mx.grouped_mm(on_cuda(a), on_cuda(b), on_cuda(offsets([256, 256])))
    assert loaded[0] == select_kernel([(256, 256, 256)] * 2, "100a")


def test_swizzled_scales_are_read_as_they_are(loaded, monkeypatch):
    sizes = [40, 0, 130, 1]
    a, b, offs = operand((171, 288), seed=1), operand((4, 48, 288), seed=2), on_cuda(offsets(sizes))
    want = mx.grouped_mm(on_cuda(a), on_cuda(b), offs)
    x, w = on_cuda(a).swizzle(offs), on_cuda(b).swizzle()
    monkeypatch.setattr(scale_layout, "launch", None)
    assert torch.equal(mx.grouped_mm(x, w, offs), want)


def test_batch(loaded):
    a, b = operand((3, 130, 160), seed=1), operand((3, 32, 160), seed=2)
    out = mx.grouped_mm(on_cuda(a), on_cuda(b), out_dtype=torch.float32)
    assert bounds.check_product(out, a, b, None) == 390


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_counts(loaded, dtype):
    counts = [0, 130, 7]
    a, b = operand((3, 130, 160), seed=1), operand((3, 32, 160), seed=2)
    out = poisoned((3, 130, 32))
    mx.grouped_mm(on_cuda(a), on_cuda(b), counts=on_cuda(torch.tensor(counts, dtype=dtype)), out=on_cuda(out))
    assert bounds.check_product(out, a, b, None, counts=counts) == 137
    assert all(is_poisoned(out[g, count:]) for g, count in enumerate(counts))


def columnwise(tokens, features, sizes, seed) -> tuple[ColumnwiseMXFP8, ColumnwiseMXFP8]:
    """An operand, and the same on the played GPU."""
    x = added((tokens, features), torch.bfloat16, seed)
    x[sum(sizes) :] = float("nan")
    made = mx.quantize_columnwise(x, offsets(sizes))
    moved = ColumnwiseMXFP8.__new__(ColumnwiseMXFP8)
    moved.tensor, moved.offs, moved.tokens = on_cuda(made.tensor), on_cuda(made.offs), tokens
    return made, moved


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
@pytest.mark.parametrize("split", SPLITS)
def test_groups_of_tokens(loaded, split, accumulate):
    sizes = SPLITS[split](300)
    (a, cuda_a), (b, cuda_b) = columnwise(300, 80, sizes, 1), columnwise(300, 48, sizes, 2)
    out = poisoned((4, 80, 48), torch.float32)
    if accumulate:
        out.copy_(added(out.shape, torch.float32, 3))
    old = out.clone() if accumulate else None
    mx.grouped_mm(cuda_a, cuda_b, cuda_a.offs, out=on_cuda(out), accumulate=accumulate)
    check_columnwise_product(out, a, b, sizes, old)


def test_list_of_problems(loaded):
    shapes = [(130, 48, 96), (0, 32, 64), (1, 256, 288), (70, 16, 32)]
    pairs = [(operand((m, k), seed=m), operand((n, k), seed=n)) for m, n, k in shapes]
    outs = [poisoned((m, n)) for m, n, _ in shapes]
    mx.grouped_gemm([(on_cuda(a), on_cuda(b)) for a, b in pairs], outs=[on_cuda(out) for out in outs])
    for (a, b), out in zip(pairs, outs, strict=True):
        bounds.check(out, bounds.expect(bounds.values(a), bounds.values(b), None))


class TestSwizzledOperands:
    def test_are_taken_as_they_are(self, loaded, monkeypatch):
        sizes = [40, 0, 130, 1]
        a, b, offs = operand((180, 288), seed=1), operand((4, 48, 288), seed=2), on_cuda(offsets(sizes))
        swizzled = on_cuda(a).swizzle(offs), on_cuda(b).swizzle()
        assert all(x.swizzle() is x for x in swizzled)
        monkeypatch.setattr(scale_layout, "launch", lambda *_: pytest.fail("scales were laid out anew"))
        bounds.check_product(mx.grouped_mm(*swizzled, offs), a, b, offsets(sizes).tolist())

    def test_of_another_kind_of_groups_are_refused(self, loaded):
        a, b, offs = on_cuda(operand((180, 96))), on_cuda(operand((2, 48, 96))), on_cuda(offsets([100, 80]))
        with pytest.raises(ValueError, match="swizzled for each matrix: this product needs them for 2 groups"):
            mx.grouped_mm(a.swizzle(), b, offs)
        with pytest.raises(ValueError, match="swizzled for 3 groups of rows: this product needs them for 2 groups"):
            mx.grouped_mm(a.swizzle(on_cuda(offsets([100, 50, 30]))), b, offs)


def test_a_config_of_the_other_architecture_is_refused(loaded):
    a, b, offs = on_cuda(operand((180, 96))), on_cuda(operand((2, 48, 96))), on_cuda(offsets([100, 80]))
    hopper = select_kernel([(100, 48, 96)], "90a")
    with pytest.raises(ValueError, match="is for sm_90a: this device needs sm_100a"):
        mx.grouped_mm(a, b, offs, config=hopper)
    with pytest.raises(ValueError, match="has out 'fp32'"):
        mx.grouped_mm(a, b, offs, config=replace(CONFIG, out="fp32"))
    mx.grouped_mm(a, b, offs, config=CONFIG)
    assert loaded[0] == CONFIG
