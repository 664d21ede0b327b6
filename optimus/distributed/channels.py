"""Point-to-point channels between neighbouring pipeline ranks.

Each channel has one direction and a separate communicator. NCCL and XCCL complete the messages of a
communicator in the order in which they are posted. If channels shared a communicator, ranks could
therefore deadlock.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from optimus.distributed.collectives import ALONE, Group, receive, send
from optimus.distributed.world import World
from optimus.observe.events import NO_RECORDER, Recorder


@dataclass(frozen=True)
class Channels:
    """Channels of a pipeline rank to and from its neighbours. If a neighbour does not exist, its
    channels are `ALONE`, a Group that does not communicate.

    With several stages per rank, the first and the last rank are neighbours, too.

    Attributes:
        rank: This rank's index along pp.
        activations_out: Sends activations to the next rank.
        activations_in: Receives activations from the previous rank.
        gradients_out: Sends gradients to the previous rank.
        gradients_in: Receives gradients from the next rank.
    """

    rank: int = 0
    activations_out: Group = ALONE
    activations_in: Group = ALONE
    gradients_out: Group = ALONE
    gradients_in: Group = ALONE


NO_CHANNELS = Channels()


def open_channels(
    line: Sequence[int],
    is_ring: bool,
    world: World,
    make: Callable[[tuple[int, ...]], weakref.ref],
    recorder: Recorder = NO_RECORDER,
) -> Channels:
    """Open this rank's channels to its neighbours along pp. All ranks of `line` must call this.

    Args:
        line: Global ranks along pp. Each of them must have made the same number of process groups
            before.
        is_ring: True if each rank has several stages.
        world: World of this rank.
        make: Makes the process group of the given global ranks; returns a weak reference to it.
        recorder: Receives an event for each message.
    """
    rank = line.index(world.rank)
    channels: dict[str, Group] = {}
    for edges in _rounds(len(line), is_ring):
        edge = next((edge for edge in edges if rank in edge), None)
        # tests/kit/layouts/schedule_proof.py proves that schedules complete with these
        # communicators.
        for name, source in (("activations", 0), ("gradients", 1)):
            if edge is None:  # this rank must make as many groups as other ranks
                make((world.rank,))
                continue
            ranks = tuple(sorted(line[end] for end in edge))
            channel = Group(2, ranks.index(world.rank), make(ranks), "pp", recorder)
            is_sender = rank == edge[source]
            transfer = send if is_sender else receive
            # Some communicators connect at their first use, in which both ranks must take part.
            transfer(torch.zeros(1, device=world.device), channel, 1 - channel.rank).wait()
            channels[f"{name}_{'out' if is_sender else 'in'}"] = channel
    return Channels(rank, **channels)


def _rounds(size: int, is_ring: bool) -> list[list[tuple[int, int]]]:
    """Divide the pairs of neighbouring ranks into rounds, and return the rounds. Each rank is in at
    most one pair of a round."""
    # All channels of a round open at the same time, so ranks cannot wait for each other in a cycle.
    edges = [(rank, rank + 1) for rank in range(size - 1)]
    rounds = [edges[::2], edges[1::2], []]
    if is_ring and size > 1:
        rounds[1 + size % 2].append((size - 1, 0))
    return [edges for edges in rounds if edges]
