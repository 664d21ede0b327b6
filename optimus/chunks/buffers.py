"""Flat buffers of model states: chunks, separate gradients of tied weights, and frozen parameters.

With tied embeddings, the output head also uses the weight of the embedding. Such a second use of a
parameter is called a further use (`FurtherUse`). The gradient of a further use has a separate
buffer.

Parameters and gradients are views of flat buffers, and autograd saves such views. A buffer is freed
by resizing its storage to 0 bytes. The storage object is kept, so all views become valid again when
memory is allocated for the storage again. An assignment to `.data` of the parameters would not
change the views that autograd or a recomputation has saved.

The home of a chunk is the tier (device or host) in which its states are between uses. If the home
is the host, the parameters are copied to the device before a segment uses them, and the gradients
are on the device only from a backward to their reduction.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from optimus.chunks.disk import DiskTier
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.layout import KINDS, Chunk, Parameter, Slot, lay_out
from optimus.chunks.memory import Memory, Tier
from optimus.distributed.collectives import ALONE, all_gather


class StateTensor(NamedTuple):
    """A tensor with model states."""

    kind: str
    """One of KINDS."""
    tensor: Tensor
    chunk: Chunk | None = None
    """The chunk whose padding the tensor contains; None if no padding in the tensor is counted."""


class GradBuffer(Protocol):
    """Gradients that are reduced together: the gradients of a chunk, or the gradient of one
    `FurtherUse`."""

    groups: ParamProcessGroups
    home: Tier
    """Tier of `grad`."""
    grads: Tensor
    """Flat buffer of L elements on the device, to which backward adds."""
    grad: Tensor
    """Sum over microbatches and ranks for the update. If the states are not sharded and their home
    is the device, this tensor is `grads` itself. Otherwise it is a separate fp32 tensor [L / size
    of the shard group]."""
    grad_views: dict[str, Tensor]
    """Views of `grads` by parameter, in order of first use. The views are valid whenever `grads`
    has memory."""


class ParamChunk:
    """Parameters of a chunk of L elements on one rank. `shards` is the size of the shard group.

    Attributes:
        chunk: The layout of the chunk.
        groups: Process groups of the parameters.
        home: Tier of `shard`.
        is_transient: True if `params` has memory only while the parameters are used. Between uses,
            this rank keeps only `shard`.
        shard_range: The elements of the chunk that are this rank's shard.
        params: [L] in the dtype of the parameters, on the device. The model's parameters are views
            of this tensor.
        local: [L / shards], the elements of `params` that are this rank's shard.
        shard: [L / shards], this rank's shard of the parameters: a separate tensor if
            `is_transient`, else `local`.
    """

    def __init__(
        self,
        chunk: Chunk,
        groups: ParamProcessGroups,
        dtype: torch.dtype,
        memory: Memory,
        home: Tier = Tier.DEVICE,
        shards_params: bool = False,
    ) -> None:
        self.chunk, self.groups, self.home = chunk, groups, home
        self._memory = memory
        is_sharded = shards_params and groups.shard_group.size > 1
        self.is_transient = is_sharded or home is not Tier.DEVICE
        self.params = memory.new(chunk.length, dtype)
        first = groups.shard_group.rank * chunk.shard_length
        self.shard_range = slice(first, first + chunk.shard_length)
        self.shard = self.local = self.params[self.shard_range]
        if self.is_transient:
            self.shard = memory.new(chunk.shard_length, dtype, home)

    def state_tensors(self) -> Iterator[StateTensor]:
        """Yield all tensors of this chunk."""
        for tensor in (self.params, self.shard):
            yield StateTensor("parameters", tensor, self.chunk)

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        """Return the elements of a parameter in a flat [L] buffer, as a view with its shape."""
        return flat[slot.start : slot.stop].view(slot.shape)

    def gather(self, flat: Tensor) -> Tensor:
        """Gather the [L / shards] buffers of the ranks of the shard group, and return all L values
        on the device.

        Return `flat` itself if it is on the device and the shard group has a single rank. All ranks
        of the shard group must call this method.
        """
        flat = self._memory.on_device(flat)
        if self.groups.shard_group.size == 1:
            return flat
        out = flat.new_empty(self.chunk.length)
        all_gather(out, flat, self.groups.shard_group)
        return out

    def local_slice(self, flat: Tensor, slot: Slot) -> tuple[Tensor, slice] | None:
        """Return the elements of a parameter that are in this rank's shard.

        Args:
            flat: A [L / shards] buffer.
            slot: The parameter.

        Returns:
            The elements, as a view of `flat`, and their range in the flattened parameter; None if
            the shard has no element of the parameter.
        """
        first = self.shard_range.start
        start, stop = max(slot.start, first), min(slot.stop, self.shard_range.stop)
        if start >= stop:
            return None
        return flat[start - first : stop - first], slice(start - slot.start, stop - slot.start)


class ShardBuffers(NamedTuple):
    """The states that an update of a chunk's shard replaces."""

    shard: Tensor
    """The shard of the parameters."""
    master: Tensor
    """The master weights; `shard` itself for fp32 parameters."""
    moments: dict[str, Tensor]
    """The moments of the optimizer, by name."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, each once."""
        masters = () if self.master is self.shard else (self.master,)
        return self.shard, *masters, *self.moments.values()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def state_tensors(self) -> Iterator[StateTensor]:
        """Yield all tensors."""
        yield StateTensor("parameters", self.shard)
        yield StateTensor("masters", self.master)
        yield from (StateTensor("moments", moment) for moment in self.moments.values())


