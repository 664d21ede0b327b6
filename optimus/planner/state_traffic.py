"""Collectives of gradients and parameters in an update of a rank, computed only from sizes.

`optimus.rank.traffic.plan_traffic` lists the collectives of an update in order, from the chunk
engine of a rank. A search needs the collectives of many layouts. This module therefore counts the
collectives from the sizes of the chunks, without an engine. Tests compare the two results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from optimus.chunks.layout import Parameter, lay_out
from optimus.chunks.residency import Pass, plan_residency, use_order
from optimus.config import Config
from optimus.config.axes import Axes
from optimus.config.hardware import BYTES
from optimus.distributed.mesh import Coordinate, GroupAxes, Mesh
from optimus.parallel.pipeline.actions import passes_of
from optimus.parallel.pipeline.plan import schedule_of
from optimus.planner.collectives import Operation
from optimus.planner.states import EMBEDDING, HEAD, StateSizes
from optimus.planner.step_time import Overlap, Reduction

ENDS = "the end stages"
"""Name of the group of the first and the last stage, as in `optimus.distributed.groups`."""


class _Chunks(NamedTuple):
    """Chunks with the same process groups, or the gradient of a tied head."""

    groups: GroupAxes
    """Axes of the process groups. Axes of size 1 are left out, except in `copy`."""
    number: int
    """Number of chunks."""
    length: int
    """Number of elements of all chunks, with padding."""
    is_use: bool = False
    """True for the gradient of a tied head."""


class _Kind(NamedTuple):
    """Kind of a collective. Collectives with equal values of all fields are counted together."""

    axis: str
    name: Operation
    overlaps: Overlap
    is_each: bool = False
    """True if the collective is repeated for each microbatch."""


class _Total(NamedTuple):
    """Number and size of the collectives of a kind."""

    number: int = 0
    num_bytes: int = 0
    """Bytes of the full buffer of a rank, added up over all collectives of the kind."""

    def plus(self, other: _Total, factor: int = 1) -> _Total:
        return _Total(*(a + factor * b for a, b in zip(self, other, strict=True)))


_Totals = dict[_Kind, _Total]


def _add(totals: _Totals, others: Iterable[tuple[_Kind, _Total]], factor: int = 1) -> None:
    for kind, total in others:
        totals[kind] = totals.get(kind, _Total()).plus(total, factor)


class StateTraffic:
    """Computes the collectives of gradients and parameters for each rank of any mesh, if all states
    are on the device.

    Args:
        config: The configuration. In the section `[parallel]`, only `sequence_parallel` has an
            effect.
        extrapolates: True to count the gathers of a limited cache only for a few microbatches, and
            to assume that the gathers then repeat. With pp pipeline ranks, the gathers repeat after
            pp microbatches, with rare exceptions if a rank has several stages.
    """

    def __init__(self, config: Config, extrapolates: bool = False) -> None:
        optim, train = config.optim, config.train
        self._sizes = StateSizes(config)
        self._tie_embeddings = config.model.tie_embeddings
        self._vocab_size, self._hidden_size = config.model.vocab_size, config.model.hidden_size
        self._overlaps, self._deterministic = optim.overlap, train.deterministic
        self._rounds_each = self._sizes.rounds and config.offload.order != "layer"
        self._slots, self._width = optim.cache_chunks, BYTES[train.dtype]
        self._is_limited = optim.resident == "cache" and optim.cache_chunks > 0
        self._reduced = BYTES[optim.grad_reduce_dtype]
        self._extrapolates = extrapolates
        self._totals: dict[Any, _Totals] = {}
        self._known: dict[Any, tuple[Reduction, ...]] = {}

    def of_rank(
        self, config: Config, mesh: Mesh, stages: tuple[range, ...], pp: int, microbatches: int
    ) -> tuple[Reduction, ...]:
        """Return the collectives of the ranks with the index `pp` along the pipeline. An element
        describes all collectives of a kind, with their number and their mean size.

        Args:
            config: The configuration, with the schedule. The schedule has an effect only if
                optim.cache_chunks limits the cache.
            mesh: Sizes of the axes.
            stages: The layers of each pipeline stage.
            pp: Index along the pipeline.
            microbatches: Microbatches of a data rank.
        """
        rank = mesh, stages, pp
        key = *rank, microbatches, config.parallel.schedule if self._is_limited else ""
        if key not in self._known:
            if rank not in self._totals:
                self._totals[rank] = self._count(*rank)
            totals = dict(self._totals[rank])
            if self._is_limited:
                _add(totals, self._gathers_of_step(config, *rank, microbatches))
            self._known[key] = tuple(
                Reduction(
                    kind.axis,
                    kind.name,
                    total.num_bytes / total.number,
                    kind.overlaps,
                    total.number * (microbatches if kind.is_each else 1),
                )
                for kind, total in totals.items()
            )
        return self._known[key]

    def _count(self, mesh: Mesh, stages: Sequence[range], pp: int) -> _Totals:
        """Return a dict from each kind of collective to the number and the bytes of these
        collectives, for one microbatch."""
        classes = self._sizes.chunk_lengths(mesh, stages, Coordinate(pp, 0, 0, 0))
        trained = [each for each in classes if not each[0].options.frozen]
        is_each = self._sizes.divides_gradients or self._rounds_each
        if self._deterministic:
            is_each = is_each or any(key.groups.reduce for key, _ in trained)
        totals: _Totals = {}
        for key, lengths in classes:
            chunks = _Chunks(key.groups, len(lengths), sum(lengths))
            if chunks.groups.shard and not self._is_limited:  # gathered once, at the first use
                overlaps: Overlap = "forward" if self._overlaps else "nothing"
                gather = _Kind(_name(chunks.groups.shard), "all_gather", overlaps)
                _add(totals, [(gather, _Total(chunks.number, self._width * chunks.length))])
            if not key.options.frozen:
                _add(totals, self._reductions(chunks, mesh, is_each))
        is_last, (key, lengths) = pp == mesh.pp - 1, classes[0]
        if self._tie_embeddings and (pp == 0 or is_last) and not key.options.frozen:
            # The embedding is the first parameter of the first chunk.
            size = self._vocab_size // mesh.tp * self._hidden_size
            if is_last:
                groups = key.groups._replace(shard=(), replica=key.groups.reduce)
                use = Parameter("", (size,), None, mesh.size_of(groups.reduce))
                chunks = _Chunks(groups, 1, lay_out([use], 1).length, is_use=True)
                _add(totals, self._reductions(chunks, mesh, is_each))
            if mesh.pp > 1 and key.groups.shard and not is_last:
                gather = _Kind(_name(key.groups.shard), "all_gather", "nothing")
                _add(totals, [(gather, _Total(1, 4 * lengths[0]))])
            if mesh.pp > 1:
                _add(totals, [(_Kind(ENDS, "all_reduce", "nothing"), _Total(1, 4 * size))])
        return totals

    def _reductions(
        self, chunks: _Chunks, mesh: Mesh, is_each: bool
    ) -> Iterator[tuple[_Kind, _Total]]:
        """Yield the collectives of the gradients of chunks, as `optimus.chunks.reductions` runs
        them."""
        reduce, shard, replica, partial = map(_name, chunks.groups[:4])
        sizes, number, length = self._sizes, chunks.number, chunks.length
        width = sizes.sum_itemsize if chunks.is_use else sizes.grad_itemsize
        shards = mesh.size_of(chunks.groups.shard)
        sums = _Total(number, 4 * length // shards if shard else width * length)
        reduced = _Total(number, self._reduced * length)
        overlaps: Overlap = "backward" if self._overlaps and not is_each else "nothing"
        if reduce and is_each and self._deterministic:
            yield _Kind(reduce, "all_to_all", "nothing", True), _Total(number, width * length)
        elif reduce and (is_each or shard):
            yield _Kind(reduce, "reduce_scatter", overlaps, is_each), reduced
        elif reduce:
            yield _Kind(reduce, "all_reduce", overlaps), reduced
        if replica and (is_each or shard):  # the ranks that hold the same shard gather its pieces
            yield _Kind(replica, "all_gather", "nothing"), sums
        if partial:
            yield _Kind(partial, "all_reduce", "nothing"), sums

    def _gathers_of_step(
        self, config: Config, mesh: Mesh, stages: Sequence[range], pp: int, microbatches: int
    ) -> Iterable[tuple[_Kind, _Total]]:
        """Return the gathers of a limited cache in a step, by kind."""
        rank, p = (config, mesh, stages, pp), mesh.pp
        if not self._extrapolates or microbatches <= 4 * p:
            return self._gathers_of_cache(*rank, microbatches).items()
        first = 3 * p + microbatches % p
        before, after = (self._gathers_of_cache(*rank, m) for m in (first, first + p))
        _add(after, before.items(), -1)  # the gathers of p microbatches
        _add(before, after.items(), (microbatches - first) // p)
        return before.items()

    def _gathers_of_cache(
        self, config: Config, mesh: Mesh, stages: Sequence[range], pp: int, microbatches: int
    ) -> _Totals:
        """Return the gathers of a limited cache in a step, by kind, as `plan_residency` plans them.
        A gather that begins before the use of its chunk overlaps with earlier passes."""
        params = self._sizes.params_of(mesh, stages, Coordinate(pp, 0, 0, 0))
        chunks = self._sizes.chunks_of(params, mesh)
        used = [{params[member].segment for member in chunk.members} for chunk in chunks]
        if self._tie_embeddings and pp == mesh.pp - 1:  # the embedding is the first parameter
            used[0].add(HEAD)
        is_trained = [not chunk.key.options.frozen for chunk in chunks]
        transient = {n: c for n, c in enumerate(chunks) if c.key.groups.shard}
        segments = sorted(set().union(*used), key=_position)
        needs = [frozenset(n for n in transient if s in used[n]) for s in segments]
        trains = [any(s in u for u, t in zip(used, is_trained, strict=True) if t) for s in segments]
        stage_of = {layer: n for n, layers in enumerate(stages) for layer in layers}
        stage_of |= {EMBEDDING: 0, HEAD: len(stages) - 1}
        of_segments = [stage_of[segment] for segment in segments]
        learns = [stage > 0 or any(trains[: n + 1]) for n, stage in enumerate(of_segments)]
        schedule = schedule_of(config, mesh, microbatches)
        passes = [Pass(*each) for each in passes_of(schedule.ranks[pp])]
        totals: _Totals = {}
        uses = use_order(passes, of_segments, needs, learns)
        for step in plan_residency(uses, self._slots).steps:
            for numbers, overlaps in zip((step.gather, step.prefetch), _OVERLAPS, strict=True):
                for chunk in map(transient.__getitem__, numbers):
                    kind = _Kind(_name(chunk.key.groups.shard), "all_gather", overlaps)
                    _add(totals, [(kind, _Total(1, self._width * chunk.length))])
        return totals


_OVERLAPS: tuple[Overlap, Overlap] = ("nothing", "passes")
"""Computation that overlaps with a gather into the cache. The first element is for a gather that
begins at the use of its chunk, the second element for a gather that begins before this use."""


def _name(axes: Axes) -> str:
    """Return the name of the process group over `axes`, such as "dp x ep"."""
    return " x ".join(axes)


def _position(segment: int) -> float:
    """Return a number that orders segments by first use."""
    return math.inf if segment == HEAD else segment
