"""Tests of the buffer pool: a large buffer is reused only if no tensor refers to it."""

from __future__ import annotations

import mmap
import random

import pytest
import torch

from optimus_kernels import memory

LIKE = torch.zeros(1)
SIDE = 1024


def test_buffer_is_reused_once_no_tensor_refers_to_it():
    memory.release()
    first = memory.empty((SIDE, SIDE), LIKE)
    address, view = first.data_ptr(), first[3:5]
    del first
    assert memory.empty((SIDE, SIDE), LIKE).data_ptr() != address  # the view refers to it
    del view
    assert memory.empty((SIDE, SIDE), LIKE).data_ptr() == address


def test_autograd_adopts_gradients_without_a_copy_and_keeps_their_buffer():
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
    Fill.apply(parameter).backward()  # autograd adds to .grad, whose buffer is in use
    assert addresses[1] != addresses[0]
    assert parameter.grad.unique().tolist() == [4.0]
    parameter.grad = None
    Fill.apply(parameter).backward()
    assert addresses[2] in addresses[:2]


def test_buffer_is_not_used_for_other_sizes_or_small_tensors():
    memory.release()
    others = memory.total_bytes()  # buffers to which tensors of earlier tests refer
    big = memory.empty((4 * SIDE, SIDE), LIKE)
    address = big.data_ptr()
    del big
    assert memory.empty((SIDE, SIDE), LIKE).data_ptr() != address
    total = memory.total_bytes()
    assert memory.empty((10,), LIKE).numel() == 10
    assert memory.total_bytes() == total
    assert memory.release() > 0
    assert memory.total_bytes() == others


@pytest.fixture
def no_buffers(monkeypatch):
    """Remove all buffers from the pool, so that the test starts as in a new process."""
    monkeypatch.setattr(memory, "_buffers", [])
    monkeypatch.setattr(memory, "_most_used", 0)


MIB = 1 << 20


def test_request_of_the_same_size_reuses_the_buffer(no_buffers):
    """The pool rounds sizes up. A second request of the same size must still reuse the buffer."""
    sizes = random.Random(0).choices(range(memory.SMALLEST, 70 * MIB), k=300)
    edges = [mib * MIB + extra for mib in (1, 2, 3, 4, 5, 6, 63, 64) for extra in (0, 4)]
    for size in (*sizes, *edges):
        first = memory.empty((size // 4,), LIKE)
        address = first.data_ptr()
        del first
        total = memory.total_bytes()
        assert memory.empty((size // 4,), LIKE).data_ptr() == address, size
        assert memory.total_bytes() == total


def test_free_buffer_is_kept_while_the_total_is_within_the_limit(no_buffers):
    memory.empty((4 * SIDE, SIDE), LIKE)
    memory.empty((SIDE, SIDE), LIKE)
    assert memory.total_bytes() == 20 * MIB
    memory.empty((2 * SIDE, SIDE), LIKE)
    # The largest memory in use was 16 MiB, so the pool can have 24 MiB. The new buffer would make
    # 28 MiB, so the oldest buffer (16 MiB) was released.
    assert memory.total_bytes() == 12 * MIB


def test_repeated_steps_allocate_no_new_buffers(no_buffers):
    sizes = random.Random(1)
    step = [sizes.randint(memory.SMALLEST, 12 * MIB) for _ in range(12)]
    addresses = []
    for _ in range(3):
        alive = [memory.empty((size // 4,), LIKE) for size in step]
        addresses.append(sorted(tensor.data_ptr() for tensor in alive))
        del alive
    assert addresses[0] == addresses[1] == addresses[2]


def test_total_is_bounded_by_1_5_times_the_memory_in_use(no_buffers):
    """Buffers of random sizes are used for random times. The memory of the pool must be at most 1.5
    times the largest memory in use at one time."""
    draws, alive, most = random.Random(2), [], 0
    for _ in range(2000):
        size = draws.randint(memory.SMALLEST, 40 * MIB)
        alive.append(memory.empty((size // 4,), LIKE))
        most = max(most, sum(b.size for b in memory._buffers if not b.free()))
        assert memory.total_bytes() <= 1.5 * most
        while len(alive) > draws.randint(0, 8):
            alive.pop(draws.randrange(len(alive)))


def test_system_without_huge_pages_is_supported(no_buffers, monkeypatch):
    class Refuses(mmap.mmap):
        def madvise(self, *_):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refuses)
    tensor = memory.empty((SIDE, SIDE), LIKE).fill_(1)
    assert tensor.sum() == SIDE * SIDE


def test_storage_cannot_be_resized():
    tensor = memory.empty((SIDE, SIDE), LIKE)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)
