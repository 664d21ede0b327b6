"""Saves of full checkpoints: every rank writes a shard file, then the first rank commits all files.

`Saver` is the base class of `FullSaver` and of `ModelSaver` (optimus/checkpoint/weights.py).
`ModelSaver` saves model-only checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimus import platform
from optimus.checkpoint import store
from optimus.checkpoint.async_save import AsyncSave
from optimus.checkpoint.index import INDEX, ITEMSIZE, KNOWN_STATES, ShardReport, encode
from optimus.checkpoint.shard_file import (
    HEADER_BYTES,
    Identity,
    ShardWriter,
    Stop,
    Task,
    aligned,
    shard_name,
)
from optimus.checkpoint.slices import (
    BATCH_ELEMENTS,
    Box,
    ChunkShard,
    Scatter,
    Share,
    StateSlice,
    batches_of,
    find_nonfinite,
    slices_to_write,
)
from optimus.chunks.buffers import StateShard
from optimus.chunks.disk import DiskTier, file_bytes
from optimus.distributed.collectives import (
    Group,
    all_reduce_sum,
    broadcast_object,
    decode_object,
    encode_object,
)
from optimus.distributed.groups import Groups
from optimus.errors import NonFiniteError, OptimusError, one_line
from optimus.io.safetensors import FilePlan, as_bytes, create_files
from optimus.io.workspace import Workspace

BEGIN_S = 60.0
"""Maximum time, in seconds, in which a save checks the free disk space and creates a directory."""


@dataclass(frozen=True)
class RankStates:
    """A rank's shards of the master weights and moments, and the parameters in these shards."""

    groups: Groups
    device: torch.device
    """Device of the rank. Collectives exchange tensors on this device. The shards of an offloaded
    chunk are in host memory or on disk."""
    shards: Sequence[StateShard]
    names: tuple[str, ...]
    """Names of the states of a trained parameter, such as "master", in the order in which a shard
    file contains the states."""
    boxes: Mapping[str, Box]
    """Box of each parameter of this rank, by name of the parameter. A box is the set of the
    parameter's elements that a rank has, as index ranges for each dim."""
    shapes: Mapping[str, Sequence[int]]
    """Shape of each whole (unsharded) parameter of the model, by name of the parameter."""
    stage_groups: Mapping[str, Group] = field(default_factory=dict)
    """For each parameter that several pipeline stages have, the group of ranks of these stages."""
    disk: DiskTier | None = None
    """Tier that contains the states on disk; None if no state is on disk."""

    @property
    def chunk_shards(self) -> list[ChunkShard]:
        return [
            ChunkShard(shard.chunk, shard.first, shard.groups.copy_axes, shard.groups.is_later_copy)
            for shard in self.shards
        ]

    def with_states(self, slices: Sequence[StateSlice]) -> list[tuple[str, StateSlice]]:
        """Return the (state, slice) pairs of all `slices`, ordered by state as in `names`. For a
        frozen parameter, there is a pair for the master weights but not for the moments."""
        return [
            (state, state_slice)
            for state in self.names
            for state_slice in slices
            if state in self.shards[state_slice.shard].states
        ]

    def view(self, state: str, state_slice: StateSlice) -> Tensor:
        """Return the elements of the state `state` that `state_slice` selects, as a view of this
        rank's shard. If the state is on disk, the result is a placeholder."""
        shard = self.shards[state_slice.shard]
        return shard.states[state][state_slice.start : state_slice.stop]

    def is_on_disk(self, values: Tensor) -> bool:
        """Return True if a tensor is a placeholder of a state on disk or a view of a
        placeholder."""
        return self.disk is not None and self.disk.has(values)

    def read(self, values: Tensor) -> Tensor:
        """Return `values`, or a copy in host memory if `values` is a placeholder. Raises
        OptimusError if the disk cannot be read."""
        return values if self.disk is None else self.disk.read(values)

    def write(self, into: Tensor, values: Tensor) -> None:
        """Copy `values` to a tensor in memory or on disk. Do nothing if `into` and `values` are the
        same tensor. Raises OptimusError if the disk cannot be written."""
        if self.is_on_disk(into):
            assert self.disk is not None
            self.disk.write(into, values)
        elif into is not values:
            into.copy_(values)


