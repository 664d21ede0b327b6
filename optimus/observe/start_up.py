"""Where the time from a command to the end of its first update goes, as one rank saw it."""

from __future__ import annotations

import contextlib
import os
import time

from optimus.launch.environment import COMMAND_STARTED


class StartUp:
    """A stopwatch that is told whenever a part is done."""

    def __init__(self, process: float | None = None) -> None:
        """`process`: when this process began, if all it does is this run; its imports are a part
        then, and what our spawner did before. What another launcher did is not known."""
        self._parts: dict[str, float] = {}
        self._processor = 0.0 if process is not None else time.process_time()
        self._began = self._last = time.monotonic() if process is None else process
        if process is None:
            return
        with contextlib.suppress(KeyError, ValueError):  # no number is not our spawner's
            command = float(os.environ[COMMAND_STARTED])
            if 0 <= command <= process:
                self._began, self._parts["launch"] = command, process - command
        self.done("imports")

    def done(self, part: str) -> None:
        """What took the time since the part before."""
        now = time.monotonic()
        self._parts[part], self._last = now - self._last, now

    def told(self) -> str:
        """One line, of seconds; those of the processor are this process's alone."""
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self._parts.items())
        whole, processor = self._last - self._began, time.process_time() - self._processor
        return f"start-up {whole:.2f} s: {parts}; processor {processor:.2f}"
