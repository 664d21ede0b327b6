"""Saving the full state of a run: every rank writes its own part, the first seals the whole."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from optimus.checkpoint import manifest as manifests
from optimus.checkpoint.index import INDEX, Written, encode
from optimus.checkpoint.pieces import Scatter, Span, spans_to_write
from optimus.checkpoint.rank_states import RankStates, as_bytes
from optimus.checkpoint.shards import Identity, shard_name
from optimus.checkpoint.transfer import shard_size, write_shard
from optimus.dist.collectives import all_reduce_sum, broadcast_object, gather_objects
from optimus.errors import OptimusError


def save_full(
    states: RankStates,
    final: Path,
    scatter: Scatter,
    write_companions: Callable[[Path], None],
    *,
    step: int,
    **facts: Any,
) -> None:
    """Write and seal the checkpoint `final`. A collective of all ranks.

    The first rank makes a fresh directory, every rank writes its shard file there and makes it
    durable, the first rank adds the index and `write_companions`, checks all files and seals them.
    Raises OptimusError on every rank, with nothing left behind, if any rank cannot write.
    """
    groups, everyone = states.groups, states.groups.everyone
    spans = spans_to_write(
        states.held, states.boxes, groups.mesh, groups.place, scatter, states.on_both_ends
    )
    parts = states.parts(spans)
    needed = torch.tensor([shard_size(parts) if parts else 0], device=states.device)
    all_reduce_sum(needed, everyone)
    opened = _begin(final, int(needed)) if everyone.rank == 0 else None
    opened = broadcast_object(opened, everyone)
    if isinstance(opened, str):
        raise OptimusError(opened, on_every_rank=True)
    identity = Identity(opened.name, step, everyone.rank)
    reports = gather_objects(_write(states, opened.directory, identity, parts), everyone)
    failed = ""
    if everyone.rank == 0:
        about = {"step": step, **facts}
        failed = _seal(reports, opened, final, states.shapes, write_companions, about)
    if failed := broadcast_object(failed, everyone):
        raise OptimusError(failed, on_every_rank=True)


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


def _write(
    states: RankStates, directory: Path, identity: Identity, parts: Sequence[tuple[str, Span]]
) -> Written | str | None:
    """This rank's shard file; or why it could not be written; None if nothing falls to it."""
    if not parts:
        return None

    def bytes_of(state: str, span: Span) -> memoryview:
        return as_bytes(states.memory(state, span).to("cpu", torch.float32))

    try:
        return write_shard(directory, identity, parts, bytes_of)
    except OSError as error:
        return f"{shard_name(identity.writer)} not written: {error.strerror}"


def _seal(
    reports: Iterable[Written | str | None],
    generation: _Generation,
    final: Path,
    shapes: Mapping[str, Sequence[int]],
    write_companions: Callable[[Path], None],
    facts: Mapping[str, Any],
) -> str:
    """The first rank's part once every writer has reported; why it failed, or nothing."""
    name, directory = generation
    written = [one for one in reports if one is not None]
    failed = next((f"{final.name}/{one}" for one in written if isinstance(one, str)), "")
    try:
        if not failed:
            (directory / INDEX).write_bytes(encode(name, facts["step"], written, shapes))
            write_companions(directory)
            names = {one.shard.name for one in written}
            manifests.finish(directory, final, kind="full", shards=names, **facts)
    except OSError as error:
        failed = f"{final.name} not written: {error.filename or directory}: {error.strerror}"
    except OptimusError as error:
        failed = str(error)
    if failed:
        shutil.rmtree(directory, ignore_errors=True)
    return failed
