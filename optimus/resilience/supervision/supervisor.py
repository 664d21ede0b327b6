"""The supervisor of a run: starts attempts, notices failures, replaces nodes and restarts.

An attempt is one launch of the ranks of a run. The supervisor is a process on the first node,
outside of torch.distributed. Its state is in the ledger, so that another supervisor can take over
at any time. This module does not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from optimus.checkpoint import store
from optimus.data.dataset import TokenDataset
from optimus.errors import ConfigError, OptimusError, OutcomeKind, one_line, refuse_if
from optimus.io import files
from optimus.io.workspace import CreatedPaths, Workspace, lock_run_dir, read_lock_owner
from optimus.resilience.supervision.agent import (
    ADDRESS,
    SECRET,
    SUPERVISOR,
    parse_address,
)
from optimus.resilience.supervision.agents import CONFIG, KILLED_S, LOOK_S, Agents, Job, Node
from optimus.resilience.supervision.attempt import (
    SKIPPED_STEPS,
    encode_skipped_steps,
    read_skipped_steps,
)
from optimus.resilience.supervision.channel import (
    Channel,
    PeerError,
    create_secret,
    make_private,
    read_secret,
)
from optimus.resilience.supervision.decide import (
    Decision,
    decide,
    find_cause,
)
from optimus.resilience.supervision.ledger import (
    LEDGER,
    NODES,
    AttemptEnded,
    AttemptStarted,
    Event,
    Ledger,
    NextJob,
    NodeMarked,
    SupervisorStarted,
    VerdictReached,
    read_history,
)
from optimus.resilience.supervision.messages import (
    End,
    FindPort,
    FreePort,
    Kill,
    Killed,
    Signal,
    Stage,
    Staged,
)
from optimus.resilience.supervision.observation import Observer
from optimus.resilience.supervision.staging import (
    ARCHIVE,
    pack_environment,
    staged_folder,
    staged_variables,
)

logger = logging.getLogger(__name__)

_LOG = "log"
"""Folder in the run directory with the output of the ranks."""
_LOCK_OWNER = b"supervisor"
"""Content of the lock file of a run directory while a supervisor has the lock."""
_RETRY_S = 2.0
"""Seconds after which the supervisor repeats a write that has failed, such as to a full disk."""
_STAGE_S = 600.0
"""Longest time in seconds to unpack the Python environment on a node."""
_SUBMIT_S = 600.0
"""Seconds after which the supervisor submits the next job again if the scheduler has refused it."""
_MAX_DOCUMENTS = 8
"""Maximum number of documents in the report on data that gives non-finite values."""


class Supervisor:
    """Launches the ranks of a run, and launches them again after failures. The supervisor ends when
    the run is complete, must continue in another job, or must stop."""

    def __init__(self, job: Job) -> None:
        """Lock the run directory, read the ledger of the run, and open the ledger for appending.

        Raises:
            ConfigError: Another supervisor or run uses the directory; or the ledger or
                SKIPPED_STEPS is damaged; or settings differ from the settings of an earlier job.
            OSError: A file cannot be written.
        """
        self._job, self._folder = job, job.run_dir / SUPERVISOR
        self._created = CreatedPaths(
            job.run_dir,
            [store.checkpoints_dir(job.run_dir).name],
            [SUPERVISOR, _LOG, LEDGER, NODES],
        )
        lock = workspace = None
        try:
            self._lock = lock = _take_lock(job.run_dir)
            self._check_earlier_jobs()
            files.make_dirs(job.run_dir / _LOG)
            make_private(self._folder)
            self._workspace = workspace = Workspace.open(self._folder)
            self._take_over()
        except BaseException:
            self._created.remove(lock, workspace)
            raise

    def _check_earlier_jobs(self) -> None:
        """Check the files of earlier jobs. This method changes no files."""
        job = self._job
        events = read_history(job.run_dir).events
        started = [event for event in events if isinstance(event, SupervisorStarted)]
        if started and started[-1].settings != job.settings:
            changed = self._changed_settings() or "model, data, seed, batch, dtype or optimizer"
            raise ConfigError(
                f"{job.run_dir}: the run was launched with other frozen settings ({changed}); use "
                "the same configuration, or another train.run_dir"
            )
        self._skipped_steps = read_skipped_steps(job.run_dir)
        """The steps in the file SKIPPED_STEPS when this supervisor started. The user may have added
        steps that are not in the ledger."""

    def _take_over(self) -> None:
        job = self._job
        self._ledger = Ledger(job.run_dir, self._workspace)
        self._history = self._ledger.history
        read_or_create = read_secret if self._is_takeover() else create_secret
        self._agents = Agents(job, self._history, read_or_create(self._folder / SECRET))
        self._submitter: asyncio.Task[None] | None = None
        self._is_ending = asyncio.Event()
        self._stop_signal = 0
        self._observer = Observer(job, self._agents, self._ledger)
        self._digest = ""
        """Hash of the archive of the Python environment; "" if there is no archive yet."""
        self._mpiexec: subprocess.Popen[bytes] | OSError | None = None
        """The command that started the ranks of the last attempt, or the reason why it could not be
        started; None if agents or an earlier supervisor have started the ranks."""
        self._workspace.write_bytes(self._folder / CONFIG, job.config.encode())

    def _is_takeover(self) -> bool:
        """Return True if an earlier supervisor of the same job has not reached a verdict, so that
        its agents may still run."""
        history, running = self._history, self._history.running
        is_same = history.job == self._job.name and bool(history.supervisors)
        if running is not None and not {*running.nodes} <= {*self._job.nodes}:
            return False  # no takeover, since the job has other nodes
        return is_same and history.verdict is None and (self._folder / SECRET).exists()

    def _changed_settings(self) -> str:
        """Return the names of the settings that must not change but differ from the configuration
        of the last job; "" if that configuration cannot be read."""
        try:
            before = tomllib.loads(files.read_regular(self._folder / CONFIG, 1 << 20).decode())
        except (OSError, ValueError, RecursionError):
            return ""
        now = tomllib.loads(self._job.config)
        names = []
        for key in self._job.frozen:
            section, _, name = key.partition(".")
            old, new = before.get(section, {}), now.get(section, {})
            if not isinstance(old, dict):
                return ""
            keys = [name] if name else sorted({*old, *new})
            names += [f"{section}.{k}" for k in keys if old.get(k) != new.get(k)]
        return one_line(", ".join(names))

    # -- The run ----------------------------------------------------------------------------------

    async def run(self) -> int:
        """Supervise the run until this job ends. Return the exit status of `optimus launch`."""
        job, history = self._job, self._history
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                loop.add_signal_handler(number, self._on_signal, number)
        clock = asyncio.create_task(self._agents.run_clock())
        try:
            hosts, port = await self._agents.listen()
            self._workspace.write_bytes(
                self._folder / ADDRESS,
                json.dumps({"hosts": hosts, "port": port}).encode(),
            )
            takeover = self._is_takeover()
            await self._add(
                SupervisorStarted(
                    time=time.time(),
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    job=job.name,
                    nodes=job.nodes,
                    settings=job.settings,
                )
            )
            if history.running is not None and not takeover:  # its job ended without a verdict
                await self._add(_interrupted(history.running))
            for node in job.pardoned:
                await self._add(_mark(node, "good", "pardoned by the user"))
            # Before ranks start, because the scheduler may end this job at any time.
            if not await self._submit_next_job():
                self._submitter = asyncio.create_task(self._submit_again())
            if takeover:
                await self._agents.wait_for_known()
            await self._agents.start()
            if history.running is None and not history.attempts_of_job():
                self._agents.check()
            while True:
                if (running := history.running) is not None:
                    await self._finish_attempt(running)
                    if history.ends[running.attempt].outcome == "interrupted":
                        await self._agents.start()  # the agents of the attempt may have ended, too
                decision = await self._decide()
                if decision.action != "start":
                    return await self._end(decision)
                await self._start_attempt(decision)
        finally:
            is_current = self._workspace.is_open()  # else another supervisor controls the agents
            if is_current:
                await self._agents.say_to_all(End())
            clock.cancel()
            await self._agents.close()
            if is_current:
                await self._agents.wait_for_ends(self._agents.commands)
                (self._folder / ARCHIVE).unlink(missing_ok=True)
            self._ledger.close()
            if is_current and self._is_refused():
                for attempt in history.attempts:
                    job.workspace_of(attempt).close()
                self._created.remove(self._lock, self._workspace)
            self._workspace.close()
            self._lock.close()

    def _is_refused(self) -> bool:
        """Return True if no rank has accepted the configuration of a new run, and the ledger has no
        event that a later job needs."""
        history = self._history
        if history.supervisors > 1 or history.checkpoints or history.standings or history.next_job:
            return False
        if history.verdict is None:  # an error has occurred
            return not history.attempts
        is_usage = history.verdict.status == OutcomeKind.USAGE.exit_status
        return is_usage and len(history.attempts) == 1

    async def _add(self, event: Event) -> None:
        """Add an event to the ledger. Repeat the write until it succeeds."""
        await self._store(LEDGER, lambda: self._ledger.add(event))

    async def _store(self, name: str, write: Callable[[], None]) -> None:
        """Call `write`, which changes the file `name`, and repeat the call until it succeeds.

        A call may raise OSError, for example because the disk is full. The ranks continue to train
        while this function repeats the call.

        Raises:
            OptimusError: Another supervisor has taken over.
        """
        while True:
            try:
                write()
                return
            except OSError as error:
                if not self._workspace.is_open():
                    raise OptimusError(
                        f"{self._job.run_dir}: another supervisor has taken over the run; this "
                        "supervisor ends"
                    ) from None
                logger.error("%s: %s; trying again", name, error.strerror)
                await asyncio.sleep(_RETRY_S)

    async def _decide(self) -> Decision:
        """Decide whether another attempt starts or the job ends. Record in the ledger each node
        that the decision marks as good, suspect or excluded."""
        job = self._job
        remaining_s = job.ends_at - job.margin_s - time.time()
        while True:
            heard = self._agents.heard()
            reachable = [node.name for node in heard if node.channel is not None]
            decision = decide(self._history, job.policy, reachable, remaining_s)
            is_full = decision.action == "done" or len(decision.nodes) == job.policy.sizes[-1]
            if is_full or len(heard) == len(reachable) or self._stop_signal:
                break
            await asyncio.sleep(LOOK_S)  # an agent that connects again is not lost
        if self._stop_signal and decision.action == "start":
            name = signal.Signals(self._stop_signal).name
            status = OutcomeKind.STOPPED.exit_status
            decision = Decision("continue", f"{name} ends the job", status, marks=decision.marks)
        for node, (standing, reason) in decision.marks.items():
            await self._add(_mark(node, standing, reason))
            logger.warning("node %s is %s: %s", node, standing, reason)
        return decision

    async def _end(self, decision: Decision) -> int:
        """Carry out a decision that ends the job: add the verdict to the ledger, and cancel or
        submit the next job. Return the exit status of `optimus launch`."""
        assert decision.action != "start"
        reason = decision.reason
        if decision.action == "stop" and (documents := self._bad_documents()):
            reason += f"; documents: {', '.join(documents)}"
        verdict = VerdictReached(
            time=time.time(), verdict=decision.action, reason=reason, status=decision.status
        )
        await self._add(verdict)
        level = logging.ERROR if decision.action == "stop" else logging.INFO
        logger.log(level, "%s: %s", decision.action, reason)
        self._is_ending.set()
        if self._submitter is not None:
            await self._submitter  # wait until it is known if the scheduler has the next job
        if decision.action != "continue":
            await self._remove_next_job()
        elif not await self._submit_next_job():
            logger.error("no job continues the run; submit the same command again")
        return decision.status

    async def _submit_next_job(self) -> bool:
        """Submit the job that continues the run. Return False if the scheduler refuses the job.

        If the run has no chain of jobs, or the next job is already submitted, submit nothing and
        return True.
        """
        chain, last = self._job.chain, self._history.next_job
        if chain is None or (last is not None and last.job):
            return True
        try:
            name, problem = await chain.submit(), ""
            logger.info("job %s continues the run after this job", name)
        except OSError as error:
            name, problem = "", one_line(error)
            logger.error(
                "the next job of the chain is refused: %s; this job continues, and the submission "
                "is repeated every %.0f s and at the end of this job",
                problem,
                _SUBMIT_S,
            )
        if last is None or problem != last.problem:
            await self._add(NextJob(time=time.time(), job=name, problem=problem))
        return bool(name)

    async def _submit_again(self) -> None:
        """Try every _SUBMIT_S seconds to submit the next job. Return when the scheduler has
        accepted it or this job ends."""
        while True:
            try:
                async with asyncio.timeout(_SUBMIT_S):
                    await self._is_ending.wait()
                    return
            except TimeoutError:
                if await self._submit_next_job():
                    return

    async def _remove_next_job(self) -> None:
        """Remove from the scheduler's queue the job that would continue the run."""
        next_job = self._history.next_job
        if self._job.chain is None or next_job is None or not next_job.job:
            return
        try:
            await self._job.chain.remove(next_job.job)
            logger.info("job %s is removed from the queue", next_job.job)
        except OSError as error:  # the next job then ends at its start (--unless-ended)
            logger.error(
                "the next job %s is not removed from the queue: %s; remove this job",
                next_job.job,
                one_line(error),
            )

    def _bad_documents(self) -> list[str]:
        """Return the documents whose instances gave non-finite values in the last attempt.

        Each document is given as FILE:LINE. At most _MAX_DOCUMENTS documents are returned.
        """
        attempts = self._history.attempts
        end = self._history.ends.get(attempts[-1].attempt) if attempts else None
        documents: list[str] = []
        if end is not None and end.failure == "soft":
            for marker in self._observer.markers(attempts[-1])[:1]:
                for instance in marker.instances[:_MAX_DOCUMENTS]:
                    with contextlib.suppress(OptimusError, OSError):
                        documents += TokenDataset(instance.data).documents(instance.instance)
        return [one_line(document) for document in documents[:_MAX_DOCUMENTS]]

    def _on_signal(self, number: int) -> None:
        """Handle the signal `number`, which the scheduler sends before the end of a job: let the
        ranks save a checkpoint and end."""
        if not self._stop_signal:
            logger.info("%s: the ranks save a checkpoint and end", signal.Signals(number).name)
        self._stop_signal = number
        self._observer.stopped_at_s = min(self._observer.stopped_at_s, self._agents.clock_s)
        self._agents.spawn(self._agents.say_to_all(Signal(number=signal.SIGTERM)))

    # -- Attempts ---------------------------------------------------------------------------------

    async def _start_attempt(self, decision: Decision) -> None:
        """Launch the ranks of the next attempt on the nodes of `decision`. If one of the nodes
        cannot be prepared, return without launching ranks."""
        job = self._job
        number = self._history.attempts[-1].attempt + 1 if self._history.attempts else 1
        first = self._agents.nodes[decision.nodes[0]]
        try:
            assert first.hello is not None, "a reachable node has an agent"
            host = job.launcher.meeting_host(first.hello.host)
            answer = await self._agents.ask(first, FindPort(host=host), FreePort)
        except (OSError, TimeoutError) as error:
            logger.warning("node %s does not answer: %s", first.name, error)
            if first.channel is not None:
                await first.channel.close()  # the next decision does not use this node
            return
        if answer.problem:
            refuse_if(
                not self._history.attempts,
                f"node {first.name}: {answer.problem}; check address_suffix of --machine",
            )
            await self._add(_mark(first.name, "excluded", answer.problem))
            logger.error("node %s is excluded: %s", first.name, answer.problem)
            return
        if not await self._stage(decision.nodes):
            return
        skipped = tuple(sorted({*decision.skipped_steps, *self._skipped_steps}))
        if skipped:  # before the event, after which a new supervisor may start the ranks
            path, content = job.run_dir / SKIPPED_STEPS, encode_skipped_steps(skipped)
            await self._store(SKIPPED_STEPS, lambda: self._workspace.write_bytes(path, content))
        name = f"attempt-{number:04d}-{secrets.token_hex(3)}"
        workspace = store.open_workspace(job.run_dir, name, self._workspace)
        attempt = AttemptStarted(
            time=time.time(),
            attempt=number,
            nodes=decision.nodes,
            ranks_per_node=job.ranks_per_node,
            port=answer.port,
            workspace=name,
            load=decision.load,
            skipped_steps=skipped,
        )
        await self._add(attempt)
        if decision.load == "older":
            store.set_newest_aside(job.run_dir, workspace)
        logger.info("attempt %d on %s: %s", number, ", ".join(decision.nodes), decision.reason)
        await asyncio.gather(*(self._agents.start_ranks(attempt, name) for name in decision.nodes))
        if command := self._agents.rank_command(decision.nodes, name):
            variables = (
                staged_variables(self._agents.staged) if self._agents.staged is not None else {}
            )
            try:
                self._mpiexec = self._agents.run(command, variables)
            except OSError as error:
                self._mpiexec = error
        if self._stop_signal:  # the signal arrived before the ranks existed
            await self._agents.say_to_all(Signal(number=signal.SIGTERM))

    async def _stage(self, names: Sequence[str]) -> bool:
        """Let each agent unpack a copy of the Python environment on its node, once per job.

        Exclude each node on which the copy fails. Return False if the copy fails on any node.
        """
        job = self._job
        if job.stage is None:
            return True
        archive = self._folder / ARCHIVE
        if self._agents.staged is None:
            self._digest = await asyncio.to_thread(pack_environment, archive, self._workspace)
            self._agents.staged = staged_folder(job.stage, self._digest)
        request = Stage(archive=str(archive), parent=str(job.stage), digest=self._digest)

        async def stage(node: Node) -> str:
            try:
                return (await self._agents.ask(node, request, Staged, _STAGE_S)).problem
            except (OSError, TimeoutError) as error:
                return f"no answer: {error}"

        nodes = [
            self._agents.nodes[name] for name in names if not self._agents.nodes[name].is_staged
        ]
        problems = await asyncio.gather(*map(stage, nodes))
        for node, problem in zip(nodes, problems, strict=True):
            node.is_staged = not problem
            if problem:
                reason = f"the environment cannot be staged: {problem}"
                await self._add(_mark(node.name, "excluded", reason))
                logger.error("node %s is excluded: %s", node.name, reason)
        return not any(problems)

    async def _finish_attempt(self, attempt: AttemptStarted) -> None:
        """Wait until a launch attempt ends or fails. Add the cause to the ledger, and kill the
        remaining processes of the attempt."""
        has_updated = self._history.has_updated(attempt)
        by_mpiexec = self._agents.rank_command(attempt.nodes, attempt.workspace) is not None
        if by_mpiexec and self._mpiexec is None and not has_updated:
            # The earlier supervisor may have ended before or after it had started mpiexec. A second
            # mpiexec for the same attempt could start only some of the attempt's ranks, and the
            # ranks would then belong to two MPI applications.
            await self._kill(attempt)
            await self._add(_interrupted(attempt))
            return
        for name in attempt.nodes:  # an earlier supervisor may have started some ranks
            node = self._agents.nodes[name]
            if node.attempt == attempt.attempt:
                continue
            is_running = node.hello is not None and node.hello.attempt == attempt.attempt
            if not is_running and not has_updated:
                await self._agents.start_ranks(attempt, name)
            node.attempt = attempt.attempt
            node.has_lost_ranks = not is_running and has_updated
        evidence = await self._observer.observe(attempt, by_mpiexec, self._mpiexec)
        world = len(attempt.nodes) * attempt.ranks_per_node
        end = find_cause(evidence, world, time.time())
        first = self._agents.nodes[attempt.nodes[0]].ranks.get(0)
        if first is not None and first.progress is not None:
            figures = {"updates": first.progress.updates, "seconds": first.progress.seconds}
            end = end.model_copy(update=figures)
        await self._add(end)
        if end.outcome == "failed":
            logger.error("attempt %d failed: %s", attempt.attempt, "; ".join(end.evidence))
        await self._kill(attempt)
        # After a failure, a rank that cannot be reached may still use the workspace.
        if end.outcome in ("done", "stopped"):
            self._job.workspace_of(attempt).close()

    async def _kill(self, attempt: AttemptStarted) -> None:
        """Kill the ranks of a launch attempt on all nodes that can be reached."""
        now = self._agents.clock_s
        nodes = [node for node in self._agents.heard() if node.name in attempt.nodes]
        for node in nodes:
            node.kill_sent_at = now
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILLED_S):
                await asyncio.gather(
                    *(
                        self._agents.ask(node, Kill(attempt=attempt.attempt), Killed)
                        for node in nodes
                    ),
                    return_exceptions=True,
                )
        if isinstance(self._mpiexec, subprocess.Popen):  # do not wait here for its end
            self._agents.spawn(self._agents.wait_for_ends([self._mpiexec]))


