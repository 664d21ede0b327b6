"""Buffers that are used again: never while anything refers to them."""

from __future__ import annotations

import pytest
import torch

from optimus_kernels import memory

LIKE = torch.zeros(1)
SIDE = 1024


def test_a_buffer_comes_back_once_no_tensor_refers_to_it():
    memory.release()
    first = memory.empty((SIDE, SIDE), LIKE)
    address, view = first.data_ptr(), first[3:5]
    del first
    assert memory.empty((SIDE, SIDE), LIKE).data_ptr() != address  # the view holds it
    del view
    assert memory.empty((SIDE, SIDE), LIKE).data_ptr() == address


def test_gradients_are_taken_over_without_a_copy_and_keep_their_buffer():
    memory.release()
    parameter = torch.nn.Parameter(torch.zeros(SIDE, SIDE))

    class Fill(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.sum()

        @staticmethod
        def backward(ctx, grad):
            out = memory.empty((SIDE, SIDE), LIKE)
            addresses.append(out.data_ptr())
            return out.fill_(2.0)

    addresses: list[int] = []
    Fill.apply(parameter).backward()
    assert parameter.grad.data_ptr() == addresses[0]
    Fill.apply(parameter).backward()  # accumulates: needs another buffer
    assert addresses[1] != addresses[0]
    assert parameter.grad.unique().tolist() == [4.0]
    parameter.grad = None
    Fill.apply(parameter).backward()
    assert addresses[2] in addresses[:2]


def test_other_sizes_and_small_ones_do_not_take_it():
    memory.release()
    others = memory.held()  # what tests before this one still refer to
    big = memory.empty((4 * SIDE, SIDE), LIKE)
    address = big.data_ptr()
    del big
    assert memory.empty((SIDE, SIDE), LIKE).data_ptr() != address
    held = memory.held()
    assert memory.empty((10,), LIKE).numel() == 10
    assert memory.held() == held
    assert memory.release() > 0
    assert memory.held() == others


def test_its_storage_is_fixed():
    tensor = memory.empty((SIDE, SIDE), LIKE)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)
