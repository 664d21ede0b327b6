"""What the executor tells while it runs."""

from __future__ import annotations

import contextlib

import pytest

from optimus.observe.events import ActionTrace
from tests.helpers.tiny import CONTEXT, tiny_tree
from tests.helpers.updates import make_shard, numbered


def last_actions(tree: dict) -> list[tuple[str, bool, bool]]:
    """What runs within `last_backward` on a pipeline rank; whether its late gradients are told of,
    and are those of its own linear layers."""
    trace = ActionTrace()
    shard, found = make_shard(tree, recorder=trace).shard, []

    @contextlib.contextmanager
    def last_backward(stage: int, late):
        index = len(trace.events)  # of the action that starts
        own = {id(p) for name, p in shard.model.named_parameters() if "proj" in name}
        yield
        assert len(trace.events) == index
        right = late is not None and own <= set(map(id, late))
        found.append((index, late is not None, right))

    own = [numbered(n) for n in range(3)]
    shard.executor.run(own, lambda *_: None, lambda: None, last_backward=last_backward)
    return [
        (f"{trace.events[index].kind} {trace.events[index][1:3]}", late, right)
        for index, late, right in found
    ]


@pytest.mark.parametrize(
    ("schedule", "virtual_stages"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)]
)
def test_the_last_backward_of_each_stage_is_told(ranks, schedule, virtual_stages):
    tree = tiny_tree(
        "d", "r", parallel__pp=2, parallel__schedule=schedule, model__num_layers=4,
        parallel__virtual_stages=virtual_stages, train__global_batch_tokens=3 * CONTEXT,
        train__deterministic=False,
    )  # fmt: skip
    late = schedule == "zb-h1"
    for rank, told in enumerate(ranks(2, last_actions, tree, start_world=False)):
        stages = reversed(range(rank, 2 * virtual_stages, 2))
        kind = "W" if late else "B"
        assert told == [(f"{kind} {(s, 2)}", late, late) for s in stages]
