"""Faults of supervised runs: ranks, agents, nodes and supervisors that fail while a run trains.

`run_case` does one run with a fault, `run_sequence` one run with several faults, each after the run
has recovered from the one before.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from optimus.resilience.supervision.ledger import AttemptStarted, SupervisorStarted
from tests.kit.faults.supervised import (
    HEARTBEAT_S,
    LIMIT_S,
    NODES,
    RANKS,
    STEPS,
    Allocation,
    Expected,
    Launch,
    References,
    check,
    check_checkpoints,
    local_nodes,
    send,
    write_config,
)

SEQUENCE_STEPS = 300
BUFFER_NODES, SEQUENCE_BUFFER_NODES = 2, 4
_LAST_STEPS = 50
"""No fault of a sequence begins in its last updates, since the run could end before the fault."""

Fault = Callable[[Any, random.Random], Expected]
"""A fault: breaks processes of a running launch, which is the first argument and of the class that
the case needs. Returns what this must cause."""


class Case(NamedTuple):
    """A fault, and the runs in which it can be tried."""

    fault: Fault
    excludes: int = 0
    """Number of buffer nodes that the fault needs in a sequence."""
    settings: Mapping[str, Any] = {}
    """Settings of the run, as for `write_config`."""
    buffer_nodes: int = BUFFER_NODES
    in_sequences: bool = True
    """False if no other fault can follow, or if the run needs other settings."""


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


def _nan_on_rank(launch: Launch, chance: random.Random) -> Expected:
    node = _node(launch, chance)
    launch.break_rank("nan", node, chance.randrange(RANKS))
    return _excluded(node)


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


# -- Supervisors ----------------------------------------------------------------------------------


def _kill_supervisor(launch: Launch, chance: random.Random) -> Expected:
    launch.process.kill()
    launch.process.wait()
    time.sleep(chance.random())
    _restart(launch)
    return Expected()


def _freeze_supervisor(launch: Launch, chance: random.Random) -> Expected:
    """Suspend the supervisor, start another one, and let the first one continue."""
    first = launch.process
    first.send_signal(signal.SIGSTOP)
    _restart(launch)
    first.send_signal(signal.SIGCONT)
    first.wait(30)
    return Expected()


def _restart(launch: Launch) -> None:
    """Start another supervisor, and wait until it has taken over."""
    supervisors = launch.count(SupervisorStarted)
    launch.restart()
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


CASES: dict[str, Case] = {
    "rank-kill": Case(_kill_rank(signal.SIGKILL), 1),
    "rank-segv": Case(_kill_rank(signal.SIGSEGV), 1),
    "rank-freeze": Case(_freeze_rank, 1),
    "nan": Case(_nan_on_rank, 1),
    "agent-kill": Case(_kill_agent, 1),
    "agent-freeze": Case(_freeze_agent, 1),
    "agent-pause": Case(_pause_agent),
    "node-kill": Case(_kill_node, 1),
    "node-freeze": Case(_freeze_node, 1),
    "kill-in-start": Case(_kill_in_start, 2),
    "supervisor-kill": Case(_kill_supervisor),
    "supervisor-freeze": Case(_freeze_supervisor),
    "supervisor-and-node-kill": Case(_kill_supervisor_and_node, 1),
    "all-kill": Case(_kill_all),
}


# -- Runs -----------------------------------------------------------------------------------------


def run_case(
    references: References,
    name: str,
    seed: int,
    allocation: Allocation | None = None,
    cases: Mapping[str, Case] = CASES,
    launch_type: type[Launch] = Launch,
) -> dict[str, Any]:
    """Do one run with one fault.

    Args:
        references: Curves of unbroken runs. The run is a folder next to theirs.
        name: The case.
        seed: Seed of the run.
        allocation: Nodes; None for emulated ones.
        cases: All cases.
        launch_type: Class of the launch.

    Returns:
        The result; `problems` is empty if all is right.
    """
    case, chance = cases[name], random.Random(f"{name} {seed}")
    config = write_config(
        references.work, references.data, f"{name}-{seed}", STEPS, **case.settings
    )
    began = time.monotonic()
    launch = launch_type(config, allocation or local_nodes(case.buffer_nodes))
    expected, problems = Expected(), []
    try:
        launch.wait_for_step(chance.randrange(2, STEPS // 2))
        expected = case.fault(launch, chance)
    except Exception as error:  # any error is a result of the drill
        problems.append(f"{type(error).__name__}: {error}")
    curve = references.curve(STEPS, expected.unbroken, **case.settings)
    return _result(launch, [name], expected, curve, problems, case=name, seed=seed, began=began)


def run_sequence(
    references: References,
    seed: int,
    allocation: Allocation | None = None,
    names: Sequence[str] = (),
    steps: int = SEQUENCE_STEPS,
    cases: Mapping[str, Case] = CASES,
    launch_type: type[Launch] = Launch,
) -> dict[str, Any]:
    """Do one run with several faults, and check it at its end. The next fault begins when the run
    has recovered from the one before.

    Args:
        references: Curves of unbroken runs. The run is a folder next to theirs.
        seed: Seed of the run.
        allocation: Nodes; None for emulated ones.
        names: Cases from which the faults are chosen; () for all that are possible.
        steps: Number of updates.
        cases: All cases.
        launch_type: Class of the launch.

    Returns:
        The result; `problems` is empty if all is right.
    """
    chance = random.Random(f"sequence {seed}")
    allocation = allocation or local_nodes(SEQUENCE_BUFFER_NODES)
    began = time.monotonic()
    launch = launch_type(
        write_config(references.work, references.data, f"sequence-{seed}", steps), allocation
    )
    expected, played, problems = Expected(), list[str](), list[str]()
    try:
        while launch.process.poll() is None:
            at = launch.step() + chance.randrange(1, 12)
            if at > steps - _LAST_STEPS:
                break
            launch.wait_for_step(at)
            free = len(allocation.nodes) - NODES - [*expected.standings.values()].count("excluded")
            possible = [
                name
                for name in names or cases
                if cases[name].in_sequences and cases[name].excludes <= free
            ]
            played.append(chance.choice(possible))
            ended = len(launch.history().ends)
            fault = cases[played[-1]].fault(launch, chance)
            expected = expected.joined(fault)
            launch.wait_for_recovery(fault, ended)
            problems += check_checkpoints(launch.run_dir)
            _wait_for_checkpoint(launch)
    except Exception as error:  # any error is a result of the drill
        problems.append(f"{type(error).__name__}: {error}")
    curve = references.curve(steps, expected.unbroken)
    return _result(
        launch, played, expected, curve, problems, case="sequence", seed=seed, began=began
    )


def _wait_for_checkpoint(launch: Launch) -> None:
    """Wait for a checkpoint of the present attempt if the one before has committed none: the
    supervisor stops a run whose attempts make no progress."""
    history = launch.history()
    committed = [attempt.attempt in history.checkpoints for attempt in history.attempts[-2:]]
    if any(committed):
        return

    def checkpoint() -> bool:
        history = launch.history()
        return history.attempts[-1].attempt in history.checkpoints

    launch.wait_until(checkpoint)


def _result(
    launch: Launch,
    played: Sequence[str],
    expected: Expected,
    curve: Any,
    problems: Sequence[str],
    *,
    case: str,
    seed: int,
    began: float,
) -> dict[str, Any]:
    """Wait for the end of a launch, and return the record of its result."""
    status = None if problems else launch.end(LIMIT_S)
    wrong = [*problems, *check(launch, status, expected, curve)]
    launch.thaw()
    if wrong:
        launch.kill()
    return {
        "case": case,
        "seed": seed,
        "launcher": launch.allocation.launcher,
        "faults": list(played),
        "attempts": launch.count(AttemptStarted),
        "seconds": round(time.monotonic() - began, 1),
        "problems": wrong,
    }
