"""Tests of the memory check at the start of a run, and of the comparison of predicted and measured
values after its first updates."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from optimus.cli import main as optimus
from optimus.config import dump_toml, make_config
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.errors import ConfigError
from optimus.io import files
from optimus.launch.environment import SINGLE
from optimus.planner.against import FIT_FILE, compare, placement_of, predict
from optimus.planner.fit import least_bytes
from optimus.planner.memory import library_bytes, rank_memory
from optimus.resilience.supervision.attempt import Attempt
from optimus.train import fit, prediction
from optimus.train.launch import LaunchOptions, plan_job
from optimus.train.prediction import Prediction
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import printed_by

MACHINE = """
ranks_per_node = 2
[device]
name = "small"
memory_bytes = { value = %g, source = "a test", date = "2026-11" }
"""


def machine_file(path: Path, size: float) -> str:
    path.write_text(MACHINE % size)
    return str(path)


def config_file(path: Path, tree: dict) -> str:
    path.write_text(dump_toml(make_config(tree)))
    return str(path)


def checked_tree(data: Path | str, run_dir: Path, **settings) -> dict:
    return tiny_tree(data, run_dir, train__fit_check="refuse", **settings)


@pytest.mark.parametrize(
    "options",
    [
        ["--nproc", "2"],
        ["--dry-run", "--nproc", "2"],
        ["--dry-run", "--nproc", "2", "--nodes", "1"],
        [],
    ],
    ids=" ".join,
)
def test_run_that_cannot_fit_is_refused_before_ranks_start(tiny_data, tmp_path, capfd, options):
    config = config_file(tmp_path / "c.toml", checked_tree(tiny_data, tmp_path / "run"))
    machine = machine_file(tmp_path / "small.toml", 1000)
    assert optimus(["train", config, f"train.machine={machine}", *options]) == 2
    *_, line = capfd.readouterr().err.splitlines()
    assert line.startswith("optimus: error: the run cannot fit: a rank needs at least ")
    assert "bytes more than the device 'small' has (1,000)" in line
    assert not (tmp_path / "run").exists()


def test_dry_run_takes_the_machine_of_the_job_script(tiny_data, tmp_path, capfd):
    config = config_file(tmp_path / "c.toml", checked_tree(tiny_data, tmp_path / "run"))
    small, large = (machine_file(tmp_path / f"{n}.toml", n) for n in (1000, 1e9))
    dry = ["train", config, "--dry-run", "--nodes", "2"]
    assert optimus([*dry, "--machine", small]) == 2
    assert "the run cannot fit" in capfd.readouterr().err
    assert optimus([*dry, "--machine", large]) == 0
    assert "unknown here" not in capfd.readouterr().err
    assert optimus([*dry, "--machine", small, f"train.machine={large}"]) == 0
    # The nodes of the run can differ from this machine, so the memory of this machine is not used.
    capfd.readouterr()
    assert optimus(dry) == 0
    assert "the memory of the nodes is unknown here" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nowhere", "train.machine nowhere: no such machine; use one of a100-80, aurora"),
        ("links.toml", "has no table [device]"),
    ],
)
def test_wrong_machine_is_refused(tiny_data, tmp_path, capfd, monkeypatch, value, message):
    monkeypatch.chdir(tmp_path)
    Path("links.toml").write_text("[links]\nto_host = 1e9\n")
    config = config_file(tmp_path / "c.toml", checked_tree(tiny_data, tmp_path / "run"))
    assert optimus(["train", config, f"train.machine={value}", "--nproc", "2"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line


def test_supervised_run_that_cannot_fit_is_refused_once(tiny_data, tmp_path, monkeypatch):
    small = machine_file(tmp_path / "small.toml", 1000)
    tree = checked_tree(tiny_data, tmp_path / "run", train__machine=small)
    with pytest.raises(ConfigError, match="the run cannot fit"):
        plan_job(make_config(tree), LaunchOptions(nodes=1, launcher="local"))
    arguments = make_config(tree), Mesh(), 8, SINGLE
    with pytest.raises(ConfigError, match="the run cannot fit"):
        fit.check_on_first_rank(*arguments)
    attempt = Attempt(2, "node0", tmp_path, tmp_path / "progress", None)
    for variables in ({fit.FIT_CHECKED: "1"}, attempt.variables()):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            fit.check_on_first_rank(*arguments)


def test_run_shrinks_only_to_a_size_that_can_fit(tiny_data, tmp_path):
    """With optim.sharding = "so", each rank needs more memory on fewer nodes. With train.fit_check
    = "refuse", a supervised run continues only on numbers of nodes on which it can fit."""
    settings = {"optim__sharding": "so", "resilience__on_exhausted": "shrink"}
    on_two = make_config(tiny_tree(tiny_data, tmp_path / "run", **settings))
    bound = least_bytes(on_two, Mesh(dp=2), 4, "device")(Coordinate(0, 0, 0, 0))
    settings["train__machine"] = machine_file(tmp_path / "m.toml", bound)
    options = LaunchOptions(nodes=4, launcher="local", is_dry_run=True)
    sizes = {}
    for check in ("off", "refuse"):
        tree = tiny_tree(tiny_data, tmp_path / "run", train__fit_check=check, **settings)
        sizes[check] = plan_job(make_config(tree), options).policy.sizes
    assert sizes == {"off": (1, 2, 4), "refuse": (2, 4)}


def test_accelerators_are_left_to_the_first_rank(tiny_data, tmp_path, monkeypatch):
    train = make_config(tiny_tree(tiny_data, tmp_path, train__device="auto")).train
    monkeypatch.setattr(fit, "has_accelerator_files", lambda: True)
    assert fit.capacity_before_ranks(train, 2) is None
    monkeypatch.setattr(fit, "has_accelerator_files", lambda: False)
    host = fit.capacity_before_ranks(train, 2)
    assert host is not None and (host.kind, host.ranks) == ("host", 2)
    assert fit.capacity_before_ranks(train, 2, is_node=False) is None
    assert fit.capacity_of_rank(train.model_copy(update={"device": "cpu"}), 0, 2) == host


def lines_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def printed_with_prediction(tree: dict) -> str:
    """Train, and wait for the prediction of memory and time, which a separate process computes.
    Return the standard error."""
    result = Prediction.result

    def wait_and_return(waiting: Prediction) -> dict | None:
        waiting._process.wait()
        return result(waiting)

    niceness = mock.patch.object(prediction, "_NICENESS", 0)
    with niceness, mock.patch.object(Prediction, "result", wait_and_return):
        return printed_by(tree)


_RUNS: list[tuple[str, Path, str]] = []
"""Cached result of `measured_run`. The first test that needs the run makes it."""


@pytest.fixture
def measured_run(ranks, tiny_data, tmp_path_factory):
    """Return the configuration file of a run of 6 updates on two ranks, the run directory, and the
    lines that rank 0 of this run printed."""
    if _RUNS:
        return _RUNS[0]
    folder = tmp_path_factory.mktemp("fit")
    settings = {"parallel__pp": 2, "train__max_steps": 6, "optim__warmup_steps": 0}
    tree = checked_tree(tiny_data, folder / "run", **settings)
    first, second = ranks(2, printed_with_prediction, tree, start_world=False, timeout_s=240)
    assert "after update" not in second
    _RUNS.append((config_file(folder / "c.toml", tree), folder / "run", first))
    return _RUNS[0]


def test_run_logs_predicted_and_measured_figures_once(measured_run):
    _, run_dir, printed = measured_run
    (line,) = [line for line in printed.splitlines() if "after update" in line]
    content = json.loads((run_dir / FIT_FILE).read_text())
    assert content["step"] == fit.FIRST_UPDATES
    predicted = predict(run_dir)
    assert line == f"optimus: {fit.format_line(content, predicted)}"
    assert "without a prediction (train.machine is not set)" in line
    metrics = lines_of(run_dir)
    times = sorted(update["step_time_s"] for update in metrics[2:5])
    assert content["step_s"] == times[1]
    assert content["ranks"][0]["peak_bytes"] == metrics[4]["mem_bytes"]
    config = make_config(checked_tree("d", run_dir, parallel__pp=2))
    of_libraries = [library_bytes(config, Mesh(pp=2), pp) for pp in (0, 1)]
    assert of_libraries[0] > of_libraries[1] == library_bytes(config, Mesh(), 0)
    without_tensors = content["ranks"][0]["process_bytes"] + of_libraries[0]
    assert 0 < predicted["bytes"] - without_tensors < 10_000_000
    assert [rank["pp"] for rank in content["ranks"]] == [0, 1]


def test_run_that_ends_first_ends_the_prediction(measured_run, caplog):
    config, run_dir, _ = measured_run
    caplog.set_level("INFO")
    updates = fit.FirstUpdates(load(config), Mesh(pp=2), 8, mock.Mock())
    updates._figures = json.loads((run_dir / FIT_FILE).read_text())
    updates._prediction = Prediction(run_dir)
    process = updates._prediction._process
    updates.close()
    assert process.returncode == -9 and updates._prediction is None
    assert "no prediction (the run ended before the prediction was complete); `optimus" in (
        caplog.text
    )


def test_prediction_of_another_process_or_directory_is_a_problem(tmp_path):
    with mock.patch.object(prediction, "_NICENESS", 0):
        waiting = Prediction(tmp_path)
    waiting._process.wait()
    result = waiting.result()
    assert result is not None and "config.toml" in result["problem"]
    # The process must not outlive the rank that is its parent.
    command = [sys.executable, "-P", "-m", "optimus.train.prediction", str(tmp_path), "1", "0"]
    orphan = subprocess.run(command, capture_output=True, text=True)
    assert (orphan.returncode, orphan.stdout) == (1, "")
    waiting._process, waiting._end = subprocess.Popen(["sleep", "600"]), 0.0
    result = waiting.result()
    assert result is not None and "took more than" in result["problem"]


def test_placement_of_a_run_is_predicted(tmp_path):
    """If a run has offload.mode = "auto", the prediction of its memory uses the placement that the
    run has recorded in fit.json."""
    settings = {"offload__mode": "manual", "offload__host_share": 1.0, "optim__chunk_length": 2000}
    placed = make_config(tiny_tree("d", tmp_path, **settings))
    auto = make_config(tiny_tree("d", tmp_path, offload__mode="auto"))
    (tmp_path / "config.toml").write_text(dump_toml(auto))
    rank = {"pp": 0, "tp": 0, "process_bytes": 1000, "peak_bytes": 2000}
    content = {"format": 2, "settings": "", "device": "cpu", "mesh": Mesh()._asdict()}
    content |= {"microbatches": 8, "ranks": [rank], "placement": placement_of(placed)}
    (tmp_path / FIT_FILE).write_bytes(files.checked_json(content))
    memory = rank_memory(placed, Mesh(), Coordinate(0, 0, 0, 0), 8, "cpu")
    tensors, libraries = memory.device + memory.host, library_bytes(placed, Mesh(), 0)
    assert predict(tmp_path)["bytes"] == 1000 + tensors + libraries


def test_plan_is_compared_with_a_run(measured_run, capsys):
    config, run_dir, _ = measured_run
    assert optimus(["plan", config, "--against", str(run_dir), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    content = json.loads((run_dir / FIT_FILE).read_text())
    first, last = result["memory"]
    assert first["measured_bytes"] == content["ranks"][0]["peak_bytes"]
    assert first["predicted_bytes"] == predict(run_dir)["bytes"]
    assert (first["pp"], last["pp"]) == (0, 1)
    assert result["step"]["updates"] == 3 and result["step"]["predicted_s"] is None
    assert optimus(["plan", config, "--against", str(run_dir), "--machine", "h100"]) == 0
    assert "h100" in (printed := capsys.readouterr().out) and "3 updates" in printed
    machine = machine_file(run_dir.parent / "m.toml", 1e9)
    assert optimus(["plan", config, "--against", str(run_dir), "--machine", machine]) == 0
    assert str(run_dir) not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "settings", "message"),
    [
        (shutil.rmtree, [], "not a run directory"),
        (None, ["train.microbatch_size=2"], "has train.microbatch_size = 1, but the configuration"),
        (None, ["model.num_layers=4"], "has model.num_layers = 2, but the configuration"),
        ("metrics.jsonl", [], "metrics.jsonl: line 3 is damaged"),
        (FIT_FILE, [], f"{FIT_FILE}: damaged"),
        ("config.toml", [], "config.toml"),
        (lambda run_dir: (run_dir / "metrics.jsonl").write_text(""), [], "has no update"),
    ],
)
def test_comparison_refuses_another_or_a_damaged_run(
    measured_run, tmp_path, capsys, damage, settings, message
):
    config, source, _ = measured_run
    run_dir = tmp_path / "run"
    shutil.copytree(source, run_dir, ignore=shutil.ignore_patterns("checkpoints"))
    if isinstance(damage, str):
        lines = (run_dir / damage).read_text().splitlines(keepends=True)
        lines[2] = '{"ste' + lines[2][:4] + "\n"
        (run_dir / damage).write_text("".join(lines))
    elif damage is not None:
        damage(run_dir)
    assert optimus(["plan", config, *settings, "--against", str(run_dir)]) == 2
    printed = capsys.readouterr()
    assert not printed.out and message in printed.err and printed.err.count("\n") == 1


def test_comparison_ignores_a_line_that_is_being_written(measured_run, tmp_path):
    config, source, _ = measured_run
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    assert compare(load(config), str(tmp_path), None)["step"]["updates"] == 3
    (tmp_path / FIT_FILE).unlink()  # as after a run of an earlier version
    with pytest.raises(ConfigError, match="the number of ranks is unknown"):
        compare(load(config), str(tmp_path), None)
    (only,) = compare(load(config, "parallel.dp=1"), str(tmp_path), None)["memory"]
    assert only["measured_bytes"] == lines_of(source)[-1]["mem_bytes"]


def load(path: str, *overrides: str):
    from optimus.config import load_config

    return load_config(path, overrides)


def test_damaged_file_of_figures_is_replaced(tmp_path, caplog):
    (tmp_path / FIT_FILE).write_bytes(files.checked_json({"format": 1}))
    assert not fit._has_figures(tmp_path, "key")
    assert "damaged" in caplog.text
