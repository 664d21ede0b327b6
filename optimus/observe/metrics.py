"""Metrics as JSON lines: one a step, cut back on resume so that each step appears once."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimus import files


class JsonLines:
    """Appends one JSON object a line; a line is complete as soon as `append` returns.

    On a full disk lines wait in memory for room, which is told once, and `close` tries a last time.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._waiting, self._told = path, b"", False
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n"
        try:
            with self._lock:
                self._waiting += line
                self._write()
            self._told = False
        except OSError as error:
            if not self._told:
                self._warn(error)
            self._told = True

    def sync(self) -> None:
        """Make every line durable, those that wait included; any thread may. Raises OSError."""
        try:
            with self._lock:
                self._write()
            os.fsync(self._fd)
        except OSError as error:
            error.filename = os.fspath(self._path)
            raise

    def close(self) -> None:
        """Raises OSError if lines could not be written."""
        try:
            self.sync()
        finally:
            os.close(self._fd)

    def _warn(self, error: OSError) -> None:
        line = f"optimus: WARNING: {self._path}: {error.strerror}; its lines wait in memory"
        print(line, file=sys.stderr, flush=True)

    def _write(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[os.write(self._fd, self._waiting) :]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file; one that a kill has torn or a disk damaged is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def cut_after(path: Path, step: int, cut_log: Path) -> None:
    """Keep the lines up to `step`, atomically; move later ones to `cut_log`, where they are durable
    before they go."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines()
    kept = [line for line in lines if _step(line) <= step]
    moved = [line for line in lines if _step(line) > step]
    if moved:
        files.make_dirs(cut_log.parent)
        with open(cut_log, "ab") as log:
            log.writelines(line + b"\n" for line in moved)
            log.flush()
            os.fsync(log.fileno())
        files.fsync_dir(cut_log.parent)
        files.write_bytes(path, b"".join(line + b"\n" for line in kept))
    if damaged := sum(_step(line) == math.inf for line in lines[:-1]):  # a kill tears the last
        what = f"{damaged} of its lines cannot be read; they are in {cut_log}"
        print(f"optimus: WARNING: {path}: {what}", file=sys.stderr)


def _step(line: bytes) -> float:
    """The step of a line; one that cannot be read counts as later than any step."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
