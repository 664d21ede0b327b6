"""Time from a command to the end of its first update, on one rank, by phase."""

from __future__ import annotations

import contextlib
import os
import time

from optimus.launch.environment import COMMAND_STARTED
from optimus.observe.events import StartUpRecord


class StartUp:
    """Stopwatch for the phases of the start-up."""

    def __init__(self, process_start: float | None = None) -> None:
        """Start the stopwatch.

        Args:
            process_start: Value of `time.monotonic` at the start of this process, if it does
                nothing but this run. Its imports then count as a phase, and so does the time that
                our spawner took to start it; the time of other launchers is not known. None starts
                the stopwatch now.
        """
        self._phases: list[tuple[str, float]] = []
        self._processor_start = 0.0 if process_start is not None else time.process_time()
        self._start = self._last = time.monotonic() if process_start is None else process_start
        if process_start is None:
            return
        with contextlib.suppress(KeyError, ValueError):  # another launcher does not set it
            command_start = float(os.environ[COMMAND_STARTED])
            if 0 <= command_start <= process_start:
                self._start = command_start
                self._phases.append(("launch", process_start - command_start))
        self.done("imports")

    def done(self, phase: str) -> None:
        """End a phase, which began when the phase before it ended."""
        now = time.monotonic()
        self._phases.append((phase, now - self._last))
        self._last = now

    def record(self) -> StartUpRecord:
        """Return the record of all phases that have ended."""
        processor_s = time.process_time() - self._processor_start
        return StartUpRecord(tuple(self._phases), self._last - self._start, processor_s)
