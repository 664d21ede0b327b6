"""Tests of two checks: each parameter has process groups, and all ranks of a group have the same
parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optimus.chunks.engine import ChunkEngine
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.optimizer import AdamW
from optimus.chunks.options import ParamOptions
from optimus.config import OptimConfig
from optimus.distributed.collectives import Group
from optimus.errors import ConfigError
from optimus.observe.events import TrafficMeter
from tests.kit.ranks.worlds import everyone

SHAPES = {"first": (4, 8), "second": (64,), "third": (64,)}


def make_engine(shapes: dict, groups: ParamProcessGroups | None, everyone: Group) -> ChunkEngine:
    named = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    return ChunkEngine(
        named,
        lambda name: None if name == "orphan" else groups,
        AdamW(OptimConfig()),
        dtype=torch.float32,
        chunk_length=100,
        everyone=everyone,
    )


def build(other: dict | None, options: ParamOptions | None) -> tuple[str, int]:
    """Make an engine on this rank.

    Args:
        other: Shapes of the parameters of the last rank; None: SHAPES, as on other ranks.
        options: Options of the parameters of the last rank; None: defaults, as on other ranks.

    Returns:
        The message of the ConfigError ("" if there is no error), and the number of collectives on
        tensors.
    """
    meter = TrafficMeter()
    group = everyone("dp", meter)
    is_last = group.rank == group.size - 1
    shapes = other if is_last and other is not None else SHAPES
    used = options if is_last and options is not None else ParamOptions()
    try:
        make_engine(
            shapes, ParamProcessGroups(reduce_group=group, replica_group=group, options=used), group
        )
    except ConfigError as error:
        return str(error), 0
    return "", sum(calls for calls, _ in meter.counts.values())


ORDER = {name: SHAPES[name] for name in ("first", "third", "second")}


@pytest.mark.parametrize(
    ("other", "options", "message"),
    [
        (ORDER, None, r"has second \[64\].*, and rank 2 has third \[64\]"),
        (SHAPES | {"second": (65,)}, None, r"has second \[64\].*, and rank 2 has second \[65\]"),
        ({"first": (4, 8)}, None, r"has second \[64\].*, and rank 2 has none"),
        (SHAPES | {"more": (1,)}, None, r"rank 0 has none, and rank 2 has more \[1\]"),
        (None, ParamOptions(lr_scale=0.5), r"has first .*lr_scale=1.0.* has first .*=0.5"),
    ],
)
def test_the_first_parameter_that_differs_is_named_on_all_ranks(ranks, other, options, message):
    """On the last of three ranks, the parameters have another order, a parameter has another shape,
    two parameters are missing, there is an additional parameter, or the parameters have other
    options. All ranks raise the same error, in one line."""
    results = ranks(3, build, other, options)
    assert len({text for text, _ in results}) == 1
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(results[0][0])
    assert "\n" not in results[0][0]


def test_ranks_that_agree_exchange_only_hashes(ranks):
    """Three ranks have the same parameters. No rank raises an error, and the meter counts no
    collective on tensors."""
    assert ranks(3, build, None, None) == [("", 0)] * 3


def test_a_parameter_without_groups_is_named():
    """One parameter has no process groups. The error contains the name of this parameter."""
    with pytest.raises(ConfigError, match="parameter orphan has no process groups"):
        make_engine(SHAPES | {"orphan": (3,)}, ParamProcessGroups(), Group(1, 0))


def build_on_different_stages() -> str:
    """Make an engine whose parameters belong to a different pipeline stage on each rank. Return the
    error message.

    Parameters of different stages are in different classes, so the ranks have no common class.
    """
    group = everyone("dp")
    groups = ParamProcessGroups(reduce_group=group, replica_group=group, stage=group.rank)
    try:
        make_engine(SHAPES, groups, group)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_class_that_another_rank_lacks_is_an_error(ranks):
    """Each of two ranks has a class of parameters (parameters with the same process groups) that
    the other rank lacks. Without the check, each rank would wait forever in the collectives of its
    class. Both ranks raise an error instead."""
    for text in ranks(2, build_on_different_stages):
        assert text.startswith("parameter first") and "not on all ranks" in text
