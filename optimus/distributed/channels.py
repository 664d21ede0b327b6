"""The ways between neighbouring pipeline ranks, each a communicator of its own that carries
messages one way.

NCCL and XCCL complete the messages of one communicator in the order in which they were posted, and
a send no sooner than its receive is posted. In a communicator for both directions a gradient asked
for early would hold up the activation behind it, on which that very gradient depends; in one for
the whole ring of stages all ranks' sends could wait for each other (tests/helpers/schedule_proof.py
proves what one way each allows).
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
    """A pipeline rank's ways to and from its neighbours; the last rank's next is the first where
    ranks hold several stages, and nobody where they hold one."""

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
    line: Sequence[int],
    is_ring: bool,
    world: World,
    make: Callable[[tuple[int, ...]], weakref.ref],
    recorder: Recorder = NO_RECORDER,
) -> Channels:
    """Open this rank's channels to its neighbours in `line`, the ranks along pp; all of them call
    it, having made equally many groups. `make` makes the process group of some ranks; `recorder`
    receives the messages.

    A message passes through each at once: communicators that connect at their first use would do so
    in the midst of a step, where one side may reach that use only after the other's.
    """
    rank = line.index(world.rank)
    ways: dict[str, Group] = {}
    for edges in _rounds(len(line), is_ring):
        own = next((edge for edge in edges if rank in edge), None)
        for name, source in (("activations", 0), ("gradients", 1)):
            if own is None:  # as many groups as the others
                make((world.rank,))
                continue
            ranks = tuple(sorted(line[end] for end in own))
            channel = Group(2, ranks.index(world.rank), make(ranks), "pp", recorder)
            out = rank == own[source]
            pass_on = send if out else receive
            pass_on(torch.zeros(1, device=world.device), channel, 1 - channel.rank).wait()
            ways[f"{name}_{'out' if out else 'in'}"] = channel
    return Channels(rank, **ways)


def _rounds(size: int, is_ring: bool) -> list[list[tuple[int, int]]]:
    """The neighbours in a line or ring, in rounds in which no rank stands twice: all of a round's
    channels open at once, and nobody waits for a rank that waits for it."""
    edges = [(rank, rank + 1) for rank in range(size - 1)]
    rounds = [edges[::2], edges[1::2], []]
    if is_ring and size > 1:
        rounds[1 + size % 2].append((size - 1, 0))
    return [chosen for chosen in rounds if chosen]
