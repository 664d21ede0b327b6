"""What one rank holds of the states of a run, as checkpoints see it.

Host memory into which a rank copies its share of a checkpoint, so that training goes on.

Between the memory of a rank and shard files: spans written as they lie, spans read by a plan.

Memory is given as bytes, whoever owns it. Needs no torch.

Saving the full state of a run: every rank writes its own part, the first seals the whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from optimus import platform
from optimus.checkpoint import store
from optimus.checkpoint.async_save import Underway
from optimus.checkpoint.format import INDEX, ITEMSIZE, Written, encode
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
    PIECE,
    Box,
    Held,
    Scatter,
    Span,
    first_nonfinite,
    spans_to_write,
)
from optimus.chunks.buffers import StateShard
from optimus.chunks.layout import STATES
from optimus.distributed.collectives import (
    all_reduce_sum,
    broadcast_object,
    decode_object,
    encode_object,
)
from optimus.distributed.groups import Groups
from optimus.errors import NonFiniteError, OptimusError, one_line
from optimus.io.safetensors import as_bytes


@dataclass(frozen=True)
class RankStates:
    """What one rank holds of the states, and what that is of the model."""

    groups: Groups
    shards: Sequence[StateShard]
    boxes: Mapping[str, Box]
    """Of the parameters here."""
    shapes: Mapping[str, Sequence[int]]
    """Of all whole parameters."""
    on_both_ends: tuple[str, ...] = ()
    """What the first and the last of several pipeline stages hold both: tied embeddings."""

    @property
    def held(self) -> list[Held]:
        return [
            Held(one.chunk, one.first, one.groups.copy_axes, one.groups.is_tied_copy)
            for one in self.shards
        ]

    @property
    def device(self) -> torch.device:
        return self.shards[0].states["master"].device

    def parts(self, spans: Sequence[Span]) -> list[tuple[str, Span]]:
        """The states that there are of these spans, state by state."""
        return [(s, span) for s in STATES for span in spans if s in self.shards[span.held].states]

    def memory(self, state: str, span: Span) -> Tensor:
        """A state of a span, as it lies."""
        return self.shards[span.held].states[state][span.start : span.stop]


def share_of(states: RankStates, scatter: Scatter) -> list[tuple[str, Span]]:
    """Which states of which spans this rank writes."""
    groups = states.groups
    spans = spans_to_write(
        states.held, states.boxes, groups.mesh, groups.coordinate, scatter, states.on_both_ends
    )
    return states.parts(spans)


def staging_bytes(parts: Sequence[tuple[str, Span]], dtype: torch.dtype = torch.float32) -> int:
    """What a `Staging` of these states of spans takes."""
    return sum(aligned((span.stop - span.start) * dtype.itemsize) for _, span in parts)


class Staging:
    """Memory for these states of spans as a checkpoint keeps them; made once, used again."""

    def __init__(
        self,
        parts: Sequence[tuple[str, Span]],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`device`: where the states lie. For another than the CPU the memory is pinned."""
        size = staging_bytes(parts, dtype) // dtype.itemsize
        self._flat = torch.empty(size, dtype=dtype, pin_memory=device.type != "cpu")
        self._flat.zero_()  # its pages are there before the first copy
        self._places: dict[tuple[str, Span], torch.Tensor] = {}
        at = 0
        for state, span in parts:
            length = span.stop - span.start
            self._places[state, span] = self._flat[at : at + length]
            at += aligned(length * dtype.itemsize) // dtype.itemsize

    def fill(self, states: RankStates) -> None:
        """Take the states as they are now."""
        for (state, span), place in self._places.items():
            # A device takes memory for what it brings to another type: for little at once.
            parts = zip(place.split(PIECE), states.memory(state, span).split(PIECE), strict=True)
            for part, source in parts:
                part.copy_(source, non_blocking=True)
        platform.synchronize(states.device)

    def taken(self, state: str, span: Span) -> torch.Tensor:
        """What `fill` took of a state of a span."""
        return self._places[state, span]


def shard_size(parts: Sequence[tuple[str, Span]]) -> int:
    """Bytes of the file that holds these states of spans."""
    sizes = [aligned((span.stop - span.start) * ITEMSIZE) for _, span in parts]
    return HEADER_BYTES + sum(sizes)


