"""Traces of pipeline actions in the Chrome Trace Event format, which ui.perfetto.dev displays.

The trace of a planned step and the trace of a measured step contain the same actions with the same
names, in the same order on each rank, so that the two traces can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from optimus.errors import ConfigError, reason_of


class TracedAction(NamedTuple):
    """A pipeline action of a rank. Times are in seconds from the start of the training step."""

    kind: str
    """Name of the kind of action, such as `F`."""
    stage: int
    microbatch: int
    start_s: float
    end_s: float

    @classmethod
    def of(cls, action: Any, start_s: float, end_s: float) -> TracedAction:
        """Return the TracedAction for `action`, an action of a pipeline schedule, with its
        times."""
        return cls(action.kind.name, action.stage, action.microbatch, start_s, end_s)

    @property
    def name(self) -> str:
        """Name of the action in a trace."""
        return f"{self.kind} stage {self.stage} microbatch {self.microbatch}"


class TracedWork(NamedTuple):
    """An operation on a chunk, such as a transfer to the device, that a resource of a rank
    executes. Times are in seconds from the start of the training step."""

    kind: str
    """Name of the resource, such as `to device` for the copies from host memory to the device."""
    chunk: int
    start_s: float
    end_s: float

    @property
    def name(self) -> str:
        """Name of the operation in a trace."""
        return f"{self.kind} chunk {self.chunk}"


Traced = TracedAction | TracedWork


def write_trace(
    path: Path,
    ranks: Sequence[Sequence[TracedAction]],
    title: str,
    others: Mapping[str, Sequence[Sequence[Traced]]] = {},
) -> None:
    """Write a trace with a row for each rank.

    Args:
        path: The file.
        ranks: The actions of each rank, in order.
        title: Name of the trace, such as `planned`.
        others: Operations of resources that are not the device, such as transfers. The key is the
            name of the resource; the value has the operations of each rank. In the trace, a
            resource is a process that has a row for each rank, and more rows if operations of a
            rank overlap.

    Raises:
        ConfigError: The file cannot be written.
    """
    events = list(_process(0, title, ranks))
    for number, (name, of_ranks) in enumerate(others.items(), 1):
        if any(of_ranks):
            events += _process(number, f"{title} {name}", of_ranks)
    try:
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise ConfigError(f"--trace {path}: {reason_of(error)}; use another file") from error


def _process(
    number: int, title: str, ranks: Sequence[Sequence[Traced]]
) -> Iterator[dict[str, Any]]:
    """Yield the trace events of a process of the trace, which has a row for each rank. Actions of a
    rank that overlap in time are in separate rows."""
    process = {"pid": number, "ph": "M"}
    yield {**process, "name": "process_name", "args": {"name": title}}
    for rank, actions in enumerate(ranks):
        ends: list[float] = []  # of the last action of each row
        for action in sorted(actions, key=lambda action: action.start_s):
            row = next((r for r, end in enumerate(ends) if end <= action.start_s), len(ends))
            if row == len(ends):
                ends.append(0.0)
                thread = {"tid": rank + row * len(ranks)}
                name = {"name": f"rank {rank}"}
                yield {**process, **thread, "name": "thread_name", "args": name}
            ends[row] = action.end_s
            yield {
                "name": action.name,
                "cat": action.kind,
                "ph": "X",
                "pid": number,
                "tid": rank + row * len(ranks),
                "ts": 1e6 * action.start_s,
                "dur": 1e6 * (action.end_s - action.start_s),
            }
