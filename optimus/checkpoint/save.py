"""Saving the full state of a run: every rank writes its own part, the first seals the whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from optimus import platform
from optimus.checkpoint import manifest as manifests
from optimus.checkpoint.index import INDEX, Written, encode
from optimus.checkpoint.pieces import Scatter, Span, first_nonfinite
from optimus.checkpoint.rank_states import RankStates
from optimus.checkpoint.shards import Identity, shard_name
from optimus.checkpoint.staging import Staging, share_of
from optimus.checkpoint.threads import Stop, Task
from optimus.checkpoint.transfer import shard_size, write_shard
from optimus.checkpoint.underway import Underway
from optimus.distributed.collectives import (
    all_reduce_sum,
    broadcast_object,
    decode_object,
    encode_object,
)
from optimus.errors import NonFiniteError, OptimusError, one_line
from optimus.io.safetensors import as_bytes

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
                manifests.finish(opened.directory, final, step=step, stop=stop, **shown, **facts)
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
            self._directory = directory = manifests.begin(final, self.bytes, beside())
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
