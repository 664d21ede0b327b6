"""Checks that each parameter has groups, and that ranks of a group have the same parameters."""

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
        other: Shapes of the parameters of the last rank; None: those of all ranks.
        options: Options of the parameters of the last rank; None: those of all ranks.

    Returns:
        The message of the ConfigError, "" if there is none, and the number of collectives of
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
        (ORDER, None, r"parameter second \[64\].* rank 2 has third \[64\].* in its place"),
        (SHAPES | {"second": (65,)}, None, r"parameter second \[64\].* has second \[65\]"),
        ({"first": (4, 8)}, None, r"parameter second \[64\].* rank 2 has none in its place"),
        (SHAPES | {"more": (1,)}, None, r"parameter more \[1\].* rank 2 has none|parameter more"),
        (None, ParamOptions(lr_scale=0.5), r"parameter first .*lr_scale=1.0.* has first .*=0.5"),
    ],
)
def test_the_first_parameter_that_differs_is_named_on_all_ranks(ranks, other, options, message):
    """The last of three ranks has its parameters in another order, with another shape, without
    some, with one more, or with other options. All ranks raise the same error, in one line."""
    results = ranks(3, build, other, options)
    assert len({text for text, _ in results}) == 1
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(results[0][0])
    assert "\n" not in results[0][0]


def test_ranks_that_agree_exchange_only_hashes(ranks):
    """Three ranks have the same parameters. None raises an error, and the meter counts no
    collective of tensors."""
    assert ranks(3, build, None, None) == [("", 0)] * 3


def test_a_parameter_without_groups_is_named():
    """One parameter has no groups. The error has its name."""
    with pytest.raises(ConfigError, match="parameter orphan has no groups"):
        make_engine(SHAPES | {"orphan": (3,)}, ParamProcessGroups(), Group(1, 0))


def build_on_different_stages() -> str:
    """Make an engine whose parameters are of another stage on each rank, and return the error.

    A class of parameters contains the stage, so each rank lacks the class of the other rank.
    """
    group = everyone("dp")
    groups = ParamProcessGroups(reduce_group=group, replica_group=group, stage=group.rank)
    try:
        make_engine(SHAPES, groups, group)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_class_that_another_rank_lacks_is_an_error(ranks):
    """Each of two ranks would wait in the collectives of a class that the other rank lacks. Both
    raise an error instead."""
    for text in ranks(2, build_on_different_stages):
        assert text.startswith("parameter first") and "not all ranks" in text
