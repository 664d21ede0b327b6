"""Being asked to stop: SIGTERM, SIGUSR1, Ctrl-C, or the deadline. The step is finished first."""

from __future__ import annotations

import signal
import time

import torch

from optimus.dist.collectives import Group, greatest
from optimus.launch_env import STARTED

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Remembers a signal or a passed deadline, and agrees on it with all ranks."""

    def __init__(self, deadline_s: float) -> None:
        """`deadline_s`: from the process's start on; 0: never."""
        self._end = STARTED + deadline_s if deadline_s else None
        self._reason = 0
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self._reason = number
        if number == signal.SIGINT:  # a second Ctrl-C does not wait
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def agreed(self, group: Group, device: torch.device) -> str | None:
        """After a step: why all ranks stop now, or None. A collective."""
        reason = self._reason
        if not reason and self._end is not None and time.monotonic() >= self._end:
            reason = -1
        code = greatest(abs(reason) if reason > 0 else int(reason < 0), group, device)
        if code == 0:
            return None
        return "the deadline has passed" if code == 1 else f"received {signal.Signals(code).name}"
