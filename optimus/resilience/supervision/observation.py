"""Observes the ranks of a launch attempt, from the reports of their agents.

This module does not import torch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from optimus.checkpoint import store
from optimus.errors import OutcomeKind
from optimus.resilience.supervision.agent import BEATS_PER_LIMIT
from optimus.resilience.supervision.agents import LOOK_S, Agents, Job, Node
from optimus.resilience.supervision.decide import Evidence, RankEnd, RankProgress, names_cause
from optimus.resilience.supervision.ledger import LEDGER, AttemptStarted, Ledger, Progress
from optimus.resilience.supervision.markers import Marker, read_markers

logger = logging.getLogger(__name__)

_SAME_TIME_S = 0.3
"""Seconds to wait for further observations after a signal has ended a rank, or after a rank has
written a marker (the description of a non-finite value)."""
_AGREE_S = 6.0
"""Seconds to wait for the other ranks after a rank has ended without showing the cause of the
failure. Within this time, the ranks agree on the cause and end."""
_SAVE_S = 600.0
"""Longest time in seconds from a stop signal to the end of all ranks."""
_STALL_FACTOR = 1.2
"""An attempt has failed if no rank starts a collective for this factor * `parallel.timeout_s` +
_AGREE_S seconds. Ranks that wait for each other end earlier, after `parallel.timeout_s` seconds."""
_STOP_S = 60.0
"""Seconds to wait for the other ranks after a rank has ended without an error. Ranks end without an
error if the run is complete or stops."""
_CANNOT_START = 127
"""Exit status in the evidence for the first rank of a node whose agent cannot start the ranks."""
_NONFINITE = OutcomeKind.NONFINITE.exit_status
_LOST_PEER = OutcomeKind.LOST_PEER.exit_status


class Observer:
    """Observes attempts (launches of all ranks) until they end or fail. Records the first update
    and the checkpoints of each attempt in the ledger."""

    def __init__(self, job: Job, agents: Agents, ledger: Ledger) -> None:
        self._job, self._agents = job, agents
        self._ledger, self._history = ledger, ledger.history
        self.stopped_at_s = math.inf
        """Time of the stop signal to the ranks, by the supervisor's clock; infinity if no signal
        was sent."""
        self._cut_off_at_s = -math.inf
        """Last time, by the supervisor's clock, at which this node was cut off from all other
        nodes."""

    async def observe(
        self,
        attempt: AttemptStarted,
        by_mpiexec: bool,
        mpiexec: subprocess.Popen[bytes] | OSError | None = None,
    ) -> Evidence:
        """Wait until a launch attempt has ended or failed. Return the observations on the attempt.

        Args:
            attempt: The attempt.
            by_mpiexec: True if an mpiexec starts the ranks.
            mpiexec: The mpiexec that this supervisor has started, or the reason why it cannot be
                started; None if an earlier supervisor has started it.
        """
        first_end = changed_at = launch_ended = math.inf
        last: Sequence[RankProgress] = ()
        has_updated = self._history.has_updated(attempt)
        checkpoint = self._newest_checkpoint()
        world = len(attempt.nodes) * attempt.ranks_per_node
        next_look = 0.0
        while True:
            now = self._agents.clock_s
            nodes = [self._agents.nodes[name] for name in attempt.nodes]
            steps = [r.progress.step if r.progress else 0 for n in nodes for r in n.ranks.values()]
            if not has_updated and min(steps, default=0) > 0:
                has_updated = True
                self._add_progress(attempt, "first update", min(steps))
            if now >= next_look:
                next_look = now + 1.0
                if (newest := self._newest_checkpoint()) > checkpoint:
                    checkpoint = newest
                    self._add_progress(attempt, "checkpoint", newest)
            evidence = self.evidence(attempt, now)
            if not _are_equal(evidence.progress, last) or evidence.ends:
                changed_at, last = now, evidence.progress
            if now - changed_at > _STALL_FACTOR * self._job.timeout_s + _AGREE_S:
                return replace(evidence, stalled_s=now - changed_at)
            if problem := _launch_problem(mpiexec, world, nodes):
                launch_ended = min(launch_ended, now)
                # Wait for some time: if mpiexec has ended because a node is lost, the agent of this
                # node becomes silent.
                if now - launch_ended > 1.5 * self._job.heartbeat_s:
                    return replace(evidence, launch_problem=problem)
            if evidence.ends:
                first_end = min(first_end, now)
            silence_s = max((now - node.heard_at for node in nodes), default=0.0)
            if self._is_conclusive(evidence, world, now - first_end, silence_s, by_mpiexec):
                if (newest := self._newest_checkpoint()) > checkpoint:
                    self._add_progress(attempt, "checkpoint", newest)
                return self.evidence(attempt, now)
            await asyncio.sleep(LOOK_S)

    def _add_progress(self, attempt: AttemptStarted, milestone: Any, step: int) -> None:
        event = Progress(time=time.time(), attempt=attempt.attempt, milestone=milestone, step=step)
        try:
            self._ledger.add(event)
        except OSError as error:  # the next event also shows this progress
            logger.warning("%s: %s", LEDGER, error.strerror)

    def _newest_checkpoint(self) -> int:
        """Return the step of the newest full checkpoint; 0 if there is none."""
        paths = store.find_all(self._job.run_dir)
        names = [path.name for path in paths if path.name.startswith("step-")]
        return max((int(name.removeprefix("step-")) for name in names), default=0)

    def evidence(self, attempt: AttemptStarted, now: float) -> Evidence:
        """Return the observations on a launch attempt at the time `now` of the supervisor's
        clock."""
        nodes, per_node = (
            [self._agents.nodes[name] for name in attempt.nodes],
            attempt.ranks_per_node,
        )
        silent = [node for node in nodes if now - node.heard_at > self._job.heartbeat_s]
        silent.sort(key=lambda node: node.heard_at)
        if is_cut_off := bool(silent) and self._agents.is_cut_off(now):
            self._cut_off_at_s = now
        elif now - self._cut_off_at_s <= self._job.heartbeat_s:
            silent = []  # after a network failure, some agents connect later
        restarted = [node.name for node in nodes if node.has_lost_ranks and node not in silent]
        if all(math.isinf(node.heard_at) for node in nodes):
            # The agents and the last supervisor ended at the same time, for example because the
            # machine was rebooted. No node is the cause.
            silent, restarted = [], [*attempt.nodes]
        ends = [
            RankEnd(per_node * index, node.name, _CANNOT_START, message=node.failure)
            for index, node in enumerate(nodes)
            if node.failure
        ]
        progress, steps, in_order = [], [0], []
        for node in nodes:
            for rank in node.ended:
                if (report := node.ranks[rank]).status is None:
                    continue
                failure = report.progress.failure if report.progress else 0
                was_adopted = failure == _LOST_PEER != report.status
                end = (rank, node.name, report.status, report.was_ended, report.message)
                in_order.append((node.ended[rank], RankEnd(*end, was_adopted)))
            for rank, report in node.ranks.items():
                if (page := report.progress) is None:
                    continue
                steps.append(page.step)
                if report.status is None:
                    state = (page.step, page.collectives, page.phase_s, page.failure, page.phase)
                    progress.append(RankProgress(rank, node.name, *state))
        ends += [end for _, end in sorted(in_order, key=lambda entry: entry[0])]
        has_marker = any(end.status == _NONFINITE for end in ends)
        return Evidence(
            attempt.attempt,
            max(steps),
            tuple(ends),
            self.markers(attempt) if has_marker else (),
            attempt.nodes,
            tuple(node.name for node in silent),
            tuple(restarted),
            tuple(progress),
            is_cut_off=is_cut_off,
            has_progressed=any(map(self._history.has_updated, self._history.attempts_of_job())),
        )

    def markers(self, attempt: AttemptStarted) -> tuple[Marker, ...]:
        """Return the markers of a launch attempt, in which the ranks describe non-finite values."""
        markers = read_markers(self._job.run_dir, attempt.workspace)
        return tuple(marker for marker in markers if marker.node in attempt.nodes)

    def _is_conclusive(
        self, evidence: Evidence, world: int, since_s: float, silence_s: float, by_mpiexec: bool
    ) -> bool:
        """Return True if further observations cannot show the cause more clearly.

        Args:
            evidence: The observations.
            world: Number of ranks.
            since_s: Seconds since the first rank ended.
            silence_s: Longest time in seconds since the last message of an agent.
            by_mpiexec: True if an mpiexec has started the ranks.
        """
        if evidence.is_cut_off:  # if other agents connect again, no node has failed
            return silence_s > self._job.supervisor_timeout_s
        # If a node is lost, mpiexec ends all ranks, and the agent of this node becomes silent.
        by_mpiexec = by_mpiexec and all(end.was_ended for end in evidence.ends)
        if by_mpiexec and math.isinf(self.stopped_at_s) and not evidence.unreachable:
            return bool(evidence.ends) and since_s > 1.5 * self._job.heartbeat_s
        if evidence.restarted or len(evidence.ends) >= world:
            return True
        if evidence.unreachable:  # after a network failure, other agents are silent by now
            others = [self._agents.nodes[name] for name in evidence.nodes]
            if any(n.channel is None and n.name not in evidence.unreachable for n in others):
                return False  # an agent without a connection connects again or becomes silent
            return silence_s > (1 + 1.5 / BEATS_PER_LIMIT) * self._job.heartbeat_s
        if self._agents.clock_s - self.stopped_at_s > _SAVE_S:
            return True  # the ranks have not ended after the signal
        if not evidence.ends:
            return False
        stopped = {0, OutcomeKind.STOPPED.exit_status}
        statuses = {end.status for end in evidence.ends if not end.was_ended}
        if evidence.markers or any(status < 0 for status in statuses):
            return since_s > _SAME_TIME_S
        if names_cause(evidence):
            # Within this time, all agents send a report.
            return since_s > 1.2 / BEATS_PER_LIMIT * self._job.heartbeat_s
        return since_s > (_STOP_S if statuses <= stopped else _AGREE_S)


def _launch_problem(
    mpiexec: subprocess.Popen[bytes] | OSError | None, world: int, nodes: Sequence[Node]
) -> str:
    """Return the reason why mpiexec will not start all ranks; "" if it has started all ranks or may
    still start them."""
    if isinstance(mpiexec, OSError):
        return f"mpiexec cannot be started: {mpiexec.strerror}"
    if mpiexec is None or mpiexec.poll() is None or sum(len(n.ranks) for n in nodes) == world:
        return ""
    return f"mpiexec ended with status {mpiexec.returncode} before it had started all ranks"


def _are_equal(progress: Sequence[RankProgress], last: Sequence[RankProgress]) -> bool:
    """Return True if several ranks run and compute updates, and no rank has started a collective or
    another step since the observation `last`."""
    is_update = len(progress) > 1 and all(rank.phase == "update" for rank in progress)
    return is_update and [rank[:4] for rank in progress] == [rank[:4] for rank in last]
