"""Accumulation of a rank's gradients in backward, and the order and time of the reductions.

optimus/chunks/reductions.py adds the gradients over microbatches and ranks.

The collectives of a group must be launched in the same order on all ranks. Therefore the buckets
(`GradBucket`) of a pipeline stage are reduced in a fixed order: the reverse of the order in which
forward first uses their parameters. Backward completes the gradients in this reverse order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from optimus.chunks.buffers import (
    ChunkState,
    FurtherUse,
    GradBuffer,
    Memory,
    StateTensor,
    UseGradBuffer,
)
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.layout import Slot
from optimus.chunks.memory import Tier
from optimus.chunks.optimizer import UpdateQueue
from optimus.chunks.reductions import ReduceOnce, ReducePerMicrobatch, most_gradients
from optimus.chunks.residency import Pass
from optimus.chunks.segments import ModelSegment
from optimus.distributed.collectives import (
    Group,
    all_reduce_sum,
)
from optimus.errors import ConfigError, counted

_WIDENS_NATIVELY = hasattr(torch.Tensor, "grad_dtype")
"""True for torch 2.9 and later, where a bf16 parameter can have an fp32 `.grad`."""


@dataclass(eq=False)
class GradBucket:
    """Gradients that are reduced by one collective."""

    buffer: GradBuffer
    leaves: dict[str, Tensor]
    """Leaf tensors whose gradients are in `buffer`, by name, in order of first use."""
    missing: set[str] = field(default_factory=set)
    """Names of the leaves that have not received their last gradient of the step. The set is empty
    outside of `last_backward`."""
    is_ready: bool = False
    """True if the gradients are complete, so that they can be reduced."""
    is_launched: bool = False
    """True if the reduction has started during backward, so that no further gradient may arrive.
    Without overlap, it remains False."""


class GradReducer:
    """Adds up the gradients of a rank's chunks over microbatches and ranks.

    Backward adds to views of the chunks, and to a separate buffer for each further use of a
    parameter. By default, each buffer is reduced once per step, after the last backward. With
    `overlap`, the reductions already start during the last backward. In three cases, each buffer is
    reduced after each microbatch: with `frees_buffers`, with `rounds`, and in deterministic mode
    with more than one rank. With `reduces_each` = False in `attach`, the buffers are instead
    reduced after several microbatches. Deterministic mode adds the microbatches in the order of
    their numbers.

    Args:
        named: Trained parameters in order of first use, views of the chunks.
        chunk_states: The chunks in order of first use.
        stage_groups: For each parameter that several pipeline stages have, the ranks of these
            stages. Each of these stages computes the gradient of its use of the parameter, and
            receives the sum of these gradients.
        memory: Memory of the chunks.
        updates: Queue of the chunks that the host has not updated yet.
        deterministic: `train.deterministic`.
        reduce_dtype: The dtype of reductions; deterministic mode always uses fp32.
        grad_dtype: The dtype of accumulation.
        compiled: True if torch.compile traces the model. torch.compile requires that a gradient has
            the dtype of its parameter. Hooks then convert gradients to `grad_dtype`, as with torch
            before 2.9.
        overlap: `optim.overlap`.
        frees_buffers: True if gradients have memory only from a backward to their reduction. Must
            be True if the home of a chunk is the host.
        rounds: True to round gradients to bf16 once, before they are added to the sum of a step.
    """

    def __init__(
        self,
        named: Mapping[str, Tensor],
        chunk_states: Sequence[ChunkState],
        stage_groups: Mapping[str, Group],
        memory: Memory,
        updates: UpdateQueue,
        *,
        deterministic: bool,
        reduce_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        compiled: bool,
        overlap: bool,
        frees_buffers: bool,
        rounds: bool = False,
    ) -> None:
        self.before_reduce: Callable[[GradBuffer], None] = lambda buffer: None
        """Function that is called with each buffer before the reduction of the buffer, to find the
        rank that has computed a NaN. After the reduction, all ranks have the NaN."""
        self._by_name: dict[str, tuple[ChunkState, Slot]] = {
            slot.name: (state, slot) for state in chunk_states for slot in state.chunk.slots
        }
        self._stage_groups = {n: g for n, g in stage_groups.items() if n in self._by_name}
        self._uses: list[UseGradBuffer] = []
        self._grad_dtype, self._memory = grad_dtype, memory
        same_dtype = all(parameter.dtype is grad_dtype for parameter in named.values())
        self._accumulates_natively = same_dtype or (_WIDENS_NATIVELY and not compiled)
        self._frees_buffers = frees_buffers
        several = any(state.groups.reduce_group.size > 1 for state in chunk_states)
        self._strategy: ReduceOnce | ReducePerMicrobatch
        if frees_buffers or rounds or (deterministic and several):
            self._strategy = ReducePerMicrobatch(
                deterministic, reduce_dtype, memory, frees_buffers, updates, rounds
            )
        else:
            self._strategy = ReduceOnce(reduce_dtype, overlap)
        self._overlaps = overlap and several and not (deterministic or frees_buffers or rounds)
        self._buckets: dict[int, list[GradBucket]] = {}
        """Buckets of each stage in the order of their launch."""
        self._num_launched: dict[int, int] = {}
        for state in chunk_states:
            self._strategy.add(state)
            self._add_bucket(state, named)
        self._segments: list[tuple[int, tuple[GradBuffer, ...]]] = []
        """Stage and buffers of each segment."""
        self._first_segment: dict[GradBuffer, int] = {}
        self._frees_early, self._reduces_each = False, True
        self.allocated: dict[GradBuffer, None] = {}
        """Buffers that were allocated for a backward and whose reduction has not started. The
        values of this dict are not used."""
        self.limit_bytes = math.inf
        """Limit, in bytes, of the gradients on the device that are freed after their reduction.
        Near the limit, `before_segment_backward` reduces the buffers that the present backward does
        not need, and waits for copies to the host."""
        self._needed: set[GradBuffer] = set()
        """Buffers that the present backward needs, if `limit_bytes` is finite."""
        self._in_step = False
        self._is_reducing = False
        """True if a step or a reduction has started since `finish` or `sum_so_far` last completed
        the reductions."""

    # -- setup -----------------------------------------------------------------------------------

    def add_use(self, use: FurtherUse, groups: ParamProcessGroups) -> None:
        """Add a buffer for a further use of a parameter."""
        home = self._by_name[use.owner][0].home
        buffer = UseGradBuffer(use, groups, self._grad_dtype, self._memory, home)
        self._strategy.add(buffer)
        self._uses.append(buffer)
        self._add_bucket(buffer, {use.name: use.leaf})

    def attach(
        self,
        segments: Sequence[ModelSegment],
        passes: Sequence[Pass],
        early: bool,
        reduces_each: bool = True,
    ) -> None:
        """Register the buffers of each segment, so that a buffer has memory only while backward
        adds to it. Do nothing unless `frees_buffers`.

        With `early`, the buffers of a segment are allocated before its backward. At this time, the
        gradients of all later segments are complete, so buffers to which only later segments add
        are reduced and freed. Without `early`, the buffers of a stage have memory from its backward
        to `reduce`. Use `early` = False if weight gradients are computed after the backward of
        their segment, or if hooks cannot observe the uses.

        Args:
            segments: All segments in order of first use.
            passes: The forward and backward passes of this rank in a step.
            early: True to allocate and free buffers by segment, False by stage.
            reduces_each: False if several microbatches add to the buffers of a stage before
                `reduce`. The buffers are then reduced only by `reduce`.
        """
        if not self._frees_buffers:
            return
        all_buckets = itertools.chain.from_iterable(self._buckets.values())
        buffer_of = {name: bucket.buffer for bucket in all_buckets for name in bucket.leaves}
        for index, segment in enumerate(segments):
            of_params = (buffer_of[name] for name in segment.parameters if name in buffer_of)
            buffers = tuple(dict.fromkeys(of_params))
            self._segments.append((segment.stage, buffers))
            for buffer in buffers:
                self._first_segment.setdefault(buffer, index)
        self._frees_early, self._reduces_each = early, reduces_each
        for stage in self._buckets:
            self.expect_backwards(stage, sum(p.backward and p.stage == stage for p in passes))

    def expect_backwards(self, stage: int, backwards: int) -> None:
        """Set the number of backward passes of a stage in a step. After this number of passes, the
        host computes the squares of the stage's gradients and begins early updates. If a step has
        another number of passes, the squares and early updates are discarded. The results are then
        still correct, but the step takes longer. Call this after `attach`, between two steps."""
        assert isinstance(self._strategy, ReducePerMicrobatch)
        shared = (*self._stage_groups, *self.owner_of.values())
        changed = {self._by_name[name][0] for name in shared}  # `finish` changes the gradients
        reductions = backwards if self._reduces_each else min(backwards, 1)
        for buffer in self._first_segment:
            of_stage = isinstance(buffer, ChunkState) and buffer.groups.stage == stage
            if of_stage and buffer not in changed:
                self._strategy.expect(buffer, reductions)

    def _add_bucket(self, buffer: GradBuffer, named: Mapping[str, Tensor]) -> None:
        """Add the bucket of `buffer`, and let backward add the gradients of its leaves to `buffer`.
        Call this method for the buffers in the order in which forward first uses them. `named` has
        the leaves by name."""
        bucket = GradBucket(buffer, {name: named[name] for name in buffer.grad_views})
        for name, leaf in bucket.leaves.items():
            self._accumulate(leaf, buffer.grad_views[name])
            if self._overlaps and leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(partial(self._on_grad, bucket, name))
        self._buckets.setdefault(buffer.groups.stage, []).insert(0, bucket)
        self._num_launched[buffer.groups.stage] = 0

    def _accumulate(self, leaf: Tensor, view: Tensor) -> None:
        """Let backward add the gradient of a leaf into `view`, in the dtype of `view`."""
        if self._accumulates_natively:
            if leaf.dtype is not view.dtype:
                leaf.grad_dtype = view.dtype
            leaf.grad = view
            return

        def widen(leaf: Tensor) -> None:
            # `leaf.grad` is None if the gradient is deferred, or if a module has added the gradient
            # to `view` itself.
            if leaf.grad is not None:
                view.add_(leaf.grad)
                leaf.grad = None

        leaf.register_post_accumulate_grad_hook(widen)

    @property
    def owner_of(self) -> dict[str, str]:
        """Maps the name of each `FurtherUse` to the name under which its parameter is stored in a
        chunk."""
        return {buffer.use.name: buffer.use.owner for buffer in self._uses}

    def state_tensors(self) -> Iterator[StateTensor]:
        """Yield the gradient tensors that exist in addition to those of the chunks."""
        yield from self._strategy.state_tensors()
        for buffer in self._uses:
            yield from buffer.state_tensors()

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory to which gradients are copied; 0 with `ReduceOnce`."""
        strategy = self._strategy
        return strategy.staging_bytes if isinstance(strategy, ReducePerMicrobatch) else 0

    def temporary_bytes(self) -> int:
        """Return the largest number of bytes on the device that gradients and their reductions need
        during a backward, in addition to the tensors that exist between steps. Call this after
        `attach`.

        Backward uses the segments in reverse order. A buffer that is freed between steps therefore
        has memory from the backward of its last segment to the reduction after the backward of its
        first segment. If the home of the buffer is the host, its gradients are then copied to the
        host.
        """
        strategy = self._strategy
        if not self._frees_buffers:
            return self.reduction_bytes
        assert isinstance(strategy, ReducePerMicrobatch)
        freed = [buffer for buffer in self._buffers() if strategy.frees(buffer)]
        numbers = {buffer: number for number, buffer in enumerate(freed)}
        copied = [0 if b.home is Tier.DEVICE else self.copied_bytes(b) for b in freed]
        together = [
            [numbers[buffer] for buffer in buffers if buffer in numbers]
            for buffers in self.allocated_together()
        ]
        sizes = [buffer.grads.nbytes for buffer in freed]
        return int(most_gradients(together, sizes, copied, self.reduction_bytes)[-1])

    def allocated_together(self) -> Iterator[set[GradBuffer]]:
        """Yield, for each segment, the buffers that have memory during its backward. The result is
        for the case that every buffer is freed after its reduction. Call this after `attach`."""
        last = {b: n for n, (_, of_segment) in enumerate(self._segments) for b in of_segment}
        for number, (stage, _) in enumerate(self._segments):
            if self._frees_early:
                yield {b for b in last if self._first_segment[b] <= number <= last[b]}
            else:
                yield {b for b in last if b.groups.stage == stage}

    @property
    def reduction_bytes(self) -> int:
        """Largest number of bytes on the device of the temporary tensors of reductions."""
        sizes = sorted(self._strategy.temporary_bytes(buffer) for buffer in self._buffers())
        return sum(sizes[-self._strategy.max_in_flight :])

    def copied_bytes(self, buffer: GradBuffer) -> int:
        """Return `ReducePerMicrobatch.copied_bytes` of a buffer."""
        assert isinstance(self._strategy, ReducePerMicrobatch)
        return self._strategy.copied_bytes(buffer)

    def _buffers(self) -> Iterator[GradBuffer]:
        for buckets in self._buckets.values():
            yield from (bucket.buffer for bucket in buckets)

    # -- a step ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Clear all gradients. Call this before the first backward of a step."""
        self._strategy.start()
        self._is_reducing = True  # so that `sum_so_far` first clears the sums of the last step
        self.allocated.clear()  # not empty after a step that was abandoned
        for stage, buckets in self._buckets.items():
            self._num_launched[stage] = 0
            for bucket in buckets:
                bucket.is_ready = bucket.is_launched = False
        self._in_step = True

    def before_backward(self, stage: int) -> None:
        """Allocate the freed buffers of a stage, unless `attach` was called with `early` (then
        `before_segment_backward` allocates them). Call this before each backward action of the
        stage: B (all gradients), I (only gradients of inputs) or W (only gradients of weights)."""
        if not self._frees_early:
            for segment_stage, buffers in self._segments:
                if segment_stage == stage:
                    self._allocate(buffers)

    def need(self, segments: Sequence[int]) -> None:
        """Set the segments whose backward runs now: a segment and the segments that call it. Then
        call `before_segment_backward` for each of these segments."""
        if self.limit_bytes < math.inf:
            self._needed = {b for number in segments for b in self._segments[number][1]}

    def before_segment_backward(self, segment: int) -> None:
        """Call this before the backward of a segment. Reduce the buffers of later segments, which
        are now complete, and allocate the buffers of the segment."""
        if self._frees_early and self._in_step:
            if self._reduces_each:
                later = [b for b in self.allocated if self._first_segment[b] > segment]
                self._reduce_allocated(later)
            self._allocate(self._segments[segment][1])

    @contextmanager
    def last_backward(
        self, stage: int, expected: Collection[Tensor] | None = None
    ) -> Iterator[None]:
        """Return a context manager for the last backward of a stage in a step. With `overlap`, each
        bucket is reduced in this context as soon as the bucket and all buckets before it are
        complete.

        Args:
            stage: The stage.
            expected: The leaves that receive a gradient in the context; None if every leaf can
                receive a gradient. A bucket without an expected leaf is complete immediately.
        """
        buckets = self._buckets.get(stage, []) if self._overlaps else []
        wanted = None if expected is None else set(map(id, expected))
        for bucket in buckets:
            bucket.missing = {
                name
                for name, leaf in bucket.leaves.items()
                if leaf.requires_grad and (wanted is None or id(leaf) in wanted)
            }
            bucket.is_ready = not bucket.missing
        try:
            self._launch_ready(stage)
            yield
        finally:
            for bucket in buckets:
                bucket.missing.clear()

    def reduce(self, stage: int) -> None:
        """Reduce the buffers of a stage that are not reduced yet. Call this method after each
        backward if the buffers are reduced after each microbatch (see `GradReducer`), otherwise
        after the last backward of a step."""
        buckets = self._buckets.get(stage, [])
        for bucket in buckets:
            self._check_views(bucket)
        if self._frees_buffers:
            self._reduce_allocated([b for b in self.allocated if b.groups.stage == stage])
            return
        for bucket in buckets:
            bucket.is_ready = True
        self._launch_ready(stage)
        self._num_launched[stage] = 0
        for bucket in buckets:
            bucket.is_ready = False

    def finish(self) -> None:
        """Complete all reductions, so that each `grad` contains the whole sum. Call this before the
        update."""
        assert not self.allocated, "a gradient was not reduced"
        self._in_step = self._is_reducing = False
        self._strategy.finish()
        for name, group in self._stage_groups.items():
            self._add_other_stages(name, group)
        for buffer in self._uses:
            if buffer.use.owner not in self._stage_groups:
                state, slot = self._by_name[buffer.use.owner]
                if (local := state.local_slice(state.grad, slot)) is not None:
                    local[0].add_(buffer.total.flatten()[local[1]])

    def sum_so_far(self, state: ChunkState) -> Tensor:
        """Return the sum of a chunk's gradient over the backward passes so far, as
        `GradBuffer.grad`. The caller is allowed to change the sum before the next backward pass.
        All ranks must call this method."""
        if self._is_reducing:
            self._strategy.finish()
            self._is_reducing = False
        if isinstance(self._strategy, ReducePerMicrobatch):
            self._strategy.forget(state)
        return state.grad

    def squares_of(self, state: ChunkState) -> Tensor | None:
        """Return `optimus.chunks.norm.squares_of` of a chunk's gradient if the host has computed
        this result during the backward pass; otherwise None. Call this method after `finish`."""
        if isinstance(self._strategy, ReducePerMicrobatch):
            return self._strategy.squares.get(state)
        return None

    def release(self) -> None:
        """Free the gradients after the update, if `frees_buffers` is True."""
        if self._frees_buffers:
            assert isinstance(self._strategy, ReducePerMicrobatch)
            self._strategy.release()

    def unreduced(self, stage: int) -> Iterator[GradBuffer]:
        """Yield the buffers of a stage that have memory and whose reduction has not started. Call
        this after a backward action of the stage."""
        strategy = self._strategy
        for bucket in self._buckets.get(stage, []):
            grads = bucket.buffer.grads
            is_freed = isinstance(strategy, ReducePerMicrobatch) and not strategy.memory.has(grads)
            if not (bucket.is_launched or is_freed):
                yield bucket.buffer

    def _on_grad(self, bucket: GradBucket, name: str, leaf: Tensor) -> None:
        """Record that backward has added the gradient of `leaf`, the parameter `name`. If no other
        gradient of `bucket` is missing, launch the reductions of the buckets that are ready."""
        assert not bucket.is_launched, f"the gradient of {name} came after its bucket was reduced"
        if name in bucket.missing:
            bucket.missing.discard(name)
            if not bucket.missing:
                bucket.is_ready = True
                self._launch_ready(bucket.buffer.groups.stage)

    def _launch_ready(self, stage: int) -> None:
        """Launch the reductions of a stage in order, up to the first bucket that is not ready."""
        buckets = self._buckets.get(stage, [])
        for bucket in buckets[self._num_launched.get(stage, 0) :]:
            if not bucket.is_ready:
                return
            self._num_launched[stage] += 1  # first, so that a failed launch is not repeated
            self._check_views(bucket)
            self.before_reduce(bucket.buffer)
            bucket.is_launched = self._overlaps
            self._is_reducing = True
            self._strategy.reduce(bucket.buffer)

    def _check_views(self, bucket: GradBucket) -> None:
        """Assert that each `.grad` is still a view of the buffer, because the reduction would miss
        the values of any other tensor."""
        if not self._accumulates_natively:
            return
        for name, leaf in bucket.leaves.items():
            grad, view = leaf.grad, bucket.buffer.grad_views[name]
            in_place = grad is view or (
                grad is not None
                # Not data_ptr(), which is 0 while the storage is freed.
                and grad.untyped_storage()._cdata == view.untyped_storage()._cdata
                and grad.storage_offset() == view.storage_offset()
            )
            assert in_place, f"the gradient of {name} was replaced; it must accumulate in place"

    def _allocate(self, buffers: Sequence[GradBuffer]) -> None:
        assert isinstance(self._strategy, ReducePerMicrobatch)
        for buffer in buffers:
            if self.limit_bytes < math.inf and self._strategy.frees(buffer):
                self._make_space(buffer)
            self._strategy.allocate(buffer)
            self.allocated[buffer] = None

    def _make_space(self, buffer: GradBuffer) -> None:
        """Wait for copies of gradients to the host until `buffer` can be allocated. Raise
        ConfigError if the gradients would then exceed `limit_bytes`.

        A buffer that the present backward does not need can still have memory, if its segment is
        used again or if the segments are used in another order. If there is not enough space, such
        buffers are reduced first.
        """
        assert isinstance(self._strategy, ReducePerMicrobatch)
        freed = [b for b in {**self.allocated, buffer: None} if self._strategy.frees(b)]
        needed = sum(b.grads.nbytes for b in freed)
        if needed > self.limit_bytes:
            self._reduce_allocated([b for b in freed if b not in self._needed])
            freed = [b for b in freed if b in self._needed]
            needed = sum(b.grads.nbytes for b in freed)
        if needed > self.limit_bytes:
            missing = counted(needed - int(self.limit_bytes), "byte")
            raise ConfigError(
                "a module calls another module, so backward needs the gradients of "
                f"{counted(len(freed), 'chunk')} at the same time, among them the gradient of "
                f"{next(iter(buffer.grad_views))}; these gradients exceed device_memory by "
                f"{missing}; leave out the call, or use host_share and cache_chunks instead of "
                "device_memory"
            )
        self._strategy.limit_copies(self.limit_bytes - needed)

    def _reduce_allocated(self, buffers: Sequence[GradBuffer]) -> None:
        for buffer in buffers:
            self.before_reduce(buffer)
            self._is_reducing = True
            self._strategy.reduce(buffer)
            del self.allocated[buffer]

    def _add_other_stages(self, name: str, group: Group) -> None:
        """Add up the gradients of the parameter `name` over `group`, the ranks of the stages that
        use the parameter. Each stage has the whole gradient of its use."""
        uses = [buffer.total for buffer in self._uses if buffer.use.owner == name]
        state, slot = self._by_name[name]
        gradient = uses[0] if uses else state.view(state.gather(state.grad), slot)
        total = gradient.to(state.params.device, torch.float32, copy=True)
        all_reduce_sum(total, group)
        if (local := state.local_slice(state.grad, slot)) is not None:
            local[0].copy_(total.flatten()[local[1]])
