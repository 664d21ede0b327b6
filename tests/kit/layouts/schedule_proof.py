"""Proof that a schedule can run: played through to its end, whatever the ranks' speeds.

A rank does its list in order and waits only for what an action needs; it waits for its sends at the
end of the list. Each channel is a communicator in which messages complete in the order in which
they were posted, and a send no sooner than its receive is posted, as NCCL does for large messages;
backends that do better end too. Which action comes next on a rank depends on nothing but its list,
so one order of play stands for all: if it ends, every order does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable

from optimus.parallel.pipeline.actions import COMPUTE, RECEIVES, SENDS, Action, Kind, Schedule
from optimus.parallel.pipeline.communicate import (
    WEIGHT_GRADIENT,
    needs_of,
    received_by,
    sends_of,
)

Communicator = Callable[[Action], Hashable]
"""By which communicator a send or receive travels."""


def validate(schedule: Schedule, communicator: Communicator | None = None) -> tuple[int, ...]:
    """Prove a schedule of a step; returns the most microbatches alive on each rank, counted over
    its stages.

    A microbatch is alive on a stage from its F to the end of its B or W. Proven: every stage does
    F, then B (or I, then W) once for every microbatch; backward and W of a stage in microbatch
    order; every send has its receive, in the same order in each channel; what an action needs is
    there or asked for; no rank waits for ever; a REDUCE_GRAD stands behind the last gradient of
    each stage, or behind each with `reduce_each`, and the update last. `communicator`: another than
    the channel of each action, to ask whether fewer of them would do. Raises AssertionError naming
    rank and action.
    """
    _check_actions(schedule)
    halves = schedule.splits_backward
    _check_compute(schedule, (Kind.F, Kind.I, Kind.W) if halves else (Kind.F, Kind.B))
    _check_channels(schedule)
    _check_ends(schedule)
    _play(schedule, communicator or schedule.channel_of)
    return tuple(_most_alive(actions) for actions in schedule.ranks)


def validate_evaluation(schedule: Schedule) -> None:
    """Prove a schedule of forwards alone, as `validate` proves one of a step."""
    _check_actions(schedule)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            at_home = action.kind in (Kind.F, *SENDS, *RECEIVES)
            assert at_home, f"rank {rank} does {action} in an evaluation"
    _check_compute(schedule, (Kind.F,))
    _check_channels(schedule)
    _play(schedule, schedule.channel_of)


def _check_actions(schedule: Schedule) -> None:
    """Every action is one that its rank can do, and done once."""
    lists = len(schedule.ranks)
    assert lists == schedule.num_ranks, f"{lists} lists for {schedule.num_ranks} ranks"
    for rank, actions in enumerate(schedule.ranks):
        done: set[Action] = set()
        for action in actions:
            assert action not in done, f"rank {rank} does {action} twice"
            done.add(action)
            if action.kind is Kind.OPT_STEP:
                continue
            assert action.stage in schedule.stages_of(rank), f"{action} is not rank {rank}'s"
            there = 0 <= action.microbatch < schedule.num_microbatches
            assert there, f"rank {rank}: {action} is of no microbatch of the step"
            if action.kind in SENDS or action.kind in RECEIVES:
                _check_ways(schedule, rank, action)


def _check_ways(schedule: Schedule, rank: int, action: Action) -> None:
    """A send or receive is between two stages, on two ranks."""
    before = action.kind in (Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT)
    neighbour = action.stage + (-1 if before else 1)
    assert 0 <= neighbour < schedule.num_stages, f"rank {rank}: {action} has no other side"
    assert schedule.rank_of(neighbour) != rank, f"rank {rank}: {action} goes to itself"


def _check_compute(schedule: Schedule, expected: tuple[Kind, ...]) -> None:
    everything = list(range(schedule.num_microbatches))
    for rank, actions in enumerate(schedule.ranks):
        orders: dict[tuple[Kind, int], list[int]] = defaultdict(list)
        place: dict[Action, int] = {}
        for index, action in enumerate(actions):
            place[action] = index
            if action.kind in COMPUTE:
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
    """What is sent through a channel is there, and is asked for in that order."""
    sends: dict[Hashable, list[Action]] = defaultdict(list)
    receives: dict[Hashable, list[Action]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        made: set[Action] = set()
        for action in actions:
            if action.kind in SENDS:
                assert action in made, f"rank {rank}: {action} before there is anything to send"
                sends[schedule.channel_of(action)].append(received_by(action))
            elif action.kind in RECEIVES:
                receives[schedule.channel_of(action)].append(action)
            elif action.kind in COMPUTE:
                made.update(sends_of(action, schedule.num_stages))
    for way in sends.keys() | receives.keys():
        assert sends[way] == receives[way], f"{way}: sends and receives differ in order"


def _check_ends(schedule: Schedule) -> None:
    """Each reduction stands between the gradient that it ends with and the stage's next."""
    last = schedule.num_microbatches - 1
    gives = Kind.W if schedule.splits_backward else Kind.B
    for rank, actions in enumerate(schedule.ranks):
        ends = bool(actions) and actions[-1] == Action(Kind.OPT_STEP)
        assert ends, f"rank {rank} does not end with its update"
        assert sum(a.kind is Kind.OPT_STEP for a in actions) == 1, f"rank {rank} updates twice"
        found: dict[int, list[Action]] = defaultdict(list)
        for action in actions:
            if action.kind in (*WEIGHT_GRADIENT, Kind.REDUCE_GRAD):
                found[action.stage].append(action)
        for stage in schedule.stages_of(rank):
            wanted = []
            for j in range(schedule.num_microbatches):
                wanted.append(Action(gives, stage, j))
                if schedule.reduce_each or j == last:
                    wanted.append(Action(Kind.REDUCE_GRAD, stage, j))
            assert found[stage] == wanted, (
                f"rank {rank}: stage {stage} has not {'each' if schedule.reduce_each else 'one'} "
                "reduction right behind the gradients that it adds"
            )


