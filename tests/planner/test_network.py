"""Tests of the transfers of a pipeline on the levels of a network."""

from __future__ import annotations

import pytest

from optimus.distributed.mesh import Mesh
from optimus.planner.collectives import Link, collective_s, loads_of
from optimus.planner.network import Network
from optimus.planner.play import SharedLevel, Transfer
from optimus.planner.workload import groups_of

NODE, RACK, MACHINE = (
    Link("node", 4, 100.0),
    Link("rack", 16, 10.0),
    Link("machine", 0, 5.0, taper=0.5),
)
LINKS = NODE, RACK, MACHINE


def network(*mesh: int) -> Network:
    return Network(groups_of(Mesh(*mesh)), LINKS, "ring")


@pytest.mark.parametrize(
    ("operation", "ranks", "loads"),
    [
        ("send", (0, 3), (1, 0, 0)),
        ("send", (0, 4), (0, 1, 0)),
        ("send", (0, 16), (0, 0, 1)),
        ("all_reduce", (0, 1, 2, 3), (1, 0, 0)),
        ("all_reduce", (0, 4, 8, 12), (0, 1, 0)),
        # A ring leaves the rack once, through the links of 4 ranks of the group.
        ("all_reduce", tuple(range(0, 32, 4)), (0, 1, 0.5)),
        # 3 of 8 shares go to other nodes of the rack, and 4 to another rack at half of the rate.
        ("all_to_all", tuple(range(0, 32, 4)), (0, 0.375, 1)),
        ("all_reduce", (0, 16), (0, 0, 1)),
    ],
)
def test_a_collective_loads_the_levels_that_it_crosses(operation, ranks, loads):
    assert loads_of(operation, ranks, LINKS) == pytest.approx(loads)
    # Measured steps of messages change the time of a collective, but not the levels that it uses.
    measured = tuple(
        link._replace(messages=tuple((operation, size, size / link.rate) for size in (1.0, 1e6)))
        for link in LINKS
    )
    assert loads_of(operation, ranks, measured) == pytest.approx(loads)


def test_each_send_uses_the_level_between_its_ranks():
    """The pipeline has 8 stages of 4 ranks. Each rack contains 4 stages. Only the sends between
    stages 3 and 4 and between the last and the first stage leave a rack. These sends use the links
    of the rack in addition to the ports of the ranks."""
    sends = network(8, 4, 1, 1).sends(100.0)
    assert {sends[rank, True] for rank in (0, 1, 2, 4, 5, 6)} == {Transfer(10.0, (0, 1, 0))}
    assert sends[3, True] == sends[4, False] == sends[7, True] == Transfer(10.0, (0, 1, 1))
    assert sends[1, False] == Transfer(10.0, (0, 1, 0))
    assert network(1, 4, 1, 1).sends(100.0) == {(0, True): Transfer(0), (0, False): Transfer(0)}
    assert network(4, 1, 1, 1).sends(100.0)[0, True] == Transfer(1.0, (1, 0, 0))


def test_ranks_of_a_rack_share_its_links():
    """The links of a rack have the rate of 8 ports, for 16 ranks. If a rack contains 4 ranks of
    each stage, the ranks of two stages can send at the full rate at the same time. If a rack
    contains 16 ranks of one stage, each of them sends at half of the rate of its port."""
    loads = [[4.0 * (a // 4 == b // 4) for b in range(8)] for a in range(8)]
    assert network(8, 4, 1, 1).shared_levels({1, 2}) == {2: SharedLevel(8.0, loads)}
    whole = network(2, 16, 1, 1).shared_levels({2})[2]
    assert whole == SharedLevel(8.0, [[16.0, 0.0], [0.0, 16.0]])
    # All ranks of a rack are busy in a run with one stage.
    assert network(1, 32, 1, 1).shared_levels({2})[2].loads == [[16.0]]
    # The first ranks of both stages are in the first rack.
    assert network(2, 12, 1, 1).shared_levels({2})[2].loads == [[12.0, 4.0], [12.0, 4.0]]


def test_collectives_with_all_ranks_take_the_time_of_the_machine_file():
    """A collective that runs alone has the rate of the ports. If all ranks of the domain send data
    at the same time, the collective has the rate in the machine file, which is measured while all
    ranks are busy."""
    whole = network(1, 32, 1, 1)
    (shared,) = whole.shared_levels({2}).values()
    transfer = whole.collective("all_to_all", 100.0, "dp")
    busy_s = collective_s("all_to_all", 100.0, tuple(range(32)), LINKS)
    assert transfer.seconds * shared.loads[0][0] / shared.capacity == pytest.approx(busy_s)


def test_collectives_of_a_pass_compete_only_with_transfers_of_their_port():
    many = network(2, 2, 8, 1)  # the ranks of ep are in two nodes
    exchange = many.exchanges({"ep": 1.0}, {1})
    # 4 of 8 shares go to another node. 3 go to ranks of the node, which is 10 times as fast.
    assert exchange.seconds == 1.0 and exchange.loads == pytest.approx((0.075, 1, 0))
    assert network(2, 2, 4, 1).exchanges({"ep": 1.0}, {1, 2}).seconds == 0  # within a node
    assert many.exchanges({"ep": 1.0}, set()).seconds == 0
    assert many.exchanges({"ep": 1.0, "dp": 3.0}, {0}).loads == pytest.approx((0.075, 1, 0))
    both = many.exchanges({"ep": 1.0, "dp": 3.0}, {1})  # the ranks of dp are in two nodes
    assert both.seconds == 4.0 and both.loads == pytest.approx((0.075 / 4, 1, 0))
