"""Proof that a schedule can run: played through to its end, whatever the ranks' speeds.

A rank does its list in order; sends do not wait, receives are asked for and waited for at their
use. Which action comes next on a rank depends on nothing but its list, so one order of play stands
for all: if it ends, every order does.
"""

from __future__ import annotations

from collections import defaultdict

from optimus.parallel.pipeline.actions import COMPUTE, RECEIVES, SENDS, Action, Kind, Schedule
from optimus.parallel.pipeline.communicate import needs_of, received_by, sends_of


def validate(schedule: Schedule) -> tuple[int, ...]:
    """Prove a schedule; returns the most microbatches alive on each rank, counted over its stages.

    A microbatch is alive on a stage from its F to the end of its B or W. Proven: every stage does
    F, then B (or I, then W) once for every microbatch; backward and W of a stage in microbatch
    order; every send has its receive, in the same order between two ranks; what an action needs is
    there or asked for; no rank waits for ever; one REDUCE_GRAD stands behind the last gradient of
    each stage, the update last. Raises AssertionError naming rank and action.
    """
    _check_compute(schedule)
    _check_channels(schedule)
    _check_ends(schedule)
    _play(schedule)
    return tuple(_most_alive(actions) for actions in schedule.ranks)


def _check_compute(schedule: Schedule) -> None:
    halves = schedule.splits_backward
    expected = (Kind.F, Kind.I, Kind.W) if halves else (Kind.F, Kind.B)
    everything = list(range(schedule.num_microbatches))
    for rank, actions in enumerate(schedule.ranks):
        orders: dict[tuple[Kind, int], list[int]] = defaultdict(list)
        place: dict[Action, int] = {}
        for index, action in enumerate(actions):
            assert action not in place, f"rank {rank} does {action} twice"
            place[action] = index
            if action.kind in COMPUTE:
                assert action.stage in schedule.stages_of(rank), f"{action} is not rank {rank}'s"
                orders[action.kind, action.stage].append(action.microbatch)
        for stage in schedule.stages_of(rank):
            for kind in COMPUTE:
                order = orders[kind, stage]
                wanted = everything if kind in expected else []
                assert sorted(order) == wanted, f"rank {rank}: {kind.name} of stage {stage}"
                assert kind is Kind.F or order == wanted, (
                    f"rank {rank}: {kind.name} of stage {stage} leaves the microbatches' order"
                )
            for j in everything:
                places = [place[Action(kind, stage, j)] for kind in expected]
                assert places == sorted(places), f"stage {stage}: microbatch {j} goes backwards"


def _check_channels(schedule: Schedule) -> None:
    """What one rank sends another is asked for there, in that order, and each by its rightful
    neighbour."""
    sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        made: set[Action] = set()
        for action in actions:
            if action.kind in SENDS:
                assert action in made, f"rank {rank}: {action} before there is anything to send"
                to = schedule.rank_of(received_by(action).stage)
                sends[rank, to].append(received_by(action))
            elif action.kind in RECEIVES:
                step = -1 if action.kind is Kind.RECV_ACTIVATION else 1
                receives[schedule.rank_of(action.stage + step), rank].append(action)
            elif action.kind in COMPUTE:
                made.update(sends_of(action, schedule.num_stages))
    for pair in sends.keys() | receives.keys():
        assert sends[pair] == receives[pair], f"ranks {pair}: sends and receives differ in order"


def _check_ends(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.ranks):
        assert actions[-1] == Action(Kind.OPT_STEP), f"rank {rank} does not end with its update"
        assert sum(a.kind is Kind.OPT_STEP for a in actions) == 1, f"rank {rank} updates twice"
        for stage in schedule.stages_of(rank):
            of_stage = [
                (index, action)
                for index, action in enumerate(actions)
                if action.stage == stage and action.kind in (Kind.B, Kind.W, Kind.REDUCE_GRAD)
            ]
            kinds = [action.kind for _, action in of_stage]
            last_microbatch = schedule.num_microbatches - 1
            assert of_stage[-1][1] == Action(Kind.REDUCE_GRAD, stage, last_microbatch), (
                f"rank {rank}: stage {stage} ends without a reduction of all its gradients"
            )
            count = kinds.count(Kind.REDUCE_GRAD)
            assert count in (1, schedule.num_microbatches), f"rank {rank}: stage {stage}: {count}"


def _play(schedule: Schedule) -> None:
    """Run the lists; a round in which no rank gets on while some have work left is a deadlock."""
    places = [0] * schedule.num_ranks
    there: list[set[Action]] = [set() for _ in range(schedule.num_ranks)]  # what has arrived
    asked: list[set[Action]] = [set() for _ in range(schedule.num_ranks)]
    while any(place < len(schedule.ranks[rank]) for rank, place in enumerate(places)):
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                if not _can_do(schedule, rank, action, there[rank], asked[rank]):
                    break
                _do(schedule, rank, action, there, asked)
                places[rank] += 1
                moved = True
        stuck = [
            f"rank {rank} at {actions[places[rank]]}"
            for rank, actions in enumerate(schedule.ranks)
            if places[rank] < len(actions)
        ]
        assert moved or not stuck, f"deadlock: {'; '.join(stuck)}"


def _can_do(
    schedule: Schedule, rank: int, action: Action, there: set[Action], asked: set[Action]
) -> bool:
    """Whether what the action needs has come; a need that nobody asked for is an error."""
    if action.kind not in COMPUTE:
        return True
    for need in needs_of(action, schedule.num_stages):
        step = -1 if need.kind is Kind.RECV_ACTIVATION else 1
        local = schedule.rank_of(need.stage + step) == rank
        assert local or need in asked, f"rank {rank}: {action} needs {need}, never asked for"
        if need not in there:
            return False
    return True


def _do(
    schedule: Schedule,
    rank: int,
    action: Action,
    there: list[set[Action]],
    asked: list[set[Action]],
) -> None:
    if action.kind in RECEIVES:
        asked[rank].add(action)
    elif action.kind in SENDS:
        received = received_by(action)
        there[schedule.rank_of(received.stage)].add(received)
    elif action.kind in COMPUTE:
        for send in sends_of(action, schedule.num_stages):
            received = received_by(send)
            if schedule.rank_of(received.stage) == rank:
                there[rank].add(received)


def _most_alive(actions: tuple[Action, ...]) -> int:
    ends = Kind.W if any(a.kind is Kind.W for a in actions) else Kind.B
    alive = most = 0
    for action in actions:
        alive += (action.kind is Kind.F) - (action.kind is ends)
        most = max(most, alive)
    return most
