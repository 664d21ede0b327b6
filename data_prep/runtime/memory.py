"""Computation of the memory that a worker has, and needs, to tokenize a document. See
docs/formats/dataset.md, "Memory"."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from optimus.errors import ConfigError, DataError
from optimus.launch.environment import usable_memory

_PARENT_BYTES = 64 << 20
_BASE_BYTES = 192 << 20
"""Bytes of memory that a worker needs in addition to its tokenizer and a document. Measurements
gave 150 to 170 MB, of which the encoder's cache of token ids takes 90 MB."""
_TOKENIZER_FACTOR = 16
"""Bytes of memory per byte of tokenizer.json, for the loaded tokenizer and a copy of its merges."""
_LEAST_ROOM_BYTES = 32 << 20
"""Smallest memory for a document, in bytes, with which a worker is started."""
_DEFAULT_BYTES = 2 * 10**9
_LEAVE_OUT = "leave such documents out with --max-document SIZE --on-error quarantine"


@dataclass(frozen=True)
class Limits:
    """Limits on the size of a document and on the memory that a document takes. None: no limit."""

    room_bytes: int | None = None
    """Bytes of memory that a worker has for one document."""
    max_document: int | None = None
    """`--max-document`: largest size in bytes of a JSON line, of a value in a Parquet column, or of
    a decompressed text file."""

    def refuse(self, where: str, label: str, needs: int, or_else: str = _LEAVE_OUT) -> None:
        """Raise DataError if a document needs more memory than a worker has for one document.

        Args:
            where: File and line of the document, for the message.
            label: Name of the document, or of the object that needs the memory, for the message.
            needs: The needed memory in bytes.
            or_else: A remedy other than more memory, for the end of the message.
        """
        if self.room_bytes is None or needs <= self.room_bytes:
            return
        least = (needs + self.reserve_bytes) / 1e6 + 1
        raise DataError(
            f"{where}: {label} needs {needs / 1e6:,.0f} MB of memory, but a worker has only "
            f"{self.room_bytes / 1e6:,.0f} MB for it; give --workers 1 --memory {least:.0f}MB, or "
            + or_else
        )

    reserve_bytes: int = 0
    """Bytes of memory that a worker needs in addition to `room_bytes`."""

    def too_long(self, size: int) -> str | None:
        """Return the reason to leave out a document of `size` bytes, or None if there is none."""
        if self.max_document is None or size <= self.max_document:
            return None
        return f"{size} bytes, above --max-document {self.max_document}"


def divide_memory(
    memory_bytes: int | None, workers: int, tokenizer: Path, max_document: int | None
) -> tuple[int, Limits]:
    """Return (number of workers that can tokenize at once, limits of a document).

    Args:
        memory_bytes: Memory of all processes together, in bytes. None: `default_bytes()`.
        workers: Largest number of workers.
        tokenizer: The tokenizer file.
        max_document: Value of `--max-document`.

    Raises:
        ConfigError: the memory is too small for one worker.
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
    """Return the default value of `--memory` for tokenizing, in bytes: half of the usable memory,
    but at least 2 GB."""
    return max(_DEFAULT_BYTES, usable_memory() // 2)


def _reserve(tokenizer: Path) -> int:
    """Return the bytes of memory that a worker needs in addition to the memory for a document."""
    return _BASE_BYTES + _TOKENIZER_FACTOR * tokenizer.stat().st_size


def bytes_for(workers: int, tokenizer: Path) -> int:
    """Return the memory, in bytes, that `workers` workers need to tokenize at once."""
    return workers * (_reserve(tokenizer) + _LEAST_ROOM_BYTES) + _PARENT_BYTES + 10**6


def bytes_of_line(line: bytes) -> int:
    """Return the memory, in bytes, that is needed to read a document from a JSON line.

    Three copies are in memory at the same time: the bytes of the line, the line as a Python string,
    and the text of the document. A Python string takes 1, 2 or 4 bytes per character, depending on
    the widest character in the string. An ASCII line can contain wide characters as escape
    sequences. The JSON decoder builds the text in a buffer. The decoder enlarges the buffer by a
    quarter at a time, and copies the buffer once if a wider character follows. The text is
    therefore counted 1.5 times.
    """
    width = _width(line)
    text = max(width, 4) if b"\\u" in line else width
    return len(line) * (1 + width) + len(line) * text * 3 // 2


def bytes_of_text(data: bytes) -> int:
    """Return the bytes of memory that the UTF-8 text `data` and the decoded string take
    together."""
    return len(data) * (1 + _width(data))


def _width(data: bytes) -> int:
    """Return an upper limit of the bytes per character of the Python string for the UTF-8 text
    `data`."""
    if data.isascii():
        return 1
    beyond_basic_plane = any(bytes([lead]) in data for lead in range(0xF0, 0xF5))
    return 4 if beyond_basic_plane else 2
