"""Weights that a run begins with: one rank reads them, all take what they hold of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy
import torch
from torch import Tensor

from optimus import errors
from optimus.checkpoint.distribute import Distribute, give
from optimus.checkpoint.pieces import Piece
from optimus.checkpoint.reshard import runs_between
from optimus.checkpoint.stream import PIECE, Weights
from optimus.distributed.collectives import Group, broadcast_object
from optimus.distributed.world import World
from optimus.errors import CheckpointError, OptimusError
from optimus.parallel.layout import Layout
from optimus.resilience import guards

Put = Callable[[str, Tensor, int], None]


def spread(
    layout: Layout,
    put: Put,
    open_weights: Callable[[], Weights],
    world: World,
    how: Distribute = "broadcast",
    origin: object = "the weights",
) -> None:
    """Give every rank what it holds of weights that the first rank alone opens and reads, once:
    `put(name, part, start)` of elements `start` and on of the flattened part of a parameter. A
    collective of all ranks. A value that is not finite is refused; `origin` is for its message.

    No rank takes memory for more than some PIECE elements. Raises on all ranks what the first
    meets of OptimusError, of its kind.
    """
    everyone = world.everyone
    with contextlib.ExitStack() as files:
        weights, problem = None, None
        if everyone.rank == 0:
            try:
                weights = files.enter_context(open_weights())
            except OptimusError as error:
                problem = error
        pieces = weights.pieces if weights else []
        _refuse(problem, everyone)
        batches = [
            *_batches(broadcast_object(pieces, everyone, list[Piece])),
            [],
        ]  # [] ends the reading
        given, memory = iter(weights or ()), torch.empty(PIECE + 1, device=world.device)
        for batch in batches:
            flat = memory[: sum(map(_size, batch)) + 1].zero_()
            if everyone.rank == 0:
                problem = _read(batch, given, flat) or _nonfinite(batch, flat, origin)
                flat[-1] = float(bool(problem))
            give(flat.view(torch.int32), everyone, how)
            if flat[-1]:
                _refuse(problem, everyone)
            for piece in batch:
                values, flat = flat[: _size(piece)], flat[_size(piece) :]
                _put(put, layout, piece, values)


def _put(put: Put, layout: Layout, piece: Piece, values: Tensor) -> None:
    """What this rank holds of a piece: consecutive elements here, if the piece is of the whole
    parameter, and else few such stretches."""
    if piece.name not in layout.placements:
        return
    runs = runs_between(layout.placements[piece.name].intervals, piece)
    gaps = numpy.flatnonzero(runs[1:, 0] != runs[:-1, 0] + runs[:-1, 2]) + 1
    for found in numpy.split(runs, gaps) if len(runs) else ():
        first, begun, length = found.T
        part = values[begun[0] : begun[0] + length[0]]
        if len(found) > 1:
            index = numpy.repeat(begun - numpy.cumsum(length) + length, length)
            index += numpy.arange(len(index))
            part = values[torch.from_numpy(index).to(values.device)]
        put(piece.name, part, int(first[0]))


def _size(piece: Piece) -> int:
    return piece.stop - piece.start


def _batches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Runs of PIECE elements together at most."""
    batch: list[Piece] = []
    filled = 0
    for piece in pieces:
        if batch and filled + _size(piece) > PIECE:
            yield batch
            batch, filled = [], 0
        batch.append(piece)
        filled += _size(piece)
    yield batch


def _read(
    batch: Sequence[Piece], given: Iterator[tuple[Piece, Tensor]], flat: Tensor
) -> OptimusError | None:
    """Fill `flat` with the next pieces, or find that no more come; why that failed."""
    try:
        for piece in batch:
            flat[: _size(piece)].copy_(next(given)[1])
            flat = flat[_size(piece) :]
        assert batch or next(given, None) is None
    except OptimusError as error:
        return error
    return None


def _nonfinite(batch: Sequence[Piece], flat: Tensor, origin: object) -> CheckpointError | None:
    """The refusal of the first value that is not finite, of the pieces that `flat` begins with."""
    if guards.is_finite(flat):
        return None
    for piece in batch:
        values, flat = flat[: _size(piece)], flat[_size(piece) :]
        bad = (~torch.isfinite(values)).nonzero()
        if len(bad):
            at, value = piece.start + int(bad[0]), float(values[bad[0]])
            return CheckpointError(f"{origin}: {piece.name} is {value} at element {at}")
    return None


def _refuse(problem: OptimusError | None, everyone: Group) -> None:
    """Raise the first rank's problem, if it has one, on all."""
    words = (type(problem).__name__, str(problem)) if problem else None
    if found := broadcast_object(words, everyone, tuple[str, str] | None):
        raise getattr(errors, found[0])(found[1])
