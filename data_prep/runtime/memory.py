"""Memory of this process, and the size of a document that fits in it.

`usable_memory` is the machine's memory, or less in a container or a Slurm job. `Limits` says what
`--memory` leaves a worker for a document: docs/formats/dataset.md, "Memory".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from optimus.errors import ConfigError, DataError

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def usable_memory() -> int:
    """Bytes of physical memory, or the least of the limits of the control groups it is in."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_limits()])


def _limits() -> Iterator[int]:
    """Limits of version 2 (`0::/PATH`) and version 1 (`N:memory:/PATH`), of it and those above."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = _CGROUPS, "memory.max"
        if controllers:
            root, name = _CGROUPS / "memory", "memory.limit_in_bytes"
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # not there, or `max`
                yield int((folder / name).read_text())
            if folder == root:
                break


_PARENT_BYTES = 64 << 20
_BASE_BYTES = 192 << 20
"""A worker with its memory of pieces (90 MB), a batch and a checkpoint, measured 150 to 170 MB."""
_TOKENIZER_FACTOR = 16
"""A loaded tokenizer.json, its merges once more as JSON, by bytes of the file."""
_LEAST_ROOM_BYTES = 32 << 20
_DEFAULT_BYTES = 2 * 10**9
_LEAVE_OUT = "leave such documents out with --max-document SIZE --on-error quarantine"


@dataclass(frozen=True)
class Limits:
    """Memory and bytes that a document may take. None: any amount."""

    room_bytes: int | None = None
    """Memory of a worker for one document."""
    max_document: int | None = None
    """`--max-document`: bytes of a line, of a value of a table, of an unpacked text file."""

    def refuse(self, where: str, label: str, needs: int, or_else: str = _LEAVE_OUT) -> None:
        """Raise DataError if `needs` bytes are more than a worker has for a document."""
        if self.room_bytes is None or needs <= self.room_bytes:
            return
        least = (needs + self.reserve_bytes) / 1e6 + 1
        raise DataError(
            f"{where}: {label} needs {needs / 1e6:,.0f} MB of memory, a worker has "
            f"{self.room_bytes / 1e6:,.0f} MB for it; give --workers 1 --memory {least:.0f}MB, or "
            + or_else
        )

    reserve_bytes: int = 0
    """Memory that a worker needs in addition."""

    def too_long(self, size: int) -> str | None:
        """Return the reason to set a document of `size` bytes aside, or None."""
        if self.max_document is None or size <= self.max_document:
            return None
        return f"{size} bytes, above --max-document {self.max_document}"


def divide_memory(
    memory_bytes: int | None, workers: int, tokenizer: Path, max_document: int | None
) -> tuple[int, Limits]:
    """Workers that may tokenize at once within `memory_bytes`, and what each has for a document.

    None: half of this machine's memory, but at least 2 GB. Raises ConfigError where not even one
    worker fits.
    """
    memory_bytes = default_bytes() if memory_bytes is None else memory_bytes
    reserve = _reserve(tokenizer)
    for count in range(workers, 0, -1):
        room = (memory_bytes - (count > 1) * _PARENT_BYTES) // count - reserve
        if room >= _LEAST_ROOM_BYTES:
            return count, Limits(room, max_document, reserve)
    least = (reserve + _LEAST_ROOM_BYTES) / 1e6 + 1
    raise ConfigError(
        f"--memory {memory_bytes / 1e6:.0f}MB is too little to tokenize; give {least:.0f}MB or more"
    )


def default_bytes() -> int:
    """Half of the memory that there is, but at least 2 GB."""
    return max(_DEFAULT_BYTES, usable_memory() // 2)


def _reserve(tokenizer: Path) -> int:
    """Return the memory that a worker needs in addition to a document."""
    return _BASE_BYTES + _TOKENIZER_FACTOR * tokenizer.stat().st_size


def bytes_for(workers: int, tokenizer: Path) -> int:
    """Return the memory with which `workers` workers tokenize at once."""
    return workers * (_reserve(tokenizer) + _LEAST_ROOM_BYTES) + _PARENT_BYTES + 10**6


def bytes_of_line(line: bytes) -> int:
    """Memory that reading this JSON line takes: the line, it decoded, and its text.

    A string takes 1, 2 or 4 bytes a character, by its largest one; an escape may be such a
    character in a line without any. The decoder of strings grows its result by a quarter and copies
    it once when a wider character comes.
    """
    width = _width(line)
    text = max(width, 4) if b"\\u" in line else width
    return len(line) * (1 + width) + len(line) * text * 3 // 2


def bytes_of_text(data: bytes) -> int:
    """Memory of the text that this UTF-8 is, and of a copy of its bytes."""
    return len(data) * (1 + _width(data))


def _width(data: bytes) -> int:
    """Bytes of a character of this text."""
    if data.isascii():
        return 1
    beyond_basic_plane = any(bytes([lead]) in data for lead in range(0xF0, 0xF5))
    return 4 if beyond_basic_plane else 2
