"""Sorted runs, removed arrays, estimates: other ways to the same bytes."""

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
from data_prep.verify import verify
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


def arrays(out) -> list[str]:
    return [name for name in tree(out) if name.endswith(".npy") and name.count("unit-")
            and ".docs." not in name and ".ids." not in name]  # fmt: skip


def test_fused_leaves_the_shards_alone(made, tmp_path, capsys):
    out = tmp_path / "data"
    arguments = run_arguments(made.text, made.tokenizer, out, "--fused")
    assert main(arguments) == 0
    assert arrays(out) == [] and len(arrays(made.data)) > 4
    found, expected = tree(out), tree(made.data)
    for name in ("tokens/removed.json", "eval/tokens/removed.json"):
        del found[name]
    assert found == {name: expected[name] for name in expected if name not in arrays(made.data)}
    assert list(verify(out)) == []
    capsys.readouterr()
    assert main(["inspect", str(out), "3"]) == 0 and main(["inspect", str(made.data), "3"]) == 0
    one, two = capsys.readouterr().out.split("instance 3")[1:]
    assert one == two
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert main(arguments) == 0 and main(arguments[:-1]) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_fused_says_what_can_no_longer_be_done(made, tmp_path, capsys):
    out = tmp_path / "data"
    arguments = run_arguments(made.text, made.tokenizer, out, "--fused")
    assert main(arguments) == 0
    for command, told in (
        (["shuffle", str(out), "--to", str(tmp_path / "x"), "--context", "8"], "by --fused"),
        ([*arguments, "--seed", "6"], "seed = 5, now 6"),
        ([*arguments, "--shard-size", "4096"], "instances_per_shard"),
        ([*arguments, "--eval-fraction", "0.2"], "eval_fraction"),
    ):
        capsys.readouterr()
        assert main(command) == 2
        assert told in capsys.readouterr().err.splitlines()[-1]
    assert arrays(out) == []
    (out / "shards" / "shard-00001.npy").unlink()
    assert any("shard-00001" in line for line in verify(out))
    assert main(arguments) == 0, "everything is made again"
    assert list(verify(out)) == [] and arrays(out) == []


def test_fused_killed_while_it_removes(made, tmp_path, monkeypatch):
    out = tmp_path / "data"
    arguments = run_arguments(made.text, made.tokenizer, out, "--fused")
    monkeypatch.setattr("data_prep.run.remove_arrays", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(arguments)
    monkeypatch.undo()
    assert len(arrays(out)) > 4 and list(verify(out)) == []
    assert main(arguments) == 0 and arrays(out) == []


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
