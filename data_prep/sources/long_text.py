"""A text file too long to be held: looked through once, then given in blocks.

The first reading tells whether it is text at all and to which part it belongs; nothing is written
of a file that turns out to be neither.
"""

from __future__ import annotations

import codecs
import functools
import itertools
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

    @property
    def text(self) -> str:
        """All of it; the blocks are read then."""
        return "".join(self.blocks)


def survey(stream: IO[bytes]) -> Survey:
    """Read all of a text."""
    digest, decoder = xxhash.xxh3_64(), codecs.getincrementaldecoder("utf-8")()
    size, line, problem = 0, 1, None
    while True:
        block = stream.read(BLOCK_BYTES)
        digest.update(block)
        if problem is None:
            held = len(decoder.getstate()[0])
            try:
                line += decoder.decode(block, final=not block).count("\n")
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                what = f"{error.reason} (byte {size - held + error.start} of the file)"
                problem = line, f"invalid UTF-8: {what}"
        size += len(block)
        if not block:
            return Survey(size, digest.intdigest(), problem)


def text_blocks(first: bytes, stream: IO[bytes]) -> Iterator[str]:
    """The text, which a survey found to be UTF-8, of `first` and what the stream has left."""
    more = iter(functools.partial(stream.read, BLOCK_BYTES), b"")
    return codecs.iterdecode(itertools.chain([first], more), "utf-8")
