"""Tests of the observation of an attempt: ends of ranks, silent agents, cuts of the network, and
hanging ranks."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from typing import Any

import pytest

from optimus.resilience.supervision import supervisor
from optimus.resilience.supervision.agent import hash_code
from optimus.resilience.supervision.attempt import Progress
from optimus.resilience.supervision.channel import Channel
from optimus.resilience.supervision.decide import find_cause
from optimus.resilience.supervision.ledger import AttemptEnded, AttemptStarted
from optimus.resilience.supervision.messages import End, Hello, Message, RankReport, Report
from tests.kit.faults.supervised import make_job


def hello(name: str, attempt: int = 0, pid: int = 5) -> Hello:
    """Return the first message of the agent on the node `name`. The supervisor runs on the machine
    of node a."""
    host = socket.gethostname() if name == "a" else name
    figures = {"code": hash_code(), "time": time.time(), "open_files": 4096}
    return Hello(node=name, host=host, attempt=attempt, pid=pid, **figures)


def test_agents_that_ended_with_their_supervisor_are_no_failure_of_their_node(tmp_path):
    """The only node of a run, which also runs the supervisor, was restarted. If the new supervisor
    never got a message of the lost agent, it attributes the failure to no node. If it got a message
    before the agent became silent, it attributes the failure to the node."""
    watcher = supervisor.Supervisor(make_job(tmp_path))
    attempt = AttemptStarted(time=2, attempt=1, nodes=("a",), ranks_per_node=1, port=1)
    assert find_cause(watcher._observer.evidence(attempt, 0.0), 1, 0.0).outcome == "interrupted"
    watcher._agents.nodes["a"].heard_at = -100.0
    assert find_cause(watcher._observer.evidence(attempt, 0.0), 1, 0.0).nodes == ("a",)


@pytest.mark.parametrize(
    ("heard_at", "is_cut_off"),
    [
        ({"a": 9.9, "b": 5.0, "c": 5.5}, True),
        ({"a": 9.9, "b": 5.0, "c": 9.5}, False),  # c answers
        ({"a": 9.9, "b": 5.0, "c": 2.0}, False),  # c was lost earlier
        ({"a": 9.9, "b": 5.0, "c": 2.0, "d": 5.5}, True),
        ({"a": 5.0, "b": 5.0, "c": 5.0}, False),  # the node of the supervisor is silent, too
        ({"a": 9.9, "b": 5.0}, False),  # with one other node, this node may be lost
    ],
)
def test_supervisor_notices_that_its_node_is_cut_off(tmp_path, heard_at, is_cut_off):
    watcher = supervisor.Supervisor(make_job(tmp_path, nodes=("a", "b", "c", "d")))
    for name, time_s in heard_at.items():
        watcher._agents.nodes[name].hello = hello(name)
        watcher._agents.nodes[name].heard_at = time_s
    assert watcher._agents.is_cut_off(10.0) == is_cut_off
    watcher._lock.close()


@pytest.mark.parametrize(
    ("phases", "collectives", "is_stalled"),
    [
        (("update", "update"), (7, 7), True),
        (("update", "save"), (7, 7), False),  # a save has its own limit
        (("update", "update"), (7, 8), False),  # the second report of rank 1
    ],
)
def test_ranks_that_all_hang_have_a_limit(tmp_path, phases, collectives, is_stalled):
    watcher = supervisor.Supervisor(make_job(tmp_path, timeout_s=10.0))
    attempt = AttemptStarted(time=1, attempt=1, nodes=("a", "b"), ranks_per_node=1, port=1)
    watcher._history.add(attempt)

    def report(clock_s: float, second: int) -> None:
        watcher._agents.clock_s = clock_s
        for rank, node in enumerate(watcher._agents.nodes.values()):
            progress = Progress(5, second if rank else 7, phases[rank], clock_s + rank, 4, 0, {})
            node.ranks[rank] = RankReport(rank=rank, pid=3, progress=progress)
            node.heard_at = clock_s

    async def run() -> Any:
        report(1.0, collectives[0])
        observing = asyncio.create_task(watcher._observer.observe(attempt, False))
        await asyncio.sleep(0.3)
        report(30.0, collectives[1])
        await asyncio.sleep(0.3)
        if observing.done():
            return observing.result()
        observing.cancel()
        return None

    evidence = asyncio.run(run())
    watcher._lock.close()
    assert (evidence is not None) == is_stalled
    if is_stalled:
        end = find_cause(evidence, 2, 0.0)
        assert (end.failure, end.nodes, end.signature) == ("ambiguous", ("b",), "no progress")
        assert end.evidence[0] == "no rank has started a collective for 29 s"


def test_ends_of_ranks_are_in_the_order_in_which_they_were_reported(tmp_path):
    """A rank of the second node crashes, and then a rank of the first node ends with an error. The
    evidence keeps the order of the reports, so the failure is attributed to the second node."""
    watcher = supervisor.Supervisor(make_job(tmp_path))
    attempt = AttemptStarted(time=1, attempt=1, nodes=("a", "b"), ranks_per_node=1, port=1)
    watcher._history.add(attempt)
    nodes = watcher._agents.nodes
    for rank, node, status in ((1, nodes["b"], -signal.SIGSEGV), (0, nodes["a"], 1)):
        node.attempt, node.heard_at = 1, 0.0
        report = RankReport(rank=rank, pid=3, status=status)
        watcher._agents._receive(node, Report(attempt=1, ranks=(report,), lines=()))
    watcher._lock.close()
    evidence = watcher._observer.evidence(attempt, 0.0)
    assert [end.rank for end in evidence.ends] == [1, 0]
    assert find_cause(evidence, 2, 0.0).nodes == ("b",)


def test_no_node_is_blamed_if_it_connects_again_after_others(tmp_path):
    watcher = supervisor.Supervisor(make_job(tmp_path, nodes=("a", "b", "c")))
    attempt = AttemptStarted(time=1, attempt=1, nodes=("a", "b"), ranks_per_node=1, port=1)
    for node in watcher._agents.nodes.values():
        node.hello = hello(node.name)
        node.heard_at = 5.0
    watcher._agents.nodes["a"].heard_at = 10.0
    assert watcher._observer.evidence(attempt, 10.0).is_cut_off
    watcher._agents.nodes["a"].heard_at = watcher._agents.nodes["c"].heard_at = 10.5
    assert not watcher._observer.evidence(attempt, 10.5).unreachable
    watcher._agents.nodes["a"].heard_at = watcher._agents.nodes["c"].heard_at = 11.5
    assert watcher._observer.evidence(attempt, 11.5).unreachable == ("b",)
    watcher._lock.close()


@pytest.mark.parametrize(
    ("silent_s", "is_connected", "nodes"),
    [(1.3, True, ("b",)), (1.3, False, None), (2.3, False, ("b", "a"))],
)
def test_agents_that_are_lost_shortly_after_each_other_are_lost_together(
    tmp_path, silent_s, is_connected, nodes
):
    """`scancel` ends the job steps of the agents one after the other. If an agent counts as lost,
    and another agent has lost its connection, the supervisor must wait until this other agent
    counts as lost, too."""
    watcher = supervisor.Supervisor(make_job(tmp_path))
    attempt = AttemptStarted(time=1, attempt=1, nodes=("a", "b"), ranks_per_node=1, port=1)
    for node, heard_at in zip(watcher._agents.nodes.values(), (5.8, 5.0), strict=True):
        node.hello, node.heard_at = hello(node.name), heard_at
    connected: Any = object()
    watcher._agents.nodes["a"].channel = connected if is_connected else None
    now = 5.0 + silent_s
    evidence = watcher._observer.evidence(attempt, now)
    is_conclusive = watcher._observer._is_conclusive(evidence, 2, 0.0, silent_s, False)
    watcher._lock.close()
    assert is_conclusive == (nodes is not None)
    if nodes is not None:
        assert evidence.unreachable == nodes


@pytest.mark.parametrize(("attempt", "is_known"), [(2, True), (1, False)])
def test_reports_count_before_a_takeover_is_complete(tmp_path, attempt, is_known):
    """Slurm ends a job while a supervisor takes over attempt 2. The ranks end first, and then the
    agents. An agent reports the end of a rank before the takeover is complete. The report must
    count if the agent runs attempt 2, and must not count if the agent runs attempt 1."""
    watcher = supervisor.Supervisor(make_job(tmp_path))
    started = AttemptStarted(time=1, attempt=2, nodes=("a", "b"), ranks_per_node=1, port=1)
    watcher._history.add(started)
    channel: Any = None
    node = watcher._agents._welcome(channel, hello("b", attempt))
    assert node is not None
    report = RankReport(rank=1, pid=3, status=3)
    watcher._agents._receive(node, Report(attempt=attempt, ranks=(report,), lines=()))
    watcher._lock.close()
    assert (1 in node.ended) == is_known


@pytest.mark.parametrize(("attempt", "answer"), [(0, End), (1, End), (2, EOFError)])
def test_second_agent_of_a_node_ends_unless_its_ranks_may_run(tmp_path, attempt, answer):
    """Node b was suspended in attempt 1. Another job began attempt 2, so that node b has two agents
    when it continues. The second agent to connect gets the message End if it has no ranks of
    attempt 2. If it has, the supervisor closes the connection without the message End."""
    watcher = supervisor.Supervisor(make_job(tmp_path))
    for number in (1, 2):
        more = {"nodes": ("a", "b"), "ranks_per_node": 1, "port": 1}
        watcher._history.add(AttemptStarted(time=1, attempt=number, **more))
        if number == 1:
            watcher._history.add(AttemptEnded(time=2, attempt=1, outcome="stopped", step=5))

    async def receive() -> type:
        (host, *_), port = await watcher._agents.listen()
        channels = []
        for pid in (5, 6):
            connection = await asyncio.open_connection(host, port)
            channels.append(await Channel.open(*connection, "agent", watcher._agents._secret))
            await channels[-1].send(hello("b", attempt, pid))
            try:
                message: Any = await channels[-1].receive(Message)
            except EOFError as error:
                message = error
        for channel in channels:
            await channel.close()
        await watcher._agents.close()
        return type(message)

    assert issubclass(asyncio.run(receive()), answer)
    watcher._lock.close()


def test_agent_with_a_wrong_clock_may_try_again(tmp_path):
    """The clock of an agent's node shows a time that is an hour too early. No other agent runs on
    this node, so the supervisor closes the connection without the message End, and the agent tries
    again."""
    watcher = supervisor.Supervisor(make_job(tmp_path))
    started = {"nodes": ("a", "b"), "ranks_per_node": 1, "port": 1}
    watcher._history.add(AttemptStarted(time=1, attempt=1, **started))
    watcher._history.add(AttemptEnded(time=2, attempt=1, outcome="stopped", step=5))

    async def receive() -> None:
        (host, *_), port = await watcher._agents.listen()
        connection = await asyncio.open_connection(host, port)
        channel = await Channel.open(*connection, "agent", watcher._agents._secret)
        await channel.send(hello("b", 1).model_copy(update={"time": time.time() - 3600}))
        try:
            with pytest.raises(EOFError):  # not the message End
                await channel.receive(Message)
        finally:
            await channel.close()
            await watcher._agents.close()

    asyncio.run(receive())
    watcher._lock.close()
