"""Signals that stop a run, before its first update. Imports no torch.

Until the first update a request ends the process at once, because there is nothing to save.
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
    """Return the name of a signal in messages: the key that sends it, or the signal's name."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def report_early_stop(number: int) -> int:
    """Print that the run stopped before its first update; return the exit status for that."""
    logger.info(
        "stopped before the first step (%s); give the same command again to start",
        signal_label(number),
    )
    kind = OutcomeKind.INTERRUPTED if number == signal.SIGINT else OutcomeKind.STOPPED
    return kind.exit_status


def exit_on_stop_signals() -> None:
    """Let a signal end this process with one line until a `StopRequest` exists, if it is the only
    process of its run.

    An exception does not end it: torch's imports swallow some, and others end in a traceback. A
    rank of several keeps the default action, which also works inside a wait for other ranks.
    """

    def end(number: int, frame: object) -> NoReturn:
        os._exit(report_early_stop(number))

    if not is_launched():
        for number in STOP_SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, end)
