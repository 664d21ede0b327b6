"""Tests of pipeline schedules and of their simulated times.

The proof (`validate`) must accept all small schedules and refuse damaged schedules.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import itertools
import time
from collections.abc import Iterator

import pytest

from optimus.errors import ConfigError
from optimus.parallel.pipeline.actions import COMPUTE, Action, Kind, Schedule
from optimus.parallel.pipeline.schedules import make_evaluation, make_schedule
from optimus.parallel.pipeline.simulate import bubble_ratio, simulate, unit_costs
from tests.kit.layouts.schedule_proof import needs_of, validate, validate_evaluation

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1")
RANKS, MICROBATCHES = range(1, 6), (1, 2, 3, 4, 5, 6, 7, 8, 10, 11)


def stages_of(name: str) -> tuple[int, ...]:
    return (1,) if name in ("1f1b", "zb-h1") else (1, 2, 3)


@pytest.mark.parametrize("name", NAMES)
def test_all_small_schedules_are_valid(name):
    sizes = itertools.product(RANKS, stages_of(name), MICROBATCHES, (False, True))
    for ranks, stages, microbatches, reduce_each in sizes:
        validate(make_schedule(name, ranks, stages, microbatches, reduce_each))


def test_evaluation_is_valid():
    for ranks, stages, microbatches in itertools.product(RANKS, (1, 2, 3), MICROBATCHES):
        validate_evaluation(make_evaluation(ranks, stages, microbatches))


@pytest.mark.parametrize(("ranks", "stages", "microbatches"), [(4, 1, 16), (4, 2, 16), (8, 4, 16)])
def test_an_evaluation_has_the_bubble_of_the_formula(ranks, stages, microbatches):
    schedule = make_evaluation(ranks, stages, microbatches)
    ended = dataclasses.replace(  # the simulation needs an update at the end; it takes no time
        schedule, ranks=tuple((*actions, Action(Kind.OPT_STEP)) for actions in schedule.ranks)
    )
    timeline = simulate(ended, unit_costs(stages))
    assert timeline.bubble_ratio == pytest.approx((ranks - 1) / (microbatches * stages))


def test_an_evaluation_has_only_forwards():
    schedule = make_evaluation(2, 1, 2)
    for wrong in (Action(Kind.B, 0, 0), Action(Kind.OPT_STEP)):
        with pytest.raises(AssertionError, match="in an evaluation"):
            validate_evaluation(broken(schedule, 0, lambda a, wrong=wrong: a.append(wrong)))
    with pytest.raises(AssertionError, match="F of stage 0"):
        validate_evaluation(broken(schedule, 0, lambda a: a.remove(Action(Kind.F, 0, 1))))


@pytest.mark.parametrize("name", NAMES)
def test_data_travels_while_the_action_before_its_use_is_computed(name):
    """Between the posting of a receive and the action that needs its data, there is at least one
    other compute action."""
    for stages in stages_of(name):
        for actions in make_schedule(name, 4, stages, 8).ranks:
            computed, posted_at = 0, {}
            for action in actions:
                if action.kind in COMPUTE:
                    for need in needs_of(action, 4 * stages):
                        posted = posted_at.get(need, -1)  # -1: data of a stage on the same rank
                        assert computed == 0 or posted < computed, f"{need} posted at its use"
                    computed += 1
                posted_at[action] = computed


@pytest.fixture
def fresh_heap() -> Iterator[None]:
    """Let the garbage collector skip the objects of other tests, as in a new process."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_the_cost_of_a_schedule_grows_with_its_length(fresh_heap):
    def time_of(microbatches: int) -> float:
        start = time.process_time()
        make_schedule("1f1b", 2, 1, microbatches)
        return time.process_time() - start

    # The longer schedule has eight times as many actions. A linear search for each receive in its
    # queue would take 64 times as long.
    assert min(time_of(8000) for _ in range(3)) < 24 * min(time_of(1000) for _ in range(5))


