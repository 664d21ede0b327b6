"""Between a rank's part of the model and the whole tensors that files hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy
import torch
from torch import Tensor

from optimus.checkpoint.distribute import Distribute, give
from optimus.checkpoint.pieces import Piece
from optimus.checkpoint.reshard import runs_between
from optimus.checkpoint.stream import PIECE, Weights
from optimus.chunks.setting import setting_of
from optimus.config import Config
from optimus.dist.collectives import Group, broadcast_object, receive, send
from optimus.dist.groups import Groups
from optimus.dist.mesh import Place
from optimus.errors import CheckpointError
from optimus.parallel.layout import Layout, stage_parameters
from optimus.parallel.placement import Placement, place_parameters, whole_model


class WholeModel:
    """Names and shapes of the whole model, and which rank holds which part of it."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        groups: Groups,
        device: torch.device | None = None,
    ) -> None:
        """`device`: where the parts lie; None: on the CPU."""
        self._config, self._layout, self._groups, self._device = config, layout, groups, device
        self._meta = whole_model(config.model)
        self.shapes = {name: p.shape for name, p in self._meta.named_parameters()}
        self.names = tuple(self.shapes)
        self.trained = tuple(n for n in self.names if not setting_of(n, config.optim).frozen)
        """Those of `names` that have gradients and moments."""

    def spread(
        self,
        put: Callable[[str, Tensor, int], None],
        open_weights: Callable[[], Weights],
        device: torch.device,
        how: Distribute = "broadcast",
    ) -> None:
        """Give every rank what it holds of weights that the first rank alone opens and reads, once:
        `put(name, part, start)` of elements `start` and on of the flattened part of a parameter. A
        collective of all ranks.

        No rank takes memory for more than some PIECE elements. Raises CheckpointError on all ranks.
        """
        everyone = self._groups.everyone
        with contextlib.ExitStack() as files:
            weights, problem = None, ""
            if everyone.rank == 0:
                try:
                    weights = files.enter_context(open_weights())
                except CheckpointError as error:
                    problem = str(error)
            pieces = weights.pieces if weights else []
            _refuse(problem, everyone)
            batches = [*_batches(broadcast_object(pieces, everyone)), []]  # [] ends the reading
            given = iter(weights or ())
            for batch in batches:
                flat = torch.zeros(sum(map(_size, batch)) + 1, device=device)
                if everyone.rank == 0:
                    problem = _read(batch, given, flat)
                    flat[-1] = float(bool(problem))
                give(flat.view(torch.int32), everyone, how)
                if flat[-1]:
                    _refuse(problem, everyone)
                for piece in batch:
                    values, flat = flat[: _size(piece)], flat[_size(piece) :]
                    self._put(put, piece, values)

    def _put(self, put: Callable[[str, Tensor, int], None], piece: Piece, values: Tensor) -> None:
        """What this rank holds of a piece: consecutive elements here, if the piece is of the whole
        parameter, and else few such stretches."""
        if piece.name not in self._layout.placements:
            return
        runs = runs_between(self._layout.placements[piece.name].intervals, piece)
        gaps = numpy.flatnonzero(runs[1:, 0] != runs[:-1, 0] + runs[:-1, 2]) + 1
        for found in numpy.split(runs, gaps) if len(runs) else ():
            first, begun, length = found.T
            part = values[begun[0] : begun[0] + length[0]]
            if len(found) > 1:
                index = numpy.repeat(begun - numpy.cumsum(length) + length, length)
                index += numpy.arange(len(index))
                part = values[torch.from_numpy(index).to(values.device)]
            put(piece.name, part, int(first[0]))

    def gather(
        self,
        local: Mapping[str, Tensor],
        names: Collection[str] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, Tensor]:
        """Whole tensors on the first rank's CPU, {} on others, of all parameters or of `names`; of
        `dtype` before they are sent, or as they are where one rank holds all. A collective of all
        ranks; ranks that hold but copies give nothing."""
        names = self.names if names is None else names
        group, place = self._groups.model, self._groups.place
        if group.size == 1:
            return dict(local) if self._groups.everyone.rank == 0 else {}
        if place.dp > 0:
            return {}
        mine = self._held_by(place)
        if group.rank > 0:
            for name in names:
                if name in mine:
                    send(local[name].to(dtype).contiguous(), group, 0).wait()
            return {}
        return self._receive_all(local, names, dtype)

    def _receive_all(
        self, local: Mapping[str, Tensor], names: Collection[str], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        group, mesh = self._groups.model, self._layout.mesh
        places = [mesh.place(rank) for rank in mesh.group_of(0, ("pp", "ep", "tp"))]
        held = [self._held_by(place) for place in places]
        out: dict[str, Tensor] = {}
        for name in names:
            whole = torch.empty(self.shapes[name], dtype=dtype)
            for source, parts in enumerate(held):
                if name not in parts:
                    continue
                part = local.get(name)
                if source > 0:
                    shape = parts[name].local_shape
                    empty = torch.empty(shape, dtype=dtype, device=self._device)
                    part = receive(empty, group, source).wait()
                parts[name].put(whole, part)
            out[name] = whole
        return out

    def _held_by(self, place: Place) -> dict[str, Placement]:
        """What the rank at `place` gives: each part of each parameter is given once."""
        layout, config = self._layout, self._config
        everything = place_parameters(
            self._meta, layout.mesh, place, config.parallel.sequence_parallel
        )
        here = stage_parameters(config, everything, layout.mesh, place.pp, layout.layers)
        given = {}
        for name in here:
            kind = everything[name].kind
            is_copy = (not kind.expert and place.ep > 0) or (
                not kind.divided_by_tp and place.tp > 0
            )
            far_end = name == "embed.weight" and place.pp > 0
            if not (is_copy or far_end):
                given[name] = everything[name]
        return given


def _size(piece: Piece) -> int:
    return piece.stop - piece.start


def _batches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Runs of PIECE elements together at most."""
    batch, filled = [], 0
    for piece in pieces:
        if batch and filled + _size(piece) > PIECE:
            yield batch
            batch, filled = [], 0
        batch.append(piece)
        filled += _size(piece)
    yield batch


def _read(batch: Sequence[Piece], given: Iterator[tuple[Piece, Tensor]], flat: Tensor) -> str:
    """Fill `flat` with the next pieces, or find that no more come; why that failed, or nothing."""
    try:
        for piece in batch:
            flat[: _size(piece)].copy_(next(given)[1])
            flat = flat[_size(piece) :]
        assert batch or next(given, None) is None
    except CheckpointError as error:
        return str(error)
    return ""


def _refuse(problem: str, everyone: Group) -> None:
    """Raise the first rank's problem, if it has one, on all."""
    if problem := broadcast_object(problem, everyone):
        raise CheckpointError(problem, on_every_rank=True)
