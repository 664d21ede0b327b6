"""Requests to stop a run: Ctrl-C, signals and the deadline.

From the first update on, a request finishes the update and writes a checkpoint first.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import TYPE_CHECKING

from optimus.launch.environment import RENDEZVOUS, STARTED
from optimus.launch.signals import STOP_SIGNALS, signal_label

if TYPE_CHECKING:
    import torch

    from optimus.distributed.collectives import Group

logger = logging.getLogger(__name__)

_DEADLINE = -1
_PRIORITY = (0, _DEADLINE, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
"""Reasons to stop, 0 for none; of the reasons of several ranks the last in this list counts."""


class StopRequest:
    """Remembers a signal or a passed deadline, and agrees on it with all ranks."""

    def __init__(self, deadline_s: float) -> None:
        """`deadline_s`: from the process's start on; 0: never."""
        self._end = STARTED + deadline_s if deadline_s else None
        self._reason = 0
        for number in STOP_SIGNALS:
            # nohup ignores SIGHUP for the process; the spawner does so for its ranks until now.
            if number != signal.SIGHUP or RENDEZVOUS in os.environ or not _is_ignored(number):
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        # The spawner sends SIGTERM after the signal that it received. The handler of SIGTERM may
        # interrupt that of the first signal, which then still names the reason.
        is_first = self._reason in (0, signal.SIGTERM) and self._reason != number
        if is_first:
            self._reason = number
        if number == signal.SIGINT:  # a second Ctrl-C does not wait
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if not is_first:
            return
        again = ""
        if number == signal.SIGINT:
            again = "; press Ctrl-C again to stop at once without it"
        logger.info(
            "%s: finishing this step and saving a checkpoint%s", signal_label(number), again
        )

    def agreed(self, group: Group, device: torch.device) -> str | None:
        """Return after a step why all ranks stop now, or None. A collective."""
        from optimus.distributed.collectives import greatest

        reason = self._reason
        if not reason and self._end is not None and time.monotonic() >= self._end:
            reason = _DEADLINE
        # A rank may have SIGTERM alone where another has the signal that the spawner received.
        code = greatest(_PRIORITY.index(reason), group, device)
        if code == 0:
            return None
        agreed = _PRIORITY[code]
        return "the deadline has passed" if agreed == _DEADLINE else signal_label(agreed)


def _is_ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN
