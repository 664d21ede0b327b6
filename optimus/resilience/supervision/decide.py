"""Decisions of the supervisor: which node caused a failure, and how the run continues.

The functions `find_cause` and `decide` are pure: equal arguments give equal results. The arguments
include the time.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Literal, NamedTuple, TypeAlias

from optimus.errors import OutcomeKind, counted
from optimus.launch.signals import STOP_SIGNALS, signal_name
from optimus.resilience.supervision.attempt import RankPhase
from optimus.resilience.supervision.ledger import (
    AttemptEnded,
    AttemptStarted,
    FailureKind,
    History,
    Standing,
)
from optimus.resilience.supervision.markers import LayerOutput, Marker

Marks: TypeAlias = Mapping[str, tuple[Standing, str]]
"""Maps each node whose standing changes to (new standing, reason)."""
STOPPED_BY_SUPERVISOR = 6
"""Exit status of `optimus launch` if the supervisor stops the run."""
_SILENT = "silent"
"""Signature of a failure in which the agent of a node has become silent."""
_NONFINITE = OutcomeKind.NONFINITE.exit_status
_STATE = "nonfinite state"
"""Signature of a non-finite value that the training data did not cause, such as a value in a
damaged optimizer state."""
_NO_EVIDENCE = {
    *(0, OutcomeKind.STOPPED.exit_status, OutcomeKind.LOST_PEER.exit_status),
    _NONFINITE,  # only a marker shows the rank that computed the non-finite value
    *(-number for number in STOP_SIGNALS),  # the scheduler can send these signals to ranks
}
"""Exit statuses that do not show the rank on which a failure began."""


# -- Cause of a failure ---------------------------------------------------------------------------


class RankEnd(NamedTuple):
    """The end of a rank's process, as its agent reports it."""

    rank: int
    node: str
    status: int
    """Exit status; -N if signal N ended the process."""
    was_ended: bool = False
    """True if Optimus, mpiexec or the scheduler sent a signal to this process before it ended."""
    message: str = ""
    """The last error that the rank printed, in one line; "" if there is none."""
    was_adopted: bool = False
    """True if the rank ended with the exit status of another rank's error, after all ranks had
    agreed on this error."""


class RankProgress(NamedTuple):
    """The last progress that a rank has reported."""

    rank: int
    node: str
    step: int
    collectives: int
    """Number of collectives that the rank has started in this attempt."""
    phase_s: float
    """Seconds since the rank entered its present phase."""
    failure: int = 0
    """Exit status of the error that the rank has raised; 0 if it has raised no error. The process
    of the rank still runs."""
    phase: RankPhase = "update"


@dataclass(frozen=True)
class Evidence:
    """Observations on an attempt (a launch of all ranks), from which `find_cause` finds the cause
    of its end."""

    attempt: int
    step: int
    """Last step that a rank of the launch attempt has reached."""
    ends: tuple[RankEnd, ...] = ()
    """The ends of ranks, the earliest first."""
    markers: tuple[Marker, ...] = ()
    nodes: tuple[str, ...] = ()
    """All nodes with ranks of the launch attempt."""
    unreachable: tuple[str, ...] = ()
    """Nodes of the launch attempt whose agents have not sent a message for `heartbeat_s`, the
    longest silence first."""
    restarted: tuple[str, ...] = ()
    """Nodes whose agent was started again while no supervisor ran, so that their ranks have
    ended."""
    progress: tuple[RankProgress, ...] = ()
    stalled_s: float = 0.0
    """Seconds for which no rank has started a collective, if they exceed the limit; otherwise 0."""
    has_progressed: bool = False
    """True if a launch attempt of the job has started an update, so that the settings of the run
    must be valid."""
    launch_problem: str = ""
    """The reason why mpiexec has not started all ranks; "" if mpiexec has started all ranks or may
    still start them."""
    is_cut_off: bool = False
    """True if all nodes except the node of the supervisor became silent at the same time. The cause
    is then probably the network of the supervisor's node."""


class _Cause(NamedTuple):
    """The cause of the end of a launch attempt, found in one type of observation."""

    outcome: Literal["done", "stopped", "failed", "usage", "interrupted"]
    failure: FailureKind | None = None
    nodes: Sequence[str] = ()
    signature: str = ""
    lines: Sequence[str] = ()
    """Further observations for `AttemptEnded.evidence`."""
    step: int | None = None
    """Step of the failure; None if the failure was in the last step of the attempt."""


