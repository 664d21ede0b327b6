"""Choice of the expert-parallel dispatcher. A run records the choice, a resumed run keeps it."""

from __future__ import annotations

import tomllib
from types import SimpleNamespace

import pytest
import torch

from optimus.config import make_config
from optimus.distributed.collectives import ALONE
from optimus.distributed.mesh import Mesh
from optimus.train import autotune
from optimus.train.startup import dry_run
from tests.kit.runs.results import metrics_of
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import printed_by

EP2 = {
    "parallel__ep": 2,
    "train__deterministic": False,
    "optim__decay_steps": 10,
    "recompute__modules": ["norm", "moe"],
    "model__router": "uniform",
}


def run_measured(tree: dict) -> str:
    """Train and return the log. The run measures the dispatchers, but gets fixed times instead of
    the measured times: 0.25 s for allgather and 0.125 s for alltoall."""
    measure = autotune.time_dispatchers

    def measured(*arguments, **named):
        seconds = measure(*arguments, **named)
        assert sorted(seconds) == ["allgather", "alltoall"] and min(seconds.values()) > 0
        return {"allgather": 0.25, "alltoall": 0.125}

    autotune.time_dispatchers = measured
    return printed_by(tree)


def run_unmeasured(tree: dict) -> str:
    """Train and return the log. Fail if the run tries to measure dispatchers."""
    autotune.time_dispatchers = None
    return printed_by(tree)


def run_as_on_xpu(tree: dict) -> str:
    """Train on the CPU, but choose the dispatcher as on Intel GPUs. Return the log."""
    choose = autotune.choose_dispatch
    autotune.choose_dispatch = lambda device_type, *rest: choose("xpu", *rest)
    return run_unmeasured(tree)


def recorded_dispatch(run_dir) -> str:
    return tomllib.loads((run_dir / "config.toml").read_text())["parallel"]["ep_dispatch"]


def test_auto_is_measured_logged_recorded_and_kept_on_resume(ranks, tiny_data, tmp_path):
    def tree(steps: int, **more) -> dict:
        return tiny_tree(tiny_data, tmp_path / "run", train__max_steps=steps, **EP2, **more)

    log, other_log = ranks(2, run_measured, tree(1), start_world=False)
    assert "ep_dispatch: alltoall (allgather 250.00 ms, alltoall 125.00 ms for a layer" in log
    assert "recompute of norm, moe: " in log and " MB kept for backward instead of " in log
    assert other_log == ""
    assert recorded_dispatch(tmp_path / "run") == "alltoall"

    log, _ = ranks(2, run_unmeasured, tree(2), start_world=False)
    assert "ep_dispatch: alltoall (as in the checkpoint)" in log
    assert "changed on resume: parallel" not in log
    assert recorded_dispatch(tmp_path / "run") == "alltoall"
    assert [line["expert_load_max"] for line in metrics_of(tmp_path / "run")] == [1.0, 1.0]

    log, _ = ranks(2, run_unmeasured, tree(3, parallel__ep_dispatch="allgather"), start_world=False)
    assert "changed on resume: parallel.ep_dispatch = 'allgather' (checkpoint of step 2" in log
    assert recorded_dispatch(tmp_path / "run") == "allgather"


def test_deterministic_run_does_not_measure(ranks, tiny_data, tmp_path):
    changes = EP2 | {"train__deterministic": True, "train__max_steps": 1}
    tree = tiny_tree(tiny_data, tmp_path, **changes)
    log, _ = ranks(2, run_unmeasured, tree, start_world=False)
    assert "ep_dispatch: allgather (selected by train.deterministic)" in log
    assert recorded_dispatch(tmp_path) == "allgather"


@pytest.mark.parametrize(("setting", "warns"), [("alltoall", True), ("auto", False)])
def test_dry_run_warns_of_alltoall_on_intel_gpus(tiny_data, tmp_path, capsys, setting, warns):
    more = {"parallel__ep": 2, "parallel__ep_dispatch": setting, "train__device": "xpu"}
    config = make_config(tiny_tree(tiny_data, tmp_path, train__deterministic=False, **more))
    dry_run(config, nodes=1, ranks_per_node=2, check_data=True, check_run_dir=True)
    printed = capsys.readouterr().err
    assert ("warning: parallel.ep_dispatch = 'alltoall'" in printed) == warns


