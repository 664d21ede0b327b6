"""Faults of supervised runs: ranks, agents, nodes and supervisors that fail while a run trains.

failure_runs.py does runs with these faults.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import psutil

from optimus.checkpoint import store
from optimus.errors import OutcomeKind
from optimus.resilience.supervision.decide import STOPPED_BY_SUPERVISOR
from optimus.resilience.supervision.ledger import LEDGER, AttemptStarted, SupervisorStarted
from tests.kit.faults.supervised import (
    HEARTBEAT_S,
    INTERVAL,
    NODES,
    RANKS,
    Allocation,
    Expected,
    Launch,
    local_nodes,
    progress_of,
    send,
)
from tests.kit.runs.tiny import CONTEXT

SEQUENCE_STEPS = 300
_LONG_INTERVAL = 15
"""`checkpoint.interval` of a run in which a rank is killed before the next checkpoint."""
END_MARGIN_S = 5.0
"""`resilience.end_margin_s` of a run in a job with a time limit."""
BUFFER_NODES, SEQUENCE_BUFFER_NODES = 2, 4

Fault = Callable[[Any, random.Random], Expected]
"""Function `fault(launch, chance)` that breaks processes of the running launch `launch`, makes
random choices with `chance`, and returns the expected effects. `launch` has the class that the case
needs."""


class Case(NamedTuple):
    """A fault, and the runs in which it can be tried."""

    fault: Fault
    excludes: int = 0
    """Number of nodes that the fault excludes. A sequence needs this number of free buffer
    nodes."""
    settings: Mapping[str, Any] = {}
    """Settings of the run, as for `write_config`."""
    nodes: Allocation = local_nodes(BUFFER_NODES)
    """Nodes of the run, unless the drill passes other nodes."""
    in_sequences: bool = True
    """True if the fault can occur in a sequence of faults. False if no other fault can follow the
    fault, or if the run with the fault needs other settings."""


def _excluded(*nodes: str, restarts: int = 1) -> Expected:
    return Expected(dict.fromkeys(nodes, "excluded"), (restarts, restarts))


def _node(launch: Launch, chance: random.Random) -> str:
    """Return a random node with ranks."""
    return chance.choice(launch.active())


# -- Ranks ----------------------------------------------------------------------------------------


def _kill_rank(number: int) -> Fault:
    def fault(launch: Launch, chance: random.Random) -> Expected:
        node = _node(launch, chance)
        send([chance.choice(launch.ranks(node))], number)
        return _excluded(node)

    return fault


def _freeze_rank(launch: Launch, chance: random.Random) -> Expected:
    node = _node(launch, chance)
    is_suspect = launch.history().standing(node) == "suspect"
    launch.freeze([chance.choice(launch.ranks(node))])
    return Expected({node: "excluded" if is_suspect else "suspect"}, (1, 1))


def _freeze_all_ranks(launch: Launch, chance: random.Random) -> Expected:
    """Suspend all ranks during an update, so that no rank notices that another rank does not
    answer."""
    ended = len(launch.history().ends)
    ranks = [process for node in launch.active() for process in launch.ranks(node)]

    def are_updating() -> bool:
        launch.freeze(ranks)
        if all(progress_of(rank).phase == "update" for rank in ranks):
            return True
        launch.thaw()  # the time limit of a collective does not apply to saves
        time.sleep(0.1 * chance.random())
        return False

    launch.wait_until(are_updating)
    launch.wait_until(lambda: len(launch.history().ends) > ended)
    end = [*launch.history().ends.values()][-1]
    assert "no rank has started a collective" in " ".join(end.evidence), end
    return Expected({end.nodes[0]: "suspect"}, (1, 1))


def _break_rank(kind: str) -> Fault:
    """Return a fault that tests/kit/faults/site/sitecustomize.py causes inside of a random rank."""

    def fault(launch: Launch, chance: random.Random) -> Expected:
        node = _node(launch, chance)
        launch.break_rank(kind, node, chance.randrange(RANKS))
        return _excluded(node)

    return fault


def _forbid_writes(launch: Launch, chance: random.Random) -> Expected:
    """Let all writes of a rank fail, as on a full disk. All ranks end after a failed save."""
    chance.choice(launch.ranks(_node(launch, chance))).rlimit(psutil.RLIMIT_FSIZE, (0, 0))
    return Expected(restarts=(1, 1))


def _kill_two_ranks(launch: Launch, chance: random.Random) -> Expected:
    """Kill a rank on each of two nodes at once."""
    nodes = chance.sample(launch.active(), 2)
    send([chance.choice(launch.ranks(node)) for node in nodes], signal.SIGKILL)
    return _excluded(*nodes)


def _kill_in_load(launch: Launch, chance: random.Random) -> Expected:
    """Kill a rank. In the next attempt, kill a second rank, which is on another node, while this
    second rank loads the checkpoint."""
    first, second = chance.sample(launch.active(), 2)
    launch.break_rank("kill-in-load", second, chance.randrange(RANKS))
    send([chance.choice(launch.ranks(first))], signal.SIGKILL)
    return _excluded(first, second, restarts=2)


def _repeat_failure(times: int) -> Fault:
    """Return a fault that lets the same rank fail `times` times at the same step, on any node, as a
    defect of the program would do."""

    def fault(launch: Launch, chance: random.Random) -> Expected:
        rank, step = chance.randrange(RANKS * NODES), launch.step() + 3
        first = launch.active()[rank // RANKS]
        ended = len(launch.history().ends)
        launch.break_rank("raise", "*", f"g{rank}", step)
        if times < 3:
            launch.wait_until(lambda: len(launch.history().ends) == ended + times)
            launch.remove_faults()
            return Expected({first: "good"}, (times, times))
        return Expected({first: "good"}, (times, times), "stop", STOPPED_BY_SUPERVISOR)

    return fault


def _bad_checkpoint(launch: Launch, chance: random.Random) -> Expected:
    """Save a checkpoint whose weights give NaN, and kill a rank, so that the run resumes from this
    checkpoint."""
    first, second = launch.active()
    step = (launch.step() // _LONG_INTERVAL + 2) * _LONG_INTERVAL  # an older checkpoint exists
    launch.break_rank("bad-save", "*", "*", step)
    path = store.full_path(launch.run_dir, step)
    launch.wait_until(path.exists)
    send([chance.choice(launch.ranks(second))], signal.SIGKILL)
    # In each of the next two attempts, rank 0 is the first rank with NaN, on a different node each
    # time.
    return Expected({second: "excluded", first: "good"}, (3, 3))


def _nan_from_data(launch: Launch, chance: random.Random) -> Expected:
    """Let the data of a later update give NaN on any node. The run must stop."""
    step = _break_data(launch, chance)
    first = launch.active()[0]
    launch.wait_until(lambda: launch.history().verdict is not None)
    verdict = launch.history().verdict
    reason = verdict.reason if verdict is not None else ""
    for text in (f"step {step}, microbatch 0", "optimus-data inspect ", "documents: ", "marker: "):
        assert text in reason, (text, reason)
    return Expected({first: "good"}, (2, 2), "stop", STOPPED_BY_SUPERVISOR)


def _nan_from_data_skipped(launch: Launch, chance: random.Random) -> Expected:
    """Let the data of a later update give NaN in a run with `resilience.on_repeat_nan = "skip"`.
    The run must skip this update."""
    step, first = _break_data(launch, chance), launch.active()[0]
    launch.wait_for_step(step)
    return Expected({first: "good"}, (2, 2), unbroken=(f"data * * {step}", f"skip * * {step}"))


def _break_data(launch: Launch, chance: random.Random) -> int:
    # Not the first step after a checkpoint, so that an attempt first completes another update.
    step = (launch.step() // INTERVAL + 2) * INTERVAL + chance.randrange(2, INTERVAL + 1)
    launch.break_rank("data", "*", "*", step)
    return step


# -- Agents and nodes -----------------------------------------------------------------------------


def _kill_agent(launch: Launch, chance: random.Random) -> Expected:
    node = _node(launch, chance)
    send([launch.agents()[node]], signal.SIGKILL)
    return _excluded(node)


def _kill_node(launch: Launch, chance: random.Random) -> Expected:
    node = _node(launch, chance)
    send(launch.node(node), signal.SIGKILL)
    return _excluded(node)


def _freeze_node(launch: Launch, chance: random.Random) -> Expected:
    """Suspend a node, and let it continue some time after the other nodes train again."""
    node = _node(launch, chance)
    step, ended = launch.step(), len(launch.history().ends)
    launch.freeze(launch.node(node))
    launch.wait_for_recovery(_excluded(node), ended)
    launch.wait_for_step(step + 4)
    time.sleep(4 * chance.random())
    launch.thaw()
    return _excluded(node)


def _freeze_agent(launch: Launch, chance: random.Random) -> Expected:
    node = _node(launch, chance)
    launch.freeze([launch.agents()[node]])
    time.sleep(HEARTBEAT_S + 2.0)
    launch.thaw()
    return _excluded(node)


def _pause_agent(launch: Launch, chance: random.Random) -> Expected:
    """Suspend an agent for less than the time after which it counts as lost."""
    launch.freeze([launch.agents()[_node(launch, chance)]])
    time.sleep(HEARTBEAT_S / 2)
    launch.thaw()
    return Expected()


def _kill_in_start(launch: Launch, chance: random.Random) -> Expected:
    """Kill a rank, and kill the agent of another node while the ranks start again."""
    first, second = chance.sample(launch.active(), 2)
    attempts = launch.count(AttemptStarted)
    send([chance.choice(launch.ranks(first))], signal.SIGKILL)
    launch.wait_until(lambda: launch.count(AttemptStarted) > attempts)
    time.sleep(chance.random())
    send([launch.agents()[second]], signal.SIGKILL)
    return _excluded(first, second, restarts=2)


def _kill_warm_process(launch: Launch, chance: random.Random) -> Expected:
    """Kill the warm process of a node, from which the ranks of the node are forked."""
    node = _node(launch, chance)
    send(launch.agents()[node].children(), signal.SIGKILL)
    return _excluded(node)


def _kill_nodes(launch: Launch, chance: random.Random) -> Expected:
    """Let two nodes lose power at once."""
    nodes = chance.sample(launch.active(), 2)
    send([process for node in nodes for process in launch.node(node)], signal.SIGKILL)
    return _excluded(*nodes)


def _freeze_node_to_the_end(launch: Launch, chance: random.Random) -> Expected:
    """Suspend a node until the run has ended."""
    node = _node(launch, chance)
    launch.freeze(launch.node(node))
    return _excluded(node)


def _kill_in_recovery(launch: Launch, chance: random.Random) -> Expected:
    """Kill a rank. While the supervisor handles this failure, kill the agent of another node."""
    first, second = chance.sample(launch.active(), 2)
    ended = len(launch.history().ends)
    send([chance.choice(launch.ranks(first))], signal.SIGKILL)
    time.sleep(0.6 * chance.random())
    send([launch.agents()[second]], signal.SIGKILL)
    launch.wait_for_recovery(_excluded(first), ended)
    if second in launch.history().attempts[ended + 1].nodes:  # the attempt started before the kill
        return _excluded(first, second, restarts=2)
    return _excluded(first)._replace(unusable={second: ended + 2})


def _kill_buffer_node(launch: Launch, chance: random.Random) -> Expected:
    """Kill the first buffer node, and then a node with ranks."""
    spare = launch.allocation.nodes[launch.allocation.used]
    send(launch.node(spare), signal.SIGKILL)
    time.sleep(2 * HEARTBEAT_S * chance.random())
    return _kill_node(launch, chance)._replace(unusable={spare: 1})


def _exhaust(on_exhausted: str) -> Fault:
    """Return a fault that kills a node in a run without buffer nodes. Unless `on_exhausted` is
    "stop", a later launch continues the run on all nodes."""

    def fault(launch: Launch, chance: random.Random) -> Expected:
        node = _node(launch, chance)
        send(launch.node(node), signal.SIGKILL)
        if on_exhausted == "stop":
            return Expected({node: "excluded"}, (1, 1), "stop", STOPPED_BY_SUPERVISOR)
        if on_exhausted == "shrink":
            launch.wait_for_recovery(_excluded(node), 0)
            assert len(launch.active()) == launch.allocation.used - 1
            launch.process.send_signal(signal.SIGTERM)
        launch.require(OutcomeKind.STOPPED.exit_status, "continue")
        launch.restart("--pardon", node)
        launch.wait_until(lambda: len(launch.active()) == launch.allocation.used)
        return Expected({node: "good"}, (1, 1))

    return fault


# -- Supervisors ----------------------------------------------------------------------------------


def _kill_supervisor(launch: Launch, chance: random.Random) -> Expected:
    launch.process.kill()
    launch.process.wait()
    time.sleep(chance.random())
    _restart(launch)
    return Expected()


def _freeze_supervisor(launch: Launch, chance: random.Random) -> Expected:
    """Suspend the supervisor, start another supervisor, and let the first supervisor continue."""
    first = launch.process
    first.send_signal(signal.SIGSTOP)
    _restart(launch)
    first.send_signal(signal.SIGCONT)
    first.wait(30)
    return Expected()


def _restart(launch: Launch, *options: str) -> None:
    """Start another supervisor, and wait until this supervisor has taken over the run."""
    supervisors = launch.count(SupervisorStarted)
    launch.restart(*options)
    launch.wait_until(lambda: launch.count(SupervisorStarted) > supervisors)


def _kill_supervisor_and_node(launch: Launch, chance: random.Random) -> Expected:
    node = _node(launch, chance)
    processes = launch.node(node)
    launch.process.kill()
    launch.process.wait()
    send(processes, signal.SIGKILL)
    _restart(launch)
    return _excluded(node)


def _kill_all(launch: Launch, chance: random.Random) -> Expected:
    """Kill the supervisor and all nodes, as the end of a job does, and launch again."""
    launch.kill()
    _restart(launch)
    return Expected(restarts=(1, 1))


def _pause_supervisor(launch: Launch, chance: random.Random) -> Expected:
    """Suspend the supervisor for longer than the time after which silent agents count as lost."""
    launch.process.send_signal(signal.SIGSTOP)
    time.sleep(HEARTBEAT_S + 2 * chance.random())
    launch.process.send_signal(signal.SIGCONT)
    return Expected()


def _kill_supervisor_in_recovery(launch: Launch, chance: random.Random) -> Expected:
    """Kill a rank, and then kill the supervisor while it handles the failure or starts the next
    attempt."""
    node = _node(launch, chance)
    send([chance.choice(launch.ranks(node))], signal.SIGKILL)
    time.sleep(2 * chance.random())
    _kill_supervisor(launch, chance)
    return _excluded(node)


def _fill_disk_of_supervisor(launch: Launch, chance: random.Random) -> Expected:
    """Let the writes of the supervisor fail (immediately or in the middle of a line), and kill a
    rank."""
    supervisor = psutil.Process(launch.process.pid)
    _, hard = supervisor.rlimit(psutil.RLIMIT_FSIZE)
    size = (launch.run_dir / LEDGER).stat().st_size
    supervisor.rlimit(psutil.RLIMIT_FSIZE, (chance.choice([0, size + 20]), hard))
    expected = _kill_rank(signal.SIGKILL)(launch, chance)
    time.sleep(4 * chance.random())
    supervisor.rlimit(psutil.RLIMIT_FSIZE, (hard, hard))
    return expected


def _stop_by_signal(number: int) -> Fault:
    """Return a fault that sends a stop signal to the supervisor. Another launch then continues the
    run."""

    def fault(launch: Launch, chance: random.Random) -> Expected:
        launch.process.send_signal(number)
        launch.require(OutcomeKind.STOPPED.exit_status, "continue")
        _restart(launch)
        return Expected()

    return fault


def _pardon(launch: Launch, chance: random.Random) -> Expected:
    """End the job, as a user does to repair nodes, and use all excluded nodes in the next job."""
    marks = launch.history().standings.items()
    excluded = [node for node, mark in marks if mark.standing == "excluded"]
    launch.process.send_signal(signal.SIGTERM)
    launch.require(OutcomeKind.STOPPED.exit_status, "continue")
    launch.remove_faults()
    _restart(launch, *(word for node in excluded for word in ("--pardon", node)))
    return Expected(dict.fromkeys(excluded, "good"))


def _end_job(launch: Launch, chance: random.Random) -> Expected:
    """Continue the run in a job whose end is near, and then in another job."""
    launch.process.send_signal(signal.SIGTERM)
    launch.require(OutcomeKind.STOPPED.exit_status, "continue")
    end = time.time() + 15.0 + END_MARGIN_S
    step = launch.step()
    launch.restart(SLURM_JOB_ID="7", SLURM_JOB_END_TIME=str(int(end)))
    launch.require(OutcomeKind.STOPPED.exit_status, "continue")
    assert time.time() < end, "the run ended after its job"
    assert launch.step() > step, "the job did no update"
    _restart(launch)
    return Expected()


CASES: dict[str, Case] = {
    "rank-kill": Case(_kill_rank(signal.SIGKILL), 1),
    "rank-segv": Case(_kill_rank(signal.SIGSEGV), 1),
    "rank-freeze": Case(_freeze_rank, 1),
    "rank-freeze-all": Case(_freeze_all_ranks, in_sequences=False),
    "rank-raise": Case(_break_rank("raise"), 1),
    "rank-exit": Case(_break_rank("exit"), 1),
    "rank-memory": Case(_break_rank("memory"), 1),
    "rank-data-error": Case(_break_rank("data-error"), 1),
    "rank-disk-full": Case(
        _forbid_writes, settings={"checkpoint__max_failures": 1}, in_sequences=False
    ),
    "two-ranks": Case(_kill_two_ranks, 2),
    "kill-in-load": Case(_kill_in_load, 2),
    "kill-in-save": Case(_break_rank("kill-in-save"), 1),
    "kill-in-update": Case(_break_rank("kill-in-update"), 1),
    "nan": Case(_break_rank("nan"), 1),
    "nan-stages": Case(_break_rank("nan"), settings={"parallel__pp": 2}, in_sequences=False),
    "bad-checkpoint": Case(
        _bad_checkpoint,
        settings={"checkpoint__interval": _LONG_INTERVAL},
        nodes=local_nodes(3),
        in_sequences=False,
    ),
    "repeat": Case(_repeat_failure(2), 1),
    "repeat-stop": Case(_repeat_failure(3), in_sequences=False),
    "nan-data": Case(_nan_from_data, in_sequences=False),
    "nan-data-skip": Case(
        _nan_from_data_skipped, settings={"resilience__on_repeat_nan": "skip"}, in_sequences=False
    ),
    "agent-kill": Case(_kill_agent, 1),
    "agent-freeze": Case(_freeze_agent, 1),
    "agent-pause": Case(_pause_agent),
    "warm-kill": Case(_kill_warm_process, 1),
    "node-kill": Case(_kill_node, 1),
    "node-freeze": Case(_freeze_node, 1),
    "node-freeze-to-the-end": Case(_freeze_node_to_the_end, 1),
    "two-nodes": Case(
        _kill_nodes,
        settings={"train__global_batch_tokens": 24 * CONTEXT},
        nodes=local_nodes(2, used=3),
        in_sequences=False,
    ),
    "kill-in-start": Case(_kill_in_start, 2),
    "kill-in-recovery": Case(_kill_in_recovery, in_sequences=False),
    "buffer-node-kill": Case(_kill_buffer_node, in_sequences=False),
    **{
        f"exhausted-{action}": Case(
            _exhaust(action),
            settings={"resilience__on_exhausted": action},
            nodes=local_nodes(0),
            in_sequences=False,
        )
        for action in ("shrink", "requeue", "stop")
    },
    "supervisor-kill": Case(_kill_supervisor),
    "supervisor-freeze": Case(_freeze_supervisor),
    "supervisor-pause": Case(_pause_supervisor),
    "supervisor-disk-full": Case(_fill_disk_of_supervisor, 1),
    "supervisor-kill-in-recovery": Case(_kill_supervisor_in_recovery, 1),
    "supervisor-and-node-kill": Case(_kill_supervisor_and_node, 1),
    "all-kill": Case(_kill_all),
    "job-signal": Case(_stop_by_signal(signal.SIGTERM)),
    "job-interrupt": Case(_stop_by_signal(signal.SIGINT)),
    "pardon": Case(_pardon),
    "job-end": Case(
        _end_job, settings={"resilience__end_margin_s": END_MARGIN_S}, in_sequences=False
    ),
}
