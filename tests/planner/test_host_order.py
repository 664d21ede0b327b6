"""Time of a step for a given order of the hosts. The order determines the groups of nodes between
which the ranks send data."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from optimus.cli import main
from optimus.config.machine import load_machine
from optimus.distributed.mesh import Mesh
from optimus.parallel.pipeline.schedules import make_schedule
from optimus.planner.collectives import Algorithm, Link, collective_s, slowest_s
from optimus.planner.machine_rates import Rates, rates_of
from optimus.planner.network import Network
from optimus.planner.play import SharedLevel, Transfer
from optimus.planner.state_traffic import ENDS
from optimus.planner.step_time import Reduction, Step, played_time, step_time
from optimus.planner.topology import STAGES, Topology
from optimus.planner.workload import groups_of
from tests.planner.test_plan import CONFIGS

RUN = CONFIGS / "run" / "mula-220b-a10b.toml"

# Nodes of 2 ranks, groups of 4 nodes. Half of the ranks of a group can send to other groups.
LINKS = (Link("node", 2, 100.0), Link("group", 8, 10.0), Link("machine", 0, 5.0, taper=0.5))


def topology(letters: str) -> Topology:
    """Return the topology of nodes with 2 ranks each. Node n is in the group `letters[n]`."""
    return Topology(2, tuple(map(ord, letters)), (2, 8))


def rates(algorithm: Algorithm = "ring") -> Rates:
    of_aurora = rates_of(load_machine("aurora"), "bf16")
    return dataclasses.replace(of_aurora, links=LINKS, algorithm=algorithm)


def reduction_s(mesh: Mesh, letters: str, algorithm: Algorithm = "ring") -> float:
    """Return the seconds of a step whose only operation is an all_reduce of 800 bytes over dp. Node
    n is in the group `letters[n]`. Assert that a simulation of the step has the same time."""
    reductions = (Reduction("dp", "all_reduce", 800.0, "backward"),)
    groups = groups_of(mesh, topology(letters))
    step = Step(((),) * mesh.pp, 1, groups, reductions=reductions)
    seconds = step_time(step, rates(algorithm)).total_s
    played = played_time(step, rates(algorithm), make_schedule("1f1b", mesh.pp, 1, 1))
    assert played.total_s == pytest.approx(seconds), letters
    return seconds


@pytest.mark.parametrize(
    ("letters", "rate"),
    [
        # A ring leaves each group once, through the links of 4 ranks, but the nodes limit its rate.
        ("AAAABBBB", 10.0),
        # Of the 4 ranks in a group, 2 send to the other group, and share the links of 4 ranks.
        ("AABBAABB", 10.0),
        ("ABBAABBA", 10.0),
        # 4 of 4 ranks send to the other group, with half of the rate of a port.
        ("ABABABAB", 5.0),
    ],
)
def test_a_ring_has_the_rate_of_the_edges_that_leave_its_groups(letters, rate):
    assert reduction_s(Mesh(dp=8, tp=2), letters) == pytest.approx(2 * 7 / 8 * 800 / rate)


@pytest.mark.parametrize(
    ("letters", "halving_s"),
    [("AAAABBBB", 160), ("AABBAABB", 180), ("ABABABAB", 220), ("AABBABAB", 280)],
)
def test_simulated_steps_that_leave_groups_have_the_rate_of_the_shared_links(letters, halving_s):
    """In only some steps of the collective, ranks send data to another group of nodes. These steps
    have the rate of the links that the ranks of a group share. `reduction_s` asserts that formula
    and simulation agree."""
    assert reduction_s(Mesh(dp=8, tp=2), letters, "halving") == pytest.approx(halving_s)
    assert reduction_s(Mesh(dp=8, tp=2), letters, "hierarchical") == pytest.approx(160)


def test_halving_is_slow_in_the_steps_that_leave_groups():
    """The steps of recursive halving send 1/2, 1/4 and 1/8 of 800 bytes over distances of 1, 2 and
    4 nodes. The links between groups have half of the total rate of the ports of all ranks."""
    mesh, whole = Mesh(dp=8, tp=2), 400 / 10 + 200 / 10 + 100 / 10
    for letters, seconds in (
        ("AAAABBBB", whole + 100 / 10),
        ("AABBAABB", whole + 200 / 10),
        ("ABABABAB", whole + 400 / 10),
        ("AABBABAB", 2 * whole),  # in each step, some pairs leave their group
    ):
        groups = groups_of(mesh, topology(letters))["dp"]
        of_groups = [collective_s("all_reduce", 800.0, ranks, LINKS, "halving") for ranks in groups]
        assert of_groups == pytest.approx([2 * seconds]), letters


@pytest.mark.parametrize("letters", ["AAAABCBC", "BCBCAAAA"])
def test_the_slowest_process_group_determines_the_time(letters):
    """The nodes of one stage are in one group. The nodes of the other stage alternate between two
    groups, so the reduction over dp of this stage takes longer, and determines the time."""
    mesh = Mesh(pp=2, dp=4, tp=2)
    assert reduction_s(mesh, "AAAABBBB") == pytest.approx(2 * 3 / 4 * 800 / 10)
    of_groups = [
        collective_s("all_reduce", 800.0, ranks, LINKS)
        for ranks in groups_of(mesh, topology(letters))["dp"]
    ]
    assert sorted(of_groups) == pytest.approx([120, 240])
    groups = groups_of(mesh, topology(letters))
    step = Step(((),) * 2, 1, groups, reductions=(Reduction("dp", "all_reduce", 800.0),))
    assert step_time(step, rates()).total_s == pytest.approx(240)
    transfer = Network(groups, LINKS, "ring").collective("all_reduce", 800.0, "dp")
    assert transfer == Transfer(120.0, (0, 1, 1))  # at the rate of the ports


def test_the_order_of_ranks_in_a_ring_matters():
    """Each stage has two nodes in group A and two in group B. In the order AABB, two ring edges
    cross groups. In the order ABAB of the second stage, each rank sends to the other group, so the
    ring takes twice as long."""
    mesh = Mesh(pp=2, dp=4, tp=2)
    assert reduction_s(mesh, "AABBAABB") == pytest.approx(2 * 3 / 4 * 800 / 10)
    assert reduction_s(mesh, "AABBABAB") == pytest.approx(2 * 3 / 4 * 800 / 5)


def test_process_groups_within_a_group_differ_by_their_nodes():
    """With nodes of 4 ranks and ep = 3, the ranks of the first process group are on one node. The
    ranks of the second process group are on two nodes, so its collectives take longer."""
    groups = groups_of(Mesh(dp=2, ep=3), Topology(4, (0, 0), (4, 8)))["ep"]
    assert groups == ((0, 1, 2), (3, 4, 5))
    links = Link("node", 4, 100.0), Link("group", 8, 10.0)
    of_groups = [collective_s("all_reduce", 300.0, ranks, links) for ranks in groups]
    assert of_groups == pytest.approx([2 * 2 / 3 * 300 / 100, 2 * 2 / 3 * 300 / 10])


def test_the_ends_of_all_pipelines_count():
    """Pipelines that begin on the first node have both ends in one group. Pipelines that begin on
    the second node end in another group, and determine the time of collectives over the ends."""
    ends = groups_of(Mesh(pp=2, dp=2, tp=2), topology("AAAB"))[ENDS]
    assert ends == ((0, 4), (2, 8))
    assert slowest_s("all_reduce", 800.0, ends, LINKS) == pytest.approx(800 / 5)


def test_aligned_hosts_that_fill_groups_have_the_process_groups_of_a_plan_without_hosts():
    """If the process groups are aligned to nodes and to groups of nodes, all process groups of an
    axis have equal times, so the first process group represents all others, as in a plan without
    hosts."""
    for mesh in (Mesh(dp=8, tp=2), Mesh(pp=2, dp=2, ep=2, tp=2), Mesh(pp=4, ep=4)):
        groups = dict(groups_of(mesh, topology("AAAABBBB")))
        del groups[STAGES]
        assert groups == groups_of(mesh)
        assert groups_of(mesh, Topology(2, None, (2, 8))) == groups_of(mesh)  # groups are unknown
        assert groups_of(mesh, Topology(2, (0, 1, 0, 1, 0, 1, 0, 1), (2,))) == groups_of(mesh)
        assert groups_of(mesh, topology("ABABABAB")) != groups_of(mesh)


def test_process_groups_that_are_not_aligned_count_in_any_order_of_the_hosts():
    """A group of nodes has 8 ranks. With ep = 3, the ranks of the first process group are on two
    neighbouring nodes. The third process group determines the time. Its ranks are in different
    groups of nodes, even if the hosts fill group after group."""
    mesh, seconds = Mesh(dp=4, ep=3), []
    for letters in ("AAAABB", "AABABA"):
        groups = groups_of(mesh, topology(letters))["ep"]
        seconds.append(slowest_s("all_to_all", 300.0, groups, LINKS))
    assert seconds == pytest.approx([100 / 5, 100 / 5])
    assert slowest_s("all_to_all", 300.0, groups_of(mesh)["ep"], LINKS) == pytest.approx(10)


def test_half_full_groups_have_the_links_of_whole_groups():
    """Each group contains one stage of 2 nodes. As in full groups, no collective over dp leaves a
    group."""
    mesh = Mesh(pp=4, dp=2, tp=2)
    assert reduction_s(mesh, "AABBCCDD") == reduction_s(mesh, "AAAABBBB")


def test_sends_leave_the_group_if_a_pipeline_does():
    mesh = Mesh(pp=2, dp=4, tp=2)

    def send(letters: str) -> Transfer:
        sends = Network(groups_of(mesh, topology(letters)), LINKS, "ring").sends(100.0)
        assert len(set(sends.values())) == 1
        return sends[0, True]

    assert send("AAAABBBB") == Transfer(10.0, (0, 1, 1))
    assert send("AABBAABB") == Transfer(10.0, (0, 1, 0))  # no pipeline leaves its group
    assert send("AABBABAB") == Transfer(10.0, (0, 1, 1))  # two of four pipelines leave it
    groups = groups_of(mesh, topology("AABBABAB"))
    step = Step(((),) * 2, 1, groups, transfer_bytes=100.0, transfers_block=True)
    assert step_time(step, rates()).exposed_s["pp"] == pytest.approx(2 * 100 / 5)


def test_ranks_of_all_stages_in_a_group_share_its_links():
    mesh = Mesh(pp=2, dp=4, tp=2)

    def shared(letters: str) -> SharedLevel:
        network = Network(groups_of(mesh, topology(letters)), LINKS, "ring")
        return network.shared_levels({1, 2})[2]

    mixed = SharedLevel(4.0, [[4.0, 4.0], [4.0, 4.0]], [[0, 1], [0, 1]])
    assert shared("AABBAABB") == mixed
    apart = SharedLevel(4.0, [[8.0, 0.0], [0.0, 4.0], [0.0, 4.0]], [[0], [1, 2]])
    assert shared("AAAABCBC") == apart


def hosts_file(path, racks: int, count: int, shuffled: bool) -> str:
    """Write the names of `count` nodes in `racks` racks of Aurora to the file `path`. Return the
    path."""
    hosts = [f"x{4000 + r}c{c}s{s}b0n0" for r in range(racks) for c in range(8) for s in range(8)]
    if shuffled:
        random.Random("hosts").shuffle(hosts)
    path.write_text("\n".join(hosts[:count]))
    return str(path)


def planned(capsys, *options: str) -> dict:
    assert main(["plan", str(RUN), "--machine", "aurora", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_has_the_step_time_of_the_hosts_and_of_a_better_order(tmp_path, capsys):
    """A run has 256 nodes in 4 racks, and stages of 32 nodes. With hosts in random order, a step
    takes longer than with ordered hosts. The plan prints the step time of the better order. The
    option --write-hosts writes this order to a file."""
    plain = planned(capsys, "--nodes", "256")
    ordered = planned(capsys, "--hosts", hosts_file(tmp_path / "ordered", 4, 256, False))
    assert ordered["step"] == plain["step"] and "better_step_s" not in ordered
    written, trace = tmp_path / "written", tmp_path / "trace"
    shuffled = hosts_file(tmp_path / "shuffled", 4, 256, True)
    options = "--write-hosts", str(written)
    result = planned(capsys, "--hosts", shuffled, *options)
    assert result["step"]["step_s"] > plain["step"]["step_s"]
    assert result["step"]["exposed_s"]["dp"] > 2 * plain["step"]["exposed_s"]["dp"]
    assert result["imbalance"]["step_s"] > plain["imbalance"]["step_s"]
    better = planned(capsys, "--hosts", str(written))
    assert result["better_step_s"] == better["step"]["step_s"] == plain["step"]["step_s"]
    assert main(["plan", str(RUN), "--machine", "aurora", "--hosts", shuffled]) == 0
    gain = result["step"]["step_s"] - result["better_step_s"]
    line = f"{result['better_step_s']:,.4g} s, {gain:,.4g} s less, with the hosts of --write-hosts"
    assert line in capsys.readouterr().out
    assert planned(capsys, "--hosts", shuffled, "--trace", str(trace)) == result
    events = json.loads(trace.read_text())["traceEvents"]
    ends = [event["ts"] + event.get("dur", 0.0) for event in events if "ts" in event]
    assert max(ends) == pytest.approx(result["step"]["step_s"] * 1e6, rel=1e-6)


def test_more_hosts_of_a_group_than_its_level_has_are_a_single_line_and_status_2(tmp_path, capsys):
    file = tmp_path / "hosts"
    names = [f"x4305c{c}s{s}b0n{n}" for n in range(2) for c in range(8) for s in range(8)]
    file.write_text("\n".join(names[:65] + [f"x4306c0s0b0n{n}" for n in range(191)]))
    assert main(["plan", str(RUN), "--machine", "aurora", "--hosts", str(file)]) == 2
    error = capsys.readouterr().err
    assert "the group of x4306c0s0b0n0 has 191 hosts, but a group of aurora has 64 nodes" in error
    assert "correct the list, or host_group or ranks of the level group" in error
    assert error.count("\n") == 1


def test_names_without_groups_leave_the_step_time_and_the_plan_says_so(tmp_path, capsys):
    file = tmp_path / "hosts"
    file.write_text("\n".join(f"node{number}" for number in range(256)))
    result = planned(capsys, "--hosts", str(file))
    assert result["step"] == planned(capsys)["step"] and "better_step_s" not in result
    assumed = "the step time assumes that consecutive ranks fill group after group"
    assert assumed in result["topology"]["unknown"]


def test_a_search_has_the_ranking_of_hosts_that_fill_groups_and_says_so(tmp_path, capsys, caplog):
    small = CONFIGS / "run" / "mula-1b.toml"
    file = hosts_file(tmp_path / "hosts", 2, 2, True)
    settings = ["model.num_layers=2", "model.num_attention_heads=1", "parallel.dp=0"]
    search = ["plan", str(small), "--machine", "aurora", "--search", "--json", *settings]
    search.append("train.global_batch_tokens=98304")
    assert main([*search, "--nodes", "2"]) == 0
    expected = capsys.readouterr().out
    assert main([*search, "--hosts", file]) == 0
    printed = capsys.readouterr()
    assert printed.out == expected
    assert "the order of --hosts has no effect on the search" in printed.err + caplog.text
