"""Time from a command to the end of its first update, by phases, on one rank."""

from __future__ import annotations

import contextlib
import os
import time

from optimus.launch.environment import COMMAND_STARTED
from optimus.observe.events import StartUpRecord


class StartUp:
    """A stopwatch with a lap for each phase of the start."""

    def __init__(self, process_start: float | None = None) -> None:
        """Start the stopwatch.

        Args:
            process_start: `time.monotonic` at the start of this process, if all it does is this
                run: its imports are a phase then, and so is the work of our spawner before it. That
                of another launcher is not known. None starts now.
        """
        self._phases: list[tuple[str, float]] = []
        self._processor_start = 0.0 if process_start is not None else time.process_time()
        self._start = self._last = time.monotonic() if process_start is None else process_start
        if process_start is None:
            return
        with contextlib.suppress(KeyError, ValueError):  # not set by our spawner
            command_start = float(os.environ[COMMAND_STARTED])
            if 0 <= command_start <= process_start:
                self._start = command_start
                self._phases.append(("launch", process_start - command_start))
        self.done("imports")

    def done(self, phase: str) -> None:
        """End a phase, which took the time since the end of the phase before."""
        now = time.monotonic()
        self._phases.append((phase, now - self._last))
        self._last = now

    def record(self) -> StartUpRecord:
        """Return the phases until now."""
        processor_s = time.process_time() - self._processor_start
        return StartUpRecord(tuple(self._phases), self._last - self._start, processor_s)
