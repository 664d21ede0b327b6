"""Durations of the phases from a command to the end of its first update, on one rank."""

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
            process_start: Value of `time.monotonic` at the start of this process. The phase
                `imports` lasts from then until now. With `--nproc`, a phase `launch` precedes
                `imports`; it begins at the start of the command. If `process_start` is None, the
                stopwatch starts now and has neither phase.
        """
        self._phases: list[tuple[str, float]] = []
        self._processor_start = 0.0 if process_start is not None else time.process_time()
        self._start = self._last = time.monotonic() if process_start is None else process_start
        if process_start is None:
            return
        with contextlib.suppress(KeyError, ValueError):  # only `--nproc` sets it
            command_start = float(os.environ[COMMAND_STARTED])
            if 0 <= command_start <= process_start:
                self._start = command_start
                self._phases.append(("launch", process_start - command_start))
        self.done("imports")

    def done(self, phase: str) -> None:
        """End the phase `phase`, which began when the previous phase ended."""
        now = time.monotonic()
        self._phases.append((phase, now - self._last))
        self._last = now

    def record(self) -> StartUpRecord:
        """Return the record of all phases that have ended."""
        processor_s = time.process_time() - self._processor_start
        return StartUpRecord(tuple(self._phases), self._last - self._start, processor_s)
