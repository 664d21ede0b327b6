"""Tests of the workload of a step (operations, bytes and collectives). The workload equals the
profile of the real stages on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimus.config import OffloadConfig
from optimus.config.load import load_config
from optimus.config.machine import FOLDER
from optimus.distributed.mesh import Coordinate, Mesh, make_mesh
from optimus.errors import ConfigError
from optimus.model.flops import count_parameters
from optimus.planner.workload import offloaded_repeats, stage_weights, step_of
from optimus.rank.operations import Exchange, FusedAttention, Operation, Pass, Product
from optimus.rank.profile import profile_stages
from tests.kit.runs.tiny import DENSE, tiny_tree
from tests.kit.runs.training import local_batch, make_updater

RUNS = FOLDER.parent / "run"


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("mula-1b", ()),
        ("mula-7b-a1b", ('recompute.modules=["norm", "attention", "moe"]',)),
        ("mula-7b-a1b", ("parallel.tp=2", "parallel.sequence_parallel=true")),
        ("mula-7b-a1b", ("parallel.ep=4", "parallel.ep_dispatch=allgather", "parallel.pp=2")),
    ],
)
def test_work_of_a_step_is_that_of_the_profile_of_its_stages(model, overrides):
    """The operations and collectives of a planned step equal those in the profile of the real
    stages (`profile_stages`). The memory of a plan is computed from this profile."""
    settings = ["parallel.dp=1", "model.num_layers=4", "train.global_batch_tokens=0", *overrides]
    config = load_config(RUNS / f"{model}.toml", settings)
    mesh = make_mesh(config.parallel)
    step = step_of(config, mesh)
    for pp in range(mesh.pp):
        (profile,) = profile_stages(config, mesh, Coordinate(pp, 0, 0, 0)).values()
        for uses, name in ((profile.forward, "forward"), (profile.backward, "backward")):
            planned, profiled = Totals(), Totals()
            for layers in step.stages[pp]:
                for op in getattr(layers, name):
                    planned.add(op, layers.number)
            for use in uses:
                for op in use.operations:
                    profiled.add(op)
                for collective in use.traffic:
                    profiled.add(Exchange(*collective))
            assert planned.flops == pytest.approx(profiled.flops, rel=1e-9)
            assert planned.moved == pytest.approx(profiled.moved, rel=0.01)
            assert planned.traffic == profiled.traffic


class Totals:
    def __init__(self) -> None:
        self.flops, self.moved = 0.0, 0.0
        self.traffic: dict[tuple[str, str], float] = {}

    def add(self, op: Operation, number: float = 1.0) -> None:
        if isinstance(op, Product | FusedAttention):
            self.flops += number * op.flops
        if isinstance(op, Pass | FusedAttention):
            self.moved += number * op.num_bytes
        if isinstance(op, Exchange):
            key = op.axis, op.name
            self.traffic[key] = self.traffic.get(key, 0) + number * op.num_bytes


@pytest.mark.parametrize("run", ["mula-1b", "mula-7b-a1b", "mula-220b-a10b"])
def test_parameters_of_the_stages_are_those_of_the_model(run):
    config = load_config(RUNS / f"{run}.toml", [])
    mesh = make_mesh(config.parallel)
    total = sum(w.experts * mesh.ep + w.others for w in stage_weights(config, mesh))
    assert total == pytest.approx(count_parameters(config.model)[0], rel=1e-3)


def test_an_update_reads_and_writes_states_gradients_and_parameters():
    """For each parameter that a rank updates, this rank reads and writes the fp32 master and
    moments (24 bytes), writes the bf16 parameter (2 bytes), and reads the bf16 gradient twice, for
    the update and for the norm (2 bytes each). For each parameter of the model, the rank reads and
    clears the fp32 gradient (8 bytes)."""
    config = load_config(RUNS / "mula-7b-a1b.toml", ["optim.sharding=epso"])
    update = step_of(config, Mesh(dp=384)).update
    parameters = count_parameters(config.model)[0]
    assert update.optimizer == pytest.approx(28 * parameters / 384, rel=1e-3)
    assert update.gradients == pytest.approx((2 / 384 + 8) * parameters, rel=1e-3)


def reductions(*overrides: str) -> dict[tuple[str, str, str], float]:
    """Return the collectives of a step with 8 microbatches, dp = 4 and ep = 2.

    Keys: (axes, name, the phase with which the collective overlaps). Values: bytes of the
    collective divided by the number of parameters that the process group shares.
    """
    settings = ["parallel.dp=4", "parallel.ep=2", "train.microbatch_size=1", *overrides]
    settings += ["optim.grad_reduce_dtype=fp32", "optim.grad_dtype=fp32"]
    batch = f"train.global_batch_tokens={8 * 8 * 2048}"
    config = load_config(RUNS / "mula-7b-a1b.toml", [*settings, "train.seq_len=2048", batch])
    mesh = make_mesh(config.parallel)
    step = step_of(config, mesh)
    (weights,) = stage_weights(config, mesh)
    assert step.microbatches == 8
    parameters = {"dp": weights.experts, "dp x ep": weights.others, "ep": weights.others}
    return {
        (r.axis, r.name, r.overlaps): r.size_bytes * r.repeats / parameters[r.axis]
        for r in step.reductions
    }


def both(name: str, overlaps: str, size: float) -> dict[tuple[str, str, str], object]:
    """Return two entries of the result of `reductions`: for expert parameters, and for all other
    parameters. The values are approximate, because chunks are padded."""
    return {(axis, name, overlaps): pytest.approx(size, rel=0.02) for axis in ("dp", "dp x ep")}


def test_reductions_are_those_of_the_engine():
    gathers = both("all_gather", "forward", 2)
    at_once = both("reduce_scatter", "backward", 4)
    assert reductions("optim.sharding=epso") == at_once | gathers
    assert reductions("optim.sharding=none") == both("all_reduce", "backward", 4)
    resident = "optim.resident=parameters"
    each = both("reduce_scatter", "nothing", 8 * 4)
    assert reductions("optim.sharding=epso", resident) == each | gathers
    assert reductions("optim.sharding=epso", "offload.grad_dtype=bf16") == each | gathers
    ordered = both("all_to_all", "nothing", 8 * 4)
    assert reductions("optim.sharding=epso", "train.deterministic=true") == ordered | gathers


def test_ranks_with_the_same_shard_gather_its_sum():
    """With `so`, two ep ranks have the same shard of the optimizer states. The reduce_scatter over
    dp x ep gives each of them half of the summed gradients of this shard. At the end of the step,
    the two ranks gather the halves."""
    sums = reductions("optim.sharding=so")
    # 4 bytes of 1/4 of the parameters
    assert sums.pop(("ep", "all_gather", "nothing")) == pytest.approx(1, rel=0.02)
    del sums["dp", "all_gather", "forward"]  # gather of all parameters
    assert sums == both("reduce_scatter", "backward", 4)


def test_gathers_of_a_limited_cache_are_timed():
    """With a cache of 8 chunks, ranks gather the parameters again for each microbatch. The times of
    a step must contain these gathers."""
    limited = ["optim.sharding=epso", "optim.resident=cache", "optim.cache_chunks=8"]
    sums = reductions(*limited)
    assert sums["dp", "all_gather", "passes"] > 8 * 2
    whole = reductions("optim.sharding=epso", "optim.resident=cache")
    assert whole["dp", "all_gather", "forward"] == pytest.approx(2, rel=0.02)


def test_offloading_is_refused():
    settings = ["parallel.dp=4", "offload.mode=manual", "offload.host_share=0.5"]
    config = load_config(RUNS / "mula-7b-a1b.toml", settings)
    with pytest.raises(ConfigError, match="offload.mode = 'manual': the time"):
        step_of(config, make_mesh(config.parallel))


class _GradientBytes(TorchDispatchMode):
    """Counts the bytes of two kinds of tensors: tensors that are set to zero, and tensors that are
    checked for values that are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._overloadpacket in (torch.ops.aten.aminmax, torch.ops.aten.zero_):
            self.total += args[0].nbytes
        return function(*args, **(kwargs or {}))


