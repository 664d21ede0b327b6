"""Handling of stop signals before the first update of a run. This module imports no torch.

Such a signal ends the process at once, because there is nothing to save.
"""

from __future__ import annotations

import logging
import os
import signal
from typing import NoReturn

from optimus.errors import OutcomeKind
from optimus.launch.environment import is_launched

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def signal_label(number: int) -> str:
    """Return the label of a signal in messages: Ctrl-C for SIGINT, else its name."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def report_early_stop(number: int) -> int:
    """Log that the run stopped before its first update; return the exit status."""
    logger.info(
        "stopped before the first step (%s); give the same command again to start",
        signal_label(number),
    )
    kind = OutcomeKind.INTERRUPTED if number == signal.SIGINT else OutcomeKind.STOPPED
    return kind.exit_status


def exit_on_stop_signals() -> None:
    """Install handlers that end this process with one log line on a stop signal.

    If a launcher has started this process, no handlers are installed. A `StopRequest` replaces the
    handlers later.
    """

    def end(number: int, frame: object) -> NoReturn:
        # During the import of torch, an exception might be swallowed or end in a traceback.
        os._exit(report_early_stop(number))

    if not is_launched():  # the default action works even while a rank waits for other ranks
        for number in STOP_SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, end)
