"""Supervised runs with the faults of failures.py, and the checks at their end.

`run_case` does one run with one fault. `run_sequence` does one run with several faults, each after
the run has recovered from the previous fault.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from optimus.resilience.supervision.ledger import AttemptStarted
from tests.kit.faults.failures import CASES, SEQUENCE_BUFFER_NODES, SEQUENCE_STEPS, Case
from tests.kit.faults.supervised import (
    LIMIT_S,
    STEPS,
    Allocation,
    Expected,
    Launch,
    References,
    check,
    check_checkpoints,
    local_nodes,
    write_config,
)

_LAST_STEPS = 50
"""Number of updates at the end of a run in which no fault begins, because the run could end before
the fault."""


def run_case(
    references: References,
    name: str,
    seed: int,
    allocation: Allocation | None = None,
    cases: Mapping[str, Case] = CASES,
    launch_type: type[Launch] = Launch,
) -> dict[str, Any]:
    """Do one run with one fault, and check its result.

    Args:
        references: Curves of unbroken runs. The directory of the new run is in `references.work`.
        name: Name of the case (fault).
        seed: Seed of the random choices.
        allocation: Nodes of the run; None for emulated nodes.
        cases: All cases by name.
        launch_type: Class that launches the run.

    Returns:
        The record of the run. Its list `problems` is empty if all checks have passed.
    """
    case, chance = cases[name], random.Random(f"{name} {seed}")
    config = write_config(
        references.work, references.data, f"{name}-{seed}", STEPS, **case.settings
    )
    began = time.monotonic()
    launch = launch_type(config, allocation or case.nodes)
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
    most_faults: int = 1000,
    cases: Mapping[str, Case] = CASES,
    launch_type: type[Launch] = Launch,
) -> dict[str, Any]:
    """Do one run with several faults, and check its result. Each fault begins after the run has
    recovered from the previous fault.

    Args:
        references: Curves of unbroken runs. The directory of the new run is in `references.work`.
        seed: Seed of the random choices.
        allocation: Nodes of the run; None for emulated nodes.
        names: Names of the cases from which the faults are chosen; () for all possible cases.
        steps: Number of updates.
        most_faults: Maximum number of faults. No fault begins in the last _LAST_STEPS updates.
        cases: All cases by name.
        launch_type: Class that launches the run.

    Returns:
        The record of the run. Its list `problems` is empty if all checks have passed.
    """
    chance = random.Random(f"sequence {seed}")
    allocation = allocation or local_nodes(SEQUENCE_BUFFER_NODES)
    began = time.monotonic()
    launch = launch_type(
        write_config(references.work, references.data, f"sequence-{seed}", steps), allocation
    )
    expected, played, problems = Expected(), list[str](), list[str]()
    try:
        while launch.process.poll() is None and len(played) < most_faults:
            # Choose a step after the step of the last failure. If the same failure occurs at the
            # same step on another node, the supervisor attributes the failure to no node.
            failed = max((end.step for end in launch.history().ends.values()), default=0)
            at = max(launch.step(), failed) + chance.randrange(1, 12)
            if at > steps - _LAST_STEPS:
                break
            launch.wait_for_step(at)
            lost = [*expected.standings.values()].count("excluded")
            free = len(allocation.nodes) - allocation.used - lost
            possible = [
                name
                for name in names or cases
                if cases[name].in_sequences and cases[name].excludes <= free
            ]
            needs_nodes = not free and "pardon" in (names or cases)
            played.append("pardon" if needs_nodes else chance.choice(possible))
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
    """Return at once if the current or the previous attempt has already committed a checkpoint.
    Otherwise wait until the current attempt commits a checkpoint. Without this wait, the attempts
    could make no progress, and the supervisor could stop the run for this reason."""
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
