"""Tests of the division of states: each element once, and equal amounts for all writers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy
import pytest

from optimus.checkpoint import slices as slices_module
from optimus.checkpoint.slices import Share, share_of, slices_to_read, slices_to_write
from optimus.config import load_config
from optimus.distributed.mesh import Mesh
from tests.kit.layouts.reshard import Holdings, layout_config, turns_of
from tests.kit.runs.tiny import DENSE

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MESHES = [
    Mesh(),
    Mesh(dp=3),
    Mesh(tp=2),
    Mesh(ep=2, tp=2),
    Mesh(pp=2, dp=2, ep=2, tp=2),
    Mesh(pp=2, dp=3, ep=4),
    Mesh(pp=4, dp=2, tp=2),
]


def paint(counts, param):
    """Add 1 to the count of each element of the slice `param`."""
    indices = [numpy.concatenate([numpy.arange(*pair) for pair in dim]) for dim in param.box]
    flat = numpy.ravel_multi_index(numpy.ix_(*indices), counts.shape).reshape(-1)
    numpy.add.at(counts.reshape(-1), flat[param.start : param.stop], 1)


def assert_each_element_once(config, mesh, slices_of, alternates=False):
    """Check that the slices of all ranks together contain each element once.

    A rank has at most one slice of each shard. If `alternates` is true, a rank can have several
    slices of a shard, because two pipeline stages write the stripes of tied parameters in turn.
    """
    holdings, counts = Holdings(config, mesh), {}
    for rank in range(mesh.world_size):
        holding = holdings.of(rank)
        for name, shape in holding.shapes.items():
            counts.setdefault(name, numpy.zeros(shape, dtype=numpy.int64))
        slices = slices_of(holding, mesh.coordinate(rank))
        assert alternates or len({s.shard for s in slices}) == len(slices)
        for state_slice in slices:
            for param, offset in state_slice.params:
                assert (
                    offset >= 0
                    and offset + param.stop - param.start <= state_slice.stop - state_slice.start
                )
                paint(counts[param.name], param)
    assert len(counts) > 5
    wrong = [name for name, count in counts.items() if not (count == 1).all()]
    assert not wrong


@pytest.mark.parametrize("scatter", ["balanced", "paper"])
@pytest.mark.parametrize("sharding", ["none", "so", "epso"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_each_element_is_written_once(mesh, sharding, scatter, monkeypatch):
    monkeypatch.setattr(slices_module, "STRIPE", 512)
    models = [{"model__tie_embeddings": True}, {}, DENSE | {"model__tie_embeddings": True}]
    lengths = (1, 3000, 1 << 24)
    for number, model in enumerate(models):
        length = lengths[(number + MESHES.index(mesh)) % 3]
        if model.get("model__num_experts") == 0 and mesh.ep > 1:
            continue
        model = {"model__num_layers": 4, "optim__chunk_length": length} | model
        config = layout_config(mesh, optim__sharding=sharding, **model)
        alternates = config.model.tie_embeddings and mesh.pp > 1
        assert_each_element_once(
            config,
            mesh,
            lambda holding, coordinate: slices_to_write(
                holding.shards,
                holding.boxes,
                mesh,
                coordinate,
                scatter,
                turns_of(config, mesh, coordinate),  # noqa: B023
            ),
            alternates=scatter == "balanced" and alternates,
        )


@pytest.mark.parametrize("sharding", ["none", "epso"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_each_element_is_read_once(mesh, sharding):
    """The last pipeline stage does not read its copy of tied embeddings, because the first stage
    sends the embeddings to the last stage."""
    config = layout_config(
        mesh, optim__sharding=sharding, model__num_layers=4, model__tie_embeddings=True
    )
    assert_each_element_once(
        config,
        mesh,
        lambda holding, coordinate: slices_to_read(holding.shards, holding.boxes, mesh, coordinate),
    )


def test_shares_have_the_order_of_ranks():
    mesh = Mesh(pp=2, dp=3, ep=2, tp=2)
    for rank in range(mesh.world_size):
        for axes in (("dp",), ("ep", "dp"), ("dp", "ep", "tp"), ("ep", "tp")):
            group = mesh.group_of(rank, axes)
            assert share_of(mesh, mesh.coordinate(rank), axes) == Share(
                group.index(rank), len(group)
            )


def written(config, mesh, scatter="balanced"):
    """Yield, for each rank, the number of bytes that the rank writes for a single state, such as
    `master`."""
    holdings = Holdings(config, mesh)
    for rank in range(mesh.world_size):
        holding, coordinate = holdings.of(rank), mesh.coordinate(rank)
        turns = turns_of(config, mesh, coordinate)
        slices = slices_to_write(holding.shards, holding.boxes, mesh, coordinate, scatter, turns)
        yield sum(s.stop - s.start for s in slices) * 4


@pytest.mark.parametrize("sharding", ["none", "so", "epso"])
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("olmoe-1b-7b", Mesh(dp=8, ep=8)),
        ("olmoe-1b-7b", Mesh(dp=4, ep=4, tp=2)),
        ("olmoe-1b-7b", Mesh(pp=2, dp=12, ep=2)),
        ("olmo-1b", Mesh(dp=24)),
        ("olmo-1b", Mesh(pp=2, dp=6, tp=2)),
    ],
    ids=str,
)
def test_writers_and_nodes_of_a_stage_write_about_as_much(model, mesh, sharding):
    """Bytes are compared only within a pipeline stage, because stages have different parameters and
    sizes."""
    path = CONFIGS / "model" / f"{model}.toml"
    sizes = [f"parallel.{axis}={size}" for axis, size in mesh._asdict().items()]
    config = load_config(path, [*sizes, f"optim.sharding={sharding}"])
    writes = numpy.array(list(written(config, mesh))).reshape(mesh.pp, -1)
    nodes = writes.reshape(mesh.pp, -1, 4).sum(-1)
    for amounts in (writes, nodes):
        assert (amounts.max(1) <= 1.1 * amounts.mean(1)).all(), amounts


def test_the_rule_of_the_paper_names_the_writer():
    mesh = Mesh(pp=2, dp=3, tp=2)
    config = layout_config(mesh, model__num_layers=4, model__intermediate_size=16)
    amounts = list(written(config, mesh, "paper"))
    most = sorted(range(12), key=amounts.__getitem__)[-4:]
    coordinates = [mesh.coordinate(rank) for rank in sorted(most)]
    assert all(
        coordinate.dp == (coordinate.pp * mesh.tp + coordinate.tp) % mesh.dp
        for coordinate in coordinates
    )
    assert math.fsum(amounts) == math.fsum(written(config, mesh))
