"""After tokenizing: no two documents have one id, or the later ones are taken out again."""

from __future__ import annotations

from data_prep.runtime.ranks import Team, share, wait_for
from data_prep.tokenize import duplicates
from data_prep.tokenize.token_plan import parts_dirs
from data_prep.tokenize.tokenize import (
    TokenizeWork,
    complete,
    do_units,
    duplicate_error,
    memory_to_compare,
)


def drop_duplicates(work: TokenizeWork, workers: int, team: Team) -> None:
    """See to it that complete token arrays hold no id twice.

    One rank compares for all. Raises DataError for the first duplicate, by file and line of both,
    unless such documents are set aside: then units that hold some are tokenized again without them.
    """
    wait_for(team, lambda: work.dropped() is not None, lambda: _compare(work))
    dropped = work.dropped()
    assert dropped is not None
    if len(dropped.rows) and not work.quarantine:
        raise duplicate_error(work.plan, *dropped.rows[0].tolist())
    units = [
        unit
        for unit, inputs in enumerate(work.plan.units)
        if len(dropped.rows) and dropped.of_inputs(*inputs) and not complete(work, unit, dropped)
    ]
    if not units:
        return
    sizes = [work.plan.unit_bytes(unit) for unit in units]
    mine = [units[item] for item in share(sizes, team.rank, team.world)]
    do_units(work, workers, mine, team.label("leave out duplicate ids"))
    if team.world > 1:
        wait_for(
            Team(1, 2, team.patience_s),
            lambda: all(complete(work, unit, dropped) for unit in units),
            lambda: do_units(work, workers, units, team.label("leave out duplicate ids")),
        )


def _compare(work: TokenizeWork) -> None:
    if work.dropped() is not None:
        return
    memory = memory_to_compare(work.limits)
    folders = list(parts_dirs(work.out, work.plan).values())
    rows = duplicates.find(folders, range(len(work.plan.units)), memory)
    if len(rows) and not work.quarantine:
        raise duplicate_error(work.plan, *rows[0].tolist())
    duplicates.write(work.tokens_dir, work.plan_xxh3, rows)
