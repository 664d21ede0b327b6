"""The index of a full checkpoint: its shard files with their hashes, and where each parameter lies.

Lines of JSON: the first tells of files and shapes, every other where the pieces of one parameter
lie, so that a rank parses only those lines that it wants. The hash of the whole stands in the
manifest. Needs no torch.

What a checkpoint directory holds, readable without torch.

A checkpoint is a directory whose `manifest.json` was written last, under a temporary name that is
renamed when everything in it is durable. `kind` is "full" (masters, moments, step: an index and the
shard files it names) or "model" (weights alone). A directory without a readable manifest, or with a
file of another size or hash than it says, is not a checkpoint."""

from __future__ import annotations

import fnmatch
import functools
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import numpy
from pydantic import AfterValidator, BaseModel, Field, InstanceOf, ValidationError

from optimus.checkpoint.shard_file import (
    ALIGNED_BYTES,
    BLOCK_BYTES,
    HASH_CHARS,
    HEADER_BYTES,
    Identity,
    ShardFile,
    ShardReader,
    in_threads,
)
from optimus.checkpoint.slices import Box, Stored
from optimus.chunks.layout import STATES
from optimus.config.axes import AXES
from optimus.config.sections import MAX_PATTERN_CHARS, MAX_PATTERNS
from optimus.errors import CheckpointError, one_line
from optimus.io import files, tensor_file

INDEX = "index.jsonl"
DTYPE = "float32"
ITEMSIZE = 4
_COLUMNS = 4 + len(STATES)
_ROW = f"[{','.join(['%d'] * _COLUMNS)}]"
_MOST = 1 << 56
"""Elements or bytes, of which int64 can count the bits."""
_MOST_BLOCK_BYTES = 64 << 20
"""Memory that a reader takes for a block; those written now have 4 MiB."""
_INTEGERS = re.compile("[-0-9,]+")
_MOST_DIMS, _MOST_CELLS, _MOST_NAME_CHARS = 8, 1 << 24, 500
_UNREADABLE = (ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError)


class Written(NamedTuple):
    """What one writer put where, in a form that is short as JSON."""

    shard: ShardFile
    boxes: list[tuple[str, Box]]
    """Parameters and their boxes, each once."""
    rows: list[tuple[int, ...]]
    """A row for each piece: its index in `boxes`, its start and stop, and the byte where each of
    STATES begins, -1 where it has none."""


