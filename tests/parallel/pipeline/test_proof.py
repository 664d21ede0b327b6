"""The proof of schedules against a player that shares nothing with it: random sizes, ranks that get
on in random order, lists spoilt at random. What the proof lets pass must play to its end."""

from __future__ import annotations

import dataclasses
import random

import pytest

from optimus.parallel.pipeline.actions import Action, Kind, Schedule
from optimus.parallel.pipeline.schedules import GENERATORS, make_schedule
from optimus.parallel.pipeline.validate import validate

F, B, HALF, W, SEND_A, RECV_A, SEND_G, RECV_G, REDUCE, STEP = Kind


class CannotPlayError(Exception):
    """A schedule that does not train."""


def must(holds: bool, what: object) -> None:
    if not holds:
        raise CannotPlayError(str(what))


class Player:
    """Each rank does its list; messages of one direction between two ranks meet in order, the n-th
    send with the n-th receive, whatever they say they are."""

    def __init__(self, schedule: Schedule, chance: random.Random) -> None:
        self.of, self.p, self.m = schedule, schedule.num_ranks, schedule.num_microbatches
        self.last = schedule.num_stages - 1
        self.chance = chance
        self.done: dict[tuple[Kind, int], list[int]] = {}
        """By kind and stage: the microbatches, in order."""
        self.lines: dict[tuple, tuple[list, list]] = {}
        """By direction and ranks: what was sent and asked for, as microbatch and lower stage."""

    def play(self) -> None:
        places = [0] * self.p
        while moving := [r for r in range(self.p) if self._may(r, places[r])]:
            rank = self.chance.choice(moving)
            self._do(self.of.ranks[rank][places[rank]])
            places[rank] += 1
        ended = all(place == len(one) for place, one in zip(places, self.of.ranks, strict=True))
        must(ended, f"deadlock at {places}")
        must(all(len(sent) == len(asked) for sent, asked in self.lines.values()), "a message left")
        halves = any(a.kind is W for one in self.of.ranks for a in one)
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
        """What lies between an action's stage and the one it talks to."""
        forward = action.kind in (SEND_A, RECV_A)
        low = action.stage - (action.kind in (RECV_A, SEND_G))
        must(0 <= low < self.last, action)
        return self.lines.setdefault((forward, low % self.p, (low + 1) % self.p), ([], []))

    def _may(self, rank: int, place: int) -> bool:
        if place == len(self.of.ranks[rank]):
            return False
        action = self.of.ranks[rank][place]
        if action.kind is F and action.stage > 0:
            return self._is_here(action._replace(kind=RECV_A), F, action.stage - 1)
        if action.kind in (B, HALF) and action.stage < self.last:
            return self._is_here(action._replace(kind=RECV_G), action.kind, action.stage + 1)
        return True

    def _is_here(self, receive: Action, kind: Kind, neighbour: int) -> bool:
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
                must(any(j in self._of(one, stage) for one in made), f"nothing for {action}")
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
    """One rank's list with an action moved, taken away, doubled or made another."""
    lists = [list(one) for one in schedule.ranks]
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
def test_what_the_proof_lets_pass_plays_to_its_end(name):
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