def write_shard(
    directory: Path,
    identity: Identity,
    parts: Sequence[tuple[str, Span]],
    bytes_of: Callable[[str, Span], memoryview],
    stop: Stop | None = None,
    direct: bool = True,
) -> Written:
    """Write the file of one writer, these states of spans, and make it durable; `stop` and `direct`
    as for ShardWriter. Raises OSError, and OptimusError soon after `stop` is set."""
    begins: dict[Span, dict[str, int]] = {}
    with ShardWriter(directory, identity, shard_size(parts), stop, direct) as file:
        for state, span in parts:
            begins.setdefault(span, {})[state] = file.write(bytes_of(state, span))
        shard = file.finish()
    boxes: dict[tuple[str, Box], int] = {}
    rows: list[tuple[int, ...]] = []
    for span, of_state in begins.items():
        for (name, box, start, end), at in span.pieces:
            offsets = (of_state[s] + at * ITEMSIZE if s in of_state else -1 for s in STATES)
            rows.append((boxes.setdefault((name, box), len(boxes)), start, end, *offsets))
    return Written(shard, list(boxes), rows)


BEGIN_S = 60.0
"""What looking for room and making a directory may take at most."""


class Generation(NamedTuple):
    """One save, and the directory that it fills."""

    name: str
    directory: Path


class Saver(ABC):
    """Writes checkpoints of one kind, of states that stay where they are; one at a time."""

    bytes: int
    """Of all files of states together."""
    _report: Any
    """The type that `_write` returns."""

    def __init__(
        self,
        states: RankStates,
        parts: Sequence[tuple[str, Span]],
        dtype: torch.dtype,
        *,
        staged: bool = False,
        limit_s: float = 1800.0,
        begin_s: float = BEGIN_S,
    ) -> None:
        """This rank writes `parts`. `staged`: they are copied to host memory first, in `dtype`; it
        is taken here. `limit_s`: as for Underway; `begin_s`: how long ranks wait for one another at
        most."""
        self._parts, self._limit_s, self._begin_s = parts, limit_s, min(limit_s, begin_s)
        self._staging = Staging(parts, states.device, dtype) if staged else None
        self._directory: Path | None = None

    def begin(
        self,
        states: RankStates,
        final: Path,
        write_companions: Callable[[Path], None],
        after_seal: Callable[[], None] = lambda: None,
        clean: Callable[[Path], None] = lambda path: shutil.rmtree(path, ignore_errors=True),
        *,
        beside: Callable[[], int] = lambda: 0,
        step: int,
        **facts: Any,
    ) -> Underway:
        """Begin to write `final`. A collective of all ranks; no save of this one is under way.

        The first rank makes a fresh directory where there is room for this one and `beside()` bytes
        more, every rank writes its part there and makes it durable, the first rank adds what
        describes it and `write_companions`, checks all files and seals them; then it calls
        `after_seal`. After a failure it calls `clean` with the directory. Staged, the states may
        change at once; otherwise once the save is over. Raises OptimusError on every rank if it
        cannot begin.
        """
        everyone, device = states.groups.everyone, states.device
        opening = Task(lambda: self._make(final, beside)) if everyone.rank == 0 else None
        if self._staging is not None:
            self._staging.fill(states)  # meanwhile
            states = replace(states, shards=())  # fp32 copies of frozen ones need not stay
        else:
            platform.synchronize(device)  # threads have streams of their own
        opened = self._opened(opening, final) if opening is not None else None
        opened = broadcast_object(opened, everyone, Generation | str)
        if isinstance(opened, str):
            raise OptimusError(opened)

        def write(stop: Stop) -> bytes:
            try:
                return encode_object(
                    self._write(states, opened, step, stop) if self._parts else None
                )
            except OSError as error:
                what = f"{final.name}/{self._name_of(everyone.rank)}"
                raise OptimusError(f"{what} not written: {error.strerror}") from None

        def seal(stop: Stop, reports: list[bytes]) -> None:
            try:
                found = [decode_object(data, self._report | None) for data in reports]
                shown = self._describe(states, opened, step, stop, found)
                write_companions(opened.directory)
                store.finish(opened.directory, final, step=step, stop=stop, **shown, **facts)
            except OSError as error:
                where = error.filename or opened.directory
                raise OptimusError(f"{final.name} not written: {where}: {error.strerror}") from None

        return Underway(
            final.name,
            step,
            everyone,
            device,
            self._limit_s,
            write=write,
            seal=seal,
            after_seal=after_seal,
            clean=lambda: clean(opened.directory),
        )

    def unwritten(self) -> int:
        """Bytes of the latest save for which the disk has given no room yet: of one that is
        under way no longer, all. On the first rank."""
        given = 0
        if self._directory is not None:
            with contextlib.suppress(FileNotFoundError), os.scandir(self._directory) as there:
                given = sum(512 * one.stat().st_blocks for one in there)
        return max(0, self.bytes - given)

    def _opened(self, opening: Task, final: Path) -> Generation | str:
        """A new generation, or why there is none; soon, since all ranks wait for it."""
        opening.wait(self._begin_s)
        if opening.has_ended:
            return opening.value()
        return (
            f"{final.name} not opened within {self._begin_s:g} s: {final.parent} is slow or hangs"
        )

    def _make(self, final: Path, beside: Callable[[], int]) -> Generation | str:
        """A new generation, or why there is none."""
        try:
            self._directory = directory = store.begin(final, self.bytes, beside())
            try:
                self._prepare(directory)
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
            return Generation(uuid.uuid4().hex, directory)
        except OSError as error:
            return f"{final.name} not written: {final.parent}: {error.strerror}"
        except OptimusError as error:
            return str(error)
        except Exception as error:  # the other ranks wait for an answer
            return f"{final.name} not written: {type(error).__name__}: {one_line(error)}"

    def _prepare(self, directory: Path) -> None:  # noqa: B027 - most have nothing to do
        """What the first rank does there before any writes. Raises OSError."""

    @abstractmethod
    def _name_of(self, rank: int) -> str:
        """The file that a rank writes, for messages."""

    @abstractmethod
    def _write(self, states: RankStates, generation: Generation, step: int, stop: Stop) -> Any:
        """This rank's part; what the first rank is told of it. Raises OSError and OptimusError."""

    @abstractmethod
    def _describe(
        self, states: RankStates, generation: Generation, step: int, stop: Stop, reports: list[Any]
    ) -> dict[str, Any]:
        """The first rank's part once every rank has reported (None where it had no part): what to
        tell `manifest.finish`. Raises as `_write`."""


