"""Where a step's time goes: nothing is lost, and each part is found in both passes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from optimus.bench import profile
from optimus.bench.profile import format_profile, profile_step
from optimus.config import make_config
from optimus.errors import ConfigError
from tests.helpers.tiny import tiny_tree

BOTH_PASSES = ("norms", "rotary", "attention", "projections", "vocabulary", "router", "embedding")
BOTH_PASSES += ("experts, rows", "experts, products", "cross-entropy")


def profiled() -> dict:
    fast = {"train__deterministic": False, "train__threads": 1}
    return profile_step(make_config(tiny_tree("d", "r", model__hidden_size=64, **fast)), 3)


def test_phases_and_parts_add_up_to_the_step(ranks):
    (found,) = ranks(1, profiled, start_world=False, timeout_s=120)
    assert all(seconds > 0 for seconds in found["phases"].values())
    parts = {part["part"]: part for part in found["parts"]}
    told = sum(part["seconds"] for part in parts.values())
    assert 0.5 * found["profiled_s"] < told <= found["profiled_s"]
    for name in BOTH_PASSES:
        assert parts[name]["forward_s"] > 0 and parts[name]["backward_s"] > 0, name
        assert parts[name]["update_s"] == 0 < parts[name]["bound_s"], name
    assert parts["AdamW"]["update_s"] > 0 == parts["AdamW"]["forward_s"]
    assert parts.get("other", {"seconds": 0})["seconds"] < 0.1 * told
    assert all(name in format_profile(found) for name in parts)


def event(name: str, parent: SimpleNamespace | None = None, number: int = -1) -> SimpleNamespace:
    """The fields of one of the profiler's events that are read."""
    return SimpleNamespace(name=name, cpu_parent=parent, sequence_nr=number)


def test_whose_an_ops_time_is():
    forward, backward = (event(f"{kind}(stage 0, microbatch 0)") for kind in "FB")
    again = event("aten::mul", event("part: norms", backward))
    assert profile._place(again, {}) == ("norms", "backward")  # computed again
    made = event("aten::mm", event("part: experts, rows", event("part: other", forward)), 7)
    part_of = profile._parts_of_forward([event("aten::t", made.cpu_parent, 6), made])
    assert part_of == {6: "experts, rows", 7: "experts, rows"}
    assert profile._place(made, part_of) == ("experts, products", "forward")
    node = event("autograd::engine::evaluate_function: MmBackward0", backward, 7)
    assert profile._place(event("aten::mul", node), part_of) == ("experts, rows", "backward")
    assert profile._place(node, part_of) == (profile._DISPATCH, "backward")


def test_a_device_is_refused(monkeypatch):
    world = SimpleNamespace(device=torch.device("meta"))
    monkeypatch.setattr(profile, "start_world", lambda *args, **more: world)
    with pytest.raises(ConfigError, match="set train.device=cpu"):
        profiled()