def find_cause(evidence: Evidence, ranks: int, now: float) -> AttemptEnded:
    """Return the event for the end of a launch attempt with `ranks` ranks. The event contains the
    cause of the end.

    Several observations may show a cause. The strongest observation determines the cause. From
    strongest to weakest:

    1. A rank has written a marker, which describes a non-finite value.
    2. All ranks have ended without an error.
    3. An agent is silent.
    4. mpiexec has not started all ranks.
    5. Ranks have refused their configuration.
    6. A rank has ended with an exit status or by a signal that is not the result of another rank's
       failure. The first such end counts.
    7. A rank has started the fewest collectives. Of several such ranks, the rank with the longest
       time in its phase counts. A failure that only this observation shows is ambiguous.
    """
    markers = sorted(evidence.markers, key=lambda marker: (marker.step, marker.rank))
    lines = [
        *(_describe_marker(markers[0]) if markers else ()),
        *(f"marker of rank {m.rank} on {m.node}: {m.text}" for m in markers[1:]),
        *(f"the agent of {node} is silent" for node in evidence.unreachable),
        *(f"the agent of {node} has no ranks any more" for node in evidence.restarted),
        *(_describe(end) for end in evidence.ends if _is_cause(end)),
    ]
    cause = None
    if markers:
        first = markers[0]
        signature = f"nonfinite {first.data_xxh3}" if first.data_xxh3 else _STATE
        cause = _Cause("failed", "soft", [first.node], signature, step=first.step)
    cause = (
        cause
        or _cause_in_success(evidence, ranks)
        or _cause_in_silence(evidence)
        or _cause_in_launch(evidence)
        or _cause_in_refusals(evidence)
        or _cause_in_statuses(evidence)
        or _cause_in_progress(evidence)
    )
    return AttemptEnded(
        time=now,
        attempt=evidence.attempt,
        outcome=cause.outcome,
        step=evidence.step if cause.step is None else cause.step,
        failure=cause.failure,
        nodes=tuple(dict.fromkeys(cause.nodes)),
        signature=cause.signature,
        evidence=(*lines, *cause.lines),
    )


def _cause_in_success(evidence: Evidence, ranks: int) -> _Cause | None:
    """Return the cause if all ranks have ended without an error, even if agents were lost later;
    otherwise None."""
    statuses = {end.status for end in evidence.ends}
    if len(evidence.ends) != ranks or not statuses <= {0, OutcomeKind.STOPPED.exit_status}:
        return None
    return _Cause("done" if statuses == {0} else "stopped")


def _cause_in_silence(evidence: Evidence) -> _Cause | None:
    """Return the cause if agents are silent or have lost their ranks; otherwise None."""
    if evidence.is_cut_off:
        line = "the node of the supervisor is cut off from all other nodes"
        return _Cause("interrupted", lines=[line])
    gone = {*evidence.unreachable, *evidence.restarted}
    if gone == {*evidence.nodes} and (len(gone) > 1 or evidence.restarted):
        return _Cause("interrupted")  # the supervisor's network or the whole job failed
    if evidence.unreachable:
        return _Cause("failed", "hard", evidence.unreachable, _SILENT)
    if evidence.restarted:
        return _Cause("failed", "ambiguous", evidence.restarted, _SILENT)
    return None


def _cause_in_launch(evidence: Evidence) -> _Cause | None:
    """Return the cause if mpiexec has not started all ranks; otherwise None. The failure is not
    attributed to a node."""
    if not evidence.launch_problem:
        return None
    return _Cause("failed", "shared", signature="mpiexec", lines=[evidence.launch_problem])


def _cause_in_refusals(evidence: Evidence) -> _Cause | None:
    """Return the cause if ranks have refused their configuration; otherwise None.

    After an update, the configuration is known to be valid. A refusal then has another cause, such
    as a file system that does not answer, and the function returns None.
    """
    if evidence.has_progressed:
        return None
    usage = OutcomeKind.USAGE.exit_status
    refusals = [end for end in evidence.ends if end.status == usage and not end.was_adopted]
    # At the start, the first rank checks settings and the run directory for all ranks.
    is_of_first = evidence.step == 0 and any(end.rank == 0 for end in refusals)
    if refusals and (is_of_first or {end.node for end in refusals} == {*evidence.nodes}):
        return _Cause("usage", lines=[end.message for end in refusals if end.message])
    return None


