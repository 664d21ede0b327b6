"""Tests of early updates (updates on the host that begin during backward), and of gradients that
are copied from the device in bf16."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from optimus.chunks import memory
from optimus.chunks.buffers import ChunkState, ShardBuffers
from optimus.chunks.engine import ChunkEngine
from optimus.chunks.memory import Tier
from optimus.chunks.optimizer import AdamW, UpdateQueue
from optimus.config import OptimConfig
from optimus.config.machine import Links
from optimus.distributed.collectives import ALONE, Group
from tests.kit.layouts.tower import (
    CHUNK,
    LR,
    Case,
    Tower,
    batch,
    make_engine,
    train_in_order,
    use_in_order,
)

FP32, BF16 = torch.float32, torch.bfloat16
RATE = 4 * CHUNK / 0.001
"""Bytes per second with which the copy of a chunk takes a millisecond."""
LINKS = Links(to_device=RATE, to_host=RATE, host_adam=CHUNK / 0.001)


@pytest.mark.parametrize("seed", range(24))
def test_random_plans_with_early_updates_change_no_bit(seed):
    """Train with random plans, with NaN in freed and in spare buffers. Some random steps multiply
    the gradients by another factor than expected (as if the norm was clipped). Other random steps
    have no update (as if a gradient was not finite). The results have the same bits as with all
    states on the device."""
    chance = random.Random(seed)
    n, microbatches = chance.randint(2, 6), chance.choice((1, 2, 3))
    case = Case(
        n,
        chance.randint(1, n),
        microbatches,
        dtype=chance.choice((FP32, BF16)),
        parameters=False,
        steps=8,
        rounds=chance.random() < 0.5,
        surprises="".join(chance.choice("..cs") for _ in range(8)),
    )
    order = chance.choice(("forward", "forward", "skip", "alternate"))
    expected = train_in_order(case._replace(gradients=False), order)
    for _ in range(3):
        changes = {
            "host_share": chance.choice((0.4, 1.0)),
            "copies": chance.choice(("early", "late", "random")),
            "links": chance.choice((None, LINKS)),
            "delay_s": chance.choice((0.0, 0.002)),
            "early": True,
            "poison": True,
        }
        assert train_in_order(case._replace(**changes), order)[:2] == expected[:2], changes


def test_updates_begin_in_backward_and_are_used_unless_the_norm_is_unexpected(monkeypatch):
    """Early updates multiply gradients by the factor that the start of the step expects. All early
    updates end before the norm is known. The step uses the early updates if the factor that follows
    from the norm is the expected factor. If the factors differ, or if the step has no update
    (`actual` = None), the early updates are not used."""
    case = Case(4, 2, 2, parameters=False, host_share=0.7, early=True)
    tower = Tower(4)
    engine = make_engine(tower, case, ALONE)
    used: list[int] = []
    exchange = ChunkState.exchange

    def note(state: ChunkState, other: Any) -> None:
        used.append(state.chunk.number)
        exchange(state, other)

    monkeypatch.setattr(ChunkState, "exchange", note)
    for expected, actual in ((0.5, 0.5), (0.5, 0.5), (1.0, 0.5), (0.5, None), (0.5, 0.5)):
        before = [state.master.clone() for state in engine.chunks]
        engine.start_step((LR, expected))
        for number in range(2):
            (tower(batch(number, FP32)) - 1).square().mean().backward()
            engine.gradients.reduce(0)
        engine.gradients.finish()
        for early in engine._updates._early.values():
            early.job.result()
        assert sorted(engine._updates._early) == [1, 2, 3]
        assert all(map(torch.equal, before, (state.master for state in engine.chunks)))
        used.clear()
        if actual is not None:
            engine.update(LR, actual)
        engine.wait()
        assert used == ([1, 2, 3] if actual == expected else [])


def test_as_many_chunks_are_updated_early_as_have_spare_buffers():
    """Only some of four chunks have spare buffers: the chunks whose gradients are complete first in
    backward. Only these chunks are updated early."""
    case = Case(4, 4, parameters=False, host_share=1.0, dtype=BF16)
    states, spare = 4 * CHUNK * (2 + 4 + 8 + 4), CHUNK * (2 + 4 + 8)
    for limit, count in ((0, 0), (spare - 1, 0), (2 * spare, 2), (9 * spare, 4)):
        tower = Tower(4)
        engine = make_engine(tower, case, ALONE)
        engine.add_spare(limit)
        assert engine.memory.num_bytes[Tier.HOST] == states + count * spare
        assert engine.state_bytes()["host"] == states + count * spare + 2 * 4 * CHUNK
        assert engine.state_bytes()["total"] == 0
        for _ in range(2):
            engine.start_step((LR, 1.0))
            tower(batch(0, BF16)).square().sum().backward()
            engine.gradients.reduce(0)
            engine.gradients.finish()
            assert sorted(engine._updates._early) == list(range(4))[4 - count :]
            engine.update(LR)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize(("slots", "microbatches"), [(1, 1), (2, 3), (4, 2)])
def test_link_bytes_equal_the_formula(slots, microbatches, rounds):
    """All states of n bf16 chunks of C elements are on the host. The cache on the device has B
    slots. A step that runs k microbatches one after the other copies 2 (2kn - (2k-1)B) C + gknC
    bytes. A gradient has g = 2 bytes (bf16) or g = 4 bytes (fp32). With one microbatch, the formula
    is 2 (2n - B) C + gnC."""
    n, k, g = 5, microbatches, 2 if rounds else 4
    case = Case(n, slots, k, dtype=BF16, parameters=False, host_share=1.0, rounds=rounds)
    case = case._replace(steps=3, early=True, surprises=".cs")
    tower = Tower(n)
    engine = make_engine(tower, case, Group(1, 0))
    use_in_order(tower, engine, case, "forward")
    engine.wait()
    copied = 2 * (2 * k * n - (2 * k - 1) * slots) * CHUNK + g * k * n * CHUNK
    assert engine.memory.num_copied == case.steps * copied
    if k == 1:
        assert copied == 2 * (2 * n - slots) * CHUNK + g * n * CHUNK <= (4 + g) * n * CHUNK


def test_gradients_are_rounded_once_for_each_microbatch():
    """The gradient of each microbatch is rounded to bf16. The gradient of a step is the fp32 sum of
    the rounded gradients, for chunks on the device and for chunks on the host."""
    for share in (0.0, 0.5, 1.0):
        case = Case(4, 4, 3, parameters=False, gradients=share > 0, host_share=share, rounds=True)
        tower, plain = Tower(4), Tower(4)
        engine = make_engine(tower, case, ALONE)
        engine.start_step()
        sums = [torch.zeros(CHUNK) for _ in range(4)]
        for number in range(3):
            plain.zero_grad()
            for model in (tower, plain):
                (model(batch(number, FP32)) - 1).square().mean().backward()
            engine.gradients.reduce(0)
            for total, parameter in zip(sums, plain.parameters(), strict=True):
                total += parameter.grad.flatten().bfloat16()
        engine.gradients.finish()
        for state, total in zip(engine.chunks, sums, strict=True):
            assert torch.equal(state.grad, total), share


class GatedAdamW(AdamW):
    """AdamW whose early updates wait for `gate`, and then fail if `fails` is set."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(OptimConfig(lr=LR, min_lr=0.0))
        self.gate, self.started = threading.Event(), threading.Event()
        self.fails = fails
        self.early: list[int] = []
        """Numbers of the chunks whose early update is complete, in the order of the updates."""
        self.in_place: list[int] = []
        """Numbers of the chunks with an update that was not early, in the order of the updates."""

    def update_into(self, into: ShardBuffers, state: ChunkState, *arguments: Any) -> None:
        self.started.set()
        assert self.gate.wait(30)
        if self.fails:
            raise MemoryError("no memory")
        super().update_into(into, state, *arguments)
        self.early.append(state.chunk.number)

    def update(self, state: ChunkState, *arguments: Any) -> None:
        self.in_place.append(state.chunk.number)
        super().update(state, *arguments)


