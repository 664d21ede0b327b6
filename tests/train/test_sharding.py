"""Optimizer states divided over ranks: the bits of undivided ones."""

from __future__ import annotations

import pytest

from tests.helpers.runs import assert_same_run, metrics_of, train_on
from tests.helpers.tiny import tiny_tree

FEW = {"train__max_steps": 5, "optim__chunk_length": 2000}


@pytest.mark.parametrize(
    ("size", "run"),
    [
        pytest.param(2, {"train__dtype": "bf16"}, id="dp2-bf16"),
        pytest.param(4, {"parallel__ep": 2}, id="dp2-ep2"),
        pytest.param(
            4,
            {"parallel__ep": 2, "model__tie_embeddings": True, "train__dtype": "bf16"},
            id="dp2-ep2-tied-bf16",
        ),
        pytest.param(
            8,
            {"parallel__ep": 2, "parallel__pp": 2, "model__tie_embeddings": True},
            id="dp2-ep2-pp2-tied",
        ),
    ],
)
def test_divided_states_train_to_the_same_bits(ranks, tiny_data, tmp_path, size, run):
    for sharding in ("none", "so", "epso"):
        tree = tiny_tree(tiny_data, tmp_path / sharding, optim__sharding=sharding, **FEW, **run)
        train_on(ranks, size, tree)
    assert_same_run(tmp_path / "none", tmp_path / "so")
    assert_same_run(tmp_path / "none", tmp_path / "epso")


def test_without_the_mode_losses_agree(ranks, tiny_data, tmp_path):
    fast = {"train__deterministic": False, "train__threads": 1, "parallel__ep": 2}
    for sharding in ("none", "so", "epso"):
        tree = tiny_tree(tiny_data, tmp_path / sharding, optim__sharding=sharding, **FEW, **fast)
        train_on(ranks, 4, tree)
    none, so, epso = (metrics_of(tmp_path / name) for name in ("none", "so", "epso"))
    for a, b, c in zip(none, so, epso, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-6)
        assert c["loss"] == pytest.approx(a["loss"], abs=1e-6)


def test_divided_and_resumed_under_another_division(ranks, tiny_data, tmp_path):
    run = {"train__max_steps": 6, "optim__chunk_length": 2000}
    train_on(ranks, 1, tiny_tree(tiny_data, tmp_path / "one", **run))
    many = tmp_path / "many"
    for size, sharding, stop in ((4, "epso", 2), (2, "so", 4), (2, "none", 0)):
        tree = tiny_tree(tiny_data, many, optim__sharding=sharding, train__stop_at_step=stop, **run)
        train_on(ranks, size, tree)
    assert_same_run(tmp_path / "one", many)
