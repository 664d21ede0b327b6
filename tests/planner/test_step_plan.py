"""Tests of the figures of a step for `optimus plan`."""

from __future__ import annotations

import json

import pytest

from optimus.config.load import load_config
from optimus.config.machine import FOLDER, load_machine
from optimus.distributed.mesh import make_mesh
from optimus.model.flops import flops_per_token
from optimus.planner.step_plan import plan_step, step_lines

RUN = FOLDER.parent / "run" / "mula-220b-a10b.toml"


@pytest.mark.parametrize("name", ["a100-80", "aurora", "h100", "h200"])
def test_figures_of_a_step_are_consistent(name):
    config = load_config(RUN, [])
    mesh, machine = make_mesh(config.parallel), load_machine(name)
    result = plan_step(config, mesh, machine, name)
    assert json.loads(json.dumps(result)) == result
    components = result["compute_s"] + result["bubble_s"] + result["optimizer_s"]
    assert result["step_s"] == pytest.approx(components + sum(result["exposed_s"].values()))
    batch = config.train.global_batch_tokens
    assert result["tokens_per_s"] == pytest.approx(batch / result["step_s"])
    flops = flops_per_token(config.model, config.train.seq_len) * batch
    achieved = flops / result["step_s"] / mesh.world_size
    assert result["mfu"] == pytest.approx(achieved / result["peak_flops"]) and result["mfu"] < 0.6
    assert result["nodes"] == -(-mesh.world_size // machine.ranks_per_node)
    hours = config.train.max_steps * result["step_s"] / 3600
    assert result["node_hours"] == pytest.approx(hours * result["nodes"])


def test_lines_name_fitted_and_missing_figures():
    config = load_config(RUN, [])
    mesh = make_mesh(config.parallel)
    lines = dict(step_lines(plan_step(config, mesh, load_machine("aurora"), "aurora")))
    assert "256 nodes" in lines["step on aurora"] and "exposed ep" in "".join(lines)
    assert "device.launch_s" in lines["figures without a source"]
    assert "figures fitted on" not in lines
    lines = dict(step_lines(plan_step(config, mesh, load_machine("a100-80"), "a100-80")))
    assert "arXiv 2205.05198 Table 5" in lines["figures fitted on"]
    assert lines["figures without a source"] == "levels.1.achieved"
