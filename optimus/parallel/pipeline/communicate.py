"""Functions that add transfers, gradient reductions and the optimizer step to a schedule."""

from __future__ import annotations

from collections.abc import Sequence

from optimus.parallel.pipeline.actions import Action, Kind

_INPUT_GRADIENT = (Kind.B, Kind.I)
WEIGHT_GRADIENT = (Kind.B, Kind.W)


class _Incoming:
    """Receive actions of a rank on one channel, in the order of the matching sends."""

    def __init__(self, kind: Kind, keys: Sequence[tuple[int, int]]) -> None:
        """`keys` contains (receiving stage, microbatch) for each receive of kind `kind`."""
        self.queue = [Action(kind, *key) for key in keys]
        self.position = {key: index for index, key in enumerate(keys)}
        self.num_posted = 0

    def post_until(self, action: Action) -> Sequence[Action]:
        """Return the receives up to the receive for which `action` waits, in order. Receives that
        earlier calls have returned are left out."""
        index = self.position.get(action[1:], -1)
        # Receives have the order of the sends, because some backends match messages only by their
        # order.
        receives = self.queue[self.num_posted : index + 1]
        self.num_posted += len(receives)
        return receives


def add_transfers(
    lists: Sequence[Sequence[Action]], num_ranks: int, virtual_stages: int
) -> list[list[Action]]:
    """Return the compute actions of each rank with sends and receives inserted.

    A send directly follows the action that computes the data to send. The receive for a compute
    action is posted before the preceding compute action, so that the transfer overlaps with
    computation.
    """
    if num_ranks == 1:  # all stages are on the same rank
        return [list(actions) for actions in lists]
    last = num_ranks * virtual_stages - 1
    forward = [[a[1:] for a in actions if a.kind is Kind.F and a.stage < last] for actions in lists]
    backward = [
        [a[1:] for a in actions if a.kind in _INPUT_GRADIENT and a.stage > 0] for actions in lists
    ]
    complete = []
    for rank, actions in enumerate(lists):
        senders = forward[rank - 1], backward[(rank + 1) % num_ranks]
        activations = _Incoming(Kind.RECV_ACTIVATION, [(s + 1, j) for s, j in senders[0]])
        gradients = _Incoming(Kind.RECV_GRADIENT, [(s - 1, j) for s, j in senders[1]])
        complete.append(_with_transfers(actions, last, activations, gradients))
    return complete


def add_update(actions: Sequence[Action], reduce_each: bool) -> tuple[Action, ...]:
    """Return a rank's actions with gradient reductions inserted and the optimizer step appended.

    If `reduce_each` is True, gradients are reduced after each microbatch, otherwise only after the
    last microbatch.
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


def _with_transfers(
    actions: Sequence[Action], last_stage: int, activations: _Incoming, gradients: _Incoming
) -> list[Action]:
    """Return the actions of a rank with sends and receives inserted. A schedule of a large run has
    more than a million actions. Therefore this function makes a single pass over the actions."""
    incoming = {Kind.F: activations, Kind.B: gradients, Kind.I: gradients}
    out: list[Action] = []
    if actions and actions[0].kind in incoming:
        out.extend(incoming[actions[0].kind].post_until(actions[0]))
    for index, action in enumerate(actions, 1):
        if index < len(actions) and (channel := incoming.get(actions[index].kind)) is not None:
            out.extend(channel.post_until(actions[index]))
        out.append(action)
        kind, stage, microbatch = action
        if kind is Kind.F and stage < last_stage:
            out.append(Action(Kind.SEND_ACTIVATION, stage, microbatch))
        elif kind in _INPUT_GRADIENT and stage > 0:
            out.append(Action(Kind.SEND_GRADIENT, stage, microbatch))
    return out
