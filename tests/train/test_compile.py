"""Compiled runs (`train.compile`) equal eager runs and have no graph breaks.

Most tests run only the first stages of torch.compile. C++ compilation takes a minute, so its test
runs only with OPTIMUS_TEST_COMPILE=1.
"""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path

import pytest
import torch

from optimus.config import make_config
from optimus.launch.environment import read_launch_env
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer
from optimus.observe.metrics import read_json_lines
from optimus.train.loop import train
from tests.kernels.op_checks import FORMS, in_form
from tests.kit.runs.tiny import DENSE, VOCAB, tiny_config, tiny_tree

FAST = {"train__deterministic": False, "train__threads": 1, "optim__warmup_steps": 1}


@pytest.fixture
def without_a_compiler(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def gradients(model: Transformer, tokens: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    terms = model.losses(tokens)
    objective = terms.ce_sum / terms.num_targets + 0.01 * terms.aux + 0.001 * terms.z
    objective.backward()
    return float(objective.detach()), [parameter.grad for parameter in model.parameters()]


def assert_compiles_to_the_same(config) -> None:
    model = Transformer(config)
    initialise_(model, 0)
    compiled = copy.deepcopy(model)
    compiled.compile_blocks()
    tokens = torch.randint(VOCAB, (2, 32), generator=torch.Generator().manual_seed(1))
    loss, grads = gradients(model, tokens)
    their_loss, their_grads = gradients(compiled, tokens)
    assert their_loss == pytest.approx(loss, rel=1e-6)
    for grad, theirs in zip(grads, their_grads, strict=True):
        assert float((grad - theirs).norm()) <= 1e-5 * float(grad.norm())
    assert compiled.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("form", FORMS)
def test_blocks_compile_to_a_single_graph_with_the_same_gradients(without_a_compiler, form):
    torch.compiler.reset()
    with in_form(form):
        assert_compiles_to_the_same(tiny_config("", "", model__num_experts=[0, 4]).model)


@pytest.mark.skipif("OPTIMUS_TEST_COMPILE" not in os.environ, reason="takes a minute of compiling")
def test_blocks_compile_all_the_way():
    torch.compiler.reset()
    assert_compiles_to_the_same(tiny_config("", "", model__num_layers=1).model)


def run_and_count_graphs(tree: dict) -> tuple[list[float], float, int, dict]:
    """Train. Return the loss of each step, the last evaluation loss, the number of compiled graphs,
    and the number of graph breaks for each reason.

    Run this function in a new process, because `train.compile` is refused if IPEX is imported.
    """
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    train(make_config(tree), read_launch_env())
    run_dir, counts = Path(tree["train"]["run_dir"]), torch._dynamo.utils.counters
    losses = [line["loss"] for line in read_json_lines(run_dir / "metrics.jsonl")]
    evaluation = read_json_lines(run_dir / "eval.jsonl")[-1]["loss"]
    return losses, evaluation, counts["stats"]["unique_graphs"], dict(counts["graph_break"])


@pytest.mark.parametrize("variant", [{}, {"train__dtype": "bf16"}, DENSE])
def test_a_compiled_run_learns_as_the_other_does(ranks, tiny_data, tmp_path, variant):
    runs = []
    for name, more in (("eager", {}), ("compiled", {"train__compile": True})):
        settings = {**FAST, "train__max_steps": 3, "train__sample_interval": 2, **variant, **more}
        tree = tiny_tree(tiny_data, tmp_path / name, **settings)
        runs += ranks(1, run_and_count_graphs, tree, start_world=False, timeout_s=240)
    (losses, evaluation, *_), (ours, our_evaluation, graphs, breaks) = runs
    tolerance = 1e-3 if variant.get("train__dtype") == "bf16" else 1e-5
    assert ours == pytest.approx(losses, rel=tolerance)
    assert our_evaluation == pytest.approx(evaluation, rel=tolerance)
    assert graphs > 0 and not breaks
