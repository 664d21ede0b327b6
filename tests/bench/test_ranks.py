"""Ranks of a benchmark end together."""

from __future__ import annotations

import pytest

from optimus.bench.ranks import be_a_rank
from optimus.distributed.agreement import RunEnded
from optimus.errors import ConfigError, OutcomeKind


def refused(result: str) -> bool:
    """Fail as all ranks do; return whether this rank prints the line."""

    def measure(*arguments: object) -> dict:
        raise ConfigError("no such size")

    with pytest.raises(RunEnded, match="no such size") as ended:
        be_a_rank(measure, 64, 1, result)
    assert ended.value.kind is OutcomeKind.USAGE
    return ended.value.prints


def test_error_of_all_ranks_is_printed_once(ranks, tmp_path):
    assert ranks(2, refused, str(tmp_path / "result"), start_world=False) == [True, False]
