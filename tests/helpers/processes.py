"""Other processes: which there are, and waiting for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listed.split()]


def is_running(pid: int) -> bool:
    """Whether a process runs under this number (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], object], within_s: float) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def assert_gone(pids: Iterable[int]) -> None:
    """Soon, if they are not yet."""
    pids = list(pids)
    wait_until(lambda: not any(map(is_running, pids)), within_s=10)