def _cause_in_statuses(evidence: Evidence) -> _Cause | None:
    """Return the cause if a rank has ended with an exit status or by a signal that shows a failure;
    otherwise None."""
    causes = [end for end in evidence.ends if _is_cause(end)]
    if causes:
        signature, nodes = _signature(causes[0]), [cause.node for cause in causes]
        if causes[0].status < 0:
            killed = [cause.node for cause in causes if cause.status < 0]
            return _Cause("failed", "hard", killed, signature)
        if len(set(map(_signature, causes))) == 1 < len(set(nodes)):
            # All ranks agreed on this error.
            return _Cause("failed", "shared", signature=signature)
        return _Cause("failed", "hard", nodes[:1], signature)
    nonfinite = [end for end in evidence.ends if end.status == _NONFINITE and not end.was_ended]
    if nonfinite:
        line = f"{_describe(nonfinite[0])}; there is no marker"
        return _Cause("failed", "shared", signature=f"status {_NONFINITE}", lines=[line])
    return None


def _cause_in_progress(evidence: Evidence) -> _Cause:
    """Return the cause if no rank has ended with an error. The failure is attributed to the node of
    the running rank with the least progress. If no running rank has reported progress, the failure
    is not attributed to a node."""
    if evidence.progress:
        slowest = min(evidence.progress, key=lambda rank: (rank.collectives, -rank.phase_s))
        line = (
            f"rank {slowest.rank} on {slowest.node} has started the fewest collectives "
            f"({slowest.collectives}) and has been in its phase for {slowest.phase_s:.1f} s"
        )
        lines = [f"no rank has started a collective for {evidence.stalled_s:.0f} s", line]
        lines = lines if evidence.stalled_s else lines[1:]
        return _Cause("failed", "ambiguous", [slowest.node], "no progress", lines)
    lines = [f"{_describe(end)} (by Optimus or mpiexec)" for end in evidence.ends[:1]]
    return _Cause("failed", "shared", signature="unknown", lines=lines)


def names_cause(evidence: Evidence) -> bool:
    """Return True if the ends of ranks already show the cause of a failure.

    The result is True if a rank has ended with an error that is not the result of another rank's
    failure, and if no running rank has raised an error. The second condition is needed because a
    running rank that has raised an error may end with the same error as the first rank. A failure
    of several ranks with the same error is not attributed to a node.
    """
    has_ended = any(_is_cause(rank_end) for rank_end in evidence.ends)
    return has_ended and all(rank.failure in _NO_EVIDENCE for rank in evidence.progress)


def _is_cause(end: RankEnd) -> bool:
    return not (end.was_ended or end.was_adopted) and end.status not in _NO_EVIDENCE


def _signature(end: RankEnd) -> str:
    # The message is not in the signature: it may contain a temporary name, and only one rank prints
    # an error on which all ranks agree.
    return f"signal {-end.status}" if end.status < 0 else f"status {end.status}"


def _describe(end: RankEnd) -> str:
    how = f"exit status {end.status}"
    if end.status < 0:
        how = signal_name(-end.status)
    return f"rank {end.rank} on {end.node} ended by {how}: {end.message}".removesuffix(": ")


def _describe_marker(marker: Marker) -> list[str]:
    """Return lines of text that describe a non-finite value, for the evidence of a failure."""
    lines = [f"marker of rank {marker.rank} on {marker.node}: {marker.text}"]
    where = [f"step {marker.step}"]
    if marker.microbatch is not None:
        where.append(f"microbatch {marker.microbatch}")
    if marker.direction:
        where.append(marker.direction)
    again = "also gave" if marker.was_repeated else "did not give"
    lines.append(f"{', '.join(where)}; a second computation {again} a non-finite value")
    if marker.instances:
        first, *others = marker.instances
        more = f" (and {counted(len(others), 'more instance')})" if others else ""
        command = f"optimus-data inspect {shlex.quote(first.data)} {first.instance}"
        lines.append(f"to see the data: {command}{more}")
    if marker.layers:
        # The first layer with a non-finite output and the layer before it, or the last two layers.
        layers = [*marker.layers.items()]
        bad = [index for index, (_, output) in enumerate(layers) if output.nonfinite]
        last = bad[0] if bad else len(layers) - 1
        figures = "; ".join(starmap(_describe_output, layers[max(0, last - 1) : last + 1]))
        lines.append(f"outputs of layers: {figures}")
    if marker.path:
        lines.append(f"marker: {marker.path}")
    return lines


def _describe_output(name: str, output: LayerOutput) -> str:
    text = f"{name} {output.nonfinite:.1%} non-finite"
    if output.min is None or output.max is None or output.mean is None:
        return text
    return f"{text}, min {output.min:.4g}, max {output.max:.4g}, mean {output.mean:.4g}"


