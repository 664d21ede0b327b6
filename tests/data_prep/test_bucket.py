"""Sorted runs, and estimates of a run."""

from __future__ import annotations

import json
import signal

import numpy as np
import pytest

from data_prep import strategy
from data_prep.cli import main
from data_prep.permutation import Permutation
from data_prep.plan import duration
from data_prep.ranks import ALONE, Team
from data_prep.shard import PROCESS_BYTES
from data_prep.shuffle import read_order
from tests.data_prep.corpus import run_arguments, run_killed_at, tree


@pytest.mark.parametrize("n", [1, 2, 3, 1000, 36033, 10**12])
def test_the_inverse_undoes_the_permutation(n):
    places = np.arange(n) if n < 10**6 else np.array([0, 1, 12345, n - 1])
    permutation = Permutation(n, 42, 3)
    assert np.array_equal(permutation.inverse(permutation.apply(places)), places)


@pytest.mark.parametrize("block", ["one run", "many runs"])
@pytest.mark.parametrize("workers", [1, 2])
def test_buckets_give_the_same_bytes(made, tmp_path, monkeypatch, block, workers):
    out = tmp_path / "data"
    more = ["--strategy", "bucket", "--workers", str(workers)]
    if block == "many runs":
        monkeypatch.setattr("data_prep.shard._LEAST_BLOCK_BYTES", 1)
        monkeypatch.setattr("data_prep.limits._BASE_BYTES", 1)  # for this corpus less does
        more += ["--memory", str(PROCESS_BYTES * (workers + (workers > 1)) + 20_000 * workers)]
    assert main(run_arguments(made.text, made.tokenizer, out, *more)) == 0
    assert tree(out) == tree(made.data)


def test_kills_at_every_commit_of_buckets(made, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("data_prep.shard._LEAST_BLOCK_BYTES", 1)
    monkeypatch.setattr("data_prep.limits._BASE_BYTES", 1)  # for this corpus less does
    out = tmp_path / "data"
    more = ["--strategy", "bucket", "--memory", str(PROCESS_BYTES + 20_000)]
    arguments = run_arguments(made.text, made.tokenizer, out, *more)
    steps = arguments.index("--context")
    assert main(["tokenize", *arguments[1:steps], "--eval-fraction", "0.15",
                 "--unit-size", "6000"]) == 0  # fmt: skip
    kills = 0
    while status := run_killed_at(arguments, 1 + kills % 5, before=kills // 5 % 2 == 0):
        assert status == -signal.SIGKILL
        kills += 1
    assert kills >= 8
    assert main(arguments) == 0
    assert tree(out) == tree(made.data)
    capfd.readouterr()


def test_auto_chooses_by_what_reading_costs(made, monkeypatch):
    order = read_order(made.data)

    def choose(team=ALONE) -> str:
        return strategy.choose_strategy(made.data, order, "auto", team)

    assert choose() == "gather"
    monkeypatch.setattr(strategy, "memory_bytes", lambda: 100)
    monkeypatch.setattr(strategy, "random_read_cost", lambda *_: 3.5)
    assert choose() == "bucket" and choose(Team(0, 2)) == "gather"
    monkeypatch.setattr(strategy, "random_read_cost", lambda *_: 2.5)
    assert choose() == "gather"
    monkeypatch.undo()
    monkeypatch.setattr(strategy, "_PROBE_ROWS", 1)
    assert 0 < strategy.random_read_cost(made.data, order, 32) < 1e6


def test_plan_is_near_the_truth(made, tmp_path, capsys):
    words = run_arguments(made.text, made.tokenizer, tmp_path / "out")
    assert main(["plan", *words[1:], "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    manifest = json.loads((made.data / "manifest.json").read_text())
    held = json.loads((made.data / "eval" / "manifest.json").read_text())
    tokens = manifest["tokens"] + held["tokens"]
    assert abs(value["tokens"] / tokens - 1) < 0.15
    assert abs(value["documents"] / (manifest["documents"] + held["documents"]) - 1) < 0.3
    on_disk = sum(len(content) for name, content in tree(made.data).items() if ".npy" in name)
    assert abs(value["disk_final_bytes"] / on_disk - 1) < 0.3
    assert value["fits"] and value["dtype"] == "uint16" and value["tokenize_s"] > 0
    assert not (tmp_path / "out").exists(), "it writes nothing"
    assert not list(tmp_path.iterdir())
    assert main(["plan", *words[1:]]) == 0
    assert "fits" in capsys.readouterr().out


def test_plan_says_when_it_does_not_fit(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: Free())
    words = run_arguments(made.text, made.tokenizer, tmp_path / "out")
    assert main(["plan", *words[1:]]) == 1
    assert "does NOT fit" in capsys.readouterr().out


class Free:
    free = 1000


def test_durations():
    assert [duration(s) for s in (5, 90, 7200, 200_000)] == [
        "5.0 s",
        "1.5 min",
        "2.0 h",
        "2.3 days",
    ]