@pytest.mark.parametrize("name", NAMES)
def test_the_bubble_is_that_of_the_formula(name):
    for ranks, stages, microbatches in itertools.product(RANKS, stages_of(name), MICROBATCHES):
        timeline = simulate(make_schedule(name, ranks, stages, microbatches), unit_costs(stages))
        ratio = bubble_ratio(name, ranks, stages, microbatches)
        assert timeline.bubble_ratio == pytest.approx(ratio, abs=1e-12)
        if microbatches >= ranks:  # the formula of the papers
            formula = (ranks - 1) / (microbatches * (3 if name == "zb-h1" else stages))
            assert ratio == pytest.approx(formula)


def test_a_large_schedule_is_made_and_timed_in_seconds(fresh_heap):
    start = time.process_time()
    schedule = make_schedule("interleaved", 64, 4, 1024)
    assert sum(map(len, schedule.ranks)) == 1_569_088
    assert simulate(schedule, unit_costs(4)).bubble_ratio == pytest.approx(63 / (1024 * 4))
    assert time.process_time() - start < 10


def test_schedules_and_their_times_are_those_of_the_first_version():
    """The SHA-256 digests of the schedules, and of their simulated times, equal the digests of the
    first version of `make_schedule`. The first version derived each transfer from the action that
    needs the data."""
    lists, times = hashlib.sha256(), hashlib.sha256()

    def add(schedule: Schedule) -> None:
        lists.update(repr([[tuple(map(int, a)) for a in rank] for rank in schedule.ranks]).encode())

    def cost(action: Action) -> float:
        return (action.kind * 7 + action.stage * 3 + action.microbatch * 5) % 11 / 4 + 0.25

    for name in NAMES:
        sizes = itertools.product(RANKS, stages_of(name), (1, 2, 3, 5, 8, 11), (False, True))
        for size in sizes:
            schedule = make_schedule(name, *size)
            add(schedule)
            spans = [
                [(tuple(map(int, span.action)), span.start, span.end) for span in rank]
                for rank in simulate(schedule, cost).ranks
            ]
            times.update(repr(spans).encode())
    for size in itertools.product(RANKS, (1, 2, 3), (1, 2, 3, 5, 8, 11)):
        add(make_evaluation(*size))
    assert lists.hexdigest() == "b73bffc9388deaac2ed8c5e0e21f81b2815c4ba39c6b228d643e744f256fd177"
    assert times.hexdigest() == "f67962fea29e009872b501940c22fe699367383b5dd25e9a8c950df18c8891b1"


def test_the_simulation_of_a_deadlock_fails():
    forwards = [Action(Kind.F, 0, 0), Action(Kind.RECV_GRADIENT, 0, 0), Action(Kind.B, 0, 0)]
    schedule = make_schedule("1f1b", 2, 1, 1)
    with pytest.raises(AssertionError, match="deadlock"):  # rank 0 sends nothing
        simulate(broken(schedule, 0, lambda a: a.__setitem__(slice(None), forwards)), unit_costs())


def test_gpipe_has_the_bubble_of_1f1b_and_keeps_everything_alive():
    schedule = make_schedule("gpipe", 4, 1, 8)
    assert simulate(schedule, unit_costs()).bubble_ratio == pytest.approx(3 / 8)
    assert validate(schedule) == (8, 8, 8, 8)


def test_live_activations():
    assert validate(make_schedule("1f1b", 4, 1, 8)) == (4, 3, 2, 1)
    assert validate(make_schedule("zb-h1", 4, 1, 8)) == (4, 4, 4, 4)
    # Rank r of p keeps (v - 1) * p + 2 * (p - r - 1) + 1 activations, each of 1 / v of its layers
    # (v = 2).
    assert validate(make_schedule("interleaved", 4, 2, 8)) == (11, 9, 7, 5)


def test_fewer_microbatches_than_stages():
    for name in NAMES:
        assert max(validate(make_schedule(name, 6, 1, 2))) == 2