# -- Decision -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """Settings on which the decisions of the supervisor depend."""

    sizes: tuple[int, ...]
    """Numbers of nodes for which the run's configuration is valid, ascending. The last number is
    the value of `--nodes`."""
    on_exhausted: Literal["shrink", "requeue", "stop"] = "requeue"
    on_repeat_nan: Literal["stop", "skip"] = "stop"
    max_restarts: int = 100
    """Maximum number of restarts in a job."""
    max_attempts_without_progress: int = 3
    """Maximum number of consecutive failed attempts that commit no checkpoint."""
    least_s: float = 60.0
    """Another attempt is started only if the job has at least this number of seconds left."""


@dataclass(frozen=True)
class Decision:
    """The next action of the supervisor, and the nodes whose standing changes. The supervisor adds
    `marks` to the ledger before it carries out the action."""

    action: Literal["start", "done", "continue", "stop"]
    """start: launch an attempt. The other actions end the job. done: the run is complete. continue:
    a later job continues the run. stop: the run waits for the user."""
    reason: str
    status: int = 0
    """Exit status of `optimus launch`, unless `action` is "start"."""
    nodes: tuple[str, ...] = ()
    """Nodes of the next launch attempt, in the order of their ranks."""
    marks: Marks = field(default_factory=dict)
    load: Literal["newest", "older"] = "newest"
    skipped_steps: tuple[int, ...] = ()


def decide(
    history: History, policy: Policy, reachable: Sequence[str], remaining_s: float
) -> Decision:
    """Decide how a run continues when no launch attempt is running.

    Args:
        history: The state of the run, including the end of the last attempt.
        policy: Settings.
        reachable: Nodes of the allocation whose agents answer, in the order of the allocation.
        remaining_s: Seconds until the end of the job; infinity without a limit.
    """
    last = history.attempts[-1] if history.attempts else None
    skipped = last.skipped_steps if last is not None else ()
    if last is None or len(history.attempts) == history.first_of_job:
        nodes = _assign((), _usable(history, reachable, {}), policy)
        if nodes is None:
            return _exhausted(policy, {}, "the allocation has too few usable nodes")
        return Decision("start", "the job begins", nodes=nodes, skipped_steps=skipped)
    end = history.ends[last.attempt]
    match end.outcome:
        case "done":
            return Decision("done", "the run has reached its last step")
        case "stopped":
            reason = "the run stopped at its deadline or by a signal, after a checkpoint"
            return Decision("continue", reason, OutcomeKind.STOPPED.exit_status)
        case "usage":
            reason = "; ".join(end.evidence) or "a rank refused its configuration"
            return Decision("stop", reason, OutcomeKind.USAGE.exit_status)
    marks: dict[str, tuple[Standing, str]] = {}
    reason = "; ".join(end.evidence[:2]) or end.signature
    load: Literal["newest", "older"] = "newest"
    earlier = _repeated(history, last, end)
    if earlier is not None:
        # The failure of the first node has also occurred on a second node, so no node is the cause.
        names = earlier.nodes[:1] + end.nodes[:1] or ("all ranks",)
        shared = f"{' and '.join(names)} failed in the same way at step {end.step}: {reason}"
        accused = [node for node in earlier.nodes if history.standing(node) != "good"]
        marks.update(dict.fromkeys(accused, ("good", shared)))
        if end.failure == "soft" and not end.updates and last.load == "newest":
            load = "older"  # the attempt made no update, so the loaded weights may be bad
        elif end.failure == "soft":
            if policy.on_repeat_nan == "stop" or end.signature == _STATE:
                prefix = "two nodes have" if end.signature == _STATE else "the same data gives"
                report = f"{' and '.join(names)}: {'; '.join(end.evidence)}"
                return _stop(
                    f"{prefix} non-finite values, so no node is the cause: {report}", marks
                )
            skipped = tuple(sorted({*skipped, end.step}))
        elif last.load == "older":
            return _stop(f"{shared}; a start from the older checkpoint failed, too", marks)
        else:
            load = "older"
        reason = shared
    elif end.outcome == "interrupted":
        reason = "the ranks ended together with their agents or their job"
    elif end.failure in ("hard", "soft"):
        marks.update(dict.fromkeys(end.nodes, ("excluded", reason)))
    elif end.failure == "ambiguous":
        for node in end.nodes:
            is_second = history.standing(node) == "suspect"
            marks[node] = "excluded" if is_second else "suspect", reason
    failures = history.failures(of_job=True)
    if len(failures) > policy.max_restarts:
        return _stop(f"the job has failed {counted(len(failures), 'time')}: {reason}", marks)
    without_progress = _attempts_without_progress(history)
    if without_progress >= policy.max_attempts_without_progress and load == "newest":
        number = counted(without_progress, "attempt")
        return _stop(f"{number} in a row committed no checkpoint: {reason}", marks)
    nodes = _assign(last.nodes, _usable(history, reachable, marks), policy)
    if nodes is None:
        return _exhausted(policy, marks, reason)
    if remaining_s < policy.least_s:
        text = f"{reason}; the job ends in {remaining_s:.0f} s"
        return Decision("continue", text, OutcomeKind.STOPPED.exit_status, marks=marks)
    return Decision("start", reason, nodes=nodes, marks=marks, load=load, skipped_steps=skipped)


