"""Loading full states: every rank reads its own part, and copies pass on what they have read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from optimus.checkpoint.distribute import Distribute, pass_to_copies, pass_to_far_end
from optimus.checkpoint.index import ITEMSIZE
from optimus.checkpoint.manifest import Manifest
from optimus.checkpoint.pieces import Span, first_nonfinite, spans_to_read
from optimus.checkpoint.rank_states import RankStates
from optimus.checkpoint.transfer import Readers, Want
from optimus.distributed.collectives import (
    all_gather_objects,
    broadcast_bytes,
    broadcast_object,
    greatest,
)
from optimus.errors import CheckpointError
from optimus.io.safetensors import as_bytes, check_shapes

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
