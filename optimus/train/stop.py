"""Handle requests to stop a run: Ctrl-C, signals and the deadline.

A run finishes the current update and saves a checkpoint before it stops.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from typing import TYPE_CHECKING

from optimus.launch import environment
from optimus.launch.environment import RENDEZVOUS
from optimus.launch.signals import STOP_SIGNALS, signal_label

if TYPE_CHECKING:
    import torch

    from optimus.distributed.collectives import Group

logger = logging.getLogger(__name__)

_DEADLINE = -1
_PRIORITY = (0, _DEADLINE, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
"""The reasons to stop, in ascending order of priority: 0 (no reason), _DEADLINE and signal numbers.
If ranks have different reasons, all ranks report the reason with the highest priority."""


class StopRequest:
    """Records the stop signals that this rank receives, checks the deadline, and decides together
    with all other ranks to stop."""

    def __init__(self, deadline_s: float, job_end: float | None = None) -> None:
        """Install handlers for STOP_SIGNALS.

        Args:
            deadline_s: Seconds from the start of this process to the deadline; 0: no deadline.
            job_end: Unix time of a second deadline; None: no second deadline. The earlier deadline
                applies.
        """
        self._end = environment.STARTED + deadline_s if deadline_s else math.inf
        if job_end is not None:
            self._end = min(self._end, time.monotonic() + job_end - time.time())
        self._reason = 0
        for number in STOP_SIGNALS:
            # SIGHUP stays ignored if nohup started this run. Ranks of the spawner ignore SIGHUP,
            # too, but only until this handler is installed.
            is_ignored = signal.getsignal(number) is signal.SIG_IGN
            if number != signal.SIGHUP or RENDEZVOUS in os.environ or not is_ignored:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        # The spawner sends the signal that it received, then SIGTERM. The handler of SIGTERM may
        # interrupt the first signal's handler and set the reason to SIGTERM. The handler of the
        # first signal then replaces this reason.
        is_first = self._reason in (0, signal.SIGTERM) and self._reason != number
        if is_first:
            self._reason = number
        if number == signal.SIGINT:  # a second Ctrl-C ends the process at once
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if not is_first:
            return
        again = ""
        if number == signal.SIGINT:
            again = "; press Ctrl-C again to stop at once without saving"
        logger.info(
            "%s: finishing this step and saving a checkpoint%s", signal_label(number), again
        )

    def agreed(self, group: Group, device: torch.device) -> str | None:
        """Decide together with the other ranks of `group` whether the run stops after this step.
        All ranks of `group` must call this method.

        Returns:
            A text with the reason for the stop; None if the run continues. All ranks return the
            same value.
        """
        from optimus.distributed.collectives import greatest

        reason = self._reason
        if not reason and time.monotonic() >= self._end:
            reason = _DEADLINE
        # Some ranks may have received only SIGTERM, while other ranks have also received the first
        # signal of the spawner.
        code = greatest(_PRIORITY.index(reason), group, device)
        if code == 0:
            return None
        agreed = _PRIORITY[code]
        return "the deadline has passed" if agreed == _DEADLINE else signal_label(agreed)
