"""Tests of the computed number and bytes of the collectives of model states.

The computed values equal those of the planned list of collectives, and this list equals the
collectives of a run (tests/rank/test_traffic.py)."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from optimus.config import Config, make_config
from optimus.data.batch import plan_batch
from optimus.distributed.mesh import Coordinate, Mesh, make_mesh
from optimus.planner.state_traffic import StateTraffic
from optimus.planner.states import stages_of
from optimus.rank.profile import Profiled, profile_stages
from optimus.rank.traffic import plan_traffic
from tests.kit.runs.tiny import CONTEXT, tiny_tree

Totals = Counter[tuple[str, str, str]]


def counted(config: Config, mesh: Mesh, pp: int, extrapolates: bool = False) -> Totals:
    """Return the number ("calls") and the bytes of the collectives of states on stage `pp`, by
    (axes, name, "calls" or "bytes")."""
    microbatches = plan_batch(config.train, mesh.num_data_ranks).microbatches_per_rank
    totals: Totals = Counter()
    stages, traffic = stages_of(config, mesh), StateTraffic(config, extrapolates)
    for sums in traffic.of_rank(config, mesh, stages, pp, microbatches):
        totals[sums.axis, sums.name, "calls"] += sums.repeats
        totals[sums.axis, sums.name, "bytes"] += round(sums.repeats * sums.size_bytes)
    return totals


def listed(config: Config, mesh: Mesh, pp: int, profiled: Profiled) -> Totals:
    """Return the same values as `counted`, but computed from the planned list of all collectives,
    from which the collectives of forward and backward passes are subtracted."""
    coordinate = Coordinate(pp, 0, 0, 0)
    microbatches = plan_batch(config.train, mesh.num_data_ranks).microbatches_per_rank
    totals: Totals = Counter()
    for axes, name, num_bytes in plan_traffic(config, mesh, coordinate, profiled):
        totals[axes, name, "calls"] += 1
        totals[axes, name, "bytes"] += num_bytes
    for stage in profile_stages(config, mesh, coordinate, profiled).values():
        weights = () if stage.weights is None else (stage.weights,)
        for use in (*stage.forward, *stage.backward, *weights):
            for axes, name, num_bytes in use.traffic:
                totals[axes, name, "calls"] -= microbatches
                totals[axes, name, "bytes"] -= microbatches * num_bytes
    return +Counter({key: n for key, n in totals.items() if key[0] not in ("pp", "all ranks")})


def test_collectives_of_random_layouts_equal_those_of_the_list() -> None:
    choose = random.Random(1)
    for _ in range(25):
        layout = random_layout(choose)
        config = make_config(tiny_tree("d", "r", **layout))
        mesh, profiled = make_mesh(config.parallel), Profiled()
        for pp in range(mesh.pp):
            assert counted(config, mesh, pp) == listed(config, mesh, pp, profiled), layout


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_gathers_of_a_limited_cache_repeat(schedule: str) -> None:
    settings = {
        "parallel__pp": 2,
        "parallel__dp": 2,
        "parallel__schedule": schedule,
        "optim__sharding": "epso",
        "optim__resident": "cache",
        "optim__chunk_length": 4096,
        "optim__cache_chunks": 5,
        "train__global_batch_tokens": 2 * 37 * CONTEXT,
        "model__num_layers": 8,
    }
    config = make_config(tiny_tree("d", "r", **settings))
    mesh = make_mesh(config.parallel)
    for pp in range(2):
        exact = counted(config, mesh, pp)
        assert counted(config, mesh, pp, extrapolates=True) == exact


def random_layout(choose: random.Random) -> dict[str, Any]:
    pp, virtual = choose.choice([(1, 1), (2, 1), (2, 2), (3, 2)])
    schedules = ["interleaved", "gpipe"] if virtual > 1 else ["1f1b", "gpipe", "zb-h1"]
    dp, ep, tp = choose.choice([1, 2, 3]), choose.choice([1, 2]), choose.choice([1, 2])
    sharding = choose.choice(["none", "so", "epso"])
    resident = choose.choice(["all", "parameters", "cache"])
    if resident == "cache" and sharding == "none":
        sharding = "epso"
    settings = {
        "parallel__pp": pp,
        "parallel__dp": dp,
        "parallel__ep": ep,
        "parallel__tp": tp,
        "parallel__sequence_parallel": tp > 1 and choose.random() < 0.5,
        "parallel__virtual_stages": virtual,
        "parallel__schedule": choose.choice(schedules),
        "optim__sharding": sharding,
        "optim__resident": resident,
        "optim__chunk_length": choose.choice([4096, 20000, 1 << 20]),
        "optim__overlap": choose.random() < 0.5,
        "train__deterministic": choose.random() < 0.3,
        "train__dtype": choose.choice(["fp32", "bf16"]),
        "train__global_batch_tokens": dp * ep * choose.choice([4, 7]) * CONTEXT,
        "model__num_layers": choose.choice([6, 9]),
        "model__tie_embeddings": choose.random() < 0.5,
    }
    if choose.random() < 0.2:
        settings["optim__frozen"] = ["embed.*", "blocks.[013].*"]
    if resident == "cache" and choose.random() < 0.7:
        settings["optim__cache_chunks"] = choose.choice([9, 12])
    return settings
