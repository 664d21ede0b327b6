"""Weights in the order in which files hold them, piece by piece: little of them is in memory."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from optimus.checkpoint.manifest import Manifest, is_checkpoint, read_manifest
from optimus.checkpoint.pieces import Piece, whole_box
from optimus.checkpoint.transfer import Readers, Want
from optimus.config import ModelConfig
from optimus.errors import CheckpointError
from optimus.hf import hf_tensors, is_hf_directory
from optimus.io import files
from optimus.io.safetensors import DTYPES, TensorFiles, as_bytes
from optimus.io.tensor_file import TensorFile
from optimus.model.transformer import Transformer

PIECE = 1 << 22
"""Elements of a piece at most: 16 MiB of fp32."""
_OPEN_FILES = 32
"""Shard files that are open at once, each with a block of 4 MiB."""


class Weights(files.Closing, ABC):
    """Weights in the order in which files hold them, piece by piece: little of them is in memory.

    A context in which files may be open, and an iterable of `pieces` with their values, flat on the
    host as they are stored, until the next are asked for. What has a checksum is compared with it
    as it is read, at the latest behind the last piece: until then nothing is certain. Both raise
    CheckpointError.
    """

    shapes: Mapping[str, tuple[int, ...]]
    """Of the parameters."""
    pieces: Sequence[Piece]
    """Of at most PIECE elements of whole parameters; together they are every parameter once."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[Piece, Tensor]]: ...

    @abstractmethod
    def dtypes(self) -> dict[str, torch.dtype]:
        """In which each parameter is stored; CheckpointError if one is in several."""

    def stretches(self) -> Iterator[tuple[str, int, Tensor]]:
        """The same as (name, first element, values) of the flattened whole parameters."""
        for piece, values in self:
            yield piece.name, piece.start, values


class FileWeights(Weights):
    """Weights in safetensors files, of a Hugging Face directory or under our names."""

    def __init__(self, config: ModelConfig, path: Path) -> None:
        """`path`: of a directory that `check_weights` has passed."""
        self._files = TensorFiles(path)
        manifest = read_manifest(path) if is_checkpoint(path) else None
        self._hashes = {one.name: one.xxh3 for one in manifest.files} if manifest else {}
        with torch.device("meta"):
            model = Transformer(config)
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        boxes = {name: whole_box(shape) for name, shape in self.shapes.items()}
        own = ((name, name, parameter) for name, parameter in model.named_parameters())
        found = []
        for theirs, ours, part in (
            hf_tensors(config, self._files.names()) if is_hf_directory(path) else own
        ):
            file, stored = self._files.find(theirs)
            begun = int(part.storage_offset())
            stop = begun + part.numel()
            for start in range(begun, stop, PIECE):
                piece = Piece(ours, boxes[ours], start, min(start + PIECE, stop))
                at = stored.start + (start - begun) * DTYPES[stored.dtype].itemsize
                found.append((file, at, DTYPES[stored.dtype], piece))
        self._found = sorted(found, key=lambda one: (one[0].path, one[1]))
        for file, *_ in found:
            if manifest and file.path.name not in self._hashes:
                raise CheckpointError(f"{file.path}: its checkpoint's manifest does not know it")
        self.pieces = [one[-1] for one in self._found]

    def __iter__(self) -> Iterator[tuple[Piece, Tensor]]:
        memory = torch.empty(PIECE, dtype=torch.float64)  # the widest
        for file, found in itertools.groupby(self._found, lambda one: one[0]):
            reader = _Hashed(file, self._hashes[file.path.name]) if self._hashes else file
            for _, at, dtype, piece in found:
                values = memory.view(dtype)[: piece.stop - piece.start]
                reader.read(at, as_bytes(values))
                yield piece, values
            if isinstance(reader, _Hashed):
                reader.finish()

    def dtypes(self) -> dict[str, torch.dtype]:
        found: dict[str, torch.dtype] = {}
        for file, _, dtype, piece in self._found:
            if found.setdefault(piece.name, dtype) is not dtype:
                raise CheckpointError(
                    f"{file.path.parent}: parts of {piece.name} are of several types ({dtype} and "
                    f"{found[piece.name]}); bring them to one type first"
                )
        return found

    def close(self) -> None:
        self._files.close()


class _Hashed:
    """A file that is read from its beginning to its end, and what lies between too."""

    def __init__(self, file: TensorFile, expected: str) -> None:
        self._file, self._expected, self._at, self._digest = file, expected, 0, xxhash.xxh3_64()

    def read(self, start: int, into: memoryview) -> None:
        self._pass_to(start)
        self._file.read(start, into)
        self._digest.update(into)
        self._at = start + len(into)

    def finish(self) -> None:
        """Raises CheckpointError if the file does not have its checksum."""
        self._pass_to(self._file.size)
        if self._digest.hexdigest() != self._expected:
            raise CheckpointError(f"{self._file.path}: its content does not match its checksum")

    def _pass_to(self, start: int) -> None:
        while self._at < start:
            self.read(self._at, memoryview(bytearray(min(start - self._at, PIECE))))


class ShardWeights(Weights):
    """The masters of a full checkpoint, whole parameters one behind the other: what ranks held in
    parts is put together here."""

    def __init__(self, manifest: Manifest) -> None:
        self._path, self._index = manifest.path, manifest.index()
        # Every row is read: no two parameters may be read from the same bytes.
        manifest.check_rows(self._index)
        self.shapes = self._index.shapes
        self.pieces = [
            Piece(name, whole_box(shape), start, min(start + PIECE, math.prod(shape)))
            for name, shape in self.shapes.items()
            for start in range(0, math.prod(shape), PIECE)
        ]

    def __iter__(self) -> Iterator[tuple[Piece, Tensor]]:
        memory = torch.empty(PIECE)
        with Readers(self._path, self._index, _OPEN_FILES) as readers:
            for piece in self.pieces:
                values = memory[: piece.stop - piece.start]
                readers.read([Want("master", [(piece, 0)], as_bytes(values))])
                yield piece, values

    def dtypes(self) -> dict[str, torch.dtype]:
        return dict.fromkeys(self.shapes, torch.float32)
