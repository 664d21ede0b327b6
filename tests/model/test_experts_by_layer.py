"""`num_experts` as a list: layers with different numbers of experts, and dense layers."""

from __future__ import annotations

import math

import pytest
import torch

from optimus.checkpoint import store
from optimus.config import make_config
from optimus.distributed.agreement import RunEnded
from optimus.errors import CheckpointError, ConfigError, OutcomeKind
from optimus.evaluate.checkpoint import continue_text, evaluate_checkpoint
from optimus.hf import config_to_hf
from optimus.launch.environment import read_launch_env
from optimus.model.layers import MLP
from optimus.model.router import layer_losses
from optimus.observe.events import ExpertLoad, LayerLoad, MoeFigures
from optimus.observe.health import measure_expert_load
from optimus.observe.metrics import read_json_lines
from optimus.train.loop import train
from optimus.train.resolve import resolve
from tests.kit.runs.tiny import tiny_tree
from tests.model.small import small_config, small_model, some_tokens

MIXED = {"num_layers": 4, "num_experts": [0, 5, 3, 0], "dense_intermediate_size": 40}


def test_layers_have_the_numbers_of_the_list():
    model = small_model(**MIXED)
    blocks = list(model.blocks.values())
    assert isinstance(blocks[0].mlp, MLP) and isinstance(blocks[3].mlp, MLP)
    assert blocks[0].mlp.up_proj.weight.shape == (40, 32)
    assert blocks[1].mlp.experts.down.shape == (5, 32, 24)
    assert blocks[2].mlp.router.weight.shape == (3, 32)
    narrow = small_model(**{**MIXED, "dense_intermediate_size": 0})
    assert narrow.blocks["0"].mlp.up_proj.weight.shape == (24, 32)


def test_a_list_of_equal_numbers_is_that_number():
    scalar, many = small_model(num_experts=5), small_model(num_experts=[5, 5])
    for (name, a), (other, b) in zip(
        scalar.named_parameters(), many.named_parameters(), strict=True
    ):
        assert name == other and torch.equal(a, b)
    assert scalar.config.first_difference(many.config) is None
    assert scalar.config.first_difference(small_config(num_experts=[5, 4])) is not None
    assert config_to_hf(many.config, "float32") == config_to_hf(scalar.config, "float32")


def test_losses_are_means_over_the_layers_that_route():
    model, tokens = small_model(**MIXED), some_tokens()
    _, routings = model.run_blocks(model.embed(tokens))
    terms = model.losses(tokens)
    assert len(routings) == 2
    aux, z, counts = layer_losses(model.config, routings, tokens.device)
    assert torch.equal(terms.aux, aux.sum() / 2) and torch.equal(terms.z, z.sum() / 2)
    assert [len(of_layer) for of_layer in counts] == [5, 3]
    assert [int(of_layer.sum()) for of_layer in counts] == [tokens.numel() * 2] * 2
    terms.ce_sum.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_load_is_relative_to_the_experts_of_a_layer():
    config, rows = small_config(**MIXED), torch.tensor([[2, 2, 2, 2, 2], [0, 3, 3, 0, 0]])
    load = measure_expert_load(3, rows, config)
    first, second = config.sparse_layers
    layers = LayerLoad(first, 1.0, 1.0, 0), LayerLoad(second, 0.0, 1.5, 1)
    assert load == ExpertLoad(3, layers, ((2, 2, 2, 2, 2), (0, 3, 3)))
    assert load.figures(0.5, None) == MoeFigures(0.5, None, 0.0, 1.5, second, second, 1)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"num_experts": [5]}, r"num_experts = \[5\] has 1 number, but model.num_layers = 2"),
        ({"num_experts": [0, 0]}, "no layer has experts; give at least one layer"),
        ({"num_experts": [5, 1]}, "between 1 and model.num_experts = 1 in the smallest"),
        ({"num_experts": [5, -1]}, "model.num_experts = .*must be a whole number >= 0, or a list"),
        ({"num_experts": [5, True]}, "must be a whole number >= 0, or a list"),
        ({"num_experts": "many"}, "must be a whole number >= 0, or a list"),
        ({"dense_intermediate_size": 9}, "dense_intermediate_size = 9: every layer has experts"),
        (
            {"architecture": "olmo", "dense_intermediate_size": 9},
            "dense_intermediate_size = 9: architecture 'olmo'",
        ),
        (
            {"num_experts": [5, 4], "aux_loss_form": "hf"},
            "aux_loss_form = 'hf' needs the same number",
        ),
    ],
)
def test_impossible_lists_are_refused(fields, match):
    with pytest.raises(ConfigError, match=match):
        small_config(**fields)


def test_a_mixed_run_trains_saves_resumes_evaluates_and_generates(tiny_data, tmp_path):
    settings = {
        "model__num_experts": [0, 4, 3],
        "model__num_layers": 3,
        "model__dense_intermediate_size": 48,
        "train__max_steps": 4,
    }

    def go(run_dir, **more) -> list[dict]:
        tree = tiny_tree(tiny_data, run_dir, **settings, **more)
        train(make_config(tree), read_launch_env({}))
        return read_json_lines(run_dir / "metrics.jsonl")

    whole = go(tmp_path / "whole")
    go(tmp_path / "resumed", train__stop_at_step=2)
    resumed = go(tmp_path / "resumed")
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]
    assert all(math.isfinite(line["expert_load_max"]) for line in whole)
    assert 0 < whole[0]["expert_load_min"] <= 1 <= whole[0]["expert_load_max"]
    evaluated = evaluate_checkpoint(str(tmp_path / "whole"), f"{tiny_data}/eval", 8, 9)
    recorded = read_json_lines(tmp_path / "whole" / "eval.jsonl")[-1]["loss"]
    assert evaluated["loss"] == pytest.approx(recorded, abs=1e-6)
    text = continue_text(str(tmp_path / "whole"), "abc", 3, temperature=0, top_k=0, seed=0)
    assert text.startswith("abc")
    stored = store.newest_valid(tmp_path / "whole").settings
    assert stored["model.num_experts"] == [0, 4, 3]
    with pytest.raises(CheckpointError, match=r"model.num_experts = \[0, 4, 4\]"):
        settings = {**settings, "model__num_experts": [0, 4, 4]}
        config = make_config(tiny_tree(tiny_data, tmp_path / "whole", **settings))
        resolve(config, 1)
    with pytest.raises(RunEnded, match="cannot be exported: all layers of a Hugging Face") as ended:
        go(tmp_path / "models", checkpoint__model_interval=2)
    assert ended.value.kind is OutcomeKind.USAGE
