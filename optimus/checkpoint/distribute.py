"""Model broadcasting: what one rank has read reaches the ranks that hold the same, in place.

Each of n copies of a shard has read an n-th of it. By `broadcast` everyone in turn gives what it
has, axis by axis; by `all_reduce` they add what they have, zeros elsewhere, as integers, so that no
bit changes. Nothing is allocated for it but one stripe for what both end stages hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from optimus.checkpoint.pieces import STRIPE, Held, Part, bounds, part_of
from optimus.chunks.buffers import StateShard
from optimus.config.axes import AXES
from optimus.distributed.collectives import Group, all_reduce_sum, broadcast
from optimus.distributed.groups import Groups

Distribute = Literal["broadcast", "all_reduce"]


def pass_to_copies(held: Held, flats: Iterable[Tensor], groups: Groups, how: Distribute) -> None:
    """Complete the states `flats` of a shard, of which this rank has its own part. A collective of
    the ranks that hold the same shard."""
    mesh, place = groups.mesh, groups.coordinate
    part = part_of(mesh, place, held.copies)
    if part.count == 1:
        return
    start, stop = bounds(held, part)
    along = [(groups.over(axis), getattr(mesh, axis)) for axis in AXES if axis in held.copies]
    for flat in flats:
        if how == "all_reduce":
            flat[:start] = 0
            flat[stop:] = 0
        stride = 1
        for group, size in reversed(along):
            if how == "all_reduce":
                all_reduce_sum(_integers(flat), group)
                continue
            base = part.index // (stride * size) * (stride * size)
            for source in range(size):
                low = bounds(held, Part(base + source * stride, part.count))[0]
                high = bounds(held, Part(base + (source + 1) * stride - 1, part.count))[1]
                if high > low:
                    broadcast(flat[low:high], group, source)
            stride *= size


def pass_to_far_end(
    name: str, shards: Sequence[StateShard], groups: Groups, how: Distribute
) -> None:
    """The last stage's shard of a parameter from the first's, which may be cut in another way: a
    stripe at a time. A collective of the end stages; nothing on others."""
    holder = next((s for s in shards if any(slot.name == name for slot in s.chunk.slots)), None)
    if holder is None or groups.ends.size == 1:
        return
    slot = next(slot for slot in holder.chunk.slots if slot.name == name)
    far = holder.groups.is_tied_copy
    low, high = max(slot.start, holder.first), min(slot.stop, _end(holder))
    for flat in holder.states.values():
        for start in range(slot.start, slot.stop, STRIPE):
            stop = min(start + STRIPE, slot.stop)
            stripe = flat.new_zeros(stop - start)
            a, b = max(low, start), min(high, stop)
            own = flat[a - holder.first : b - holder.first] if a < b else None
            if own is not None and not far:
                stripe[a - start : b - start] = own
            if not far:
                all_reduce_sum(_integers(stripe), holder.groups.shard_group)
            give(_integers(stripe), groups.ends, how)
            if own is not None and far:
                own.copy_(stripe[a - start : b - start])


def _end(shard: StateShard) -> int:
    return shard.first + shard.chunk.shard_length


def give(tensor: Tensor, group: Group, how: Distribute) -> None:
    """The first rank's integers on every rank; to be added, those of the others must be zeros."""
    if how == "broadcast":
        broadcast(tensor, group)
    else:
        all_reduce_sum(tensor, group)


def _integers(tensor: Tensor) -> Tensor:
    """The same memory as integers, of which zeros added change no bit. (Of two bytes gloo adds
    none.)"""
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.uint8)
