"""Saving and loading the full state of a run: every rank writes and reads its own part."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimus.checkpoint import manifest as manifests
from optimus.checkpoint.distribute import Distribute, pass_to_copies, pass_to_far_end
from optimus.checkpoint.index import INDEX, ITEMSIZE, STATES, Index, Written, encode
from optimus.checkpoint.manifest import Manifest
from optimus.checkpoint.pieces import (
    Box,
    Held,
    Piece,
    Scatter,
    Span,
    spans_to_read,
    spans_to_write,
)
from optimus.checkpoint.shards import Identity, shard_name
from optimus.checkpoint.transfer import Want, read_wants, shard_size, write_shard
from optimus.chunks.states import StateShard
from optimus.dist.collectives import (
    all_gather_objects,
    all_reduce_max,
    all_reduce_sum,
    broadcast_object,
    gather_objects,
)
from optimus.dist.groups import Groups
from optimus.errors import CheckpointError, OptimusError

HOST_BYTES = 1 << 30
"""What loading may take of the host's memory for states on another device."""


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
            Held(one.chunk, one.first, one.home.copies, one.home.far_copy) for one in self.shards
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
        return _bytes(states.memory(state, span).to("cpu", torch.float32))

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
    problem, data = broadcast_object((problem, data), everyone)
    if problem:
        return problem
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
    flag = torch.tensor([int(bool(problem))], device=states.device)
    all_reduce_max(flag, everyone)
    if not flag.item():
        return ""
    return next(one for one in all_gather_objects(problem, everyone) if one)


def _read(states: RankStates, manifest: Manifest, data: bytes) -> None:
    """This rank's part from disk. Host memory is filled in place, at once; other devices' through
    up to HOST_BYTES of host memory. Raises CheckpointError."""
    index, groups = manifest.index(data), states.groups
    check_shapes(manifest.path, index, states.shapes)
    spans = spans_to_read(states.held, states.boxes, groups.mesh, groups.place)
    parts = states.parts(spans)
    for batch in [parts] if states.device.type == "cpu" else _batches(parts):
        targets = [states.memory(*one) for one in batch]
        hosts = [
            t if t.is_cpu and t.dtype is torch.float32 else torch.empty(t.shape) for t in targets
        ]
        wants = [
            Want(state, span.pieces, _bytes(host))
            for (state, span), host in zip(batch, hosts, strict=True)
        ]
        read_wants(manifest.path, index, wants)
        for target, host in zip(targets, hosts, strict=True):
            if host is not target:
                target.copy_(host)


def _batches(parts: Sequence[tuple[str, Span]]) -> Iterator[Sequence[tuple[str, Span]]]:
    """Runs of states of spans that fit into HOST_BYTES, or are alone."""
    batch, filled = [], 0
    for state, span in parts:
        size = (span.stop - span.start) * ITEMSIZE
        if batch and filled + size > HOST_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append((state, span))
        filled += size
    yield batch


def check_shapes(path: Path, index: Index, shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse a checkpoint that does not hold just the parameters of these names and shapes.

    Raises CheckpointError naming the first that is missing, superfluous or of another shape.
    """
    if odd := sorted(set(index.shapes) ^ set(shapes)):
        is_stored = odd[0] in index.shapes
        where = "has no place in this model, but is in" if is_stored else "is missing in"
        raise CheckpointError(f"parameter {odd[0]} {where} {path}")
    for name, shape in shapes.items():
        if index.shapes[name] != tuple(shape):
            raise CheckpointError(
                f"{path}: parameter {name} has shape {list(index.shapes[name])}, this model's has "
                f"{list(shape)}"
            )


def read_whole(manifest: Manifest, into: Mapping[str, Tensor], state: str = "master") -> None:
    """Fill whole fp32 host tensors with a state of the parameters of these names, in one process.

    Raises CheckpointError if they are not the checkpoint's, by name or shape, or it is damaged.
    """
    index = manifest.index()
    shapes = {name: tuple(tensor.shape) for name, tensor in into.items()}
    check_shapes(manifest.path, index, shapes)
    wants = []
    for name, tensor in into.items():
        assert tensor.dtype is torch.float32 and tensor.is_contiguous()
        box = tuple(((0, size),) for size in tensor.shape)
        wants.append(Want(state, [(Piece(name, box, 0, tensor.numel()), 0)], _bytes(tensor)))
    read_wants(manifest.path, index, wants)


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, where they are."""
    return memoryview(tensor.detach().reshape(-1).numpy()).cast("B")