class ChunkState(ParamChunk):
    """States of a chunk of L trained elements on one rank.

    Attributes:
        home: Tier of `shard` and `grad`, and of `master` and `moments` unless they are on disk.
        grads: [L] in the dtype of gradients, on the device. Backward adds to this tensor.
        grad_views: Views of `grads` by parameter. The views are valid whenever `grads` has memory.
        master: fp32 [L / shards], the master weights; `shard` itself for fp32 parameters.
        moments: [L / shards] each, the moments of the optimizer by name.
        grad: [L / shards], the summed gradient: `grads` itself if the states are not sharded and
            their home is the device, otherwise a separate fp32 tensor.
        on_disk: The masters and moments that are on disk, by name. The tensors are placeholders
            (`optimus.chunks.disk`). The master of fp32 parameters is `shard` itself, which is never
            on disk.
    """

    def __init__(
        self,
        chunk: Chunk,
        groups: ParamProcessGroups,
        moments: Mapping[str, torch.dtype],
        dtype: torch.dtype,
        grad_dtype: torch.dtype,
        memory: Memory,
        home: Tier = Tier.DEVICE,
        shards_params: bool = False,
        disk: DiskTier | None = None,
    ) -> None:
        super().__init__(chunk, groups, dtype, memory, home, shards_params)
        length = chunk.shard_length
        self.grads = memory.new(chunk.length, torch.promote_types(grad_dtype, dtype))
        # Create the views now, because torch cannot create a view of freed memory.
        self.grad_views = {slot.name: self.view(self.grads, slot) for slot in chunk.slots}
        self.grad = self.grads
        if groups.shard_group.size > 1 or home is not Tier.DEVICE:
            self.grad = memory.new(length, torch.float32, home)
        dtypes = dtypes_apart(moments, dtype)
        apart = {
            name: memory.new(length, of_state, home) if disk is None else disk.new(length, of_state)
            for name, of_state in dtypes.items()
        }
        self.on_disk = {} if disk is None else apart
        self.master = apart.get("master", self.shard)
        self.moments = {name: apart[name] for name in moments}

    @property
    def buffers(self) -> ShardBuffers:
        """The states that an update replaces."""
        return ShardBuffers(self.shard, self.master, self.moments)

    def new_spare(self, memory: Memory) -> ShardBuffers:
        """Return new buffers with the lengths, the dtypes and the tier of `buffers`."""
        shard, master, moments = self.buffers
        spare = {n: memory.new(len(m), m.dtype, self.home) for n, m in moments.items()}
        copy = memory.new(len(shard), shard.dtype, self.home)
        if master is shard:
            return ShardBuffers(copy, copy, spare)
        return ShardBuffers(copy, memory.new(len(master), master.dtype, self.home), spare)

    def exchange(self, other: ShardBuffers) -> None:
        """Exchange the memory of `buffers` with the memory of other buffers of the same lengths and
        dtypes. The tensor objects are not replaced, so code that refers to these objects reads the
        new values."""
        for tensor, others in zip(self.buffers.tensors, other.tensors, strict=True):
            tensor.data, others.data = others.data, tensor.data

    @property
    def states(self) -> dict[str, Tensor]:
        """The master weights and the moments, by name."""
        return {"master": self.master, **self.moments}

    def with_states(self, states: Mapping[str, Tensor]) -> ChunkState:
        """Return a copy of this object in which `states` replaces some masters and moments, by
        name. The copy shares all other tensors with this object."""
        other = copy.copy(self)
        other.on_disk = {}
        other.master = states.get("master", self.master)
        other.moments = {name: states.get(name, flat) for name, flat in self.moments.items()}
        return other

    def state_tensors(self) -> Iterator[StateTensor]:
        """Yield all tensors of this chunk."""
        yield from super().state_tensors()
        tensors = {
            "gradients": (self.grads, self.grad),
            "masters": (self.master,),
            "moments": self.moments.values(),
        }
        for kind, of_kind in tensors.items():
            yield from (StateTensor(kind, tensor, self.chunk) for tensor in of_kind)


