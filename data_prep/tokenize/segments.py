"""Checkpoints of a unit: what it wrote since the last one, so that a kill costs seconds.

docs/formats/dataset.md, "Commit and resume". Where a part ends depends on the text alone, so that
two runs at once write the same parts.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from data_prep import layout
from optimus.errors import DataError
from optimus.io import files

SEGMENT_BYTES = 16 << 20
"""Bytes of text between checkpoints: two seconds of tokenizing, 10 MB of tokens."""
_VERSION = 2
"""Of what a checkpoint holds; one of another version counts as absent. 1 had no hashes of ids."""
_HASH_BYTES = 16


class Segments:
    """The checkpoints of one unit."""

    def __init__(self, tokens_dir: Path, unit: int, work: str):
        """`work` names all that decides what they hold."""
        self._dir, self._unit = tokens_dir, unit
        self._identity = {"version": _VERSION, "work": work, "unit": unit}
        self._next = 0

    def _path(self, number: int) -> Path:
        return self._dir / f"{layout.unit_name(self._unit)}.part-{number:04d}"

    def read(self) -> Iterator[tuple[dict[str, Any], list[memoryview]]]:
        """State and blobs of each whole checkpoint, in order; `save` goes on behind the last."""
        while (found := self._read(self._next)) is not None:
            self._next += 1
            yield found

    def _read(self, number: int) -> tuple[dict[str, Any], list[memoryview]] | None:
        path = self._path(number)
        try:
            data = files.read_regular(path, layout.ARRAY_BYTES)
        except FileNotFoundError:  # or another run has just removed it
            return None
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        body = memoryview(data)[:-_HASH_BYTES]
        if data[-_HASH_BYTES:] != files.xxh3_bytes(body).encode():
            return None
        size = int.from_bytes(body[:8], "little")
        head = json.loads(bytes(body[8 : 8 + size]))
        if head["identity"] != {**self._identity, "number": number}:
            return None
        if 8 + size + sum(head["blobs"]) != len(body):
            return None
        blobs, start = [], 8 + size
        for length in head["blobs"]:
            blobs.append(body[start : start + length])
            start += length
        return head["state"], blobs

    def save(self, state: dict[str, Any], blobs: Sequence[bytes]) -> None:
        """Commit what came since the last checkpoint, and where to go on."""
        identity = {**self._identity, "number": self._next}
        head = {"identity": identity, "blobs": [len(blob) for blob in blobs], "state": state}
        text = json.dumps(head).encode()
        digest = xxhash.xxh3_64()
        with files.atomic_writer(self._path(self._next)) as file:
            for piece in (len(text).to_bytes(8, "little"), text, *blobs):
                digest.update(piece)
                file.write(piece)
            file.write(digest.hexdigest().encode())
        self._next += 1

    def remove(self) -> None:
        """Forget every checkpoint, the last first: a kill leaves no gap that hides the rest."""
        number = self._next
        while self._path(number).exists():
            number += 1
        while number > 0:
            number -= 1
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(number))
        self._next = 0
