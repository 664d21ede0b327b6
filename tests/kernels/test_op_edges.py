"""Ops where they go wrong unseen: unwritten memory, the ends of pieces and of buffers."""

from __future__ import annotations

import pytest
import torch

import optimus_kernels as kernels
from optimus_kernels import experts_loop, product
from optimus_kernels.experts import reference as experts_twin
from optimus_kernels.experts import reference_backward as experts_backward_twin
from optimus_kernels.route import reference as route_twin
from tests.kernels.test_ops import ERRORS

ops = torch.ops.optimus


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_route_where_its_pieces_meet(pieces, more):
    """On CPUs slots are counted in pieces of 4096, side by side."""
    slots = pieces * 4096 + more
    chosen = torch.randint(7, (slots, 1), generator=torch.Generator().manual_seed(slots))
    for ours, twin in zip(kernels.route(chosen, 1, 5), route_twin(chosen, 1, 5), strict=True):
        assert torch.equal(ours, twin)


def test_rows_beyond_two_to_the_31_numbers_are_found():
    """4 GiB of addresses, of which two rows are ever touched."""
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
def test_rows_rounded_up_for_onednn_stay_within_their_buffers(tokens, dtype, monkeypatch):
    """513 rows are computed as 544, and the last expert's have nothing behind them."""
    if dtype is torch.float32:
        if not product.onednn_is_exact():
            pytest.skip("oneDNN cannot be had for fp32 products here")
        monkeypatch.setattr(product, "_onednn_is_better", lambda: True)
    for module in (experts_loop, product):  # as without AMX, where our product rounds nothing up
        monkeypatch.setattr(module, "own", lambda like: None)
    chosen = torch.full((tokens, 1), 1)
    rows = kernels.route(chosen, 0, 2)
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    saved = (normal(tokens, 16), normal(tokens, 1), normal(2, 16, 16), normal(2, 16, 8), *rows)
    out, h = ops.experts(*saved, True)
    their_out, their_h = experts_twin(*saved)
    grad = normal(tokens, 16)
    grads = ops.experts_backward(grad, *saved, h, True)
    theirs = experts_backward_twin(grad, *saved, their_h, True)
    for value, expected in ((out, their_out), (h, their_h), *zip(grads, theirs, strict=True)):
        error = (value - expected).double().norm()
        assert error <= 4 * ERRORS[dtype] * expected.double().norm()
