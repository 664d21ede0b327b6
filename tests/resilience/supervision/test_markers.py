"""Tests of markers, the files in which ranks report errors. The supervisor reads the markers, and
ignores damaged files."""

from __future__ import annotations

import json
import math
import os

from optimus.io.workspace import Workspace
from optimus.resilience.supervision.attempt import Attempt
from optimus.resilience.supervision.markers import (
    Instance,
    LayerOutput,
    Marker,
    marker_dir,
    read_markers,
    write_marker,
)

FIGURES = {
    "text": "loss is nan",
    "host": "n1",
    "device": "cpu",
    "microbatch": 3,
    "layer": "blocks.0",
    "direction": "forward",
    "was_repeated": True,
    "instances": (Instance(data="/my data", instance=7),),
    "data_xxh3": "ab",
    "layers": {"blocks.0": LayerOutput(min=None, max=2.0, mean=1.5, nonfinite=0.5)},
}


def test_marker_of_a_rank_is_read_again(tmp_path, monkeypatch):
    attempt = Attempt(4, "a", tmp_path / ".work-x", tmp_path / "page", None)
    for name, value in attempt.variables().items():
        monkeypatch.setenv(name, value)
    workspace = Workspace.open(tmp_path / ".work-x")
    write_marker(workspace, tmp_path, 2, 9, **FIGURES)
    path = marker_dir(tmp_path, "x") / "nonfinite-rank2.json"
    written = Marker(rank=2, step=9, attempt=4, node="a", path=str(path), **FIGURES)
    assert read_markers(tmp_path, "x") == [written]
    keys = {"rank", "step", "attempt", "node", "what", *FIGURES} - {
        "text"
    }  # no key without a value
    assert {*json.loads(path.read_text())} == keys


def test_figures_that_are_not_numbers_are_written(tmp_path):
    workspace = Workspace.open(tmp_path / ".work")
    layers = {"blocks.0": LayerOutput(min=-1e300, max=1e300, mean=math.inf, nonfinite=0.0)}
    write_marker(workspace, tmp_path, 0, 1, text="a\x1b[31m", layers=layers)
    value = json.loads((tmp_path / "log" / "nonfinite-rank0.json").read_text())
    assert value["layers"]["blocks.0"]["mean"] is None and "\x1b" not in value["what"]


def test_marker_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    workspace = Workspace.open(tmp_path / ".work")
    (tmp_path / "log").write_text("")
    write_marker(workspace, tmp_path, 0, 1, text="loss is nan")
    assert "could not write" in caplog.text


def test_damaged_markers_are_ignored(tmp_path):
    folder = marker_dir(tmp_path, "x")
    folder.mkdir(parents=True)
    right = {"rank": 0, "node": "a", "step": 3, "what": "loss is nan", "of a later version": 1}
    (folder / "nonfinite-rank0.json").write_text(json.dumps(right))
    wrong = [
        *([], {}, right | {"rank": None}, right | {"step": -1}, right | {"what": 5}),
        *(right | {"instances": 5}, right | {"layers": [1]}, right | {"layers": {"a": {}}}),
        *(right | {"microbatch": ""}, right | {"direction": "up"}, right | {"node": None}),
    ]
    texts = [*map(json.dumps, wrong), '{"rank": 1e999}', "[" * 60_000, ""]
    for number, text in enumerate(texts, 1):
        (folder / f"nonfinite-rank{number}.json").write_text(text)
    os.mkfifo(folder / "nonfinite-rank99.json")
    assert [marker.text for marker in read_markers(tmp_path, "x")] == ["loss is nan"]
    assert read_markers(tmp_path, "y") == []
