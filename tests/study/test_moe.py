"""Tests of `optimus study moe`, which reproduces Table 3 of the Optimus paper. A plain loop over
the experts has the same results as the experts of Optimus, and the speed-ups are consistent with
each other."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from optimus.bench.meters import clear_gradients
from optimus.cli import main
from optimus.config import load_config
from optimus.config.machine import load_machine
from optimus.distributed.mesh import make_mesh
from optimus.model.router import uniform
from optimus.planner.machine_rates import rates_of
from optimus.rank.operations import Product
from optimus.rank.profile import profile_work
from optimus.study.moe import COLUMNS, LoopExperts, _speedups, expert_work, local_experts
from tests.kit.runs.tiny import DENSE, tiny_config, tiny_tree
from tests.launch.test_spawn import write_config
from tests.planner.test_plan import CONFIGS
from tests.study.test_scaling import HERE


def test_loop_over_local_experts_equals_ours():
    config = tiny_config("d", "r", model__num_experts=8)
    ours = local_experts(config, 2, torch.device("cpu"))
    assert ours.gate_up.shape[0] == 4
    loop = LoopExperts(ours.gate_up, ours.down, ours.first_expert)
    x = torch.randn(24, 32, requires_grad=True)
    weights, chosen = uniform(torch.rand(24, 8).softmax(-1), 2)
    results = []
    for block in (ours, loop):
        out = block(x, weights, chosen)
        out.square().sum().backward()
        results.append((out.detach(), x.grad))
        clear_gradients(block, x)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    assert results[0][0].abs().sum() > 0


def repeats(operations) -> Counter:
    """Return the number of matrix products in `operations`, by shape (rows, inner, columns)."""
    counts: Counter = Counter()
    for op in operations:
        if isinstance(op, Product):
            counts[op.rows, op.inner, op.columns] += op.repeats
    return counts


def test_speedups_follow_from_each_other():
    sizes = ["model.num_layers=8", "model.intermediate_size=1024"]
    config = load_config(CONFIGS / "run" / "mula-220b-a10b.toml", sizes)
    mesh, rates = make_mesh(config.parallel), rates_of(load_machine("aurora"), "bf16")
    work = profile_work(config, mesh)
    # The profile of a block has all products of the experts.
    block, experts = work.blocks[0], expert_work(config, mesh)
    for all_products, of_experts in zip((block.forward, block.backward), experts, strict=True):
        assert repeats(of_experts).total() > 0
        assert repeats(of_experts) <= repeats(all_products)
    same = _speedups(config, mesh, rates, {False: work}, 1.0, 1.0)
    assert same["passes"] == same["step_of_passes"] == 1.0
    assert same["step_of_optimizer"] == same["both"] > 1  # less communication with epso
    row = _speedups(config, mesh, rates, {False: work}, 2.0, 1.2)
    assert 1 < row["step_of_passes"] < row["passes"] < 2
    # The formula by which the columns of the paper's Table 3 agree (Amdahl's law).
    share = (1 - 1 / row["step_of_passes"]) / (1 - 1 / row["passes"])
    both = 1 / (share / row["passes"] + (1 - share) / row["optimizer"])
    assert both == pytest.approx(row["both"])
    assert row["optimizer"] > same["optimizer"]


def test_command_marks_each_value(tmp_path, capsys):
    settings = {"train__dtype": "fp32", "parallel__ep": 2, "model__num_experts": 8}
    config = write_config(tmp_path / "a.toml", tiny_tree("d", "r", **settings))
    options = ["--machine", str(HERE), "--nodes", "4", "--tokens", "8", "--rounds", "2"]
    assert main(["study", "moe", str(config), *options, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["a"]
    sources = {name: result[name]["source"] for name in COLUMNS}
    assert [name for name in sources if sources[name] == "measured"] == ["experts", "update"]
    assert all(result[name]["least"] <= result[name]["most"] for name in COLUMNS)
    dense = write_config(tmp_path / "b.toml", tiny_tree("d", "r", **DENSE))
    assert main(["study", "moe", str(dense), *options]) == 2
    assert "no experts to compare" in capsys.readouterr().err
