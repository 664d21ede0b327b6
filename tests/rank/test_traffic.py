"""Tests of the planned collectives of an update. On each rank, the planned collectives equal the
collectives of a run."""

from __future__ import annotations

from typing import Any

import pytest

from optimus.config import make_config
from optimus.distributed.mesh import make_mesh
from optimus.distributed.world import start_world
from optimus.rank.profile import Profiled
from optimus.rank.traffic import TrafficRecorder, plan_traffic
from tests.kit.runs.tiny import CONTEXT, DENSE, tiny_tree
from tests.kit.runs.training import local_batch, make_updater

BF16 = {"train__dtype": "bf16"}
TIED = {"model__tie_embeddings": True}
SEQUENCE = {"parallel__tp": 2, "parallel__sequence_parallel": True}
ALLTOALL = {
    "parallel__ep": 2,
    "parallel__ep_dispatch": "alltoall",
    "model__router": "uniform",
}
PARAMETERS = {"optim__resident": "parameters"}
CACHE = {"optim__resident": "cache", "optim__cache_chunks": 3}
SEVERAL_STAGES = {"parallel__pp": 2, "parallel__virtual_stages": 2}
AT_ONCE = {"optim__overlap": False}
ON_HOST = {"offload__mode": "manual", "offload__host_share": 1.0, "optim__cache_chunks": 4}
ORDERED = {"train__deterministic": True}


SO, EPSO = ({"optim__sharding": sharding} for sharding in ("so", "epso"))

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [
        {},  # dp
        {**BF16, **AT_ONCE, "optim__grad_reduce_dtype": "bf16"},
        {**SO, **BF16},
        {**EPSO, **ORDERED},
        {**EPSO, **PARAMETERS, **BF16},
        {**EPSO, **CACHE},
        {**EPSO, **CACHE, **ORDERED, **TIED, "recompute__modules": ["block"]},
        {**EPSO, "optim__resident": "cache", "optim__frozen": ["embed.*", "blocks.0.*"]},
        {**EPSO, **BF16, **ON_HOST, "offload__host_share": 0.5},
        {**SO, **TIED, **ON_HOST, "offload__order": "layer"},
        {"parallel__tp": 2, **TIED},
        {**SEQUENCE, **BF16, "recompute__modules": ["norm", "attention", "moe"]},
        {**SEQUENCE, **DENSE, "recompute__modules": ["block"]},
        {"parallel__ep": 2, "parallel__ep_dispatch": "allgather"},
        {**ALLTOALL, **SO, **BF16, "recompute__modules": ["moe"]},
        {**ALLTOALL, **EPSO, **CACHE, "recompute__modules": ["experts"]},
        {"parallel__pp": 2, "parallel__schedule": "gpipe", **TIED},
        {"parallel__pp": 2, "parallel__schedule": "1f1b", **TIED, **ORDERED},
        {**SEVERAL_STAGES, "parallel__schedule": "interleaved", **BF16},
        {"parallel__pp": 2, "parallel__schedule": "zb-h1", **DENSE},
    ],
    4: [
        {**ALLTOALL, **SO, **BF16},
        {"parallel__ep": 2, **SO, **ORDERED},
        {"parallel__ep": 2, **SO, **PARAMETERS},
        {"parallel__ep": 2, "parallel__tp": 2, **EPSO, **BF16},
        {**SEQUENCE, **EPSO, **CACHE},
        {"parallel__pp": 2, **EPSO, **ORDERED, **ON_HOST},
        {"parallel__pp": 2, "parallel__schedule": "zb-h1", **BF16, **TIED},
        {"parallel__pp": 2, "parallel__schedule": "zb-h1", **EPSO, **PARAMETERS, **ORDERED},
        {**SEVERAL_STAGES, "parallel__schedule": "interleaved", **EPSO, **CACHE, **TIED},
        {**SEVERAL_STAGES, "parallel__schedule": "gpipe", **SO, **TIED, **SEQUENCE},
    ],
}


@pytest.mark.parametrize("size", LAYOUTS)
def test_planned_collectives_equal_those_of_a_run(ranks, size: int) -> None:
    trees = [tree_of(**layout) for layout in LAYOUTS[size]]
    of_ranks = ranks(size, record_updates, trees, start_world=False, timeout_s=120)
    for number, tree in enumerate(trees):
        config = make_config(tree)
        mesh, profiled = make_mesh(config.parallel, size), Profiled()
        for rank, of_layouts in enumerate(of_ranks):
            planned = plan_traffic(config, mesh, mesh.coordinate(rank), profiled)
            assert planned == of_layouts[number], (LAYOUTS[size][number], rank)


def tree_of(**settings: Any) -> dict[str, Any]:
    small = {"optim__chunk_length": 4096, "train__global_batch_tokens": 4 * CONTEXT}
    several = {"train__deterministic": False, "model__num_layers": 4}
    return tiny_tree("d", "r", **{**small, **several, **settings})


def record_updates(trees: list[dict[str, Any]]) -> list[list[tuple[str, str, int]]]:
    """Run two updates with each configuration on this rank, and assert that both updates call the
    same collectives. Return these collectives for each configuration, each as (axes, operation,
    bytes)."""
    world, result = start_world(device="cpu"), []
    for tree in trees:
        recorder = TrafficRecorder()
        setup = make_updater(tree, world, recorder=recorder)
        count, updates = setup.plan.num_microbatches, []
        for step in (1, 2):
            recorder.collectives.clear()
            setup.updater.run(step, local_batch(setup.groups, count, first=step * count))
            updates.append([*recorder.collectives])
        assert updates[0] == updates[1]
        result.append(updates[1])
    return result
