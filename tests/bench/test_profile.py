"""Tests of the profile of a step: the times of the components add up to the time of the step, and
each component has a time in forward and a time in backward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from optimus.bench import profile
from optimus.bench.profile import format_profile, profile_step
from optimus.config import make_config
from optimus.errors import ConfigError
from tests.kit.runs.tiny import tiny_tree

BOTH_PASSES = ("norms", "rotary", "attention", "projections", "vocabulary", "router", "embedding")
BOTH_PASSES += ("experts, rows", "experts, products", "cross-entropy")


def profiled() -> dict:
    fast = {"train__deterministic": False, "train__threads": 1}
    return profile_step(make_config(tiny_tree("d", "r", model__hidden_size=64, **fast)), 3)


def test_phases_and_components_add_up_to_the_step(ranks):
    (result,) = ranks(1, profiled, start_world=False, timeout_s=120)
    assert all(seconds > 0 for seconds in result["phases"].values())
    rows = {row["part"]: row for row in result["parts"]}
    total = sum(row["seconds"] for row in rows.values())
    assert 0.5 * result["profiled_s"] < total <= result["profiled_s"]
    for name in BOTH_PASSES:
        assert rows[name]["forward_s"] > 0 and rows[name]["backward_s"] > 0, name
        assert rows[name]["update_s"] == 0 < rows[name]["bound_s"], name
    assert rows["AdamW"]["update_s"] > 0 == rows["AdamW"]["forward_s"]
    assert rows.get("other", {"seconds": 0})["seconds"] < 0.1 * total
    assert all(name in format_profile(result) for name in rows)


def event(name: str, parent: SimpleNamespace | None = None, number: int = -1) -> SimpleNamespace:
    """Return a fake profiler event with the attributes that optimus.bench.profile reads."""
    return SimpleNamespace(name=name, cpu_parent=parent, sequence_nr=number)


def test_component_and_phase_of_an_op():
    forward, backward = (event(f"{kind}(stage 0, microbatch 0)") for kind in "FB")
    again = event("aten::mul", event("component: norms", backward))
    assert profile._classify(again, {}) == ("norms", "backward")  # recomputed in backward
    made = event(
        "aten::mm", event("component: experts, rows", event("component: other", forward)), 7
    )
    in_forward = profile._components_of_nodes([event("aten::t", made.cpu_parent, 6), made])
    assert in_forward == {6: "experts, rows", 7: "experts, rows"}
    assert profile._classify(made, in_forward) == ("experts, products", "forward")
    node = event("autograd::engine::evaluate_function: MmBackward0", backward, 7)
    assert profile._classify(event("aten::mul", node), in_forward) == ("experts, rows", "backward")
    assert profile._classify(node, in_forward) == (profile._DISPATCH, "backward")


def test_accelerator_is_refused(monkeypatch):
    world = SimpleNamespace(device=torch.device("meta"))
    monkeypatch.setattr(profile, "start_world", lambda *args, **more: world)
    with pytest.raises(ConfigError, match="set train.device=cpu"):
        profiled()
