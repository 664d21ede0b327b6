"""Handling of stop signals before the first update of a run, and of Ctrl-C in other commands.

A stop signal before the first update ends the process at once, because there is no training state
to save. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from optimus.errors import OutcomeKind

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGTERM. For a signal without a name, such as most
    real-time signals, return `signal NUMBER`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_label(number: int) -> str:
    """Return the label of a signal in messages: Ctrl-C for SIGINT, else its name."""
    return "Ctrl-C" if number == signal.SIGINT else signal_name(number)


def _start_new_line(number: int) -> None:
    """Print a newline if the signal is Ctrl-C and standard error is a terminal. The next message
    then does not begin on the line on which the terminal shows ^C."""
    if number == signal.SIGINT and sys.stderr is not None and sys.stderr.isatty():
        with contextlib.suppress(OSError):
            # sys.stderr.write is not used here: the signal may have interrupted another call of
            # this method.
            os.write(sys.stderr.fileno(), b"\n")


def report_early_stop(number: int) -> int:
    """Log that the run stopped before its first update; return the exit status."""
    _start_new_line(number)
    logger.info(
        "stopped before the first step (%s); run the same command again to start",
        signal_label(number),
    )
    kind = OutcomeKind.INTERRUPTED if number == signal.SIGINT else OutcomeKind.STOPPED
    return kind.exit_status


def report_interrupt(number: int = signal.SIGINT) -> int:
    """Log that Ctrl-C or another stop signal ended the command; return the exit status."""
    _start_new_line(number)
    logger.info("interrupted" if number == signal.SIGINT else f"ended by {signal_label(number)}")
    return OutcomeKind.INTERRUPTED.exit_status


def exit_on_signals(numbers: Iterable[int], report: Callable[[int], int]) -> None:
    """For each of the given signals, install a handler that ends this process. A signal that is
    ignored or already has another handler is not changed.

    Args:
        numbers: Numbers of the signals.
        report: Function that logs one line about the received signal and returns the exit status.
    """

    def end(number: int, frame: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # a second signal prints no second line
        # An exception raised here during the import of torch might be suppressed or cause a
        # traceback.
        os._exit(report(number))

    for number in numbers:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end)


@contextlib.contextmanager
def raising_keyboard_interrupt() -> Iterator[None]:
    """Context manager in which Ctrl-C raises KeyboardInterrupt, so that a command can remove its
    incomplete files. If the process ignores SIGINT, the context manager has no effect."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
