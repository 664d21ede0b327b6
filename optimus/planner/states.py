"""Bytes of the model states of any rank, computed only from sizes, without torch, a model or
process groups.

Model states are parameters, gradients, master weights and moments. Tests compare the results with
`ChunkEngine.state_bytes`, which counts the bytes of the tensors that training allocates. A search
over layouts needs the bytes of hundreds of thousands of ranks. The bytes of ranks with equal
states, and of parameters with equal layouts, are therefore computed only once. With offloading,
`plan_ranks` uses a chunk engine on the meta device instead of this arithmetic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from optimus.checkpoint.shard_file import aligned
from optimus.checkpoint.slices import (
    Box,
    ChunkShard,
    Scatter,
    Share,
    slices_to_write,
    writer_in_paper,
)
from optimus.chunks.layout import KINDS, Parameter, lay_out
from optimus.chunks.options import (
    DEFAULT_OPTIONS,
    ParamOptions,
    check_patterns,
    options_of,
)
from optimus.chunks.residency import fewest_slots
from optimus.config import Config, ModelConfig, OptimConfig
from optimus.config.axes import UNEQUAL, Axes
from optimus.config.hardware import BYTES
from optimus.distributed.mesh import Coordinate, GroupAxes, Mesh, ParameterKind
from optimus.errors import ConfigError, counted
from optimus.model.shapes import block_shapes, head_shapes, model_shapes
from optimus.parallel.divisible import check_divisible
from optimus.parallel.pipeline.plan import plan_stages
from optimus.parallel.pipeline.schedules import check_virtual_stages
from optimus.planner.gradients import Buffer, GradientMemory

_MODEL_ITEMSIZE = 2
"""Bytes of an element in a model-only checkpoint: `optimus.checkpoint.weights.DTYPE`."""
ADAMW = (4, 4)
"""Bytes of an element of each moment of AdamW."""
EMBEDDING, HEAD = -1, -2
"""Segment numbers of the embedding and of the head. The segment number of a block is its layer."""
_DIVIDED = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "gate_proj", "up_proj")
"""Modules whose parameters tp divides."""
_ROWS = ("o_proj", "down_proj", "embed", "head")
"""Modules of which tp divides the weight, but not the bias."""
_HIDDEN_NORMS = ("attention_norm", "mlp_norm", "final_norm")


class _Class(NamedTuple):
    """Process groups and options of parameters that share chunks, like `ParamProcessGroups`."""

    stage: int
    """Pipeline stage of the parameters."""
    groups: GroupAxes
    """Axes of the process groups. Axes of size 1 are left out, except in `copy`."""
    is_later_copy: bool
    """True for the copy of a tied embedding on the last pipeline rank."""
    options: ParamOptions


class _Param(NamedTuple):
    """A parameter of a rank."""

    size: int
    """Number of elements of this rank's slice."""
    key: _Class
    segment: int


class _Segment(NamedTuple):
    """Parameters of a segment of the model."""

    params: list[tuple[int, _Class]]
    """A pair for each parameter: its number of elements, and its class without the stage."""
    by_class: dict[_Class, list[int]]


class _Packed(NamedTuple):
    """Size and parameters of a chunk, in the result of `_pack`."""

    length: int
    """Number of elements, with padding."""
    used: int
    """Number of elements without padding."""
    num_params: int


class _Chunk(NamedTuple):
    """A chunk of a rank."""

    key: _Class
    length: int
    used: int
    members: Sequence[int]
    """Indices of the parameters of the chunk, in order of first use."""


class _GroupSizes(NamedTuple):
    """Numbers of ranks in the reduce, shard and replica groups of a chunk."""

    reduce: int
    shard: int
    replica: int


class RankBytes(NamedTuple):
    """Bytes of the model states of a rank."""

    sizes: dict[str, int]
    """Bytes of each of KINDS and "padding", "cache" and "total", as in `plan_ranks`."""
    fewest_slots: int
    """Smallest size of the parameter cache, in chunks, with which the rank can run."""
    temporary: tuple[int, int]
    """Bytes of gradients that are allocated only during a backward, and of temporary tensors of
    reductions. First element: gradients are allocated by stage; second element: by segment (see
    `GradientMemory.bytes`)."""


