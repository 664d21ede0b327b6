"""Writer of the token arrays of a unit (a range of input files), and checkpoints of this writer.

A checkpoint contains the data that was added since the previous checkpoint. If a run is killed, the
next run continues after the last checkpoint, so that only seconds of work are lost
(docs/formats/dataset.md, "Commit and resume"). The positions of checkpoints depend only on the
text. Two runs at the same time therefore write the same checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from data_prep import layout
from data_prep.runtime.memory import Limits
from data_prep.sources.documents import (
    NO_LIMITS,
    Document,
    InputReader,
    LongText,
    Position,
    Problem,
)
from data_prep.tokenize.store import TokenArrayWriter, hash_of_id
from data_prep.tokenize.token_set import Quarantined
from data_prep.tokenizer.encoder import SECTION_CHARS, NoCut
from data_prep.tokenizer.tokenizer import Encoder
from optimus.errors import DataError
from optimus.io import files

SEGMENT_BYTES = 16 << 20
"""Bytes of text between two checkpoints. The tokenization of this amount of text takes two seconds
and gives 10 MB of ids."""
_VERSION = 2
"""Version of checkpoints. Checkpoints of another version are ignored. Checkpoints of version 1 do
not contain hashes of document ids."""
_HASH_BYTES = 16
_SOUND_BYTES = 1 << 30
"""Size of a checkpoint, in bytes, above which `Segments` compares the size with the memory of the
worker before reading. A checkpoint of many short documents is larger than the text of these
documents."""
_REASON_CHARS = 1 << 16
_REMOVE = "remove it: its documents are then tokenized again"


@dataclass(frozen=True)
class State:
    """The state of a UnitWriter at a checkpoint."""

    source: int
    """The number of the input from which a later run continues."""
    start: Position | None
    """The position in `source` at which the later run continues. None: the start of `source`."""
    hashes: list[str]
    """The hashes of the unit's inputs before `source`."""
    set_aside: list[Quarantined]


@dataclass(frozen=True)
class _Head:
    state: State
    blobs: list[int]
    """The sizes in bytes of the byte strings that follow the head in the file."""


class Segments:
    """The checkpoint files of one unit."""

    def __init__(self, tokens_dir: Path, unit: int, work: str, limits: Limits = NO_LIMITS):
        """Initialize the object. Does not read checkpoints.

        Args:
            tokens_dir: The folder of token arrays.
            unit: The number of the unit.
            work: A hash of all values that determine the content of the checkpoints. `read` ignores
                checkpoints with another hash.
            limits: Limits on the memory of a worker for a document or a checkpoint.
        """
        self._dir, self._unit, self._limits = tokens_dir, unit, limits
        self._identity = {"version": _VERSION, "work": work, "unit": unit}
        self._next = 0

    def _path(self, number: int) -> Path:
        return self._dir / f"{layout.unit_name(self._unit)}.part-{number:04d}"

    def read(self) -> Iterator[tuple[Path, State, list[memoryview]]]:
        """Yield (path, state, blobs) of each checkpoint, in order. Stop before the first checkpoint
        that is missing or damaged.

        The next call of `save` then writes the checkpoint that follows the last yielded checkpoint.

        Raises:
            DataError: a checkpoint cannot be read, or another program wrote it.
        """
        while (checkpoint := self._read(self._next)) is not None:
            self._next += 1
            yield checkpoint

    def _read(self, number: int) -> tuple[Path, State, list[memoryview]] | None:
        path = self._path(number)
        try:
            size = os.stat(path).st_size
            if size > _SOUND_BYTES:
                self._limits.refuse(str(path), f"a checkpoint of {size} bytes", size, _REMOVE)
            data = files.read_regular(path, layout.ARRAY_BYTES)
        except FileNotFoundError:  # or another run has just removed the file
            return None
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        except MemoryError:
            raise DataError(f"{path} is larger than the free memory; {_REMOVE}") from None
        body = memoryview(data)[:-_HASH_BYTES]
        if data[-_HASH_BYTES:] != files.xxh3_bytes(body).encode():
            return None
        size = int.from_bytes(body[:8], "little")
        value: object = None
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(bytes(body[8 : 8 + size]))
        if not isinstance(value, dict):
            raise layout.foreign(path, "has no JSON object as its header")
        # Compare as text, because True == 1.
        if json.dumps(value.get("identity")) != json.dumps({**self._identity, "number": number}):
            return None
        head = layout.as_record(_Head, value, path)
        sizes = head.blobs
        is_whole = layout.are_counts(sizes) and 8 + size + sum(sizes) == len(body)
        layout.require(path, (is_whole, "its size is not the size that its head states"))
        blobs, start = [], 8 + size
        for length in sizes:
            blobs.append(body[start : start + length])
            start += length
        return path, head.state, blobs

    def save(self, state: State, blobs: Sequence[bytes]) -> None:
        """Write the next checkpoint.

        Args:
            state: The state of the writer at the checkpoint.
            blobs: The data that was added since the previous checkpoint.
        """
        identity = {**self._identity, "number": self._next}
        head = {"identity": identity, "blobs": [len(blob) for blob in blobs], "state": state}
        text = json.dumps(head, default=dataclasses.asdict).encode()
        digest = xxhash.xxh3_64()
        with files.atomic_writer(self._path(self._next)) as file:
            for block in (len(text).to_bytes(8, "little"), text, *blobs):
                digest.update(block)
                file.write(block)
            file.write(digest.hexdigest().encode())
        self._next += 1

    def remove(self) -> None:
        """Remove all checkpoints, the last checkpoint first. If the run is killed during the
        removal, the remaining checkpoints therefore still have consecutive numbers."""
        number = self._next
        while self._path(number).exists():
            number += 1
        while number > 0:
            number -= 1
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(number))
        self._next = 0


