"""Tests of placements: without replicas, the slices of all ranks contain each element once."""

from __future__ import annotations

import pytest
import torch

from optimus.config import make_config
from optimus.distributed.collectives import Group
from optimus.distributed.mesh import Mesh
from optimus.model.init import initial_value
from optimus.parallel.apply import make_layout, make_placements
from optimus.parallel.expert import ExpertParallel
from optimus.parallel.placement import materialise, whole_model
from tests.kit.layouts.whole import put
from tests.kit.runs.tiny import DENSE, tiny_tree

MESHES = [Mesh(tp=2), Mesh(ep=4), Mesh(ep=2, tp=2), Mesh(pp=2), Mesh(pp=2, dp=2, ep=2, tp=2)]
BIAS = {"model__attention_bias": True, "model__num_attention_heads": 4}
GROUPED = {"model__num_attention_heads": 4, "model__num_key_value_heads": 2}


def config_for(mesh: Mesh, model: dict):
    sizes = {f"parallel__{axis}": size for axis, size in mesh._asdict().items()}
    return make_config(tiny_tree("d", "r", **model, **sizes))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "model", [{}, BIAS, {"model__tie_embeddings": True}, DENSE | GROUPED], ids=str
)
def test_ranks_of_a_model_have_all_elements_once(mesh, model):
    config = config_for(mesh, model) if "olmo" not in model.values() or mesh.ep == 1 else None
    if config is None:
        pytest.skip("a dense model has no experts to divide")
    whole = whole_model(config.model)
    for name, parameter in whole.named_parameters():
        numbers = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
        count = torch.zeros_like(numbers)
        for rank in mesh.group_of(0, ("ep", "tp")):
            coordinate = mesh.coordinate(rank)
            placement = make_placements(whole, mesh, coordinate)[name]
            local = placement.slice_of(numbers)
            assert tuple(local.shape) == placement.local_shape
            back = torch.full_like(numbers, -1)
            put(placement, back, local)
            filled = back >= 0
            assert torch.equal(back[filled], numbers[filled]), name
            copy = ("ep" not in placement.kind.divided and coordinate.ep > 0) or (
                "tp" not in placement.kind.divided and coordinate.tp > 0
            )
            count += 0 if copy else filled.float()
        assert torch.equal(count, torch.ones_like(count)), name


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("model", [{}, {"model__tie_embeddings": True}], ids=str)
def test_stages_have_all_parameters(mesh, model):
    config = config_for(mesh, model)
    names = {name for name, _ in whole_model(config.model).named_parameters()}
    columns = [
        make_layout(config, mesh, mesh.coordinate(rank), 4) for rank in mesh.group_of(0, ("pp",))
    ]
    placed = [name for layout in columns for name in layout.placements]
    twice = {name for name in placed if placed.count(name) > 1}
    assert set(placed) == names
    assert twice == ({"embed.weight"} if mesh.pp > 1 and config.model.tie_embeddings else set())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_start_with_slices_of_the_same_weights(mesh):
    config = config_for(mesh, BIAS)
    alone = make_layout(config_for(Mesh(), BIAS), Mesh(), Mesh().coordinate(0), 4)
    whole = whole_model(config.model)
    weights = {
        name: initial_value(whole, name, 3, placement)
        for name, placement in alone.placements.items()
    }
    for rank in range(mesh.world_size):
        coordinate = mesh.coordinate(rank)
        placements = make_placements(whole_model(config.model), mesh, coordinate)
        local = whole_model(config.model)
        with torch.device("meta"):
            ExpertParallel(Group(mesh.ep, coordinate.ep), "allgather").apply(local)
        materialise(local, placements, torch.device("cpu"))
        for name, parameter in local.named_parameters():
            value = initial_value(local, name, 3, placements[name])
            assert torch.equal(value, placements[name].slice_of(weights[name])), name
            assert parameter.shape == value.shape and parameter.untyped_storage().nbytes() == 4


def test_experts_are_divided_gate_with_gate_and_up_with_up():
    mesh = Mesh(tp=2)
    placements = make_placements(whole_model(config_for(mesh, {}).model), mesh, mesh.coordinate(1))
    gate_up = placements["blocks.0.mlp.experts.gate_up"]
    assert gate_up.intervals[1] == ((8, 16), (24, 32))  # 16 rows of gate, then 16 of up
