"""A pipeline schedule as a value: what each rank does, in order.

Stages are numbered along the model, 0 to p*v - 1 with p pipeline ranks of v stages each; stage s
lies on rank s mod p. The executor runs these lists, `simulate` times them, the tests prove them;
nothing else describes a schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What an action does, for one microbatch on one stage unless said otherwise."""

    F = 0
    """Forward."""
    B = 1
    """The whole backward."""
    I = 2  # noqa: E741 - the field's letter
    """The part of backward that gives the gradient of the stage's input."""
    W = 3
    """The part of backward that gives the gradients of weights; after I."""
    SEND_ACTIVATION = 4
    """Give the output to stage + 1; does not wait."""
    RECV_ACTIVATION = 5
    """Ask for the output of stage - 1; the forward waits for it."""
    SEND_GRADIENT = 6
    """Give the gradient of the input to stage - 1; does not wait."""
    RECV_GRADIENT = 7
    """Ask for the gradient of the output from stage + 1; the backward waits for it."""
    REDUCE_GRAD = 8
    """Add the stage's gradients over its data ranks; the microbatch is the newest they hold."""
    OPT_STEP = 9
    """Update the weights of all stages here; the last action of a step."""


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
    """A way that messages take: from one rank to another, activations or gradients. Each way has a
    communicator of its own, in which messages complete in the order in which they were posted."""

    sends: Kind
    source: int
    to: int


@dataclass(frozen=True)
class Schedule:
    """All ranks' lists for one step, or for an evaluation."""

    name: str
    num_ranks: int
    """p, the pipeline ranks."""
    virtual_stages: int
    """v, stages a rank holds."""
    num_microbatches: int
    """m, of one data rank in one step."""
    ranks: tuple[tuple[Action, ...], ...]
    """By pipeline rank."""
    reduce_each: bool = False
    """Whether each microbatch of a stage is reduced, rather than all at the last."""

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.virtual_stages

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> range:
        """The stages that a pipeline rank holds, first to last."""
        return range(rank, self.num_stages, self.num_ranks)

    def channel_of(self, action: Action) -> Channel:
        """The way that a send or receive takes."""
        return channel_of(action, self.num_ranks)

    @property
    def splits_backward(self) -> bool:
        """Whether backward comes as I and W."""
        return any(action.kind is Kind.W for actions in self.ranks for action in actions)


def channel_of(action: Action, num_ranks: int) -> Channel:
    """The way that a send or receive takes among so many pipeline ranks."""
    stage = action.stage
    if action.kind is Kind.SEND_ACTIVATION or action.kind is Kind.RECV_ACTIVATION:
        source = stage if action.kind is Kind.SEND_ACTIVATION else stage - 1
        return Channel(Kind.SEND_ACTIVATION, source % num_ranks, (source + 1) % num_ranks)
    assert action.kind is Kind.SEND_GRADIENT or action.kind is Kind.RECV_GRADIENT, action
    source = stage if action.kind is Kind.SEND_GRADIENT else stage + 1
    return Channel(Kind.SEND_GRADIENT, source % num_ranks, (source - 1) % num_ranks)
