"""Whole runs over pipelines: the bits of one process, whatever the schedule."""

from __future__ import annotations

import pytest

from tests.helpers.runs import assert_same_run, train_on
from tests.helpers.tiny import DENSE, tiny_tree

FEW = {"train__max_steps": 5, "model__num_layers": 4}


def pipeline(pp: int, schedule: str = "1f1b", stages: int = 1) -> dict:
    return {
        "parallel__pp": pp,
        "parallel__schedule": schedule,
        "parallel__virtual_stages": stages,
    }


@pytest.mark.parametrize(
    ("size", "layout", "model"),
    [
        pytest.param(2, pipeline(2), {}, id="pp2"),
        pytest.param(4, pipeline(4), {"model__tie_embeddings": True}, id="pp4-tied"),
        pytest.param(4, pipeline(2, "gpipe"), {"train__dtype": "bf16"}, id="dp2-pp2-gpipe-bf16"),
        pytest.param(
            4, pipeline(2, "interleaved", 2), {"model__tie_embeddings": True}, id="dp2-interleaved"
        ),
        pytest.param(2, pipeline(2, "zb-h1"), {}, id="zb-h1"),
        pytest.param(4, pipeline(4, "zb-h1"), DENSE, id="zb-h1-dense"),
        pytest.param(
            2,
            pipeline(2) | {"parallel__stage_layers": [1, 3]},
            DENSE | {"model__tie_embeddings": True, "data__document_mask": True},
            id="by-hand-dense-tied-masked",
        ),
        pytest.param(1, pipeline(1, "interleaved", 4), {}, id="four-stages-on-one-rank"),
    ],
)
def test_a_pipeline_trains_to_the_bits_of_one_process(
    ranks, tiny_data, tmp_path, size, layout, model
):
    train_on(ranks, 1, tiny_tree(tiny_data, tmp_path / "one", **FEW | model))
    train_on(ranks, size, tiny_tree(tiny_data, tmp_path / "many", **FEW | model | layout))
    assert_same_run(tmp_path / "one", tmp_path / "many")
