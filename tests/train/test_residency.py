"""Runs that keep whole gradients and parameters only while needed (`optim.resident`) are
bit-identical to other runs."""

from __future__ import annotations

import math
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from optimus.chunks.memory import Memory, Tier
from optimus.config import make_config
from optimus.distributed import collectives
from optimus.distributed.mesh import make_mesh
from optimus.errors import ConfigError, NonFiniteError
from optimus.observe.events import TrafficMeter
from optimus.observe.metrics import read_json_lines
from optimus.planner.states import plan_ranks
from tests.kit.layouts.matrix import run_several
from tests.kit.layouts.tower import planned_gathers, resident_bytes, watch_uses
from tests.kit.ranks.pool import RanksFailed
from tests.kit.runs.results import assert_same_run, metrics_of
from tests.kit.runs.tiny import CONTEXT, DENSE, tiny_tree
from tests.kit.runs.training import make_microbatch, make_run, make_updater, printed_by, train_on

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
"""For each layout: the number of ranks, the settings, and a pair of values of `optim.cache_chunks`.
The first value is the smallest that a run with `optim.sharding = "so"` accepts, and the second
value is the smallest that a run with "epso" accepts."""


def on_disk(share: float, directory: Path) -> dict:
    """Return settings for states on disk, in `directory`. `share` is the share of the offloaded
    chunks whose states are on disk."""
    return {"offload__disk_share": share, "offload__disk": str(directory)} if share else {}


def sharding_settings(so_slots: int, epso_slots: int) -> list[dict]:
    """Return the tested settings of sharding, residency and offloading. The first settings are
    those of the reference run. `so_slots` and `epso_slots` are the values of `optim.cache_chunks`
    with optim.sharding = "so" and "epso"."""
    return [
        {"optim__sharding": sharding, "optim__resident": resident, "optim__cache_chunks": slots}
        | ({"offload__mode": "manual", "offload__host_share": share} if share else {})
        for sharding, resident, slots, share in (
            ("none", "all", 0, 0),
            ("none", "parameters", 0, 0),
            ("so", "cache", so_slots, 0),
            ("epso", "cache", epso_slots, 0),
            ("epso", "parameters", 0, 0.5),
            ("so", "all", 0, 0),
            ("epso", "all", 0, 0),
            ("none", "all", 0, 0.3),
            ("so", "cache", so_slots, 1.0),
        )
    ]


