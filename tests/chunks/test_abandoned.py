"""Tests of steps that an error ends early: the steps after the error compute the same bits as a run
without errors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from optimus.chunks.engine import ChunkEngine
from optimus.chunks.reductions import ReducePerMicrobatch
from optimus.config.machine import Links
from optimus.distributed.collectives import ALONE
from tests.kit.layouts.tower import CHUNK, LR, Case, Tower, batch, make_engine
from tests.kit.layouts.whole import whole_of

RATE = 4 * CHUNK / 0.001
"""Bytes per second with which the copy of a chunk takes a millisecond."""


class StepError(Exception):
    """Error that ends a step."""


def run_step(
    tower: Tower, engine: ChunkEngine, case: Case, number: int, at: tuple[str, int, int] | None
) -> None:
    """Run a step. If `at` is not None, the step raises StepError at `at` = (phase, microbatch,
    layer)."""

    def fail_at(phase: tuple[str, int, int]) -> None:
        if phase == at:
            raise StepError

    def fail(grad: Any) -> None:
        raise StepError

    engine.start_step((LR, 0.5))
    for microbatch in range(case.microbatches):
        values = batch(number * case.microbatches + microbatch, case.dtype)
        for index, layer in enumerate(tower.layers):
            fail_at(("forward", microbatch, index))
            values = layer(values)
            if at == ("backward", microbatch, index):
                values.register_hook(fail)
        (values - 1).square().float().mean().backward()
        fail_at(("reduce", microbatch, 0))
        engine.gradients.reduce(0)
    fail_at(("finish", 0, 0))
    engine.gradients.finish()
    fail_at(("update", 0, 0))
    known = engine.grad_norm()
    if isinstance(engine.gradients._strategy, ReducePerMicrobatch):
        engine.gradients._strategy.squares.clear()
        assert known == engine.grad_norm()
    engine.update(LR, 0.5)


def masters(case: Case, seed: int | None) -> torch.Tensor:
    """Train `case.steps` steps, and return all master weights as one tensor. If `seed` is not None,
    also run up to two steps that end with an error before each training step. After each error, a
    forward uses the parameters."""
    tower, chance = Tower(case.n), random.Random(seed)
    engine = make_engine(tower, case, ALONE)
    for step in range(case.steps):
        for _ in range(0 if seed is None else chance.randint(0, 2)):
            phase = chance.choice(("forward", "backward", "backward", "reduce", "finish", "update"))
            repeats = phase in ("forward", "backward", "reduce")
            microbatch = chance.randrange(case.microbatches) if repeats else 0
            layer = chance.randrange(case.n) if phase in ("forward", "backward") else 0
            with pytest.raises(StepError):
                run_step(tower, engine, case, 50, (phase, microbatch, layer))
            with torch.no_grad():
                assert tower(batch(3, case.dtype)).isfinite().all()
        run_step(tower, engine, case, step, None)
    return torch.cat([values.flatten() for values in whole_of(engine, "master").values()])


@pytest.mark.parametrize(
    "links", [None, Links(to_device=RATE, to_host=RATE)], ids=["instant", "links"]
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_abandoned_steps_change_no_bit(microbatches, links):
    case = Case(5, 2, microbatches, steps=4, parameters=False, poison=True)
    whole = masters(case._replace(gradients=False, poison=False), None)
    for seed in range(12):
        share, copies = (0.4, 1.0)[seed % 2], ("early", "late", "random")[seed % 3]
        changes = {"host_share": share, "copies": copies, "links": links, "delay_s": 0.001}
        changed = case._replace(**changes, early=seed % 4 > 0)
        assert torch.equal(masters(changed, seed), whole), seed