def _interrupted(attempt: AttemptStarted) -> AttemptEnded:
    return AttemptEnded(time=time.time(), attempt=attempt.attempt, outcome="interrupted", step=0)


def _mark(node: str, standing: Any, reason: str) -> NodeMarked:
    return NodeMarked(time=time.time(), node=node, standing=standing, reason=reason)


def _take_lock(run_dir: Path) -> BinaryIO:
    """Lock the run directory. Replace the lock of a supervisor that does not answer.

    Raises:
        ConfigError: Another supervisor answers, or an unsupervised run uses the directory.
    """
    try:
        return lock_run_dir(run_dir, _LOCK_OWNER)
    except ConfigError:
        if read_lock_owner(run_dir) != _LOCK_OWNER:
            raise
    if asyncio.run(_answers(run_dir)):
        raise ConfigError(
            f"train.run_dir = {str(run_dir)!r}: another supervisor works on this run; wait until "
            "it ends, or end it"
        )
    logger.warning("%s: the supervisor that has the lock does not answer; taking over", run_dir)
    return lock_run_dir(run_dir, _LOCK_OWNER, replace=True)


async def _answers(run_dir: Path) -> bool:
    """Return True if a supervisor answers at an address in the run's address file."""
    with contextlib.suppress(OSError, OptimusError):
        hosts, port = parse_address(files.read_regular(run_dir / SUPERVISOR / ADDRESS, 1 << 16))
        secret = read_secret(run_dir / SUPERVISOR / SECRET)
        for host in hosts:
            # ValueError: a host name that cannot be encoded
            with contextlib.suppress(OSError, TimeoutError, PeerError, ValueError):
                async with asyncio.timeout(3.0):
                    reader, writer = await asyncio.open_connection(host, port)
                    channel = await Channel.open(reader, writer, "agent", secret)
                    await channel.close()
                    return True
    return False
