"""Text, table and picture of a search over layouts."""

from __future__ import annotations

import csv
import io
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from optimus.config import Config, dump_toml
from optimus.errors import counted
from optimus.io.files import atomic_writer, make_dirs, write_bytes
from optimus.observe.report import load_pyplot
from optimus.planner.search import Evaluation, Ranking

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_PROGRESS_S = 10.0
_MOST_POINTS = 20_000
"""Approximate maximum of the number of layouts in a picture. If a ranking has more layouts, the
picture shows every n-th of them."""


class Unit(NamedTuple):
    """The unit of the times of a ranking."""

    name: str
    """Name of the column in layouts.csv and of the key in JSON, with the unit."""
    text: str
    """Name in the text and in the picture, with the unit."""
    size: float
    """Number by which the values of `Evaluation.time` are divided."""


SECONDS = Unit("step_s", "step, s", 1.0)
PFLOP = Unit("bound_pflop", "PFLOP of the busiest rank, including idle time", 1e15)


class SearchProgress:
    """Logs the progress of a search: at the start the number of layouts, then at most one line in
    `_PROGRESS_S` seconds. An object of this class is the argument `report` of `search`."""

    def __init__(self) -> None:
        self._next_s: float | None = None

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if self._next_s is None:
            logger.info("evaluating %s", counted(total, "layout"))
        elif now_s < self._next_s:
            return
        else:
            text = f"{done:,} of {counted(total, 'layout')}"
            logger.info("evaluated %s (%d %%)", text, 100 * done // max(1, total))
        self._next_s = now_s + _PROGRESS_S


def report(ranking: Ranking, top: int, unit: Unit) -> dict[str, Any]:
    """Return a ranking as a dict for JSON: the numbers of evaluated and of rejected layouts, the
    first `top` layouts, and the Pareto front. Each layout has its settings, its time in `unit` and
    its memory in bytes."""
    return {
        "evaluated": len(ranking.evaluations),
        "rejected": dict(ranking.rejected.most_common()),
        "ranking": [_row(evaluation, unit) for evaluation in ranking.evaluations[:top]],
        "pareto": [_row(evaluation, unit) for evaluation in ranking.pareto],
    }


def _row(evaluation: Evaluation, unit: Unit) -> dict[str, Any]:
    settings = evaluation.layout._asdict()
    return settings | {unit.name: evaluation.time / unit.size, "memory_bytes": evaluation.memory}


def format_report(ranking: Ranking, top: int, unit: Unit) -> str:
    """Return a ranking as text: the first `top` layouts, and the numbers of layouts that were
    evaluated and rejected."""
    rows = [(unit.text, "GiB", "pp dp ep tp", "schedule", "microbatch", "recompute", "states")]
    for step_time, memory, layout in ranking.evaluations[:top]:
        stages = f" x {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        on_host = ", offloaded" if layout.offload == "auto" else ""
        rows.append(
            (
                f"{step_time / unit.size:.6g}",
                f"{memory / _GIB:.2f}",
                " ".join(map(str, layout.mesh)),
                layout.schedule + stages,
                str(layout.microbatch_size),
                " ".join(layout.recompute) or "nothing",
                f"{layout.sharding}, {layout.resident}{on_host}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.append(f"{counted(len(ranking.evaluations), 'layout')} evaluated")
    lines += [
        f"{counted(n, 'layout')} rejected: {why}" for why, n in ranking.rejected.most_common()
    ]
    return "\n".join(lines)


def write_report(ranking: Ranking, unit: Unit, directory: Path) -> None:
    """Write two files to `directory`: `layouts.csv`, a table of all evaluated layouts in the order
    of the ranking, and `pareto.png`, a picture of their times and memory."""
    make_dirs(directory)
    text = io.StringIO()
    first = _row(ranking.evaluations[0], unit)
    table = csv.DictWriter(text, first.keys(), lineterminator="\n")
    table.writeheader()
    for evaluation in ranking.evaluations:
        row = _row(evaluation, unit)
        table.writerow(row | {"recompute": " ".join(row["recompute"])})
    write_bytes(directory / "layouts.csv", text.getvalue().encode())
    _draw(ranking, unit, directory / "pareto.png")


def write_config(config: Config, path: str) -> None:
    """Write a configuration as a TOML file, which `optimus train` can read."""
    write_bytes(path, dump_toml(config).encode())


def _draw(ranking: Ranking, unit: Unit, path: Path) -> None:
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 6))
    step = max(1, len(ranking.evaluations) // _MOST_POINTS)
    axes.plot(*_points(ranking.evaluations[::step], unit), ".", ms=2, color="tab:gray")
    axes.plot(*_points(ranking.pareto, unit), "o-", ms=5, label="Pareto front")
    axes.set_xlabel("memory of the fullest rank, GiB")
    axes.set_ylabel(unit.text)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    with atomic_writer(path) as file:
        figure.savefig(file, format="png", dpi=120)
    pyplot.close(figure)


def _points(evaluations: Sequence[Evaluation], unit: Unit) -> tuple[list[float], list[float]]:
    return [e.memory / _GIB for e in evaluations], [e.time / unit.size for e in evaluations]
