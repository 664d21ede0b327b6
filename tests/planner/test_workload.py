"""Tests of the work of a step: it equals the profile of the real stages on the meta device."""

from __future__ import annotations

import random

import pytest

from optimus.config.load import load_config
from optimus.config.machine import FOLDER
from optimus.distributed.mesh import make_mesh
from optimus.errors import ConfigError
from optimus.model.flops import count_parameters
from optimus.planner.operations import (
    Exchange,
    FusedAttention,
    Pass,
    Product,
    ranks_of_token,
    repeated,
)
from optimus.planner.workload import stage_weights, step_of
from optimus.rank.profile import profile_stages

RUNS = FOLDER.parent / "run"


def totals(model: str, *overrides: str):
    """Return FLOPs, element-wise bytes and traffic of a microbatch, planned and profiled, for
    forward and backward."""
    settings = ["parallel.dp=1", "model.num_layers=2", "train.global_batch_tokens=0", *overrides]
    config = load_config(RUNS / f"{model}.toml", settings)
    mesh = make_mesh(config.parallel)
    (stage,) = step_of(config, mesh).stages
    planned = [Totals(), Totals()]
    for layers in stage:
        for op in layers.operations:
            planned[0].add(op, layers.number, False)
            planned[1].add(op, layers.number, True)
        for op in repeated(layers.operations, layers.recompute):
            planned[1].add(op, layers.number, False)
    (profile,) = profile_stages(config, mesh, mesh.coordinate(0)).values()
    profiled = [Totals(), Totals()]
    for result, uses in zip(profiled, (profile.forward, profile.backward), strict=True):
        for use in uses:
            result.flops += use.flops
            result.moved += use.moved
            for axes, operation, size in use.traffic:
                key = axes, operation
                result.traffic[key] = result.traffic.get(key, 0) + size
    return planned, profiled


class Totals:
    def __init__(self) -> None:
        self.flops, self.moved = 0.0, 0.0
        self.traffic: dict[tuple[str, str], float] = {}

    def add(self, op, number: float, backward: bool) -> None:
        if isinstance(op, Product):
            self.flops += number * (2 if backward else 1) * op.flops
        elif isinstance(op, FusedAttention):
            # The profile counts masked scores.
            self.flops += number * (5 if backward else 2) * 2 * op.product_flops
            self.moved += number * (op.backward_bytes if backward else op.forward_bytes)
        elif isinstance(op, Pass):
            self.moved += number * (op.backward_bytes if backward else op.forward_bytes)
        elif isinstance(op, Exchange):
            size = op.backward_bytes if backward else op.forward_bytes
            key = op.axis, op.backward_name if backward else op.name
            if size:
                self.traffic[key] = self.traffic.get(key, 0) + number * size


CASES = [
    ("mula-1b", ()),
    ("mula-7b-a1b", ()),
    ("mula-1b", ("parallel.tp=2",)),
    ("mula-1b", ("parallel.tp=2", "parallel.sequence_parallel=true")),
    ("mula-7b-a1b", ("parallel.tp=2",)),
    ("mula-7b-a1b", ("parallel.tp=2", "parallel.sequence_parallel=true")),
    ("mula-7b-a1b", ("parallel.ep=4", "parallel.ep_dispatch=allgather")),
]


@pytest.mark.parametrize(("model", "overrides"), CASES)
def test_planned_work_is_that_of_the_profile(model, overrides):
    """FLOPs within 0.1 %. Traffic within 3 %: the plan leaves out routing weights and scalars."""
    for planned, profiled in zip(*totals(model, *overrides), strict=True):
        assert planned.flops == pytest.approx(profiled.flops, rel=1e-3)
        large = {key: size for key, size in profiled.traffic.items() if size > 1e6}
        assert planned.traffic == pytest.approx(large, rel=0.03)


def test_planned_bytes_are_near_those_of_the_profile():
    """The profile counts views and whole tables as bytes; the plan does not. Experts are left out:
    the profile counts their products' operands."""
    for planned, profiled in zip(*totals("mula-1b"), strict=True):
        assert 0.6 < planned.moved / profiled.moved < 1.05