def states_to_write(states: RankStates, scatter: Scatter) -> list[tuple[str, StateSlice]]:
    """Return the (state, slice) pairs that this rank writes to a full checkpoint.

    A pair selects some elements of the master weights or of a moment.
    """
    groups, stage_groups = states.groups, states.stage_groups
    turns = {name: Share(group.rank, group.size) for name, group in stage_groups.items()}
    return states.with_states(
        slices_to_write(
            *(states.chunk_shards, states.boxes, groups.mesh, groups.coordinate),
            *(scatter, turns),
        )
    )


class StagingBytes(NamedTuple):
    """Numbers of bytes that a `Staging` allocates."""

    host: int
    disk: int


def staging_bytes(
    states: RankStates,
    slices: Sequence[tuple[str, StateSlice]],
    dtype: torch.dtype = torch.float32,
) -> StagingBytes:
    """Return the numbers of bytes that a `Staging` allocates for copies of the given (state, slice)
    pairs. The copies have the dtype `dtype`."""
    host = disk = 0
    for state, state_slice in slices:
        length = state_slice.stop - state_slice.start
        if states.is_on_disk(states.view(state, state_slice)):
            disk += file_bytes(length, [dtype])
        else:
            host += aligned(length * dtype.itemsize)
    return StagingBytes(host, disk)


