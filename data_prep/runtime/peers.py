"""How a rank that ends in error tells the others, so that none waits for what will not come.

It leaves a mark in the output directory, `.failed-rank-R.HOST.PID.RANDOM.tmp`: its one line. Marks
that lie there when a rank begins are of an earlier run and count for nothing; so no clock is asked.
A rank that is killed leaves no mark, and its work is taken over (data_prep.runtime.ranks).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from optimus.errors import LostPeerError, one_line
from optimus.io import files

_PREFIX = ".failed-rank-"
_MARK_BYTES = 1 << 20


class Peers:
    """The other ranks' marks in a directory, which need not exist yet."""

    def __init__(self, out: Path):
        self._out = out
        self._old = self._marks()

    def _marks(self) -> set[str]:
        try:
            names = os.listdir(self._out)
        except FileNotFoundError:
            return set()
        return {name for name in names if name.startswith(_PREFIX)}

    def check(self) -> None:
        """Raises LostPeerError where a rank has failed since this one began."""
        for name in sorted(self._marks() - self._old):
            with contextlib.suppress(OSError):  # it is gone, or no file that a rank wrote
                what = files.read_regular(self._out / name, _MARK_BYTES).decode("utf-8", "replace")
                rank = name.removeprefix(_PREFIX).partition(".")[0]
                raise LostPeerError(
                    f"rank {rank} failed: {what}; give the command again on all ranks then"
                )

    def tell(self, rank: int, error: Exception) -> None:
        """Leave a mark, if there is a place for it."""
        text = one_line(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            text = one_line(f"{error.filename or self._out}: {error.strerror}")
        with contextlib.suppress(OSError):  # what ended this rank may be the disk itself
            if self._out.is_dir():
                path = files.temporary_name(self._out / f"failed-rank-{rank}")
                # A name of a file may be no UTF-8, and is a str with lone surrogates then.
                files.write_bytes(path, text.encode("utf-8", "backslashreplace"))

    def forget_old(self) -> None:
        """Remove the marks of earlier runs: the work is done."""
        for name in self._old:
            (self._out / name).unlink(missing_ok=True)