class FullSaver(Saver):
    """Writes full checkpoints: a file of its own of every rank that has a part."""

    _report = Written

    def __init__(
        self, states: RankStates, scatter: Scatter, *, direct: bool = True, **how: Any
    ) -> None:
        """What each rank writes is planned here, once; staged, it is looked through for what is not
        finite. `direct`: as for ShardWriter; `how`: as for Saver. A collective of all ranks."""
        parts = share_of(states, scatter)
        super().__init__(states, parts, torch.float32, **how)
        self._direct = direct
        sizes = torch.tensor([shard_size(parts) if parts else 0], device=states.device)
        all_reduce_sum(sizes, states.groups.everyone)
        self.bytes = int(sizes)

    def _name_of(self, rank: int) -> str:
        return shard_name(rank)

    def _write(self, states: RankStates, generation: Generation, step: int, stop: Stop) -> Written:
        def bytes_of(state: str, span: Span) -> memoryview:
            if self._staging is None:
                return as_bytes(states.memory(state, span).to("cpu", torch.float32))
            content = as_bytes(self._staging.taken(state, span))
            _refuse_nonfinite(content, state, span, step, states.groups.everyone.rank)
            return content

        identity = Identity(generation.name, step, states.groups.everyone.rank)
        directory = generation.directory
        return write_shard(directory, identity, self._parts, bytes_of, stop, self._direct)

    def _describe(
        self, states: RankStates, generation: Generation, step: int, stop: Stop, reports: list[Any]
    ) -> dict[str, Any]:
        written = [one for one in reports if one is not None]
        index = encode(generation.name, step, written, states.shapes)
        (generation.directory / INDEX).write_bytes(index)
        return {"kind": "full", "shards": {one.shard.name for one in written}}


def _refuse_nonfinite(content: memoryview, state: str, span: Span, step: int, rank: int) -> None:
    """Raise NonFiniteError for the first parameter with a non-finite value in the staged copy."""
    if found := first_nonfinite(numpy.frombuffer(content, dtype=numpy.float32), span):
        raise NonFiniteError(
            f"non-finite values on rank {rank} ({socket.gethostname()}) in the copy of step {step} "
            f"for its checkpoint: {state} of {found}; no checkpoint has them; the copy is damaged: "
            "give the same command again to resume from the last one, and suspect the host's "
            "memory"
        )