def checked_and_cleared(tree: dict) -> tuple[float, float]:
    """Return two numbers of bytes for this rank, the planned and the counted bytes of the gradients
    that an update checks and clears."""
    config, _, groups, plan, _, states, updater = make_updater(tree)
    batch = local_batch(groups, 4, length=config.train.seq_len)
    updater.run(1, batch)
    counted = _GradientBytes()
    with counted:
        updater.run(2, batch)
    states.wait()
    rounds = "bf16" if config.offload.rounds_gradients(config.train) else "fp32"
    offload = OffloadConfig(order=config.offload.order, grad_dtype=rounds)
    off = config.model_copy(update={"offload": offload})
    update = step_of(off, groups.mesh).update
    share = 1 - config.offload.host_share
    repeats = offloaded_repeats(off, groups.mesh, plan.microbatches_per_rank)
    return update.share(share, *repeats).gradients, counted.total


OFFLOADED = {"offload__mode": "manual", "offload__host_share": 1.0}
HALF = {"offload__mode": "manual", "offload__host_share": 0.5}
EXACT = {"train__deterministic": True}


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        pytest.param(1, {}, id="on-device"),
        pytest.param(1, OFFLOADED, id="offloaded"),
        pytest.param(1, OFFLOADED | {"offload__order": "layer"}, id="by-layer"),
        pytest.param(1, EXACT, id="exact"),
        pytest.param(1, HALF | {"train__dtype": "bf16"}, id="half"),
        pytest.param(1, HALF, id="half-in-fp32"),
        pytest.param(2, HALF | {"optim__sharding": "so"}, id="half-of-two"),
        pytest.param(2, {"optim__sharding": "so", "optim__resident": "parameters"}, id="freed"),
        pytest.param(2, {"optim__sharding": "so", "optim__resident": "cache"}, id="cache"),
        pytest.param(2, {"optim__sharding": "so"}, id="kept"),
    ],
)
def test_gradients_are_checked_and_cleared_as_often_as_planned(ranks, size, settings):
    """Gradients that are freed or copied to the host after each backward are checked and cleared in
    each microbatch. All other gradients are checked and cleared once in a step."""
    sizes = {
        "model__hidden_size": 128,
        "train__seq_len": 16,
        "train__microbatch_size": 1,
        "train__global_batch_tokens": 4 * 16,
        "optim__chunk_length": 50_000,
    }
    tree = tiny_tree("d", "r", **DENSE | sizes | {"train__deterministic": False} | settings)
    for planned, counted in ranks(size, checked_and_cleared, tree, start_world=False):
        assert planned == pytest.approx(counted, rel=0.15)  # chunks are padded
