from __future__ import annotations

import pytest

from optimus.bench.layout import _measured_bubble
from optimus.distributed.groups import plan_groups
from optimus.distributed.mesh import Mesh
from optimus.observe.events import ActionEvent
from optimus.parallel.pipeline.actions import Kind


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
