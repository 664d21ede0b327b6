"""Buffers that are used again: never while anything refers to them."""

from __future__ import annotations

import mmap
import random

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


@pytest.fixture
def no_buffers(monkeypatch):
    """As in a process that has asked for none."""
    monkeypatch.setattr(memory, "_buffers", [])
    monkeypatch.setattr(memory, "_most_used", 0)


MIB = 1 << 20


def test_every_size_is_served_again_by_the_buffer_made_for_it(no_buffers):
    """Sizes are rounded up; one that is far below its buffer's must still find it."""
    sizes = random.Random(0).choices(range(memory.SMALLEST, 70 * MIB), k=300)
    edges = [at * MIB + more for at in (1, 2, 3, 4, 5, 6, 63, 64) for more in (0, 4)]
    for size in (*sizes, *edges):
        first = memory.empty((size // 4,), LIKE)
        address = first.data_ptr()
        del first
        held = memory.held()
        assert memory.empty((size // 4,), LIKE).data_ptr() == address, size
        assert memory.held() == held


def test_a_free_buffer_of_another_size_stays_while_all_are_little_more_than_was_in_use(no_buffers):
    memory.empty((4 * SIDE, SIDE), LIKE)
    memory.empty((SIDE, SIDE), LIKE)
    assert memory.held() == 20 * MIB
    memory.empty((2 * SIDE, SIDE), LIKE)
    assert memory.held() == 12 * MIB  # 28 were beyond half as much again: the oldest went


def test_repeated_steps_of_whatever_sizes_make_no_new_buffers(no_buffers):
    sizes = random.Random(1)
    step = [sizes.randint(memory.SMALLEST, 12 * MIB) for _ in range(12)]
    addresses = []
    for _ in range(3):
        alive = [memory.empty((size // 4,), LIKE) for size in step]
        addresses.append(sorted(one.data_ptr() for one in alive))
        del alive
    assert addresses[0] == addresses[1] == addresses[2]


def test_what_is_held_is_bounded_by_what_was_in_use(no_buffers):
    """Sizes and lifetimes at random: 1.5 times the most that was ever in use, in whole buffers."""
    draws, alive, most = random.Random(2), [], 0
    for _ in range(2000):
        size = draws.randint(memory.SMALLEST, 40 * MIB)
        alive.append(memory.empty((size // 4,), LIKE))
        most = max(most, sum(b.size for b in memory._buffers if not b.free()))
        assert memory.held() <= 1.5 * most
        while len(alive) > draws.randint(0, 8):
            alive.pop(draws.randrange(len(alive)))


def test_a_system_without_huge_pages_does_as_well(no_buffers, monkeypatch):
    class Refuses(mmap.mmap):
        def madvise(self, *_):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refuses)
    tensor = memory.empty((SIDE, SIDE), LIKE).fill_(1)
    assert tensor.sum() == SIDE * SIDE


def test_its_storage_is_fixed():
    tensor = memory.empty((SIDE, SIDE), LIKE)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)
