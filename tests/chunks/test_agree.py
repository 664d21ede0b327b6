"""Parameters without groups, or laid out otherwise on another rank, are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optimus.chunks.engine import ChunkEngine
from optimus.chunks.optimizer import AdamW
from optimus.chunks.setting import Setting
from optimus.chunks.states import Home
from optimus.config import OptimConfig
from optimus.distributed.collectives import Group
from optimus.errors import ConfigError
from optimus.observe.events import TrafficMeter
from tests.helpers.worlds import everyone

SHAPES = {"first": (4, 8), "second": (64,), "third": (64,)}


def make_engine(shapes: dict, home: Home | None, everyone: Group) -> ChunkEngine:
    named = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    return ChunkEngine(
        named,
        lambda name: None if name == "orphan" else home,
        AdamW(OptimConfig()),
        dtype=torch.float32,
        chunk_length=100,
        everyone=everyone,
    )


def build(other: dict | None, setting: Setting | None) -> tuple[str, int]:
    """What is raised where the last rank has `other` parameters or another setting."""
    meter = TrafficMeter()
    group = everyone("dp", meter)
    is_last = group.rank == group.size - 1
    shapes = other if is_last and other is not None else SHAPES
    own = setting if is_last and setting is not None else Setting()
    try:
        make_engine(shapes, Home(adders=group, spread=group, setting=own), group)
    except ConfigError as error:
        return str(error), 0
    return "", sum(calls for calls, _ in meter.counts.values())


ORDER = {name: SHAPES[name] for name in ("first", "third", "second")}


@pytest.mark.parametrize(
    ("other", "setting", "told"),
    [
        (ORDER, None, r"parameter second \[64\].* rank 2 has third \[64\].* in its place"),
        (SHAPES | {"second": (65,)}, None, r"parameter second \[64\].* has second \[65\]"),
        ({"first": (4, 8)}, None, r"parameter second \[64\].* rank 2 has none in its place"),
        (SHAPES | {"more": (1,)}, None, r"parameter more \[1\].* rank 2 has none|parameter more"),
        (None, Setting(lr_scale=0.5), r"parameter first .*lr_scale=1.0.* has first .*=0.5"),
    ],
)
def test_the_first_parameter_that_differs_is_named_on_all_ranks(ranks, other, setting, told):
    results = ranks(3, build, other, setting)
    assert len({text for text, _ in results}) == 1
    with pytest.raises(ConfigError, match=told):
        raise ConfigError(results[0][0])
    assert "\n" not in results[0][0]


def test_ranks_that_agree_send_nothing_but_hashes(ranks):
    assert ranks(3, build, None, None) == [("", 0)] * 3


def test_a_parameter_without_groups_is_named():
    with pytest.raises(ConfigError, match="parameter orphan has no groups"):
        make_engine(SHAPES | {"orphan": (3,)}, Home(), Group(1, 0))


def build_in_classes_that_miss() -> str:
    """One rank has no member of a class that the other would wait for."""
    group = everyone("dp")
    home = Home(adders=group, spread=group, stage=group.rank)
    try:
        make_engine(SHAPES, home, group)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_class_that_another_rank_lacks_is_no_hang(ranks):
    for text in ranks(2, build_in_classes_that_miss):
        assert text.startswith("parameter first") and "not all ranks" in text
