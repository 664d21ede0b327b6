"""Schedules are proven for every small size, timed against the closed formulas, and broken on
purpose to see that the proof notices."""

from __future__ import annotations

import itertools

import pytest

from optimus.errors import ConfigError
from optimus.parallel.pipeline.actions import Action, Kind, Schedule
from optimus.parallel.pipeline.schedules import make_schedule
from optimus.parallel.pipeline.simulate import simulate, unit_costs
from optimus.parallel.pipeline.validate import validate

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1")
RANKS, MICROBATCHES = range(1, 6), (1, 2, 3, 4, 5, 6, 7, 8, 10, 11)


def stages_of(name: str) -> tuple[int, ...]:
    return (1,) if name in ("1f1b", "zb-h1") else (1, 2, 3)


@pytest.mark.parametrize("name", NAMES)
def test_every_small_schedule_is_proven(name):
    sizes = itertools.product(RANKS, stages_of(name), MICROBATCHES, (False, True))
    for ranks, stages, microbatches, reduce_each in sizes:
        validate(make_schedule(name, ranks, stages, microbatches, reduce_each))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1"])
def test_the_bubble_is_that_of_the_formula(name):
    for ranks, stages, microbatches in itertools.product(RANKS, stages_of(name), MICROBATCHES):
        if microbatches < ranks:
            continue
        timeline = simulate(make_schedule(name, ranks, stages, microbatches), unit_costs(stages))
        ratio = (ranks - 1) / (microbatches * (3 if name == "zb-h1" else stages))
        assert timeline.bubble_ratio == pytest.approx(ratio, abs=1e-12)
        assert timeline.bubble_fraction == pytest.approx(ratio / (1 + ratio), abs=1e-12)


def test_gpipe_has_the_bubble_of_1f1b_and_keeps_everything_alive():
    schedule = make_schedule("gpipe", 4, 1, 8)
    assert simulate(schedule, unit_costs()).bubble_ratio == pytest.approx(3 / 8)
    assert validate(schedule) == (8, 8, 8, 8)


def test_live_activations():
    assert validate(make_schedule("1f1b", 4, 1, 8)) == (4, 3, 2, 1)
    assert validate(make_schedule("zb-h1", 4, 1, 8)) == (4, 4, 4, 4)
    # (v - 1) * p + 2 * (p - r - 1) + 1 halves of a rank's layers.
    assert validate(make_schedule("interleaved", 4, 2, 8)) == (11, 9, 7, 5)


def test_fewer_microbatches_than_stages():
    for name in NAMES:
        assert max(validate(make_schedule(name, 6, 1, 2))) == 2


def test_travelling_adds_to_the_time():
    schedule = make_schedule("1f1b", 2, 1, 1)
    travel = {Kind.SEND_ACTIVATION: 0.5, Kind.SEND_GRADIENT: 0.25}
    unit = unit_costs()
    timeline = simulate(schedule, lambda action: travel.get(action.kind, unit(action)))
    assert timeline.end == 1 + 0.5 + 1 + 2 + 0.25 + 2


def test_a_schedule_of_one_stage_a_rank_refuses_more():
    with pytest.raises(ConfigError, match="use parallel.schedule = 'interleaved'"):
        make_schedule("1f1b", 2, 2, 4)


def broken(schedule: Schedule, rank: int, change) -> Schedule:
    """The schedule with `change` made to a rank's list."""
    actions = list(schedule.ranks[rank])
    change(actions)
    lists = list(schedule.ranks)
    lists[rank] = tuple(actions)
    return Schedule(
        schedule.name,
        schedule.num_ranks,
        schedule.virtual_stages,
        schedule.num_microbatches,
        tuple(lists),
    )


def swap(first: Action, second: Action):
    def change(actions: list[Action]) -> None:
        i, j = actions.index(first), actions.index(second)
        actions[i], actions[j] = second, first

    return change


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (0, lambda a: a.remove(Action(Kind.F, 0, 2)), "F of stage 0"),
        (1, swap(Action(Kind.B, 1, 0), Action(Kind.B, 1, 1)), "leaves the microbatches' order"),
        (1, lambda a: a.remove(Action(Kind.RECV_ACTIVATION, 1, 1)), "differ in order"),
        (0, lambda a: a.remove(Action(Kind.SEND_ACTIVATION, 0, 1)), "differ in order"),
        (
            0,
            swap(Action(Kind.SEND_ACTIVATION, 0, 0), Action(Kind.SEND_ACTIVATION, 0, 1)),
            "before there is anything to send",
        ),
        (
            1,
            swap(Action(Kind.RECV_ACTIVATION, 1, 0), Action(Kind.RECV_ACTIVATION, 1, 1)),
            "differ in order",
        ),
        (0, lambda a: a.append(Action(Kind.F, 0, 0)), "twice"),
        (0, lambda a: a.remove(Action(Kind.REDUCE_GRAD, 0, 3)), "without a reduction"),
        (0, lambda a: a.remove(Action(Kind.OPT_STEP)), "does not end with its update"),
        (0, lambda a: a.insert(0, Action(Kind.F, 1, 0)), "is not rank 0's"),
        (0, swap(Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)), "goes backwards"),
        (
            1,
            lambda a: a.append(a.pop(a.index(Action(Kind.RECV_ACTIVATION, 1, 3)))),
            "does not end with its update|never asked for",
        ),
    ],
)
def test_the_proof_notices(rank, change, message):
    schedule = make_schedule("1f1b", 2, 1, 4)
    validate(schedule)
    with pytest.raises(AssertionError, match=message):
        validate(broken(schedule, rank, change))


def test_a_deadlock_is_found():
    """The first rank wants the gradient of microbatch 0 before it sends microbatch 1, the second
    wants microbatch 1 before it gives that gradient."""

    def early_backward(actions: list[Action]) -> None:
        backward = actions.pop(actions.index(Action(Kind.B, 0, 0)))
        receive = actions.pop(actions.index(Action(Kind.RECV_GRADIENT, 0, 0)))
        place = actions.index(Action(Kind.F, 0, 1))
        actions[place:place] = [receive, backward]

    schedule = make_schedule("gpipe", 2, 1, 2)
    with pytest.raises(AssertionError, match=r"deadlock: rank 0 at B.*rank 1 at F"):
        validate(broken(schedule, 0, early_backward))
