"""Tests of the planned memory of a training step. The planned memory equals the memory of real
steps."""

from __future__ import annotations

import pytest

from optimus.chunks.memory import Memory, Tier
from optimus.config import make_config
from optimus.distributed.mesh import Mesh
from optimus.planner.fit import least_bytes, most_bytes
from optimus.planner.memory import rank_memory
from optimus.rank.states import plan_rank
from optimus.rank.tensor_tracker import TensorTracker
from tests.kit.runs.tiny import DENSE, tiny_tree
from tests.kit.runs.training import local_batch, make_updater

WIDE = {
    "model__hidden_size": 128,
    "model__intermediate_size": 192,
    "model__num_layers": 4,
    "train__seq_len": 256,
    "train__global_batch_tokens": 4 * 256,
    "optim__chunk_length": 100_000,
    "train__deterministic": False,
}


SHORT = {"train__seq_len": 8, "train__global_batch_tokens": 4 * 8}
"""Settings with fewer activations than parameters."""


class _Peak(TensorTracker):
    """Tracker of the largest number of bytes on the emulated device (`most`). The tracker counts
    the device buffers of `memory` and all tensors that operations create."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory, self._host = memory, memory.num_bytes[Tier.HOST]
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(function, types, args, kwargs)
        num_bytes = self._memory.num_bytes
        # `live` contains the buffers that the step has made in host memory.
        made = num_bytes[Tier.HOST] - self._host
        self.most = max(self.most, num_bytes[Tier.DEVICE] + self.live - made)
        return out


def measure(tree: dict) -> tuple[int, int, int, int]:
    """Run two updates. Return four numbers of bytes for this rank: the lower bound, the planned
    bytes, the upper limit, and the measured maximum."""
    config, _, groups, plan, _, states, updater = make_updater(tree)
    planned = rank_memory(config, groups.mesh, groups.coordinate, plan.microbatches_per_rank, "cpu")
    peak = _Peak(states.memory)
    with peak:
        for step in (1, 2):
            updater.run(step, local_batch(groups, 4, first=4 * step, length=config.train.seq_len))
    settings = config, groups.mesh, plan.microbatches_per_rank
    least = least_bytes(*settings, "device")(groups.coordinate)
    # The tracker does not count the copies of gloo, because they are not operations of torch.
    return (
        least,
        planned.device - planned.copies,
        most_bytes(*settings)(groups.coordinate),
        peak.most,
    )


def offload(share: float, slots: int, **more) -> dict:
    return {
        "offload__mode": "manual",
        "offload__host_share": share,
        "optim__cache_chunks": slots,
        **more,
    }


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        pytest.param(1, {}, id="one"),
        pytest.param(1, DENSE | {"model__tie_embeddings": True}, id="dense-tied"),
        pytest.param(1, {"recompute__modules": ["block"]}, id="recomputed"),
        pytest.param(1, offload(1.0, 10), id="host"),
        pytest.param(1, offload(0.5, 6), id="half-on-host"),
        pytest.param(1, offload(1.0, 10, offload__order="layer"), id="host-by-layer"),
        pytest.param(1, {"offload__grad_dtype": "bf16"}, id="rounded"),
        pytest.param(1, offload(1.0, 10, offload__grad_dtype="bf16"), id="host-rounded"),
        pytest.param(2, {"parallel__pp": 2}, id="pp2"),
        pytest.param(2, {"parallel__pp": 2, "parallel__schedule": "zb-h1"}, id="pp2-zb"),
        pytest.param(2, {"optim__sharding": "so"}, id="dp2"),
        pytest.param(2, {"optim__sharding": "so", "optim__resident": "cache"}, id="dp2-cache"),
        pytest.param(2, {"train__deterministic": True, "optim__sharding": "so"}, id="dp2-exact"),
        pytest.param(
            2,
            offload(1.0, 10, train__deterministic=True, optim__sharding="so"),
            id="dp2-exact-host",
        ),
    ],
)
def test_the_planned_memory_is_that_of_a_step(ranks, size: int, settings: dict) -> None:
    tree = tiny_tree("d", "r", **{**WIDE, **settings})
    assert make_config(tree)
    for least, planned, limit, most in ranks(size, measure, tree, start_world=False):
        assert 0.94 * planned < most <= planned < limit
        assert 0 < least <= most


def test_copies_of_gloo_are_those_of_whole_buffers() -> None:
    """The only chunk is reduced after the backward, when no activations exist any more. The peak is
    then gloo's copy of the chunk's fp32 gradients, which is larger than gloo's copy of the gathered
    parameters."""
    settings = {**SHORT, "optim__chunk_length": 1 << 24}
    for resident, dtype in (("all", "fp32"), ("cache", "fp32"), ("all", "bf16")):
        optim = {"optim__sharding": "so", "optim__resident": resident}
        tree = tiny_tree("d", "r", **{**WIDE, **DENSE, **settings, **optim, "train__dtype": dtype})
        config = make_config(tree)
        mesh = Mesh(1, 2, 1, 1)
        coordinate = mesh.coordinate(0)
        (chunk,) = plan_rank(config, mesh, coordinate).engine.chunks
        memory = rank_memory(config, mesh, coordinate, 2, "cpu", product_code=1e6)
        assert memory.activations + memory.copies == 4 * chunk.chunk.length
        assert rank_memory(config, mesh, coordinate, 2).copies == 0
        # 4 shapes of forward, and twice as many of backward
        assert memory.code == 12e6


def test_copies_during_the_backward_are_added_to_activations() -> None:
    """Gradients of the last blocks are reduced while the activations of the first blocks still
    exist, so the planned bytes contain these activations and gloo's copies of the gradients."""
    optim = {"optim__sharding": "so", "optim__chunk_length": 100_000, "train__dtype": "bf16"}
    config = make_config(tiny_tree("d", "r", **{**WIDE, **DENSE, **SHORT, **optim}))
    without = config.model_copy(
        update={"optim": config.optim.model_copy(update={"overlap": False})}
    )
    mesh = Mesh(1, 2, 1, 1)
    coordinate = mesh.coordinate(0)
    lengths = sorted(c.chunk.length for c in plan_rank(config, mesh, coordinate).engine.chunks)
    assert len(lengths) > 2
    overlapping, after = (
        memory.activations + memory.copies
        for memory in (rank_memory(c, mesh, coordinate, 2, "cpu") for c in (config, without))
    )
    assert after == 4 * lengths[-1]
    assert overlapping > max(2 * sum(lengths), 4 * sum(lengths[-2:]))
