"""Functions that add transfers, gradient reductions and the optimizer step to a schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from optimus.parallel.pipeline.actions import Action, Channel, Kind, channel_of

_INPUT_GRADIENT = (Kind.B, Kind.I)
WEIGHT_GRADIENT = (Kind.B, Kind.W)


class _Traffic:
    """Receive actions of a schedule, grouped by channel and in the order of the matching sends."""

    def __init__(self, lists: Sequence[Sequence[Action]], num_ranks: int, num_stages: int) -> None:
        self.queues: dict[Channel, list[Action]] = defaultdict(list)
        self.position: dict[Action, int] = {}
        """The index of each receive action in the queue of its channel."""
        for actions in lists:
            sends = (send for action in actions for send in sends_of(action, num_stages))
            for receive in map(received_by, sends):
                channel = channel_of(receive, num_ranks)
                if channel.source != channel.to:
                    self.position[receive] = len(self.queues[channel])
                    self.queues[channel].append(receive)


def add_transfers(
    lists: Sequence[Sequence[Action]], num_ranks: int, virtual_stages: int
) -> list[list[Action]]:
    """Return the compute actions of each rank with sends and receives inserted.

    A send directly follows the action that computes the data to send. The receive for a compute
    action is posted before the preceding compute action, so that the transfer overlaps with
    computation.
    """
    traffic = _Traffic(lists, num_ranks, num_ranks * virtual_stages)
    return [_with_transfers(actions, num_ranks, virtual_stages, traffic) for actions in lists]


def add_update(actions: Sequence[Action], reduce_each: bool) -> tuple[Action, ...]:
    """Return a rank's actions with gradient reductions inserted and the optimizer step appended.

    With `reduce_each`, gradients are reduced after each microbatch, otherwise only after the last
    microbatch.
    """
    last_of = {a.stage: a for a in actions if a.kind in WEIGHT_GRADIENT}
    out: list[Action] = []
    ready: list[Action] = []
    for action in actions:
        if ready and action.kind is not Kind.SEND_GRADIENT:  # send first: another rank waits
            out.append(ready.pop())
        out.append(action)
        adds = action.kind in WEIGHT_GRADIENT
        if adds and (reduce_each or last_of[action.stage] == action):
            ready.append(action._replace(kind=Kind.REDUCE_GRAD))
    return (*out, *ready, Action(Kind.OPT_STEP))


def sends_of(action: Action, num_stages: int) -> list[Action]:
    """Return a list with the action that sends the result of a compute action to another stage, or
    [] if no stage needs the result.

    The function assumes that each stage is on a different rank.
    """
    if action.kind is Kind.F and action.stage < num_stages - 1:
        return [action._replace(kind=Kind.SEND_ACTIVATION)]
    if action.kind in _INPUT_GRADIENT and action.stage > 0:
        return [action._replace(kind=Kind.SEND_GRADIENT)]
    return []


def received_by(send: Action) -> Action:
    """Return the receive action that matches a send action."""
    if send.kind is Kind.SEND_ACTIVATION:
        return send._replace(kind=Kind.RECV_ACTIVATION, stage=send.stage + 1)
    return send._replace(kind=Kind.RECV_GRADIENT, stage=send.stage - 1)


def needs_of(action: Action, num_stages: int) -> list[Action]:
    """Return a list with the action that receives the input of a compute action from another stage,
    or [] if the compute action needs no data of another stage.

    The function assumes that each stage is on a different rank.
    """
    if action.kind is Kind.F and action.stage > 0:
        return [action._replace(kind=Kind.RECV_ACTIVATION)]
    if action.kind in _INPUT_GRADIENT and action.stage < num_stages - 1:
        return [action._replace(kind=Kind.RECV_GRADIENT)]
    return []


def _with_transfers(
    actions: Sequence[Action], num_ranks: int, virtual_stages: int, traffic: _Traffic
) -> list[Action]:
    num_stages = num_ranks * virtual_stages
    posted: dict[Channel, int] = defaultdict(int)
    out: list[Action] = []

    def post_receives(action: Action) -> None:
        for receive in needs_of(action, num_stages):
            if receive in traffic.position:
                channel = channel_of(receive, num_ranks)
                until = traffic.position[receive] + 1
                # Receives have the order of the sends, because some backends match messages only by
                # their order.
                out.extend(traffic.queues[channel][posted[channel] : until])
                posted[channel] = max(posted[channel], until)

    for index, action in enumerate(actions):
        if index == 0:
            post_receives(action)
        if index + 1 < len(actions):
            post_receives(actions[index + 1])
        out.append(action)
        sends = sends_of(action, num_stages)
        out.extend(send for send in sends if received_by(send) in traffic.position)
    return out
