"""Progress of a command: a bar on a terminal, or a line every few seconds in a log."""

from __future__ import annotations

import os
import sys
import time

from optimus.errors import one_line
from optimus.observe.log import bar_size

_LINE_EVERY_S = 10.0
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def short(value: float) -> str:
    """Return a text with three digits of `value` and a decimal prefix, such as 31.5M."""
    for size, prefix in _UNITS:
        if value >= size:
            digits = ".3g" if value < 999.5 * size else ".0f"
            return f"{value / size:{digits}}{prefix}"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def say(line: str) -> None:
    """Print a message on standard error as one line that begins with the program's name."""
    _print(f"optimus-data: {one_line(line)}")


def _print(line: str) -> None:
    """Print a line to standard error. If standard error is a closed pipe, as after `2>&1 | head`,
    discard this line and all later output."""
    try:
        # One write: with PYTHONUNBUFFERED, `print` would write the line end separately, so that
        # lines of several workers could mix.
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


class Progress:
    """Context manager that shows on standard error how much of `total` is done.

    `unit` is the unit of `total`, such as "B" or " instances".
    """

    def __init__(self, label: str, total: int, unit: str):
        self._label, self._total, self._unit = label, total, unit
        self._done = 0
        self._start = self._said = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(desc=label, total=total, unit=unit, unit_scale=True, **bar_size())

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif kind is None:
            self._line()

    def advance(self, amount: int) -> None:
        """Add `amount` to the amount that is done. Update the bar, or print a line if the last line
        is at least _LINE_EVERY_S seconds old."""
        self._done += amount
        if self._bar is not None:
            self._bar.update(amount)
        elif time.monotonic() - self._said >= _LINE_EVERY_S:
            self._line()

    def note(self, text: str) -> None:
        """Print `text`, a description of the current computation. Call this method during a
        computation that does not call `advance`."""
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        else:
            _print(f"{self._label}: {text}")

    def _line(self) -> None:
        self._said = time.monotonic()
        seconds = self._said - self._start
        rate = self._done / seconds if seconds > 0 else 0.0
        line = f"{self._label}: {short(self._done)}/{short(self._total)}{self._unit}"
        line += f" in {seconds:.1f} s, {short(rate)}{self._unit}/s"
        if 0 < self._done < self._total and rate > 0:
            line += f", {(self._total - self._done) / rate:.0f} s to go"
        _print(line)
