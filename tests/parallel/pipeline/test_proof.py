"""Tests of the schedule proof (`validate`) against a `Player`, an independent implementation that
executes schedules.

The player runs the actions of all ranks in a random order. It must complete each schedule that the
proof accepts, including randomly changed schedules.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from optimus.parallel.pipeline.actions import Action, Kind, Schedule
from optimus.parallel.pipeline.schedules import GENERATORS, make_evaluation, make_schedule
from optimus.parallel.pipeline.simulate import simulate
from tests.kit.layouts.schedule_proof import validate, validate_evaluation

F, B, HALF, W, SEND_A, RECV_A, SEND_G, RECV_G, REDUCE, STEP = Kind


class CannotPlayError(Exception):
    """Raised if a schedule deadlocks, or if actions of the schedule are missing or in a wrong
    order."""


def must(condition: bool, problem: object) -> None:
    if not condition:
        raise CannotPlayError(str(problem))


class Player:
    """Player that runs the actions of all ranks of a schedule.

    Each rank runs its actions in order. The player randomly chooses the rank that runs next.

    The n-th send of a channel must match the channel's n-th receive, as in a communicator.
    """

    def __init__(self, schedule: Schedule, chance: random.Random) -> None:
        self.of, self.p, self.m = schedule, schedule.num_ranks, schedule.num_microbatches
        self.last = schedule.num_stages - 1
        self.chance = chance
        self.done: dict[tuple[Kind, int], list[int]] = {}
        """For each (kind, stage), the microbatches of the actions played so far, in order."""
        self.lines: dict[tuple, tuple[list, list]] = {}
        """For each channel, the list of sends and the list of receives played so far.

        A send or receive is recorded as (microbatch, number of the lower of its two stages). The
        keys, which identify channels, are (True for activations, rank of the lower stage, rank of
        the upper stage).
        """

    def play(self) -> None:
        counts = [0] * self.p
        while moving := [r for r in range(self.p) if self._may(r, counts[r])]:
            rank = self.chance.choice(moving)
            self._do(self.of.ranks[rank][counts[rank]])
            counts[rank] += 1
        must(counts == [len(actions) for actions in self.of.ranks], f"deadlock at {counts}")
        must(all(len(sent) == len(asked) for sent, asked in self.lines.values()), "a message left")
        halves = any(a.kind is W for actions in self.of.ranks for a in actions)
        for stage in range(self.last + 1):
            must(sorted(self._of(F, stage)) == list(range(self.m)), "forwards")
            for kind in (HALF, W) if halves else (B,):
                must(self._of(kind, stage) == list(range(self.m)), kind)
                must(not self._of(B, stage) or not halves, "whole and half backwards")
            wanted = range(self.m) if self.of.reduce_each else [self.m - 1]
            must(self._of(REDUCE, stage) == list(wanted), "reductions")

    def _of(self, kind: Kind, stage: int) -> list[int]:
        return self.done.setdefault((kind, stage), [])

    def _line(self, action: Action) -> tuple[list, list]:
        """Return the list of recorded sends and the list of recorded receives of the channel over
        which `action` sends or receives."""
        forward = action.kind in (SEND_A, RECV_A)
        low = action.stage - (action.kind in (RECV_A, SEND_G))
        must(0 <= low < self.last, action)
        return self.lines.setdefault((forward, low % self.p, (low + 1) % self.p), ([], []))

    def _may(self, rank: int, count: int) -> bool:
        if count == len(self.of.ranks[rank]):
            return False
        action = self.of.ranks[rank][count]
        if action.kind is F and action.stage > 0:
            return self._has_arrived(action._replace(kind=RECV_A), F, action.stage - 1)
        if action.kind in (B, HALF) and action.stage < self.last:
            return self._has_arrived(action._replace(kind=RECV_G), action.kind, action.stage + 1)
        return True

    def _has_arrived(self, receive: Action, kind: Kind, neighbour: int) -> bool:
        if self.p == 1:
            return receive.microbatch in self._of(kind, neighbour)
        sent, asked = self._line(receive)
        entry = receive.microbatch, min(receive.stage, neighbour)
        return entry in asked and asked.index(entry) < len(sent)

    def _do(self, action: Action) -> None:
        kind, stage, j = action.kind, action.stage, action.microbatch
        if kind in (SEND_A, SEND_G, RECV_A, RECV_G):
            sent, asked = self._line(action)
            mine, theirs = (sent, asked) if kind in (SEND_A, SEND_G) else (asked, sent)
            if mine is sent:
                made = (F,) if kind is SEND_A else (B, HALF)
                must(any(j in self._of(kind, stage) for kind in made), f"nothing for {action}")
            entry = j, stage - (kind in (RECV_A, SEND_G))
            must(entry not in mine, f"{action} twice")
            mine.append(entry)
            meets = theirs[len(mine) - 1] if len(theirs) >= len(mine) else entry
            must(meets == entry, f"{action} meets another message")
        elif kind is not STEP:
            must(j not in self._of(kind, stage), f"{action} twice")
            before = {B: F, HALF: F, W: HALF, REDUCE: W if self._of(W, stage) else B}.get(kind)
            must(before is None or j in self._of(before, stage), f"{action} too early")
            self._of(kind, stage).append(j)


def spoil(schedule: Schedule, chance: random.Random) -> Schedule:
    """Return a copy of the schedule with one random change: an action is exchanged with another
    action, moved, removed or duplicated, or gets another microbatch."""
    lists = [list(actions) for actions in schedule.ranks]
    actions = chance.choice(lists)
    at, to = chance.randrange(len(actions)), chance.randrange(len(actions))
    match chance.randrange(5):
        case 0:
            actions[at], actions[to] = actions[to], actions[at]
        case 1:
            actions.insert(min(at + 1, len(actions) - 1), actions.pop(at))
        case 2:
            actions.pop(at)
        case 3:
            actions.insert(to, actions[at])
        case 4:
            actions[at] = actions[at]._replace(microbatch=to % schedule.num_microbatches)
    return dataclasses.replace(schedule, ranks=tuple(map(tuple, lists)))


@pytest.mark.parametrize("name", GENERATORS)
def test_schedules_that_the_proof_accepts_play_to_their_end(name):
    chance, passed, refused = random.Random(name), 0, 0
    for _ in range(40):
        p, m = chance.randint(1, 6), chance.randint(1, 12)
        v = chance.randint(1, 3) if name in ("gpipe", "interleaved") else 1
        schedule = make_schedule(name, p, v, m, chance.random() < 0.5)
        Player(schedule, chance).play()
        for _ in range(8):
            other = spoil(schedule, chance)
            try:
                validate(other)
            except AssertionError:
                refused += 1
                continue
            passed += 1
            Player(other, chance).play()
    assert passed > 5 and refused > 100, (passed, refused)


def makespan(schedule: Schedule, cost: dict[tuple[Kind, int, int], float], wire: float) -> float:
    """Return the time at which the last rank finishes: the length of the longest path through the
    dependencies of the compute actions.

    A compute action waits for the previous compute action of its rank and for its input. Input from
    another rank arrives with a delay of `wire`. `cost` maps (kind, stage, microbatch) to the time
    of an action.
    """
    last = schedule.num_stages - 1
    computing = [[a for a in rank if a.kind in (F, B, HALF, W)] for rank in schedule.ranks]
    before = {a: rank[n - 1] for rank in computing for n, a in enumerate(rank) if n}
    by_key = {(a.kind, a.stage, a.microbatch): a for rank in computing for a in rank}

    def wait_for(action: Action) -> list[tuple[Action, float]]:
        kind, stage, j = action.kind, action.stage, action.microbatch
        waits = [(before[action], 0.0)] if action in before else []
        neighbour = {F: stage - 1, B: stage + 1, HALF: stage + 1}.get(kind, -1)
        if 0 <= neighbour <= last:
            away = schedule.rank_of(neighbour) != schedule.rank_of(stage)
            waits.append((by_key[kind, neighbour, j], wire * away))
        return waits

    ends: dict[Action, float] = {}
    todo = [rank[-1] for rank in computing]
    while todo:  # a depth-first search without recursion
        waits = wait_for(todo[-1])
        missing = [needed for needed, _ in waits if needed not in ends]
        if missing:
            todo += missing
            continue
        action = todo.pop()
        start = max((ends[needed] + delay for needed, delay in waits), default=0.0)
        ends[action] = start + cost[action.kind, action.stage, action.microbatch]
    return max(ends.values())


SIZES = list(itertools.product(range(1, 7), range(1, 10), (1, 2, 3)))


@pytest.mark.parametrize("name", [*GENERATORS, "evaluation"])
def test_generated_schedules_pass_and_take_the_expected_time(name):
    chance, wire = random.Random(name), 0.25
    for p, m, v in SIZES:
        if name in ("1f1b", "zb-h1") and v > 1:
            continue
        if name == "evaluation":
            schedule = make_evaluation(p, v, m)
            validate_evaluation(schedule)
        else:
            schedule = make_schedule(name, p, v, m, reduce_each=chance.random() < 0.5)
            validate(schedule)
        keys = itertools.product((F, B, HALF, W), range(p * v), range(m))
        cost = {key: chance.uniform(0.5, 2.0) for key in keys}

        def cost_of(action: Action, cost: dict = cost) -> float:
            if action.kind in (SEND_A, SEND_G):
                return wire
            return cost.get((action.kind, action.stage, action.microbatch), 0.0)

        assert simulate(schedule, cost_of).end == pytest.approx(makespan(schedule, cost, wire))
