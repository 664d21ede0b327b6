"""Measurement of the collectives of a machine, for `optimus bench machine`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from optimus.bench.rank_timer import RankTimer
from optimus.distributed.collectives import (
    Group,
    all_gather,
    all_reduce_sum,
    all_to_all,
    receive,
    reduce_scatter_sum,
    send,
)
from optimus.distributed.groups import join_groups
from optimus.distributed.mesh import Mesh
from optimus.distributed.world import World

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
_SMALLEST, _RATIO = 1 << 10, 8
"""Bytes of the smallest buffer, and the factor from a buffer size to the next larger size."""
_RUNS, _FEW_RUNS = 32, 8
"""Number of runs of a collective: with a small buffer, and with a large buffer."""
_LARGE = 1 << 24
"""Minimum number of bytes of a large buffer."""
_COMPUTED = {"cpu": 768}
"""Number of rows and columns of the square matrices that a rank multiplies before a collective, by
type of device. The product takes about as long as the computation between two collectives of tp in
a training step."""
_COMPUTED_ON_DEVICE = 4096


class Message(NamedTuple):
    """A step of a ring collective, in which each rank sends a message of `num_bytes` bytes to the
    next rank. The step takes `seconds` seconds."""

    operation: str
    num_bytes: int
    seconds: float


class LevelRates(NamedTuple):
    """Measured values of a level of the network."""

    rates: dict[str, float]
    """Maps each of OPERATIONS to the bytes per second that a rank sends if the buffer has the
    largest size. The latency is subtracted from the time."""
    latency_s: float
    """Seconds of a ring step of an all_reduce with the smallest buffer."""
    messages: list[Message]
    """The ring step of each operation and buffer size, in ascending order of the sizes."""


def measure_network(bench: RankTimer, world: World, largest: int) -> dict[str, LevelRates]:
    """Return a dict that maps the name of each level of the network to the measured values of the
    level. The level "node" connects the ranks of a node, and the level "cluster" connects the
    nodes. A level with only one rank in each group is not measured. All groups of a level run the
    same collective at the same time.

    Args:
        bench: The timer.
        world: All ranks.
        largest: Bytes of the largest buffer.
    """
    if world.size == 1:
        return {}
    local = world.launch.local_world_size
    groups = join_groups(Mesh(pp=world.size // local, dp=local), world)
    levels = {"node": groups.over("dp"), "cluster": groups.over("pp")}
    return {
        name: _measure_level(bench, group, largest)
        for name, group in levels.items()
        if group.size > 1
    }


def _measure_level(bench: RankTimer, group: Group, largest: int) -> LevelRates:
    n, messages = group.size, list[Message]()
    sizes = [_SMALLEST]
    while sizes[-1] * _RATIO < largest:
        sizes.append(sizes[-1] * _RATIO)
    steps = dict.fromkeys(OPERATIONS, n - 1) | {"all_reduce": 2 * (n - 1), "send": 1}
    times: dict[str, list[_Times]] = {name: [] for name in OPERATIONS}
    for size in (*sizes, largest):
        for name, run in _collectives(bench, group, size).items():
            times[name].append(_measure(bench, run, size))
    for index, size in enumerate((*sizes, largest)):
        for name, of_sizes in times.items():
            # Ranks wait for the slowest rank and for threads of the backend. The time of this wait
            # does not depend on the buffer size, but differs much between runs. The mean over all
            # small sizes is therefore added to each size.
            waits = [each.after - each.alone for each in of_sizes if each.size < _LARGE]
            seconds = of_sizes[index].alone + max(0.0, statistics.fmean(waits))
            sent = size if name == "send" else size // n
            messages.append(Message(name, sent, seconds / steps[name]))
    of_name = {name: [m for m in messages if m.operation == name] for name in OPERATIONS}
    latency_s = of_name["all_reduce"][0].seconds
    rates = {}
    for name in OPERATIONS:
        largest_message = of_name[name][-1]
        seconds = largest_message.seconds
        # Subtract the latency, but at most half of the time, because other programs can disturb the
        # measurement of the latency.
        rates[name] = largest_message.num_bytes / max(seconds - latency_s, seconds / 2)
    return LevelRates(rates, latency_s, messages)


class _Times(NamedTuple):
    """Measured seconds of a collective."""

    size: int
    """Bytes of the buffer."""
    alone: float
    """Median time without a computation before the collective."""
    after: float
    """Mean time of the collective if it follows a computation. The time of the computation is
    subtracted. The mean includes the time in which threads of the backend wake up and ranks wait
    for the slowest rank."""


def _measure(bench: RankTimer, run: Callable[[], Any], size: int) -> _Times:
    """Measure a collective with buffers of `size` bytes."""
    runs = _RUNS if size < _LARGE else _FEW_RUNS
    length = _COMPUTED.get(bench.device.type, _COMPUTED_ON_DEVICE)
    a = torch.ones(length, length, device=bench.device)
    alone, _ = bench.together(run, runs)
    _, after = bench.together(run, runs, lambda: torch.mm(a, a))
    return _Times(size, alone, after)


def _collectives(bench: RankTimer, group: Group, size: int) -> dict[str, Callable[[], Any]]:
    """Return a dict that maps each of OPERATIONS to a function. The function runs the operation
    with buffers of `size` bytes on each rank."""
    dtype = torch.float32 if bench.device.type == "cpu" else torch.bfloat16
    length = max(1, size // dtype.itemsize // group.size) * group.size
    whole, other = (torch.zeros(length, dtype=dtype, device=bench.device) for _ in range(2))
    shard = other[: length // group.size]

    def pairs() -> None:
        """Exchange the buffers of ranks 2 i and 2 i + 1 of the group."""
        peer = group.rank ^ 1
        if peer < group.size:
            transfers = [send(whole, group, peer), receive(other, group, peer)]
            for transfer in transfers if group.rank < peer else reversed(transfers):
                transfer.wait()

    return {
        "all_reduce": partial(all_reduce_sum, whole, group),
        "all_gather": partial(all_gather, whole, shard, group),
        "reduce_scatter": partial(reduce_scatter_sum, shard, whole, group),
        "all_to_all": partial(all_to_all, other, whole, group),
        "send": pairs,
    }