def _play(schedule: Schedule, communicator: Communicator) -> None:
    """Run the lists; a round in which no rank gets on while some have work left is a deadlock."""
    places = [0] * schedule.num_ranks
    there: set[Action] = set()  # what has arrived, as receives
    wires = _Wires(schedule, communicator, there)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                if not _can_do(schedule, rank, action, there, wires.asked):
                    break
                if action.kind in SENDS or action.kind in RECEIVES:
                    wires.post(rank, action)
                elif action.kind in COMPUTE:
                    there.update(_left_here(schedule, rank, action))
                places[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {actions[places[rank]]}"
        for rank, actions in enumerate(schedule.ranks)
        if places[rank] < len(actions)
    ]
    assert not stuck, f"deadlock: {'; '.join(stuck)}"
    assert not wires.left(), f"deadlock at the end: {wires.left()}"


class _Wires:
    """The messages under way. One is delivered when its send stands at the head of what its rank
    has posted to a communicator, and its receive at the head on the other side."""

    def __init__(self, schedule: Schedule, communicator: Communicator, there: set[Action]) -> None:
        self._schedule, self._communicator, self._there = schedule, communicator, there
        self._posted: dict[tuple[int, Hashable], deque[Action]] = defaultdict(deque)
        self.asked: set[Action] = set()

    def post(self, rank: int, action: Action) -> None:
        """Post a send or receive of a rank, and deliver what it sets free."""
        if action.kind in RECEIVES:
            self.asked.add(action)
        wire = self._communicator(action)
        self._posted[rank, wire].append(action)
        self._deliver(rank, wire)

    def left(self) -> list[str]:
        """What was posted but never delivered."""
        return [f"rank {rank}: {queue[0]}" for (rank, _), queue in self._posted.items() if queue]

    def _deliver(self, rank: int, wire: Hashable) -> None:
        waiting = [rank]  # ranks whose head may have become free
        while waiting:
            queue = self._posted[waiting[-1], wire]
            other = self._other_side(queue[0]) if queue else None
            theirs = self._posted[other, wire] if other is not None else None
            if not theirs or _as_receive(queue[0]) != _as_receive(theirs[0]):
                waiting.pop()
                continue
            self._there.add(_as_receive(queue.popleft()))
            theirs.popleft()
            waiting.append(other)

    def _other_side(self, action: Action) -> int:
        channel = self._schedule.channel_of(action)
        return channel.to if action.kind in SENDS else channel.source


def _as_receive(action: Action) -> Action:
    return received_by(action) if action.kind in SENDS else action


def _can_do(
    schedule: Schedule, rank: int, action: Action, there: set[Action], asked: set[Action]
) -> bool:
    """Whether what the action needs has come; a need that nobody asked for is an error."""
    if action.kind not in COMPUTE:
        return True
    for need in needs_of(action, schedule.num_stages):
        channel = schedule.channel_of(need)
        local = channel.source == channel.to
        assert local or need in asked, f"rank {rank}: {action} needs {need}, never asked for"
        if need not in there:
            return False
    return True


def _left_here(schedule: Schedule, rank: int, action: Action) -> list[Action]:
    """What a compute action leaves for a neighbouring stage on its own rank, as receives."""
    receives = map(received_by, sends_of(action, schedule.num_stages))
    return [one for one in receives if schedule.rank_of(one.stage) == rank]


def _most_alive(actions: tuple[Action, ...]) -> int:
    ends = Kind.W if any(a.kind is Kind.W for a in actions) else Kind.B
    alive = most = 0
    for action in actions:
        alive += (action.kind is Kind.F) - (action.kind is ends)
        most = max(most, alive)
    return most
