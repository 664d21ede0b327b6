"""Tests of the planned bytes of model states. These bytes must equal the bytes in training, and the
results of formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from optimus.checkpoint.save import FullSaver
from optimus.checkpoint.weights import ModelSaver
from optimus.config import make_config
from optimus.config.load import load_config
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.errors import ConfigError
from optimus.parallel.placement import whole_model
from optimus.planner.plan import format_plan, plan
from optimus.planner.states import plan_ranks
from optimus.rank.states import plan_rank, states_of_rank
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import make_microbatch, make_rank_model, make_updater
from tests.planner.test_plan import CONFIGS

FAST = {"train__deterministic": False}


def all_memory(*roots: Any) -> int:
    """Return the total number of bytes of all tensor storages that can be reached from `roots`."""
    storages, seen = {}, set()

    def walk(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, (list, tuple, set)):
            yield from value
        elif type(value).__module__.startswith("optimus."):
            yield from vars(value).values() if hasattr(value, "__dict__") else ()

    pending = list(roots)
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            if value.is_leaf and value.grad is not None:
                pending.append(value.grad)
        pending += walk(value)
    return sum(storages.values())


def train_a_little(tree: dict) -> tuple[dict[str, int], dict[str, int], int]:
    """Run two updates on this rank.

    Return the planned bytes of each kind of state, the bytes that the engine reports for each kind
    of state, and the total bytes of the tensors of model and states in memory.
    """
    config, _, groups, batch, shard, states, updater = make_updater(tree)
    for step in (1, 2):
        updater.run(step, [make_microbatch(step)] * batch.microbatches_per_rank)
    in_memory = all_memory(
        states, *shard.model.parameters(), *shard.model.separated_uses().values()
    )
    planned = plan_rank(config, groups.mesh, groups.coordinate).engine.state_bytes()
    return planned, states.state_bytes(), in_memory


TIED = {"model__tie_embeddings": True}
BF16 = {"train__dtype": "bf16"}
SHORT = {"optim__chunk_length": 2000}


def offload(share: float) -> dict:
    # With early_adam = "auto", a run makes as many spare buffers as fit into the free host memory.
    return {
        "offload__mode": "manual",
        "offload__host_share": share,
        "offload__early_adam": "off",
    }


@pytest.mark.parametrize(
    ("size", "run"),
    [
        pytest.param(1, {}, id="one"),
        pytest.param(1, TIED | BF16 | SHORT, id="one-tied-bf16"),
        pytest.param(
            1,
            TIED | BF16 | SHORT | {"optim__frozen": ["*attention.*_proj*"]} | offload(0.5),
            id="one-tied-frozen-bf16-host",
        ),
        pytest.param(2, BF16 | {"optim__sharding": "so"} | offload(1.0), id="dp2-so-host"),
        pytest.param(2, BF16 | {"optim__sharding": "so"}, id="dp2-so"),
        pytest.param(2, FAST | BF16 | TIED | {"parallel__pp": 2}, id="pp2-tied"),
        pytest.param(
            2,
            {
                "parallel__pp": 2,
                "parallel__schedule": "zb-h1",
                "optim__frozen": ["*attention.*_proj*"],
            },
            id="pp2-zb-frozen",  # zb-h1 defers weight gradients
        ),
        pytest.param(2, {"parallel__tp": 2, "model__vocab_size": 321}, id="tp2-odd-vocabulary"),
        pytest.param(4, TIED | {"parallel__ep": 2, "optim__sharding": "epso"}, id="dp2-ep2-epso"),
        pytest.param(
            4,
            FAST | BF16 | SHORT | TIED | {"parallel__pp": 2, "optim__sharding": "epso"},
            id="pp2-dp2-epso-tied",
        ),
        pytest.param(
            4,
            BF16
            | SHORT
            | {
                "parallel__ep": 2,
                "optim__sharding": "epso",
                "optim__frozen": ["*experts*", "embed.*"],
                "optim__groups": [{"pattern": "*norm*", "weight_decay": 0.0}],
            },
            id="dp2-ep2-epso-frozen-groups",
        ),
        pytest.param(2, SHORT | TIED | {"optim__resident": "parameters"}, id="dp2-in-pieces-tied"),
        pytest.param(
            4,
            FAST
            | SHORT
            | TIED
            | {
                "train__dtype": "fp16",
                "parallel__pp": 2,
                "optim__sharding": "epso",
                "optim__resident": "cache",
                "optim__frozen": ["*attention.*_proj*"],
            },
            id="pp2-dp2-epso-cache-tied-frozen-fp16",
        ),
    ],
)
def test_planned_bytes_are_those_of_training(ranks, size, run):
    for planned, reported, in_memory in ranks(
        size, train_a_little, tiny_tree("d", "r", **run), start_world=False
    ):
        assert planned == reported
        assert planned["total"] + planned["host"] == in_memory
        assert (planned["host"] > 0) == ("offload__mode" in run)


def share_of(config, mesh: Mesh) -> tuple[float, float]:
    """Return (number of expert parameters on a rank, number of other parameters on a rank)."""
    model = config.model
    expert = 3 * model.hidden_size * model.intermediate_size
    experts = model.num_layers * model.num_experts * expert
    total = plan(make_config({"model": model.model_dump(exclude_none=True)}))["total_params"]
    return experts / mesh.ep, total - experts


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("sizes", [(2, 2), (4, 1), (1, 4), (8, 4)])
def test_optimizer_states_are_the_formulas_plus_padding(dtype, sizes):
    """A bf16 or fp16 parameter has 12 bytes of optimizer states: a master and two moments.

    An fp32 parameter has 8 bytes, because it needs no separate master.
    """
    mesh = Mesh(dp=sizes[0], ep=sizes[1])
    width = 8 if dtype == "fp32" else 12
    for sharding in ("none", "so", "epso"):
        config = make_config(
            tiny_tree("d", "r", train__dtype=dtype, optim__sharding=sharding, **FAST)
        )
        x, n = share_of(config, mesh)
        memory = plan_rank(config, mesh, Coordinate(0, 0, 0, 0)).engine.state_bytes()
        exact = {
            "none": width * (x + n),
            "so": width * (x + n) / mesh.dp,
            "epso": width * (x / mesh.dp + n / (mesh.dp * mesh.ep)),
        }[sharding]
        states = memory["masters"] + memory["moments"]
        assert exact <= states <= exact + memory["padding"]
        assert (memory["masters"] == 0) is (dtype == "fp32")
        assert memory["parameters"] >= (4 if dtype == "fp32" else 2) * (x + n)


def test_ranks_of_a_kind_have_equal_bytes():
    config = make_config(
        tiny_tree("d", "r", **TIED, **BF16, optim__sharding="epso", model__vocab_size=321)
    )
    mesh = Mesh(2, 2, 2, 2)
    kinds = {(rank.pp, rank.tp): sizes for rank, sizes in plan_ranks(config, mesh)}
    none = {"cache": 0, "staging": 0}
    for pp, dp, ep, tp in itertools.product(range(2), repeat=4):
        sizes = plan_rank(config, mesh, Coordinate(pp, dp, ep, tp)).engine.state_bytes()
        assert sizes | none == kinds[pp, tp]


def test_a_plan_counts_the_chunks_in_the_cache():
    tree = tiny_tree("d", "r", **BF16, **SHORT, optim__sharding="so", optim__resident="cache")
    tree["parallel"] = {"dp": 4}
    all_of_them = plan(make_config(tree))["memory"]
    tree["optim"]["cache_chunks"] = 3
    three = plan(make_config(tree))["memory"]
    others = {kind: size for kind, size in three.items() if kind not in ("cache", "total")}
    assert all(all_of_them[kind] == size for kind, size in others.items())
    assert three["total"] - three["cache"] == all_of_them["total"] - all_of_them["cache"]
    assert all_of_them["cache"] == 4 * three["parameters"] > three["cache"] > 0


def test_a_plan_refuses_sizes_that_training_refuses():
    with pytest.raises(ConfigError, match="parallel.ep = 3 does not divide"):
        plan(make_config(tiny_tree("d", "r", parallel__ep=3)))


LARGE = {"mula-20b-a2b": 1, "mula-100b-a7b": 4, "mula-220b-a10b": 8}
"""The large models of the Optimus paper, with the number of pipeline stages of each."""


@pytest.mark.parametrize("name", LARGE)
def test_the_paper_s_large_runs_fit_a_tile(name):
    """The states of each rank must need less than 40 GB of the 64 GB of an Intel Max 1550 tile."""
    result = plan(load_config(CONFIGS / "run" / f"{name}.toml"))
    assert result["world"] == 3072 and len(result["ranks"]) == LARGE[name]
    assert result["tokens"] == pytest.approx(100e9, rel=1e-4)
    memory = result["memory"]
    assert memory["total"] == max(rank["total"] for rank in result["ranks"]) < 40e9
    assert memory["padding"] < 0.01 * memory["total"]
    assert f"{memory['total']:,} bytes" in format_plan(result)


def staging_of(tree: dict[str, Any]) -> int:
    """Return the bytes that this rank allocates for checkpoint.async_save."""
    config, _, groups, _, shard = make_rank_model(tree)
    states = states_of_rank(config.model, shard.layout, groups, shard.make_states())
    scatter, limits = config.checkpoint.scatter, {"limit_s": 9.0, "begin_s": 9.0}
    full = FullSaver(states, scatter, staged=True)
    model = ModelSaver(states, config.model, scatter, staged=True, **limits)
    return all_memory([full, model] if config.checkpoint.model_interval else full)


@pytest.mark.parametrize("interval", [0, 5])
@pytest.mark.parametrize("scatter", ["balanced", "paper"])
def test_staging_memory_is_as_planned(ranks, scatter, interval):
    sizes = {"pp": 2, "dp": 2, "ep": 1, "tp": 1}
    settings = {"checkpoint__scatter": scatter, "checkpoint__async_save": True}
    settings |= {"optim__sharding": "none", "checkpoint__model_interval": interval}
    tree = tiny_tree("d", "r", **settings) | {"parallel": sizes}
    staged = ranks(4, staging_of, tree, start_world=False)
    planned = [rank["staging"] for rank in plan(make_config(tree))["ranks"]]
    # `planned` has one rank of each stage. Ranks 2 and 3 are dp indices 0 and 1 of stage 1. With
    # scatter = "paper", dp index 1 saves stage 1, because this stage is model-parallel rank 1.
    assert planned == [staged[0], staged[3 if scatter == "paper" else 2]]
    assert (min(staged) == 0) is (scatter == "paper")
    states = sum(math.prod(p.shape) for p in whole_model(make_config(tree).model).parameters())
    each = 12 + 2 * bool(interval)
    assert sum(staged) == pytest.approx(each * states, rel=0.01)  # plus padding
    assert plan(make_config(tree | {"checkpoint": {}}))["memory"]["staging"] == 0


def test_tied_embeddings_belong_to_both_end_stages_and_count_on_the_first():
    settings = TIED | {"parallel__pp": 3, "model__num_layers": 3}
    config, mesh = make_config(tiny_tree("d", "r", **settings)), Mesh(pp=3, dp=2)
    for pp in range(3):
        engine = plan_rank(config, mesh, Coordinate(pp, 1, 0, 0)).engine
        groups = {name: (group.rank, group.size) for name, group in engine.stage_groups.items()}
        assert groups == {0: {"embed.weight": (0, 2)}, 1: {}, 2: {"embed.weight": (1, 2)}}[pp]
        copies = [chunk for chunk in engine.chunks if chunk.groups.is_later_copy]
        names = [slot.name for chunk in copies for slot in chunk.chunk.slots]
        assert names == (["embed.weight"] if pp == 2 else [])
        assert not any(chunk.groups.counts for chunk in copies)