_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 1024


class UnitWriter:
    """Writer of the documents of a unit. `UnitWriter` encodes documents, writes the ids to the
    token array of each split, and saves checkpoints. Short documents are encoded in batches."""

    def __init__(
        self,
        encoder: Encoder,
        writers: dict[str, TokenArrayWriter],
        below: int,
        checkpoints: Segments,
        inputs: range,
        limits: Limits,
    ):
        """Restore the arrays from the checkpoints. Raises DataError if a checkpoint cannot be used.

        Args:
            encoder: The tokenizer.
            writers: The writer of the array of the training split and, if there is a held-out
                split, the writer of its array.
            below: Documents whose xxh3-64 is below this number are held out.
            checkpoints: The checkpoints of the unit.
            inputs: The numbers of the inputs of the unit.
            limits: Limits on the memory of a worker for a document.
        """
        self._encoder, self._limits = encoder, limits
        self._below = below
        self._writers = list(writers.values())
        self._checkpoints = checkpoints
        self._pending: list[tuple[int, Document, str]] = []
        self._pending_bytes = self._unsaved_bytes = 0
        self.source: int = inputs[0]
        self.start: Position | None = None
        self.hashes: list[str] = []
        self.set_aside: list[Quarantined] = []
        for path, state, blobs in checkpoints.read():
            self._restore(path, state, blobs, inputs)

    def _restore(
        self, path: Path, state: State, blobs: Sequence[memoryview], inputs: range
    ) -> None:
        self.source, self.start = state.source, state.start
        self.hashes, self.set_aside = state.hashes, state.set_aside
        layout.require(
            path,
            (self.source in inputs, "state.source is not an input of the unit"),
            (
                len(self.hashes) == self.source - inputs[0] and layout.are_hashes(self.hashes),
                "state.hashes does not have one hash for each input before state.source",
            ),
            (
                all(inputs[0] <= entry["input"] <= self.source for entry in self.set_aside)
                and layout.are_counts([entry["line"] for entry in self.set_aside]),
                "state.set_aside names an input after state.source, or an impossible line",
            ),
            (
                all(len(entry["reason"]) <= _REASON_CHARS for entry in self.set_aside),
                "a reason in state.set_aside is too long",
            ),
            (
                self.start is None or self.start.is_possible(),
                "state.start is an impossible position",
            ),
            (len(blobs) == 3 * len(self._writers), "does not have 3 blobs per split"),
        )
        for index, writer in enumerate(self._writers):
            try:
                allowed = range(inputs[0], self.source + 1)
                writer.restore(allowed, *blobs[3 * index : 3 * index + 3])
            except ValueError as error:
                raise layout.foreign(path, error) from None

    def add(self, source: int, document: Document, where: str) -> None:
        """Add a document of the input `source`. `where` is the file and line of the document, for
        messages."""
        if len(document.text) > SECTION_CHARS:
            self.flush()
            text, size = document.text, len(document.data)
            array = self._array_of(xxhash.xxh3_64_intdigest(document.data))
            if self._encoder.cutter is None:
                self._write_whole(array, [text], size, where)
            else:
                starts = range(0, len(text), SECTION_CHARS)
                blocks = (text[start : start + SECTION_CHARS] for start in starts)
                for _ in self._write_sections(array, blocks, where):
                    pass
            array.close(source, document.line, hash_of_id(document.id))
            self._unsaved_bytes += size
            return
        self._pending.append((source, document, where))
        self._pending_bytes += len(document.data)
        self._unsaved_bytes += len(document.data)
        if self._pending_bytes >= _BATCH_BYTES or len(self._pending) >= _BATCH_DOCUMENTS:
            self.flush()

    def add_long(self, source: int, long: LongText, reader: InputReader, where: str) -> None:
        """Add a long document of the input `source`. The method saves a checkpoint after a section
        of the document if `due` is True.

        `where` is the file and line of the document, for messages.
        """
        self.flush()
        array = self._array_of(long.xxh3)
        if self._encoder.cutter is None:
            self._write_whole(array, long.blocks, long.size, where)
        else:
            for section in self._write_sections(array, long.blocks, where):
                size = len(section.encode())
                reader.move_position(size)
                self._unsaved_bytes += size
                if self.due:
                    self.save(source, reader.position())
        array.close(source, 0)

    def _write_whole(
        self, array: TokenArrayWriter, blocks: Iterable[str], size: int, where: str
    ) -> None:
        needs = size * self._encoder.bytes_per_byte
        self._limits.refuse(where, f"a document of {size} bytes", needs)
        array.extend(self._encoder.encode(["".join(blocks)])[0], where)

    def _write_sections(
        self, array: TokenArrayWriter, blocks: Iterable[str], where: str
    ) -> Iterator[str]:
        """Encode a text in sections, write the ids, and yield each section after its ids have been
        written.

        A text that cannot be cut at any position is a single section.
        """
        assert self._encoder.cutter is not None
        needs, room = self._encoder.bytes_per_byte, self._limits.room_bytes
        most = None if room is None else room // needs
        try:
            for section in self._encoder.cutter.sections(blocks, most):
                array.extend(self._encoder.encode([section])[0], where)
                yield section
        except NoCut as error:
            (size,) = error.args
            self._limits.refuse(
                where, f"a section of {size} bytes that cannot be cut", size * needs
            )
            raise AssertionError("a section above the memory limit was not refused") from error

    def _array_of(self, xxh3: int) -> TokenArrayWriter:
        """Return the array of the split to which a document belongs. `xxh3` is the hash of the
        document's text."""
        return self._writers[xxh3 < self._below]

    @property
    def due(self) -> bool:
        """Return True if at least SEGMENT_BYTES of text were added since the last checkpoint."""
        return self._unsaved_bytes >= SEGMENT_BYTES

    def save(self, source: int, start: Position | None) -> None:
        """Write a checkpoint from which a later run continues at the position `start` of the input
        `source`."""
        self.flush()
        state = State(source, start, self.hashes, self.set_aside)
        blobs = [blob for writer in self._writers for blob in writer.checkpoint()]
        self._checkpoints.save(state, blobs)
        self._unsaved_bytes = 0

    def flush(self) -> None:
        """Encode the documents that were added but not written yet, and write the tokens of these
        documents."""
        encoded = self._encoder.encode([document.text for _, document, _ in self._pending])
        by_split: list[list[int]] = [[] for _ in self._writers]
        for index, (_, document, _) in enumerate(self._pending):
            held_out = xxhash.xxh3_64_intdigest(document.data) < self._below
            by_split[held_out].append(index)
        for writer, indices in zip(self._writers, by_split, strict=True):
            if indices:
                sources = [(self._pending[i][0], self._pending[i][1].line) for i in indices]
                id_hashes = [hash_of_id(self._pending[i][1].id) for i in indices]
                where = [self._pending[i][2] for i in indices]
                writer.append([encoded[i] for i in indices], sources, id_hashes, where)
        self._pending, self._pending_bytes = [], 0

    def quarantine_input(self, source: int, problem: Problem) -> None:
        """Remove the documents of the damaged input `source` from the token arrays, and add the
        input to the list of quarantined documents."""
        self._pending = [entry for entry in self._pending if entry[0] != source]
        self._pending_bytes = sum(len(document.data) for _, document, _ in self._pending)
        for writer in self._writers:
            writer.drop_input(source)
        self._checkpoints.remove()  # checkpoints may contain documents of the input
        self.set_aside = [entry for entry in self.set_aside if entry["input"] != source]
        self.quarantine(source, problem)

    def quarantine(self, source: int, problem: Problem) -> None:
        """Add an entry to the list of quarantined documents. `problem` is the problem of a document
        of the input `source`, or of the whole input."""
        self.set_aside.append(Quarantined(input=source, line=problem.line, reason=problem.reason))
