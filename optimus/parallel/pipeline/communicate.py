"""From compute actions to complete lists: what travels between ranks, the reduction, the update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from optimus.parallel.pipeline.actions import Action, Kind

_GIVES_INPUT_GRADIENT = (Kind.B, Kind.I)
_GIVES_WEIGHT_GRADIENT = (Kind.B, Kind.W)


def add_communication(
    lists: Sequence[Sequence[Action]], num_ranks: int, virtual_stages: int, reduce_each: bool
) -> tuple[tuple[Action, ...], ...]:
    """Complete the compute actions of each rank.

    A send stands right behind what it sends. Receives from one rank are asked for in the order in
    which that rank sends, as backends without tags need, and one compute action ahead of their use,
    so that data travels while the action before is computed. Stages on one rank send nothing.
    """
    num_stages = num_ranks * virtual_stages
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)  # (from, to): receives
    for rank, actions in enumerate(lists):
        for action in actions:
            for receive in _receives_of(action, num_stages):
                to = receive.stage % num_ranks
                if to != rank:
                    sent[rank, to].append(receive)
    return tuple(
        (
            *_with_receives(actions, rank, num_ranks, num_stages, sent, reduce_each),
            Action(Kind.OPT_STEP),
        )
        for rank, actions in enumerate(lists)
    )


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


def _receives_of(action: Action, num_stages: int) -> Iterable[Action]:
    return map(received_by, sends_of(action, num_stages))


def _with_receives(
    actions: Sequence[Action],
    rank: int,
    num_ranks: int,
    num_stages: int,
    sent: dict[tuple[int, int], list[Action]],
    reduce_each: bool,
) -> list[Action]:
    asked = dict.fromkeys(range(num_ranks), 0)
    last_of = {a.stage: a for a in actions if a.kind in _GIVES_WEIGHT_GRADIENT}
    out: list[Action] = []

    def ask_for(action: Action) -> None:
        for receive in needs_of(action, num_stages):
            step = -1 if receive.kind is Kind.RECV_ACTIVATION else 1
            source = (receive.stage + step) % num_ranks
            if source == rank:
                continue
            queue = sent[source, rank]
            until = queue.index(receive) + 1
            out.extend(queue[asked[source] : until])
            asked[source] = max(asked[source], until)

    for index, action in enumerate(actions):
        if index == 0:
            ask_for(action)
        if index + 1 < len(actions):
            ask_for(actions[index + 1])
        out.append(action)
        for send in sends_of(action, num_stages):
            if received_by(send).stage % num_ranks != rank:
                out.append(send)
        gives = action.kind in _GIVES_WEIGHT_GRADIENT
        if gives and (reduce_each or last_of[action.stage] == action):
            out.append(action._replace(kind=Kind.REDUCE_GRAD))
    return out
