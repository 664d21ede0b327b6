"""Tests of ops at the boundaries of chunks and buffers, and with very large tensors."""

from __future__ import annotations

import pytest
import torch

import optimus_kernels as kernels
from optimus_kernels import experts_loop, product
from optimus_kernels.experts import reference as experts_reference
from optimus_kernels.experts import reference_backward as experts_backward_reference
from optimus_kernels.rows import route_reference
from tests.kernels.test_ops import ERRORS

ops = torch.ops.optimus


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_route_at_the_boundaries_of_pieces(pieces, extra):
    """The number of slots is near a multiple of 4096, the chunk size of the CPU kernel."""
    slots = pieces * 4096 + extra
    chosen = torch.randint(7, (slots, 1), generator=torch.Generator().manual_seed(slots))
    for ours, expected in zip(
        kernels.route(chosen, 1, 5), route_reference(chosen, 1, 5), strict=True
    ):
        assert torch.equal(ours, expected)


def test_rows_after_2_to_the_31_elements_are_addressed():
    """The tensor has 4 GiB, but only two of its rows use physical memory."""
    last = 2**21
    x = torch.empty(last + 1, 1024, dtype=torch.bfloat16)
    x[0], x[last] = 1, 2
    token = torch.tensor([last, 0], dtype=torch.int32)
    assert ops.gather(x, token, token.view(2, 1))[:, 0].tolist() == [2, 1]
    row, slot = token.view(2, 1), torch.zeros(last + 1, dtype=torch.int32)
    assert ops.reduce_rows(x, None, row, slot)[:, 1023].tolist() == [2, 1]
    assert ops.reduce_rows(x, torch.ones(2, 1).bfloat16(), row, slot)[:, 0].tolist() == [2, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [15, 17, 512, 513, 545])
def test_rows_padded_for_onednn_are_within_their_buffers(tokens, dtype, monkeypatch):
    """For oneDNN, the number of rows of each expert is rounded up. The buffers must have space for
    the additional rows of the last expert."""
    if dtype is torch.float32:
        if not product.onednn_is_exact():
            pytest.skip("oneDNN is not available for fp32 products")
        monkeypatch.setattr(product, "_onednn_is_better", lambda: True)
    for module in (experts_loop, product):  # disable the AMX kernel, which needs no padding
        monkeypatch.setattr(module, "amx_kernel", lambda like: None)
    chosen = torch.full((tokens, 1), 1)
    rows = kernels.route(chosen, 0, 2)
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    operands = (normal(tokens, 16), normal(tokens, 1), normal(2, 16, 16), normal(2, 16, 8), *rows)
    out, h = ops.experts(*operands, True)
    expected_out, expected_h = experts_reference(*operands)
    grad = normal(tokens, 16)
    grads = ops.experts_backward(grad, *operands, h, True)
    expected_grads = experts_backward_reference(grad, *operands, expected_h, True)
    for value, expected in (
        (out, expected_out),
        (h, expected_h),
        *zip(grads, expected_grads, strict=True),
    ):
        error = (value - expected).double().norm()
        assert error <= 4 * ERRORS[dtype] * expected.double().norm()
