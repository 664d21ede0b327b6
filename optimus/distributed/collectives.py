"""Collectives over a `Group`. A group of a single rank does not communicate.

A collective of tensors on the meta device reports to the group's recorder, but does not
communicate.

A collective raises LostPeerError if another rank ends or the time limit is reached. Other errors
are raised unchanged, with a note that names the operation. Reductions use only SUM and MAX, because
not every backend supports AVG.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as distributed
from pydantic import TypeAdapter, ValidationError

from optimus import platform
from optimus.errors import ConfigError, LostPeerError, one_line
from optimus.observe.events import BUBBLE, NO_RECORDER, Recorder

Value = TypeVar("Value")
_MOST_BYTES = 1 << 31
"""Maximum size, in bytes, of an encoded object or a byte string that a rank sends."""
_SUM_UNIT = 2.0**-28
"""Unit of the fixed-point numbers in `exact_sums`: the int64 number n represents the value n *
_SUM_UNIT. An int64 can represent sums below 3e10 in magnitude."""


@dataclass(frozen=True)
class Group:
    """A set of ranks that communicate, and the index of this rank in the set.

    Attributes:
        size: Number of ranks.
        rank: Index of this rank within the group.
        handle: Weak reference to torch's process group; None if the group has no process group.
        axes: Names of the mesh axes along which the ranks differ, for error messages and recorders.
        recorder: Recorder that receives each collective of tensors over this group, and each
            message that this rank sends in the group.
    """

    size: int
    rank: int
    # The reference is weak, so that `end_world` ends the process group and its threads.
    handle: weakref.ref[distributed.ProcessGroup] | None = None
    axes: str = field(default="all ranks", compare=False)
    recorder: Recorder = field(default=NO_RECORDER, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the constructor and the arguments that copy and pickle use to copy this Group. The
        copy has no recorder."""
        # The recorder may have open files, which cannot be copied.
        return Group, (self.size, self.rank, self.handle, self.axes)

    @property
    def process_group(self) -> distributed.ProcessGroup:
        """torch's process group. `end_world` destroys the process group; from then on, this
        property raises AssertionError."""
        assert self.handle is not None, f"no process group over {self.axes}"
        process_group = self.handle()
        assert process_group is not None, f"the process group over {self.axes} has ended"
        return process_group


ALONE = Group(1, 0)


def group_of(
    process_group: distributed.ProcessGroup,
    axes: str = "all ranks",
    recorder: Recorder = NO_RECORDER,
) -> Group:
    """Return a Group with the ranks of the given torch process group."""
    size, rank = process_group.size(), process_group.rank()
    return Group(size, rank, weakref.ref(process_group), axes, recorder)


_observers: list[Callable[[torch.Tensor], None]] = []


