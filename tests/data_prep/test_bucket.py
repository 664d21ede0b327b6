"""Tests that the strategies `bucket` and `gather`, which read the rows of shards in different ways,
write the same bytes, also after kills and damage."""

from __future__ import annotations

import shutil

import pytest

from data_prep.cli import main
from data_prep.pipeline.shard import PROCESS_BYTES
from data_prep.shuffle import gather
from tests.data_prep.corpus import killed_until_done, run_arguments, tree
from tests.kit.faults.disk import flip


@pytest.mark.parametrize("block", ["one run", "many runs"])
@pytest.mark.parametrize("workers", [1, 2])
def test_buckets_give_the_bytes_of_gather(made, tmp_path, monkeypatch, block, workers):
    out = tmp_path / "data"
    more = ["--strategy", "bucket", "--workers", str(workers)]
    if block == "many runs":
        monkeypatch.setattr("data_prep.pipeline.shard._LEAST_BLOCK_BYTES", 1)
        monkeypatch.setattr("data_prep.runtime.memory._BASE_BYTES", 1)  # permits a small --memory
        more += ["--memory", str(PROCESS_BYTES * (workers + (workers > 1)) + 20_000 * workers)]
    assert main(run_arguments(made.text, made.tokenizer, out, *more)) == 0
    assert tree(out) == tree(made.data)


def test_kills_at_each_commit_of_buckets_change_no_byte(made, tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.pipeline.shard._LEAST_BLOCK_BYTES", 1)
    monkeypatch.setattr("data_prep.runtime.memory._BASE_BYTES", 1)  # permits a small --memory
    out = tmp_path / "data"
    more = ["--strategy", "bucket", "--memory", str(PROCESS_BYTES + 20_000)]
    arguments = run_arguments(made.text, made.tokenizer, out, *more)
    steps = arguments.index("--context")
    assert main(["tokenize", *arguments[1:steps], "--eval-fraction", "0.15",
                 "--unit-size", "6000"]) == 0  # fmt: skip
    assert killed_until_done(arguments, commits=5)[0] >= 8
    assert tree(out) == tree(made.data)


def test_a_flipped_bit_in_a_run_reaches_no_shard(made, tmp_path, monkeypatch, capsys):
    out = tmp_path / "data"
    arguments = run_arguments(made.text, made.tokenizer, out, "--strategy", "bucket")
    real = gather.Spill.do

    def spill_and_damage(spill, runs):
        real(spill, runs)
        flip(next(spill.folder.glob("unit-?????.npy")), -100)

    monkeypatch.setattr(gather.Spill, "do", spill_and_damage)
    assert main(arguments) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert "unit-00000.npy: its content is damaged (hash differs); remove " in message
    monkeypatch.undo()
    shutil.rmtree(message.split("; remove ")[1].split(" and run")[0])
    assert main(arguments) == 0
    assert tree(out) == tree(made.data)