def run_to_norm(tower: Tower, engine: ChunkEngine, step: int, microbatches: int = 1) -> None:
    """Run forward and backward of a step, and compute the norm, without an update."""
    engine.start_step((LR, 0.5))
    for number in range(microbatches):
        (tower(batch(step + number, FP32)) - 1).square().float().mean().backward()
        engine.gradients.reduce(0)
    engine.gradients.finish()


def make_gated(case: Case, fails: bool = False) -> tuple[Tower, ChunkEngine, GatedAdamW]:
    tower, optimizer = Tower(case.n), GatedAdamW(fails)
    engine = make_engine(tower, case, ALONE)
    engine.optimizer = engine._updates._optimizer = optimizer
    return tower, engine, optimizer


GATED = Case(4, 4, parameters=False, host_share=1.0, early=True, poison=True)


def test_early_updates_that_have_not_started_are_cancelled(monkeypatch):
    """Chunk 3 is being updated when the norm is known. The early updates of all other chunks are
    cancelled before the first of these chunks is added to the queue again. The chunks are then
    updated in forward order."""
    expected = use_in_order(tower := Tower(4), make_engine(tower, GATED, ALONE), GATED, "forward")
    tower, engine, optimizer = make_gated(GATED)
    add = UpdateQueue.add

    def check_and_add(queue: UpdateQueue, state: ChunkState, *arguments: float) -> None:
        waiting = [n for n, early in queue._early.items() if not early.job.cancelled()]
        assert waiting == [3]
        add(queue, state, *arguments)

    monkeypatch.setattr(UpdateQueue, "add", check_and_add)
    for step in range(GATED.steps):
        optimizer.gate.clear()
        optimizer.started.clear()
        run_to_norm(tower, engine, step)
        assert optimizer.started.wait(30)
        engine.update(LR, 0.5)
        optimizer.gate.set()
        engine.wait()
    assert optimizer.early == [3] * 2 and optimizer.in_place == [0, 1, 2] * 2
    with torch.no_grad():
        loss = (tower(batch(0, FP32)) - 1).square().mean().item()
    assert loss < expected[0]