def _repeated(history: History, last: AttemptStarted, end: AttemptEnded) -> AttemptEnded | None:
    """Return the last earlier failure with the same cause as the failure `end`; None if there is
    none.

    Two failures have the same cause if their signatures and steps are equal and one of these
    conditions is true:

    - The failures are attributed to different nodes.
    - Neither failure is attributed to a node.
    - The failures are attributed to the same node, and the last attempt started from the older
      checkpoint. An attempt starts from this checkpoint only after the failure has been repeated,
      so that no node is the cause.

    Non-finite values are compared with all earlier failures of the run. Any other failure is
    compared only with the failure directly before it in this job, and only after the first update,
    because unrelated failures could have the same signature by chance. A failure in which an agent
    became silent is not compared: neither the data nor the program of a run can make a node silent.
    """
    is_nonfinite = end.failure == "soft"
    if end.outcome != "failed" or end.signature == _SILENT or (not end.step and not is_nonfinite):
        return None
    candidates = history.failures() if is_nonfinite else history.failures(of_job=True)[-2:]
    same = [
        earlier
        for earlier in candidates
        if earlier.attempt != end.attempt
        and (earlier.signature, earlier.step) == (end.signature, end.step)
        and bool(earlier.nodes) == bool(end.nodes)
        and (last.load == "older" or not {*earlier.nodes} & {*end.nodes})
    ]
    return same[-1] if same else None


def _attempts_without_progress(history: History) -> int:
    """Return the number of consecutive attempts, counted back from the last attempt of this job,
    that did not commit a checkpoint."""
    number = 0
    for attempt in reversed(history.attempts[history.first_of_job :]):
        if attempt.attempt in history.checkpoints:
            break
        number += 1
    return number


def _usable(history: History, reachable: Sequence[str], marks: Marks) -> list[str]:
    """Return the reachable nodes that are not excluded, with the suspect nodes last.

    `marks` contains the nodes whose standing ("good", "suspect" or "excluded") has just changed.
    `marks` takes precedence over `history`, which does not contain these changes yet.
    """

    def standing(node: str) -> Standing:
        return marks[node][0] if node in marks else history.standing(node)

    usable = [node for node in reachable if standing(node) != "excluded"]
    return sorted(usable, key=lambda node: standing(node) == "suspect")


def _assign(before: Sequence[str], usable: Sequence[str], policy: Policy) -> tuple[str, ...] | None:
    """Return the nodes of the next launch attempt in the order of their ranks; None if too few
    nodes are usable.

    Each node that is still usable keeps its ranks. A free node takes the ranks of a failed node.

    Args:
        before: Nodes of the last attempt; () if there was no attempt.
        usable: Nodes that can be used, in the order of preference.
        policy: Settings.
    """
    full = policy.sizes[-1]
    allowed = [size for size in policy.sizes if size <= len(usable)]
    if policy.on_exhausted != "shrink":
        allowed = [size for size in allowed if size == full]
    if not allowed:
        return None
    size = allowed[-1]
    kept = [node if node in usable else "" for node in before][:size]
    kept += [""] * (size - len(kept))
    free = [node for node in usable if node not in kept]
    return tuple(node or free.pop(0) for node in kept)


def _stop(reason: str, marks: Marks) -> Decision:
    return Decision("stop", reason, STOPPED_BY_SUPERVISOR, marks=marks)


def _exhausted(policy: Policy, marks: Marks, reason: str) -> Decision:
    text = f"{reason}; no buffer node is free"
    if policy.on_exhausted == "requeue":
        return Decision("continue", text, OutcomeKind.STOPPED.exit_status, marks=marks)
    return _stop(text, marks)
