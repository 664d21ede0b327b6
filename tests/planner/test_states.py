"""The bytes of model states that the planner computes by arithmetic equal the bytes that the engine
allocates, for random layouts and settings."""

from __future__ import annotations

import random
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from optimus.config import Config, make_config
from optimus.distributed.mesh import Mesh
from optimus.errors import ConfigError
from optimus.parallel.divisible import check_divisible
from optimus.planner.states import StateSizes, plan_ranks, stages_of
from optimus.rank import states as engine_states
from optimus.rank.states import plan_rank
from tests.kit.runs.tiny import tiny_tree

SEEDS, LAYOUTS_OF_A_SEED = range(8), 25
PATTERNS = ("*norm*", "*experts*", "embed.*", "blocks.[01].*", "*bias", "*.o_proj.*", "*router*")


def random_tree(choose: random.Random) -> dict[str, Any]:
    """Return a configuration with random settings and random sizes of the mesh axes. Some of these
    configurations are refused."""
    pp, tp, ep = choose.choice((1, 1, 2, 3)), choose.choice((1, 1, 2)), choose.choice((1, 1, 2, 4))
    schedule = choose.choice(("1f1b", "zb-h1", "gpipe", "interleaved"))
    layers = choose.randint(pp, 7)
    is_sparse = choose.random() < 0.7
    experts: Any = choose.choice((4, 8)) if is_sparse else 0
    if is_sparse and choose.random() < 0.3:
        experts = [choose.choice((0, 4, 8)) for _ in range(layers)]
    settings: dict[str, Any] = {
        "model__architecture": "olmoe" if is_sparse else "olmo",
        "model__num_layers": layers,
        "model__hidden_size": choose.choice((16, 32, 48)),
        "model__num_attention_heads": 4,
        "model__num_key_value_heads": choose.choice((0, 2, 4)),
        "model__head_dim": choose.choice((0, 6)),
        "model__num_experts": experts,
        "model__num_experts_per_tok": 2 if is_sparse else 0,
        "model__vocab_size": choose.choice((320, 321)),
        "model__tie_embeddings": choose.random() < 0.4,
        "model__attention_bias": choose.random() < 0.3,
        "parallel__virtual_stages": choose.choice((1, 2)) if schedule[0] in "gi" else 1,
        "parallel__schedule": schedule,
        "parallel__sequence_parallel": tp > 1 and choose.random() < 0.5,
        "train__dtype": choose.choice(("fp32", "bf16", "fp16")),
        "train__deterministic": choose.random() < 0.3,
        "optim__sharding": choose.choice(("none", "so", "epso")),
        "optim__resident": choose.choice(("all", "all", "parameters", "cache")),
        "optim__chunk_length": choose.choice((1000, 5000, 1 << 14, 1 << 24)),
        "optim__cache_chunks": choose.choice((0, 0, 9)),
        "optim__grad_dtype": choose.choice(("fp32", "fp32", "bf16")),
        "optim__grad_reduce_dtype": choose.choice(("fp32", "bf16")),
        "checkpoint__async_save": choose.random() < 0.5,
        "checkpoint__model_interval": choose.choice((0, 5)),
        "checkpoint__scatter": choose.choice(("balanced", "paper")),
    }
    if is_sparse and not isinstance(experts, int) and choose.random() < 0.5:
        settings["model__dense_intermediate_size"] = 40
    if choose.random() < 0.3:
        settings["offload__mode"] = "manual"
        settings["offload__host_share"] = choose.choice((0.3, 1.0))
        one_stage = settings["parallel__virtual_stages"] == 1
        is_even = settings["model__num_layers"] % pp == 0
        if one_stage and is_even and choose.random() < 0.5:
            settings["offload__order"] = "layer"
    if choose.random() < 0.3:
        settings["optim__frozen"] = [choose.choice(PATTERNS)]
    if choose.random() < 0.3:
        settings["optim__groups"] = [{"pattern": choose.choice(PATTERNS), "weight_decay": 0.0}]
    tree = tiny_tree("d", "r", **settings)
    tree["parallel"] |= {"pp": pp, "dp": choose.choice((1, 2, 3, 4)), "ep": ep, "tp": tp}
    return tree


@cache
def random_layouts(seed: int) -> list[tuple[Config, Mesh, list]]:
    """Return random valid configurations, each with its mesh and the result of `plan_ranks`."""
    choose, layouts = random.Random(seed), []
    while len(layouts) < LAYOUTS_OF_A_SEED:
        tree = random_tree(choose)
        sizes = (tree["parallel"][axis] for axis in ("pp", "dp", "ep", "tp"))
        try:
            config, mesh = make_config(tree), Mesh(*sizes)
            check_divisible(config, mesh)
            layouts.append((config, mesh, list(plan_ranks(config, mesh))))
        except ConfigError:  # an impossible layout
            continue
    return layouts


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_of_random_layouts_are_those_of_the_engine(seed):
    for config, mesh, ranks in random_layouts(seed):
        states, stages = StateSizes(config), stages_of(config, mesh)
        for planned, (coordinate, sizes) in zip(
            ranks, engine_states.plan_ranks(config, mesh), strict=True
        ):
            assert planned == (coordinate, sizes), (config, mesh)
            rank = states.of_rank(mesh, stages, coordinate)
            assert rank.sizes == {kind: sizes[kind] for kind in rank.sizes}, (config, coordinate)
            fewest = plan_rank(config, mesh, coordinate).fewest_slots
            assert rank.fewest_slots == fewest


def test_random_layouts_have_all_features():
    """Each axis with more than one rank, and each setting that changes states, must occur in the
    random layouts. Otherwise, the comparison above would not test this axis or setting."""
    layouts = [layout for seed in SEEDS for layout in random_layouts(seed)]
    assert len(layouts) >= 200
    present = {
        feature
        for config, mesh, ranks in layouts
        for feature, is_present in {
            **{axis: size > 1 for axis, size in mesh._asdict().items()},
            config.optim.sharding: True,
            config.optim.resident: True,
            config.train.dtype: True,
            config.optim.grad_dtype + " gradients": True,
            "virtual stages": config.parallel.virtual_stages > 1,
            "sequence": config.parallel.sequence_parallel,
            "deterministic": config.train.deterministic,
            "tied": config.model.tie_embeddings and mesh.pp > 1,
            "dense": config.model.architecture == "olmo",
            "mixed": config.model.uniform_experts is None,
            "frozen": bool(config.optim.frozen),
            "groups": bool(config.optim.groups),
            "layer": config.offload.order == "layer",
            "slots": config.optim.cache_chunks > 0,
            **{kind: bool(size) for _, sizes in ranks for kind, size in sizes.items()},
        }.items()
        if is_present
    }
    kinds = {"deterministic", "tied", "host", "staging", "cache", "masters", "padding"}
    axes = {"pp", "dp", "ep", "tp", "virtual stages", "sequence", "layer"}
    settings = {"none", "so", "epso", "all", "parameters", "fp32", "bf16", "fp16", "slots"}
    models = {"dense", "mixed", "frozen", "groups", "bf16 gradients"}
    assert kinds | axes | settings | models <= present


def test_sizes_are_computed_without_torch():
    code = "import sys, optimus.planner.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
