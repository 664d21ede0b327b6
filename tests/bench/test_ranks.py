"""Test that an error of all ranks of a benchmark in scripts/bench ends all ranks and is printed
once."""

from __future__ import annotations

from pathlib import Path

import pytest
from common import measure_on_rank

from optimus.distributed.agreement import RunEnded
from optimus.errors import ConfigError, OutcomeKind
from optimus.launch.environment import read_launch_env


def refuse(folder: str) -> bool:
    """Raise the same error on all ranks. Return True if this rank must print the error."""

    def measure(*arguments: object) -> dict:
        raise ConfigError("no such size")

    with pytest.raises(RunEnded, match="no such size") as ended:
        measure_on_rank(read_launch_env(), Path(folder), measure, ())
    assert ended.value.kind is OutcomeKind.USAGE
    return ended.value.prints


def test_error_of_all_ranks_is_printed_once(ranks, tmp_path):
    assert ranks(2, refuse, str(tmp_path), start_world=False) == [True, False]
