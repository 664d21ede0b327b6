"""Saving the full state of a run: every rank writes its own part, the first seals the whole."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from optimus import platform
from optimus.checkpoint import manifest as manifests
from optimus.checkpoint.index import INDEX, Written, encode
from optimus.checkpoint.pieces import Scatter, Span
from optimus.checkpoint.rank_states import RankStates
from optimus.checkpoint.shards import Identity, shard_name
from optimus.checkpoint.staging import Staging, share_of
from optimus.checkpoint.threads import Stop, Task
from optimus.checkpoint.transfer import shard_size, write_shard
from optimus.checkpoint.underway import Underway
from optimus.dist.collectives import all_reduce_sum, broadcast_object
from optimus.errors import NonFiniteError, OptimusError
from optimus.model.tensor_files import as_bytes

TIMEOUT_S = 1800.0
BEGIN_S = 60.0
"""What looking for room and making a directory may take at most."""
_TOLD = {"master": "parameter", "exp_avg": "first moment of", "exp_avg_sq": "second moment of"}


def save_full(
    states: RankStates,
    final: Path,
    scatter: Scatter,
    write_companions: Callable[[Path], None],
    *,
    step: int,
    **facts: Any,
) -> None:
    """Write and seal the checkpoint `final`, and wait for it. A collective of all ranks.

    Raises OptimusError on every rank, with nothing left behind, if any rank cannot write.
    """
    outcome = FullSaver(states, scatter).begin(states, final, write_companions, step=step, **facts)
    if failure := outcome.drain().failure:
        raise OptimusError(failure.what, on_every_rank=True)


class FullSaver:
    """Writes full checkpoints of states that stay where they are; one at a time."""

    def __init__(
        self,
        states: RankStates,
        scatter: Scatter,
        *,
        staged: bool = False,
        limit_s: float = TIMEOUT_S,
        begin_s: float = BEGIN_S,
        direct: bool = True,
    ) -> None:
        """What each rank writes is planned here, once. `staged`: it is copied to host memory first,
        taken here too, and checked there for what is not finite. `limit_s`: as for Underway;
        `begin_s`: how long ranks wait for one another at most; `direct`: as for ShardWriter. A
        collective of all ranks."""
        self._parts, self._limit_s, self._direct = share_of(states, scatter), limit_s, direct
        self._begin_s = min(limit_s, begin_s)
        self._staging = Staging(self._parts, states.device) if staged else None
        needed = shard_size(self._parts) if self._parts else 0
        sizes = torch.tensor([needed], device=states.device)
        all_reduce_sum(sizes, states.groups.everyone)
        self.bytes = int(sizes)
        """Of all shard files together."""

    def begin(
        self,
        states: RankStates,
        final: Path,
        write_companions: Callable[[Path], None],
        after_seal: Callable[[], None] = lambda: None,
        *,
        step: int,
        **facts: Any,
    ) -> Underway:
        """Begin to write `final`. A collective of all ranks; no save of this one is under way.

        The first rank makes a fresh directory, every rank writes its shard file there and makes it
        durable, the first rank adds the index and `write_companions`, checks all files and seals
        them; then it calls `after_seal`. Staged, the states may change at once; otherwise once the
        save is over. Raises OptimusError on every rank if it cannot begin.
        """
        everyone = states.groups.everyone
        opening = Task(lambda: _begin(final, self.bytes)) if everyone.rank == 0 else None
        if self._staging is not None:
            self._staging.fill(states)  # meanwhile
        else:
            platform.synchronize(states.device)  # threads have streams of their own
        opened = self._opened(opening, final) if opening is not None else None
        opened = broadcast_object(opened, everyone)
        if isinstance(opened, str):
            raise OptimusError(opened, on_every_rank=True)
        identity = Identity(opened.name, step, everyone.rank)

        def write(stop: Stop) -> Written | None:
            return self._write(states, final, opened.directory, identity, stop)

        def seal(stop: Stop, reports: list[Written | None]) -> None:
            about = {"step": step, "stop": stop, **facts}
            _seal(reports, opened, final, states.shapes, write_companions, about)

        return Underway(
            final.name,
            step,
            everyone,
            states.device,
            self._limit_s,
            write=write,
            seal=seal,
            after_seal=after_seal,
            clean=lambda: shutil.rmtree(opened.directory, ignore_errors=True),
        )

    def _opened(self, opening: Task, final: Path) -> _Generation | str:
        """A new generation, or why there is none; soon, since all ranks wait for it."""
        opening.wait(self._begin_s)
        if opening.has_ended:
            return opening.value()
        return f"{final.name} not begun within {self._begin_s:g} s: {final.parent} is slow or hangs"

    def _write(
        self,
        states: RankStates,
        final: Path,
        directory: Path,
        identity: Identity,
        stop: Stop,
    ) -> Written | None:
        """This rank's shard file; None if nothing falls to it. Raises OptimusError."""
        if not self._parts:
            return None

        def bytes_of(state: str, span: Span) -> memoryview:
            if self._staging is None:
                return as_bytes(states.memory(state, span).to("cpu", torch.float32))
            content = self._staging.bytes_of(state, span)
            _refuse_nonfinite(content, state, span, identity.step)
            return content

        try:
            return write_shard(directory, identity, self._parts, bytes_of, stop, self._direct)
        except OSError as error:
            shard = f"{final.name}/{shard_name(identity.writer)}"
            raise OptimusError(f"{shard} not written: {error.strerror}") from None


class _Generation(NamedTuple):
    """One save, and the directory that it fills."""

    name: str
    directory: Path


def _begin(final: Path, needed: int) -> _Generation | str:
    """A new generation, or why there is none."""
    try:
        return _Generation(uuid.uuid4().hex, manifests.begin(final, needed))
    except OSError as error:
        return f"{final.name} not written: {final.parent}: {error.strerror}"
    except OptimusError as error:
        return str(error)


def nonfinite_update(step: int, state: str, name: str) -> NonFiniteError:
    """What is raised when a state of a parameter is not finite after an update. It can overflow
    though every gradient was finite."""
    return NonFiniteError(
        f"step {step}: the update made {_TOLD[state]} {name} non-finite although gradients were "
        "finite; no checkpoint was written; lower the learning rate",
        on_every_rank=True,
    )


def _refuse_nonfinite(content: memoryview, state: str, span: Span, step: int) -> None:
    """Raise NonFiniteError for the first parameter with such a value."""
    flat = numpy.frombuffer(content, dtype=numpy.float32)
    with numpy.errstate(all="ignore"):
        if numpy.isfinite(flat.sum()):
            return
    for piece, at in span.pieces:
        if not numpy.isfinite(flat[at : at + piece.stop - piece.start]).all():
            raise nonfinite_update(step, state, piece.name)


def _seal(
    reports: Iterable[Written | None],
    generation: _Generation,
    final: Path,
    shapes: Mapping[str, Any],
    write_companions: Callable[[Path], None],
    facts: Mapping[str, Any],
) -> None:
    """The first rank's part once every writer has reported. Raises OptimusError."""
    name, directory = generation
    written = [one for one in reports if one is not None]
    try:
        (directory / INDEX).write_bytes(encode(name, facts["step"], written, shapes))
        write_companions(directory)
        names = {one.shard.name for one in written}
        manifests.finish(directory, final, kind="full", shards=names, **facts)
    except OSError as error:
        where = error.filename or directory
        raise OptimusError(f"{final.name} not written: {where}: {error.strerror}") from None
