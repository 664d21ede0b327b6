"""Point-to-point channels between neighbouring pipeline ranks. Each channel has one direction and a
separate communicator.

NCCL and XCCL complete the messages of a communicator in the order in which they were posted, and
complete a send only after its receive is posted. If both directions shared a communicator, a
gradient receive that is posted early would block the activation send on which the gradient depends.
If all stages of a ring shared a communicator, the sends of all ranks could wait for each other.
tests/helpers/schedule_proof.py proves that schedules complete with one communicator per channel.
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
    """Channels of a pipeline rank to and from its neighbours.

    With several stages per rank (virtual stages), the ranks form a ring: the last rank sends
    activations to the first rank. With one stage per rank, the ranks form a line: the first and the
    last rank are not connected. A channel that does not exist is ALONE.

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

    This sends a message through each channel, because some communicators connect only when they are
    first used, and then both ranks must take part. During a step, the two ranks may reach the first
    use at different times.

    Args:
        line: Global ranks along pp. Before this call, all of them must have made the same number of
            process groups.
        is_ring: True if ranks have several stages.
        world: World of this rank.
        make: Makes the process group of the given global ranks; returns a weak reference to it.
        recorder: Receives an event for each message.
    """
    rank = line.index(world.rank)
    channels: dict[str, Group] = {}
    for edges in _rounds(len(line), is_ring):
        edge = next((edge for edge in edges if rank in edge), None)
        for name, source in (("activations", 0), ("gradients", 1)):
            if edge is None:  # this rank must make as many groups as other ranks
                make((world.rank,))
                continue
            ranks = tuple(sorted(line[end] for end in edge))
            channel = Group(2, ranks.index(world.rank), make(ranks), "pp", recorder)
            is_sender = rank == edge[source]
            transfer = send if is_sender else receive
            transfer(torch.zeros(1, device=world.device), channel, 1 - channel.rank).wait()
            channels[f"{name}_{'out' if is_sender else 'in'}"] = channel
    return Channels(rank, **channels)


def _rounds(size: int, is_ring: bool) -> list[list[tuple[int, int]]]:
    """Return the pairs of neighbours in a line or ring of `size` ranks, grouped into rounds.

    A rank is in at most one pair of a round. Therefore all channels of a round open at the same
    time, and ranks cannot wait for each other in a cycle.
    """
    edges = [(rank, rank + 1) for rank in range(size - 1)]
    rounds = [edges[::2], edges[1::2], []]
    if is_ring and size > 1:
        rounds[1 + size % 2].append((size - 1, 0))
    return [edges for edges in rounds if edges]
