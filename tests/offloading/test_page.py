"""The code in docs/offload_one_gpu.md runs, and the table of this page lists all arguments."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import optimus

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "offload_one_gpu.md"


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    names: dict = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    assert "step 2: loss" in capsys.readouterr().out
    homes = {state.home.value for state in names["optimizer"]._offloaded.engine.chunks}
    assert homes == {"host"}
    assert names["large_optimizer"]._offloaded.engine.disk is not None
    before, after = names["model"].state_dict(), names["again"].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    states = [names[name].state_dict()["state"] for name in ("optimizer", "resumed")]
    assert states[0].keys() == states[1].keys() and states[0]
    for number, state in states[0].items():
        assert all(torch.equal(values, states[1][number][key]) for key, values in state.items())


def test_the_page_has_all_arguments():
    table = PAGE.read_text().split("| argument |")[1].split("\n\n")[0]
    arguments = set(inspect.signature(optimus.offload).parameters)
    named = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| ([^|]+) \|", table, re.M))))
    assert arguments - named == {"model"} and named <= arguments
