"""The chunk engine: all model states of a rank in flat chunks, for any torch module.

Parameters and gradients of the module become views of chunks. Backward adds to the gradients, the
`GradReducer` sums them over ranks, the optimizer updates this rank's shards, and the `ParamStore`
gathers the updated parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from optimus.chunks.buffers import (
    ChunkState,
    FrozenParams,
    FurtherUse,
    ParamChunk,
    ShardBuffers,
    ShardSlice,
    StateShard,
    StateTensor,
    count_by_tier,
    count_bytes,
    dtypes_apart,
    write_slice,
)
from optimus.chunks.disk import DiskTier, file_bytes
from optimus.chunks.grad_reducer import GradReducer
from optimus.chunks.groups import ParamProcessGroups, check_same_params, groups_of_params
from optimus.chunks.layout import Chunk, Parameter, lay_out
from optimus.chunks.memory import Memory, Tier
from optimus.chunks.norm import exact_norm, fast_norm
from optimus.chunks.optimizer import Optimizer, UpdateQueue
from optimus.chunks.param_store import ParamStore
from optimus.chunks.placement import ChunkCost, Workload, choose_spare, spread_evenly
from optimus.chunks.residency import ALL_RESIDENT, MAX_COPYING, Pass, Residency, use_order
from optimus.chunks.segments import ModelSegment, register_uses
from optimus.config.machine import Links
from optimus.distributed.collectives import ALONE, Group


class ChunkEngine:
    """All model states of a rank.

    Args:
        named: Parameters by name in order of first use. The parameters become views of chunks.
        groups_of: Returns the process groups of a parameter, or None if there are none.
        optimizer: Updates the shards. Each shard has the moments that the optimizer declares.
        initial: Returns the initial value of a parameter, on any device. By default, parameters
            keep their values. The engine copies each value to a chunk before it calls `initial`
            again, so that only one value needs memory at a time.
        dtype: The training dtype.
        chunk_length: Target length of a chunk, in elements.
        deterministic: `train.deterministic`.
        reduce_dtype: The dtype of gradient reductions.
        grad_dtype: The dtype of gradient accumulation: fp32 or `dtype`. It must be fp32 in
            deterministic mode, and if `residency` divides gradients.
        everyone: Group of all ranks.
        compiled: True if torch.compile will trace the module.
        overlap: True to reduce gradients during the last backward of a step, False: after it.
        residency: Settings that determine the tier of the states, and when parameters and gradients
            are whole. If `residency.divides_gradients`, call `attach` before the first step.
        device: Device of the tier DEVICE, to which the parameters are moved; None for the device of
            the first parameter.

    Raises:
        ConfigError: A parameter has no groups, or the ranks of a reduce group have different
            parameters. In the second case, all ranks raise the same error.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        groups_of: Callable[[str], ParamProcessGroups | None],
        optimizer: Optimizer,
        *,
        initial: Callable[[str], Tensor] | None = None,
        dtype: torch.dtype,
        chunk_length: int,
        deterministic: bool = False,
        reduce_dtype: torch.dtype = torch.float32,
        grad_dtype: torch.dtype = torch.float32,
        everyone: Group = ALONE,
        compiled: bool = False,
        overlap: bool = False,
        residency: Residency = ALL_RESIDENT,
        device: torch.device | None = None,
    ) -> None:
        is_fp32 = deterministic or residency.divides_gradients
        assert grad_dtype is torch.float32 or (grad_dtype is dtype and not is_fp32), grad_dtype
        groups = groups_of_params(named, groups_of)
        check_same_params(named, groups, everyone)
        self.device = device or next(iter(named.values())).device
        initial = initial or {name: p.data for name, p in named.items()}.__getitem__
        self._named, self._groups, self._everyone = dict(named), groups, everyone
        self._deterministic, self.optimizer = deterministic, optimizer
        self.layout = lay_out(_parameters(named, groups), chunk_length)
        self.slots = {slot.name: slot for slot in self.layout.slots}
        self.residency = residency
        self.memory = Memory(self.device, residency.poison, residency.copies, residency.links)
        position = {name: number for number, name in enumerate(named)}
        by_first_use = sorted(self.layout.chunks, key=lambda c: position[c.slots[0].name])
        away = len(by_first_use) - math.ceil(residency.host_share * len(by_first_use))
        host = {chunk.number for chunk in by_first_use[away:]}
        on_disk = self._choose_on_disk(by_first_use[away:])
        links = residency.links if self.device.type == "cpu" else None
        self.disk = self._make_disk([self.layout.chunks[n] for n in on_disk], dtype, links)
        self._all: list[ParamChunk] = []
        """All chunks, by their numbers."""
        for chunk in self.layout.chunks:
            home = Tier.HOST if chunk.number in host else Tier.DEVICE
            disk = self.disk if chunk.number in on_disk else None
            self._all.append(self._make_chunk(chunk, home, disk, initial, dtype, grad_dtype))
        self.chunks = [chunk for chunk in self._all if isinstance(chunk, ChunkState)]
        """The chunks of trained parameters."""
        self.frozen = FrozenParams([c for c in self._all if not isinstance(c, ChunkState)])
        self._frozen_uses: dict[str, str] = {}
        """Name of the frozen parameter, by the name of its further use (`FurtherUse`)."""
        self._updates = UpdateQueue(
            optimizer,
            None if links is None else links.host_adam,
            self.memory.num_threads,
            residency.poison,
            self.disk,
        )
        self.params = ParamStore(self._all, self.memory, self._updates)
        self._all_by_first_use = [self._all[chunk.number] for chunk in by_first_use]
        trained = (chunk for chunk in self._all_by_first_use if isinstance(chunk, ChunkState))
        self._by_first_use = list(trained)
        self.gradients = GradReducer(
            {name: p for name, p in named.items() if name not in self.frozen},
            self._by_first_use,
            self.stage_groups,
            self.memory,
            self._updates,
            deterministic=deterministic,
            reduce_dtype=reduce_dtype,
            grad_dtype=grad_dtype,
            compiled=compiled,
            overlap=overlap,
            frees_buffers=residency.divides_gradients,
            rounds=residency.rounds_gradients,
        )
        self._spare: dict[int, ShardBuffers] = {}
        """Spare buffers for early updates, by the number of the chunk."""

    def add_spare(self, limit: float) -> None:
        """Allocate spare buffers, of at most `limit` bytes, for early updates (`UpdateQueue`) of
        the last chunks on the host. Backward completes the gradients of these chunks first."""
        states = [s for s in self._by_first_use if s.home is Tier.HOST and not s.on_disk]
        for state in (states[n] for n in choose_spare([s.buffers.nbytes for s in states], limit)):
            spare = self._spare[state.chunk.number] = state.new_spare(self.memory)
            self._updates.add_spare(spare)

    def _choose_on_disk(self, on_host: Sequence[Chunk]) -> set[int]:
        """Return the numbers of the chunks whose masters and moments are on disk."""
        trained = [chunk for chunk in on_host if not _groups_of(chunk).options.frozen]
        count = math.ceil(self.residency.disk_share * len(trained))
        return {trained[index].number for index in spread_evenly(count, len(trained))}

    def _make_disk(
        self, chunks: Sequence[Chunk], dtype: torch.dtype, links: Links | None
    ) -> DiskTier | None:
        """Return the tier for the states of `chunks` on disk; None if there are none."""
        sizes = [
            file_bytes(
                chunk.shard_length,
                dtypes_apart(
                    self.optimizer.moments, _groups_of(chunk).options.dtype or dtype
                ).values(),
            )
            for chunk in chunks
        ]
        if not sum(sizes):
            return None
        at, rank = self.residency, self._everyone.rank
        return DiskTier(self.memory, at.disk, rank, sizes, links, at.disk_key)

    def _make_chunk(
        self,
        chunk: Chunk,
        home: Tier,
        disk: DiskTier | None,
        initial: Callable[[str], Tensor],
        dtype: torch.dtype,
        grad_dtype: torch.dtype,
    ) -> ParamChunk:
        """Return a chunk with the initial values of its parameters. For trained parameters, the
        chunk is a ChunkState. Buffers that are freed between steps are returned without memory."""
        groups, residency, memory = _groups_of(chunk), self.residency, self.memory
        dtype = groups.options.dtype or dtype
        in_tier = memory, home, residency.divides_parameters
        if groups.options.frozen:
            frozen = ParamChunk(chunk, groups, dtype, *in_tier)
            self._fill(frozen, initial)
            return frozen
        state = ChunkState(chunk, groups, self.optimizer.moments, dtype, grad_dtype, *in_tier, disk)
        self._fill(state, initial)
        is_reduced = chunk.reduce_size > 1 or home is not Tier.DEVICE
        if residency.divides_gradients and is_reduced:
            memory.free(state.grads)
        return state

    def _fill(self, state: ParamChunk, initial: Callable[[str], Tensor]) -> None:
        """Copy the initial values to a chunk. Make the parameters in the chunk views of it."""
        for slot in state.chunk.slots:
            value, view = initial(slot.name), state.view(state.params, slot)
            if isinstance(state, ChunkState):
                local = state.local_slice(state.master, slot)
                write_slice(local, value.reshape(-1), 0, self._write)
            else:
                self._named[slot.name].requires_grad_(False)
            view.copy_(value)
            del value  # free it before `initial` makes the next value
            self._named[slot.name].data = view
        if state.is_transient:
            state.shard.copy_(state.local)
            self.memory.free(state.params)

    # -- uses of the parameters ------------------------------------------------------------------

    def attach(
        self,
        segments: Sequence[ModelSegment],
        passes: Sequence[Pass],
        *,
        early: bool = True,
        reduces_each: bool = True,
        regions: Sequence[range] = (),
        overlap: bool = False,
    ) -> None:
        """Register the hooks that provide each segment of the model with its parameters and its
        gradient buffers when it computes.

        Args:
            segments: All segments in order of first use. Together, they have all parameters and
                further uses.
            passes: The forward and backward passes of this rank in a training step, in order.
            early, reduces_each: As for `GradReducer.attach`.
            regions: Ranges of indices of segments. Backward recomputes the segments of a range
                together.
            overlap: True to let a gather of updated parameters continue until their first use.
        """
        if overlap:
            self.params.overlap(self._needs(segments))
        if any(chunk.is_transient for chunk in self._all):
            frozen = {*self.frozen.names, *self._frozen_uses}
            trained = {name for name in self._chunk_of() if name not in frozen}
            transient = self.transient_needs(segments)
            trains = [not trained.isdisjoint(segment.parameters) for segment in segments]
            stages = [segment.stage for segment in segments]
            receives = [stage > 0 or any(trains[: n + 1]) for n, stage in enumerate(stages)]
            uses = use_order(passes, stages, transient, receives, regions)
            slots = self.residency.slots or sum(chunk.is_transient for chunk in self._all)
            self.params.cache(self._needs(segments), uses, slots)
        self.gradients.attach(segments, passes, early, reduces_each)
        in_backward = (early and self.residency.divides_gradients) or self.params.plan is not None
        if overlap or in_backward:
            register_uses(segments, self.use, in_backward)

    def use(self, segment: int, backward: bool) -> None:
        """Provide a segment with parameters and, before a backward, with gradient buffers."""
        if backward:
            self.gradients.before_segment_backward(segment)
        self.params.use(segment, backward)

    def transient_needs(self, segments: Iterable[ModelSegment]) -> list[frozenset[int]]:
        """Return, for each segment, the numbers of the transient chunks with its parameters."""
        return [
            frozenset(number for number in needs if self._all[number].is_transient)
            for needs in self._needs(segments)
        ]

    def _needs(self, segments: Iterable[ModelSegment]) -> list[frozenset[int]]:
        chunk_of = self._chunk_of()
        return [frozenset(chunk_of[n] for n in s.parameters if n in chunk_of) for s in segments]

    def _chunk_of(self) -> dict[str, int]:
        """Return the chunk number of each parameter and of each further use."""
        chunk_of = {name: slot.chunk for name, slot in self.slots.items()}
        owner_of = self.gradients.owner_of | self._frozen_uses
        return chunk_of | {use: chunk_of[name] for use, name in owner_of.items()}

    def gather(self, names: Collection[str]) -> None:
        """Gather parameters for code outside of segments. The parameters stay whole until the next
        use of a segment. All ranks that shard these parameters must call this method."""
        self.params.gather({self.slots[name].chunk for name in names if name in self.slots})

    def wait(self) -> None:
        """Wait until all chunks are updated, and all updated parameters are gathered."""
        self._updates.wait_for_all()
        self.params.wait()

    # -- a step ----------------------------------------------------------------------------------

    def add_use(self, use: FurtherUse) -> None:
        """Add a further use of a parameter, and a gradient buffer unless the parameter is
        frozen."""
        if use.owner in self.frozen:
            use.leaf.requires_grad_(False)
            self._frozen_uses[use.name] = use.owner
        else:
            self.gradients.add_use(use, self._groups[use.owner])

    def gradient(self, name: str) -> Tensor:
        """Return the view to which backward adds the gradient of a parameter. Modules that compute
        the gradient without autograd add to this view. The view is valid until the next step."""
        chunk = self._all[self.slots[name].chunk]
        assert isinstance(chunk, ChunkState), f"{name} is frozen and has no gradient"
        return chunk.grad_views[name]

    def start_step(self, expected: tuple[float, float] | None = None) -> None:
        """Clear the gradients and the cache of parameters before the first pass of a step.

        Args:
            expected: The probable `lr` and `grad_scale` of `update`; None for no early updates.
        """
        self.gradients.start()
        self.expect_update(expected)
        if self.params.plan is not None:
            self.params.start_step()

    def expect_update(self, expected: tuple[float, float] | None) -> None:
        """Discard started early updates. Later ones use `expected` (see `start_step`)."""
        self._updates.start_step(expected)

    def grad_norm(self) -> float:
        """Return the 2-norm of the whole model's gradient, in which each parameter counts once. All
        ranks must call this method. In deterministic mode, all data- and pipeline-parallel layouts
        give the same bits."""
        counted = [state for state in self.chunks if state.groups.counts]
        norm = exact_norm if self._deterministic else fast_norm
        known = [self.gradients.squares_of(state) for state in counted]
        return norm([state.grad for state in counted], known, self.device, self._everyone)

    def update(self, lr: float, grad_scale: float = 1.0) -> None:
        """Update this rank's shards from the gradients times `grad_scale`, and gather the updated
        parameters. With `overlap` in `attach`, a gather can run until the first use of its chunk.
        Chunks on the host are updated there in the background; a use waits for the update."""
        self.wait()  # for gathers of the last update for which no forward pass has waited
        self.optimizer.num_updates += 1
        self._updates.stop_early()
        for state in self._by_first_use:
            if state.home is not Tier.DEVICE:
                self._updates.add(state, lr, grad_scale)
                continue
            self.optimizer.update(state, lr, grad_scale)
            self.params.gather_updated(state)
        self.gradients.release()
        self.params.invalidate()

    def sync_params(self) -> None:
        """Set the parameters from the masters, for example after loading a checkpoint. All ranks
        must call this method."""
        self.frozen.settle()
        self.wait()
        for state in self._by_first_use:
            if state.shard.data_ptr() != state.master.data_ptr():
                state.shard.copy_(self.read(state.master))
            self.params.gather_updated(state)
        for chunk in self.frozen.chunks:
            self.params.gather_updated(chunk)
        self.params.invalidate()
        self.wait()

    @property
    def stage_groups(self) -> dict[str, Group]:
        """For each parameter that several pipeline stages have, the group of ranks of these
        stages."""
        groups = {name: groups.stage_group for name, groups in self._groups.items()}
        return {name: group for name, group in groups.items() if group.size > 1}

    # -- states, for checkpoints -----------------------------------------------------------------

    def shards(self) -> list[StateShard]:
        """Return this rank's shards of the states, chunk by chunk."""
        self.wait()
        return [
            StateShard(state.chunk, state.shard_range.start, state.groups, state.states)
            for state in self.chunks
        ] + list(self.frozen.shards())

    def clear_moments(self) -> None:
        """Set all moments of the optimizer to zero."""
        self.wait()
        for state in self.chunks:
            for moment in state.moments.values():
                if self.disk is not None:
                    self.disk.zero(moment)
                else:
                    moment.zero_()

    def put(self, state: str, name: str, values: Tensor, start: int = 0) -> None:
        """Set the elements of a state that are in this rank's shard. Ignore all other elements.

        Args:
            state: "master" or a moment; "master" for a frozen parameter.
            name: The parameter.
            values: Elements of the flattened parameter.
            start: Index of the first element of `values` in the flattened parameter.
        """
        self.wait()
        values = values.reshape(-1)
        if name in self.frozen:
            assert state == "master", f"{name} is frozen and has no {state}"
            self.frozen.put(name, values, start)
            return
        slot = self.slots[name]
        chunk = self._all[slot.chunk]
        assert isinstance(chunk, ChunkState)
        write_slice(chunk.local_slice(chunk.states[state], slot), values, start, self._write)

    def read(self, flat: Tensor) -> Tensor:
        """Return the elements of a state of a chunk: a copy if the state is on disk, otherwise the
        state itself. Call `wait` first."""
        return flat if self.disk is None else self.disk.read(flat)

    def _write(self, into: Tensor, values: Tensor) -> None:
        if self.disk is not None:
            self.disk.write(into, values)
        else:
            into.copy_(values)

    def close(self) -> None:
        """Remove the file with the states on disk. The engine must not be used afterwards."""
        if self.disk is not None:
            self.disk.close()

    def first_shard(self, state: str, is_bad: Callable[[Tensor], bool]) -> ShardSlice | None:
        """Return the first bad slice of a parameter in this rank's shards of a state.

        Args:
            state: "master", which includes frozen parameters, or the name of a moment.
            is_bad: Returns True for values that are bad.

        Returns:
            The slice; None if no slice is bad.
        """
        self.wait()
        for chunk_state in self.chunks:
            flat = self.read(chunk_state.states[state])
            if is_bad(flat):
                for slot in chunk_state.chunk.slots:
                    local = chunk_state.local_slice(flat, slot)
                    if local is not None and is_bad(local[0]):
                        return ShardSlice(slot.name, slot.shape, local[1].start, local[0])
        frozen = self.frozen.slices() if state == "master" else ()
        return next((piece for piece in frozen if is_bad(piece.values)), None)

    def first_parameter(self, is_bad: Callable[[Tensor], bool]) -> str:
        """Return the name of the first parameter with bad values; "" if no values are bad.

        In a transient chunk, only the elements in this rank's shard are checked. `is_bad` returns
        True for values that are bad.
        """
        self.wait()
        for name, slot in self.slots.items():
            chunk = self._all[slot.chunk]
            if chunk.is_transient:
                local = chunk.local_slice(chunk.shard, slot)
                values = local[0] if local is not None else None
            else:
                values = chunk.view(chunk.params, slot)
            if values is not None and is_bad(values):
                return name
        return ""

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of this rank's model states between updates. The keys KINDS and
        "padding" have the bytes in all tiers. The keys "total", "host" and "disk" have the bytes on
        the device, in host memory and on disk. "host" includes "staging" of `bytes_by_tier`."""
        by_tier = self.bytes_by_tier()
        totals = {tier: sum(sizes.values()) for tier, sizes in by_tier.items()}
        return count_bytes(self._state_tensors()) | {"total": totals.pop("device")} | totals

    def bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """Return, for each tier, the bytes of each of KINDS between updates, and "staging": the
        bytes of the host buffers to which gradients are copied, and to which states are read from
        disk."""
        by_tier = count_by_tier(self._state_tensors(), self.memory.tier_of)
        of_disk = 0 if self.disk is None else self.disk.staging_bytes
        by_tier["host"]["staging"] = self.gradients.staging_bytes + of_disk
        return by_tier

    def _state_tensors(self) -> Iterator[StateTensor]:
        for chunk in self._all:
            yield from chunk.state_tensors()
        for buffers in self._spare.values():
            yield from buffers.state_tensors()
        yield from self.gradients.state_tensors()

    def workload(
        self,
        order: str,
        chunk_length: int,
        segments: Sequence[ModelSegment],
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        device_bytes: int,
        reductions: int,
    ) -> Workload:
        """Return the sizes and times of a training step for `optimus.chunks.placement.search`. Call
        this after `attach`, on an engine whose chunks are all on the host.

        Args:
            order: Order of the microbatches, as `Workload.order`.
            chunk_length: Target length of the chunks, in elements.
            segments: As for `attach`.
            forward_s, backward_s: Seconds that each segment computes for one microbatch.
            device_bytes: Bytes of activations and other tensors on the device.
            reductions: Number of times that the gradients of a chunk are reduced in a step.
        """
        assert self.params.plan is not None
        numbers = {number: n for n, number in enumerate(self.numbers_by_first_use)}

        def renumber(chunks: frozenset[int]) -> frozenset[int]:
            return frozenset(numbers[chunk] for chunk in chunks)

        costs, sizes = list(map(self.cost_of, self._all_by_first_use)), self.state_bytes()
        copied = max(cost.copied for cost in costs)
        return Workload(
            order,
            chunk_length,
            costs,
            [step.use._replace(need=renumber(step.use.need)) for step in self.params.plan.steps],
            [renumber(needs) for needs in self.transient_needs(segments)],
            [
                renumber(frozenset(b.chunk.number for b in of_segment if isinstance(b, ChunkState)))
                for of_segment in self.gradients.allocated_together()
            ],
            forward_s,
            backward_s,
            device_bytes + sizes["total"],
            sizes["host"] - sum(cost.host for cost in costs) - MAX_COPYING * copied,
            reductions,
            self.gradients.reduction_bytes,
        )

    @property
    def numbers_by_first_use(self) -> list[int]:
        """The numbers of all chunks in order of first use."""
        return [chunk.chunk.number for chunk in self._all_by_first_use]

    def cost_of(self, chunk: ParamChunk) -> ChunkCost:
        """Return the cost of a chunk whose home is the host."""
        assert chunk.home is not Tier.DEVICE
        unique = {t.untyped_storage()._cdata: t for _, t, _ in chunk.state_tensors()}
        host = sum(t.nbytes for t in unique.values() if self.memory.tier_of(t) is Tier.HOST)
        params, shard = chunk.params.nbytes, chunk.shard.nbytes
        is_sharded = self.residency.divides_parameters and shard < params
        resident = host if is_sharded else host - shard + params
        sizes = resident, host, params, shard
        if not isinstance(chunk, ChunkState):
            return ChunkCost(*sizes, gradients=0, copied=0, elements=0)
        dtypes = dtypes_apart(self.optimizer.moments, chunk.params.dtype).values()
        moved = len(chunk.shard) * sum(dtype.itemsize for dtype in dtypes)
        cost = ChunkCost(
            *sizes,
            gradients=chunk.grads.nbytes,
            copied=self.gradients.copied_bytes(chunk),
            elements=len(chunk.shard),
            spare=chunk.buffers.nbytes,
            moved=moved,
            file=file_bytes(len(chunk.shard), dtypes),
        )
        if (spare := self._spare.get(chunk.chunk.number)) is not None:
            cost = cost._replace(host=host + spare.nbytes, moved=moved + spare.nbytes)
        return cost

    @property
    def temporary_bytes(self) -> int:
        """Largest number of bytes on the device that gradients and their reductions need during a
        backward, in addition to the bytes of `state_bytes`. Call this after `attach`."""
        return self.gradients.temporary_bytes()

    @property
    def cache_bytes(self) -> int:
        """Upper limit of the bytes in the cache of transient parameters. A cache with n slots can
        contain the parameters of the n largest transient chunks."""
        sizes = sorted(chunk.params.nbytes for chunk in self._all if chunk.is_transient)
        return sum(sizes[-self.residency.slots :])


def _groups_of(chunk: Chunk) -> ParamProcessGroups:
    """Return the process groups of the parameters of a chunk."""
    assert isinstance(chunk.key, ParamProcessGroups)
    return chunk.key


def _parameters(
    named: Mapping[str, nn.Parameter], groups: Mapping[str, ParamProcessGroups]
) -> Iterator[Parameter]:
    """Yield the parameters for the layout."""
    for name, parameter in named.items():
        key = groups[name].of_chunk
        sizes = key.reduce_group.size, key.shard_group.size
        yield Parameter(name, tuple(parameter.shape), key, *sizes)
