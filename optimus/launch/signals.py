"""Handling of signals that stop a run, before its first update. Imports no torch.

Until the first update such a signal ends the process at once, because there is nothing to save.
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
    """Return the name of a signal for messages: Ctrl-C for SIGINT, else the signal's name."""
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
    """Install handlers with which a stop signal ends this process with one line, if it is the only
    process of its run. A `StopRequest` replaces them.

    A handler that raised an exception would not do: torch's imports swallow some exceptions, and
    others end in a traceback. If the run has several ranks, each keeps the signals' default action,
    which also works while the rank waits for others.
    """

    def end(number: int, frame: object) -> NoReturn:
        os._exit(report_early_stop(number))

    if not is_launched():
        for number in STOP_SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, end)