SHARDINGS = sharding_settings(3, 3)
ALONE = {"start_world": False, "timeout_s": 120}
STEPS = 3
"""Updates of runs that are compared bit by bit. The metrics of the third update depend on the
moments of the second, and each buffer is used again."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_chunks_train_to_the_same_bits(ranks, tmp_path, layout):
    size, run, (so_slots, epso_slots) = LAYOUTS[layout]
    shardings = sharding_settings(so_slots, epso_slots)
    shardings = [*shardings[:-1], shardings[-1] | on_disk(0.6, tmp_path)]
    # A pipeline fills and drains with 4 microbatches per data rank; other layouts need only 2.
    batch = {"train__global_batch_tokens": (8 if "parallel__pp" in run else 4) * CONTEXT}
    trees = [tiny_tree("d", "r", **SMALL | batch | run | sharding) for sharding in shardings]
    trees[0].pop("recompute", None)
    poison = [sharding["optim__sharding"] == "so" for sharding in shardings]
    whole, *sharded = ranks(size, run_several, trees, poison, STEPS, **ALONE)[0]
    for sharding, result in zip(shardings[1:], sharded, strict=True):
        assert result.metrics == whole.metrics, sharding
        assert result.final == whole.final, sharding


LAYER_ORDER = {"offload__mode": "manual", "offload__order": "layer"}


@pytest.mark.parametrize(("size", "pp", "layers"), [(1, 1, 3), (2, 1, 3), (2, 2, 4)])
def test_layer_order_trains_to_the_same_bits(ranks, tmp_path, size, pp, layers):
    """With `offload.order = "layer"`, a rank computes a layer for all microbatches before it begins
    the next layer. Results are bit-identical to those of a run without offloading."""
    run = {"model__tie_embeddings": True, "model__num_layers": layers, "train__dtype": "bf16"}
    run["parallel__pp"] = pp
    changes: list[dict] = [
        {},
        {"offload__host_share": 0.5},
        {"offload__host_share": 1.0} | BLOCK | on_disk(0.5, tmp_path),
        {"offload__host_share": 1.0, "optim__cache_chunks": 12, "optim__sharding": "so"},
    ]
    changes = changes[:1] + [LAYER_ORDER | change for change in changes[1:]]
    trees = [tiny_tree("d", "r", **SMALL, **run, **change) for change in changes]
    poison = [False, True, True, True]
    whole, *others = ranks(size, run_several, trees, poison, STEPS, **ALONE)[0]
    for change, result in zip(changes[1:], others, strict=True):
        assert result.metrics == whole.metrics, change
        assert result.final == whole.final, change


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(("grad_dtype", "grad_bytes"), [("fp32", 4), ("bf16", 2)])
def test_layer_order_copies_each_gradient_once(microbatches, grad_dtype, grad_bytes):
    """For any number of microbatches, a step copies each chunk to the device at most twice, and the
    gradients of each chunk to the host once."""
    offload = LAYER_ORDER | {"offload__host_share": 1.0, "optim__cache_chunks": 8}
    offload |= {"offload__grad_dtype": grad_dtype}
    batch = {"train__global_batch_tokens": microbatches * CONTEXT, "optim__chunk_length": 2000}
    tree = tiny_tree("d", "r", **DENSE, **batch, **offload, model__num_layers=4)
    _, _, _, plan, _, states, updater = make_updater(tree)
    assert plan.microbatches_per_rank == microbatches
    before = states.memory.num_copied
    updater.run(1, [make_microbatch(number) for number in range(microbatches)])
    states.wait()
    gathers = planned_gathers(states.params.plan)
    uploaded = sum(4 * states.chunks[number].chunk.length for number in gathers)
    gradients = sum(grad_bytes * chunk.chunk.length for chunk in states.chunks)
    assert states.memory.num_copied - before == uploaded + gradients
    assert len(gathers) <= 2 * len(states.chunks) - 8


def test_updates_that_overflow_are_skipped_with_offloading(ranks, tmp_path):
    """In fp16, the loss scale is too large for the first update and for a later update. Runs with
    and without offloading must skip the same updates."""
    run = {"train__dtype": "fp16", "optim__loss_scale": 2.0**22, "train__deterministic": False}
    changes: list[dict] = [
        {"offload__host_share": 1.0} | on_disk(1.0, tmp_path),
        {"offload__host_share": 0.5} | LAYER_ORDER,
    ]
    changes = [{}, *({"offload__mode": "manual"} | change for change in changes)]
    trees = [tiny_tree("d", "r", **SMALL, **run, **change) for change in changes]
    whole, *others = ranks(1, run_several, trees, [False, True, True], **ALONE)[0]
    norms = [metrics[3] for metrics in whole.metrics]
    assert math.isnan(norms[0]) and 0 < sum(map(math.isnan, norms)) < len(norms)
    for result in others:
        for actual, expected in zip(result.metrics, whole.metrics, strict=True):
            assert actual == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_losses_agree_without_deterministic_mode(ranks):
    fast = {"train__deterministic": False, "train__threads": 1, "parallel__ep": 2}
    fast["train__global_batch_tokens"] = 4 * CONTEXT
    trees = [tiny_tree("d", "r", **SMALL | fast | sharding) for sharding in SHARDINGS]
    whole, *sharded = ranks(4, run_several, trees, [False] * len(trees), STEPS, **ALONE)[0]
    for result in sharded:
        for actual, expected in zip(result.metrics, whole.metrics, strict=True):
            assert actual[0] == pytest.approx(expected[0], abs=1e-6)


def test_run_resumes_under_another_residency_with_equal_evaluations_and_samples(
    ranks, tiny_data, tmp_path
):
    run = {
        "train__max_steps": 6,
        "optim__chunk_length": 2000,
        "train__eval_interval": 1,
        "train__sample_interval": 2,
        "train__sample_tokens": 4,
    }
    single, many, stop, log = tmp_path / "single", tmp_path / "many", 0, ""
    (expected,) = ranks(1, printed_by, tiny_tree(tiny_data, single, **run), **ALONE)
    for sharding in SHARDINGS[2:5]:
        stop += 2
        tree = tiny_tree(tiny_data, many, **run, **sharding, train__stop_at_step=stop)
        log += ranks(2, printed_by, tree, **ALONE)[0]
    assert_same_run(single, many)
    assert read_json_lines(single / "eval.jsonl") == read_json_lines(many / "eval.jsonl")
    samples, expected_samples = (re.findall("sample at step .*", text) for text in (log, expected))
    assert samples == expected_samples and len(samples) == 3


def host_tensors_in_collectives(tree: dict) -> list[str]:
    """Train. Offloaded states have buffers in host memory. Return the names of the collectives to
    which this rank passed such a buffer."""
    host, passed = {}, []
    record, new = collectives._record, Memory.new

    def new_and_note(self, length, dtype, tier=Tier.DEVICE):
        flat = new(self, length, dtype, tier)
        if tier is Tier.HOST:
            host[flat.untyped_storage()._cdata] = flat  # kept: no tensor reuses this key
        return flat

    def record_and_check(operation, group, payload, contribution=None):
        for tensor in (payload, contribution):
            if tensor is not None and tensor.untyped_storage()._cdata in host:
                passed.append(f"{operation} over {group.axes}")
        record(operation, group, payload, contribution)

    checking = mock.patch.object(collectives, "_record", record_and_check)
    with checking, mock.patch.object(Memory, "new", new_and_note):
        printed_by(tree)
    assert host, "no buffer is in the host's tier"
    return passed


def test_collectives_exchange_no_tensor_of_the_host(ranks, tiny_data, tmp_path):
    run = PIPELINE | {"model__tie_embeddings": True, "optim__sharding": "so"}
    run |= {"optim__chunk_length": 2000, "train__max_steps": 4}
    run |= {"offload__mode": "manual", "offload__host_share": 1.0}
    for stop in (2, 4):  # the second run loads the checkpoint of the first
        tree = tiny_tree(tiny_data, tmp_path, **run, train__stop_at_step=stop)
        assert ranks(4, host_tensors_in_collectives, tree, **ALONE) == [[]] * 4


def test_measurements_at_the_start_gather_their_parameters(ranks, tiny_data, tmp_path):
    """Dispatchers and recomputation are measured before parameters are gathered. The measurements
    must gather the parameters that they need."""
    run = {
        "parallel__ep": 2,
        "recompute__modules": ["block"],
        "train__deterministic": False,
        "train__threads": 1,
        "train__max_steps": 2,
        "optim__warmup_steps": 0,
        "optim__chunk_length": 2000,
    }
    for name, sharding in (("all", {}), ("cache", SHARDINGS[2])):
        train_on(ranks, 4, tiny_tree(tiny_data, tmp_path / name, **run, **sharding))
    actual, expected = (metrics_of(tmp_path / name) for name in ("cache", "all"))
    for a, b in zip(actual, expected, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)


def spoil_a_shard(tree: dict) -> str:
    """After step 1, set a parameter value in rank 1's shard of a chunk to NaN. Return a text with
    the error message of step 2 and the names of the chunk's parameters."""
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


