"""The dispatcher of expert parallelism as runs choose, record and keep it."""

from __future__ import annotations

import tomllib
from types import SimpleNamespace

import pytest
import torch

from optimus.config import make_config
from optimus.distributed.mesh import Mesh
from optimus.train import settle
from tests.helpers.runs import metrics_of, told_by
from tests.helpers.tiny import tiny_tree

EP2 = {
    "parallel__ep": 2,
    "train__deterministic": False,
    "optim__decay_steps": 10,
    "recompute__modules": ["norm", "moe"],
    "model__router": "uniform",
}


def first_run(tree: dict) -> str:
    """Really measures; then the other one than at other times is let win."""
    measure = settle.measure_dispatches

    def measured(*arguments, **named):
        seconds = measure(*arguments, **named)
        assert sorted(seconds) == ["allgather", "alltoall"] and min(seconds.values()) > 0
        return {"allgather": 0.25, "alltoall": 0.125}

    settle.measure_dispatches = measured
    return told_by(tree)


def later_run(tree: dict) -> str:
    settle.measure_dispatches = None  # nothing is to be measured
    return told_by(tree)


def later_run_on_xpu(tree: dict) -> str:
    """A later run whose ranks compute on the CPU and take the decision of an Intel GPU."""
    plain = settle.dispatch_without_measuring
    settle.dispatch_without_measuring = lambda device_type, *rest: plain("xpu", *rest)
    return later_run(tree)


def chosen_in(run_dir) -> str:
    return tomllib.loads((run_dir / "config.toml").read_text())["parallel"]["ep_dispatch"]


def test_auto_is_measured_told_recorded_and_kept_on_resume(ranks, tiny_data, tmp_path):
    def tree(steps: int, **more) -> dict:
        return tiny_tree(tiny_data, tmp_path / "run", train__max_steps=steps, **EP2, **more)

    told, nothing = ranks(2, first_run, tree(1), start_world=False)
    assert "ep_dispatch: alltoall (allgather 250.00 ms, alltoall 125.00 ms for a layer" in told
    assert "recompute of norm, moe: " in told and " MB kept for backward instead of " in told
    assert nothing == ""
    assert chosen_in(tmp_path / "run") == "alltoall"

    told, _ = ranks(2, later_run, tree(2), start_world=False)
    assert "ep_dispatch: alltoall (as in the checkpoint)" in told
    assert "changed on resume: parallel" not in told
    assert chosen_in(tmp_path / "run") == "alltoall"
    assert [line["expert_load_max"] for line in metrics_of(tmp_path / "run")] == [1.0, 1.0]

    told, _ = ranks(2, later_run, tree(3, parallel__ep_dispatch="allgather"), start_world=False)
    assert "changed on resume: parallel.ep_dispatch = 'allgather' (checkpoint of step 2" in told
    assert chosen_in(tmp_path / "run") == "allgather"


def test_deterministic_runs_do_not_measure(ranks, tiny_data, tmp_path):
    changes = EP2 | {"train__deterministic": True, "train__max_steps": 1}
    told, _ = ranks(2, later_run, tiny_tree(tiny_data, tmp_path, **changes), start_world=False)
    assert "ep_dispatch: allgather (train.deterministic takes it)" in told
    assert chosen_in(tmp_path) == "allgather"


@pytest.mark.parametrize("kept", ["auto", "allgather", "alltoall"])
def test_auto_on_an_intel_gpu_means_allgather_with_the_reason(kept):
    choice, why = settle.dispatch_without_measuring("xpu", deterministic=False, kept=kept)
    assert choice == "allgather"
    assert "kill the process" in why and "set parallel.ep_dispatch = 'alltoall'" in why
    assert ("though the checkpoint has alltoall" in why) == (kept == "alltoall")


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_auto_elsewhere_is_measured_or_kept(device_type):
    decide = settle.dispatch_without_measuring
    assert decide(device_type, deterministic=False, kept="auto") is None
    assert decide(device_type, deterministic=False, kept="alltoall")[0] == "alltoall"
    assert decide(device_type, deterministic=True, kept="alltoall")[0] == "allgather"


def model_on(device_type: str) -> SimpleNamespace:
    """A stand-in for a rank's model on a device that is not here."""
    parameter = SimpleNamespace(device=torch.device(device_type))
    return SimpleNamespace(parameters=lambda: iter([parameter]), modules=list)


def test_an_intel_gpu_is_recognised_by_the_model_and_alltoall_is_obeyed(monkeypatch):
    """No measurement and no gathering of states, which are missing here."""
    monkeypatch.setattr(settle, "measure_dispatches", None)
    groups = SimpleNamespace(mesh=Mesh(ep=2))
    part = SimpleNamespace(model=model_on("xpu"))
    for given, taken in (("auto", "allgather"), ("alltoall", "alltoall")):
        settings = {
            "parallel__ep": 2,
            "train__deterministic": False,
            "parallel__ep_dispatch": given,
        }
        config = make_config(tiny_tree("d", "r", **settings))
        config, lines = settle.take_dispatch(config, groups, part, None, "alltoall")
        assert config.parallel.ep_dispatch == taken
        assert bool(lines) == (given == "auto")


def test_a_run_measured_elsewhere_goes_to_allgather_on_intel_gpus(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path, train__max_steps=1, **EP2)
    ranks(2, first_run, tree, start_world=False)
    assert chosen_in(tmp_path) == "alltoall"
    tree = tiny_tree(tiny_data, tmp_path, train__max_steps=2, **EP2)
    told, _ = ranks(2, later_run_on_xpu, tree, start_world=False)
    assert "ep_dispatch: allgather (not measured on Intel GPUs, though the checkpoint has" in told
    assert chosen_in(tmp_path) == "allgather"
