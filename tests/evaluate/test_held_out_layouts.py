"""Tests of the held-out loss on several layouts, with unequal numbers of batches on ranks."""

from __future__ import annotations

import pytest

from optimus.data.dataset import TokenDataset
from optimus.evaluate.held_out import HeldOutLoss, held_out_loss
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import make_updater

INSTANCES = ((7, 2), (2, 3), (0, 4))
"""Pairs (number of held-out instances, batch size). The number 0 selects all instances."""


def evaluated(tree: dict, held_out: str) -> list[HeldOutLoss]:
    made = make_updater(tree)
    everyone, data = made.groups.everyone, made.groups.data
    return [
        held_out_loss(
            made.model.cross_entropies,
            TokenDataset(held_out),
            batch_size,
            everyone,
            data.rank,
            data.size,
            count,
        )
        for count, batch_size in INSTANCES
    ]


@pytest.fixture(scope="module")
def single_process(rank_pool, tiny_data):
    tree = tiny_tree("d", "r", model__num_layers=4)
    return rank_pool.run(1, evaluated, tree, str(tiny_data / "eval"))[0]


@pytest.mark.parametrize(
    ("size", "layout", "exact"),
    [
        pytest.param(3, {}, True, id="dp3"),
        pytest.param(2, {"parallel__pp": 2}, True, id="pp2"),
        pytest.param(
            2,
            {
                "parallel__pp": 2,
                "parallel__schedule": "interleaved",
                "parallel__virtual_stages": 2,
            },
            True,
            id="pp2-interleaved",
        ),
        pytest.param(2, {"parallel__ep": 2}, False, id="ep2"),
        pytest.param(4, {"parallel__ep": 2}, False, id="dp2-ep2"),
        pytest.param(
            2,
            {"parallel__ep": 2, "parallel__ep_dispatch": "alltoall", "train__deterministic": False},
            False,
            id="ep2-alltoall",
        ),
    ],
)
def test_loss_is_that_of_a_single_process(ranks, tiny_data, single_process, size, layout, exact):
    tree = tiny_tree("d", "r", model__num_layers=4, train__global_batch_tokens=0, **layout)
    for result in ranks(size, evaluated, tree, str(tiny_data / "eval"), start_world=False):
        assert [r.tokens for r in result] == [r.tokens for r in single_process]
        if exact:
            assert result == single_process
        assert [r.loss for r in result] == pytest.approx([r.loss for r in single_process], rel=1e-6)
