"""Handling of stop signals before the first update of a run. Imports no torch.

Before the first update, a stop signal ends the process at once, because there is nothing to save.
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
    """Install signal handlers that end this process with one log line on a stop signal. A
    `StopRequest` replaces them later.

    The handlers do not raise an exception. During the import of torch, an exception might be
    swallowed or might end in a traceback. If a launcher has started this process, no handlers are
    installed, because the default action of a signal works even while the rank waits for other
    ranks.
    """

    def end(number: int, frame: object) -> NoReturn:
        os._exit(report_early_stop(number))

    if not is_launched():
        for number in STOP_SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, end)
