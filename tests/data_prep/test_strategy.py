"""How the way of reading is chosen."""

from __future__ import annotations

from data_prep import strategy
from data_prep.ranks import ALONE, Team
from data_prep.shuffle import read_order


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
