"""Test that zb-h1 defers the weight gradients of experts.

After training, the losses and weights are bit-identical to the results with 1f1b.
"""

from __future__ import annotations

import importlib
import time
import weakref
from typing import NamedTuple

import torch

from optimus.observe.events import ActionTrace
from optimus.parallel.pipeline.actions import Kind, Schedule
from optimus_kernels import experts_loop
from tests.kit.layouts.schedule_proof import validate
from tests.kit.runs.tiny import CONTEXT, tiny_tree
from tests.kit.runs.training import local_batch, make_updater

MICROBATCHES, EXPERTS = 6, 4


class Seen(NamedTuple):
    layers: int
    """Number of layers on this rank."""
    losses: list[tuple[float, float]]
    weights: dict[str, torch.Tensor]
    products: dict[Kind, int]
    """For each kind of action, the number of weight-gradient computations of experts during actions
    of this kind."""
    alive: int
    """Largest number of deferred computations that exist at the same time."""
    most_alive: int
    """Largest number of microbatches whose activations this rank keeps at the same time. The value
    comes from `validate`."""
    most_waiting: int
    """Largest number of microbatches that wait for action W at the same time. The wait starts after
    action I."""


def watch_updates(schedule: str) -> Seen:
    """Run two optimizer steps with `schedule` on this rank. Return the loss and the gradient
    norm of each step, the weights, and the numbers of weight-gradient computations."""
    layout = {"parallel__pp": 2, "parallel__schedule": schedule}
    batch = {"train__global_batch_tokens": MICROBATCHES * CONTEXT, "model__num_layers": 4}
    tree = tiny_tree("d", "r", **layout, **batch, train__dtype="bf16")
    trace = ActionTrace()
    _, _, groups, _, shard, _, updater = make_updater(tree, recorder=trace)
    times, alive = [], [0]
    _watch(times, alive)
    losses, products = [], dict.fromkeys(Kind, 0)
    for step in (1, 2):
        times.clear()
        trace.events.clear()
        result = updater.run(step, local_batch(groups, MICROBATCHES))
        losses.append((result.loss, result.grad_norm))
        for event in trace.events:
            inside = [event.start_ns <= at <= event.end_ns for at in times]
            products[Kind[event.kind]] += sum(inside)
    weights = {name: p.detach().clone() for name, p in shard.model.named_parameters()}
    made = shard.layout.schedule
    waiting = _most_waiting(made, groups.over("pp").rank)
    most_alive = validate(made)[groups.over("pp").rank]
    layers = len(shard.model.blocks)
    return Seen(layers, losses, weights, products, max(alive), most_alive, waiting)


def _watch(times: list[int], alive: list[int]) -> None:
    """Replace functions of the kernels by functions that record calls in `times` and `alive`.

    When a weight-gradient computation starts, its start time is appended to `times`. When a
    computation is deferred, the number of deferred computations that then exist is appended to
    `alive`.
    """
    take, works = experts_loop._Targets.take, weakref.WeakSet()
    # The attribute `experts` of the package is the function, not the module.
    experts_op = importlib.import_module("optimus_kernels.experts")

    def timed(targets, *operands) -> None:
        times.append(time.perf_counter_ns())
        take(targets, *operands)

    class Counted(experts_op.WeightWork):
        def __init__(self, *saved) -> None:
            super().__init__(*saved)
            works.add(self)
            alive.append(len(works))

    # The patches are not undone, because the process ends with the test.
    experts_loop._Targets.take = timed
    experts_op.WeightWork = Counted


def _most_waiting(schedule: Schedule, rank: int) -> int:
    waiting = most = 0
    for action in schedule.ranks[rank]:
        waiting += (action.kind is Kind.I) - (action.kind is Kind.W)
        most = max(most, waiting)
    return most


def test_experts_wait_for_w_and_train_to_the_bits_of_1f1b(ranks):
    plain = ranks(2, watch_updates, "1f1b", start_world=False)
    split = ranks(2, watch_updates, "zb-h1", start_world=False)
    for whole, halves in zip(plain, split, strict=True):
        computed = whole.products[Kind.B]
        assert 0 < computed <= 2 * MICROBATCHES * whole.layers * EXPERTS
        assert halves.products[Kind.W] == computed == sum(halves.products.values())
        assert whole.losses == halves.losses
        assert whole.weights.keys() == halves.weights.keys()
        assert all(torch.equal(weight, halves.weights[n]) for n, weight in whole.weights.items())
        assert whole.alive == 0 and halves.alive == halves.most_waiting * whole.layers > 0
        assert halves.most_waiting <= halves.most_alive
