"""A pipeline schedule as a value: the actions of each rank, in order.

Stages are numbered along the model, 0 to p*v - 1 with p pipeline ranks of v stages each; stage s is
on rank s mod p. The executor runs these lists of actions, `simulate` times them and the tests check
them; a schedule has no other description.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """The kind of an action. An action is for one microbatch on one stage, except where noted."""

    F = 0
    """Forward."""
    B = 1
    """The whole backward."""
    I = 2  # noqa: E741 - the field's letter
    """The half of backward that computes the gradient of the stage's input."""
    W = 3
    """The half of backward that computes the gradients of weights; after I."""
    SEND_ACTIVATION = 4
    """Send the stage's output to stage + 1, without waiting."""
    RECV_ACTIVATION = 5
    """Post the receive of the output of stage - 1; the forward waits for it."""
    SEND_GRADIENT = 6
    """Send the gradient of the stage's input to stage - 1, without waiting."""
    RECV_GRADIENT = 7
    """Post the receive of the output's gradient from stage + 1; the backward waits for it."""
    REDUCE_GRAD = 8
    """Reduce the stage's gradients over its data ranks. The action's microbatch is the last one
    whose gradients were added."""
    OPT_STEP = 9
    """Update the weights of all stages of the rank; the last action of a step."""


COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)
SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
RECEIVES = (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT)


class Action(NamedTuple):
    """One entry of a rank's list."""

    kind: Kind
    stage: int = 0
    microbatch: int = 0

    def __str__(self) -> str:
        return f"{self.kind.name}(stage {self.stage}, microbatch {self.microbatch})"


class Channel(NamedTuple):
    """A connection from one rank to another, for activations or for gradients. Each channel has a
    separate communicator, in which messages complete in the order in which they were posted."""

    sends: Kind
    source: int
    to: int


@dataclass(frozen=True)
class Schedule:
    """The actions of all ranks for one step, or for an evaluation."""

    name: str
    num_ranks: int
    """p, the number of pipeline ranks."""
    virtual_stages: int
    """v, the number of stages of a rank."""
    num_microbatches: int
    """m, the number of microbatches of one data rank in one step."""
    ranks: tuple[tuple[Action, ...], ...]
    """The actions of each pipeline rank."""
    reduce_each: bool = False
    """Reduce a stage's gradients after each microbatch, rather than once after the last."""

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.virtual_stages

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank of a stage."""
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> range:
        """Return the stages of a pipeline rank, first to last."""
        return range(rank, self.num_stages, self.num_ranks)

    def channel_of(self, action: Action) -> Channel:
        """Return the channel of a send or receive."""
        return channel_of(action, self.num_ranks)

    @property
    def splits_backward(self) -> bool:
        """Return whether backward is divided into I and W."""
        return any(action.kind is Kind.W for actions in self.ranks for action in actions)


def channel_of(action: Action, num_ranks: int) -> Channel:
    """Return the channel of a send or receive among `num_ranks` pipeline ranks."""
    stage = action.stage
    if action.kind is Kind.SEND_ACTIVATION or action.kind is Kind.RECV_ACTIVATION:
        source = stage if action.kind is Kind.SEND_ACTIVATION else stage - 1
        return Channel(Kind.SEND_ACTIVATION, source % num_ranks, (source + 1) % num_ranks)
    assert action.kind is Kind.SEND_GRADIENT or action.kind is Kind.RECV_GRADIENT, action
    source = stage if action.kind is Kind.SEND_GRADIENT else stage + 1
    return Channel(Kind.SEND_GRADIENT, source % num_ranks, (source - 1) % num_ranks)
