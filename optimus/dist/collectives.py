"""Collectives over a `Group`. In a group of one they cost nothing and change nothing.

Only SUM and MAX are used: averages are pre-scaled by the caller, since not every backend has AVG.
A peer that dies or a wait that runs out is raised as LostPeerError with the name of the operation.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as distributed

from optimus.errors import LostPeerError, one_line

Value = TypeVar("Value")


@dataclass(frozen=True)
class Group:
    """Some ranks that act together: how many, which of them this one is, and torch's handle."""

    size: int
    rank: int
    handle: Any = None


@contextlib.contextmanager
def _lost_peers(operation: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        text = one_line(error)
        waited = "timeout" in text.lower() or "timed out" in text.lower()
        why = "nobody answered within parallel.timeout_s" if waited else "another rank has ended"
        raise LostPeerError(f"{operation} did not complete: {why}") from error


def _collective(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with _lost_peers(function.__name__):
            return function(*args, **kwargs)

    return guarded


@_collective
def all_reduce_sum(tensor: torch.Tensor, group: Group) -> None:
    """In place: the sum of `tensor` over the group."""
    if group.size > 1:
        distributed.all_reduce(tensor, distributed.ReduceOp.SUM, group=group.handle)


@_collective
def all_reduce_max(tensor: torch.Tensor, group: Group) -> None:
    """In place: the elementwise maximum of `tensor` over the group."""
    if group.size > 1:
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX, group=group.handle)


@_collective
def all_gather(out: torch.Tensor, shard: torch.Tensor, group: Group) -> None:
    """Fill `out` [size * n, ...] with every rank's `shard` [n, ...], in rank order."""
    if group.size == 1:
        if out.data_ptr() != shard.data_ptr():
            out.copy_(shard)
        return
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(out, shard, group=group.handle)


@_collective
def all_to_all(out: torch.Tensor, sent: torch.Tensor, group: Group) -> None:
    """Equal pieces: piece r of `out` is piece `rank` of rank r's `sent` (both 1-D, size * n)."""
    if group.size == 1:
        out.copy_(sent)
        return
    distributed.all_to_all_single(out, sent, group=group.handle)


@_collective
def broadcast(tensor: torch.Tensor, group: Group, source: int = 0) -> None:
    """In place: `tensor` of the group's rank `source`, on every rank."""
    if group.size > 1:
        origin = distributed.get_global_rank(group.handle, source)
        distributed.broadcast(tensor, origin, group=group.handle)


@_collective
def broadcast_object(value: Value, group: Group) -> Value:
    """The first rank's small picklable `value`, on every rank."""
    if group.size == 1:
        return value
    box = [value]
    distributed.broadcast_object_list(
        box, distributed.get_global_rank(group.handle, 0), group=group.handle
    )
    return box[0]


@_collective
def all_gather_objects(value: Value, group: Group) -> list[Value]:
    """Every rank's small picklable `value`, in rank order."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    distributed.all_gather_object(values, value, group=group.handle)
    return values


@_collective
def barrier(group: Group) -> None:
    """Wait until every rank of the group is here."""
    if group.size > 1:
        distributed.barrier(group=group.handle)
