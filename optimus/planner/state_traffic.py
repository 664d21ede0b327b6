"""Collectives of gradients and parameters in an update of a rank, by arithmetic alone.

`optimus.rank.traffic.plan_traffic` lists the collectives of an update in order, from the chunk
engine. A search asks for those of many layouts, so this module counts them from the layout of the
chunks, and tests compare both.
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


class _Chunk(NamedTuple):
    """A chunk of a rank, or the gradient of a tied head."""

    groups: GroupAxes
    """Axes of the process groups. Axes of size 1 are left out, except in `copy`."""
    length: int
    """Number of elements, with padding."""
    segments: frozenset[int]
    """Segments of the model that use its parameters: EMBEDDING, HEAD or numbers of layers."""
    is_frozen: bool = False
    tied: int = 0
    """Elements of a tied embedding in it, whose gradients the first and last stage add up."""
    is_use: bool = False
    """True for the gradient of a tied head."""


class _Kind(NamedTuple):
    """Kind of a collective."""

    axis: str
    name: Operation
    overlaps: Overlap
    is_each: bool = False
    """True if it is repeated for each microbatch."""


class _Total(NamedTuple):
    """Collectives of a kind."""

    number: int = 0
    num_bytes: int = 0
    """Bytes of the full buffers of a rank in all of them."""

    def plus(self, other: _Total, factor: int = 1) -> _Total:
        return _Total(*(a + factor * b for a, b in zip(self, other, strict=True)))


_Totals = dict[_Kind, _Total]


def _add(totals: _Totals, others: Iterable[tuple[_Kind, _Total]], factor: int = 1) -> None:
    for kind, total in others:
        totals[kind] = totals.get(kind, _Total()).plus(total, factor)


class StateTraffic:
    """Collectives of gradients and parameters of any rank whose states are on the device, for a
    model and settings that do not depend on the mesh.

    Args:
        config: The configuration. Of the section `[parallel]`, only `sequence_parallel` is used.
        extrapolates: True to count the gathers of a limited cache for a few microbatches, and to
            assume that they repeat. They repeat after p microbatches, with rare exceptions for
            several stages on a rank.
    """

    def __init__(self, config: Config, extrapolates: bool = False) -> None:
        optim, train = config.optim, config.train
        self._sizes = StateSizes(config)
        self._tie_embeddings = config.model.tie_embeddings
        self._overlaps, self._deterministic = optim.overlap, train.deterministic
        self._slots, self._width = optim.cache_chunks, BYTES[train.dtype]
        self._is_limited = optim.resident == "cache" and optim.cache_chunks > 0
        self._reduced = BYTES[optim.grad_reduce_dtype]
        self._extrapolates = extrapolates
        self._totals: dict[Any, _Totals] = {}
        self._known: dict[Any, tuple[Reduction, ...]] = {}

    def of_rank(
        self, config: Config, mesh: Mesh, stages: tuple[range, ...], pp: int, microbatches: int
    ) -> tuple[Reduction, ...]:
        """Return the collectives of the ranks with index `pp`. Collectives of the same kind have
        their mean size.

        Args:
            config: The configuration with the schedule, which matters only for a limited cache.
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

    def _chunks_of(self, mesh: Mesh, stages: Sequence[range], pp: int) -> list[_Chunk]:
        """Return the chunks of a rank in the order of `lay_out`, and then the gradient of a tied
        head."""
        params = self._sizes.params_of(mesh, stages, Coordinate(pp, 0, 0, 0))
        is_last = pp == mesh.pp - 1
        is_tied = self._tie_embeddings and (pp == 0 or is_last)
        result = []
        for key, length, _, members in self._sizes.chunks_of(params, mesh):
            segments = {params[member].segment for member in members}
            has_tied = is_tied and members[0] == 0
            if has_tied and is_last:
                segments.add(HEAD)
            tied = params[0].size if has_tied and mesh.pp > 1 else 0
            frozen = key.options.frozen
            result.append(_Chunk(key.groups, length, frozenset(segments), frozen, tied))
        key = params[0].key
        if is_tied and is_last and not key.options.frozen:
            groups = key.groups._replace(shard=(), replica=key.groups.reduce)
            use = Parameter("", (params[0].size,), None, mesh.size_of(groups.reduce))
            length = lay_out([use], 1).length
            result.append(_Chunk(groups, length, frozenset([HEAD]), is_use=True))
        return result

    def _count(self, mesh: Mesh, stages: Sequence[range], pp: int) -> _Totals:
        """Return the collectives of each kind, for one microbatch."""
        chunks = self._chunks_of(mesh, stages, pp)
        several = any(chunk.groups.reduce for chunk in chunks if not chunk.is_frozen)
        is_each = self._sizes.divides_gradients or (self._deterministic and several)
        totals: _Totals = {}
        has_use = any(chunk.is_use for chunk in chunks)
        for chunk in chunks:
            collectives = [*self._gathers(chunk)]
            if not chunk.is_frozen:
                collectives += self._reductions(chunk, mesh, is_each)
                collectives += self._sums_of_tied(chunk, has_use)
            _add(totals, collectives)
        return totals

    def _reductions(
        self, chunk: _Chunk, mesh: Mesh, is_each: bool
    ) -> Iterator[tuple[_Kind, _Total]]:
        """Yield the collectives of the gradients of a chunk, as `optimus.chunks.reductions` runs
        them."""
        reduce, shard, replica, partial = map(_name, chunk.groups[:4])
        sizes, length = self._sizes, chunk.length
        width = sizes.sum_itemsize if chunk.is_use else sizes.grad_itemsize
        shards = mesh.size_of(chunk.groups.shard)
        sum_bytes = 4 * length // shards if shard else width * length
        size = self._reduced * length
        overlaps: Overlap = "backward" if self._overlaps and not is_each else "nothing"
        if reduce and is_each and self._deterministic:
            yield _Kind(reduce, "all_to_all", "nothing", True), _Total(1, width * length)
        elif reduce and (is_each or shard):
            yield _Kind(reduce, "reduce_scatter", overlaps, is_each), _Total(1, size)
        elif reduce:
            yield _Kind(reduce, "all_reduce", overlaps), _Total(1, size)
        if replica and (is_each or shard):  # ranks with the same shard gather its pieces
            yield _Kind(replica, "all_gather", "nothing"), _Total(1, sum_bytes)
        if partial:
            yield _Kind(partial, "all_reduce", "nothing"), _Total(1, sum_bytes)

    def _sums_of_tied(self, chunk: _Chunk, has_use: bool) -> Iterator[tuple[_Kind, _Total]]:
        """Yield the collectives that add up the gradients of a tied embedding on two stages."""
        if chunk.tied:
            if chunk.groups.shard and not has_use:
                gather = _Kind(_name(chunk.groups.shard), "all_gather", "nothing")
                yield gather, _Total(1, 4 * chunk.length)
            yield _Kind(ENDS, "all_reduce", "nothing"), _Total(1, 4 * chunk.tied)

    def _gathers(self, chunk: _Chunk) -> Iterator[tuple[_Kind, _Total]]:
        """Yield the gather of the updated parameters of a chunk. A cache without a limit gathers
        them at their first use."""
        if chunk.groups.shard and not self._is_limited:
            yield self._gather(chunk, "forward" if self._overlaps else "nothing")

    def _gathers_of_step(
        self, config: Config, mesh: Mesh, stages: Sequence[range], pp: int, microbatches: int
    ) -> Iterable[tuple[_Kind, _Total]]:
        """Return the gathers of a limited cache."""
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
        """Return the gathers of a limited cache, from its plan. Gathers that begin before the use
        that needs them overlap with earlier passes."""
        chunks = [c for c in self._chunks_of(mesh, stages, pp) if not c.is_use]
        transient = {n: chunk for n, chunk in enumerate(chunks) if chunk.groups.shard}
        segments = sorted({s for c in chunks for s in c.segments}, key=_position)
        needs = [frozenset(n for n, c in transient.items() if s in c.segments) for s in segments]
        trains = [any(s in c.segments and not c.is_frozen for c in chunks) for s in segments]
        of_segments = [_stage_of(segment, stages) for segment in segments]
        learns = [stage > 0 or any(trains[: n + 1]) for n, stage in enumerate(of_segments)]
        schedule = schedule_of(config, mesh, microbatches)
        passes = [Pass(*each) for each in passes_of(schedule.ranks[pp])]
        demanded = {n: self._gather(chunk, "nothing") for n, chunk in transient.items()}
        early = {n: self._gather(chunk, "passes") for n, chunk in transient.items()}
        totals: _Totals = {}
        uses = use_order(passes, of_segments, needs, learns)
        for step in plan_residency(uses, self._slots).steps:
            _add(totals, [demanded[number] for number in step.gather])
            _add(totals, [early[number] for number in step.prefetch])
        return totals

    def _gather(self, chunk: _Chunk, overlaps: Overlap) -> tuple[_Kind, _Total]:
        """Return the gather of the parameters of a chunk."""
        size = self._width * chunk.length
        return _Kind(_name(chunk.groups.shard), "all_gather", overlaps), _Total(1, size)


def _name(axes: Axes) -> str:
    """Return the name of the process group over axes with several ranks."""
    return " x ".join(axes)


def _position(segment: int) -> float:
    """Return a number that orders segments by first use."""
    return math.inf if segment == HEAD else segment


def _stage_of(segment: int, stages: Sequence[range]) -> int:
    if segment in (EMBEDDING, HEAD):
        return 0 if segment == EMBEDDING else len(stages) - 1
    return next(n for n, layers in enumerate(stages) if segment in layers)
