"""Metrics as JSON lines: one a step, cut back on resume so that each step appears once."""

from __future__ import annotations

import collections
import contextlib
import io
import itertools
import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from optimus.errors import DataError
from optimus.io import files

logger = logging.getLogger(__name__)

_LINE_BYTES = 1 << 20
"""Longest line that is read; ours have about a kilobyte."""
_MOST_STEPS = 1 << 22
"""Of the steps that should have lines, how many are looked for: a step may come from a manifest
that no run wrote."""
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
"""A link that another user put there must not lead the lines, or a new file, elsewhere."""
_BATCH_BYTES = 1 << 16
"""How much of a copy waits in memory for the next `sync`."""


class JsonLines:
    """Appends one JSON object a line; a line is complete as soon as `append` returns.

    On a full disk lines wait in memory for room, which is told once, and `close` tries a last time.
    `copy`, if given, gets the same lines at each `sync`, and before that in batches.
    """

    def __init__(self, path: Path, copy: Path | None = None) -> None:
        self._path, self._waiting, self._told = path, b"", False
        self._copy, self._uncopied, self._copy_failed = copy, b"", False
        self._copy_lock = threading.Lock()
        self._lock = threading.Lock()
        self._fd = os.open(path, _APPEND, 0o644)
        if copy is not None:  # an empty copy shows that there were no lines
            with contextlib.suppress(OSError):
                os.close(os.open(copy, _APPEND, 0o644))

    def append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n"
        try:
            with self._lock:
                self._waiting += line
                self._uncopied += line if self._copy else b""
                self._write()
            self._told = False
        except OSError as error:
            if not self._told:
                _warn(self._path, f"{error.strerror}; its lines wait in memory")
            self._told = True
        if len(self._uncopied) >= _BATCH_BYTES:
            self._write_copy()

    def sync(self) -> None:
        """Make every line durable, those that wait included; any thread may. Raises OSError."""
        try:
            with self._lock:
                self._write()
            os.fsync(self._fd)
        except OSError as error:
            error.filename = os.fspath(self._path)
            raise
        self._write_copy()

    def close(self) -> None:
        """Raises OSError if lines could not be written."""
        try:
            self.sync()
        finally:
            os.close(self._fd)

    def _write_copy(self) -> None:
        """Append to the copy what it lacks. A failure warns once, and the lines wait. Checkpoints
        rely on the file itself, so the copy needs no fsync."""
        with self._copy_lock:
            with self._lock:
                lines, self._uncopied = self._uncopied, b""
            if not lines or self._copy is None:
                return
            try:
                with os.fdopen(os.open(self._copy, _APPEND, 0o644), "ab", buffering=0) as file:
                    while lines:
                        lines = lines[file.write(lines) :]
                self._copy_failed = False
            except OSError as error:
                with self._lock:
                    self._uncopied = lines + self._uncopied
                if not self._copy_failed:
                    _warn(self._copy, f"{error.strerror}; the copy of {self._path.name} waits")
                self._copy_failed = True

    def _write(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[os.write(self._fd, self._waiting) :]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return all whole lines of a file that are JSON objects; lines torn by a kill or damaged are
    left out. Raises DataError where `_read_lines` does."""
    records = []
    for line in _read_lines(path):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(record := json.loads(line), dict):
                records.append(record)
    return records


def _read_lines(path: Path) -> list[bytes]:
    """Return the lines of a file with their ends; none if there is no file. Raises DataError for
    one that is not regular or has a line that no run writes, which memory may not hold."""
    lines = []
    try:
        with io.BufferedReader(files.open_regular(path)) as file:
            while line := file.readline(_LINE_BYTES + 1):
                lines.append(line)
                if len(line) > _LINE_BYTES:
                    raise DataError(
                        f"{path}: line {len(lines):,} is longer than {_LINE_BYTES:,} bytes, so the "
                        "file is damaged; remove that line or move the file away"
                    )
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    return lines


def cut_after(
    path: Path,
    step: int,
    cut_log: Path,
    copy: Path | None = None,
    expected: Iterable[int] = (),
) -> None:
    """Keep the lines up to `step`, atomically, each once and by step; move all others to `cut_log`,
    where they are durable before they go.

    A line that is damaged or missing is restored from `copy`, which then holds the same lines.
    Steps of `expected` that neither file has are named in a warning.
    """
    data = b"".join(_read_lines(path))
    copied = b"".join(_read_lines(copy)) if copy else b""
    lines = data.splitlines()
    kept = {key: line for line in lines if (key := _key(line)) is not None and key[0] <= step}
    there = {*lines}
    spare = [line for line in copied.splitlines() if line not in there]
    restored = {
        key: line
        for line in spare
        if (key := _key(line)) is not None and key[0] <= step and key not in kept
    }
    whole = b"".join(line + b"\n" for _, line in sorted({**kept, **restored}.items()))
    moved = _others(lines, kept.values()) + _others(spare, restored.values())
    if moved:
        files.make_dirs(cut_log.parent)
        # A link of this name, in a run directory that somebody else made, is not followed.
        with os.fdopen(os.open(cut_log, _APPEND, 0o644), "ab") as log:
            log.writelines(line + b"\n" for line in moved)
            log.flush()
            os.fsync(log.fileno())
        files.fsync_dir(cut_log.parent)
    if data != whole:
        files.write_bytes(path, whole)
    if copy and copied != whole:
        files.write_bytes(copy, whole)
    if damaged := sum(_key(line) is None for line in lines[:-1]):  # a kill tears the last
        _warn(path, f"{damaged} of its lines cannot be read; see {cut_log}")
    if restored:
        _warn(path, f"restored the lines of {spell_steps(n for n, _ in restored)} from {copy}")
    looked_for = {*itertools.islice(expected, _MOST_STEPS)}
    if missing := looked_for - {number for number, _ in [*kept, *restored]}:
        where = f", in {copy} too" if copy else ""
        _warn(
            path,
            f"the lines of {spell_steps(missing)} are missing{where}; the run continues with this "
            "gap; to close it, stop the run, put the lines back from a backup and give the same "
            "command again",
        )


def _others(lines: Iterable[bytes], kept: Iterable[bytes]) -> list[bytes]:
    """The lines that are not kept, in order; of equal lines one is kept."""
    left = collections.Counter(kept)
    others = []
    for line in lines:
        if left[line]:
            left[line] -= 1
        else:
            others.append(line)
    return others


def spell_steps(steps: Iterable[int]) -> str:
    """Return steps as ranges, such as "steps 3-7, 9"; of many ranges only the first."""
    ranges: list[list[int]] = []
    for step in sorted(set(steps)):
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return spell_ranges(ranges)


def spell_ranges(ranges: Sequence[Sequence[int]]) -> str:
    """Return ascending ranges (first step, last step) as `spell_steps` writes them."""
    texts = [f"{low}" if low == high else f"{low}-{high}" for low, high in ranges]
    more = f" and {len(texts) - 8} more" if len(texts) > 8 else ""
    word = "steps" if ranges[-1][1] > ranges[0][0] else "step"
    return f"{word} {', '.join(texts[:8])}{more}"


def _key(line: bytes) -> tuple[int, str] | None:
    """The step and source of a line; None if it cannot be read."""
    try:
        record = json.loads(line)
        step, source = record["step"], record.get("source", "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return (step, str(source)) if type(step) is int else None


def _warn(path: Path, what: str) -> None:
    logger.warning("%s: %s", path, what)
