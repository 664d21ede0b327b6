"""Process groups for an order of the hosts, and the bytes that the collectives of these groups send
between nodes and between groups of nodes.

A group of nodes is a set of nodes with few links to other groups, such as a rack in a dragonfly
network. All functions are pure. The links that a collective uses depend on the ranks of its process
group, the order of the hosts and the algorithm:

- `ring`: each rank sends to the next rank of the process group.
- `halving`: the steps of `optimus.planner.collectives.halving_steps`, in which neighbours exchange
  most bytes.
- `hierarchical`: a ring in each node, then rings of the ranks with equal indices in their nodes,
  and the same for groups of nodes. A level is left out if its domains have different numbers of
  ranks of the process group.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, get_args

import numpy
from numpy import ndarray

from optimus.config.axes import AXES, Axes
from optimus.distributed.mesh import Mesh
from optimus.planner.collectives import Algorithm, halving_steps

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


@dataclass(frozen=True)
class Topology:
    """Nodes and groups of nodes of the ranks of a run. Consecutive ranks are on the same node or on
    consecutive nodes."""

    ranks_per_node: int
    groups: tuple[int, ...] | None = None
    """Number of the group of each node; None if the groups are unknown."""
    sizes: tuple[int, ...] = ()
    """Number of ranks in a domain of each level of the network, from the smallest domains to the
    largest. If the domains of the last level have more ranks than a node, these domains are the
    groups of nodes."""

    def domains(self, ranks: ndarray) -> list[ndarray]:
        """Return the node of each rank and, if the groups are known, the group of each rank, as
        arrays with the shape of `ranks`."""
        nodes = ranks // self.ranks_per_node
        return [nodes] if self.groups is None else [nodes, self._groups[nodes]]

    @cached_property
    def _groups(self) -> ndarray:
        return numpy.array(self.groups)

    def positions(self) -> ndarray | None:
        """Return a number for each rank, from which the domains of the rank follow: at each level,
        the index of the domain is the number // (number of ranks in a domain).

        Returns:
            int64 [ranks]; None if the groups are unknown or the network has no level for groups. If
            the hosts fill one group completely after the other, the result is 0, 1, 2, ...
        """
        if self.groups is None or not self.sizes or self.sizes[-1] <= self.ranks_per_node:
            return None
        free: dict[int, int] = {}  # from a group to its next free number
        nodes = []
        for group in self.groups:
            nodes.append(free.setdefault(group, len(free) * self.sizes[-1]))
            free[group] += self.ranks_per_node
        return numpy.add.outer(nodes, numpy.arange(self.ranks_per_node)).ravel()


class Crossing(NamedTuple):
    """Bytes that all ranks send in a collective."""

    sent: float
    nodes: float
    """Bytes sent to another node."""
    groups: float | None
    """Bytes sent to another group of nodes; None if the groups are unknown."""

    def plus(self, other: Crossing) -> Crossing:
        """Return the sums of the fields of both crossings."""
        groups = None if self.groups is None else self.groups + (other.groups or 0.0)
        return Crossing(self.sent + other.sent, self.nodes + other.nodes, groups)


def groups_of_hosts(hosts: Sequence[str], pattern: str) -> tuple[int, ...] | None:
    """Return the number of the group of each host, counted from 0 in the order of `hosts`.

    Args:
        hosts: Names of hosts.
        pattern: Regular expression that matches a host name up to its first dot. The first group of
            the expression matches the name of the group of nodes. Empty if host names do not
            contain the group.

    Returns:
        The numbers; None if the name of a host does not match.
    """
    names = [_group_name(host, pattern) for host in hosts]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return None if None in numbers else tuple(numbers[name] for name in names)


def first_without_group(hosts: Sequence[str], pattern: str) -> str:
    """Return the first host whose name does not contain the group. The arguments are those of
    `groups_of_hosts`, which must return None for these arguments."""
    return next(host for host in hosts if _group_name(host, pattern) is None)


def _group_name(host: str, pattern: str) -> str | None:
    match = re.fullmatch(pattern, host.partition(".")[0]) if pattern else None
    return match and match[1]


STAGES = "stages"
"""Key in the result of `placed_groups` for the ranks with each pp index."""


def placed_groups(
    mesh: Mesh, topology: Topology, positions: ndarray, axes: Iterable[Axes]
) -> dict[str, Sequence[tuple[int, ...]]]:
    """Return a dict from the names of each of `axes`, such as "dp x ep", to process groups; and
    from `STAGES` to the ranks with each pp index.

    Ranks have the numbers of `Topology.positions`. If the ranks of several process groups share
    domains in the same way, the result has only the first of these process groups.
    """
    groups: dict[str, Sequence[tuple[int, ...]]] = {
        " x ".join(names): _distinct(positions[_process_groups(mesh, names)], topology.sizes)
        for names in axes
    }
    return groups | {STAGES: tuple(map(tuple, positions.reshape(mesh.pp, -1).tolist()))}


def _distinct(rows: ndarray, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return rows of ranks. If the ranks of several rows share domains in the same way, the result
    has only the first of these rows. `sizes` is `Topology.sizes`."""
    by_pattern: dict[tuple[int, ...], tuple[int, ...]] = {}
    for row in rows.tolist():
        pattern: list[int] = []
        for size in sizes:
            numbers: dict[int, int] = {}
            pattern += [numbers.setdefault(rank // size, len(numbers)) for rank in row]
        by_pattern.setdefault(tuple(pattern), tuple(row))
    return tuple(by_pattern.values())


def all_reduce_crossing(
    mesh: Mesh,
    axes: Axes,
    topology: Topology,
    algorithm: Algorithm,
    stage_bytes: Sequence[float] | None = None,
) -> Crossing:
    """Return the bytes that all ranks send in an all-reduce over `axes`.

    A reduce-scatter and an all-gather of the same buffer together send the same bytes over the same
    links.

    Args:
        mesh: Sizes of the axes.
        axes: Axes of the process groups, without pp.
        topology: Nodes and groups of the ranks.
        algorithm: Algorithm of the collective.
        stage_bytes: For each pp index, the bytes of a rank's buffer; by default 1 byte.
    """
    members = _process_groups(mesh, axes)
    per_stage = numpy.ones(mesh.pp) if stage_bytes is None else numpy.asarray(stage_bytes, float)
    sizes = numpy.repeat(per_stage, len(members) // mesh.pp)  # pp is the outermost axis
    if algorithm == "hierarchical":
        edges = _hierarchical(members, sizes, topology)
    else:
        make = _ring if algorithm == "ring" else _halving
        steps = make(members.shape[1])
        edges = (
            (members[:, a], members[:, b], fraction * sizes[:, None]) for a, b, fraction in steps
        )
    return _count(edges, topology)


def pipeline_crossing(
    mesh: Mesh, virtual_stages: int, topology: Topology, size_bytes: float = 1.0
) -> Crossing:
    """Return the bytes that all ranks send to neighbouring stages for one microbatch: for each
    boundary between stages, an activation of `size_bytes` and its gradient."""
    columns = _process_groups(mesh, ("pp",))
    if mesh.pp == 1:
        return Crossing(0.0, 0.0, None if topology.groups is None else 0.0)
    following = numpy.roll(columns, -1, axis=1)
    sizes = numpy.full(columns.shape, size_bytes * virtual_stages)
    sizes[:, -1] -= size_bytes  # the last stage sends no activation
    return _count(iter([(columns, following, sizes), (following, columns, sizes)]), topology)


def best_order(
    mesh: Mesh, hosts: Sequence[str], groups: Sequence[int], ranks_per_node: int
) -> tuple[list[str], tuple[int, ...]]:
    """Return a pair: the hosts in an order that keeps pipeline stages within groups of nodes, and
    the group of each host in this order.

    Ranks of a stage have consecutive numbers, and most bytes are reduced within a stage. First,
    each group takes as many whole stages as its nodes can hold. The remaining nodes follow, group
    by group. The order of the hosts within a group is kept.
    """
    block = max(1, mesh.world_size // mesh.pp // ranks_per_node)
    of_group: dict[int, list[int]] = defaultdict(list)
    for node, group in enumerate(groups):
        of_group[group].append(node)
    whole: list[int] = []
    rest: list[list[int]] = []
    for nodes in of_group.values():
        filled = len(nodes) // block * block
        whole += nodes[:filled]
        rest.append(nodes[filled:])
    rest.sort(key=len, reverse=True)  # large remainders first, so that few stages are divided
    order = whole + [node for nodes in rest for node in nodes]
    return [hosts[node] for node in order], tuple(groups[node] for node in order)


def _process_groups(mesh: Mesh, axes: Axes) -> ndarray:
    """Return the ranks of all process groups along `axes` as an array [number of groups, ranks of a
    group], in rank order."""
    ranks = numpy.arange(mesh.world_size).reshape(mesh)
    names = list(AXES)
    inner = [names.index(axis) for axis in names if axis in axes]
    outer = [index for index in range(len(names)) if index not in inner]
    return ranks.transpose(outer + inner).reshape(-1, mesh.size_of(axes))


_Edges = Iterator[tuple[ndarray, ndarray, ndarray]]
"""Triples of arrays: sending ranks, receiving ranks, and bytes."""


def _count(edges: _Edges, topology: Topology) -> Crossing:
    """Return the bytes of all edges, of the edges between nodes, and of the edges between
    groups."""
    sent, across = 0.0, [0.0, 0.0]
    for source, target, size in edges:
        size = numpy.broadcast_to(size, source.shape)
        sent += float(size.sum())
        pairs = zip(topology.domains(source), topology.domains(target), strict=True)
        for level, (a, b) in enumerate(pairs):
            across[level] += float(size[a != b].sum())
    return Crossing(sent, across[0], None if topology.groups is None else across[1])


def _ring(size: int) -> Iterator[tuple[ndarray, ndarray, float]]:
    """Yield the indices of senders and receivers in an all-reduce, and the bytes that each sender
    sends for a buffer of 1 byte."""
    index = numpy.arange(size)
    yield index, (index + 1) % size, 2 * (size - 1) / size


def _halving(size: int) -> Iterator[tuple[ndarray, ndarray, float]]:
    """Yield the same values as `_ring`, for recursive halving."""
    for senders, receivers, share in halving_steps(size):
        a, b = numpy.array(senders), numpy.array(receivers)
        yield a, b, share  # in the reduce-scatter
        yield b, a, share  # in the all-gather


def _hierarchical(members: ndarray, sizes: ndarray, topology: Topology) -> _Edges:
    for ranks, size in zip(members, sizes, strict=True):
        yield from _in_domains(ranks, float(size), topology.domains(ranks))


def _in_domains(ranks: ndarray, size: float, domains: list[ndarray]) -> _Edges:
    """Yield the edges of a hierarchical all-reduce.

    Args:
        ranks: The ranks of the process group.
        size: Bytes of a rank's buffer.
        domains: For each remaining level, the domain of each rank in `ranks`.
    """
    if domains:
        _, inverse, counts = numpy.unique(domains[0], return_inverse=True, return_counts=True)
        if len(counts) == 1 or len(set(counts.tolist())) > 1 or counts[0] == 1:
            yield from _in_domains(ranks, size, domains[1:])
            return
        by_domain = numpy.argsort(inverse, kind="stable").reshape(len(counts), -1)
        for local in by_domain:
            yield from _in_domains(ranks[local], size, [])
        for column in by_domain.T:
            rest = [of_level[column] for of_level in domains[1:]]
            yield from _in_domains(ranks[column], size / by_domain.shape[1], rest)
        return
    for a, b, fraction in _ring(len(ranks)):
        yield ranks[a], ranks[b], numpy.array(fraction * size)
