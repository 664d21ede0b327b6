"""Tests of the planned memory of ranks whose experts have unequal loads. The planned memory equals
the memory of real steps."""

from __future__ import annotations

import math

import pytest

from optimus.config import make_config
from optimus.distributed.mesh import make_mesh
from optimus.parallel.expert_load import arrivals, largest_imbalance, rank_imbalances
from optimus.planner.memory import RankProfiles, rank_memory
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import local_batch, make_updater
from tests.planner.test_memory import WIDE, _Peak

UNBALANCED = {
    **WIDE,
    "model__num_experts": 4,
    "model__num_experts_per_tok": 1,
    "model__embedding_init_std": 1e-4,  # most tokens choose the same experts
    "model__intermediate_size": 512,
    "model__num_layers": 2,
    "train__global_batch_tokens": 2 * 256,
    "train__seed": 3,
}


def measure(tree: dict) -> tuple[int, int, int, list[float]]:
    """Run an update on this rank. Return the measured bytes of activations, the bytes planned for
    the expert loads of the update, the bytes planned for equal loads, and the load of this rank in
    each MoE layer, relative to an equal share."""
    config, _, groups, plan, _, states, updater = make_updater(tree)
    mesh, coordinate = groups.mesh, groups.coordinate
    count = plan.microbatches_per_rank
    peak = _Peak(states.memory)
    with peak:
        result = updater.run(1, local_batch(groups, 2, 8, config.train.seq_len))
    loads = {
        layer: rank_imbalances(rows, mesh.ep)[coordinate.ep]
        for layer, rows in zip(config.model.sparse_layers, result.expert_rows.tolist(), strict=True)
    }
    profiles = RankProfiles(config, mesh, coordinate, "cpu").at(loads)
    equal = rank_memory(config, mesh, coordinate, count, "cpu")
    planned = rank_memory(config, mesh, coordinate, count, "cpu", profiles)
    tracked = peak.most - planned.states
    return tracked, planned.activations, equal.activations, list(loads.values())


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        pytest.param(1, {}, id="one"),
        pytest.param(2, {"parallel__ep": 2, "parallel__ep_dispatch": "allgather"}, id="allgather"),
        pytest.param(2, {"parallel__ep": 2, "parallel__ep_dispatch": "alltoall"}, id="alltoall"),
    ],
)
def test_planned_activations_of_an_unbalanced_run(ranks, size: int, settings: dict) -> None:
    tree = tiny_tree("d", "r", **{**UNBALANCED, **settings})
    results = ranks(size, measure, tree, start_world=False)
    for tracked, planned, equal, loads in results:
        assert planned == pytest.approx(tracked, rel=0.05)
        if size > 1:
            assert not 0.8 < sum(loads) / len(loads) < 1.25 and not 0.8 < equal / tracked < 1.25


def test_memory_on_accelerators_depends_on_the_tokens_that_arrive() -> None:
    """On accelerators, the host does not know the experts of the tokens. With `allgather`, all
    tokens arrive on each rank, so the memory does not depend on the loads. With `alltoall`, the
    memory grows with the number of tokens that arrive."""

    def needed(dispatch: str, imbalance: float, device: str = "cuda") -> int:
        layout = {"parallel__ep": 2, "parallel__ep_dispatch": dispatch}
        config = make_config(tiny_tree("d", "r", **{**UNBALANCED, **layout}))
        mesh = make_mesh(config.parallel)
        memory = rank_memory(config, mesh, mesh.coordinate(0), 2, device, imbalance=imbalance)
        return memory.activations

    assert needed("allgather", 1.0) == needed("allgather", 2.0)
    few, some, most = (needed("alltoall", imbalance) for imbalance in (0.5, 1.0, 2.0))
    assert few < some < most == needed("alltoall", 2.0, "cpu")
    assert needed("alltoall", 1.5) == pytest.approx((some + most) / 2, rel=1e-3)  # K = 1


def test_loads_of_ranks_by_hand() -> None:
    assert rank_imbalances([3, 1, 0, 4], 2) == [1.0, 1.0]
    assert rank_imbalances([6, 1, 0, 1], 2) == [1.75, 0.25]
    assert rank_imbalances([6, 1, 0, 1], 1) == [1.0]
    assert largest_imbalance(8, 2, 2) == 2.0 and largest_imbalance(8, 2, 8) == 4.0


def test_arrivals_by_hand() -> None:
    # One of the 6 pairs of 4 experts contains no expert of the rank.
    assert arrivals(4, 2, 2) == pytest.approx(5 / 6)
    assert arrivals(240, 8, 12) == pytest.approx(1 - math.comb(220, 8) / math.comb(240, 8))
    # Weights x^2, 4x and 1 of pairs with 2, 1 and 0 experts; the mean 1.4 gives x = 3.3601.
    assert arrivals(4, 2, 2, 1.4) == pytest.approx(1 - 1 / (3.3601**2 + 4 * 3.3601 + 1), rel=1e-3)
    assert arrivals(64, 1, 8, 2.5) == pytest.approx(2.5 / 8)  # a token sends a single row
    assert (arrivals(64, 8, 4, 0.0), arrivals(64, 8, 4, 4.0), arrivals(4, 4, 2)) == (0, 1, 1)
    values = [arrivals(64, 8, 4, imbalance / 10) for imbalance in range(1, 40)]
    assert values == sorted(values)
