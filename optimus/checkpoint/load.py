"""Loading of full checkpoints: ranks with the same states read different shares of these states and
exchange the shares.

If n ranks have the same shard, each of these ranks reads an n-th of the shard (its share). Then the
ranks exchange their shares in place, along one mesh axis after the other, by the collective that
`checkpoint.distribute` selects. With `broadcast`, the ranks along an axis take turns, and each rank
sends all shares that it has read or received. With `all_reduce`, each rank first sets all elements
outside its share to zero, and an all-reduce along each axis adds the shards as integers. Adding
zero to an integer does not change its bits. If several pipeline stages have the same parameter, the
first of these stages sends the parameter's states to the other stages, in stripes of STRIPE
elements. A stripe is the only additional memory that this exchange needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy
import torch
from torch import Tensor

from optimus.checkpoint.format import Manifest
from optimus.checkpoint.index import ITEMSIZE, Index
from optimus.checkpoint.save import RankStates
from optimus.checkpoint.shard_file import ShardReader
from optimus.checkpoint.slices import (
    STRIPE,
    ChunkShard,
    ParamSlice,
    Share,
    StateSlice,
    find_nonfinite,
    share_bounds,
    share_of,
    slices_to_read,
)
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
from optimus.errors import CheckpointError
from optimus.io import files
from optimus.io.safetensors import as_bytes, check_shapes

HOST_BYTES = 1 << 30
"""Maximum bytes of host memory for the states that are read from files and then copied to an
accelerator or written to disk."""
Distribute = Literal["broadcast", "all_reduce"]
"""Possible values of the setting `checkpoint.distribute`."""


class ReadRequest(NamedTuple):
    """Request to read one state, such as the master weights, of parameter slices into `memory`."""

    state: str
    params: Sequence[tuple[ParamSlice, int]]
    """(slice, offset) pairs. The offset is the position of the slice in `memory`, in elements."""
    memory: memoryview


class Readers(files.Closing):
    """Reader of the shard files of a checkpoint. The `limit` most recently used files stay open.

    For each open file, the last block that was read from the file stays in memory if only a part of
    the block was needed. The next request can then use the rest of the block.
    """

    def __init__(self, directory: Path, index: Index, limit: int) -> None:
        self._directory, self._index, self._limit = directory, index, limit
        self._open: dict[int, ShardReader] = {}
        """Readers of the open shard files, keyed by number of the file. The first entry is the
        least recently used reader."""

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Read the state of each request into the request's `memory`. Each file and each block is
        read at most once.

        Raises:
            CheckpointError: A file is damaged or a parameter is missing. The message names the file
                or the parameter.
        """
        try:
            ranges = plan_reads(self._index, requests)
        except CheckpointError as error:
            raise CheckpointError(f"{self._directory}: {error}") from None
        limits = [*numpy.flatnonzero(numpy.diff(ranges[:, 0], prepend=-1)), len(ranges)]
        targets = [request.memory for request in requests]
        for low, high in itertools.pairwise(limits):
            number = int(ranges[low, 0])
            file = self._open.pop(number, None)
            if file is None:
                while len(self._open) >= self._limit:
                    self._open.pop(next(iter(self._open))).close()
                file = self._index.open(self._directory, number)
            self._open[number] = file
            file.read(ranges[low:high, 1:], targets)

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


def plan_reads(index: Index, requests: Sequence[ReadRequest]) -> numpy.ndarray:
    """Return the byte ranges of shard files that must be read for `requests`.

    Returns:
        int64 [n, 5], sorted by file and offset in the file. Columns: number of the shard file,
        offset in the file, number of the request, offset in the memory of the request, length.
        Offsets and lengths are in bytes.

    Raises:
        CheckpointError: The checkpoint does not contain all requested elements.
    """
    names = {param.name for request in requests for param, _ in request.params}
    stored = {name: index.stored(name) for name in names}
    known: dict[ParamSlice, numpy.ndarray] = {}
    planned = [numpy.empty((0, 5), dtype=numpy.int64)]
    for number, request in enumerate(requests):
        state = index.states.index(request.state)
        for param, offset in request.params:
            if param not in known:
                known[param] = stored[param.name].element_ranges(param)
            ranges = stored[param.name].byte_ranges(known[param], state, ITEMSIZE)
            ranges[:, 2] += offset * ITEMSIZE
            planned.append(numpy.insert(ranges, 2, number, axis=1))
    ranges = numpy.concatenate(planned)
    return ranges[numpy.lexsort((ranges[:, 1], ranges[:, 0]))]


