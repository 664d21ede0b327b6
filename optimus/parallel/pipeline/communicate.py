"""From compute actions to complete lists: what travels between ranks, the reduction, the update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from optimus.parallel.pipeline.actions import Action, Channel, Kind, channel_of

_GIVES_INPUT_GRADIENT = (Kind.B, Kind.I)
GIVES_WEIGHT_GRADIENT = (Kind.B, Kind.W)


class _Sent:
    """What travels through each channel, as receives, in the order in which it is sent."""

    def __init__(self, lists: Sequence[Sequence[Action]], num_ranks: int, num_stages: int) -> None:
        self.queues: dict[Channel, list[Action]] = defaultdict(list)
        self.place: dict[Action, int] = {}
        """Of each receive in its channel's queue."""
        for actions in lists:
            for receive in _receives_of(actions, num_stages):
                channel = channel_of(receive, num_ranks)
                if channel.source != channel.to:
                    self.place[receive] = len(self.queues[channel])
                    self.queues[channel].append(receive)


def add_transfers(
    lists: Sequence[Sequence[Action]], num_ranks: int, virtual_stages: int
) -> list[list[Action]]:
    """The compute actions of each rank with the sends and receives between them.

    A send stands right behind what it sends. Receives through one channel are asked for in the
    order in which they are sent, as backends without tags need, and one compute action ahead of
    their use, so that data travels while the action before is computed. Stages on one rank send
    nothing.
    """
    sent = _Sent(lists, num_ranks, num_ranks * virtual_stages)
    return [_with_transfers(actions, num_ranks, virtual_stages, sent) for actions in lists]


def add_update(actions: Sequence[Action], reduce_each: bool) -> tuple[Action, ...]:
    """A rank's list with its reductions, each behind the last gradient that it adds, and its
    update."""
    last_of = {a.stage: a for a in actions if a.kind in GIVES_WEIGHT_GRADIENT}
    out: list[Action] = []
    ready: list[Action] = []
    for action in actions:
        if ready and action.kind is not Kind.SEND_GRADIENT:  # a send goes first: others wait for it
            out.append(ready.pop())
        out.append(action)
        gives = action.kind in GIVES_WEIGHT_GRADIENT
        if gives and (reduce_each or last_of[action.stage] == action):
            ready.append(action._replace(kind=Kind.REDUCE_GRAD))
    return (*out, *ready, Action(Kind.OPT_STEP))


def sends_of(action: Action, num_stages: int) -> list[Action]:
    """What an action's result is sent on as, were its neighbours on other ranks."""
    if action.kind is Kind.F and action.stage < num_stages - 1:
        return [action._replace(kind=Kind.SEND_ACTIVATION)]
    if action.kind in _GIVES_INPUT_GRADIENT and action.stage > 0:
        return [action._replace(kind=Kind.SEND_GRADIENT)]
    return []


def received_by(send: Action) -> Action:
    """The receive on the other side of a send."""
    if send.kind is Kind.SEND_ACTIVATION:
        return send._replace(kind=Kind.RECV_ACTIVATION, stage=send.stage + 1)
    return send._replace(kind=Kind.RECV_GRADIENT, stage=send.stage - 1)


def needs_of(action: Action, num_stages: int) -> list[Action]:
    """The receives that an action waits for, were its neighbours on other ranks."""
    if action.kind is Kind.F and action.stage > 0:
        return [action._replace(kind=Kind.RECV_ACTIVATION)]
    if action.kind in _GIVES_INPUT_GRADIENT and action.stage < num_stages - 1:
        return [action._replace(kind=Kind.RECV_GRADIENT)]
    return []


def _receives_of(actions: Iterable[Action], num_stages: int) -> Iterable[Action]:
    for action in actions:
        yield from map(received_by, sends_of(action, num_stages))


def _with_transfers(
    actions: Sequence[Action], num_ranks: int, virtual_stages: int, sent: _Sent
) -> list[Action]:
    num_stages = num_ranks * virtual_stages
    asked: dict[Channel, int] = defaultdict(int)
    out: list[Action] = []

    def ask_for(action: Action) -> None:
        for receive in needs_of(action, num_stages):
            if receive in sent.place:
                channel = channel_of(receive, num_ranks)
                until = sent.place[receive] + 1
                out.extend(sent.queues[channel][asked[channel] : until])
                asked[channel] = max(asked[channel], until)

    for index, action in enumerate(actions):
        if index == 0:
            ask_for(action)
        if index + 1 < len(actions):
            ask_for(actions[index + 1])
        out.append(action)
        out.extend(send for send in sends_of(action, num_stages) if received_by(send) in sent.place)
    return out
