"""The scripts in docs/examples give what the documentation says of them, on either device."""

from __future__ import annotations

import accumulation
import folding_table
import moe_layer
import pytest
import torch
from report import relative_error


@pytest.mark.parametrize("name", folding_table.INPUTS)
def test_rows_of_the_folding_table_are_reproduced(device, name):
    torch.manual_seed(0)
    size = 256 if device.type == "cpu" else 1024
    x, w = folding_table.INPUTS[name](size, size, 4096)
    assert folding_table.deviations(name, folding_table.measure(x.to(device), w.to(device))) == []


def test_deviations_are_noticed():
    good = folding_table.Row(1.66e-3, 1.66e-3, 6e-8, 1e-7, 1.66e-3, 1.66e-3, 3.7e-2, 0.0, 0.0, 0.0, 0.0)
    assert folding_table.deviations("Gaussian", good) == []
    bad = folding_table.Row(1.66e-3, 1.66e-3, 6e-8, 1e-7, 2.66e-3, 1.66e-3, 3.7e-2, 0.0, 0.0, 0.0, 0.0)
    (text,) = folding_table.deviations("Gaussian", bad)
    assert "folded_kernel is 2.660e-03" in text


@pytest.mark.parametrize("tokens", [1, 77])
def test_moe_layer(device, tokens):
    torch.manual_seed(0)
    experts = moe_layer.make_experts(6, 256, 160, device)
    x = torch.randn(tokens, 256).to(device, torch.bfloat16)
    routing = moe_layer.route(x, torch.randn(6, 256).to(device), 2)
    token, weight, offs = routing
    assert offs[-1] == 2 * tokens
    assert token.bincount().tolist() == [2] * tokens
    combined = torch.zeros(tokens, device=device).index_add_(0, token, weight)
    torch.testing.assert_close(combined, torch.ones_like(combined))

    result = moe_layer.forward(x, routing, experts)
    for a, b, out in (result.fc1, result.fc2):
        exact = moe_layer.product(a.dequantize(torch.float64), b.dequantize(torch.float64), offs)
        assert relative_error(out, exact) < 2.5e-3
    assert relative_error(result.y, moe_layer.forward_float64(x, routing, experts)) < 0.1


@pytest.mark.parametrize("name", accumulation.INPUTS)
def test_accumulation(device, name):
    """Promoting every 128 of K costs less than a thousandth on data of one sign, every 32 less than that."""
    torch.manual_seed(0)
    draw = accumulation.INPUTS[name]
    a, b = accumulation.operand(draw(256, 8192), device), accumulation.operand(draw(256, 8192)[None], device)
    biases = {product: abs(accumulation.bias(*pair)) for product, pair in accumulation.products(a, b).items()}
    assert biases["bf16 rounding alone"] < 1e-4
    assert biases["`grouped_mm`, folded"] < 1e-3
    assert biases["`grouped_mm`, exact"] < 2.5e-4
