"""Traces of pipeline actions in the Chrome Trace Event format, which ui.perfetto.dev displays.

The trace of a planned step and the trace of a measured step contain the same actions with the same
names, in the same order on each rank, so that the two traces can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from optimus.errors import ConfigError, reason_of


class TracedAction(NamedTuple):
    """A pipeline action of a rank. Times are in seconds from the start of the training step."""

    kind: str
    """Name of the kind of action, such as `F`."""
    stage: int
    microbatch: int
    start_s: float
    end_s: float

    @property
    def name(self) -> str:
        """Name of the action in a trace."""
        return f"{self.kind} stage {self.stage} microbatch {self.microbatch}"


def write_trace(path: Path, ranks: Sequence[Sequence[TracedAction]], title: str) -> None:
    """Write a trace with a row for each rank.

    Args:
        path: The file.
        ranks: The actions of each rank, in order.
        title: Name of the trace, such as `planned`.

    Raises:
        ConfigError: The file cannot be written.
    """
    process = {"pid": 0, "ph": "M"}
    events: list[dict] = [{**process, "name": "process_name", "args": {"name": title}}]
    for rank, actions in enumerate(ranks):
        name = {"name": f"rank {rank}"}
        events.append({**process, "tid": rank, "name": "thread_name", "args": name})
        events += (
            {
                "name": action.name,
                "cat": action.kind,
                "ph": "X",
                "pid": 0,
                "tid": rank,
                "ts": 1e6 * action.start_s,
                "dur": 1e6 * (action.end_s - action.start_s),
            }
            for action in actions
        )
    try:
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise ConfigError(f"--trace {path}: {reason_of(error)}; use another file") from error
