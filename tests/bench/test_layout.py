from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimus.bench.layout import _measured_bubble, bench_layout
from optimus.config import make_config
from optimus.distributed.groups import plan_groups
from optimus.distributed.mesh import Mesh
from optimus.errors import ConfigError
from optimus.launch.environment import read_launch_env
from optimus.observe.chrome_trace import TracedAction, write_trace
from optimus.observe.events import ActionEvent
from optimus.parallel.pipeline.actions import Kind
from optimus.parallel.pipeline.plan import schedule_of
from optimus.parallel.pipeline.simulate import simulate, unit_costs
from tests.kit.runs.tiny import tiny_tree


def trace(*actions: tuple[Kind, int, int]) -> list[ActionEvent]:
    """Return the events of consecutive actions, each (kind, duration, waiting time) in ns."""
    events, now = [], 100
    for kind, duration, waited in actions:
        events.append(ActionEvent(kind.name, 0, 0, now, now + duration, waited))
        now += duration
    return events


@pytest.mark.parametrize(
    ("actions", "bubble"),
    [
        ([(Kind.F, 10, 0), (Kind.B, 20, 0)], 0.0),
        ([(Kind.F, 10, 0), (Kind.SEND_ACTIVATION, 3, 0), (Kind.B, 32, 12)], 0.5),
        ([(Kind.F, 10, 0), (Kind.B, 20, 0), (Kind.REDUCE_GRAD, 40, 0), (Kind.OPT_STEP, 9, 0)], 0.0),
        ([(Kind.F, 10, 0), (Kind.REDUCE_GRAD, 40, 0), (Kind.B, 20, 0)], 0.0),
    ],
    ids=["none", "waiting", "reduction at the end", "reduction in between"],
)
def test_bubble_is_idle_time(actions, bubble):
    alone = plan_groups(Mesh(), 0)
    assert _measured_bubble(trace(*actions), alone) == pytest.approx(bubble)


def bench_with_trace(tree: dict, path: Path) -> dict | None:
    return bench_layout(make_config(tree), 1, read_launch_env(), path)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_trace_has_the_actions_of_the_simulated_schedule(ranks, tmp_path, schedule):
    layout = {"parallel__pp": 2, "parallel__schedule": schedule, "train__deterministic": False}
    config = make_config(tree := tiny_tree("d", "r", **layout))
    ranks(2, bench_with_trace, tree, tmp_path / "trace.json", start_world=False)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    timeline = simulate(schedule_of(config, Mesh(pp=2), 8), unit_costs())
    for rank, spans in enumerate(timeline.ranks):
        traced = [event for event in events if event["ph"] == "X" and event["tid"] == rank]
        actions = [span.action for span in spans]
        names = [TracedAction(a.kind.name, a.stage, a.microbatch, 0, 0).name for a in actions]
        assert [event["name"] for event in traced] == names
        ends = [event["ts"] + event["dur"] for event in traced]
        assert ends == sorted(ends) and traced[0]["ts"] > 0


def test_a_trace_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--trace .*missing.*: No such file or directory"):
        write_trace(tmp_path / "missing" / "trace.json", [], "measured")
