"""Tests of the number of bytes that ranks communicate along each axis, against closed formulas.

The bytes are taken from the planned collectives, which equal the collectives of a run
(tests/rank/test_traffic.py).

Symbols: T tokens of a microbatch, D hidden, K experts per token, L layers, N targets of a
microbatch, n ranks. All floats are fp32.
"""

from __future__ import annotations

import re

import pytest

from optimus.bench.layout import bench_layout, format_layout
from optimus.chunks.layout import Parameter, lay_out
from optimus.config import make_config
from optimus.distributed.mesh import make_mesh
from optimus.launch.environment import read_launch_env
from optimus.model.flops import count_parameters
from optimus.parallel.placement import whole_model
from optimus.rank.traffic import plan_traffic
from tests.kit.runs.tiny import CONTEXT, tiny_tree

T, D, K, L, N = CONTEXT, 32, 2, 2, CONTEXT - 1
STREAM = 4 * T * D
"""Size of the residual stream of a microbatch in bytes."""
COSINES = 4 * 4 * T  # one fp32 sum per token, norm and pass
"""Bytes that the q-norm and the k-norm of a layer all-reduce for a microbatch."""
WEIGHTS, CHOICES = 4 * T * K, 8 * T * K
LOSS = 3 * 4 * N
"""Bytes that the loss of a microbatch all-reduces: three fp32 numbers for each target."""

UNORDERED = {"train__deterministic": False}


def bench(tree: dict) -> dict | None:
    return bench_layout(make_config(tree), 1, read_launch_env())


def traffic_of(size: int, **layout) -> dict[str, dict[str, int]]:
    """Return the planned bytes that the first rank of `size` ranks communicates in a step.

    The result maps each combination of mesh axes to a dict from operation to number of bytes.
    Collectives over all ranks are not counted.
    """
    config = make_config(tiny_tree("d", "r", **{**UNORDERED, **layout}))
    mesh, counted = make_mesh(config.parallel, size), dict[str, dict[str, int]]()
    for axes, name, num_bytes in plan_traffic(config, mesh, mesh.coordinate(0)):
        if axes != "all ranks":
            of_axes = counted.setdefault(axes, {})
            of_axes[name] = of_axes.get(name, 0) + num_bytes
    return counted


def chunked(ranks: int, *substrings: str) -> int:
    """Return the number of elements, with padding, of a chunk that is reduced over `ranks` ranks.

    The chunk has all parameters whose names contain one of `substrings`.
    """
    model = whole_model(make_config(tiny_tree("d", "r")).model)
    named = [
        Parameter(name, tuple(p.shape), None, ranks)
        for name, p in model.named_parameters()
        if any(substring in name for substring in substrings)
    ]
    return lay_out(named, 1 << 24).length


def test_data_parallelism_adds_each_gradient_once():
    config = make_config(tiny_tree("d", "r"))
    total, _ = count_parameters(config.model)
    chunk = chunked(2, "")
    assert total <= chunk <= 1.01 * total
    assert traffic_of(2) == {"dp": {"all_reduce": 4 * chunk}}


def test_divided_states_are_reduced_to_shards_and_parameters_gathered():
    size = 4 * chunked(2, "")
    counted = traffic_of(2, optim__sharding="epso")
    assert counted == {"dp": {"reduce_scatter": size, "all_gather": size}}


def test_a_pipeline_sends_a_stream_for_each_microbatch():
    counted = traffic_of(2, parallel__pp=2)
    assert counted == {"pp": {"send": 8 * STREAM}}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallelism(sequence_parallel):
    microbatches = 8
    counted = traffic_of(2, parallel__tp=2, parallel__sequence_parallel=sequence_parallel)
    if not sequence_parallel:
        # Per layer: the outputs of attention and experts, and the gradients of their inputs; the
        # sums of the q- and k-norm; the gradients of routing weights.
        layer = 4 * STREAM + COSINES + WEIGHTS
        ends = 2 * STREAM + LOSS  # the embedding's forward, the head's backward
        expected = {
            "all_reduce": microbatches * (L * layer + ends),
        }
    else:
        # The norms of the residual stream receive only a share of the sequence on each rank, so
        # their gradients are all-reduced.
        partial = 4 * chunked(1, "attention_norm", "mlp_norm", "final_norm")
        # As without sequence parallelism, the gradients of the experts' inputs and of routing
        # weights are all-reduced. Other activations are all-gathered and reduce-scattered.
        expected = {
            "all_reduce": microbatches * (L * (STREAM + WEIGHTS + COSINES) + LOSS) + partial,
            "all_gather": microbatches * (4 * L + 2) * STREAM,
            "reduce_scatter": microbatches * (3 * L + 2) * STREAM,
        }
    assert counted == {"tp": expected}


def test_expert_parallelism_by_allgather():
    microbatches, n = 4, 2
    shared = chunked(n, "norm", "proj", "router", "embed", "head")
    expected = {
        "all_gather": microbatches * L * n * (2 * STREAM + WEIGHTS + CHOICES),
        "reduce_scatter": microbatches * L * n * (2 * STREAM + WEIGHTS),
        "all_reduce": 4 * shared,
    }
    chosen = {"parallel__ep": 2, "parallel__ep_dispatch": "allgather"}
    assert traffic_of(2, **chosen) == {"ep": expected}


def test_auto_dispatch_is_chosen_before_traffic_is_counted(ranks):
    result = ranks(2, bench, tiny_tree("d", "r", parallel__ep=2), start_world=False)[0]
    line = "parallel.ep_dispatch: allgather (selected by train.deterministic)"
    assert result["settled"] == [line]
    assert result["settled"][0] in format_layout(result).splitlines()
    counted = {
        axes: {name: num_bytes for name, (_, num_bytes) in operations.items()}
        for axes, operations in result["traffic"].items()
        if axes != "all ranks"
    }
    assert counted == traffic_of(2, parallel__ep=2, train__deterministic=True)
    tree = tiny_tree("d", "r", parallel__ep=2, **UNORDERED)
    result = ranks(2, bench, tree, start_world=False)[0]
    assert re.search(r"(allgather|alltoall) \(allgather .* ms, alltoall .* ms", *result["settled"])


def test_expert_parallelism_by_alltoall():
    """A token has two experts. With uniform routing, both experts are on the same rank.

    Each rank therefore sends each of its tokens once. The counted bytes include tokens whose
    experts are on the sending rank.
    """
    microbatches, n = 4, 2
    # Inputs and outputs of the experts, in forward and backward; routing weights and their
    # gradients; the indices of the chosen experts; the counts of rows.
    layer = 4 * STREAM + 2 * WEIGHTS + CHOICES + 8 * n
    expected = microbatches * L * layer
    counted = traffic_of(
        2, parallel__ep=2, parallel__ep_dispatch="alltoall", model__router="uniform"
    )
    shared = chunked(n, "norm", "proj", "router", "embed", "head")
    assert counted == {"ep": {"all_to_all": expected, "all_reduce": 4 * shared}}


def test_axes_together_add_up():
    """With dp = 2 and tp = 2, a rank has half as many microbatches as with tp = 2 alone. The bytes
    over tp must therefore be half of the bytes with tp = 2 alone."""
    alone = traffic_of(2, parallel__tp=2)["tp"]["all_reduce"]
    counted = traffic_of(4, parallel__tp=2, parallel__dp=2)
    assert counted["tp"] == {"all_reduce": alone // 2}
    assert counted.keys() == {"tp", "dp"} and counted["dp"].keys() == {"all_reduce"}
