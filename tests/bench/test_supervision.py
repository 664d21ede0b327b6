"""Tests of `optimus bench supervision`: the computation of the results, and a small measurement."""

from __future__ import annotations

import json

import psutil
import pytest

from optimus.bench import supervision
from optimus.bench.nan_check import share_figure
from optimus.cli import main
from optimus.config import dump_toml
from optimus.resilience.supervision.ledger import (
    AttemptEnded,
    AttemptStarted,
    History,
    NodeMarked,
)
from tests.kit.runs.tiny import tiny_config


def test_p95_is_the_least_value_that_95_percent_do_not_exceed():
    figure = supervision.figure("f", [*range(100, 0, -1)], bar=95)
    assert (figure["p95"], figure["median"], figure["min"], figure["max"]) == (95, 50.5, 1, 100)
    assert figure["samples"] == 100 and figure["is_met"]
    assert not supervision.figure("f", [*range(1, 101)], bar=94.9)["is_met"]
    assert supervision.figure("f", [0.1, 0.2, 3.0], bar=1.0)["p95"] == 3.0
    assert supervision.figure("f", [], bar=1.0)["is_met"] is None


def test_share_is_decided_only_outside_of_its_interval():
    assert share_figure([0.003, 0.0031] * 20, 0.01)["is_met"] is True
    assert share_figure([0.02, 0.0201] * 20, 0.01)["is_met"] is False
    assert share_figure([0.0098, 0.0102] * 20, 0.01)["is_met"] is None  # limit in the interval
    assert share_figure([0.0, 0.1] * 20, 0.01)["is_met"] is None  # the interval is too wide


def start(attempt: int, time: float) -> AttemptStarted:
    return AttemptStarted(
        time=time, attempt=attempt, nodes=("a", "b"), ranks_per_node=1, port=1, workspace="w"
    )


def test_phases_of_a_restart_add_up_to_the_time_to_the_first_update():
    end = AttemptEnded(time=10.0, attempt=1, outcome="failed", step=3, failure="hard", nodes=("a",))
    mark = NodeMarked(time=10.5, node="a", standing="excluded", reason="")
    history = History([start(1, 1.0), end, mark, start(2, 10.75)])
    assert supervision.marks_after(history, 1) == [mark]
    phases = {"imports": 0.25, "meeting": 1.0, "model and states": 0.5, "first update": 0.25}
    report = {"time": 13.0, "phases": phases, "load_s": 0.125}
    result = supervision.restart_phases(history, 1, report)
    assert sum(result.values()) == pytest.approx(3.0)
    assert (result["kill"], result["decision"], result["start of ranks"]) == (0.5, 0.25, 0.25)
    assert (result["model and states"], result["load"]) == (0.375, 0.125)


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/a/b.py", True), ("/a/b.cpython-311.pyc", True), ("/a/_C.so", True), ("/a/b.json", False)],
)
def test_module_files_have_the_suffix_of_a_module(path, expected):
    assert supervision.is_module(path) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("supervision --only speed", "--only speed is not a figure; use one of faults"),
        ("supervision --rounds 0", "--rounds 0 must be at least 1"),
        ("supervision --nodes 1", "--nodes 1 must be at least 2"),
        ("supervision --updates 19", "--updates 19 must be at least 20"),
        ("supervision --dir /nowhere", "--dir /nowhere: no such directory"),
        ("supervision --steps 3", "--steps has no effect on bench supervision"),
        ("supervision run.toml --only files", "add --only nan-check"),
        ("step", "bench step needs a configuration"),
        ("step run.toml --rounds 2", "--rounds has no effect on bench step"),
    ],
)
def test_mistake_is_refused_in_a_line(arguments, words, capsys):
    assert main(["bench", *arguments.split()]) == 2
    errors = capsys.readouterr().err
    assert words in errors and errors.count("\n") == 1


def test_warm_relaunch_opens_no_module_file(tiny_data, tmp_path):
    """A node of a run fails, and the ranks of the next attempt are forked from warm processes. The
    warm processes have imported all modules that the ranks need up to their first evaluation and
    checkpoint. The test takes some seconds, because it starts the processes of a launch."""
    before = {*psutil.Process().children(recursive=True)}
    files = supervision.measure_files(tmp_path / "files", tiny_data, nodes=2)
    assert files.modules == []
    assert any(path.endswith("manifest.json") for path in files.opened)
    assert any(path.endswith("metrics.jsonl") or "metrics" in path for path in files.created)
    assert {*psutil.Process().children(recursive=True)} <= before


def test_nan_check_prints_a_json_object(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(dump_toml(tiny_config("unused", "unused")))
    options = ["--only", "nan-check", "--updates", "20", "--json"]
    assert main(["bench", "supervision", str(path), *options]) == 0
    result = json.loads(capsys.readouterr().out)
    (figure,) = result["figures"]
    assert figure["samples"] == 20 and 0 < figure["value"] < 1
    assert figure["interval"][0] <= figure["value"] <= figure["interval"][1]
    assert {"torch", "cores", "load_average_before", "seconds", "measured"} <= {*result}
    assert supervision.format_supervision(result).count("| NaN check in an update |") == 1
