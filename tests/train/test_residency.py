"""Gradients and parameters that are whole only while they are needed: the bits of whole ones."""

from __future__ import annotations

import re

import pytest
import torch

from optimus.config import make_config
from optimus.distributed.mesh import make_mesh
from optimus.errors import ConfigError, NonFiniteError
from optimus.observe.events import TrafficMeter
from optimus.observe.metrics import read_json_lines
from optimus.rank.states import plan_ranks
from tests.helpers.changed_runs import make_run
from tests.helpers.layouts import run_several
from tests.helpers.rank_pool import RanksFailed
from tests.helpers.runs import assert_same_run, metrics_of, told_by, train_on
from tests.helpers.tiny import CONTEXT, DENSE, tiny_tree
from tests.helpers.tower import fetched, resident_bytes, watch_visits
from tests.helpers.updates import make_updater, numbered

SMALL = {"optim__chunk_length": 2000, "train__global_batch_tokens": 8 * CONTEXT}
PIPELINE = {"parallel__pp": 2, "model__num_layers": 4}
ALL = {"recompute__modules": ["norm", "attention", "moe"]}
BLOCK = {"recompute__modules": ["block"]}
LAYOUTS = {
    "dp2-dense-tied-bf16": (
        2,
        DENSE
        | {
            "model__tie_embeddings": True,
            "model__num_layers": 4,
            "train__dtype": "bf16",
        },
        (1, 1),
    ),
    "dp2-unrouted-experts": (
        2,
        {"model__num_experts": 32, "model__num_experts_per_tok": 1},
        (3, 2),
    ),
    "dp2-ep2-tied-recompute": (
        4,
        ALL | {"parallel__ep": 2, "model__tie_embeddings": True},
        (2, 2),
    ),
    "dp2-ep2-bf16-blocks-recomputed": (
        4,
        BLOCK | {"parallel__ep": 2, "train__dtype": "bf16"},
        (3, 3),
    ),
    "dp2-pp2-tied": (4, PIPELINE | BLOCK | {"model__tie_embeddings": True}, (5, 3)),
    "dp2-pp2-interleaved-bf16": (
        4,
        PIPELINE
        | {
            "parallel__schedule": "interleaved",
            "parallel__virtual_stages": 2,
            "train__dtype": "bf16",
        },
        (5, 3),
    ),
    "dp2-pp2-zb-h1": (4, PIPELINE | ALL | {"parallel__schedule": "zb-h1"}, (3, 2)),
    "dp2-tp2-sequence": (4, ALL | {"parallel__tp": 2, "parallel__sequence_parallel": True}, (4, 4)),
}
"""Ranks, settings, and the fewest slots that so and epso do with. What is recomputed, is so only
where states are divided."""


def divisions(so: int, epso: int) -> list[dict]:
    """With so many slots; whole states first."""
    return [
        {"optim__sharding": sharding, "optim__resident": resident, "optim__cache_chunks": slots}
        for sharding, resident, slots in (
            ("none", "all", 0),
            ("none", "parameters", 0),
            ("so", "cache", so),
            ("epso", "cache", epso),
            ("epso", "parameters", 0),
            ("so", "all", 0),
            ("epso", "all", 0),
        )
    ]


DIVISIONS = divisions(3, 3)
ALONE = {"start_world": False, "timeout_s": 120}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_divided_chunks_train_to_the_same_bits(ranks, layout):
    size, run, (so, epso) = LAYOUTS[layout]
    ways = divisions(so, epso)
    trees = [tiny_tree("d", "r", **SMALL, **run, **division) for division in ways]
    trees[0].pop("recompute", None)
    poison = [division["optim__sharding"] == "so" for division in ways]
    whole, *divided = ranks(size, run_several, trees, poison, **ALONE)[0]
    for division, one in zip(ways[1:], divided, strict=True):
        assert one.metrics == whole.metrics, division
        assert one.final == whole.final, division


def test_without_the_mode_losses_agree(ranks):
    fast = {"train__deterministic": False, "train__threads": 1, "parallel__ep": 2}
    trees = [tiny_tree("d", "r", **SMALL, **fast, **division) for division in DIVISIONS]
    whole, *divided = ranks(4, run_several, trees, [False] * len(trees), **ALONE)[0]
    for one in divided:
        for ours, theirs in zip(one.metrics, whole.metrics, strict=True):
            assert ours[0] == pytest.approx(theirs[0], abs=1e-6)


def test_resumed_under_another_residency_evaluated_and_sampled(ranks, tiny_data, tmp_path):
    run = {
        "train__max_steps": 6,
        "optim__chunk_length": 2000,
        "train__eval_interval": 1,
        "train__sample_interval": 2,
        "train__sample_tokens": 4,
    }
    one, many, stop, told = tmp_path / "one", tmp_path / "many", 0, ""
    (expected,) = ranks(1, told_by, tiny_tree(tiny_data, one, **run), **ALONE)
    for division in DIVISIONS[2:5]:
        stop += 2
        tree = tiny_tree(tiny_data, many, **run, **division, train__stop_at_step=stop)
        told += ranks(2, told_by, tree, **ALONE)[0]
    assert_same_run(one, many)
    assert read_json_lines(one / "eval.jsonl") == read_json_lines(many / "eval.jsonl")
    ours, theirs = (re.findall("sample at step .*", text) for text in (told, expected))
    assert ours == theirs and len(ours) == 3


