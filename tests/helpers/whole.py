"""Whole tensors of a model that ranks hold in parts, on the first of them: for tests to compare."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from optimus.checkpoint.manifest import Manifest
from optimus.checkpoint.pieces import Piece, whole_box
from optimus.checkpoint.transfer import Readers, Want
from optimus.config import Config
from optimus.dist.collectives import receive, send
from optimus.dist.groups import Groups
from optimus.dist.mesh import Place
from optimus.model.tensor_files import as_bytes, check_shapes
from optimus.parallel.layout import Layout, stage_parameters
from optimus.parallel.placement import Intervals, Placement, place_parameters, whole_model


class WholeModel:
    """Names and shapes of the whole model, and which rank holds which part of it."""

    def __init__(self, config: Config, layout: Layout, groups: Groups) -> None:
        self._config, self._layout, self._groups = config, layout, groups
        self._meta = whole_model(config.model)
        self.shapes = {name: p.shape for name, p in self._meta.named_parameters()}

    def gather(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on the first rank, {} on others. A collective of all ranks; ranks that hold
        but copies give nothing."""
        group, place = self._groups.model, self._groups.place
        if group.size == 1:
            return dict(local) if self._groups.everyone.rank == 0 else {}
        if place.dp > 0:
            return {}
        mine = self._held_by(place)
        if group.rank > 0:
            for name in self.shapes:
                if name in mine:
                    send(local[name].contiguous(), group, 0).wait()
            return {}
        return self._receive_all(local)

    def _receive_all(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        group, mesh = self._groups.model, self._layout.mesh
        places = [mesh.place(rank) for rank in mesh.group_of(0, ("pp", "ep", "tp"))]
        held = [self._held_by(place) for place in places]
        out: dict[str, Tensor] = {}
        for name, shape in self.shapes.items():
            out[name] = torch.empty(shape)
            for source, parts in enumerate(held):
                if name not in parts:
                    continue
                part = local.get(name)
                if source > 0:
                    part = receive(torch.empty(parts[name].local_shape), group, source).wait()
                put(parts[name], out[name], part)
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


def put(placement: Placement, whole: Tensor, part: Tensor) -> None:
    """Write a rank's part into its place in the whole parameter."""
    assert tuple(part.shape) == placement.local_shape, (part.shape, placement)
    for chosen in itertools.product(*map(_with_offsets, placement.intervals)):
        there, here = whole, part
        for dim, (start, size, offset) in enumerate(chosen):
            there, here = there.narrow(dim, start, size), here.narrow(dim, offset, size)
        there.copy_(here)


def _with_offsets(intervals: Intervals) -> list[tuple[int, int, int]]:
    """(start in the whole, size, start in the part) of each interval."""
    out, offset = [], 0
    for start, stop in intervals:
        out.append((start, stop - start, offset))
        offset += stop - start
    return out


def read_whole(manifest: Manifest, into: Mapping[str, Tensor], state: str = "master") -> None:
    """Fill whole fp32 host tensors with a state of the parameters of these names, in one process:
    of all parameters, or, as those that are not trained have no moments, of some.

    Raises CheckpointError if they are not the checkpoint's, by name or shape, or it is damaged.
    """
    index = manifest.index()
    shapes = {name: tuple(tensor.shape) for name, tensor in into.items()}
    if state != "master":
        shapes = {name: index.shapes[name] for name in index.shapes} | shapes
    check_shapes(manifest.path, index.shapes, shapes)
    wants = []
    for name, tensor in into.items():
        assert tensor.dtype is torch.float32 and tensor.is_contiguous()
        piece = Piece(name, whole_box(tensor.shape), 0, tensor.numel())
        wants.append(Want(state, [(piece, 0)], as_bytes(tensor)))
    with Readers(manifest.path, index, 1) as readers:
        readers.read(wants)