@contextlib.contextmanager
def observing_contributions(observe: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Context manager. Within the context, `observe` is called with this rank's input tensor before
    each all-reduce, all-gather, reduce-scatter and all-to-all of tensors."""
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)


def _record(
    operation: str, group: Group, payload: torch.Tensor, contribution: torch.Tensor | None = None
) -> None:
    """Report an operation and the size of its `payload` to the group's recorder. Unless the
    operation is a send or a broadcast, call the functions of `observing_contributions` with
    `contribution` (default: `payload`), the input tensor of this rank."""
    group.recorder.collective(group.axes, operation, payload.nbytes)
    if operation in ("send", "broadcast"):
        return
    for observe in _observers:
        observe(payload if contribution is None else contribution)


_TIME_IS_UP = re.compile(r"timed?[ -]?out", re.IGNORECASE)
_PEER_IS_GONE = re.compile(
    r"connection|connect(FullMesh)? failed|closed by (remote )?peer|reset by peer|broken pipe"
    r"|remote (process|peer)|ncclRemoteError|ncclSystemError|unreachable|aborted|network"
    r"|heartbeat|no route to host|rank \d+ (is gone|failed|exited)",
    re.IGNORECASE,
)
"""Regular expression for the messages of gloo, NCCL, oneCCL and torch's store that report the loss
of another rank."""


def _why_lost(error: RuntimeError) -> str:
    """Return the reason why another rank is lost, as a clause for an error message; "" if `error`
    does not show that a rank is lost."""
    if isinstance(error, torch.OutOfMemoryError):
        return ""
    text = str(error)
    if _TIME_IS_UP.search(text):
        return "another rank did not respond within parallel.timeout_s"
    gone = isinstance(error, distributed.DistNetworkError) or _PEER_IS_GONE.search(text)
    return "another rank has ended" if gone else ""


@contextlib.contextmanager
def raising_lost_peers(operation: str, group: Group) -> Iterator[None]:
    """Context manager that converts a RuntimeError to a LostPeerError if the error shows that
    another rank is lost. Any other RuntimeError is raised again with a note that names
    `operation`. The group's recorder receives the phase of the operation."""
    recorder = group.recorder
    if recorder.records_phases:
        recorder.begin_phase(BUBBLE if operation == "receive" else group.axes)
    try:
        yield
    except RuntimeError as error:
        why = _why_lost(error)
        if not why:
            error.add_note(f"in {operation} over {group.axes}")
            raise
        raise LostPeerError(f"{operation} over {group.axes} did not complete: {why}") from error
    finally:
        if recorder.records_phases:
            recorder.end_phase()


def _collective(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group") or next(arg for arg in args if isinstance(arg, Group))
        if group.size == 1:
            return function(*args, **kwargs)
        with raising_lost_peers(function.__name__, group):
            return function(*args, **kwargs)

    return guarded


class Transfer:
    """Handle of a point-to-point message or a collective in progress. The handle keeps the tensors
    of the operation alive.

    Args:
        tensor: The result, or the tensor that is sent.
        work: torch's `Work` handle; None if there is nothing to wait for.
        group: The ranks that take part in the operation.
        operation: Name of the operation, for error messages.
        inputs: Other tensors that the operation reads.
    """

    def __init__(
        self, tensor: torch.Tensor, work: Any, group: Group, operation: str, *inputs: torch.Tensor
    ) -> None:
        self.tensor, self._work, self._group, self._operation = tensor, work, group, operation
        self._inputs = inputs

    def is_done(self) -> bool:
        """Return True if the operation is complete, so that `wait` returns at once."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> torch.Tensor:
        """Wait until the operation is complete. Return `tensor`, which can then be read and
        overwritten.

        Raises:
            LostPeerError: Another rank has ended or does not answer.
        """
        if self._work is not None:
            with raising_lost_peers(self._operation, self._group):
                self._work.wait()
            self._work, self._inputs = None, ()
        return self.tensor


@_collective
def all_reduce_sum(tensor: torch.Tensor, group: Group, async_op: bool = False) -> Transfer:
    """Replace `tensor` by its elementwise sum over the ranks of the group.

    With `async_op`, do not wait for the operation: the sum is ready after `wait` of the returned
    Transfer. All ranks of a group must start collectives in the same order.
    """
    work = None
    if group.size > 1:
        work = _all_reduce(tensor, distributed.ReduceOp.SUM, group, async_op)
    return Transfer(tensor, work, group, "all_reduce_sum")


@_collective
def all_reduce_max(tensor: torch.Tensor, group: Group) -> None:
    """Replace `tensor` by its elementwise maximum over the ranks of the group."""
    if group.size > 1:
        _all_reduce(tensor, distributed.ReduceOp.MAX, group)


def _all_reduce(tensor: torch.Tensor, operator: Any, group: Group, async_op: bool = False) -> Any:
    _record("all_reduce", group, tensor)
    if tensor.is_meta:
        return None
    return distributed.all_reduce(tensor, operator, group=group.process_group, async_op=async_op)


def greatest(value: int | torch.Tensor, group: Group, device: torch.device) -> int:
    """Return the maximum of `value` over the ranks of the group.

    `value` is an int, or an int64 tensor [1] on `device`. The tensors of the collective are on
    `device`.
    """
    flag = value if isinstance(value, torch.Tensor) else torch.tensor([value], device=device)
    all_reduce_max(flag, group)
    return int(flag)


def exact_sums(terms: list[torch.Tensor], group: Group) -> list[float]:
    """Return the sum of each tensor's values over all ranks of the group.

    The results have the same bits for any order of the additions: each value is rounded to a
    multiple of 2^-28 before the exact addition.

    Args:
        terms: 1-D tensors of finite values. All ranks have the same number of tensors; the lengths
            of the tensors can differ between ranks.
        group: Group of the ranks.
    """
    units = [(values.double() / _SUM_UNIT).round().to(torch.int64).sum() for values in terms]
    # A rank without values may have an empty tensor on the CPU, which NCCL cannot send.
    device = _device_of(group.process_group) if group.size > 1 else units[0].device
    total = torch.stack([count.to(device) for count in units])
    all_reduce_sum(total, group)
    return [count * _SUM_UNIT for count in total.tolist()]


@_collective
def all_gather(
    out: torch.Tensor, shard: torch.Tensor, group: Group, async_op: bool = False
) -> Transfer:
    """Fill `out` [group.size * n, ...] with every rank's `shard` [n, ...], in rank order.

    With `async_op`, do not wait: `out` is complete after `wait` of the returned Transfer.
    """
    work = None
    if group.size > 1:
        _record("all_gather", group, out, shard)
        if not out.is_meta:
            work = _gather_into(out, shard, group, async_op)
    elif out.data_ptr() != shard.data_ptr():
        out.copy_(shard)
    return Transfer(out, work, group, "all_gather", shard)


def _gather_into(
    out: torch.Tensor, shard: torch.Tensor, group: Group, async_op: bool = False
) -> Any:
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    return gather(out, shard, group=group.process_group, async_op=async_op)


@_collective
def all_to_all(out: torch.Tensor, sent: torch.Tensor, group: Group) -> None:
    """Send slice r of `sent` to rank r of the group, and fill slice r of `out` with data from rank
    r, for all ranks r.

    Both tensors are 1-D and consist of `group.size` slices of equal length.
    """
    if group.size == 1:
        out.copy_(sent)
        return
    _record("all_to_all", group, sent)
    if not out.is_meta:
        distributed.all_to_all_single(out, sent, group=group.process_group)


@_collective
def all_to_all_rows(
    rows: torch.Tensor, sent: list[int], received: list[int], group: Group
) -> torch.Tensor:
    """Send rows to all ranks of the group, and receive rows from them.

    Args:
        rows: Rows [sum(sent), ...] to send, ordered by destination rank.
        sent: Number of rows to send to each rank.
        received: Number of rows to receive from each rank.
        group: The ranks that take part.

    Returns:
        The received rows [sum(received), ...], ordered by source rank.
    """
    if group.size == 1:
        return rows.clone()
    _record("all_to_all", group, rows)
    out = rows.new_empty(sum(received), *rows.shape[1:])
    if not out.is_meta:
        distributed.all_to_all_single(out, rows, received, sent, group=group.process_group)
    return out


@_collective
def reduce_scatter_sum(
    out: torch.Tensor, whole: torch.Tensor, group: Group, async_op: bool = False
) -> Transfer:
    """Sum `whole` [group.size * n, ...] over the ranks of the group.

    Fill `out` [n, ...] with this rank's shard of the sum. With `async_op`, do not wait: `out` is
    complete after `wait` of the returned Transfer.
    """
    work = None
    if group.size > 1:
        _record("reduce_scatter", group, whole)
        scatter = (
            getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
        )
        if not out.is_meta:
            total, handle = distributed.ReduceOp.SUM, group.process_group
            work = scatter(out, whole, total, group=handle, async_op=async_op)
    elif out.data_ptr() != whole.data_ptr():
        out.copy_(whole)
    return Transfer(out, work, group, "reduce_scatter_sum", whole)


@_collective
def broadcast(tensor: torch.Tensor, group: Group, source: int = 0) -> None:
    """Replace `tensor` on every rank by the tensor of the group's rank `source`."""
    if group.size > 1:
        _record("broadcast", group, tensor)
        origin = distributed.get_global_rank(group.process_group, source)
        distributed.broadcast(tensor, origin, group=group.process_group)


def ranks_of(group: Group) -> list[int]:
    """Return the global ranks of a group with a `handle`, ordered by their index in the group."""
    return distributed.get_process_group_ranks(group.process_group)


@_collective
def broadcast_bytes(data: bytes, group: Group) -> bytes:
    """Send the `data` of the group's first rank to the other ranks, and return the first rank's
    `data` on every rank. The argument `data` of the other ranks is ignored."""
    if group.size == 1:
        return data
    process_group = group.process_group
    source = distributed.get_global_rank(process_group, 0)
    size = torch.tensor([len(data)], device=_device_of(process_group))
    distributed.broadcast(size, source, group=process_group)
    _check_sizes([int(size)], group)
    content = _padded(data if group.rank == 0 else b"", int(size), size.device)
    if len(content):
        distributed.broadcast(content, source, group=process_group)
    return content.cpu().numpy().tobytes()


@_collective
def gather_bytes(data: bytes, group: Group) -> list[bytes]:
    """Send every rank's `data` to the group's first rank. Return the list of all `data`, in rank
    order, on the first rank, and [] on the other ranks.

    Every `data` is padded to the length of the longest `data`. If only one rank's `data` is long,
    most of the traffic is padding.
    """
    if group.size == 1:
        return [data]
    process_group = group.process_group
    sizes = _all_sizes(data, group)
    content = _padded(data, max(sizes), _device_of(process_group))
    received = [torch.empty_like(content) for _ in sizes] if group.rank == 0 else None
    if len(content):
        target = distributed.get_global_rank(process_group, 0)
        distributed.gather(content, received, target, group=process_group)
    return _unpadded(received or [], sizes)


@_collective
def broadcast_object(value: Value, group: Group, kind: Any) -> Value:
    """Send the `value` of the group's first rank to the other ranks, and return the first rank's
    `value` on every rank.

    Args:
        value: a value of the type None, bool, int, float, str or Path, or a list, tuple, mapping
            with str keys, NamedTuple or dataclass of such values. Only the value of the first rank
            is used.
        group: The ranks that take part.
        kind: Type that the received value must have.

    Raises:
        ConfigError: The received value does not have the type `kind`.
    """
    if group.size == 1:
        return value
    data = broadcast_bytes(encode_object(value) if group.rank == 0 else b"", group)
    return _received(data, kind, 0, group)


@_collective
def all_gather_objects(value: Value, group: Group, kind: Any) -> list[Value]:
    """Gather `value` from every rank, and return the list of values, in rank order, on every rank.
    `value` and `kind` are as for `broadcast_object`."""
    if group.size == 1:
        return [value]
    data = encode_object(value)
    sizes = _all_sizes(data, group)
    content = _padded(data, max(sizes), _device_of(group.process_group))
    received = content.new_empty(len(sizes) * len(content))
    _gather_into(received, content, group)
    values = _unpadded(received.view(len(sizes), -1), sizes)
    return [_received(data, kind, rank, group) for rank, data in enumerate(values)]


def encode_object(value: object) -> bytes:
    """Encode a value as JSON. Non-finite floats are encoded as the words NaN, Infinity and
    -Infinity."""
    # JSON instead of pickle, so that no rank executes code that it receives.
    text = json.dumps(value, default=_plain, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="replace")  # a file name need not be valid UTF-8


def decode_object(data: bytes, kind: Any) -> Any:
    """Decode a value of type `kind` from JSON. A value of another type is not converted to `kind`.

    Raises:
        ValueError: The value does not have the type `kind`.
    """
    return _type_adapter(kind).validate_json(data, strict=True)


_type_adapter = functools.cache(TypeAdapter)


def _plain(value: object) -> object:
    """Convert a Path, mapping or dataclass to a str or dict, which JSON can encode."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    assert dataclasses.is_dataclass(value), f"{type(value).__name__} is not sent between ranks"
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _received(data: bytes, kind: Any, rank: int, group: Group) -> Any:
    try:
        return decode_object(data, kind)
    except ValidationError as error:
        raise ConfigError(
            f"rank {rank} of the group over {group.axes} sent a value that is not of type "
            f"{getattr(kind, '__name__', kind)}: either ranks have different versions of Optimus, "
            "or a process of another run has joined the group; install the same version on all "
            "machines "
            f"({one_line(error)[:200]})"
        ) from None


def _device_of(process_group: distributed.ProcessGroup) -> torch.device:
    return platform.device_of_backend(distributed.get_backend(process_group))


def _all_sizes(data: bytes, group: Group) -> list[int]:
    """Return the length in bytes of the `data` of each rank, in rank order. All ranks of `group`
    must call this function."""
    size = torch.tensor([len(data)], device=_device_of(group.process_group))
    sizes = size.new_empty(group.size)
    _gather_into(sizes, size, group)
    _check_sizes(sizes.tolist(), group)
    return sizes.tolist()


def _check_sizes(sizes: Sequence[int], group: Group) -> None:
    """Raise ConfigError if a rank's message has a negative size or more than _MOST_BYTES bytes."""
    for rank, size in enumerate(sizes):
        if not 0 <= size <= _MOST_BYTES:
            raise ConfigError(
                f"rank {rank} of {group.size} announces a message of {size:,} bytes, a size that "
                "no rank of this version sends; start all ranks with the same version of Optimus, "
                "on a network that no other program can reach"
            )


def _padded(data: bytes, size: int, device: torch.device) -> torch.Tensor:
    content = torch.zeros(size, dtype=torch.uint8)
    if data:
        content[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return content.to(device)


def _unpadded(rows: Iterable[torch.Tensor], sizes: Sequence[int]) -> list[bytes]:
    return [row[:size].cpu().numpy().tobytes() for row, size in zip(rows, sizes, strict=False)]


@_collective
def barrier(group: Group) -> None:
    """Wait until every rank of the group has called `barrier`."""
    if group.size > 1:
        distributed.barrier(group=group.process_group)


@_collective
def send(tensor: torch.Tensor, group: Group, to: int) -> Transfer:
    """Start to send `tensor` to the group's rank `to`, and return the Transfer.

    Messages between two ranks arrive in the order in which they are sent.
    """
    _record("send", group, tensor)
    peer = distributed.get_global_rank(group.process_group, to)
    return Transfer(tensor, distributed.isend(tensor, peer, group.process_group), group, "send")


@_collective
def receive(tensor: torch.Tensor, group: Group, source: int) -> Transfer:
    """Start to receive a message from the group's rank `source`, and return the Transfer. The
    message overwrites `tensor`."""
    peer = distributed.get_global_rank(group.process_group, source)
    return Transfer(tensor, distributed.irecv(tensor, peer, group.process_group), group, "receive")
