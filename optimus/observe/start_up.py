"""Where the time from a command to the end of its first update goes, as one rank saw it."""

from __future__ import annotations

import os
import time

from optimus.launch_env import COMMAND_STARTED, STARTED


class StartUp:
    """A stopwatch that is told whenever a part is done."""

    def __init__(self) -> None:
        """Once everything is imported. What our spawner did before is a part of its own; what
        another launcher did is not known."""
        command = float(os.environ.get(COMMAND_STARTED, STARTED))
        self._parts = {"launch": STARTED - command} if command != STARTED else {}
        self._began, self._last = command, STARTED
        self.done("imports")

    def done(self, part: str) -> None:
        """What took the time since the part before."""
        now = time.monotonic()
        self._parts[part], self._last = now - self._last, now

    def told(self) -> str:
        """One line, of seconds; those of the processor are this process's alone."""
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self._parts.items())
        whole = self._last - self._began
        return f"start-up {whole:.2f} s: {parts}; processor {time.process_time():.2f}"
