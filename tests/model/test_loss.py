from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from optimus.model import layers
from optimus.model.layers import cross_entropy_sum
from tests.model.small import relative


def both(logits, targets, scale=0.7):
    results = []
    for function in (
        lambda x: cross_entropy_sum(x, targets),
        lambda x: F.cross_entropy(x.double(), targets, reduction="sum"),
    ):
        leaf = logits.clone().requires_grad_()
        value = function(leaf)
        (value * scale).backward()
        results += [value.detach(), leaf.grad]
    return results


@pytest.mark.parametrize("rows", [0, 1, 7, 64])
@pytest.mark.parametrize("block", [1, 1 << 9, 1 << 18])
def test_value_and_gradient_in_blocks_of_any_size(rows, block, monkeypatch):
    monkeypatch.setattr(layers, "_BLOCK_CPU", block)
    torch.manual_seed(0)
    logits, targets = 3 * torch.randn(rows, 129), torch.randint(0, 129, (rows,))
    value, grad, expected, expected_grad = both(logits, targets)
    assert value.dtype is torch.float32
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-7)


def test_bf16_logits_are_widened_before_anything_is_summed():
    torch.manual_seed(0)
    logits, targets = torch.randn(50, 4096).bfloat16(), torch.randint(0, 4096, (50,))
    value, grad, expected, expected_grad = both(logits, targets)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    assert grad.dtype is torch.bfloat16
    assert relative(grad.float(), expected_grad.float()) < 2e-3  # only the rounding to bf16


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4, 9999.0]])
    spacing = 1e-3  # between fp32 numbers near 1e4, the magnitude of the logsumexp
    value = float(cross_entropy_sum(logits, torch.tensor([2])))
    assert value == pytest.approx(1.3132617, abs=spacing)


def test_nan_is_not_hidden():
    logits = torch.zeros(3, 8)
    logits[1, 2] = torch.nan
    assert cross_entropy_sum(logits, torch.zeros(3, dtype=torch.int64)).isnan()
