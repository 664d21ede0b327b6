"""Between the memory of a rank and shard files: spans written as they lie, spans read by a plan.

Memory is given as bytes, whoever owns it. Needs no torch.

Model broadcasting: what one rank has read reaches the ranks that hold the same, in place.

Each of n copies of a shard has read an n-th of it. By `broadcast` everyone in turn gives what it
has, axis by axis; by `all_reduce` they add what they have, zeros elsewhere, as integers, so that no
bit changes. Nothing is allocated for it but one stripe for what both end stages hold.

Loading full states: every rank reads its own part, and copies pass on what they have read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy
import torch
from torch import Tensor

from optimus.checkpoint.format import ITEMSIZE, Index, Manifest
from optimus.checkpoint.save import RankStates
from optimus.checkpoint.shard_file import (
    ShardReader,
)
from optimus.checkpoint.slices import (
    STRIPE,
    Held,
    Part,
    Piece,
    Span,
    bounds,
    first_nonfinite,
    part_of,
    spans_to_read,
)
from optimus.chunks.buffers import StateShard
from optimus.chunks.layout import STATES
from optimus.config.axes import AXES
from optimus.distributed.collectives import (
    Group,
    all_gather_objects,
    all_reduce_sum,
    broadcast,
    broadcast_bytes,
    broadcast_object,
    greatest,
)
from optimus.distributed.groups import Groups
from optimus.errors import CheckpointError
from optimus.io import files
from optimus.io.safetensors import as_bytes, check_shapes


class Want(NamedTuple):
    """A state of some pieces of parameters, each with the place of its first element in memory."""

    state: str
    pieces: Sequence[tuple[Piece, int]]
    memory: memoryview


class Readers(files.Closing):
    """The shard files of a checkpoint, of which the last `limit` stay open, with the block that
    was not read in whole: whoever wants one thing after the other reads it once."""

    def __init__(self, directory: Path, index: Index, limit: int) -> None:
        self._directory, self._index, self._limit = directory, index, limit
        self._open: dict[int, ShardReader] = {}
        """The last used last."""

    def read(self, wants: Sequence[Want]) -> None:
        """Fill the memory of every want; a file that holds some of them is opened once, and a block
        of it read once. Raises CheckpointError naming the file that is damaged or what is
        missing."""
        try:
            runs = plan_reads(self._index, wants)
        except CheckpointError as error:
            raise CheckpointError(f"{self._directory}: {error}") from None
        limits = [*numpy.flatnonzero(numpy.diff(runs[:, 0], prepend=-1)), len(runs)]
        targets = [want.memory for want in wants]
        for low, high in itertools.pairwise(limits):
            self._file(int(runs[low, 0])).read(runs[low:high, 1:], targets)

    def _file(self, number: int) -> ShardReader:
        file = self._open.pop(number, None)
        if file is None:
            while len(self._open) >= self._limit:
                self._open.pop(next(iter(self._open))).close()
            file = self._index.open(self._directory, number)
        self._open[number] = file
        return file

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


def plan_reads(index: Index, wants: Sequence[Want]) -> numpy.ndarray:
    """int64 [n, 5]: shard, offset in its file, number of the want, offset in its memory, length; in
    bytes, by shard and offset. Raises CheckpointError if the index does not lead to everything."""
    stored = {name: index.stored(name) for name in {p.name for w in wants for p, _ in w.pieces}}
    known: dict[Piece, numpy.ndarray] = {}
    found = [numpy.empty((0, 5), dtype=numpy.int64)]
    for number, want in enumerate(wants):
        state = STATES.index(want.state)
        for piece, at in want.pieces:
            if piece not in known:
                known[piece] = stored[piece.name].element_runs(piece)
            runs = stored[piece.name].byte_runs(known[piece], state, ITEMSIZE)
            runs[:, 2] += at * ITEMSIZE
            found.append(numpy.insert(runs, 2, number, axis=1))
    every = numpy.concatenate(found)
    return every[numpy.lexsort((every[:, 1], every[:, 0]))]


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


HOST_BYTES = 1 << 30
"""What loading may take of the host's memory for states on another device."""


def load_full(states: RankStates, manifest: Manifest, how: Distribute) -> str:
    """Fill the states from a checkpoint of any layout; why that failed, the same on every rank, or
    nothing. A collective of all ranks.

    The first rank reads the index for all. Each rank reads its part of what it and its copies hold,
    and every block is checked; then copies pass their parts on. After a failure the states hold
    anything, until a checkpoint is loaded in whole.
    """
    everyone, problem, data = states.groups.everyone, "", b""
    if everyone.rank == 0:
        try:
            data = manifest.index_bytes()
        except CheckpointError as error:
            problem = str(error)
    problem = broadcast_object(problem, everyone, str)
    if problem:
        return problem
    data = broadcast_bytes(data, everyone)
    try:
        _read(states, manifest, data)
    except CheckpointError as error:
        problem = str(error)
    if problem := _first_told(problem, states):
        return problem
    for one, held in zip(states.shards, states.held, strict=True):
        if not held.far:
            pass_to_copies(held, one.states.values(), states.groups, how)
    for name in states.on_both_ends:
        pass_to_far_end(name, states.shards, states.groups, how)
    return ""


def _first_told(problem: str, states: RankStates) -> str:
    """The first rank's problem of those that have one."""
    everyone = states.groups.everyone
    if not greatest(int(bool(problem)), everyone, states.device):
        return ""
    problems = all_gather_objects(problem, everyone, str)
    return next(text for text in problems if text)


def _read(states: RankStates, manifest: Manifest, data: bytes) -> None:
    """This rank's part from disk. Host memory is filled in place, at once; other devices' through
    up to HOST_BYTES of host memory. Raises CheckpointError."""
    index, groups = manifest.index(data), states.groups
    check_shapes(manifest.path, index.shapes, states.shapes)
    spans = spans_to_read(states.held, states.boxes, groups.mesh, groups.coordinate)
    parts = states.parts(spans)
    for batch in [parts] if states.device.type == "cpu" else _batches(parts):
        targets = [states.memory(*one) for one in batch]
        hosts = [
            t if t.is_cpu and t.dtype is torch.float32 else torch.empty(t.shape) for t in targets
        ]
        wants = [
            Want(state, span.pieces, as_bytes(host))
            for (state, span), host in zip(batch, hosts, strict=True)
        ]
        with Readers(manifest.path, index, 1) as readers:
            readers.read(wants)
        for (state, span), host in zip(batch, hosts, strict=True):
            if found := first_nonfinite(host.numpy(), span):
                raise CheckpointError(
                    f"{manifest.path}: {state} of {found}, and it was saved so: its hash is right"
                )
        for target, host in zip(targets, hosts, strict=True):
            if host is not target:
                target.copy_(host)


def _batches(parts: Sequence[tuple[str, Span]]) -> Iterator[Sequence[tuple[str, Span]]]:
    """Runs of states of spans that fit into HOST_BYTES, or are alone."""
    batch: list[tuple[str, Span]] = []
    filled = 0
    for state, span in parts:
        size = (span.stop - span.start) * ITEMSIZE
        if batch and filled + size > HOST_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append((state, span))
        filled += size
    yield batch
