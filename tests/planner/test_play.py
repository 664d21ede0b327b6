"""Tests of the event simulator: bubbles, shared ports, collectives that computation hides."""

from __future__ import annotations

import pytest

from optimus.parallel.pipeline.actions import Action, Kind, Schedule
from optimus.parallel.pipeline.schedules import make_schedule
from optimus.parallel.pipeline.simulate import bubble_ratio, simulate, unit_costs
from optimus.planner.play import Transfers, play

SCHEDULES = [
    ("1f1b", 4, 1, 8),
    ("1f1b", 1, 1, 3),
    ("gpipe", 4, 1, 6),
    ("interleaved", 4, 2, 8),
    ("zb-h1", 4, 1, 8),
    ("zb-h1", 8, 1, 5),
]


@pytest.mark.parametrize(("name", "p", "v", "m"), SCHEDULES)
def test_bubble_without_transfers_equals_its_formula(name, p, v, m):
    played = play(make_schedule(name, p, v, m), unit_costs(v))
    assert played.bubble_ratio == pytest.approx(bubble_ratio(name, p, v, m))
    assert not any(played.transfers)


@pytest.mark.parametrize(("name", "p", "v", "m"), SCHEDULES[:1] + SCHEDULES[3:5])
def test_transfers_that_do_not_share_a_port_delay_only_their_receivers(name, p, v, m):
    """A rank never sends two tensors at once if a transfer is shorter than an action."""
    schedule = make_schedule(name, p, v, m)

    def cost(action: Action) -> float:
        sends = action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
        return 0.25 if sends else unit_costs(v)(action)

    played = play(schedule, cost, Transfers(lambda action: 0.25))
    assert played.end == pytest.approx(simulate(schedule, cost).end)
    lengths = [span.end - span.start for spans in played.transfers for span in spans]
    assert lengths == pytest.approx([0.25] * (2 * (p * v - 1) * m))


def test_two_transfers_at_once_have_half_of_the_rate_each():
    """Rank 0 sends two activations one after the other, which each take 2 s alone: the second
    begins after 1 s. They share the port for 2 s, and end after 3 s and 4 s."""
    first, second = Action(Kind.F, 0, 0), Action(Kind.F, 0, 1)
    sends = [Action(Kind.SEND_ACTIVATION, 0, number) for number in (0, 1)]
    receiver = [Action(Kind.F, 1, number) for number in (0, 1)]
    schedule = Schedule("1f1b", 2, 1, 2, ((first, sends[0], second, sends[1]), tuple(receiver)))
    played = play(schedule, lambda action: 1.0, Transfers(lambda action: 2.0))
    assert [span[1:] for span in played.transfers[0]] == [(1.0, 4.0), (2.0, 5.0)]
    assert [span.start for span in played.ranks[1]] == [4.0, 5.0]


def test_collectives_end_before_the_update_and_share_the_port_with_sends():
    schedule = make_schedule("1f1b", 1, 1, 2)

    def end(*reduce_s: float, gather_s: float = 0.0) -> float:
        return play(
            schedule, unit_costs(), Transfers(reduce_s={0: reduce_s}, gather_s=[gather_s])
        ).end

    assert end() == 6.0
    assert end(2.0) == 6.0 and end(3.0) == 7.0  # the last backward takes 2
    assert end(1.5, 1.5) == 7.0
    assert end(gather_s=1.0) == 6.0 and end(gather_s=1.5) == 6.5  # the first forward takes 1
