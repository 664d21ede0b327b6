"""The ways between neighbouring pipeline ranks, each a communicator of its own that carries
messages one way.

NCCL and XCCL complete the messages of one communicator in the order in which they were posted, and
a send no sooner than its receive is posted. In a communicator for both directions a gradient asked
for early would hold up the activation behind it, on which that very gradient depends; in one for
the whole ring of stages all ranks' sends could wait for each other (`pipeline.validate` proves what
one way each allows).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimus.dist.collectives import ALONE, Group, receive, send
from optimus.dist.world import World


@dataclass(frozen=True)
class Channels:
    """A pipeline rank's ways to and from its neighbours; the last rank's next is the first."""

    rank: int = 0
    """Along pp."""
    activations_out: Group = ALONE
    """To the next rank."""
    activations_in: Group = ALONE
    """From the rank before."""
    gradients_out: Group = ALONE
    """To the rank before."""
    gradients_in: Group = ALONE
    """From the next rank."""


NO_CHANNELS = Channels()


def open_channels(
    ring: Sequence[int], world: World, make: Callable[[tuple[int, ...]], Any]
) -> Channels:
    """Open this rank's channels to its neighbours in `ring`, the ranks along pp; all of them call
    it, having made equally many groups. `make` makes the process group of some ranks.

    A message passes through each at once: communicators that connect at their first use would do so
    in the midst of a step, where one side may reach that use only after the other's.
    """
    rank = ring.index(world.rank)
    ways: dict[str, Group] = {}
    for edges in _rounds(len(ring)):
        own = next((edge for edge in edges if rank in edge), None)
        for name, source in (("activations", 0), ("gradients", 1)):
            if own is None:  # torch names a group by how many this rank has made before it
                make((world.rank,))
                continue
            ranks = tuple(sorted(ring[end] for end in own))
            channel = Group(2, ranks.index(world.rank), make(ranks), "pp")
            out = rank == own[source]
            pass_on = send if out else receive
            pass_on(torch.zeros(1, device=world.device), channel, 1 - channel.rank).wait()
            ways[f"{name}_{'out' if out else 'in'}"] = channel
    return Channels(rank, **ways)


def _rounds(size: int) -> list[list[tuple[int, int]]]:
    """The neighbours in a ring, in rounds in which no rank stands twice: all of a round's channels
    open at once, and nobody waits for a rank that waits for it."""
    edges = [(rank, (rank + 1) % size) for rank in range(size if size > 1 else 0)]
    last = edges[-1:] if size % 2 else []
    edges = edges[: len(edges) - len(last)]
    return [chosen for chosen in (edges[::2], edges[1::2], last) if chosen]