def test_recomputation_is_that_of_the_profile():
    modules = 'recompute.modules=["norm", "attention", "moe"]'
    (_, backward), (_, profiled) = totals("mula-7b-a1b", modules)
    assert backward.flops == pytest.approx(profiled.flops, rel=0.02)


def test_alltoall_sends_a_token_once_to_each_of_its_ranks():
    draws, (experts, k, ep) = random.Random(0), (64, 8, 4)
    counts = [
        len({expert * ep // experts for expert in draws.sample(range(experts), k)})
        for _ in range(20000)
    ]
    assert ranks_of_token(experts, k, ep) == pytest.approx(sum(counts) / len(counts), rel=0.01)
    assert ranks_of_token(8, 8, 4) == 4 and ranks_of_token(64, 8, 1) == 1
    assert ranks_of_token(64, 1, 16) == pytest.approx(1.0)


@pytest.mark.parametrize("run", ["mula-1b", "mula-7b-a1b", "mula-220b-a10b"])
def test_parameters_of_the_stages_are_those_of_the_model(run):
    config = load_config(RUNS / f"{run}.toml", [])
    mesh = make_mesh(config.parallel)
    total = sum(w.experts * mesh.ep + w.others for w in stage_weights(config, mesh))
    assert total == pytest.approx(count_parameters(config.model)[0], rel=1e-3)


def reductions(*overrides: str):
    """Return the collectives of a step of 8 microbatches, dp = 4 and ep = 2, with the bytes for
    each parameter that is not of an expert."""
    settings = ["parallel.dp=4", "parallel.ep=2", "train.microbatch_size=1", *overrides]
    settings += ["optim.grad_reduce_dtype=fp32", "optim.grad_dtype=fp32"]
    batch = f"train.global_batch_tokens={8 * 8 * 2048}"
    config = load_config(RUNS / "mula-7b-a1b.toml", [*settings, "train.seq_len=2048", batch])
    mesh = make_mesh(config.parallel)
    step = step_of(config, mesh)
    (weights,) = stage_weights(config, mesh)
    assert step.microbatches == 8
    return [
        (r.axis, r.name, round(r.size_bytes / weights.others, 3), r.overlaps, r.repeats)
        for r in step.reductions[len(step.reductions) // 2 :]
    ]


def test_reductions_are_those_of_the_engine():
    """With `so`, two ep ranks have the same shard: each receives half of its sum in the reduction
    over dp x ep, and they gather the halves at the end."""
    gather = ("dp x ep", "all_gather", 2, "forward", 1)
    assert reductions("optim.sharding=epso") == [
        ("dp x ep", "reduce_scatter", 4, "backward", 1),
        gather,
    ]
    assert reductions("optim.sharding=none") == [("dp x ep", "all_reduce", 4, "backward", 1)]
    resident = "optim.resident=parameters"
    assert reductions("optim.sharding=epso", resident) == [
        ("dp x ep", "reduce_scatter", 4, "nothing", 8),
        gather,
    ]
    assert reductions("optim.sharding=epso", "train.deterministic=true") == [
        ("dp x ep", "all_to_all", 4, "nothing", 8),
        gather,
    ]


def test_ranks_with_the_same_shard_gather_its_sum():
    *_, reduction, pieces, parameters = reductions("optim.sharding=so")
    assert reduction == ("dp x ep", "reduce_scatter", 4, "backward", 1)
    assert pieces == ("ep", "all_gather", 1, "nothing", 1)  # 4 bytes of 1/4 of the parameters
    assert parameters == ("dp", "all_gather", 2, "forward", 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["offload.mode=manual", "offload.host_share=0.5"], "offload.mode = 'manual': the time"),
        (["optim.resident=cache", "optim.cache_chunks=40"], "optim.cache_chunks = 40: the gathers"),
    ],
)
def test_states_that_move_during_a_step_are_refused(settings, message):
    config = load_config(RUNS / "mula-7b-a1b.toml", ["parallel.dp=4", *settings])
    with pytest.raises(ConfigError, match=message):
        step_of(config, make_mesh(config.parallel))
