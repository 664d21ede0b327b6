"""Whole runs that compute activations again: the bits of those that keep them."""

from __future__ import annotations

import pytest

from tests.helpers.runs import assert_same_run, train_on
from tests.helpers.tiny import DENSE, tiny_tree

FEW = {"train__max_steps": 2, "optim__warmup_steps": 1, "model__num_layers": 4}
ALL = ["norm", "attention", "moe"]
TIED = {"model__tie_embeddings": True}
ZERO_BUBBLE = {"parallel__pp": 2, "parallel__schedule": "zb-h1"}


@pytest.mark.parametrize(
    ("size", "modules", "layout"),
    [
        pytest.param(
            1, ["block"], DENSE | TIED | {"data__document_mask": True}, id="block-dense-tied-masked"
        ),
        pytest.param(2, ALL, ZERO_BUBBLE, id="zb-h1"),
        pytest.param(2, ["norm"], ZERO_BUBBLE | TIED | {"train__dtype": "bf16"}, id="zb-h1-bf16"),
        pytest.param(
            4,
            ["moe", "norm"],
            {
                "parallel__ep": 2,
                "parallel__tp": 2,
                "parallel__ep_dispatch": "alltoall",
                "train__deterministic": False,
                "train__threads": 1,
            },
            id="ep2-tp2-alltoall",
        ),
        pytest.param(
            2, ALL, {"parallel__tp": 2, "parallel__sequence_parallel": True}, id="tp2-sequence"
        ),
        pytest.param(
            4, ["block"], {"parallel__ep": 2, "parallel__pp": 2} | TIED, id="ep2-pp2-block-tied"
        ),
    ],
)
def test_recomputing_changes_no_bit(ranks, tiny_data, tmp_path, size, modules, layout):
    train_on(ranks, size, tiny_tree(tiny_data, tmp_path / "kept", **FEW | layout))
    again = {"recompute__modules": modules}
    train_on(ranks, size, tiny_tree(tiny_data, tmp_path / "again", **FEW | layout | again))
    assert_same_run(tmp_path / "kept", tmp_path / "again")