def dtypes_apart(moments: Mapping[str, torch.dtype], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes of the masters and moments of a chunk whose parameters have `dtype`, by
    name. For fp32 parameters, "master" is left out, because the shard of the parameters is also the
    master."""
    return ({} if dtype is torch.float32 else {"master": torch.float32}) | dict(moments)


@dataclass(frozen=True)
class FurtherUse:
    """A second use of a parameter, such as that of a tied embedding in the output head."""

    name: str
    leaf: Tensor
    """Leaf tensor of this use. The leaf shares the parameter's memory, but has a separate
    gradient."""
    owner: str
    """Name under which the parameter is stored in a chunk."""
    stage: int = 0
    """Pipeline stage of the use."""


class UseGradBuffer:
    """Gradient of a further use of a parameter. The gradient is reduced like that of an unsharded
    chunk, because every rank of the reduce group needs the whole sum. The home of the buffer is the
    home of the chunk with the parameter."""

    def __init__(
        self,
        use: FurtherUse,
        groups: ParamProcessGroups,
        dtype: torch.dtype,
        memory: Memory,
        home: Tier = Tier.DEVICE,
    ) -> None:
        self.use, self.home = use, home
        copies = groups.reduce_group
        self.groups = replace(groups, stage=use.stage, shard_group=ALONE, replica_group=copies)
        shape = tuple(use.leaf.shape)
        (chunk,) = lay_out([Parameter(use.name, shape, None, copies.size)], 1).chunks
        (slot,) = chunk.slots
        self.grads = self.grad = memory.new(chunk.length, dtype)
        if home is not Tier.DEVICE:
            self.grad = memory.new(chunk.length, torch.float32, home)
        self.total = self.grad[slot.start : slot.stop].view(shape)
        """View of `grad` with the shape of the leaf."""
        self.grad_views = {use.name: self.grads[slot.start : slot.stop].view(shape)}

    def state_tensors(self) -> Iterator[StateTensor]:
        """Yield the tensors of this buffer."""
        yield StateTensor("tied", self.grads)
        yield StateTensor("tied", self.grad)


@dataclass(frozen=True)
class StateShard:
    """This rank's shard of the states of one chunk, for checkpoints."""

    chunk: Chunk
    first: int
    """Index of the shard's first element in the chunk."""
    groups: ParamProcessGroups
    states: Mapping[str, Tensor]
    """Flat tensor [L / shards] of each state, by name. Loading a checkpoint writes to these
    tensors. The tensors of states on disk are placeholders of a `DiskTier`."""


class ShardSlice(NamedTuple):
    """The elements of a parameter in this rank's shard of a state."""

    name: str
    shape: tuple[int, ...]
    """Shape of the parameter on this rank."""
    start: int
    """Index of the first element in the flattened parameter."""
    values: Tensor
    """1-D."""


class FrozenParams:
    """Chunks of parameters that are not trained. The chunks have no gradients. They have masters
    only while a checkpoint is saved or loaded."""

    def __init__(self, chunks: Sequence[ParamChunk]) -> None:
        self.chunks = chunks
        self._slots = {slot.name: (chunk, slot) for chunk in chunks for slot in chunk.chunk.slots}
        self._wide: list[Tensor] = []
        """The fp32 tensors that `shards` has yielded and that `settle` has not copied yet."""

    @property
    def names(self) -> Iterable[str]:
        """Names of the frozen parameters."""
        return self._slots.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    def put(self, name: str, values: Tensor, start: int) -> None:
        """Set the elements of a parameter that are in this rank's shard. Ignore all other elements.

        Args:
            name: The parameter.
            values: 1-D; elements of the flattened parameter.
            start: Index of the first element of `values` in the flattened parameter.
        """
        self.settle()  # otherwise a later `settle` would replace these values by older values
        chunk, slot = self._slots[name]
        write_slice(chunk.local_slice(chunk.shard, slot), values, start)

    def slices(self) -> Iterator[ShardSlice]:
        """Yield the elements of each parameter that are in this rank's shard."""
        for name, (chunk, slot) in self._slots.items():
            if (local := chunk.local_slice(chunk.shard, slot)) is not None:
                yield ShardSlice(name, slot.shape, local[1].start, local[0])

    def shards(self) -> Iterator[StateShard]:
        """Yield this rank's shards in fp32, for checkpoints. Loading a checkpoint writes to these
        tensors, and `settle` then copies their values to the parameters."""
        self._wide = [chunk.shard.float() for chunk in self.chunks]
        for chunk, wide in zip(self.chunks, self._wide, strict=True):
            yield StateShard(chunk.chunk, chunk.shard_range.start, chunk.groups, {"master": wide})

    def settle(self) -> None:
        """Copy the fp32 tensors that `shards` has yielded to the parameters of this rank's shards,
        and free the fp32 tensors."""
        for chunk, wide in zip(self.chunks, self._wide, strict=False):
            if wide is not chunk.shard:
                chunk.shard.copy_(wide)
        self._wide = []


def write_slice(
    local: tuple[Tensor, slice] | None,
    values: Tensor,
    start: int,
    write: Callable[[Tensor, Tensor], object] = Tensor.copy_,
) -> None:
    """Write the elements of a flattened parameter that are in a shard. Ignore all other elements.

    Args:
        local: The elements of the parameter that the shard has, from `ParamChunk.local_slice`.
        values: 1-D; elements of the flattened parameter.
        start: Index of the first element of `values` in the flattened parameter.
        write: Function that copies its second argument to its first argument.
    """
    if local is None:
        return
    shard, where = local
    low, high = max(where.start, start), min(where.stop, start + len(values))
    if low < high:
        write(shard[low - where.start : high - where.start], values[low - start : high - start])


def count_bytes(tensors: Iterable[StateTensor]) -> dict[str, int]:
    """Return the bytes of each of KINDS, their sum "total", and the "padding" in this sum.

    If several tensors share a storage, the bytes of the storage count once, for the kind of the
    first of these tensors.
    """
    sizes = dict.fromkeys(KINDS, 0)
    in_chunk: dict[int, int] = {}
    chunks: dict[int, Chunk] = {}
    seen = set()
    for kind, tensor, chunk in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata in seen:
            continue
        seen.add(storage._cdata)
        sizes[kind] += storage.nbytes()
        if chunk is not None:
            chunks[chunk.number] = chunk
            in_chunk[chunk.number] = in_chunk.get(chunk.number, 0) + storage.nbytes()
    padding = sum(
        -(-in_chunk[number] * (chunk.length - chunk.used) // chunk.length)
        for number, chunk in chunks.items()
    )
    return {**sizes, "total": sum(sizes.values()), "padding": padding}


def count_by_tier(
    tensors: Iterable[StateTensor], tier_of: Callable[[Tensor], Tier | None]
) -> dict[str, dict[str, int]]:
    """Return, for each tier, a dict with the bytes of each of KINDS, and with "staging": 0. The
    caller sets the bytes of "staging".

    Args:
        tensors: As for `count_bytes`.
        tier_of: `Memory.tier_of`. Freed buffers, which have no tier, count as on the device.
    """
    in_tier: dict[Tier, list[StateTensor]] = {tier: [] for tier in Tier}
    for tensor in tensors:
        in_tier[tier_of(tensor.tensor) or Tier.DEVICE].append(tensor)
    sizes = {tier.value: count_bytes(of_tier) for tier, of_tier in in_tier.items()}
    kinds = {tier: {kind: of_tier[kind] for kind in KINDS} for tier, of_tier in sizes.items()}
    return {tier: of_tier | {"staging": 0} for tier, of_tier in kinds.items()}