@dataclass(frozen=True)
class Index:
    """A checkpoint's index. `lines` are parsed when their parameter is asked for."""

    generation: str
    step: int
    block_bytes: int
    shards: tuple[ShardFile, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Of the whole parameters, by name."""
    lines: Mapping[str, str]

    def stored(self, name: str) -> Stored:
        """Where a parameter lies; CheckpointError if the checkpoint has none of that name."""
        if name not in self.lines:
            raise CheckpointError(f"the checkpoint has no parameter {name}")
        try:
            table, _, text = self.lines[name].rpartition('"rows":')
            raw = json.loads(table.rstrip(", ") + "}", parse_float=_refuse_float)
            boxes = tuple(
                tuple(tuple((a, b) for a, b in dim) for dim in box) for box in raw["boxes"]
            )
            sizes, rows = _box_sizes(boxes, self.shapes[name]), _parse_rows(text)
            self._check_rows(rows, sizes)
        except _UNREADABLE as error:
            raise CheckpointError(f"{INDEX}: parameter {name}: {one_line(error)}") from None
        if not _covers(rows, sizes):
            raise CheckpointError(
                f"the index holds only a part of parameter {name}, or a part of it twice"
            )
        return Stored(name, boxes, rows)

    def _check_rows(self, rows: numpy.ndarray, box_sizes: numpy.ndarray) -> None:
        """Check that the rows of a parameter have the ranges that `encode` gives them. Raises
        ValueError."""
        shard, box, start, stop = rows[:, :4].T
        for what, number, count in (("shard file", shard, len(self.shards)),
                                    ("box", box, len(box_sizes))):  # fmt: skip
            if number.min() < 0 or number.max() >= count:
                raise ValueError(f"a row names another {what} than 0 to {count - 1}")
        if start.min() < 0 or (start >= stop).any() or (stop > box_sizes[box]).any():
            raise ValueError("a row leads out of its box")
        offsets = rows[:, 4:]
        last = self._shard_sizes[shard] - (stop - start) * ITEMSIZE
        right = (offsets >= HEADER_BYTES) & (offsets <= last[:, None])
        if not (right | (offsets == -1)).all():
            raise ValueError("a row leads out of its shard file")
        if (offsets[offsets >= 0] % ALIGNED_BYTES).any():
            raise ValueError(f"a row begins at a byte that is no multiple of {ALIGNED_BYTES}")
        # A frozen parameter has a master alone.
        if (offsets[:, 0] < 0).any() or (
            (offsets[:, 1:] < 0).any(1) & (offsets[:, 1:] >= 0).any(1)
        ).any():
            raise ValueError(f"a row without some of {', '.join(STATES)}")

    @functools.cached_property
    def _shard_sizes(self) -> numpy.ndarray:
        return numpy.array([shard.size for shard in self.shards], dtype=numpy.int64)

    def check_rows(self, frozen: Sequence[str] = ()) -> None:
        """Check the rows of all parameters against each other.

        Every parameter is stored completely, with all states unless a pattern of `frozen` matches
        its name. No two rows overlap, and the states of neighboring rows of a shard file are
        equally far apart, as `write_shard` places them. Raises CheckpointError.
        """
        matchers = [re.compile(fnmatch.translate(pattern)).match for pattern in frozen]
        found = [numpy.empty((0, _COLUMNS), dtype=numpy.int64)]
        for name in self.lines:
            rows = self.stored(name).rows
            is_partial = (rows[:, 4:] < 0).any()
            if is_partial and not any(match(name) for match in matchers):
                raise CheckpointError(f"{INDEX}: parameter {name} has not all of its states")
            found.append(rows)
        rows = numpy.concatenate(found)
        rows = rows[numpy.lexsort((rows[:, 4], rows[:, 0]))]
        # A frozen row has a master alone: behind it, the distance between the states is another.
        has_all = rows[:, 5] >= 0
        neighbors = (rows[1:, 0] == rows[:-1, 0]) & has_all[1:] & has_all[:-1]
        distances = numpy.diff(rows[:, 4:], axis=1)
        if (distances[1:] != distances[:-1])[neighbors].any():
            raise CheckpointError(
                f"{INDEX}: the states of two neighboring rows are not equally far apart"
            )
        length = (rows[:, 3] - rows[:, 2]) * ITEMSIZE
        ranges = [
            numpy.stack([rows[:, 0], offset, offset + length], 1)[offset >= 0]
            for offset in rows[:, 4:].T
        ]
        every = numpy.concatenate(ranges)
        shard, start, stop = every[numpy.lexsort((every[:, 1], every[:, 0]))].T
        if ((shard[1:] == shard[:-1]) & (start[1:] < stop[:-1])).any():
            raise CheckpointError(f"{INDEX}: two rows lead to the same bytes of a shard file")

    def open(self, directory: Path, number: int) -> ShardReader:
        """Shard file `number` of `shards`; CheckpointError if it is not as this index says."""
        shard = self.shards[number]
        identity = Identity(self.generation, self.step, shard.writer)
        return ShardReader(directory, identity, shard, self.block_bytes)

    def verify(self, directory: Path, number: int, blocks: range) -> None:
        """Compare blocks of shard file `number` with their hashes; raises CheckpointError."""
        with self.open(directory, number) as file:
            file.verify(blocks)


def encode(
    generation: str, step: int, writers: Sequence[Written], shapes: Mapping[str, Sequence[int]]
) -> bytes:
    """The index of what `writers` wrote of parameters of these whole `shapes`."""
    head = {
        "generation": generation,
        "step": step,
        "block_bytes": BLOCK_BYTES,
        "states": STATES,
        "dtype": DTYPE,
        "shards": [list(one.shard) for one in writers],
    }
    rows: dict[str, list[tuple[int, int, str]]] = {}
    boxes: dict[str, dict[Box, int]] = {}
    for number, one in enumerate(writers):
        numbered = []
        for name, box in one.boxes:
            known = boxes.setdefault(name, {})
            numbered.append((name, known.setdefault(box, len(known))))
        for in_boxes, start, *rest in one.rows:
            name, at = numbered[in_boxes]
            # As text, of which the collector of garbage has nothing to follow: there are 400,000.
            row = _ROW % (number, at, start, *rest)
            rows.setdefault(name, []).append((at, start, row))
    lines = [json.dumps(head | {"shapes": {name: list(shapes[name]) for name in rows}})]
    for name, found in rows.items():
        table = json.dumps({"name": name, "boxes": list(boxes[name])}, separators=(",", ":"))
        lines.append(f'{table[:-1]},"rows":[{",".join(row for *_, row in sorted(found))}]}}')
    return "\n".join([*lines, ""]).encode()


def decode(data: bytes) -> Index:
    """What `encode` made, from bytes whose hash has been compared. Raises CheckpointError."""
    try:
        head, *lines = data.decode().splitlines()
        raw = json.loads(head)
        if (raw["states"], raw["dtype"]) != (list(STATES), DTYPE):
            raise CheckpointError(f"states {raw['states']} of {raw['dtype']} are unknown here")
        by_name = {line.split('"', 4)[3]: line for line in lines}
        shards = tuple(ShardFile(*one) for one in raw["shards"])
        shapes = {name: tuple(shape) for name, shape in raw["shapes"].items()}
        _check_head(raw, shards, shapes)
        if by_name.keys() != shapes.keys() or len(lines) != len(shapes):
            raise ValueError("its lines are not one for each shape")
        return Index(raw["generation"], raw["step"], raw["block_bytes"], shards, shapes, by_name)
    except (*_UNREADABLE, AttributeError) as error:
        raise CheckpointError(f"{INDEX}: not readable: {one_line(error)}") from None


def _check_head(
    raw: Mapping[str, Any], shards: Sequence[ShardFile], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check the types and ranges of an index's first line. Raises ValueError and TypeError."""
    block_bytes, generation = raw["block_bytes"], raw["generation"]
    if not _is_count(block_bytes, 1, _MOST_BLOCK_BYTES) or not _is_count(raw["step"]):
        raise ValueError(f"block_bytes = {block_bytes!r:.40}, step = {raw['step']!r:.40}")
    if type(generation) is not str or len(generation) > 100:
        raise ValueError(f"generation = {generation!r:.40}")
    for writer, size, hashes in shards:
        if not (_is_count(writer) and _is_count(size, HEADER_BYTES) and type(hashes) is str):
            raise ValueError(f"shard file of writer {writer!r:.40} and size {size!r:.40}")
        if len(hashes) != -(-size // block_bytes) * HASH_CHARS:
            raise ValueError(f"hashes of shard file {writer} are not those of {size} bytes")
    if len({shard.writer for shard in shards}) != len(shards):
        raise ValueError("a shard file is listed twice")
    for name, shape in shapes.items():
        sizes = 0 < len(shape) <= _MOST_DIMS and all(_is_count(size, 1) for size in shape)
        if not sizes or math.prod(shape) >= _MOST or len(name) > _MOST_NAME_CHARS:
            raise ValueError(f"shape of {name:.200} = {list(shape)!r:.80}")


def _parse_rows(text: str) -> numpy.ndarray:
    """Return the rows in the rest of a line, int64 [n, _COLUMNS]. Raises ValueError.

    The json module would make an object of every number: with all checks this takes 0.8 of its
    time for a whole index.
    """
    text = text.replace(" ", "")
    numbers = text[2:-3].replace("],[", ",")
    if text[:2] == "[[" and text[-3:] == "]]}" and _INTEGERS.fullmatch(numbers):
        # It ends at what is no integer, and gives the largest for one that int64 cannot hold.
        found = numpy.fromstring(numbers, dtype=numpy.int64, sep=",")
        if len(found) == (text.count("],[") + 1) * _COLUMNS:
            return found.reshape(-1, _COLUMNS)
    raise ValueError(f"rows are not lists of {_COLUMNS} integers")


def _refuse_float(text: str) -> NoReturn:
    raise ValueError(f"{text} is no integer")


def _is_count(value: object, least: int = 0, most: int = _MOST - 1) -> bool:
    return type(value) is int and least <= value <= most


@functools.lru_cache(256)
def _box_sizes(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> numpy.ndarray:
    """Return the elements of each box, int64 [boxes]. Raises ValueError unless the boxes are all of
    a parameter of this shape, each element in one."""
    for box in boxes:
        if len(box) != len(shape):
            raise ValueError(f"a box of {len(box)} dims, where the shape has {len(shape)}")
        for dim, size in zip(box, shape, strict=True):
            ends = [end for interval in dim for end in interval]
            if not ends or not all(type(end) is int for end in ends):
                raise ValueError("a box is not made of ranges of integers")
            steps = zip([0, *ends], [*ends, size], strict=True)
            if not all(low < high if n % 2 else low <= high for n, (low, high) in enumerate(steps)):
                raise ValueError("a box leads out of the parameter")
    sizes = [math.prod(sum(b - a for a, b in dim) for dim in box) for box in boxes]
    if sum(sizes) != math.prod(shape) or (len(boxes) > 1 and _overlap(boxes, shape)):
        raise ValueError("its boxes leave out elements or hold some twice")
    return numpy.array(sizes, dtype=numpy.int64)


def _overlap(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Return whether two boxes have an element in common. Raises ValueError for boxes that are cut
    at more places than any layout does."""
    cuts = [
        sorted({0, size, *(end for box in boxes for interval in box[dim] for end in interval)})
        for dim, size in enumerate(shape)
    ]
    if math.prod(map(len, cuts)) > _MOST_CELLS:
        raise ValueError("its boxes are cut at too many places")
    number = [{cut: n for n, cut in enumerate(dim)} for dim in cuts]
    taken = numpy.zeros([len(dim) - 1 for dim in cuts], dtype=bool)
    for box in boxes:
        cells = numpy.ix_(
            *(
                numpy.concatenate([numpy.arange(at[a], at[b]) for a, b in dim])
                for at, dim in zip(number, box, strict=True)
            )
        )
        if taken[cells].any():
            return True
        taken[cells] = True
    return False


def _covers(rows: numpy.ndarray, box_sizes: numpy.ndarray) -> bool:
    """Return whether rows, by box and start, hold every element of every box once."""
    stops = numpy.cumsum(box_sizes)
    begins = (stops - box_sizes)[rows[:, 1]]
    start, stop = begins + rows[:, 2], begins + rows[:, 3]
    return bool(start[0] == 0 and (start[1:] == stop[:-1]).all() and stop[-1] == stops[-1])


FORMAT = 2
"""Format 1 held whole tensors and no hash of the manifest itself; of it models alone are read."""
MANIFEST = "manifest.json"
_CONFIGS = ("config.toml", "config.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
"""A checkpoint that lists one of these files was saved with a tokenizer."""
TEMPLATES = "additional_chat_templates"
"""A folder of chat templates, of at most _MAX_TEMPLATES entries in _MAX_LEVELS levels."""
_MAX_TEMPLATES, _MAX_LEVELS = 1_000, 8
_TOKENIZER_FILES = (
    *(*_TOKENIZERS, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", TEMPLATES),
)
GENERATION_CONFIG = "generation_config.json"
SIDECARS = (*_TOKENIZER_FILES, GENERATION_CONFIG)
"""Files and a folder of a Hugging Face directory that a checkpoint may have, too."""
_READ_BY_NAME = (tensor_file.INDEX, *_CONFIGS)
"""Other files that readers open by their names. Weights are found by their suffix instead."""
FROZEN = "optim.frozen"
DATA_EOS = "data.eos_token_id"
"""The key of `settings` that holds the token which ends each document of a run's data."""
_BLOCKS_A_TASK = 16
"""Of verifying: 64 MiB, beside which opening a file and reading its header costs nothing."""
_READ_SETTINGS = {
    **dict.fromkeys((f"parallel.{axis}" for axis in AXES), int),
    **dict.fromkeys(("train.batch_tokens", "train.seq_len", "train.max_steps"), int),
    **dict.fromkeys(("train.eval_interval", "checkpoint.interval", DATA_EOS), int),
    **dict.fromkeys(("optim.warmup_steps", "optim.decay_steps"), int),
    **dict.fromkeys(("optim.lr", "optim.min_lr"), int | float),
    **dict.fromkeys(("optim.sharding", "optim.schedule", "parallel.schedule"), str),
    **dict.fromkeys(("train.dtype", "checkpoint.scatter", "data.identity"), str),
    FROZEN: list,
}
"""Settings of a checkpoint that are used for more than a comparison, and their types."""
_MOST_RANKS = 1 << 22
_MANIFEST_BYTES = 4 << 20
"""Largest manifest that is read; ours have some kilobytes."""
_COMPANION_BYTES, _INDEX_BYTES = 256 << 20, 1 << 30
"""Largest files besides weights, and largest index: 40 times that of 400,000 pieces."""
_FORMAT_1 = re.compile(rb'\s*\{\s*"format": *1\b')


def _plain_name(name: str) -> str:
    """Refuse the name of a file that may not be in the checkpoint's directory."""
    if "\0" in name or "\\" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise ValueError("must be a file of the checkpoint, named relative to its directory")
    os.fsencode(name)
    return name


_Int = Annotated[int, Field(strict=True, ge=0, lt=1 << 56)]
_Ranks = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]
_Float = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
_Name = Annotated[InstanceOf[str], AfterValidator(_plain_name)]
_Hash = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


@dataclass(frozen=True)
class FileEntry:
    name: _Name
    size: _Int
    xxh3: _Hash


class _Fields(BaseModel):
    """The fields of manifest.json and what they may hold, however its hash was made."""

    kind: Literal["full", "model"]
    step: _Int
    tokens: _Int
    updates: _Int
    origin: InstanceOf[str]
    settings: dict[str, Any]
    files: tuple[FileEntry, ...]
    loss_scale: dict[Literal["scale", "good_steps", "skipped"], _Float] | None = None
    ranks: dict[str, _Ranks] | None = None
    begun: _Int | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The sealed description of one checkpoint.

    `step` counts updates of the run, `updates` those of this optimizer (fewer after a restart from
    a model alone), `tokens` those read; `origin` is the `checkpoint.load` its run began with;
    `settings` maps "section.key" to its value.
    """

    kind: str
    step: int = 0
    tokens: int = 0
    updates: int = 0
    origin: str = "none"
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[FileEntry, ...]
    path: Path
    loss_scale: Mapping[str, float] | None = None
    """State of dynamic loss scaling (fp16); None without it."""
    ranks: Mapping[str, int] | None = None
    """Sizes of the mesh that wrote it, and `per_node`, how many ranks a node had."""
    begun: int | None = None
    """The step that its run was begun at; None where that was not noted."""

    @property
    def is_sharded(self) -> bool:
        """Whether its states lie in shard files, as those of every full checkpoint do."""
        return any(entry.name == INDEX for entry in self.files)

    def check(self, hashed_bytes: float = math.inf, weights: bool = True) -> None:
        """Compare files with their hashes (larger ones than `hashed_bytes`, and without `weights`
        those of a model alone, with their sizes alone), shard files with their sizes and headers:
        what can be done at once. The bytes of shard files, and of weights by whoever streams them,
        are compared when they are read. CheckpointError names the first that differs."""
        self._check_unlisted()
        for entry in self.files:
            is_later = not weights and entry.name.endswith(".safetensors")
            compare = _read_checked if entry.size <= hashed_bytes and not is_later else _check_size
            compare(self.path / entry.name, entry)
        self.check_shards()

    def _check_unlisted(self) -> None:
        """Raise CheckpointError for weights, configurations and sidecar files that the manifest
        does not list. A tokenizer may be added to a checkpoint that was saved without one."""
        listed = {entry.name for entry in self.files}
        may_be_added = () if listed.intersection(_TOKENIZERS) else _TOKENIZER_FILES
        try:
            found = os.listdir(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from None
        read = [name for name in found if name.endswith(".safetensors") or name in _READ_BY_NAME]
        for name in sorted([*read, *sidecars(self.path)]):
            if name not in listed and name.split("/")[0] not in may_be_added:
                raise CheckpointError(
                    f"{self.path / name}: its manifest does not list it; remove it"
                )

    def check_shards(self) -> None:
        """Compare sizes and headers of the shard files, if any; raises CheckpointError."""
        if self.is_sharded:
            index = self.index()
            numbers = range(len(index.shards))
            in_threads(lambda number: index.open(self.path, number).close(), numbers)

    def check_rows(self, index: Index) -> None:
        """Check that the index leads to every element of every parameter once. Raises
        CheckpointError."""
        try:
            index.check_rows(self.settings.get(FROZEN) or ())
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def verify(self, threads: int = 0) -> None:
        """Compare every byte; CheckpointError names the first file that differs."""
        if problems := self.problems(threads):
            raise CheckpointError(problems[0])

    def problems(self, threads: int = 0) -> list[str]:
        """What is not as it was written: a line for each such file, with the first place."""
        checks: list[Callable[[], object]] = [partial(self._verify_file, one) for one in self.files]
        checks.append(self._check_unlisted)
        found = [problem for problem in in_threads(_problem, checks, threads) if problem]
        if not self.is_sharded:
            return found
        try:
            index = self.index()
            self.check_rows(index)
        except CheckpointError as error:
            return found or [str(error)]  # nobody knows what shard files should hold
        tasks = [
            (number, range(shard.num_blocks)[first : first + _BLOCKS_A_TASK])
            for number, shard in enumerate(index.shards)
            for first in range(0, shard.num_blocks, _BLOCKS_A_TASK)
        ]
        checks = [partial(index.verify, self.path, *task) for task in tasks]
        first_of: dict[int, str] = {}
        for (number, _), problem in zip(tasks, in_threads(_problem, checks, threads), strict=True):
            if problem:
                first_of.setdefault(number, problem)
        return [*found, *first_of.values()]

    def _verify_file(self, entry: FileEntry) -> None:
        """Compare a file with its hash, and read its header if it holds weights."""
        path = self.path / entry.name
        _read_checked(path, entry)
        if entry.name.endswith(".safetensors"):
            tensor_file.TensorFile(path).close()
        elif entry.name == tensor_file.INDEX:
            listed = {one.name for one in self.files}
            for name in sorted(set(tensor_file.weight_map(self.path).values())):
                if name not in listed:
                    raise CheckpointError(f"{path}: names {name}, which the manifest does not list")

    def index(self, data: bytes | None = None) -> Index:
        """Where the states lie; `data`: the index file's content, if another rank has read it."""
        if data is None:
            data = self.index_bytes()
        try:
            index = decode(data)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        if index.step != self.step:
            raise CheckpointError(f"{self.path}: its index is of step {index.step}")
        return index

    def index_bytes(self) -> bytes:
        """Return the index file's content. Raises CheckpointError."""
        for entry in self.files:
            if entry.name == INDEX:
                return _read_checked(self.path / INDEX, entry, wanted=True)
        raise CheckpointError(f"{self.path}: its manifest lists no {INDEX}, so no states")


def _problem(check: Callable[[], object]) -> str:
    """What a check refuses, or nothing."""
    try:
        check()
    except CheckpointError as error:
        return str(error)
    return ""


def _read_checked(path: Path, entry: FileEntry, wanted: bool = False) -> bytes:
    """Compare a file with its size and hash; its content, if that is `wanted`."""
    _check_size(path, entry)
    try:
        content = files.read_regular(path, entry.size) if wanted else b""
        if (files.xxh3_bytes(content) if wanted else files.xxh3_file(path)) != entry.xxh3:
            raise CheckpointError(f"{path}: its content does not match its checksum")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    return content


def _check_size(path: Path, entry: FileEntry) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    if size != entry.size:
        raise CheckpointError(f"{path}: {size} bytes, but its manifest says {entry.size}")


def is_checkpoint(path: str | os.PathLike) -> bool:
    """Whether a directory claims to be a checkpoint of ours."""
    return (Path(path) / MANIFEST).is_file()


def sidecars(directory: Path) -> list[str]:
    """Return the names of the files of SIDECARS that are in a directory, relative to it. Links to
    folders are not followed below TEMPLATES.

    Raises:
        CheckpointError: The folder TEMPLATES is too large or too deep, or cannot be read.
    """
    names = [name for name in SIDECARS if os.path.lexists(directory / name)]
    if not os.path.isdir(directory / TEMPLATES):
        return names

    def refuse(error: OSError) -> None:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from None

    names.remove(TEMPLATES)
    entries = 0
    for root, folders, found in os.walk(directory / TEMPLATES, onerror=refuse):
        folder = Path(root).relative_to(directory)
        entries += len(folders) + len(found)
        if entries > _MAX_TEMPLATES or len(folder.parts) > _MAX_LEVELS:
            raise CheckpointError(
                f"{directory / TEMPLATES}: more than {_MAX_TEMPLATES:,} entries or {_MAX_LEVELS} "
                "levels of folders; remove everything except chat templates"
            )
        names += [(folder / name).as_posix() for name in found]
    return names


def read_manifest(path: str | os.PathLike) -> Manifest:
    """Return the manifest of a checkpoint directory. Raises CheckpointError if there is no usable
    one, or a field has a type or a value that no save writes."""
    path = Path(path)
    try:
        data = files.read_regular(path / MANIFEST, _MANIFEST_BYTES)
        is_hashed = not _FORMAT_1.match(data)
        raw = files.parse_checked_json(data) if is_hashed else json.loads(data)
        if raw["format"] != FORMAT if is_hashed else (raw["format"], raw["kind"]) != (1, "model"):
            raise CheckpointError(
                f"{path}: {raw.get('kind')} checkpoint of format {raw['format']}, this version "
                f"reads {FORMAT}"
            )
        fields = _Fields.model_validate(raw)
        _check_dependent(fields)
        return Manifest(path=path, **dict(fields))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no checkpoint here ({MANIFEST} is missing)") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = one_line(first["msg"]).removeprefix("Value error, ")
        what = f"{'.'.join(map(str, first['loc']))}: {reason}"
        raise CheckpointError(f"{path / MANIFEST}: not readable: {what}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path / MANIFEST}: not readable: {one_line(error)}") from None


def _check_dependent(fields: _Fields) -> None:
    """Check what several fields or entries must agree on. Raises ValueError."""
    names = [entry.name for entry in fields.files]
    if len(set(names)) != len(names):
        raise ValueError("files has a name twice")
    for key, kind in _READ_SETTINGS.items():
        if not isinstance(fields.settings.get(key), kind | None):
            raise ValueError(f"settings: {key} = {fields.settings[key]!r:.80} is of another type")
    frozen = fields.settings.get(FROZEN) or ()
    if len(frozen) > MAX_PATTERNS or not all(
        isinstance(pattern, str) and len(pattern) <= MAX_PATTERN_CHARS for pattern in frozen
    ):
        raise ValueError(
            f"settings: {FROZEN} is not a list of at most {MAX_PATTERNS:,} patterns of at most "
            f"{MAX_PATTERN_CHARS} characters"
        )
    _check_listed(fields.kind, set(names))
    for entry in fields.files:
        most = _INDEX_BYTES if entry.name == INDEX else _COMPANION_BYTES
        if entry.size > most and not entry.name.endswith(".safetensors"):
            raise ValueError(f"files: {entry.name} is larger than {most:,} bytes")
    scale, ranks = fields.loss_scale, fields.ranks
    if scale is not None and scale.keys() != {"scale", "good_steps", "skipped"}:
        raise ValueError(f"loss_scale has only {', '.join(scale) or 'no field'}")
    if ranks is None:
        return
    sizes = [ranks.get(axis, 1) for axis in AXES]
    if not {"pp", "per_node"} <= ranks.keys() or math.prod(sizes) > _MOST_RANKS:
        raise ValueError(f"ranks = {ranks} is no mesh of at most {_MOST_RANKS:,} ranks")


def _check_listed(kind: str, names: set[str]) -> None:
    """Check that the files of a checkpoint include what every save of its kind writes. Raises
    ValueError."""
    if kind == "full" and INDEX not in names:
        raise ValueError(f"files of a full checkpoint lists no {INDEX}")
    if kind == "model" and INDEX in names:
        raise ValueError(f"files of a model lists {INDEX}, which only a full checkpoint has")
    if kind == "model" and names.isdisjoint((tensor_file.MODEL, tensor_file.INDEX)):
        raise ValueError(f"files lists neither {tensor_file.MODEL} nor {tensor_file.INDEX}")
    if names.isdisjoint(_CONFIGS):
        raise ValueError(f"files lists neither {' nor '.join(_CONFIGS)}")