def test_early_updates_of_a_step_without_update_are_cancelled():
    """The first step has no update, as if a gradient was not finite. When the next step begins,
    early updates of the first step that have not started are cancelled."""
    tower, engine, optimizer = make_gated(GATED)
    run_to_norm(tower, engine, 0)
    assert optimizer.started.wait(30)
    engine.start_step((LR, 0.5))
    optimizer.gate.set()
    run_to_norm(tower, engine, 0)
    engine.update(LR, 0.5)
    engine.wait()
    assert sorted(optimizer.early[1:] + optimizer.in_place) == [0, 1, 2, 3]


def test_an_error_of_an_early_update_is_raised():
    tower, engine, optimizer = make_gated(GATED, fails=True)
    optimizer.gate.set()
    run_to_norm(tower, engine, 0)
    assert optimizer.started.wait(30)
    engine.update(LR, 0.5)
    with pytest.raises(MemoryError, match="no memory"):
        engine.wait()


def test_more_microbatches_than_planned_discard_early_updates():
    """After the last planned microbatch, all chunks are updated early. A further microbatch changes
    the gradients, so the early updates must not be used."""
    masters = []
    for early in (True, False):
        tower, engine, optimizer = make_gated(GATED._replace(early=early))
        optimizer.gate.set()
        for step in range(2):
            run_to_norm(tower, engine, step, microbatches=2)
            engine.update(LR, 0.5)
        engine.wait()
        assert optimizer.in_place == [0, 1, 2, 3] * 2
        masters.append([state.master.clone() for state in engine.chunks])
    assert all(map(torch.equal, *masters))


def test_updates_leave_a_core_for_launches(monkeypatch):
    """With an accelerator, the number of threads for updates follows from the number of cores of
    the rank. The number does not follow from the number of torch threads, which is 1 in
    deterministic mode."""
    monkeypatch.setattr(memory, "available_cores", lambda: 16)
    monkeypatch.setattr(memory, "read_local_size", lambda: 2)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert [memory.update_threads(1, cuda), memory.update_threads(6, cpu)] == [7, 5]
    monkeypatch.setattr(memory, "available_cores", lambda: 1)
    assert [memory.update_threads(1, cuda), memory.update_threads(1, cpu)] == [1, 1]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    queue = make_engine(Tower(2), Case(2, parameters=False, host_share=1.0), ALONE)._updates
    monkeypatch.undo()
    assert queue._submit(torch.get_num_threads, 1).result() == 3
