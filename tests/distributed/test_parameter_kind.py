"""Tests of the axes over which gradients are summed and optimizer states are sharded, for each kind
of parameter."""

from __future__ import annotations

import pytest

from optimus.distributed.mesh import ParameterKind

DENSE = ParameterKind(divided=("tp",))
NORM = ParameterKind()
PARTIAL = ParameterKind(partial=("tp",))
EXPERT = ParameterKind(divided=("ep", "tp"))


@pytest.mark.parametrize(
    ("kind", "sums"),
    [
        (DENSE, ("dp", "ep")),
        (NORM, ("dp", "ep")),
        (PARTIAL, ("dp", "ep", "tp")),
        (EXPERT, ("dp",)),
    ],
)
def test_sums(kind, sums):
    assert kind.sum_axes == sums


@pytest.mark.parametrize(
    ("kind", "so", "epso"),
    [(DENSE, ("dp",), ("dp", "ep")), (NORM, ("dp",), ("dp", "ep")), (EXPERT, ("dp",), ("dp",))],
)
def test_shards(kind, so, epso):
    assert kind.shard_axes("none") == ()
    assert kind.shard_axes("so") == so and kind.shard_axes("epso") == epso


def test_a_slice_has_no_partial_gradient():
    with pytest.raises(AssertionError):
        _ = ParameterKind(divided=("tp",), partial=("tp",)).sum_axes
