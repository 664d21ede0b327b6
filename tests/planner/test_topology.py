"""Tests of the bytes that collectives send between nodes and between groups of nodes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import numpy
import pytest

from optimus.cli import main
from optimus.config import load_config
from optimus.config.machine import FOLDER, load_machine
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.planner import traffic
from optimus.planner.allocation import Allocation
from optimus.planner.collectives import Link, collective_s
from optimus.planner.topology import (
    ALGORITHMS,
    Topology,
    all_reduce_crossing,
    best_order,
    groups_of_hosts,
    pipeline_crossing,
)
from optimus.planner.traffic import axis_crossings, better_order, plan_topology, topology_of
from optimus.planner.workload import step_of
from optimus.rank.operations import Exchange
from optimus.rank.states import plan_rank
from tests.planner.test_plan import CONFIGS

RACKS = Mesh(pp=8, dp=16, ep=12)
"""1,536 tiles on 128 nodes of 12, which fill two racks of 64 nodes."""


def racks(order) -> Topology:
    """Return the topology of 128 nodes in two racks of 64 nodes. Node n of the run is the physical
    node `order(n)`."""
    return Topology(12, tuple(order(node) // 64 for node in range(128)))


@pytest.mark.parametrize(
    ("order", "share"),
    [
        pytest.param(lambda node: node, 0, id="stages-in-a-row"),
        pytest.param(lambda node: node % 16 * 8 + node // 16, 2 / 16, id="replicas-in-a-row"),
        pytest.param(lambda node: node % 2 * 64 + node // 2, 1, id="hosts-alternate"),
    ],
)
def test_edges_of_a_ring_that_cross_racks_depend_on_the_order(order, share):
    crossing = all_reduce_crossing(RACKS, ("dp",), racks(order), "ring")
    assert crossing.groups == pytest.approx(share * crossing.sent)
    assert crossing.nodes == crossing.sent == pytest.approx(1536 * 2 * 15 / 16)


def test_halving_sends_least_over_the_largest_distance():
    """If the replicas of a stage are on successive nodes, only the last step of recursive halving,
    with 1/16 of the buffer, sends data between racks. If the nodes alternate between racks, only
    the first step, with 1/2 of the buffer, sends data between racks."""
    topology = racks(lambda node: node % 16 * 8 + node // 16)
    crossing = all_reduce_crossing(RACKS, ("dp",), topology, "halving")
    assert crossing.groups == pytest.approx(1536 * 2 / 16)
    alternate = all_reduce_crossing(RACKS, ("dp",), racks(lambda node: node % 2 * 64), "halving")
    assert alternate.groups == pytest.approx(1536 * 2 / 2)  # the first step


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 12, 16])
def test_an_all_reduce_sends_the_bytes_of_its_algorithm(algorithm, size):
    """In an all-reduce, each rank sends 2 (n - 1) / n of the buffer. Recursive halving sends more
    if n is not a power of two."""
    mesh, topology = Mesh(dp=size, tp=2), Topology(4, tuple(range(8)))
    crossing = all_reduce_crossing(mesh, ("dp",), topology, algorithm, [5.0])
    least = 2 * (size - 1) / size * size * 2 * 5.0
    if algorithm == "halving" and size & (size - 1):
        power = 1 << (size.bit_length() - 1)
        least = 2 * 5.0 * (2 * (size - power) + 2 * (power - 1))
    assert crossing.sent == pytest.approx(least)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [8, 16, 64])
def test_a_collective_takes_the_time_of_the_bytes_that_cross_nodes(algorithm, size):
    """`optimus plan` prints the share of the bytes that cross nodes, and the time of a collective.
    Both values must be computed for the same algorithm."""
    links = (Link("node", 4, 1e12), Link("machine", 0, 1.0))
    crossing = all_reduce_crossing(Mesh(dp=size), ("dp",), Topology(4), algorithm)
    seconds = collective_s("all_reduce", 1.0, tuple(range(size)), links, algorithm)
    assert seconds == pytest.approx(crossing.nodes / size)


def brute_force(mesh: Mesh, axes, topology: Topology, per_stage) -> tuple[float, float, float]:
    """Return the bytes that all ranks together send in a ring all-reduce: in total, between nodes,
    and between groups of nodes. `per_stage` has the bytes of the buffer of each stage."""
    sent = nodes = groups = 0.0
    for rank in range(mesh.world_size):
        members = mesh.group_of(rank, axes)
        target = members[(members.index(rank) + 1) % len(members)]
        size = 2 * (len(members) - 1) / len(members) * per_stage[mesh.coordinate(rank).pp]
        a, b = rank // topology.ranks_per_node, target // topology.ranks_per_node
        sent += size
        nodes += size * (a != b)
        groups += size * (topology.groups[a] != topology.groups[b])
    return sent, nodes, groups


@pytest.mark.parametrize("axes", [("dp",), ("ep",), ("tp",), ("dp", "ep")])
def test_ring_equals_the_count_over_all_ranks(axes):
    choose = random.Random("ring")
    for sizes in itertools.product((1, 2, 3), repeat=4):
        mesh = Mesh(*sizes)
        node_count = -(-mesh.world_size // 4)
        topology = Topology(4, tuple(choose.randrange(3) for _ in range(node_count)))
        per_stage = [choose.random() for _ in range(mesh.pp)]
        crossing = all_reduce_crossing(mesh, axes, topology, "ring", per_stage)
        assert tuple(crossing) == pytest.approx(brute_force(mesh, axes, topology, per_stage))


def test_hierarchical_crosses_nodes_with_a_share_of_the_buffer():
    """Each of 3 nodes has 4 ranks of the process group, and each rank sends 1/4 of the buffer to
    other nodes."""
    crossing = all_reduce_crossing(Mesh(dp=12), ("dp",), Topology(4, (0, 0, 1)), "hierarchical")
    assert crossing.nodes == pytest.approx(12 * 2 * (2 / 3) / 4)
    # Groups have 8 and 4 ranks, so the rings over nodes are rings over groups: 2 of 3 edges cross.
    assert crossing.groups == pytest.approx(crossing.nodes * 2 / 3)
    even = all_reduce_crossing(Mesh(dp=16), ("dp",), Topology(4, (0, 0, 1, 1)), "hierarchical")
    assert even.groups == pytest.approx(16 * 2 * (1 / 2) / 8)


def test_pipeline_sends_each_boundary_forward_and_backward():
    topology = Topology(2, (0, 0, 1, 1))
    crossing = pipeline_crossing(Mesh(pp=4, dp=2), 1, topology, 10.0)
    assert tuple(crossing) == (2 * 2 * 3 * 10, 2 * 2 * 3 * 10, 2 * 2 * 10)
    ring = pipeline_crossing(Mesh(pp=4, dp=2), 2, topology, 10.0)
    # Boundaries 0-1, 1-2, 2-3 twice, and 3-0 once; 1-2 and 3-0 cross groups.
    assert tuple(ring) == (2 * 2 * 7 * 10, 2 * 2 * 7 * 10, 2 * 2 * 3 * 10)
    assert pipeline_crossing(Mesh(dp=2), 1, Topology(2)).groups is None


def test_aurora_s_host_names_contain_the_rack():
    pattern = load_machine("aurora").host_group
    hosts = ["x4305c2s6b0n0", "x4305c7s0b0n0.hsn.cm.aurora.alcf.anl.gov", "x4712c0s1b0n0"]
    assert groups_of_hosts(hosts, pattern) == (0, 0, 1)
    assert groups_of_hosts([*hosts, "login1"], pattern) is None
    assert groups_of_hosts(hosts, "") is None


def test_the_groups_of_all_nodes_are_converted_once(monkeypatch):
    """A hierarchical collective calls `domains` for each process group. `domains` must convert the
    groups of all nodes to an array only in the first call."""
    topology, calls, convert = Topology(2, (0, 0, 1, 1)), [], numpy.array
    monkeypatch.setattr(numpy, "array", lambda value: calls.append(value) or convert(value))
    for _ in range(3):
        nodes, groups = topology.domains(convert([0, 3, 4]))
    assert nodes.tolist() == [0, 1, 2] and groups.tolist() == [0, 0, 1]
    assert calls == [(0, 0, 1, 1)]


def test_unknown_groups_stay_unknown():
    crossing = all_reduce_crossing(Mesh(dp=4), ("dp",), Topology(2), "ring")
    assert crossing.groups is None and crossing.nodes == pytest.approx(crossing.sent / 2)


def test_best_order_keeps_stages_within_groups():
    choose = random.Random("order")
    for seed in range(20):
        counts = [choose.randint(1, 9) for _ in range(4)]
        groups = [group for group, count in enumerate(counts) for _ in range(count)]
        choose.shuffle(groups)
        stages = [n for n in range(1, len(groups) + 1) if len(groups) % n == 0]
        mesh = Mesh(pp=choose.choice(stages))
        mesh = mesh._replace(dp=len(groups) // mesh.pp)
        hosts = [f"host{number}" for number in range(len(groups))]
        ordered, ordered_groups = best_order(mesh, hosts, groups, 1)
        assert sorted(ordered) == sorted(hosts)
        assert [groups[hosts.index(host)] for host in ordered] == list(ordered_groups)
        before, after = (
            all_reduce_crossing(mesh, ("dp",), Topology(1, tuple(some)), "ring").groups
            for some in (groups, ordered_groups)
        )
        assert after <= before, seed
        whole = sum(count // mesh.dp for count in counts)
        blocks = numpy.array(ordered_groups).reshape(mesh.pp, mesh.dp)
        assert sum(len(set(block)) == 1 for block in blocks.tolist()) >= whole


RUN = CONFIGS / "run" / "mula-220b-a10b.toml"
SMALLER = CONFIGS / "run" / "mula-7b-a1b.toml"


def shuffled_hosts(file) -> list[str]:
    """Write the names of 256 hosts of 5 racks, in random order, to `file`. Return the names."""
    hosts = [f"x{rack}c{c}s{s}b0n0" for rack in range(5) for c in range(8) for s in range(8)]
    random.Random(1).shuffle(hosts)
    file.write_text("\n".join(hosts[:256]))
    return hosts[:256]


def test_plan_prints_the_gain_of_another_order_and_writes_it(tmp_path, capsys):
    file, written = tmp_path / "hosts", tmp_path / "written"
    hosts = shuffled_hosts(file)
    options = ["plan", str(RUN), "--machine", "aurora", "--hosts"]
    assert main([*options, str(file), "--write-hosts", str(written)]) == 0
    text = capsys.readouterr().out
    assert "another order of the hosts sends" in text
    assert "--write-hosts FILE writes this order" in text
    ordered = written.read_text().split()
    assert sorted(ordered) == sorted(hosts) and ordered != hosts
    assert main([*options, str(written), "--json"]) == 0
    topology = json.loads(capsys.readouterr().out)["topology"]
    assert topology["num_groups"] == 5 and "no better order" in topology["gain"]
    assert topology["crossings"]["dp"]["ring"]["groups"] < 0.05
    assert topology["crossings"]["ep"]["ring"] == {"nodes": 0, "groups": 0}


def test_plan_says_that_groups_are_unknown(tmp_path, capsys):
    file = tmp_path / "hosts"
    file.write_text("\n".join(f"node{number}" for number in range(256)))
    options = ["plan", str(RUN), "--machine", "aurora"]
    assert main(options) == 0
    lines = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert ["groups", "of", "nodes", "unknown: --hosts FILE names the nodes"] in lines
    assert main([*options, "--hosts", str(file)]) == 0
    assert "unknown: host names, such as node0, do not contain" in capsys.readouterr().out
    assert main([*options, "--hosts", str(file), "--write-hosts", str(tmp_path / "w")]) == 2
    assert "do not contain the group" in capsys.readouterr().err
    assert main([*options, "--write-hosts", str(tmp_path / "w")]) == 2
    assert "--write-hosts needs --hosts FILE" in capsys.readouterr().err
    file.write_text("node0\n")
    assert main([*options, "--hosts", str(file)]) == 2
    assert "does not divide the world of 12 ranks" in capsys.readouterr().err


@pytest.mark.parametrize("dispatch", ["allgather", "alltoall"])
def test_a_better_order_sends_fewer_bytes_of_ep_across_groups(dispatch):
    """In both orders, collectives over dp send the same number of bytes across groups of nodes.
    Process groups of ep = 8 ranks cross the boundaries of nodes, which have 12 ranks. In the better
    order, collectives over ep send fewer bytes across groups of nodes."""
    settings = ["model.num_layers=2", "parallel.ep=8", f"parallel.ep_dispatch={dispatch}"]
    config = load_config(SMALLER, [*settings, "train.global_batch_tokens=393216"])
    hosts = tuple(f"x{rack}c0s{slot}b0n0" for rack, slot in ((1, 0), (2, 0), (2, 1), (1, 1)))
    machine, mesh = load_machine("aurora"), Mesh(dp=6, ep=8)
    allocation = Allocation("aurora", machine.ranks_per_node, 4, hosts, machine.host_group)
    topology = topology_of(allocation)
    better = better_order(config, mesh, allocation, topology)
    assert better is not None and better[0] == tuple(sorted(hosts))
    before, after = (axis_crossings(config, mesh, each, "ring") for each in (topology, better[1]))
    assert before["dp"][0].groups == after["dp"][0].groups
    assert before["ep"][0].groups > after["ep"][0].groups
    gain = plan_topology(config, mesh, allocation, topology, better)["gain"]
    assert "another order of the hosts sends" in gain
    sorted_hosts = dataclasses.replace(allocation, hosts=better[0])
    assert better_order(config, mesh, sorted_hosts, better[1]) is None


@pytest.mark.parametrize("dispatch", ["allgather", "alltoall"])
def test_estimated_bytes_of_ep_are_those_of_the_operations(dispatch):
    settings = ["model.num_layers=2", "parallel.ep=8", f"parallel.ep_dispatch={dispatch}"]
    config = load_config(SMALLER, [*settings, "train.global_batch_tokens=393216"])
    mesh = Mesh(dp=6, ep=8)
    step = step_of(config, mesh)
    operations = [
        (op.num_bytes, layers.number)
        for layers in step.stages[0]
        for op in (*layers.forward, *layers.backward)
        if isinstance(op, Exchange) and op.axis == "ep"
    ]
    sent = step.microbatches * sum(size * number for size, number in operations) / 2
    estimate = traffic._activation_bytes(config, mesh)
    assert list(estimate) == ["ep"] and estimate["ep"] == pytest.approx([sent], rel=0.1)


def test_estimated_bytes_of_tp_are_those_of_the_operations_of_the_layers():
    settings = ["model.num_layers=2", "parallel.tp=2", "train.global_batch_tokens=393216"]
    config, mesh = load_config(SMALLER, settings), Mesh(dp=6, tp=2)
    step = step_of(config, mesh)
    operations = [
        op.num_bytes * layers.number
        for layers in step.stages[0]
        for op in (*layers.forward, *layers.backward)
        if isinstance(op, Exchange) and op.axis == "tp" and layers.number == 2
    ]
    estimate = traffic._activation_bytes(config, mesh)
    sent = step.microbatches * sum(operations)
    assert list(estimate) == ["tp"] and estimate["tp"] == pytest.approx([sent], rel=0.01)


def test_an_order_that_sends_more_known_bytes_is_no_better_order(monkeypatch):
    """Two sums count the bytes that cross groups of nodes: a sum over the axes whose bytes in a
    step are known, and a sum over the other axes. An order of the hosts that increases one of these
    sums is not better, because a step could be slower."""
    config, mesh = load_config(SMALLER), Mesh(dp=48)
    hosts = tuple(f"x{rack}c0s{slot}b0n0" for rack, slot in ((1, 0), (2, 0), (2, 1), (1, 1)))
    machine = load_machine("aurora")
    allocation = Allocation("aurora", machine.ranks_per_node, 4, hosts, machine.host_group)
    topology = topology_of(allocation)
    for after, is_better in (((2.0, 0.0), False), ((1.0, 0.0), True), ((0.0, 2.0), False)):
        of_order = {topology.groups: (1.0, 1.0)}
        monkeypatch.setattr(
            traffic, "_group_bytes", lambda *a, d=of_order, b=after: d.get(a[2].groups, b)
        )
        better = better_order(config, mesh, allocation, topology)
        assert (better is not None) == is_better


def test_a_plan_that_does_not_fit_writes_no_hosts(tmp_path, capsys):
    shuffled_hosts(tmp_path / "hosts")
    options = ["--hosts", str(tmp_path / "hosts"), "--write-hosts", str(tmp_path / "written")]
    settings = ["parallel.pp=1", "parallel.dp=0", "train.global_batch_tokens=0"]
    assert main(["plan", str(RUN), "--machine", "aurora", *options, *settings]) == 2
    assert "more than its device has" in capsys.readouterr().err
    assert not (tmp_path / "written").exists()


def test_a_machine_without_a_level_for_groups_says_that_the_time_ignores_them(tmp_path, capsys):
    shuffled_hosts(tmp_path / "hosts")
    text = (FOLDER / "aurora.toml").read_text()
    level = text.index('[[levels]]\nname = "group"')
    machine = tmp_path / "machine.toml"
    machine.write_text(text[:level] + text[text.index("[[levels]]", level + 1) :])
    options = ["--machine", str(machine), "--hosts", str(tmp_path / "hosts")]
    assert main(["plan", str(RUN), *options]) == 0
    printed = capsys.readouterr().out
    assert "the machine file has no level for groups, so the step time ignores groups" in printed
    assert "s, as long as in the given order, with the hosts of --write-hosts FILE" in printed


def test_plan_names_the_first_host_without_a_group(tmp_path, capsys):
    hosts = shuffled_hosts(tmp_path / "hosts")
    (tmp_path / "hosts").write_text("\n".join([*hosts[:200], "login1", *hosts[201:]]))
    options = ["plan", str(RUN), "--machine", "aurora", "--hosts", str(tmp_path / "hosts")]
    assert main(options) == 0
    message = "host names, such as login1, do not contain the group"
    assert f"unknown: {message}" in capsys.readouterr().out
    assert main([*options, "--write-hosts", str(tmp_path / "w")]) == 2
    assert f"--write-hosts: {message}; correct the list" in capsys.readouterr().err


@pytest.mark.parametrize("sharding", ["none", "so", "epso"])
def test_bytes_of_a_step_are_those_of_the_chunks(sharding):
    """The bytes of a step follow from the chunks: in a reduce-scatter and in an all-gather over n
    ranks, each rank sends (n - 1) / n of the buffer of a chunk."""
    settings = [f"optim.sharding={sharding}", "parallel.dp=2", "parallel.ep=2", "parallel.pp=2"]
    config = load_config(RUN, ["model.num_layers=4", "model.hidden_size=48", *settings])
    mesh = Mesh(2, 2, 2, 1)
    expected = {"dp": 0.0, "dp x ep": 0.0}
    for pp in range(2):
        for chunk in plan_rank(config, mesh, Coordinate(pp, 0, 0, 0)).engine.chunks:
            groups, length, ranks = chunk.groups, chunk.chunk.length, mesh.world_size // mesh.pp
            n = groups.reduce_group.size
            reduced = "dp" if n == 2 else "dp x ep"
            expected[reduced] += ranks * 2 * length * (n - 1) / n  # gradients in bf16
            if sharding == "none":
                expected[reduced] += ranks * 2 * length * (n - 1) / n
                continue
            shards = groups.shard_group.size
            gathered = "dp" if shards == 2 else "dp x ep"
            expected[gathered] += ranks * 2 * length * (shards - 1) / shards
    # In each of 768 microbatches, 4 pipelines send an activation in bf16 and its gradient.
    expected["pp"] = 768 * 4 * 2 * 2048 * 48 * 2
    crossings = axis_crossings(config, mesh, Topology(2), "ring")
    for axes, size in expected.items():
        crossing, is_step = crossings[axes]
        assert (crossing.sent if is_step else 0) == pytest.approx(size), axes
    assert not crossings["ep"][1]  # not all bytes: activations are sent over ep, too
