"""Test that the executor enters the context `last_backward` for the last backward of each stage."""

from __future__ import annotations

import contextlib

import pytest

from optimus.observe.events import ActionTrace
from tests.kit.runs.tiny import CONTEXT, tiny_tree
from tests.kit.runs.training import make_microbatch, make_updater


def last_actions(tree: dict) -> list[tuple[str, bool, bool]]:
    """Run a step and return the actions that this rank runs within `last_backward`.

    Returns:
        For each action: a text with the kind, stage and microbatch of the action; True if
        `last_backward` gets deferred weight gradients; and True if the deferred gradients include
        the gradients of all linear layers of the rank.
    """
    trace = ActionTrace()
    shard, entered = make_updater(tree, recorder=trace).model, []

    @contextlib.contextmanager
    def last_backward(stage: int, deferred):
        index = len(trace.events)  # the index of the next action
        linears = {id(p) for name, p in shard.model.named_parameters() if "proj" in name}
        yield
        assert len(trace.events) == index
        complete = deferred is not None and linears <= set(map(id, deferred))
        entered.append((index, deferred is not None, complete))

    batch = [make_microbatch(n) for n in range(3)]
    shard.executor.run(batch, lambda *_: None, lambda: None, last_backward=last_backward)
    return [
        (f"{trace.events[index].kind} {trace.events[index][1:3]}", deferred, complete)
        for index, deferred, complete in entered
    ]


@pytest.mark.parametrize(
    ("schedule", "virtual_stages"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)]
)
def test_the_last_backward_of_each_stage_is_entered(ranks, schedule, virtual_stages):
    tree = tiny_tree(
        "d", "r", parallel__pp=2, parallel__schedule=schedule, model__num_layers=4,
        parallel__virtual_stages=virtual_stages, train__global_batch_tokens=3 * CONTEXT,
        train__deterministic=False,
    )  # fmt: skip
    defers = schedule == "zb-h1"
    for rank, entered in enumerate(ranks(2, last_actions, tree, start_world=False)):
        stages = reversed(range(rank, 2 * virtual_stages, 2))
        kind = "W" if defers else "B"
        assert entered == [(f"{kind} {(s, 2)}", defers, defers) for s in stages]