def test_nan_in_a_shard_is_reported_with_its_rank(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path, **SMALL, **SHARDINGS[2], train__dtype="bf16")
    errors = ranks(2, spoil_a_shard, tree, **ALONE)
    assert errors[0] == errors[1]
    name = re.search(r"on rank 1 .* at step 2: parameter (\S+) is non-finite", errors[0])[1]
    assert f"'{name}'" in errors[0]


def count_step(tree: dict) -> dict:
    """Run two updates. Return for the second update: the collectives over dp, the bytes of each
    planned gather of a chunk, the bytes and the number of reductions, the actual and the planned
    bytes of resident parameters at each use, and these bytes after the update."""
    meter = TrafficMeter()
    _, _, _, plan, _, states, updater = make_updater(tree, recorder=meter)
    cache, visits = states.params, watch_uses(states)
    for step in (1, 2):
        meter.clear()
        updater.run(step, [make_microbatch(0)] * plan.microbatches_per_rank)
    sizes = {c.chunk.number: c.params.numel() * c.params.itemsize for c in states.chunks}
    return {
        "traffic": {name: count for (axes, name), count in meter.counts.items() if axes == "dp"},
        "fetched": [sizes[number] for number in planned_gathers(cache.plan)],
        "reduced": plan.microbatches_per_rank * sum(4 * c.chunk.length for c in states.chunks),
        "reductions": plan.microbatches_per_rank * len(states.chunks),
        "bytes": [resident for *_, resident in visits[-len(cache.plan.steps) :]],
        "planned": [sum(sizes[n] for n in step.resident) for step in cache.plan.steps],
        "between": resident_bytes(states),
    }


@pytest.mark.parametrize(
    ("size", "run"),
    [(2, {}), (4, PIPELINE), (4, PIPELINE | {"parallel__schedule": "gpipe"})],
    ids=["dp2", "pp2-1f1b", "pp2-gpipe"],
)
def test_run_fetches_the_chunks_of_its_plan(ranks, size, run):
    tree = tiny_tree("d", "r", **SMALL, **run, **SHARDINGS[3], train__dtype="bf16")
    for counts in ranks(size, count_step, tree, start_world=False):
        calls, total = counts["traffic"]["all_gather"]
        assert (calls, total) == (len(counts["fetched"]), sum(counts["fetched"]))
        assert counts["traffic"]["all_to_all"] == [counts["reductions"], counts["reduced"]]
        assert counts["bytes"] == counts["planned"]
        assert counts["between"] == {"params": 0, "grads": 0}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_too_few_slots_are_refused_by_plan(layout):
    size, run, fewest = LAYOUTS[layout]
    for sharding, enough in zip(("so", "epso"), fewest, strict=True):
        for slots in (1, enough - 1, enough):
            cache = {"optim__resident": "cache", "optim__cache_chunks": slots}
            config = make_config(
                tiny_tree("d", "r", **SMALL, **run, **cache, optim__sharding=sharding)
            )
            mesh = make_mesh(config.parallel, size)
            if slots in (0, enough):
                assert len(list(plan_ranks(config, mesh))) == mesh.pp * mesh.tp
                continue
            with pytest.raises(ConfigError) as refused:
                list(plan_ranks(config, mesh))
            message = str(refused.value)
            assert message.startswith(f"optim.cache_chunks = {slots}: the largest of ")
            assert f"use {enough} or more" in message and "\n" not in message


def test_too_few_slots_are_refused_before_the_rendezvous(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path / "run", **SMALL, **SHARDINGS[2])
    tree["optim"]["cache_chunks"] = 1
    with pytest.raises(RanksFailed, match="ConfigError: optim.cache_chunks = 1: the largest of"):
        train_on(ranks, 2, tree)
    assert not (tmp_path / "run").exists()
