"""`optimus bench optimizer`: contestants do the same step, and wrong ones end it."""

from __future__ import annotations

import json

import pytest
import torch

from optimus.bench import optimizer
from optimus.cli import main
from optimus.errors import OptimusError


def test_it_prints_json(capsys):
    arguments = "bench optimizer --size 4096 --threads 1 --rounds 2 --peers torch --json --ranks 0"
    assert main(arguments.split()) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert set(case["contestants"]) == {"ours", "torch", "bound"}
    for row in case["contestants"].values():
        least, median, most = row["ours_is_faster_paired"]
        assert 0 < least <= median <= most
    assert case["norm"]["ours_is_faster_paired"]["twin"][0] > 0


def test_on_ranks(capfd):
    arguments = "bench optimizer --size 4096 --threads 1 --rounds 1 --peers torch --json"
    assert main([*arguments.split(), "--ranks", "2", "--hidden", "64"]) == 0
    (found,) = json.loads(capfd.readouterr().out)["ranks"]
    assert found["ranks"] == 2
    for row in found["shardings"]:
        so, epso = row["shard_elements"]
        assert epso / so == pytest.approx(row["predicted"], rel=0.02)
        assert row["experts"] * row["ep"] / row["others"] == pytest.approx(13.5, rel=0.15)
        assert min(row["update"]["paired"] + row["step"]["paired"]) > 0
    assert found["fsdp"]["losses_differ_by"] < 1e-3
    assert 0 < found["peak"]["parts"]["activations"] < found["peak"]["formula"]


def test_a_wrong_step_ends_it():
    def wrong(chunk):
        return lambda: chunk.master.mul_(1.5)

    with pytest.raises(OptimusError, match="mine is off by"):
        optimizer._check("mine", wrong, torch.device("cpu"))
