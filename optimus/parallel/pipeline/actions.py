"""Pipeline schedules: the ordered list of actions of each rank.

With p pipeline ranks of v stages each, the stages have the indices 0 to p*v - 1, in the order of
their layers. Stage s is on rank s mod p.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """Kind of an action. Except for OPT_STEP, an action is for one microbatch on one stage."""

    F = 0
    """Forward pass."""
    B = 1
    """Complete backward pass: gradients of the stage's input and weights."""
    I = 2  # noqa: E741 - the letter that papers use
    """First half of a divided backward pass: the gradient of the stage's input."""
    W = 3
    """Second half of a divided backward pass: the gradients of the stage's weights."""
    SEND_ACTIVATION = 4
    """Start to send the stage's output to the next stage."""
    RECV_ACTIVATION = 5
    """Post the receive of the stage's input. The forward pass later waits for this transfer."""
    SEND_GRADIENT = 6
    """Start to send the gradient of the stage's input to the previous stage."""
    RECV_GRADIENT = 7
    """Post the receive of the stage's output gradient. The backward pass later waits for this
    transfer."""
    REDUCE_GRAD = 8
    """Reduce the stage's gradients over the data-parallel ranks. `Action.microbatch` is the last
    microbatch that has contributed to these gradients."""
    OPT_STEP = 9
    """Update the weights of all stages of the rank. OPT_STEP is the last action of a step."""

    __hash__ = int.__hash__  # Enum.__hash__ is a Python function, which makes dicts of actions slow


COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)
SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
RECEIVES = (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT)


class Action(NamedTuple):
    """One action of a pipeline rank, for one stage and one microbatch."""

    kind: Kind
    stage: int = 0
    microbatch: int = 0

    def __str__(self) -> str:
        return f"{self.kind.name}(stage {self.stage}, microbatch {self.microbatch})"


def last_actions(actions: Iterable[Action]) -> dict[tuple[Kind, int], Action]:
    """Return the last action of each kind and stage."""
    return {(action.kind, action.stage): action for action in actions}  # later values replace


def passes_of(actions: Iterable[Action]) -> list[tuple[int, bool]]:
    """Return (stage, True for a backward pass) for each forward and backward pass among the
    actions, in order. The action W is not counted as a pass."""
    backward = {Kind.F: False, Kind.B: True, Kind.I: True}
    return [(a.stage, backward[a.kind]) for a in actions if a.kind in backward]


class Channel(NamedTuple):
    """Connection from one pipeline rank to another, either for activations or for gradients.

    Each channel has a separate communicator. Messages on a communicator complete in the order in
    which they were posted.
    """

    sends: Kind
    """SEND_ACTIVATION or SEND_GRADIENT."""
    source: int
    """Index of the sending pipeline rank."""
    to: int
    """Index of the receiving pipeline rank."""


@dataclass(frozen=True)
class Schedule:
    """The actions of all pipeline ranks for one training step or one evaluation."""

    name: str
    num_ranks: int
    """p, the number of pipeline ranks."""
    virtual_stages: int
    """v, the number of stages per pipeline rank."""
    num_microbatches: int
    """m, the number of microbatches per data-parallel rank and step."""
    ranks: tuple[tuple[Action, ...], ...]
    """The ordered actions of each pipeline rank."""
    reduce_each: bool = False
    """True to reduce gradients after each microbatch; False to reduce gradients only after the last
    microbatch."""

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.virtual_stages

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that runs a stage."""
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> range:
        """Return the indices of a pipeline rank's stages, in ascending order."""
        return range(rank, self.num_stages, self.num_ranks)

    def channel_of(self, action: Action) -> Channel:
        """Return the channel that a send or receive action uses."""
        return channel_of(action, self.num_ranks)

    @property
    def splits_backward(self) -> bool:
        """True if the schedule divides backward into the actions I and W."""
        return any(action.kind is Kind.W for actions in self.ranks for action in actions)


def channel_of(action: Action, num_ranks: int) -> Channel:
    """Return the channel that a send or receive action uses in a pipeline of `num_ranks` ranks."""
    stage = action.stage
    if action.kind is Kind.SEND_ACTIVATION or action.kind is Kind.RECV_ACTIVATION:
        source = stage if action.kind is Kind.SEND_ACTIVATION else stage - 1
        return Channel(Kind.SEND_ACTIVATION, source % num_ranks, (source + 1) % num_ranks)
    assert action.kind is Kind.SEND_GRADIENT or action.kind is Kind.RECV_GRADIENT, action
    source = stage if action.kind is Kind.SEND_GRADIENT else stage + 1
    return Channel(Kind.SEND_GRADIENT, source % num_ranks, (source - 1) % num_ranks)
