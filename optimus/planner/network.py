"""Transfers between ranks for the simulation in `optimus.planner.play`, computed from the levels of
a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from optimus.parallel.pipeline.actions import Kind
from optimus.planner.collectives import Algorithm, Links, loads_of, of_ports, paths_of, slowest_s
from optimus.planner.play import SharedLevel, Transfer, Transfers
from optimus.planner.topology import STAGES

_WITH_STEPS = ("all_reduce", "all_gather", "reduce_scatter")
"""Operations for which `Network` uses the algorithm of the machine file."""


class Network:
    """The network of a machine, and the process groups that use it.

    A transfer uses the ports of the levels that its group crosses. It uses only a fraction of the
    rate of the ports at the faster levels (`loads_of`). The rate of a port is the rate of the level
    in the machine file, without the taper. If the taper of a level is below 1, the links that leave
    a domain of the previous level limit the transfers: the rate of these links is the sum of the
    rates of all ports in the domain, multiplied by the taper. A transfer through these links also
    uses the port of the previous level.

    Args:
        groups: The process groups of each axis. The groups of `pp` are pipelines. If the key
            `STAGES` is present, the numbers of the ranks follow the order of the hosts
            (`placed_groups`).
        links: Levels of the network.
        algorithm: Algorithm of collectives.
    """

    def __init__(
        self, groups: Mapping[str, Sequence[tuple[int, ...]]], links: Links, algorithm: Algorithm
    ) -> None:
        self._groups, self._links, self._algorithm = groups, links, algorithm
        self._ports = of_ports(links)
        self._pipelines = groups.get("pp", [(0,)])
        self._links_of_steps = self._ports if algorithm == "ring" else self._shared_links()

    def collective(self, operation: str, size_bytes: float, axes: str) -> Transfer:
        """Return the transfer of a collective of the slowest group of `axes`. `operation` and
        `size_bytes` are as for `collective_s`."""
        return self._transfer(operation, size_bytes, self._groups[axes])

    def _transfer(
        self, operation: str, size_bytes: float, groups: Sequence[tuple[int, ...]]
    ) -> Transfer:
        links = self._links_of_steps if operation in _WITH_STEPS else self._ports
        seconds = slowest_s(operation, size_bytes, groups, links, self._algorithm)
        return Transfer(seconds, self._loads(operation, groups, links)) if seconds else Transfer(0)

    def _loads(
        self, operation: str, groups: Sequence[tuple[int, ...]], links: Links
    ) -> tuple[float, ...]:
        """Return `Transfer.loads` of a collective: at each level, the largest load of all
        `groups`."""
        of_groups = (loads_of(operation, ranks, links, self._algorithm) for ranks in groups)
        largest = (max(of_level) for of_level in zip(*of_groups, strict=True))
        loads = [load * link.taper for load, link in zip(largest, links, strict=True)]
        for level in reversed(range(1, len(loads))):
            if self._links[level].taper < 1:
                loads[level - 1] = max(loads[level - 1], loads[level])
        return tuple(loads)

    def _shared_links(self) -> Links:
        """Return the links with the rates that a rank reaches if all ranks of a stage send at the
        same time.

        Algorithms other than a ring use the levels one after the other. The mean load of a level
        over a whole collective is therefore less than the load in the steps that use the level.
        These rates account for the ranks that share the links in such steps.
        """
        links = []
        for level, (link, port) in enumerate(zip(self._links, self._ports, strict=True)):
            if link.taper < 1:
                capacity, loads, _ = self._shared(level)
                taper = min(1.0, capacity / max(map(max, loads)))
                rates = tuple((name, taper * rate) for name, rate in port.rates)
                port = port._replace(rate=taper * port.rate, rates=rates, taper=taper)
            links.append(port)
        return tuple(links)

    def transfers(
        self,
        size_bytes: float,
        num_stages: int,
        reduce: Sequence[Transfer],
        gather: Sequence[Transfer],
        exposed_s: Mapping[Kind, Sequence[Mapping[str, float]]],
    ) -> Transfers:
        """Return the transfers of a step.

        Args:
            size_bytes: Bytes that a rank sends to the next stage for one microbatch.
            num_stages: Number of stages.
            reduce: Collectives of the gradients of a stage. They are the same for all stages.
            gather: Collectives of the parameters, as in `Transfers`.
            exposed_s: A dict from some kinds of actions to a list with an element for each stage.
                The element is a dict from axes to the seconds of the collectives within the action.
                Of these collectives, `Transfers.exchanges` has only those that compete with
                transfers.
        """
        send, p = self.sends(size_bytes), len(self._pipelines[0])
        levels = {
            level
            for transfer in (*send.values(), *reduce, *gather)
            if transfer.seconds
            for level, load in enumerate(transfer.loads)
            if load
        }
        exchanges = {
            (kind, stage): self.exchanges(seconds, levels)
            for kind, of_stages in exposed_s.items()
            for stage, seconds in enumerate(of_stages)
        }
        return Transfers(
            lambda action: send[action.stage % p, action.kind is Kind.SEND_ACTIVATION],
            dict.fromkeys(range(num_stages), reduce),
            gather,
            {key: transfer for key, transfer in exchanges.items() if transfer.seconds},
            self.shared_levels(levels),
        )

    def sends(self, size_bytes: float) -> dict[tuple[int, bool], Transfer]:
        """Return the transfers between the ranks of the slowest pipeline. A key is a pair (index of
        the sending rank, direction). The direction is True for a transfer to the next rank, and
        False for a transfer to the previous rank."""
        p, transfers = len(self._pipelines[0]), dict[tuple[int, bool], Transfer]()
        for index in range(p):
            for is_next, neighbour in ((True, (index + 1) % p), (False, index - 1)):
                if p == 1 or not size_bytes:
                    transfers[index, is_next] = Transfer(0.0)
                    continue
                pairs = {(ranks[index], ranks[neighbour]) for ranks in self._pipelines}
                by_path = {paths_of(pair, self._ports): pair for pair in pairs}
                transfers[index, is_next] = self._transfer("send", size_bytes, [*by_path.values()])
        return transfers

    def exchanges(self, seconds: Mapping[str, float], levels: Collection[int]) -> Transfer:
        """Return a transfer that represents those collectives within a pass that use a level of
        `levels`.

        Args:
            seconds: A dict from axes to the seconds of the collectives of these axes in the pass,
                while all ranks send at the same time.
            levels: The levels that transfers use.
        """
        total_s, used_s = 0.0, [0.0] * len(self._links)
        for axes, exposed_s in seconds.items() if levels else ():
            operation = "all_to_all" if axes == "ep" else "all_reduce"
            loads = self._loads(operation, self._groups[axes], self._ports) if exposed_s else ()
            if not any(loads[level] for level in levels if loads):
                continue
            total_s += exposed_s
            for level, load in enumerate(loads):
                if self._links[level].taper == 1:  # the seconds already contain the taper
                    used_s[level] += load * exposed_s
        if not total_s:
            return Transfer(0.0)
        return Transfer(total_s, tuple(seconds / total_s for seconds in used_s))

    def shared_levels(self, levels: Collection[int]) -> dict[int, SharedLevel]:
        """Return the `SharedLevel` of each of the `levels` at which the ranks of a domain share
        links, by index of the level."""
        return {level: self._shared(level) for level in levels if self._links[level].taper < 1}

    def _shared(self, level: int) -> SharedLevel:
        size = self._links[level - 1].ranks if level else 1
        if STAGES in self._groups:
            numbers = [Counter(rank // size for rank in ranks) for ranks in self._groups[STAGES]]
            used = sorted({domain for of_stage in numbers for domain in of_stage})
            rows = [[float(of_stage[domain]) for of_stage in numbers] for domain in used]
            domains = [[n for n, row in enumerate(rows) if row[s]] for s in range(len(numbers))]
            return SharedLevel(self._links[level].taper * size, rows, domains)
        ranks = self._pipelines[0]
        # pp is the outermost axis, so a stage has consecutive ranks.
        of_stage = ranks[1] - ranks[0] if len(ranks) > 1 else size
        loads = []
        for rank in ranks:
            first = rank // size * size
            loads.append(
                [
                    float(max(0, min(first + size, other + of_stage) - max(first, other)))
                    for other in ranks
                ]
            )
        return SharedLevel(self._links[level].taper * size, loads)