def test_transfers_add_to_the_time():
    schedule = make_schedule("1f1b", 2, 1, 1)
    travel = {Kind.SEND_ACTIVATION: 0.5, Kind.SEND_GRADIENT: 0.25}
    unit = unit_costs()
    timeline = simulate(schedule, lambda action: travel.get(action.kind, unit(action)))
    assert timeline.end == 1 + 0.5 + 1 + 2 + 0.25 + 2


def test_a_schedule_without_virtual_stages_refuses_them():
    with pytest.raises(ConfigError, match="use parallel.schedule = 'interleaved'"):
        make_schedule("1f1b", 2, 2, 4)


def broken(schedule: Schedule, rank: int, change) -> Schedule:
    """Return a copy of the schedule in which `change` has modified the actions of `rank`."""
    actions = list(schedule.ranks[rank])
    change(actions)
    lists = list(schedule.ranks)
    lists[rank] = tuple(actions)
    return dataclasses.replace(schedule, ranks=tuple(lists))


def swap(first: Action, second: Action):
    def change(actions: list[Action]) -> None:
        i, j = actions.index(first), actions.index(second)
        actions[i], actions[j] = second, first

    return change


def put(old: Action, new: Action):
    def change(actions: list[Action]) -> None:
        actions[actions.index(old)] = new

    return change


def move_after(action: Action, other: Action):
    """Return a function for `broken` that moves `action` to the position after `other`."""

    def change(actions: list[Action]) -> None:
        actions.remove(action)
        actions.insert(actions.index(other) + 1, action)

    return change


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (0, lambda a: a.remove(Action(Kind.F, 0, 2)), "F of stage 0"),
        (1, swap(Action(Kind.B, 1, 0), Action(Kind.B, 1, 1)), "is not in microbatch order"),
        (1, lambda a: a.remove(Action(Kind.RECV_ACTIVATION, 1, 1)), "differ in order"),
        (0, lambda a: a.remove(Action(Kind.SEND_ACTIVATION, 0, 1)), "differ in order"),
        (
            0,
            swap(Action(Kind.SEND_ACTIVATION, 0, 0), Action(Kind.SEND_ACTIVATION, 0, 1)),
            "before its value is computed",
        ),
        (
            1,
            swap(Action(Kind.RECV_ACTIVATION, 1, 0), Action(Kind.RECV_ACTIVATION, 1, 1)),
            "differ in order",
        ),
        (0, lambda a: a.append(Action(Kind.F, 0, 0)), "twice"),
        (0, lambda a: a.remove(Action(Kind.REDUCE_GRAD, 0, 3)), "needs one reduction"),
        (0, lambda a: a.remove(Action(Kind.OPT_STEP)), "is not its update"),
        (0, lambda a: a.insert(0, Action(Kind.F, 1, 0)), "rank 0 has no stage of"),
        (1, lambda a: a.clear(), "F of stage 1"),
        (0, lambda a: a.insert(0, Action(Kind.RECV_ACTIVATION, 0, 0)), "has no peer"),
        (1, lambda a: a.append(Action(Kind.SEND_ACTIVATION, 1, 0)), "has no peer"),
        (0, lambda a: a.insert(0, Action(Kind.REDUCE_GRAD, 0, 99)), "no microbatch of"),
        (0, lambda a: a.insert(3, Action(Kind.OPT_STEP, 0, 1)), "updates twice"),
        (0, lambda a: a.insert(5, Action(Kind.REDUCE_GRAD, 0, 0)), "needs one reduction"),
        (0, swap(Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)), "in the wrong order"),
        (
            1,
            lambda a: a.append(a.pop(a.index(Action(Kind.RECV_ACTIVATION, 1, 3)))),
            "is not its update|before its post",
        ),
    ],
)
def test_the_proof_refuses_a_change(rank, change, message):
    schedule = make_schedule("1f1b", 2, 1, 4)
    validate(schedule)
    with pytest.raises(AssertionError, match=message):
        validate(broken(schedule, rank, change))