def test_what_is_measured_at_the_start_finds_its_parameters(ranks, tiny_data, tmp_path):
    """Dispatchers and recomputation are timed outside of any step."""
    run = {
        "parallel__ep": 2,
        "recompute__modules": ["block"],
        "train__deterministic": False,
        "train__threads": 1,
        "train__max_steps": 2,
        "optim__warmup_steps": 0,
        "optim__chunk_length": 2000,
    }
    for name, division in (("all", {}), ("cache", DIVISIONS[2])):
        train_on(ranks, 4, tiny_tree(tiny_data, tmp_path / name, **run, **division))
    ours, theirs = (metrics_of(tmp_path / name) for name in ("cache", "all"))
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)


def spoil_a_shard(tree: dict) -> str:
    """Rank 1's part of some parameter becomes NaN after step 1; the error of this rank."""
    run = make_run(tree)
    run.update(1)
    if run.world.rank == 1:
        run.states.chunks[2].shard[0] = torch.nan
    try:
        run.update(2)
    except NonFiniteError as error:
        slots = run.states.chunks[2].chunk.slots
        return f"{error} {[slot.name for slot in slots]}"
    return "no error"


def test_the_rank_that_holds_a_nan_is_named(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path, **SMALL, **DIVISIONS[2], train__dtype="bf16")
    told = ranks(2, spoil_a_shard, tree, **ALONE)
    assert told[0] == told[1]
    name = re.search(r"on rank 1 .* at step 2: parameter (\S+) is non-finite", told[0])[1]
    assert f"'{name}'" in told[0]


def count_step(tree: dict) -> dict:
    """Of a second update: traffic, fetches as planned, and resident bytes, planned and real."""
    meter = TrafficMeter()
    _, _, _, plan, _, states, updater = make_updater(tree, recorder=meter)
    cache, visits = states.cache, watch_visits(states)
    for step in (1, 2):
        meter.clear()
        updater.run(step, [numbered(0)] * plan.microbatches_per_rank)
    sizes = {one.chunk.number: one.params.numel() * one.params.itemsize for one in states.chunks}
    return {
        "traffic": {name: count for (axes, name), count in meter.counts.items() if axes == "dp"},
        "fetched": [sizes[number] for number in fetched(cache.plan)],
        "reduced": plan.microbatches_per_rank * sum(4 * one.chunk.length for one in states.chunks),
        "reductions": plan.microbatches_per_rank * len(states.chunks),
        "bytes": [held for *_, held in visits[-len(cache.plan.steps) :]],
        "planned": [sum(sizes[n] for n in step.resident) for step in cache.plan.steps],
        "between": resident_bytes(states),
    }


@pytest.mark.parametrize(
    ("size", "run"),
    [(2, {}), (4, PIPELINE), (4, PIPELINE | {"parallel__schedule": "gpipe"})],
    ids=["dp2", "pp2-1f1b", "pp2-gpipe"],
)
def test_any_run_fetches_what_is_planned(ranks, size, run):
    tree = tiny_tree("d", "r", **SMALL, **run, **DIVISIONS[3], train__dtype="bf16")
    for one in ranks(size, count_step, tree, start_world=False):
        calls, total = one["traffic"]["all_gather"]
        assert (calls, total) == (len(one["fetched"]), sum(one["fetched"]))
        assert one["traffic"]["all_to_all"] == [one["reductions"], one["reduced"]]
        assert one["bytes"] == one["planned"]
        assert one["between"] == {"params": 0, "grads": 0}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_too_few_slots_are_refused_by_plan(layout):
    size, run, fewest = LAYOUTS[layout]
    for sharding, enough in zip(("so", "epso"), fewest, strict=True):
        for slots in (1, enough - 1, enough):
            division = {"optim__resident": "cache", "optim__cache_chunks": slots}
            config = make_config(
                tiny_tree("d", "r", **SMALL, **run, **division, optim__sharding=sharding)
            )
            mesh = make_mesh(config.parallel, size)
            if slots in (0, enough):
                assert len(list(plan_ranks(config, mesh))) == mesh.pp * mesh.tp
                continue
            with pytest.raises(ConfigError) as refused:
                list(plan_ranks(config, mesh))
            told = str(refused.value)
            assert told.startswith(f"optim.cache_chunks = {slots}: some block ")
            assert f"use {enough} or more" in told and "\n" not in told


def test_too_few_slots_are_refused_before_ranks_meet(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path / "run", **SMALL, **DIVISIONS[2])
    tree["optim"]["cache_chunks"] = 1
    with pytest.raises(RanksFailed, match="ConfigError: optim.cache_chunks = 1: some block"):
        train_on(ranks, 2, tree)
    assert not (tmp_path / "run").exists()
