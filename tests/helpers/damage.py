"""Ways in which a file is spoilt."""

from __future__ import annotations

import random
from pathlib import Path


def flip(path: Path, at: float = -1, bits: int = 1) -> None:
    """Some bits of a byte: of number `at`, or where that is a fraction, so far into the file."""
    content = bytearray(path.read_bytes())
    content[at if isinstance(at, int) else int(at * len(content))] ^= bits
    path.write_bytes(content)


def flip_one(content: bytearray, generator: random.Random) -> None:
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)


def truncate(content: bytearray, generator: random.Random) -> None:
    del content[generator.randrange(len(content)) :]


def zero(content: bytearray, generator: random.Random) -> None:
    """A stretch that holds something; of the shard files' headers most is spaces."""
    at = generator.randrange(max(1, len(content) - 512))
    content[at : at + 512] = bytes(len(content[at : at + 512]))


def lengthen(content: bytearray, generator: random.Random) -> None:
    content += b"\0"