class Staging:
    """Host memory to which a save copies the states that a rank writes, so that training can
    continue while the copies are written. The copy of a state on disk is also on disk. All saves
    use the same memory."""

    def __init__(
        self,
        states: RankStates,
        slices: Sequence[tuple[str, StateSlice]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate the memory for the copies.

        Args:
            states: The states of this rank. The memory is page-locked unless the device of the
                states is the CPU.
            slices: The (state, slice) pairs to copy in each save.
            dtype: Dtype of the copies.
        """
        size = staging_bytes(states, slices, dtype).host // dtype.itemsize
        flat = platform.host_zeros(size, dtype, states.device)
        flat.zero_()  # makes the system allocate the pages before the first copy
        self._copies: dict[tuple[str, StateSlice], Tensor] = {}
        offset = 0
        for state, state_slice in slices:
            length = state_slice.stop - state_slice.start
            if states.is_on_disk(states.view(state, state_slice)):
                assert states.disk is not None
                self._copies[state, state_slice] = states.disk.new(length, dtype)
                continue
            self._copies[state, state_slice] = flat[offset : offset + length]
            offset += aligned(length * dtype.itemsize) // dtype.itemsize

    def fill(self, states: RankStates) -> None:
        """Copy the slices from `states` to this memory, and wait until the copies are complete."""
        for (state, state_slice), copy in self._copies.items():
            # A conversion allocates memory on the device, so convert a few elements at a time.
            source = states.view(state, state_slice)
            batches = zip(copy.split(BATCH_ELEMENTS), source.split(BATCH_ELEMENTS), strict=True)
            for target, values in batches:
                if states.is_on_disk(target):
                    states.write(target, states.read(values))
                else:
                    target.copy_(values, non_blocking=True)
        platform.synchronize(states.device)

    def copy_of(self, state: str, state_slice: StateSlice) -> Tensor:
        """Return the elements of a (state, slice) pair that `fill` has copied."""
        return self._copies[state, state_slice]


def shard_size(slices: Sequence[tuple[str, StateSlice]]) -> int:
    """Return the size, in bytes, of a shard file with the given (state, slice) pairs."""
    return HEADER_BYTES + sum(aligned((s.stop - s.start) * ITEMSIZE) for _, s in slices)


def write_shard(
    directory: Path,
    identity: Identity,
    names: Sequence[str],
    slices: Sequence[tuple[str, StateSlice]],
    batches: Callable[[str, StateSlice], Iterable[memoryview]],
    stop: Stop | None = None,
    direct: bool = True,
) -> ShardReport:
    """Write a shard file and make it durable.

    Args:
        directory: Directory of the checkpoint.
        identity: The save, the step and the rank that writes the file.
        names: Names of all states of the checkpoint, in the order of its index.
        slices: The (state, slice) pairs to write.
        batches: Function of (state, slice) that returns the bytes of this pair in batches. The size
            of each batch, except the last batch of a pair, is a multiple of 64 bytes.
        stop: As for ShardWriter.
        direct: As for ShardWriter.

    Returns:
        The description of the shard file for the index of the checkpoint.

    Raises:
        OSError: The file cannot be written.
        OptimusError: `stop` was set.
    """
    offsets: dict[StateSlice, dict[str, int]] = {}
    with ShardWriter(directory, identity, shard_size(slices), stop, direct) as file:
        for state, state_slice in slices:
            written = [file.write(batch) for batch in batches(state, state_slice)]
            offsets.setdefault(state_slice, {})[state] = written[0]
        shard = file.finish()
    boxes: dict[tuple[str, Box], int] = {}
    rows: list[tuple[int, ...]] = []
    for state_slice, of_state in offsets.items():
        for (name, box, start, end), at in state_slice.params:
            columns = (of_state[s] + at * ITEMSIZE if s in of_state else -1 for s in names)
            rows.append((boxes.setdefault((name, box), len(boxes)), start, end, *columns))
    return ShardReport(shard, list(boxes), rows)


class Generation(NamedTuple):
    """Random name of a save in progress, and the temporary directory to which the save writes."""

    name: str
    directory: Path


class Saver(ABC):
    """Base class of savers. A saver saves checkpoints of one kind (full or model-only), one at a
    time.

    The states that are passed to different saves must have the same sizes.
    """

    bytes: int
    """Total size, in bytes, of the files that all ranks write in a save."""
    _report: Any
    """Type of the report that `_write` returns."""
    _plan: FilePlan | None = None
    """Files that the first rank creates before any rank writes; None if each rank creates a
    separate file."""

    def __init__(
        self,
        states: RankStates,
        slices: Sequence[tuple[str, StateSlice]],
        dtype: torch.dtype,
        output: str,
        *,
        staged: bool = False,
        limit_s: float = 1800.0,
        begin_s: float = BEGIN_S,
    ) -> None:
        """Store the slices that this rank writes in each save. With `staged`, allocate memory for
        copies of the slices.

        Args:
            states: The states of this rank.
            slices: The (state, slice) pairs that this rank writes.
            dtype: Dtype of the copies in host memory.
            output: Name, for error messages, of the file or the data that this rank writes.
            staged: True to copy the states to host memory before they are written. The constructor
                allocates this memory.
            limit_s: As for AsyncSave.
            begin_s: Maximum time in seconds for which the ranks wait in `begin` until the first
                rank has created the directory.
        """
        self._slices, self._limit_s, self._begin_s = slices, limit_s, min(limit_s, begin_s)
        self._staging = Staging(states, slices, dtype) if staged else None
        self._output = output
        self._directory: Path | None = None

    def begin(
        self,
        states: RankStates,
        final: Path,
        write_sidecars: Callable[[Path], None],
        after_commit: Callable[[], None] = lambda: None,
        clean: Callable[[Path], None] = lambda path: shutil.rmtree(path, ignore_errors=True),
        *,
        workspace: Workspace | None = None,
        reserve: Callable[[], int] = lambda: 0,
        step: int,
        **facts: Any,
    ) -> AsyncSave:
        """Start a save. All ranks must call this method. The previous save of this Saver must have
        ended.

        The first rank creates a directory, to which every rank writes its slices. Then the first
        rank writes the other files, checks all files and commits. With `staged` (see the
        constructor), training can change the states as soon as `begin` has returned. Without
        `staged`, training must not change the states until the save has ended.

        Args:
            states: The states of this rank.
            final: Directory of the committed checkpoint.
            write_sidecars: Function that receives a directory and writes further files, such as the
                tokenizer, to it. Called on the first rank.
            after_commit: Function that is called on the first rank after the commit.
            clean: Function that removes the directory of a failed save. Called on the first rank.
            workspace: The workspace of the run, on the first rank; None outside a run.
            reserve: Function that returns the maximum number of bytes that another unfinished save
                still has to write. The disk must have space for the two saves.
            step: Number of updates that the run has completed.
            facts: Other fields of the manifest.

        Raises:
            OptimusError: The save cannot start. All ranks raise this error.
        """
        everyone, device = states.groups.everyone, states.device
        states, created = self._stage(states, final, workspace, reserve)

        def write(stop: Stop) -> bytes:
            try:
                return encode_object(
                    self._write(states, created, step, stop) if self._slices else None
                )
            except OSError as error:
                path = f"{final.name}/{self._output}"
                raise OptimusError(f"{path} not written: {error.strerror}") from None

        def commit(stop: Stop, reports: list[bytes]) -> None:
            try:
                decoded = [decode_object(data, self._report | None) for data in reports]
                described = self._describe(states, created, step, stop, decoded)
                write_sidecars(created.directory)
                store.commit(created.directory, final, step=step, stop=stop, **described, **facts)
            except OSError as error:
                path = error.filename or created.directory
                raise OptimusError(f"{final.name} not written: {path}: {error.strerror}") from None

        return AsyncSave(
            final.name,
            step,
            everyone,
            device,
            self._limit_s,
            write=write,
            commit=commit,
            after_commit=after_commit,
            clean=lambda: clean(created.directory),
        )

    def _stage(
        self,
        states: RankStates,
        final: Path,
        workspace: Workspace | None,
        reserve: Callable[[], int],
    ) -> tuple[RankStates, Generation]:
        """Create the temporary directory of a save on the first rank. With `staged`, copy the
        states.

        Returns (states, Generation of the save). The states have no `shards` if they were copied.
        If the directory cannot be created, all ranks raise OptimusError.
        """
        everyone, device = states.groups.everyone, states.device
        creating = None
        if everyone.rank == 0:
            creating = Task(lambda: self._create(final, workspace, reserve))
        if self._staging is not None:
            self._staging.fill(states)
            states = replace(states, shards=())  # release fp32 copies of frozen parameters
        else:
            platform.synchronize(device)  # the thread that writes uses another stream
        created: Any = None
        if creating is not None:
            creating.wait(self._begin_s)  # all ranks wait until the directory is created
            created = (
                creating.value()
                if creating.has_ended
                else f"{final.name} not created within {self._begin_s:g} s: {final.parent} is slow "
                "or hangs"
            )
        created = broadcast_object(created, everyone, Generation | str)
        if isinstance(created, str):
            raise OptimusError(created)
        return states, created

    def unwritten(self) -> int:
        """Return the maximum number of bytes that the latest save still has to write.

        The result is the size of the checkpoint minus the size of the disk blocks that the files in
        its temporary directory occupy. If this directory no longer exists, the result is the whole
        size. Called on the first rank.
        """
        allocated = 0
        if self._directory is not None:
            with contextlib.suppress(FileNotFoundError), os.scandir(self._directory) as entries:
                allocated = sum(512 * entry.stat().st_blocks for entry in entries)
        return max(0, self.bytes - allocated)

    def _create(
        self, final: Path, workspace: Workspace | None, reserve: Callable[[], int]
    ) -> Generation | str:
        """Create the temporary directory of a save. Return the Generation of the save, or a message
        with the reason why the directory cannot be created."""
        try:
            self._directory = directory = store.create(final, self.bytes, reserve(), workspace)
            try:
                if self._plan is not None:
                    create_files(directory, self._plan)
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
            return Generation(uuid.uuid4().hex, directory)
        except OSError as error:
            return f"{final.name} not written: {final.parent}: {error.strerror}"
        except OptimusError as error:
            return str(error)
        except Exception as error:  # must not raise: the other ranks wait for an answer
            return f"{final.name} not written: {type(error).__name__}: {one_line(error)}"

    @abstractmethod
    def _write(self, states: RankStates, generation: Generation, step: int, stop: Stop) -> Any:
        """Write the slices of this rank. Return a report, which is sent to the first rank. Raises
        OSError and OptimusError."""

    @abstractmethod
    def _describe(
        self, states: RankStates, generation: Generation, step: int, stop: Stop, reports: list[Any]
    ) -> dict[str, Any]:
        """Write the files that describe the written slices. Return keyword arguments for
        `store.commit`. Raises OSError and OptimusError.

        Called on the first rank. `reports` are the results of `_write` in the order of ranks. The
        report of a rank without slices is None.
        """


class FullSaver(Saver):
    """Saver of full checkpoints. Each rank with slices writes one shard file."""

    _report = ShardReport

    def __init__(
        self, states: RankStates, scatter: Scatter, *, direct: bool = True, **limits: Any
    ) -> None:
        """Determine the slices of this rank and the size of the checkpoint. All ranks must call
        this constructor.

        Args:
            states: The states of this rank.
            scatter: `checkpoint.scatter`.
            direct: As for ShardWriter.
            limits: `staged`, `limit_s` and `begin_s` of Saver. Staged copies are checked for
                non-finite values.
        """
        assert states.names in KNOWN_STATES, f"{states.names} could not be read again"
        slices = states_to_write(states, scatter)
        file = shard_name(states.groups.everyone.rank)
        super().__init__(states, slices, torch.float32, file, **limits)
        self._direct = direct
        sizes = torch.tensor([shard_size(slices) if slices else 0], device=states.device)
        all_reduce_sum(sizes, states.groups.everyone)
        self.bytes = int(sizes)

    def _write(
        self, states: RankStates, generation: Generation, step: int, stop: Stop
    ) -> ShardReport:
        rank = states.groups.everyone.rank

        def batches(state: str, state_slice: StateSlice) -> Iterator[memoryview]:
            for batch in batches_of(state_slice):
                if self._staging is None:
                    values = states.read(states.view(state, batch)).to("cpu", torch.float32)
                else:
                    start = batch.start - state_slice.start
                    copy = self._staging.copy_of(state, state_slice)
                    values = states.read(copy[start : start + batch.stop - batch.start])
                    check(state, batch, values)
                yield as_bytes(values)

        def check(state: str, batch: StateSlice, values: Tensor) -> None:
            if nonfinite := find_nonfinite(values.numpy(), batch):
                raise NonFiniteError(
                    f"non-finite values on rank {rank} ({socket.gethostname()}): {state} of "
                    f"{nonfinite}, in the copy of the states of step {step} in host memory; no "
                    "checkpoint contains non-finite values; check the host's memory, and run the "
                    "same command again; the run then resumes from the newest checkpoint, or from "
                    "the start if there is no checkpoint"
                )

        identity = Identity(generation.name, step, rank)
        return write_shard(
            *(generation.directory, identity, states.names, self._slices),
            *(batches, stop, self._direct),
        )

    def _describe(
        self, states: RankStates, generation: Generation, step: int, stop: Stop, reports: list[Any]
    ) -> dict[str, Any]:
        written = [report for report in reports if report is not None]
        index = encode(generation.name, step, states.names, written, states.shapes)
        (generation.directory / INDEX).write_bytes(index)
        return {"kind": "full", "shards": {report.shard.name for report in written}}
