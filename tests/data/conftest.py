"""Fixtures that make data sets from `tiny_data`."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.cli import main
from data_prep.dataset import reader
from tests.kit.runs.tiny import CONTEXT, reshuffle


@pytest.fixture(scope="session")
def many_shards(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data set with more shards than a reader keeps open. Tests must not change the data
    set."""
    out = tmp_path_factory.mktemp("many")
    reshuffle(tiny_data, out, "--seed", "8", "--shard-size", str(3 * CONTEXT * 2))
    assert len(list((out / "shards").glob("*.npy"))) > reader._OPEN_SHARDS
    return out


@pytest.fixture(scope="session")
def few_instances(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a training data set of 77 instances. Tests must not change the data set."""
    out = tmp_path_factory.mktemp("few")
    blend = ["blend", "--source", f"{tiny_data}=1", "--context", str(CONTEXT), "--out", str(out)]
    assert main([*blend, "--instances", "77", "--seed", "3", "--workers", "1"]) == 0
    return out