@pytest.mark.parametrize("recorded", ["auto", "allgather", "alltoall"])
def test_auto_on_an_intel_gpu_means_allgather_with_the_reason(recorded):
    choice = autotune.choose_dispatch("xpu", deterministic=False, recorded=recorded)
    assert choice.name == "allgather"
    assert "kill the process" in choice.reason
    assert "set parallel.ep_dispatch = 'alltoall'" in choice.reason
    assert ("though the checkpoint has alltoall" in choice.reason) == (recorded == "alltoall")


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_auto_on_other_devices_is_measured_or_kept(device_type):
    choose = autotune.choose_dispatch
    assert choose(device_type, deterministic=False, recorded="auto") is None
    assert choose(device_type, deterministic=False, recorded="alltoall").name == "alltoall"
    assert choose(device_type, deterministic=True, recorded="alltoall").name == "allgather"


def model_on(device_type: str) -> SimpleNamespace:
    """Return a stub of a model with a parameter whose device has the type `device_type`. The
    machine can lack such a device."""
    parameter = SimpleNamespace(device=torch.device(device_type))
    return SimpleNamespace(parameters=lambda: iter([parameter]), modules=list)


def test_model_on_an_intel_gpu_takes_allgather_and_obeys_alltoall(monkeypatch, capsys):
    """With parallel.ep_dispatch = "auto", a run on an Intel GPU uses allgather without a
    measurement, even if its checkpoint has alltoall. With "alltoall", the run uses alltoall and
    prints a warning."""
    monkeypatch.setattr(autotune, "time_dispatchers", None)
    groups = SimpleNamespace(mesh=Mesh(ep=2), everyone=ALONE)
    for setting, expected in (("auto", "allgather"), ("alltoall", "alltoall")):
        settings = {
            "parallel__ep": 2,
            "train__deterministic": False,
            "parallel__ep_dispatch": setting,
        }
        config = make_config(tiny_tree("d", "r", **settings))
        stored = {
            "parallel.ep": 2,
            "parallel.tp": 1,
            "parallel.ep_dispatch": "alltoall",
            "train.microbatch_size": config.train.microbatch_size,
            "train.deterministic": False,
        }
        checkpoint = SimpleNamespace(settings=stored)
        choice = autotune.autotune_dispatch(config, groups, model_on("xpu"), None, checkpoint)
        assert choice.name == expected
        assert ("though the checkpoint has alltoall" in choice.reason) == (setting == "auto")
        reason = "all-to-all is known to kill the process"
        assert (reason in choice.reason) == (setting == "auto")
        assert (reason in capsys.readouterr().err) == (setting == "alltoall")


@pytest.mark.parametrize(
    ("changes", "expected", "from_checkpoint"),
    [
        ({}, "alltoall", True),
        ({"train__microbatch_size": 2}, autotune.MEASURED, False),  # other size: measure again
        ({"train__deterministic": True}, "allgather", False),
        ({"train__device": "xpu"}, "allgather", False),
        ({"parallel__ep_dispatch": "allgather"}, "allgather", False),
        ({"parallel__ep": 1}, "auto", False),
    ],
)
def test_dispatcher_is_known_before_the_start_of_a_resumed_run(changes, expected, from_checkpoint):
    stored = {
        "parallel.ep": 2,
        "parallel.tp": 1,
        "parallel.ep_dispatch": "alltoall",
        "train.microbatch_size": 1,
        "train.deterministic": False,
    }
    config = make_config(tiny_tree("d", "r", **{"train__microbatch_size": 1, **EP2, **changes}))
    choices = autotune.choices_before_start(config, SimpleNamespace(settings=stored))
    assert choices.ep_dispatch == expected
    assert ("parallel.ep_dispatch" in choices.from_checkpoint) == from_checkpoint


def test_dispatch_of_another_machine_becomes_allgather_on_intel_gpus(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path, train__max_steps=1, **EP2)
    ranks(2, run_measured, tree, start_world=False)
    assert recorded_dispatch(tmp_path) == "alltoall"
    tree = tiny_tree(tiny_data, tmp_path, train__max_steps=2, **EP2)
    log, _ = ranks(2, run_as_on_xpu, tree, start_world=False)
    assert "ep_dispatch: allgather (not measured on Intel GPUs, though the checkpoint has" in log
    assert recorded_dispatch(tmp_path) == "allgather"
