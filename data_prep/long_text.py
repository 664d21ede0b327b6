"""A text file too long to be held: looked through once, then given in blocks.

The first reading tells whether it is text at all and to which part it belongs; nothing is written
of a file that turns out to be neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import xxhash

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Survey:
    """What the first reading found."""

    size: int
    """Bytes of the unpacked file, all of them counted."""
    xxh3: int
    """Of its text."""
    problem: tuple[int, str] | None = None
    """Line and reason, where it is not UTF-8."""


@dataclass
class LongText:
    """One document in blocks of text, to be read before the reader goes on."""

    size: int
    xxh3: int
    blocks: Iterator[str]
    offset: int
    """Bytes of the text before the blocks, which an earlier run wrote."""
    line: int = 0


def survey(stream: IO[bytes]) -> Survey:
    """Read all of a text."""
    digest, size, line, tail = xxhash.xxh3_64(), 0, 1, b""
    problem = None
    while True:
        block = stream.read(BLOCK_BYTES)
        digest.update(block)
        data = tail + block
        if problem is None:
            try:
                _, tail = decode(data, last=not block)
            except UnicodeDecodeError as error:
                line += data.count(b"\n", 0, error.start)
                place = size - (len(data) - len(block)) + error.start
                problem = line, f"invalid UTF-8: {error.reason} (byte {place} of the file)"
                tail = b""
            else:
                line += data.count(b"\n", 0, len(data) - len(tail))
        size += len(block)
        if not block:
            return Survey(size, digest.intdigest(), problem)


def decode(data: bytes, last: bool) -> tuple[str, bytes]:
    """The text of `data`, and the bytes of a character that is not whole yet."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError as error:
        if last or error.reason != "unexpected end of data":
            raise
        return data[: error.start].decode(), data[error.start :]


def text_blocks(stream: IO[bytes], tail: bytes = b"") -> Iterator[str]:
    """The text that a survey found to be UTF-8, from `tail` and where the stream stands."""
    while block := stream.read(BLOCK_BYTES):
        text, tail = decode(tail + block, last=False)
        yield text
