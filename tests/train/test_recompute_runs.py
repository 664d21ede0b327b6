"""Runs that recompute activations in backward are bit-identical to runs that keep activations."""

from __future__ import annotations

import pytest

from tests.kit.runs.results import assert_same_run
from tests.kit.runs.tiny import CONTEXT, DENSE, tiny_tree
from tests.kit.runs.training import train_on

FEW = {"train__max_steps": 2, "optim__warmup_steps": 1}
MASKED = {"model__num_layers": 4, "model__tie_embeddings": True, "data__document_mask": True}
EXCHANGED = {
    "train__global_batch_tokens": 4 * CONTEXT,
    "parallel__ep": 2,
    "parallel__tp": 2,
    "parallel__ep_dispatch": "alltoall",
    "train__deterministic": False,
    "kernels__grouped_gemm": "loop",  # by measurements, runs could choose different kernels
    "train__threads": 1,
}


@pytest.mark.parametrize(
    ("size", "modules", "layout"),
    [(1, ["block"], DENSE | MASKED), (4, ["moe", "norm"], EXCHANGED)],
    ids=["block-dense-tied-masked", "ep2-tp2-alltoall"],
)
def test_recomputing_changes_no_bit(ranks, tiny_data, tmp_path, size, modules, layout):
    train_on(ranks, size, tiny_tree(tiny_data, tmp_path / "kept", **FEW | layout))
    again = {"recompute__modules": modules}
    train_on(ranks, size, tiny_tree(tiny_data, tmp_path / "again", **FEW | layout | again))
    assert_same_run(tmp_path / "kept", tmp_path / "again")
