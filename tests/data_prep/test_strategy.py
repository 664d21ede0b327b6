"""The choice between the strategies `gather` and `bucket`."""

from __future__ import annotations

from data_prep.runtime.ranks import ALONE, WorkerGroup
from data_prep.shuffle import gather
from data_prep.shuffle.order import read_order


def test_auto_strategy_depends_on_the_cost_of_reads(made, monkeypatch, capsys):
    order = read_order(made.data)

    def choose(group=ALONE, run_rows=1000, how="auto") -> str:
        return gather.choose_strategy(made.data, order, how, group, run_rows)

    assert choose() == "gather"
    monkeypatch.setattr(gather, "usable_memory", lambda: 100)
    monkeypatch.setattr(gather, "random_read_cost", lambda *_: 3.5)
    assert choose() == "bucket" and choose(WorkerGroup(0, 2)) == "gather"
    assert choose(run_rows=16) == "gather", "a run has 2.6 rows per shard"
    assert capsys.readouterr().err == ""
    assert choose(run_rows=16, how="bucket") == "bucket"
    assert "bucket can read only 2.6 adjacent rows" in capsys.readouterr().err
    monkeypatch.setattr(gather, "random_read_cost", lambda *_: 2.5)
    assert choose() == "gather"
    monkeypatch.undo()
    monkeypatch.setattr(gather, "_PROBE_ROWS", 1)
    assert 0 < gather.random_read_cost(made.data, order) < 1e6
