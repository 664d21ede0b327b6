"""The files that describe a checkpoint: manifest.json and index.jsonl. Needs no torch.

A checkpoint is a directory whose `manifest.json` lists its other files with sizes and hashes. A
save writes it last, into a temporary directory, and then renames the directory. A checkpoint is
valid if its manifest is readable and all files have the listed sizes and hashes.

`kind` is "full" or "model". A full checkpoint has the master weights and the moments in shard files
(optimus/checkpoint/shard_file.py), and `index.jsonl` with the hashes of their blocks and the
location of every parameter. The first line of the index lists files and shapes. Each other line is
for one parameter, so that a rank parses only the lines that it needs. A model-only checkpoint has
the weights alone, in safetensors files.
"""

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
from optimus.checkpoint.slices import Box, StoredParam
from optimus.chunks.layout import ALIGNMENT
from optimus.config import MAX_PATTERN_CHARS, MAX_PATTERNS
from optimus.config.axes import AXES
from optimus.errors import CheckpointError, one_line
from optimus.io import files, tensor_file

# -- The index ------------------------------------------------------------------------------------

INDEX = "index.jsonl"
DTYPE = "float32"
ITEMSIZE = 4
ADAMW_STATES = ("master", "exp_avg", "exp_avg_sq")
KNOWN_STATES: tuple[tuple[str, ...], ...] = (ADAMW_STATES,)
"""Names of the states of an element, one tuple for each supported optimizer: the master weight,
then the moments. The columns of the index have the same order."""
_MOST = 1 << 56
"""Maximum number of elements or bytes: int64 can count their bits."""
_MOST_BLOCK_BYTES = 64 << 20
"""Maximum block size, the memory that a reader allocates. Saves write blocks of 4 MiB."""
_INTEGERS = re.compile("[-0-9,]+")
_MOST_DIMS, _MOST_CELLS, _MOST_NAME_CHARS = 8, 1 << 24, 500
_UNREADABLE = (ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError)


class ShardReport(NamedTuple):
    """A shard file and its content, as its writer reports them to the first rank."""

    shard: ShardFile
    boxes: list[tuple[str, Box]]
    """Names and boxes of the parameters in the file, without duplicates."""
    rows: list[tuple[int, ...]]
    """A row for each slice of a parameter: number in `boxes`, start and stop of the elements in the
    box, and for each state the byte offset in the file (-1: not stored)."""


