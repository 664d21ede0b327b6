"""Tests of the large runs of the Optimus paper. One process builds models of single ranks of a
world of 3,072 ranks. It uses the meta device and a fake collective backend."""

from __future__ import annotations

import pytest
import torch

from optimus.config import load_config
from optimus.distributed.groups import join_groups
from optimus.planner.plan import plan
from optimus.rank.model import RankModel
from optimus.train.resolve import divide
from tests.kit.ranks.worlds import fake_world
from tests.planner.test_plan import CONFIGS
from tests.rank.test_states import LARGE

WORLD = 3072
META = torch.device("meta")


def build_stages(path: str) -> list[tuple[dict[str, int], int, int]]:
    """Build the model and the states of the first rank of each pipeline stage. Return for each of
    these ranks: the bytes of each kind of state, the number of expert parameters, and the number of
    other parameters."""
    config = load_config(path)
    mesh, batch = divide(config, WORLD)
    stages = []
    for stage in range(mesh.pp):
        world = fake_world(stage * (WORLD // mesh.pp), WORLD)
        shard = RankModel(config, join_groups(mesh, world), batch, META)
        sizes = {name: p.numel() for name, p in shard.model.named_parameters()}
        experts = sum(size for name, size in sizes.items() if "experts" in name)
        states = shard.make_states(initial=False)
        stages.append((states.state_bytes(), experts, sum(sizes.values()) - experts))
        torch.distributed.destroy_process_group()
    return stages


@pytest.mark.parametrize("name", LARGE)
def test_stages_of_the_large_runs_of_the_paper_are_built(ranks, name):
    path = CONFIGS / "run" / f"{name}.toml"
    config = load_config(path)
    result, parallel = plan(config), config.parallel
    ((*stages,),) = ranks(1, build_stages, str(path), start_world=False)
    assert len(stages) == LARGE[name] == parallel.pp
    assert (parallel.ep, config.optim.sharding, parallel.schedule) == (12, "epso", "1f1b")
    total = sum(parallel.ep * experts + rest for _, experts, rest in stages)
    assert total == result["total_params"]
    for (sizes, experts, rest), rank in zip(stages, result["ranks"], strict=True):
        assert sizes == {key: rank[key] for key in sizes}
        exact = 12 * (experts / parallel.dp + rest / (parallel.dp * parallel.ep))
        assert exact <= sizes["masters"] + sizes["moments"] <= exact + sizes["padding"]


@pytest.mark.parametrize(
    ("name", "recomputed"),
    [
        ("mula-20b-a2b", ()),
        ("mula-100b-a7b", ("moe",)),
        ("mula-220b-a10b", ("norm", "attention", "moe")),
    ],
)
def test_recipe_equals_that_of_mula_7b(name, recomputed):
    config = load_config(CONFIGS / "run" / f"{name}.toml")
    base = load_config(CONFIGS / "run" / "mula-7b-a1b.toml")
    assert config.optim == base.optim.model_copy(update={"sharding": "epso"})
    assert config.train == base.train.model_copy(update={"max_steps": 15895})
    assert config.recompute.modules == recomputed
