"""What travels along each axis, against closed formulas, to the byte.

Letters: T tokens of a microbatch, D hidden, K experts a token, L layers, M microbatches of a rank,
N targets of a microbatch, n ranks. All floats are fp32.
"""

from __future__ import annotations

import pytest

from optimus.bench.layout import bench_layout
from optimus.config import make_config
from optimus.launch_env import read_launch_env
from optimus.model.flops import count_parameters
from optimus.parallel.placement import whole_model
from tests.helpers.tiny import CONTEXT, tiny_tree

T, D, K, L, N = CONTEXT, 32, 2, 2, CONTEXT - 1
STREAM = 4 * T * D
"""One residual stream of a microbatch."""
COSINES = 4 * 4 * T
"""Sums of squares and slopes of the q- and k-norm of a layer."""
WEIGHTS, CHOICES = 4 * T * K, 8 * T * K
LOSS = 3 * 4 * N
"""Largest logit, sum of exponentials and chosen logit of every target."""


def bench(tree: dict) -> dict | None:
    return bench_layout(make_config(tree), 1, read_launch_env())


def traffic_of(ranks, size: int, **layout) -> dict[str, dict[str, int]]:
    """Payload bytes of a step by axes and operation, without sums of losses and of norms."""
    tree = tiny_tree("d", "r", train__deterministic=False, **layout)
    counted = ranks(size, bench, tree, start_world=False)[0]["traffic"]
    counted.pop("all ranks")
    return {axes: {name: size for name, (_, size) in ops.items()} for axes, ops in counted.items()}


def norms(size: int, parameters: int) -> dict[str, int]:
    """How the gradient norm is joined by ranks that hold one model: the longest number of terms,
    then the terms in fp64."""
    return {"all_reduce": 8, "all_gather": 8 * size * parameters}


def counted_parameters() -> int:
    model = whole_model(make_config(tiny_tree("d", "r")).model)
    return len(dict(model.named_parameters()))


def test_data_parallelism_adds_every_gradient_once(ranks):
    config = make_config(tiny_tree("d", "r"))
    total, _ = count_parameters(config.model)
    assert traffic_of(ranks, 2) == {"dp": {"all_reduce": 4 * total}}


def test_a_pipeline_sends_one_stream_for_each_microbatch(ranks):
    counted = traffic_of(ranks, 2, parallel__pp=2)
    assert counted["pp"].pop("send") == 8 * STREAM


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallelism(ranks, sequence_parallel):
    microbatches, held = 8, counted_parameters()
    counted = traffic_of(ranks, 2, parallel__tp=2, parallel__sequence_parallel=sequence_parallel)
    joined = norms(2, held)
    if not sequence_parallel:
        layer = 4 * STREAM + COSINES + WEIGHTS  # two blocks, there and back; the router's share
        ends = 2 * STREAM + LOSS  # embedding forward, head backward
        expected = {
            "all_reduce": microbatches * (L * layer + ends) + joined["all_reduce"],
            "all_gather": joined["all_gather"],
        }
    else:
        partial = 4 * (2 * L + 1) * D  # norms of the stream see a part of the sequence
        # Experts' inputs and routing weights are summed, the rest is gathered and scattered.
        expected = {
            "all_reduce": microbatches * (L * (STREAM + WEIGHTS + COSINES) + LOSS)
            + partial
            + joined["all_reduce"],
            "all_gather": microbatches * (4 * L + 2) * STREAM + joined["all_gather"],
            "reduce_scatter": microbatches * (3 * L + 2) * STREAM,
        }
    assert counted == {"tp": expected}


def test_expert_parallelism_by_allgather(ranks):
    microbatches, n, held = 4, 2, counted_parameters()
    config = make_config(tiny_tree("d", "r"))
    model = whole_model(config.model)
    shared = sum(p.numel() for name, p in model.named_parameters() if ".experts." not in name)
    joined = norms(n, held)
    expected = {
        "all_gather": microbatches * L * n * (2 * STREAM + WEIGHTS + CHOICES)
        + joined["all_gather"],
        "reduce_scatter": microbatches * L * n * (2 * STREAM + WEIGHTS),
        "all_reduce": 4 * shared + joined["all_reduce"],
    }
    assert traffic_of(ranks, 2, parallel__ep=2) == {"ep": expected}
