"""Times of collectives, computed from the levels of a machine's network and the ranks of the group.

As in training, all process groups along the same axes communicate at the same time. If k of the S
ranks of a domain belong to one group, the domain has ranks of S / k groups, and these groups share
the links that leave the domain. If the order of the hosts is given, process groups may have
different times. The time of the slowest group is then used for all groups.

The number of a rank shows its domains: a domain of a level has the ranks with equal `rank //
link.ranks`. If the order of the hosts is given, `optimus.planner.topology` assigns the numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy

from optimus.config.hardware import Level
from optimus.errors import ConfigError, counted

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
Algorithm = Literal["ring", "halving", "hierarchical"]


class Link(NamedTuple):
    """Rates of one level of the network, from the machine file (`Level`)."""

    name: str
    ranks: int
    """Number of ranks in a domain of the level; 0: all ranks."""
    rate: float
    """Bytes per second that each rank sends over the links of this level while all ranks send. The
    links connect the domains of the previous level."""
    step_s: float = 0.0
    """Latency of a step of a collective in seconds."""
    rates: tuple[tuple[str, float], ...] = ()
    """Pairs (operation, rate) of the operations that do not have the rate `rate`."""
    taper: float = 1.0
    """Share of the rate of a rank's port that remains if all ranks send. `rate` and `rates` are
    already multiplied by this share."""
    messages: tuple[tuple[str, float, float], ...] = ()
    """Measured steps as tuples (operation, bytes of the message, seconds), in ascending order of
    bytes."""

    def seconds(self, size_bytes: float) -> float:
        """Return the seconds of a step with a message of `size_bytes`. `messages` must have the
        steps of a single operation."""
        if not self.messages:
            return size_bytes / self.rate + self.step_s
        (_, first, least), (_, last, most) = self.messages[0], self.messages[-1]
        if size_bytes <= first:
            return least
        for (_, low, low_s), (_, high, high_s) in pairwise(self.messages):
            if size_bytes <= high:
                share = math.log(size_bytes / low) / math.log(high / low)
                return low_s * (high_s / low_s) ** share
        return most * size_bytes / last


Links = tuple[Link, ...]
"""Levels of a network, from the fastest to the slowest."""


def links_of(levels: Sequence[Level]) -> Links:
    """Return a Link for each level of a machine file. The rates of a Link are the rates of the
    level multiplied by the taper of the level."""
    links = []
    for level in levels:
        taper = 1.0 if level.taper is None else level.taper.value
        rates = tuple((name, taper * figure.value) for name, figure in level.operations.items())
        messages = tuple(
            (m.operation, taper * m.num_bytes, m.seconds.value) for m in level.messages
        )
        links.append(
            Link(level.name, level.ranks, level.rate, level.step_s, rates, taper, messages)
        )
    return tuple(links)


@lru_cache(maxsize=256)
def _links_for(operation: str, links: Links) -> Links:
    """Return the links for one operation: `rate` is the rate of this operation, and `messages` has
    only the measured steps of this operation."""
    return tuple(
        link._replace(
            rate=dict(link.rates).get(operation, link.rate),
            rates=(),
            messages=tuple(m for m in link.messages if m[0] == operation),
        )
        for link in links
    )


def of_ports(links: Links) -> Links:
    """Return the links without the taper: the rates are those of the port of a rank. A rank reaches
    these rates if few other ranks of its domain send."""
    return tuple(
        link._replace(
            rate=link.rate / link.taper,
            rates=tuple((name, rate / link.taper) for name, rate in link.rates),
            taper=1.0,
        )
        for link in links
    )


class GroupPath(NamedTuple):
    """Links of one level that the ranks of a group use."""

    link: Link
    domains: int
    """Largest number of domains of the previous level that have ranks of the group and are in the
    same domain of this level."""
    per_domain: float
    """Minimum of a / b over the domains of the previous level that have ranks of the group. Here, a
    is the number of these ranks in a domain, and b is the number of these ranks that send to
    another domain in a ring. If the ranks of each domain are consecutive in the ring, b is 1."""


@lru_cache(maxsize=4096)
def paths_of(ranks: tuple[int, ...], links: Links) -> tuple[GroupPath, ...]:
    """Return the levels that a group of `ranks` crosses, from the fastest level.

    Raises:
        ConfigError: `links` is empty, or a domain of its last level does not hold all ranks.
    """
    remedy = "add it with its source, or measure it with optimus bench machine on several nodes"
    if not links:
        raise ConfigError(f"the machine file has no levels; {remedy}")
    levels = _levels_of(ranks, tuple(link.ranks for link in links))
    if levels is not None:
        return tuple(GroupPath(links[n], domains, smallest) for n, domains, smallest in levels)
    raise ConfigError(
        f"levels of the machine file: the last level, {links[-1].name}, connects only "
        f"{counted(links[-1].ranks, 'rank')}, but process groups of the plan need a further level; "
        f"{remedy}"
    )


@lru_cache(maxsize=4096)
def _levels_of(
    ranks: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[tuple[int, int, float], ...] | None:
    """Return a tuple for each level that a group crosses: the index of the level, and the fields
    `domains` and `per_domain` of the `GroupPath`. Return None if a domain of the last level does
    not hold all ranks. `sizes` has, for each level, the number of ranks in a domain; 0 means all
    ranks."""
    levels, size = [], 1
    for level, outer_size in enumerate(sizes):
        outer: dict[int, dict[int, int]] = {}
        for rank in ranks:
            inner = outer.setdefault(rank // outer_size if outer_size else 0, {})
            inner[rank // size] = inner.get(rank // size, 0) + 1
        domains = max(len(inner) for inner in outer.values())
        if domains > 1:
            edges = pairwise((*ranks, ranks[0]))
            sends = Counter(a // size for a, b in edges if a // size != b // size)
            counts = (pair for inner in outer.values() for pair in inner.items())
            levels.append((level, domains, min(count / sends[n] for n, count in counts)))
        if len(outer) == 1:
            return tuple(levels)
        size = outer_size
    return None


@lru_cache(maxsize=4096)
def loads_of(
    operation: str, ranks: tuple[int, ...], links: Links, algorithm: Algorithm = "ring"
) -> tuple[float, ...]:
    """Return, for each level, the share of the time for which a large collective uses the links of
    the level. The share is t / s, where t is the time of the collective if only the rate of this
    level limits it, and s is the actual time. The arguments are those of `collective_s`."""

    def seconds(limiting: int | None) -> float:
        # Measured steps are removed, because an unlimited rate would not change their times.
        rates = tuple(
            link._replace(messages=())
            if limiting in (None, index)
            else link._replace(rate=_UNLIMITED, rates=(), messages=())
            for index, link in enumerate(links)
        )
        return collective_s(operation, _LARGE, ranks, rates, algorithm)

    whole = seconds(None)
    shares = (seconds(index) / whole for index in range(len(links)))
    return tuple(round(share, 6) for share in shares)  # latency is a tiny share


_UNLIMITED = 1e30
_LARGE = 1e12
"""Bytes of a collective that is so large that its latency is negligible."""


def collective_s(
    operation: str,
    size_bytes: float,
    ranks: tuple[int, ...],
    links: Links,
    algorithm: Algorithm = "ring",
) -> float:
    """Return the seconds that a collective takes.

    Args:
        operation: The operation. `send` is a transfer from the first rank to the last rank.
        size_bytes: Bytes of a rank's full buffer: the output of all_gather, and the input of the
            other operations.
        ranks: Ranks of the process group.
        links: Levels of the network.
        algorithm: Algorithm of all_reduce, all_gather and reduce_scatter.
    """
    if len(ranks) == 1:
        return 0.0
    links = _links_for(operation, links)
    paths = paths_of(ranks, links)
    if operation == "send":
        return paths[-1].link.seconds(size_bytes)
    if operation == "all_to_all":
        return _all_to_all(size_bytes, len(ranks), paths)
    halves = 2 if operation == "all_reduce" else 1
    if operation == "broadcast":  # a pipelined ring: the whole buffer crosses each edge
        return size_bytes / _ring_rate(paths) + (len(ranks) - 1) * _slowest_step(paths)
    if algorithm == "ring":
        return halves * _ring(size_bytes, len(ranks), paths)
    if algorithm == "halving":
        return halves * _halving(size_bytes, ranks, links)
    return halves * _hierarchical(size_bytes, ranks, links)


def slowest_s(
    operation: str,
    size_bytes: float,
    groups: Sequence[tuple[int, ...]],
    links: Links,
    algorithm: Algorithm = "ring",
) -> float:
    """Return the seconds of a collective in the slowest of the process groups `groups`. The other
    arguments are those of `collective_s`."""
    return max(collective_s(operation, size_bytes, ranks, links, algorithm) for ranks in groups)


def _ring_rate(paths: Sequence[GroupPath]) -> float:
    """Return the bytes per second that each rank of a ring sends to the next rank.

    If a domain has k ranks of the group, the ranks that send to another domain can use the links of
    all k ranks. The slowest level determines the rate of the ring.
    """
    rate = math.inf
    for path in paths:
        rate = min(rate, path.per_domain * path.link.rate)
    return rate


def _slowest_step(paths: Sequence[GroupPath]) -> float:
    return max(path.link.step_s for path in paths)


def _ring(size_bytes: float, n: int, paths: Sequence[GroupPath]) -> float:
    """Return the seconds of a reduce_scatter or all_gather in a ring of n ranks: n - 1 steps, in
    each of which a rank sends 1/n of the buffer."""
    step_s = size_bytes / n / _ring_rate(paths) + _slowest_step(paths)
    if all(path.link.messages for path in paths):
        step_s = max(path.link.seconds(size_bytes / n / path.per_domain) for path in paths)
    return (n - 1) * step_s


def halving_steps(n: int) -> Iterator[tuple[list[int], list[int], float]]:
    """Yield the steps of a reduce_scatter by recursive halving: the indices of senders and
    receivers, and the share of the buffer that each sender sends. An all_gather has the same steps
    in reverse.

    The steps are those of the all-reduce of oneCCL and MPICH (Rabenseifner 2004, doi
    10.1007/978-3-540-24685-5_1). In the first step, ranks at distance 1 exchange half of the
    buffer. In each further step, the distance doubles and the number of bytes halves. If n is not a
    power of two, the additional ranks first send their buffers to a neighbour.
    """
    power = 1 << (n.bit_length() - 1)
    extra = n - power
    if extra:
        yield list(range(0, 2 * extra, 2)), list(range(1, 2 * extra, 2)), 1.0
    active = [*range(1, 2 * extra, 2), *range(2 * extra, n)]
    distance, share = 1, 0.5
    while distance < power:
        yield active, [active[i ^ distance] for i in range(power)], share
        distance, share = 2 * distance, share / 2


def _halving(size_bytes: float, ranks: tuple[int, ...], links: Links) -> float:
    """Return the seconds of a reduce_scatter by recursive halving."""
    steps = _levels_of_steps(ranks, tuple(link.ranks for link in links))
    return sum(
        max(links[level].seconds(share * size_bytes) for level in levels) for share, levels in steps
    )


@lru_cache(maxsize=1024)
def _levels_of_steps(
    ranks: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[tuple[float, tuple[int, ...]], ...]:
    """Return, for each step of `halving_steps`, the share of the buffer and the indices of the
    levels that connect senders with their receivers. `sizes` has, for each level, the number of
    ranks in a domain; 0 means all ranks."""
    members, steps = numpy.array(ranks), []
    for senders, receivers, share in halving_steps(len(ranks)):
        a, b = members[senders], members[receivers]
        same = numpy.stack([a // size == b // size if size else a == a for size in sizes])
        steps.append((share, tuple(numpy.unique(same.argmax(axis=0)).tolist())))
    return tuple(steps)


def _hierarchical(size_bytes: float, ranks: tuple[int, ...], links: Links) -> float:
    """Return the seconds of a reduce_scatter that communicates at one level after the other, from
    the fastest to the slowest. At each level, d domains exchange shards in a ring. The buffer of a
    rank then has 1/d of the previous bytes."""
    seconds, sent = 0.0, size_bytes
    for d, rings in _rings_by_level(ranks, links):
        seconds += max(_ring(sent, d, paths) for paths in rings)
        sent /= d
    return seconds


@lru_cache(maxsize=1024)
def _rings_by_level(
    ranks: tuple[int, ...], links: Links
) -> tuple[tuple[int, frozenset[tuple[GroupPath, ...]]], ...]:
    """Return, for each level at which domains exchange shards, the number of ranks in a ring and
    the different paths of the rings. A level is left out if each of its domains has a single rank,
    or if its domains have different numbers of ranks. In the latter case, the rings of the next
    level cross both levels."""
    levels, members = [], ranks
    for link in links:
        rings: dict[int, list[int]] = {}
        for rank in members:
            rings.setdefault(rank // link.ranks if link.ranks else 0, []).append(rank)
        sizes = {len(ring) for ring in rings.values()}
        if sizes == {1} or len(sizes) > 1:
            continue
        paths = frozenset(paths_of(tuple(ring), links) for ring in rings.values())
        levels.append((sizes.pop(), paths))
        members = tuple(ring[0] for ring in rings.values())
    return tuple(levels)


def _all_to_all(size_bytes: float, n: int, paths: Sequence[GroupPath]) -> float:
    """Return the seconds of an all_to_all, in which a rank sends 1/n of its buffer to each of n
    ranks. The levels transfer at the same time, so the slowest level determines the time; the
    latencies of all levels add up."""
    reached, seconds, latency_s = 1, 0.0, 0.0
    for path in paths:
        new = min(n, reached * path.domains) - reached
        if path.link.messages:
            seconds = max(seconds, new * path.link.seconds(size_bytes / n))
        else:
            seconds = max(seconds, size_bytes * new / n / path.link.rate)
            latency_s += new * path.link.step_s
        reached += new
    return seconds + latency_s
