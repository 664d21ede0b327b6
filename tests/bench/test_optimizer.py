"""Tests of scripts/bench/optimizer.py and scripts/bench/sharding.py."""

from __future__ import annotations

import json

import optimizer
import pytest
import sharding
import torch

from optimus.errors import OptimusError


def test_optimizer_prints_json(capsys):
    arguments = "--size 4096 --threads 1 --rounds 2 --peers torch --json"
    optimizer.main(arguments.split())
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert set(case["contestants"]) == {"ours", "torch", "bound"}
    for row in case["contestants"].values():
        least, median, most = row["ours_is_faster_paired"]
        assert 0 < least <= median <= most
    assert case["norm"]["ours_is_faster_paired"]["twin"][0] > 0


def test_sharding_on_two_ranks(capfd):
    sharding.main(["--ranks", "2", "--hidden", "64", "--rounds", "1", "--json"])
    (result,) = json.loads(capfd.readouterr().out)["ranks"]
    assert result["ranks"] == 2
    for row in result["shardings"]:
        so, epso = row["shard_elements"]
        assert epso / so == pytest.approx(row["predicted"], rel=0.02)
        assert row["experts"] * row["ep"] / row["others"] == pytest.approx(13.5, rel=0.15)
        assert min(row["update"]["paired"] + row["step"]["paired"]) > 0
    assert result["fsdp"]["losses_differ_by"] < 1e-3
    assert 0 < result["peak"]["parts"]["activations"] < result["peak"]["formula"]


def test_wrong_step_is_refused():
    def wrong(chunk):
        return lambda: chunk.master.mul_(1.5)

    with pytest.raises(OptimusError, match="mine does not compute AdamW"):
        optimizer._check("mine", wrong, torch.device("cpu"))