@dataclass(frozen=True)
class Index:
    """The index of a full checkpoint. The line of a parameter is parsed on request."""

    generation: str
    step: int
    block_bytes: int
    states: tuple[str, ...]
    """An element of KNOWN_STATES."""
    shards: tuple[ShardFile, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the whole parameters, by name."""
    lines: Mapping[str, str]
    """Lines of the index, by name of the parameter."""

    def stored(self, name: str) -> StoredParam:
        """Return the location of a parameter.

        Raises:
            CheckpointError: The checkpoint does not have the parameter, or its line is invalid.
        """
        if name not in self.lines:
            raise CheckpointError(f"the checkpoint has no parameter {name}")
        try:
            table, _, text = self.lines[name].rpartition('"rows":')
            raw = json.loads(table.rstrip(", ") + "}", parse_float=_refuse_float)
            boxes = tuple(
                tuple(tuple((a, b) for a, b in dim) for dim in box) for box in raw["boxes"]
            )
            sizes = _box_sizes(boxes, self.shapes[name])
            rows = _parse_rows(text, 4 + len(self.states))
            self._check_rows(rows, sizes)
        except _UNREADABLE as error:
            raise CheckpointError(f"{INDEX}: parameter {name}: {one_line(error)}") from None
        # The rows, sorted by box and start, must contain every element of every box once.
        stops = numpy.cumsum(sizes)
        offsets = (stops - sizes)[rows[:, 1]]
        start, stop = offsets + rows[:, 2], offsets + rows[:, 3]
        if start[0] != 0 or (start[1:] != stop[:-1]).any() or stop[-1] != stops[-1]:
            raise CheckpointError(
                f"the index does not locate every element of parameter {name} exactly once"
            )
        return StoredParam(name, boxes, rows)

    def _check_rows(self, rows: numpy.ndarray, box_sizes: numpy.ndarray) -> None:
        """Check the index rows of a parameter. Raises ValueError for values that `encode` never
        writes."""
        shard, box, start, stop = rows[:, :4].T
        for kind, number, count in (("shard file", shard, len(self.shards)),
                                    ("box", box, len(box_sizes))):  # fmt: skip
            if number.min() < 0 or number.max() >= count:
                raise ValueError(f"a row has a {kind} number outside 0 to {count - 1}")
        if start.min() < 0 or (start >= stop).any() or (stop > box_sizes[box]).any():
            raise ValueError("a row is not a range of elements inside its box")
        offsets = rows[:, 4:]
        last = self._shard_sizes[shard] - (stop - start) * ITEMSIZE
        right = (offsets >= HEADER_BYTES) & (offsets <= last[:, None])
        if not (right | (offsets == -1)).all():
            raise ValueError("a row refers to bytes outside its shard file")
        if (offsets[offsets >= 0] % ALIGNED_BYTES).any():
            raise ValueError(f"a row begins at a byte that is not a multiple of {ALIGNED_BYTES}")
        # A frozen parameter has a master alone.
        if (offsets[:, 0] < 0).any() or (
            (offsets[:, 1:] < 0).any(1) & (offsets[:, 1:] >= 0).any(1)
        ).any():
            raise ValueError(f"a row lacks some of {', '.join(self.states)}")
        full = offsets[(offsets >= 0).all(1)]
        if (full[:, 1:] <= full[:, :-1]).any():  # a writer writes state by state
            raise ValueError(f"the states of a row are not in the order {', '.join(self.states)}")

    @functools.cached_property
    def _shard_sizes(self) -> numpy.ndarray:
        return numpy.array([shard.size for shard in self.shards], dtype=numpy.int64)

    def check_rows(self, frozen: Sequence[str] = ()) -> None:
        """Check the rows of all parameters against each other.

        Every parameter is stored completely, with all states unless a pattern of `frozen` matches
        its name. The rows are where `write_shard` places them: they do not overlap, and they cover
        all bytes of the shard files except headers and padding. The distance in bytes between two
        states is the same in neighboring rows.

        Args:
            frozen: `optim.frozen` of the run.

        Raises:
            CheckpointError: A row is invalid.
        """
        matchers = [re.compile(fnmatch.translate(pattern)).match for pattern in frozen]
        rows_of_params = [numpy.empty((0, 4 + len(self.states)), dtype=numpy.int64)]
        for name in self.lines:
            rows = self.stored(name).rows
            is_partial = (rows[:, 4:] < 0).any()
            if is_partial and not any(match(name) for match in matchers):
                raise CheckpointError(f"{INDEX}: parameter {name} lacks some of its states")
            rows_of_params.append(rows)
        rows = numpy.concatenate(rows_of_params)
        length = (rows[:, 3] - rows[:, 2]) * ITEMSIZE
        # Shard, start and stop of the headers, of all states, and of the ends of the files.
        numbers = numpy.arange(len(self.shards))
        ranges = [
            numpy.stack([numbers, 0 * numbers, 0 * numbers + HEADER_BYTES], 1),
            numpy.stack([numbers, self._shard_sizes, self._shard_sizes], 1),
        ]
        for offset in rows[:, 4:].T:
            ranges.append(numpy.stack([rows[:, 0], offset, offset + length], 1)[offset >= 0])
        all_ranges = numpy.concatenate(ranges)
        shard, start, stop = all_ranges[numpy.lexsort((all_ranges[:, 1], all_ranges[:, 0]))].T
        gap = (start[1:] - stop[:-1])[shard[1:] == shard[:-1]]
        if (gap < 0).any():
            raise CheckpointError(f"{INDEX}: two rows refer to the same bytes of a shard file")
        if (gap >= ALIGNMENT * ITEMSIZE).any():
            raise CheckpointError(f"{INDEX}: a shard file has bytes to which no row refers")
        # Frozen rows have a master alone. They change the distance from the masters to the first
        # moment, but not those between moments.
        rows = rows[numpy.lexsort((rows[:, 4], rows[:, 0]))]
        is_full = rows[:, -1] >= 0
        compared = (rows[1:, 0] == rows[:-1, 0]) & is_full[1:] & is_full[:-1]
        differs = (numpy.diff(rows[1:, 4:6]) != numpy.diff(rows[:-1, 4:6])).any(1)
        full = rows[is_full]
        distances, same_shard = numpy.diff(full[:, 5:]), full[1:, 0] == full[:-1, 0]
        wrong = numpy.concatenate(
            [distances[1:] != distances[:-1], full[1:, 5:] <= full[:-1, 5:]], axis=1
        )
        if differs[compared].any() or wrong[same_shard].any():
            raise CheckpointError(
                f"{INDEX}: the distance between two states differs in two neighboring rows"
            )

    def open(self, directory: Path, number: int) -> ShardReader:
        """Open shard file `number` of `shards`. Raises CheckpointError if the file differs in its
        size or header."""
        shard = self.shards[number]
        identity = Identity(self.generation, self.step, shard.writer)
        return ShardReader(directory, identity, shard, self.block_bytes)


def encode(
    generation: str,
    step: int,
    states: Sequence[str],
    reports: Sequence[ShardReport],
    shapes: Mapping[str, Sequence[int]],
) -> bytes:
    """Return the content of an index.

    Args:
        generation: Random name of the save.
        step: Number of completed updates.
        states: Names of the states, an element of KNOWN_STATES.
        reports: The reports of all writers.
        shapes: Shapes of the whole parameters, by name.
    """
    head = {
        "generation": generation,
        "step": step,
        "block_bytes": BLOCK_BYTES,
        "states": states,
        "dtype": DTYPE,
        "shards": [list(report.shard) for report in reports],
    }
    row_format = f"[{','.join(['%d'] * (4 + len(states)))}]"
    rows: dict[str, list[tuple[int, int, str]]] = {}
    boxes: dict[str, dict[Box, int]] = {}
    for number, report in enumerate(reports):
        numbered = []
        for name, box in report.boxes:
            known = boxes.setdefault(name, {})
            numbered.append((name, known.setdefault(box, len(known))))
        for in_boxes, start, *rest in report.rows:
            name, box_number = numbered[in_boxes]
            # As text, which the garbage collector does not traverse: there can be 400,000 rows.
            row = row_format % (number, box_number, start, *rest)
            rows.setdefault(name, []).append((box_number, start, row))
    lines = [json.dumps(head | {"shapes": {name: list(shapes[name]) for name in rows}})]
    for name, of_param in rows.items():
        table = json.dumps({"name": name, "boxes": list(boxes[name])}, separators=(",", ":"))
        lines.append(f'{table[:-1]},"rows":[{",".join(row for *_, row in sorted(of_param))}]}}')
    return "\n".join([*lines, ""]).encode()


def decode(data: bytes) -> Index:
    """Return the index with this content. The caller has checked its hash.

    Raises:
        CheckpointError: The content is invalid.
    """
    try:
        head, *lines = data.decode().splitlines()
        raw = json.loads(head)
        if raw["states"] not in map(list, KNOWN_STATES) or raw["dtype"] != DTYPE:
            raise CheckpointError(f"cannot read states {raw['states']} of type {raw['dtype']}")
        by_name = {line.split('"', 4)[3]: line for line in lines}
        shards = tuple(ShardFile(*fields) for fields in raw["shards"])
        shapes = {name: tuple(shape) for name, shape in raw["shapes"].items()}
        _check_head(raw, shards, shapes)
        if by_name.keys() != shapes.keys() or len(lines) != len(shapes):
            raise ValueError("it does not have exactly one line for each shape")
        sizes = raw["step"], raw["block_bytes"]
        return Index(raw["generation"], *sizes, tuple(raw["states"]), shards, shapes, by_name)
    except (*_UNREADABLE, AttributeError) as error:
        raise CheckpointError(f"{INDEX}: not readable: {one_line(error)}") from None


def _check_head(
    raw: Mapping[str, Any], shards: Sequence[ShardFile], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check the types and ranges of an index's first line. Raises ValueError and TypeError."""
    block_bytes, generation = raw["block_bytes"], raw["generation"]
    if not _is_count(block_bytes, 1, _MOST_BLOCK_BYTES) or not _is_count(raw["step"]):
        raise ValueError(f"invalid block_bytes = {block_bytes!r:.40} or step = {raw['step']!r:.40}")
    if type(generation) is not str or len(generation) > 100:
        raise ValueError(f"invalid generation = {generation!r:.40}")
    for writer, size, hashes in shards:
        if not (_is_count(writer) and _is_count(size, HEADER_BYTES) and type(hashes) is str):
            raise ValueError(f"invalid shard file of writer {writer!r:.40} and size {size!r:.40}")
        if len(hashes) != -(-size // block_bytes) * HASH_CHARS:
            raise ValueError(f"wrong number of hashes of shard file {writer} with {size} bytes")
    if len({shard.writer for shard in shards}) != len(shards):
        raise ValueError("a shard file is listed twice")
    for name, shape in shapes.items():
        sizes = 0 < len(shape) <= _MOST_DIMS and all(_is_count(size, 1) for size in shape)
        if not sizes or math.prod(shape) >= _MOST or len(name) > _MOST_NAME_CHARS:
            raise ValueError(f"invalid shape of {name:.200} = {list(shape)!r:.80}")


def _parse_rows(text: str, columns: int) -> numpy.ndarray:
    """Return the rows at the end of a line, int64 [n, columns]. Raises ValueError.

    The json module creates an object for every number. With all checks of a whole index, this
    function takes 0.8 of the time of the json module.
    """
    text = text.replace(" ", "")
    numbers = text[2:-3].replace("],[", ",")
    if text[:2] == "[[" and text[-3:] == "]]}" and _INTEGERS.fullmatch(numbers):
        # It stops at anything except an integer, and returns the greatest int64 for larger ones.
        parsed = numpy.fromstring(numbers, dtype=numpy.int64, sep=",")
        if len(parsed) == (text.count("],[") + 1) * columns:
            return parsed.reshape(-1, columns)
    raise ValueError(f"rows are not lists of {columns} integers")


def _refuse_float(text: str) -> NoReturn:
    raise ValueError(f"{text} is not an integer")


def _is_count(value: object, least: int = 0, most: int = _MOST - 1) -> bool:
    return type(value) is int and least <= value <= most


@functools.lru_cache(256)
def _box_sizes(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> numpy.ndarray:
    """Return the number of elements of each box, int64 [boxes]. Raises ValueError unless each
    element of a parameter of this shape is in exactly one box."""
    for box in boxes:
        if len(box) != len(shape):
            raise ValueError(f"a box of {len(box)} dims, where the shape has {len(shape)}")
        for dim, size in zip(box, shape, strict=True):
            ends = [end for interval in dim for end in interval]
            if not ends or not all(type(end) is int for end in ends):
                raise ValueError("a box is not made of ranges of integers")
            steps = zip([0, *ends], [*ends, size], strict=True)
            if not all(low < high if n % 2 else low <= high for n, (low, high) in enumerate(steps)):
                raise ValueError("a box is not inside the shape of the parameter")
    sizes = [math.prod(sum(b - a for a, b in dim) for dim in box) for box in boxes]
    if sum(sizes) != math.prod(shape) or (len(boxes) > 1 and _overlap(boxes, shape)):
        raise ValueError("its boxes omit elements or contain some twice")
    return numpy.array(sizes, dtype=numpy.int64)


def _overlap(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Return whether two boxes have an element in common. Raises ValueError if the boxes have more
    boundaries than any layout produces."""
    cuts = [
        sorted({0, size, *(end for box in boxes for interval in box[dim] for end in interval)})
        for dim, size in enumerate(shape)
    ]
    if math.prod(map(len, cuts)) > _MOST_CELLS:
        raise ValueError("its boxes have too many boundaries")
    number = [{cut: n for n, cut in enumerate(dim)} for dim in cuts]
    covered = numpy.zeros([len(dim) - 1 for dim in cuts], dtype=bool)
    for box in boxes:
        cells = numpy.ix_(
            *(
                numpy.concatenate([numpy.arange(at[a], at[b]) for a, b in dim])
                for at, dim in zip(number, box, strict=True)
            )
        )
        if covered[cells].any():
            return True
        covered[cells] = True
    return False


# -- The manifest ---------------------------------------------------------------------------------

FORMAT = 2
"""Format 1 had whole tensors and no hash of the manifest. Only its model-only checkpoints are
read."""
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
"""Files of Hugging Face directories, and a folder, that a checkpoint may also contain."""
_READ_BY_NAME = (tensor_file.INDEX, *_CONFIGS)
"""Files that readers open by name, in addition to SIDECARS. Readers find files of weights by their
suffix."""
FROZEN = "optim.frozen"
DATA_EOS = "data.eos_token_id"
"""The key of `settings` with the token that ends each document of the run's data."""
_BLOCKS_A_TASK = 16
"""Number of blocks that a thread verifies after it has opened a shard file: 64 MiB."""
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
"""Types of the settings that are used for more than a comparison."""
_MOST_RANKS = 1 << 22
_MANIFEST_BYTES = 4 << 20
"""Maximum size of a manifest. Saves write a few kilobytes."""
_SIDECAR_BYTES, _INDEX_BYTES = 256 << 20, 1 << 30
"""Maximum size of a file that is neither weights nor an index, and of an index. The second is 40
times the size of an index with 400,000 slices."""
_FORMAT_1 = re.compile(rb'\s*\{\s*"format": *1\b')


def _plain_name(name: str) -> str:
    """Return a file name. Raises ValueError unless it is a relative path inside the directory of
    the checkpoint."""
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
    """A file that a manifest lists."""

    name: _Name
    size: _Int
    xxh3: _Hash


class _Fields(BaseModel):
    """The types and ranges of the fields of manifest.json. A file with a valid hash may have
    invalid fields."""

    kind: Literal["full", "model"]
    step: _Int
    tokens: _Int
    updates: _Int
    origin: InstanceOf[str]
    settings: dict[str, Any]
    files: tuple[FileEntry, ...]
    loss_scale: dict[Literal["scale", "good_steps", "skipped"], _Float] | None = None
    ranks: dict[str, _Ranks] | None = None
    first_step: _Int | None = Field(None, alias="begun")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json.

    `step` and `tokens` are the numbers of updates and tokens of the run. `updates` is the number of
    updates since the optimizer states were zero; a restart from weights alone sets them to zero.
    `origin` is the `checkpoint.load` with which the run was started. `settings` maps "section.key"
    to its value.
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
    """Sizes of the axes of the mesh that wrote the checkpoint, and `per_node`, the number of ranks
    on a node."""
    first_step: int | None = None
    """The step at which the run was started; None if unknown."""

    @property
    def is_sharded(self) -> bool:
        """True if the states are in shard files, as in every full checkpoint."""
        return any(entry.name == INDEX for entry in self.files)

    def check(self, hashed_bytes: float = math.inf, weights: bool = True) -> None:
        """Check the sizes and hashes of the files, but only the sizes and headers of shard files.

        The readers of shard files check the hashes of the blocks that they read.

        Args:
            hashed_bytes: Files larger than this are compared with their sizes only.
            weights: False to compare safetensors files with their sizes only.

        Raises:
            CheckpointError: Names the first file that differs.
        """
        self._check_unlisted()
        for entry in self.files:
            size_only = entry.size > hashed_bytes or (
                not weights and entry.name.endswith(".safetensors")
            )
            (_check_size if size_only else _read_checked)(self.path / entry.name, entry)
        self.check_shards()

    def _check_unlisted(self) -> None:
        """Raise CheckpointError for weights, configurations and sidecar files that the manifest
        does not list. A tokenizer may be added to a checkpoint that was saved without one."""
        listed = {entry.name for entry in self.files}
        may_be_added = () if listed.intersection(_TOKENIZERS) else _TOKENIZER_FILES
        try:
            names = os.listdir(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from None
        read = [name for name in names if name.endswith(".safetensors") or name in _READ_BY_NAME]
        for name in sorted([*read, *sidecars(self.path)]):
            if name not in listed and name.split("/")[0] not in may_be_added:
                raise CheckpointError(
                    f"{self.path / name}: the checkpoint's manifest does not list this file; "
                    "remove it"
                )

    def check_shards(self) -> None:
        """Compare the sizes and headers of shard files, if any. Raises CheckpointError."""
        if self.is_sharded:
            index = self.index()
            numbers = range(len(index.shards))
            in_threads(lambda number: index.open(self.path, number).close(), numbers)

    def check_rows(self, index: Index) -> None:
        """Check that the index locates every element of every parameter once. Raises
        CheckpointError."""
        try:
            index.check_rows(self.settings.get(FROZEN) or ())
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def verify(self, threads: int = 0) -> None:
        """Compare every byte. Raises CheckpointError for the first file that differs."""
        if problems := self.problems(threads):
            raise CheckpointError(problems[0])

    def problems(self, threads: int = 0) -> list[str]:
        """Compare every byte.

        Args:
            threads: As for `in_threads`.

        Returns:
            A line for each file that differs, with the first position.
        """
        checks: list[Callable[[], object]] = [
            *(partial(self._verify_file, entry) for entry in self.files),
            self._check_unlisted,
        ]
        problems = [problem for problem in in_threads(_problem, checks, threads) if problem]
        if not self.is_sharded:
            return problems
        try:
            index = self.index()
            self.check_rows(index)
        except CheckpointError as error:
            return problems or [str(error)]  # without an index, shard files cannot be checked

        def verify(number: int, blocks: range) -> None:
            with index.open(self.path, number) as file:
                file.verify(blocks)

        tasks = [
            (number, range(shard.num_blocks)[first : first + _BLOCKS_A_TASK])
            for number, shard in enumerate(index.shards)
            for first in range(0, shard.num_blocks, _BLOCKS_A_TASK)
        ]
        checks = [partial(verify, *task) for task in tasks]
        first_of: dict[int, str] = {}
        for (number, _), problem in zip(tasks, in_threads(_problem, checks, threads), strict=True):
            if problem:
                first_of.setdefault(number, problem)
        return [*problems, *first_of.values()]

    def _verify_file(self, entry: FileEntry) -> None:
        """Compare a file with its hash, and read its header if it has weights."""
        path = self.path / entry.name
        _read_checked(path, entry)
        if entry.name.endswith(".safetensors"):
            tensor_file.TensorFile(path).close()
        elif entry.name == tensor_file.INDEX:
            listed = {entry.name for entry in self.files}
            for name in sorted(set(tensor_file.weight_map(self.path).values())):
                if name not in listed:
                    raise CheckpointError(f"{path}: names {name}, which the manifest does not list")

    def index(self, data: bytes | None = None) -> Index:
        """Return the index of a full checkpoint.

        Args:
            data: Content of the index file, if another rank has read it.

        Raises:
            CheckpointError: There is no valid index.
        """
        if data is None:
            data = self.index_bytes()
        try:
            index = decode(data)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        if index.step != self.step:
            raise CheckpointError(f"{self.path}: its index has another step, {index.step}")
        return index

    def index_bytes(self) -> bytes:
        """Return the content of the index file. Raises CheckpointError."""
        for entry in self.files:
            if entry.name == INDEX:
                return _read_checked(self.path / INDEX, entry, wanted=True)
        raise CheckpointError(f"{self.path}: its manifest lists no {INDEX} of its states")


def _problem(check: Callable[[], object]) -> str:
    """Return the message of the CheckpointError that a check raises, or ""."""
    try:
        check()
    except CheckpointError as error:
        return str(error)
    return ""


def _read_checked(path: Path, entry: FileEntry, wanted: bool = False) -> bytes:
    """Compare a file with its size and hash. Return its content if `wanted`, else b""."""
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
    """Return whether a directory has a manifest, valid or not."""
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
    for root, folders, in_folder in os.walk(directory / TEMPLATES, onerror=refuse):
        folder = Path(root).relative_to(directory)
        entries += len(folders) + len(in_folder)
        if entries > _MAX_TEMPLATES or len(folder.parts) > _MAX_LEVELS:
            raise CheckpointError(
                f"{directory / TEMPLATES}: more than {_MAX_TEMPLATES:,} entries or {_MAX_LEVELS} "
                "levels of folders; remove everything except chat templates"
            )
        names += [(folder / name).as_posix() for name in in_folder]
    return names


def read_manifest(path: str | os.PathLike) -> Manifest:
    """Return the manifest of a checkpoint directory.

    Raises:
        CheckpointError: There is no manifest, or a field has a type or a value that no save writes.
    """
    path = Path(path)
    try:
        data = files.read_regular(path / MANIFEST, _MANIFEST_BYTES)
        is_hashed = not _FORMAT_1.match(data)
        raw = files.parse_checked_json(data) if is_hashed else json.loads(data)
        if raw["format"] != FORMAT if is_hashed else (raw["format"], raw["kind"]) != (1, "model"):
            raise CheckpointError(
                f"{path}: {raw.get('kind')} checkpoint of format {raw['format']}; this version "
                f"reads format {FORMAT}"
            )
        fields = _Fields.model_validate(raw)
        _check_dependent(fields)
        return Manifest(path=path, **dict(fields))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no checkpoint here ({MANIFEST} is missing)") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = one_line(first["msg"]).removeprefix("Value error, ")
        key = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path / MANIFEST}: not readable: {key}: {reason}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path / MANIFEST}: not readable: {one_line(error)}") from None


def _check_dependent(fields: _Fields) -> None:
    """Check conditions on several fields or entries. Raises ValueError."""
    names = {entry.name for entry in fields.files}
    if len(names) != len(fields.files):
        raise ValueError("files lists a name twice")
    for key, kind in _READ_SETTINGS.items():
        if not isinstance(fields.settings.get(key), kind | None):
            raise ValueError(f"settings: {key} = {fields.settings[key]!r:.80} has a wrong type")
    frozen = fields.settings.get(FROZEN) or ()
    if len(frozen) > MAX_PATTERNS or not all(
        isinstance(pattern, str) and len(pattern) <= MAX_PATTERN_CHARS for pattern in frozen
    ):
        raise ValueError(
            f"settings: {FROZEN} is not a list of at most {MAX_PATTERNS:,} patterns of at most "
            f"{MAX_PATTERN_CHARS} characters"
        )
    # The files must include those that every save of the kind writes.
    if fields.kind == "full" and INDEX not in names:
        raise ValueError(f"files lists no {INDEX}, which every full checkpoint has")
    if fields.kind == "model" and INDEX in names:
        raise ValueError(f"files lists {INDEX}, which no model-only checkpoint has")
    if fields.kind == "model" and names.isdisjoint((tensor_file.MODEL, tensor_file.INDEX)):
        raise ValueError(f"files lists neither {tensor_file.MODEL} nor {tensor_file.INDEX}")
    if names.isdisjoint(_CONFIGS):
        raise ValueError(f"files lists neither {' nor '.join(_CONFIGS)}")
    for entry in fields.files:
        most = _INDEX_BYTES if entry.name == INDEX else _SIDECAR_BYTES
        if entry.size > most and not entry.name.endswith(".safetensors"):
            raise ValueError(f"files: {entry.name} is larger than {most:,} bytes")
    scale, ranks = fields.loss_scale, fields.ranks
    if scale is not None and scale.keys() != {"scale", "good_steps", "skipped"}:
        raise ValueError(f"loss_scale lacks fields: it has {', '.join(scale) or 'none'}")
    if ranks is None:
        return
    sizes = [ranks.get(axis, 1) for axis in AXES]
    if not {"pp", "per_node"} <= ranks.keys() or math.prod(sizes) > _MOST_RANKS:
        raise ValueError(f"ranks = {ranks} is not a mesh of at most {_MOST_RANKS:,} ranks")