def load_full(states: RankStates, manifest: Manifest, method: Distribute) -> str:
    """Load the states of all ranks from a full checkpoint. All ranks must call this function.

    The run that saved the checkpoint can have had another number of ranks or another mesh than this
    run. The first rank reads the index for all ranks. Every block that is read is compared with its
    hash.

    Args:
        states: The states of this rank, which are overwritten. If the load fails, their values are
            undefined.
        manifest: Manifest of the checkpoint.
        method: `checkpoint.distribute`.

    Returns:
        "" if all ranks have loaded their states, else a message with the reason. All ranks return
        the same text.
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
    if greatest(int(bool(problem)), everyone, states.device):
        return next(filter(None, all_gather_objects(problem, everyone, str)))
    for state_shard, shard in zip(states.shards, states.chunk_shards, strict=True):
        if not shard.is_later_copy:
            broadcast_to_replicas(shard, state_shard.states.values(), states, method)
    for name, group in states.stage_groups.items():
        send_to_later_stages(name, states, group, method)
    return ""


def _read(states: RankStates, manifest: Manifest, data: bytes) -> None:
    """Read this rank's shares of its shards from the files of a checkpoint. Raises CheckpointError.

    `data` is the content of the checkpoint's index. States in host memory are filled in place.
    States on an accelerator or on disk are first read to host memory, in batches of HOST_BYTES.
    """
    index, groups = manifest.index(data), states.groups
    check_shapes(manifest.path, index.shapes, states.shapes)
    if index.states != states.names:
        raise CheckpointError(
            f"{manifest.path}: the checkpoint has the states {', '.join(index.states)}, but the "
            f"optimizer of this run has {', '.join(states.names)}; resume with the optimizer of "
            "the checkpoint"
        )
    slices = states.with_states(
        slices_to_read(states.chunk_shards, states.boxes, groups.mesh, groups.coordinate)
    )
    is_in_place = states.device.type == "cpu" and states.disk is None
    for batch in [slices] if is_in_place else _batches(slices):
        targets = [states.view(*pair) for pair in batch]
        hosts = [
            t if t.is_cpu and t.dtype is torch.float32 else torch.empty(t.shape) for t in targets
        ]
        requests = [
            ReadRequest(state, state_slice.params, as_bytes(host))
            for (state, state_slice), host in zip(batch, hosts, strict=True)
        ]
        with Readers(manifest.path, index, 1) as readers:
            readers.read(requests)
        for (state, state_slice), host in zip(batch, hosts, strict=True):
            if nonfinite := find_nonfinite(host.numpy(), state_slice):
                raise CheckpointError(
                    f"{manifest.path}: {state} of {nonfinite}; the save has written this value, "
                    "since the file matches its hash"
                )
        for target, host in zip(targets, hosts, strict=True):
            states.write(target, host)


def _batches(
    slices: Sequence[tuple[str, StateSlice]],
) -> Iterator[Sequence[tuple[str, StateSlice]]]:
    """Divide the list of (state, slice) pairs into batches of at most HOST_BYTES, in order. A slice
    with more bytes is a separate batch."""
    batch: list[tuple[str, StateSlice]] = []
    filled = 0
    for state, state_slice in slices:
        size = (state_slice.stop - state_slice.start) * ITEMSIZE
        if batch and filled + size > HOST_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append((state, state_slice))
        filled += size
    yield batch


def broadcast_to_replicas(
    shard: ChunkShard, flats: Iterable[Tensor], states: RankStates, method: Distribute
) -> None:
    """Exchange the shares of a shard between all ranks that have the same shard. All of
    these ranks must call this function.

    Args:
        shard: The shard. Each of the ranks has read a different share of the shard.
        flats: For each state, a 1-D tensor with the elements of the shard. Before the call, only
            this rank's share is filled; after the call, all elements are filled.
        states: The states of this rank. They also provide the groups and the device of the rank.
        method: `checkpoint.distribute`.
    """
    groups = states.groups
    mesh = groups.mesh
    share = share_of(mesh, groups.coordinate, shard.copy_axes)
    if share.count == 1:
        return
    start, stop = share_bounds(shard, share)
    along = [(groups.over(axis), getattr(mesh, axis)) for axis in AXES if axis in shard.copy_axes]
    for values in flats:
        # A copy if `values` is on disk or on another device than `states.device`, else `values`.
        flat = states.read(values).to(states.device)
        if method == "all_reduce":
            flat[:start] = 0
            flat[stop:] = 0
        stride = 1
        for group, size in reversed(along):
            if method == "all_reduce":
                all_reduce_sum(_as_integers(flat), group)
                continue
            base = share.index // (stride * size) * (stride * size)
            for source in range(size):
                first, last = base + source * stride, base + (source + 1) * stride - 1
                low = share_bounds(shard, Share(first, share.count))[0]
                high = share_bounds(shard, Share(last, share.count))[1]
                if high > low:
                    broadcast(flat[low:high], group, source)
            stride *= size
        states.write(values, flat)


def send_to_later_stages(
    name: str, states: RankStates, stage_group: Group, method: Distribute
) -> None:
    """For a parameter that several pipeline stages have, copy the states from the first of these
    stages to the other stages. All ranks of `stage_group` and of the shard groups must call this
    function.

    The shards of the stages may contain different elements. Therefore each rank of the later stages
    receives all elements of the parameter, one stripe at a time, and keeps the elements in its
    shard.

    Args:
        name: Name of the parameter.
        states: The states of this rank.
        stage_group: The ranks of the stages that have the parameter.
        method: `checkpoint.distribute`.
    """
    shard, slot = next(
        (shard, slot) for shard in states.shards for slot in shard.chunk.slots if slot.name == name
    )
    is_source = stage_group.rank == 0
    low = max(slot.start, shard.first)
    high = min(slot.stop, shard.first + shard.chunk.shard_length)
    for flat in shard.states.values():
        for start in range(slot.start, slot.stop, STRIPE):
            stop = min(start + STRIPE, slot.stop)
            stripe = torch.zeros(stop - start, dtype=flat.dtype, device=states.device)
            a, b = max(low, start), min(high, stop)
            local = flat[a - shard.first : b - shard.first] if a < b else None
            if is_source:
                if local is not None:
                    stripe[a - start : b - start] = states.read(local)
                all_reduce_sum(_as_integers(stripe), shard.groups.shard_group)
            broadcast_from_first(_as_integers(stripe), stage_group, method)
            if local is not None and not is_source:
                states.write(local, stripe[a - start : b - start])


def broadcast_from_first(tensor: Tensor, group: Group, method: Distribute) -> None:
    """Copy a tensor of integers from the first rank to all ranks. All ranks of `group` must call
    this function.

    Args:
        tensor: The integers. With `all_reduce`, the tensors of all ranks except the first must
            contain only zeros.
        group: Group of the ranks.
        method: `checkpoint.distribute`.
    """
    if method == "broadcast":
        broadcast(tensor, group)
    else:
        all_reduce_sum(tensor, group)


def _as_integers(tensor: Tensor) -> Tensor:
    """Return a view of `tensor` as integers. An all-reduce of the view with zeros does not change
    bits. Elements of two bytes are viewed as uint8, because gloo cannot add integers of two
    bytes."""
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.uint8)