class StateSizes:
    """Bytes of the model states of any rank of a run, for any mesh.

    Args:
        config: The configuration. In the section `[parallel]`, only `sequence_parallel` has an
            effect.
        moment_bytes: Bytes of an element of each moment of the optimizer.
    """

    def __init__(self, config: Config, moment_bytes: Sequence[int] = ADAMW) -> None:
        model, optim = config.model, config.optim
        self._model, self._optim, self.moment_bytes = model, optim, moment_bytes
        self._in_sequence = config.parallel.sequence_parallel
        self._host_share = config.offload.host_share
        self.deterministic = config.train.deterministic
        self.itemsize = BYTES[config.train.dtype]
        self.sum_itemsize = BYTES[optim.grad_dtype]
        self.grad_itemsize = max(self.itemsize, self.sum_itemsize)
        self.divides_gradients = optim.resident != "all" or self._host_share > 0
        self.divides_params = optim.resident == "cache"
        self.rounds = config.offload.rounds_gradients(config.train)
        self._gradients = GradientMemory(config)
        self._dtypes = [config.train.dtype, optim.grad_dtype]
        self._has_patterns = bool(optim.groups or optim.frozen)
        self._kinds = model.experts_by_layer
        """Layers with equal numbers have parameters of equal shapes."""
        self._shapes = {
            kind: block_shapes(model.layer(self._kinds.index(kind))) for kind in set(self._kinds)
        }
        self._blocks: dict[tuple[int, Mesh], _Segment] = {}
        self._ranks: dict[Any, RankBytes] = {}
        self._pipeline_ranks: dict[Any, list[int]] = {}

    def of_rank(self, mesh: Mesh, stages: Sequence[range], coordinate: Coordinate) -> RankBytes:
        """Return the bytes of the model states of the rank at `coordinate`.

        Args:
            mesh: Sizes of the axes, which must divide the sizes of the model.
            stages: The layers of each pipeline stage.
            coordinate: Indices of the rank. The indices along dp and ep do not change the result.
        """
        local = stages[coordinate.pp :: mesh.pp]
        ends = coordinate.pp == 0, coordinate.pp == mesh.pp - 1
        rows = _share(self._model.vocab_size, coordinate.tp, mesh.tp) if any(ends) else 0
        layers = [r if self._has_patterns else self._kinds[r.start : r.stop] for r in local]
        key = mesh, tuple(layers), ends, rows
        if key not in self._ranks:
            params = self.params_of(mesh, stages, coordinate)
            self._ranks[key] = self._count(params, mesh, has_last=ends[1])
        return self._ranks[key]

    def fullest(self, mesh: Mesh, stages: Sequence[range]) -> RankBytes:
        """Return the bytes of the rank with the largest "total". `fewest_slots` of the result is
        the largest value of all ranks."""
        rows = {_share(self._model.vocab_size, tp, mesh.tp): tp for tp in range(mesh.tp)}
        ranks = [
            self.of_rank(mesh, stages, Coordinate(pp, 0, 0, tp))
            for pp in self._different(tuple(stages), mesh.pp)
            for tp in (rows.values() if pp in (0, mesh.pp - 1) else [0])
        ]
        largest = max(ranks, key=lambda rank: rank.sizes["total"])
        return largest._replace(fewest_slots=max(rank.fewest_slots for rank in ranks))

    def _different(self, stages: tuple[range, ...], pp: int) -> list[int]:
        """Return one pipeline rank for each set of ranks with parameters of the same shapes."""
        if (stages, pp) not in self._pipeline_ranks:
            ranks: dict[Any, int] = {}
            for rank in range(pp):
                layers = stages[rank::pp]
                kinds = [r if self._has_patterns else self._kinds[r.start : r.stop] for r in layers]
                ranks.setdefault((rank == 0, rank == pp - 1, tuple(kinds)), rank)
            self._pipeline_ranks[stages, pp] = list(ranks.values())
        return self._pipeline_ranks[stages, pp]

    def staging_bytes(
        self,
        mesh: Mesh,
        stages: Sequence[range],
        coordinate: Coordinate,
        scatter: Scatter,
        with_models: bool,
    ) -> int:
        """Return the bytes of host memory to which a rank copies states for
        checkpoint.async_save.

        Args:
            mesh, stages, coordinate: As for `of_rank`.
            scatter: `checkpoint.scatter`.
            with_models: True if the run also saves model-only checkpoints.
        """
        params = self.params_of(mesh, stages, coordinate)
        named = {str(number): param.key for number, param in enumerate(params)}
        layout = lay_out(
            (
                Parameter(name, (p.size,), p.key, *_group_sizes(p.key, mesh)[:2])
                for name, p in zip(named, params, strict=True)
            ),
            self._optim.chunk_length,
        )
        shards, turns = [], {}
        for chunk in layout.chunks:
            key = named[chunk.slots[0].name]
            first = mesh.number_of(coordinate, key.groups.shard) * chunk.shard_length
            shards.append(ChunkShard(chunk, first, key.groups.copy, key.is_later_copy))
        if self._model.tie_embeddings and mesh.pp > 1 and coordinate.pp in (0, mesh.pp - 1):
            turns["0"] = Share(int(coordinate.pp > 0), 2)  # the embedding is the first parameter
        boxes: dict[str, Box] = dict.fromkeys(named, ())
        size = 0
        for piece in slices_to_write(shards, boxes, mesh, coordinate, scatter, turns):
            is_frozen = named[shards[piece.shard].chunk.slots[0].name].options.frozen
            states = 1 if is_frozen else 1 + len(self.moment_bytes)
            count = piece.stop - piece.start
            size += states * aligned(4 * count)
            if with_models:
                size += aligned(_MODEL_ITEMSIZE * count)
        return size

    # -- the parameters of a rank ----------------------------------------------------------------

    def params_of(
        self, mesh: Mesh, stages: Sequence[range], coordinate: Coordinate
    ) -> list[_Param]:
        """Return the parameters of a rank in order of first use."""
        params: list[_Param] = []
        keys: dict[tuple[int, _Class], _Class] = {}
        for segment, stage, of_segment in self._segments(mesh, stages, coordinate):
            for size, key in of_segment.params:
                if (stage, key) not in keys:
                    keys[stage, key] = key._replace(stage=stage)
                params.append(_Param(size, keys[stage, key], segment))
        return params

    def chunk_lengths(
        self, mesh: Mesh, stages: Sequence[range], coordinate: Coordinate
    ) -> list[tuple[_Class, list[int]]]:
        """Return the classes of the parameters of a rank, each with the lengths of its chunks."""
        elements: dict[tuple[int, _Class], list[int]] = {}
        for _, stage, of_segment in self._segments(mesh, stages, coordinate):
            for key, sizes in of_segment.by_class.items():
                elements.setdefault((stage, key), []).extend(sizes)
        packed = (
            (key, _pack(tuple(sizes), _group_sizes(key, mesh).reduce, self._optim.chunk_length))
            for (_, key), sizes in elements.items()
        )
        return [(key, [chunk.length for chunk in chunks]) for key, chunks in packed]

    def _segments(
        self, mesh: Mesh, stages: Sequence[range], coordinate: Coordinate
    ) -> Iterator[tuple[int, int, _Segment]]:
        """Yield each segment of a rank, its stage and its parameters, in order of first use."""
        last, has_last = len(stages) - 1, coordinate.pp == mesh.pp - 1
        table = _share(self._model.vocab_size, coordinate.tp, mesh.tp) * self._model.hidden_size
        if coordinate.pp == 0:
            yield EMBEDDING, 0, _segment([(table, self._class("embed.weight", mesh))])
        elif has_last and self._model.tie_embeddings:
            key = self._class("embed.weight", mesh)._replace(is_later_copy=True)
            yield HEAD, last, _segment([(table, key)])
        for stage in range(coordinate.pp, len(stages), mesh.pp):
            for layer in stages[stage]:
                yield layer, stage, self._block(layer, mesh)
        if has_last:
            shapes = head_shapes(self._model).items()
            sizes = {n: table if n == "head.weight" else math.prod(s) for n, s in shapes}
            params = [(size, self._class(name, mesh)) for name, size in sizes.items()]
            yield HEAD, last, _segment(params)

    def _block(self, layer: int, mesh: Mesh) -> _Segment:
        """Return the parameters of a layer."""
        known = layer if self._has_patterns else self._kinds[layer], mesh
        if known not in self._blocks:
            shapes = self._shapes[self._kinds[layer]].items()
            classes = (self._class(f"blocks.{layer}.{name}", mesh) for name, _ in shapes)
            sizes = (math.prod(shape) // mesh.size_of(_divided_by(name)) for name, shape in shapes)
            self._blocks[known] = _segment([*zip(sizes, classes, strict=True)])
        return self._blocks[known]

    def _class(self, name: str, mesh: Mesh) -> _Class:
        """Return the class of a parameter, with stage 0, which the caller replaces."""
        module, leaf = name.split(".")[-2:]
        # With sequence parallelism, a tp rank applies such parameters to a share of the sequence.
        is_partial = module in _HIDDEN_NORMS or (module, leaf) == ("o_proj", "bias")
        partial = ("tp",) if is_partial and self._in_sequence and mesh.tp > 1 else ()
        # As in `make_placements`: ep always divides; tp divides only if it has several ranks.
        divided = tuple(a for a in _divided_by(name) if a != "tp" or mesh.tp > 1)
        options = options_of(name, self._optim) if self._has_patterns else DEFAULT_OPTIONS
        is_whole = options.frozen and not self.divides_params
        axes = ParameterKind(divided, partial).group_axes(
            "none" if is_whole else self._optim.sharding
        )
        several = (tuple(a for a in some if getattr(mesh, a) > 1) for some in axes)
        return _Class(0, GroupAxes(*several)._replace(copy=axes.copy), False, options)

    # -- the bytes -------------------------------------------------------------------------------

    def _count(self, params: Sequence[_Param], mesh: Mesh, has_last: bool) -> RankBytes:
        """Return the bytes of the states of a rank with these parameters."""
        chunks = self.chunks_of(params, mesh)
        by_first_use = sorted(range(len(chunks)), key=lambda number: chunks[number].members[0])
        on_device = len(chunks) - math.ceil(self._host_share * len(chunks))
        host = {*by_first_use[on_device:]}
        trained = [chunk for chunk in chunks if not chunk.key.options.frozen]
        several = any(_group_sizes(chunk.key, mesh).reduce > 1 for chunk in trained)
        adds_each = self.divides_gradients or self.rounds or (self.deterministic and several)
        tally = _Tally(self, adds_each)
        # A tied head uses the weight of the embedding, which is the first parameter.
        is_tied = self._model.tie_embeddings and has_last
        cached: list[int] = []
        needs: dict[int, set[int]] = {}
        for number, chunk in enumerate(chunks):
            sizes, is_on_host = _group_sizes(chunk.key, mesh), number in host
            is_transient = is_on_host or (self.divides_params and sizes.shard > 1)
            has_embedding = is_tied and chunk.members[0] == 0
            tally.add_chunk(chunk, sizes, is_on_host, is_transient)
            if has_embedding and not chunk.key.options.frozen:
                tally.add_use(params[0].size, sizes, is_on_host)
            if is_transient:
                cached.append(chunk.length * self.itemsize)
                for segment in {params[member].segment for member in chunk.members}:
                    needs.setdefault(segment, set()).add(number)
                if has_embedding:
                    needs.setdefault(HEAD, set()).add(number)
        cache = sum(sorted(cached)[-self._optim.cache_chunks :])
        buffers = self._buffers(params, chunks, mesh, is_tied)
        by_stage = self._gradients.bytes(buffers, by_segment=False)
        by_segment = self._gradients.bytes(buffers, by_segment=True)
        slots = fewest_slots(needs.values())
        return RankBytes(tally.result(cache), slots, (by_stage, by_segment))

    def _buffers(
        self, params: Sequence[_Param], chunks: Sequence[_Chunk], mesh: Mesh, is_tied: bool
    ) -> list[Buffer]:
        """Return the gradient buffers of a rank."""
        last = max(param.segment for param in params) + 1  # index of the head
        wide = "fp32" if "fp32" in self._dtypes else self._dtypes[0]
        buffers = []
        for chunk in chunks:
            if not chunk.key.options.frozen:
                of_chunk = [params[member].segment for member in chunk.members]
                indices = [last if segment == HEAD else segment for segment in of_chunk]
                reduce, shard, _ = _group_sizes(chunk.key, mesh)
                ends = min(indices), max(indices)
                buffers.append(Buffer(chunk.length, wide, reduce, shard, chunk.key.stage, ends))
        if is_tied and not params[0].key.options.frozen:
            reduce = _group_sizes(params[0].key, mesh).reduce
            (packed,) = _pack((params[0].size,), reduce, 1)
            stage = max(param.key.stage for param in params)
            buffers.append(Buffer(packed.length, self._dtypes[1], reduce, 1, stage, (last, last)))
        return buffers

    def chunks_of(self, params: Sequence[_Param], mesh: Mesh) -> list[_Chunk]:
        """Return the chunks of a rank, in the order of `lay_out`."""
        classes: dict[_Class, list[int]] = {}
        for number, param in enumerate(params):
            classes.setdefault(param.key, []).append(number)
        chunks = []
        for key, members in classes.items():
            elements = tuple(params[member].size for member in members)
            reduce = _group_sizes(key, mesh).reduce
            for packed in _pack(elements, reduce, self._optim.chunk_length):
                chunks.append(_Chunk(key, packed.length, packed.used, members[: packed.num_params]))
                members = members[packed.num_params :]
        return chunks


class _Tally:
    """Adds up the bytes of a rank's states by kind, like `count_bytes`. The counted buffers are
    those of `ChunkState`, `UseGradBuffer` and `ReducePerMicrobatch`, without the gradients that are
    allocated only during a backward."""

    def __init__(self, settings: StateSizes, adds_each: bool) -> None:
        """`adds_each` is True if gradients are added up after each microbatch."""
        self._settings, self._adds_each = settings, adds_each
        self._sizes = dict.fromkeys((*KINDS, "padding"), 0)
        self._host = 0

    def add_chunk(
        self, chunk: _Chunk, groups: _GroupSizes, is_on_host: bool, is_transient: bool
    ) -> None:
        """Add the buffers of a chunk."""
        settings, length = self._settings, chunk.length
        shard = length // groups.shard
        buffers = [("parameters", (shard if is_transient else length) * settings.itemsize, True)]
        if not chunk.key.options.frozen:
            has_sum = groups.shard > 1 or is_on_host
            itemsize = settings.grad_itemsize
            if not self._is_freed(groups, is_on_host):
                buffers.append(("gradients", length * itemsize, False))
            if has_sum:
                buffers.append(("gradients", 4 * shard, True))
            if settings.itemsize < 4:
                buffers.append(("masters", 4 * shard, True))
            buffers += [("moments", size * shard, True) for size in settings.moment_bytes]
            if self._adds_each and (groups.replica > 1 or (settings.rounds and not has_sum)):
                kind = "gradients" if settings.divides_gradients else "deterministic"
                size = length // groups.reduce * (4 if has_sum else itemsize)
                buffers.append((kind, size, True))
        in_chunk = self._add(buffers, is_on_host)
        self._sizes["padding"] += -(-in_chunk * (length - chunk.used) // length)

    def add_use(self, size: int, groups: _GroupSizes, is_on_host: bool) -> None:
        """Add the buffers of the gradient of a tied head with `size` elements."""
        settings, itemsize = self._settings, self._settings.sum_itemsize
        (packed,) = _pack((size,), groups.reduce, 1)
        buffers = []
        if not self._is_freed(groups, is_on_host):
            buffers.append(("tied", packed.length * itemsize, False))
        if is_on_host:
            buffers.append(("tied", 4 * packed.length, True))
        if self._adds_each and (groups.reduce > 1 or (settings.rounds and not is_on_host)):
            piece = packed.length // groups.reduce
            buffers.append(("tied", piece * (4 if is_on_host else itemsize), True))
        self._add(buffers, is_on_host)

    def _is_freed(self, groups: _GroupSizes, is_on_host: bool) -> bool:
        """Return True if gradients are allocated only during a backward."""
        settings = self._settings
        is_added = groups.reduce > 1 or is_on_host or settings.rounds
        return settings.divides_gradients and is_added

    def _add(self, buffers: Sequence[tuple[str, int, bool]], is_on_host: bool) -> int:
        """Add the buffers of a chunk to the totals, and return the sum of their bytes. `buffers`
        has tuples (kind, bytes, follows). Buffers with `follows` = True are in host memory if
        `is_on_host` is True. All other buffers are on the device."""
        for kind, size, follows in buffers:
            self._sizes[kind] += size
            if is_on_host and follows:
                self._host += size
        return sum(size for _, size, _ in buffers)

    def result(self, cache: int) -> dict[str, int]:
        """Return the sizes as in `plan_ranks`, for a cache of `cache` bytes."""
        total = sum(self._sizes[kind] for kind in KINDS) - self._host + cache
        kinds = {kind: self._sizes[kind] for kind in KINDS}
        padding = self._sizes["padding"]
        return kinds | {"total": total, "padding": padding, "cache": cache}


def _segment(params: list[tuple[int, _Class]]) -> _Segment:
    return _Segment(params, {k: [s for s, key in params if key == k] for _, k in params})


def _group_sizes(key: _Class, mesh: Mesh) -> _GroupSizes:
    return _GroupSizes(*map(mesh.size_of, key.groups[:3]))


@lru_cache(maxsize=1 << 12)
def _pack(sizes: tuple[int, ...], reduce_size: int, target_length: int) -> tuple[_Packed, ...]:
    """Return the chunks of a class of parameters, which have these numbers of elements."""
    params = [Parameter(str(n), (size,), None, reduce_size) for n, size in enumerate(sizes)]
    chunks = lay_out(params, target_length).chunks
    return tuple(_Packed(chunk.length, chunk.used, len(chunk.slots)) for chunk in chunks)


def _share(size: int, index: int, count: int) -> int:
    """Return the number of elements of the rank `index` if `count` ranks divide `size` elements, as
    `optimus.parallel.placement.share` does."""
    return size * (index + 1) // count - size * index // count


def _divided_by(name: str) -> Axes:
    """Return the axes that divide a parameter over their ranks; () if all ranks have the whole
    parameter. `name` is the full name or the name within a block."""
    module, leaf = name.split(".")[-2:]
    if module == "experts":
        return ("ep", "tp")
    return ("tp",) if module in _DIVIDED or (leaf == "weight" and module in _ROWS) else ()


def check_names(optim: OptimConfig, model: ModelConfig) -> None:
    """Check that each pattern of `optim.groups` and `optim.frozen` matches the name of a parameter
    of the model.

    Raises:
        ConfigError: A pattern has no effect, or no parameter is left to train.
    """
    if optim.groups or optim.frozen:
        check_patterns(optim, model_shapes(model))


def check_slots(config: Config, mesh: Mesh) -> None:
    """Check that the parameter cache of each rank can hold each segment: the embedding, a block or
    the head.

    The cache has space for optim.cache_chunks chunks. A chunk is a flat buffer of parameters. All
    chunks of a segment are needed at the same time.

    Raises:
        ConfigError: optim.cache_chunks is too small.
    """
    if config.offload.mode != "off":
        from optimus.rank import states as engine  # imports torch

        engine.check_slots(config, mesh)
    elif config.optim.cache_chunks:
        sizes, stages = StateSizes(config), stages_of(config, mesh)
        _check_slots(config.optim, [sizes.of_rank(mesh, stages, rank) for rank in _kinds(mesh)])


def _check_slots(optim: OptimConfig, ranks: Sequence[RankBytes]) -> None:
    slots, least = optim.cache_chunks, max(rank.fewest_slots for rank in ranks)
    if 0 < slots < least:
        raise ConfigError(
            f"optim.cache_chunks = {slots}: the largest of the embedding, the blocks and the "
            f"head needs {counted(least, 'chunk')} at once; use {least} or more, or a larger "
            "optim.chunk_length",
        )


def stages_of(config: Config, mesh: Mesh) -> tuple[range, ...]:
    """Return the layers of each pipeline stage, as `plan_stages` does.

    Raises:
        ConfigError: The schedule does not support parallel.virtual_stages, or as `plan_stages`.
    """
    parallel = config.parallel
    if mesh.pp * parallel.virtual_stages > 1:
        check_virtual_stages(parallel.schedule, parallel.virtual_stages)
    return plan_stages(config, mesh.pp)


def _kinds(mesh: Mesh) -> Iterator[Coordinate]:
    """Yield the mesh coordinate with dp = ep = 0 for each pair of a pp index and a tp index."""
    # Ranks that differ only along dp or ep have states of the same size.
    sizes = (size if axis in UNEQUAL else 1 for axis, size in mesh._asdict().items())
    yield from itertools.starmap(Coordinate, itertools.product(*map(range, sizes)))


def plan_ranks(
    config: Config, mesh: Mesh, moment_bytes: Sequence[int] = ADAMW
) -> Iterator[tuple[Coordinate, dict[str, Any]]]:
    """Yield the bytes of the model states of a rank, for each pair of a pp index and a tp index.

    Ranks that differ only along dp or ep have states of the same size.

    Args:
        config: The configuration.
        mesh: Sizes of the axes.
        moment_bytes: Bytes of an element of each moment of the optimizer.

    Yields:
        The coordinate of the rank, and a dict of sizes in bytes. Its keys are those of
        `ChunkEngine.state_bytes`, "cache" and "staging". "cache" is the memory of gathered
        parameters with optim.resident = "cache" or with offloading. "staging" is the host memory
        for checkpoint.async_save. "disk" includes the copies of states on disk. "total" is the
        device memory, including "cache". With offloading, "tiers" has the bytes of each kind in
        each tier.

    Raises:
        ConfigError: A parallel size does not divide a model dimension, a pattern of optim.groups or
            optim.frozen matches no parameter, or optim.cache_chunks is too small.
    """
    check_names(config.optim, config.model)
    if config.offload.mode != "off":  # the engine decides on spare buffers and on states on disk
        from optimus.rank import states as engine  # imports torch

        yield from engine.plan_ranks(config, mesh)
        return
    check_divisible(config, mesh)
    checkpoint, stages = config.checkpoint, stages_of(config, mesh)
    states = StateSizes(config, moment_bytes)
    ranks = [states.of_rank(mesh, stages, coordinate) for coordinate in _kinds(mesh)]
    _check_slots(config.optim, ranks)
    for coordinate, rank in zip(_kinds(mesh), ranks, strict=True):
        if checkpoint.scatter == "paper":  # only ranks that write checkpoints have staging memory
            coordinate = coordinate._replace(dp=writer_in_paper(mesh, coordinate))
        staging = 0
        if checkpoint.async_save:
            staging = states.staging_bytes(
                mesh, stages, coordinate, checkpoint.scatter, bool(checkpoint.model_interval)
            )
        yield coordinate, rank.sizes | {"host": 0, "disk": 0, "staging": staging}