@pytest.mark.parametrize(
    "change",
    [
        move_after(Action(Kind.REDUCE_GRAD, 1, 0), Action(Kind.B, 1, 1)),
        move_after(Action(Kind.REDUCE_GRAD, 1, 0), Action(Kind.F, 1, 0)),
        swap(Action(Kind.REDUCE_GRAD, 1, 0), Action(Kind.REDUCE_GRAD, 1, 1)),
        lambda a: a.remove(Action(Kind.REDUCE_GRAD, 1, 1)),
        lambda a: a.__setitem__(slice(None), make_schedule("1f1b", 2, 1, 4).ranks[1]),
    ],
    ids=["two-at-once", "too-early", "out-of-order", "one-missing", "once-on-one-rank"],
)
def test_the_proof_requires_each_reduction(change):
    schedule = make_schedule("1f1b", 2, 1, 4, reduce_each=True)
    validate(schedule)
    with pytest.raises(AssertionError, match="rank 1: stage 1 needs a reduction after each"):
        validate(broken(schedule, 1, change))


@pytest.mark.parametrize("count", [1, 3])
def test_the_proof_requires_actions_for_each_rank(count):
    schedule = make_schedule("1f1b", 2, 1, 4)
    lists = (*schedule.ranks, (Action(Kind.OPT_STEP),))[:count]
    with pytest.raises(AssertionError, match=f"{count} lists for 2 ranks"):
        validate(dataclasses.replace(schedule, ranks=lists))


def test_stages_of_a_rank_send_nothing_to_each_other():
    schedule = make_schedule("interleaved", 1, 2, 2)

    def to_itself(actions: list[Action]) -> None:
        actions.insert(actions.index(Action(Kind.F, 0, 0)) + 1, Action(Kind.SEND_ACTIVATION, 0, 0))
        actions.insert(0, Action(Kind.RECV_ACTIVATION, 1, 0))

    with pytest.raises(AssertionError, match="is the rank"):
        validate(broken(schedule, 0, to_itself))


def test_a_list_that_needs_tags_is_refused():
    """The second rank receives microbatches in another order than the order in which the first rank
    sends them. The proof refuses the schedule, because some backends match messages by order, not
    by tag.
    """

    def other_order(actions: list[Action]) -> None:
        for kind in (Kind.RECV_ACTIVATION, Kind.F):
            swap(Action(kind, 1, 0), Action(kind, 1, 1))(actions)

    schedule = make_schedule("gpipe", 2, 1, 4)
    with pytest.raises(AssertionError, match="sends and receives differ in order"):
        validate(broken(schedule, 1, other_order))


@pytest.mark.parametrize(
    ("name", "stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)]
)
def test_activations_and_gradients_need_a_communicator_each(name, stages):
    """If activations and gradients share a single communicator, the proof reports a deadlock."""
    schedule = make_schedule(name, 2, stages, 4)
    validate(schedule)
    with pytest.raises(AssertionError, match="deadlock: rank 0 at"):
        validate(schedule, communicator=lambda action: "the pipeline's")


@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
def test_a_ring_of_stages_needs_a_communicator_for_each_pair_of_neighbours(name):
    """All activations share one communicator, and all gradients share another.

    The proof reports a deadlock, because different pairs of neighbours share a communicator.
    """
    schedule = make_schedule(name, 3, 2, 6)
    with pytest.raises(AssertionError, match="deadlock"):
        validate(schedule, communicator=lambda action: schedule.channel_of(action).sends)


def test_a_deadlock_is_detected():
    """The first rank waits for a gradient, and the second rank waits for activations.

    The proof reports the deadlock.
    """

    def early_backward(actions: list[Action]) -> None:
        backward = actions.pop(actions.index(Action(Kind.B, 0, 0)))
        receive = actions.pop(actions.index(Action(Kind.RECV_GRADIENT, 0, 0)))
        index = actions.index(Action(Kind.F, 0, 1))
        actions[index:index] = [receive, backward]

    schedule = make_schedule("gpipe", 2, 1, 2)
    with pytest.raises(AssertionError, match=r"deadlock: rank 0 at B.*rank 1 at F"):
        validate(broken(schedule, 0, early_backward))
