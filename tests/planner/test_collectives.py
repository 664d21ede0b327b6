"""Tests of the planned times of collectives: closed formulas, levels of the network, and links that
several ranks share."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from optimus.config.machine import load_machine
from optimus.distributed.mesh import Mesh
from optimus.errors import ConfigError
from optimus.planner import collectives
from optimus.planner.collectives import Link, Operation, collective_s, links_of, of_ports, paths_of
from optimus.planner.topology import Topology, all_reduce_crossing

# Nodes of 4 ranks, groups of 16 ranks, a machine of any size.
LINKS = (Link("node", 4, 100.0), Link("group", 16, 10.0), Link("machine", 0, 5.0))
SIZE = 1000.0


def row(count: int, stride: int = 1) -> tuple[int, ...]:
    return tuple(range(0, count * stride, stride))


def test_ring_within_a_node_has_the_closed_formula():
    """Patarasuk and Yuan 2009: in a ring all_reduce of n ranks, 2 (n - 1) / n of the bytes of the
    buffer cross each link."""
    links = (LINKS[0]._replace(step_s=0.5), *LINKS[1:])
    for n in (2, 3, 4):
        expected = (n - 1) * (SIZE / n / 100.0 + 0.5)
        assert collective_s("all_gather", SIZE, row(n), links) == pytest.approx(expected)
        assert collective_s("all_reduce", SIZE, row(n), links) == pytest.approx(2 * expected)


def test_halving_has_log2_steps_and_the_bytes_of_a_ring():
    """Rabenseifner 2004: a reduce_scatter by recursive halving has log2(n) steps, in which a rank
    sends (n - 1) / n of the buffer in total."""
    links = (Link("machine", 0, 10.0, 0.5),)
    for n in (2, 4, 8, 16):
        expected = (n - 1) / n * SIZE / 10.0 + math.log2(n) * 0.5
        assert collective_s("reduce_scatter", SIZE, row(n), links, "halving") == pytest.approx(
            expected
        )


def test_halving_sends_least_over_the_slowest_level():
    """In each step of recursive halving (as in oneCCL), ranks exchange half as many bytes as in the
    previous step, and over twice the distance. In a ring, the bytes that leave a domain are sent at
    the total rate of all ranks of the domain."""
    ranks = row(32)
    halving = collective_s("reduce_scatter", SIZE, ranks, LINKS, "halving")
    # 1/2 and 1/4 within nodes at 100, 1/8 and 1/16 between nodes at 10, 1/32 between groups at 5.
    assert halving == pytest.approx(500 / 100 + 250 / 100 + 125 / 10 + 62.5 / 10 + 31.25 / 5)
    ring = collective_s("reduce_scatter", SIZE, ranks, LINKS)
    assert ring == pytest.approx(31 / 32 * SIZE / min(100.0, 4 * 10.0, 16 * 5.0))
    # 6 ranks: ranks 0 and 2 first send their buffers to ranks 1 and 3. Then ranks 1, 3, 4 and 5
    # exchange data.
    links = (Link("pair", 2, 100.0), Link("machine", 0, 10.0))
    halving = collective_s("reduce_scatter", SIZE, row(6), links, "halving")
    assert halving == pytest.approx(SIZE / 100 + 500 / 10 + 250 / 10)


def test_ring_of_a_rank_of_each_node_has_the_rate_of_a_rank():
    assert collective_s("all_gather", SIZE, row(4, 4), LINKS) == pytest.approx(3 / 4 * SIZE / 10)
    assert collective_s("all_gather", SIZE, row(2, 16), LINKS) == pytest.approx(1 / 2 * SIZE / 5)


def test_hierarchical_leaves_out_a_level_with_unequal_domains():
    """The groups have 2 nodes and 1 node, so the collective has no step between the nodes of a
    group. The time of the collective follows from the bytes between nodes, as
    `all_reduce_crossing` counts them."""
    links = (Link("node", 4, 1e12), Link("group", 8, 1.0), Link("machine", 0, 1.0))
    # 3 nodes of 4 ranks, groups of 2 and 1 nodes: a ring of 3 nodes sends a quarter of the buffer.
    seconds = collective_s("all_reduce", 12.0, row(12), links, "hierarchical")
    assert seconds == pytest.approx(2 * (3 - 1) / 3 * 12 / 4)
    crossing = all_reduce_crossing(
        Mesh(dp=12), ("dp",), Topology(4, (0, 0, 1)), "hierarchical", [12.0]
    )
    assert seconds == pytest.approx(crossing.nodes / 12)
    # Nodes with 3 and 2 ranks of the process group: a ring over all 5.
    uneven = collective_s("all_reduce", 10.0, (0, 1, 2, 4, 5), links, "hierarchical")
    assert uneven == collective_s("all_reduce", 10.0, (0, 1, 2, 4, 5), links, "ring")


def test_links_with_other_rates_do_not_count_the_domains_of_a_group_again():
    """A plan of many hosts has process groups with thousands of ranks, so the domains of the ranks
    of a process group are counted once, and not again for links with other rates."""
    collectives._levels_of.cache_clear()
    for links in (LINKS, of_ports(LINKS), (LINKS[0]._replace(rate=7.0), *LINKS[1:])):
        collectives.loads_of("all_reduce", row(24, 5), links)
    assert collectives._levels_of.cache_info().misses == 1


def test_hierarchical_shrinks_the_buffer_at_each_level():
    expected = 3 * (SIZE / 4 / 100) + 3 * (SIZE / 4 / 4 / 10)
    assert collective_s("reduce_scatter", SIZE, row(16), LINKS, "hierarchical") == pytest.approx(
        expected
    )


def test_all_to_all_is_limited_by_the_slowest_level():
    # Of 16 ranks, 3 are in the node and 12 in other nodes.
    expected = max(3 / 16 * SIZE / 100, 12 / 16 * SIZE / 10)
    assert collective_s("all_to_all", SIZE, row(16), LINKS) == pytest.approx(expected)


@pytest.mark.parametrize("operation", get_args(Operation))
@pytest.mark.parametrize("algorithm", ["ring", "halving", "hierarchical"])
@pytest.mark.parametrize("ranks", [row(1), row(2), row(6), row(16), row(24), row(5, 16), row(3, 7)])
def test_more_bandwidth_is_never_slower_and_less_latency_neither(operation, algorithm, ranks):
    base = collective_s(operation, SIZE, ranks, LINKS, algorithm)
    assert base >= 0 and (base > 0) == (len(ranks) > 1)
    for index, link in enumerate(LINKS):
        faster = (*LINKS[:index], link._replace(rate=2 * link.rate), *LINKS[index + 1 :])
        slower = (*LINKS[:index], link._replace(step_s=1.0), *LINKS[index + 1 :])
        assert collective_s(operation, SIZE, ranks, faster, algorithm) <= base
        assert collective_s(operation, SIZE, ranks, slower, algorithm) >= base
    assert collective_s(operation, 2 * SIZE, ranks, LINKS, algorithm) >= base


def test_no_collective_is_faster_than_its_bytes_on_the_fastest_link():
    for algorithm in ("ring", "halving", "hierarchical"):
        for ranks in (row(2), row(16), row(64), row(8, 4)):
            n = len(ranks)
            bound = (n - 1) / n * SIZE / 100.0
            assert collective_s("all_gather", SIZE, ranks, LINKS, algorithm) >= bound * (1 - 1e-12)


def test_measured_messages_replace_rate_and_latency():
    """The machine file has measured messages: 10 bytes take 1 s, and 1000 bytes take 4 s. A message
    of 100 bytes then takes 2 s, the geometric mean of the two times."""
    sizes = (("all_gather", 10.0, 1.0), ("all_gather", 1000.0, 4.0))
    links = (Link("node", 0, 1.0, 9.0, messages=(*sizes, ("send", 10.0, 3.0))),)
    gathers = {4: 3 * 1.0, 40: 3 * 1.0, 400: 3 * 2.0, 4000: 3 * 4.0, 8000: 3 * 8.0}
    for size, seconds in gathers.items():
        assert collective_s("all_gather", size, row(4), links) == pytest.approx(seconds)
    assert collective_s("send", 20, row(2), links) == pytest.approx(6.0)
    expected = 3 * (40 / 4 / 1.0 + 9.0)  # no measured messages
    assert collective_s("reduce_scatter", 40, row(4), links) == pytest.approx(expected)
    for algorithm in ("halving", "hierarchical"):
        seconds = collective_s("all_gather", 200, row(2), links, algorithm)
        assert seconds == pytest.approx(2.0)
    exchange = (links[0]._replace(messages=(("all_to_all", 100.0, 2.0),)),)
    assert collective_s("all_to_all", 400, row(4), exchange) == pytest.approx(6.0)


def test_paths_name_the_levels_that_a_group_crosses():
    assert [path.link.name for path in paths_of(row(3), LINKS)] == ["node"]
    assert [path.link.name for path in paths_of(row(4, 4), LINKS)] == ["group"]
    path = paths_of(row(8, 2), LINKS)[-1]
    assert (path.link.name, path.domains, path.per_domain) == ("group", 4, 2)
    with pytest.raises(ConfigError, match="group, connects only 16 ranks"):
        paths_of(row(3, 16), LINKS[:2])
    with pytest.raises(ConfigError, match="the machine file has no levels"):
        paths_of(row(2), ())


def test_the_taper_of_a_machine_file_divides_the_rate_of_a_port():
    """If all ranks send data between Aurora's groups, the rate of a rank is 0.645 times the rate of
    its port."""
    group, machine = links_of(load_machine("aurora").levels)[-2:]
    assert (group.taper, machine.taper) == (1.0, 0.645)
    assert machine.rate == pytest.approx(0.645 * group.rate)
    assert of_ports((group, machine))[1].rate == pytest.approx(group.rate)
