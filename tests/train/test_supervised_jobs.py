"""Tests of supervised jobs and chains in a mock PBS whose hosts die and whose queue refuses jobs.

Each test takes 10 s or more, because real ranks train to the end of a run in one or more jobs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from optimus.resilience.supervision.ledger import (
    AttemptEnded,
    History,
    NextJob,
    read_history,
)
from tests.kit.ranks.cluster import Cluster
from tests.kit.ranks.processes import ROOT, install, started
from tests.kit.runs.results import metrics_of
from tests.kit.runs.tiny import CONTEXT, tiny_tree
from tests.kit.runs.training import train_on
from tests.launch.test_spawn import write_config

SCRIPT = ROOT / "scripts" / "pbs" / "train.sh"
STEPS, INTERVAL = 40, 4
MARGIN_S = 12.0
"""Length of the last period of a job, in seconds. At the start of this period, the ranks of the job
begin to save a checkpoint. After the save, they end."""
LIMIT_S = 150.0
"""Time limit for all jobs of a test together, in seconds."""
KEYS = ("step", "loss", "grad_norm", "tokens")

# If several of these tests or other programs run at the same time, agents are silent for longer
# than the limit of the heartbeat.
pytestmark = pytest.mark.skipif(
    "OPTIMUS_TEST_CHAINS" not in os.environ,
    reason="jobs of a mock PBS take minutes on a quiet machine; set OPTIMUS_TEST_CHAINS=1",
)


def settings(data: Path, run_dir: Path) -> dict[str, Any]:
    """Return a configuration whose steps take some tens of milliseconds."""
    return tiny_tree(
        data,
        run_dir,
        train__max_steps=STEPS,
        train__global_batch_tokens=24 * CONTEXT,
        train__deterministic=True,
        checkpoint__interval=INTERVAL,
        parallel__timeout_s=8.0,
        resilience__end_margin_s=MARGIN_S,
    )


@pytest.fixture(scope="module")
def expected(rank_pool, tiny_data, tmp_path_factory) -> list[Any]:
    """Return the metrics of all steps of an unsupervised run on one process. The tests compare the
    metrics of supervised runs with these metrics."""
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    train_on(rank_pool.run, 1, settings(tiny_data, run_dir))
    return curve(run_dir)


def curve(run_dir: Path) -> list[Any]:
    return [tuple(line[key] for key in KEYS) for line in metrics_of(run_dir)]


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "pbs", 7) as cluster:
        yield cluster


class Submission:
    """A supervised run on 2 nodes of the mock PBS, with one rank on each node."""

    def __init__(self, cluster: Cluster, data: Path, folder: Path) -> None:
        self.cluster, self.run_dir = cluster, folder / "run"
        self._config = write_config(folder / "run.toml", settings(data, self.run_dir))
        self._machine = folder / "machine.toml"
        self._optimus = install(folder / "optimus", "optimus.cli")

    def submit(self, *options: str, machine: str = "", steps: int = STEPS) -> None:
        """Submit the run, as job 1.

        Args:
            options: Options of the job script.
            machine: Text to add to the definition of the machine.
            steps: Number of updates.
        """
        variables = '{ GLOO_SOCKET_IFNAME = "lo", OMP_NUM_THREADS = "1" }'
        text = f"{machine}\nheartbeat_s = 10.0\n[[environment]]\nvariables = {variables}\n"
        self._machine.write_text(text)
        command = [str(SCRIPT), "--nodes", "2", "--machine", str(self._machine), *options]
        environ = {"PATH": f"{self.cluster.bin}:{os.environ['PATH']}"}
        run = [str(self._config), f"train.max_steps={steps}"]
        done = started([*command, "--", *run], **environ, OPTIMUS=str(self._optimus))
        assert done.returncode == 0 and done.stdout == "1.pbs\n", done.stderr

    def wait_for(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, self.outputs()
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has completed update `step`."""
        path = self.run_dir / "metrics.jsonl"
        self.wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= step)

    def history(self) -> History:
        return read_history(self.run_dir)

    def outputs(self) -> str:
        jobs = [int(job["id"].partition(".")[0]) for job in self.cluster.jobs()]
        return "\n".join(f"job {job}:\n{self.cluster.output(job)}" for job in jobs)

    def states(self) -> list[tuple[bool, int | None]]:
        """Return a pair for each job: True if the job was started, and the exit status of the job
        script (None if the script has no exit status, because its node was lost)."""
        return [(bool(job["hosts"]), job.get("status")) for job in self.cluster.jobs()]


@pytest.fixture
def submission(cluster, tiny_data, tmp_path) -> Submission:
    return Submission(cluster, tiny_data, tmp_path)


def test_job_survives_the_loss_of_a_node_and_removes_the_next_job(submission, expected):
    cluster = submission.cluster
    submission.submit("--buffer-nodes", "1", "--chain", "2")
    submission.wait_for_step(6)
    cluster.kill_host("x1")
    cluster.wait_until_idle(LIMIT_S)
    assert curve(submission.run_dir) == expected, submission.outputs()
    assert submission.states() == [(True, 0), (False, None)], submission.outputs()
    history = submission.history()
    assert history.standing("x1") == "excluded" and history.standing("x0") == "good"
    assert history.attempts[-1].nodes == ("x0", "x2")
    assert "job 2.pbs is removed from the queue" in cluster.output(1)


def test_chain_continues_after_the_loss_of_the_first_node(submission, expected):
    """The first node of job 1, which runs the supervisor, is lost, so job 1 ends without a verdict.
    Job 2 completes the run and removes job 3 from the queue."""
    cluster = submission.cluster
    submission.submit("--buffer-nodes", "0", "--chain", "5")
    submission.wait_for_step(6)
    cluster.kill_host("x0")
    cluster.wait_until_idle(LIMIT_S)
    assert curve(submission.run_dir) == expected, submission.outputs()
    assert submission.states() == [(True, None), (True, 0), (False, None)]
    history = submission.history()
    ends = [event.outcome for event in history.events if isinstance(event, AttemptEnded)]
    assert ends == ["interrupted", "done"] and history.job == "2.pbs"


def test_ranks_save_and_end_before_the_walltime(submission):
    """The run has more steps than can be trained within the walltime of its job. Within the last
    MARGIN_S seconds of the job, the ranks must save a checkpoint of their last step and end with
    status 3."""
    cluster = submission.cluster
    submission.submit("--buffer-nodes", "0", "--walltime", "0:00:30", steps=100_000)
    cluster.wait_until_idle(LIMIT_S)
    assert submission.states() == [(True, 3)], submission.outputs()
    history, job = submission.history(), cluster.job(1)
    assert history.verdict.verdict == "continue" and history.verdict.status == 3
    (end,) = history.ends.values()
    assert end.outcome == "stopped" and end.time < job["start"] + job["walltime"]
    # qstat prints the start of a job in whole seconds. The supervisor computes the end of the job
    # from this start.
    assert end.time > int(job["start"]) + job["walltime"] - MARGIN_S
    steps = [line["step"] for line in metrics_of(submission.run_dir)]
    assert steps and (submission.run_dir / f"checkpoints/step-{steps[-1]:08d}").exists()


def test_refused_next_job_is_reported_and_submitted_again(submission, expected):
    """The queue refuses the next job of job 1, until qdel ends job 1. Job 1 then submits job 2. The
    machine does not tolerate lost nodes, so PBS ends job 2 when its second node is lost. Job 3
    completes the run."""
    cluster = submission.cluster
    cluster.limit_queued_jobs(1)  # job 1 itself
    options = ("--buffer-nodes", "1", "--chain", "2")
    submission.submit(*options, machine="tolerate_node_failures = false")
    cluster.limit_queued_jobs(0)
    submission.wait_for_step(5)
    assert len(cluster.jobs()) == 1
    cluster.limit_queued_jobs(None)
    cluster.delete_job(1)
    submission.wait_for_step(16)
    cluster.kill_host(cluster.job(2)["hosts"][1])
    cluster.wait_until_idle(LIMIT_S)
    assert curve(submission.run_dir) == expected, submission.outputs()
    jobs = [event for event in submission.history().events if isinstance(event, NextJob)]
    assert "qsub: would exceed queue generic's per-user limit" in jobs[0].problem
    assert [event.job for event in jobs] == ["", "2.pbs", "3.pbs"]
    assert "the next job of the chain is refused" in cluster.output(1)
    assert submission.states() == [(True, 3), (True, None), (True, 0)]


def test_next_job_of_an_ended_run_ends_at_once(submission, expected):
    """Job 1 completes the run, but cannot remove job 2 from the queue, because qdel fails. Job 2 is
    started, and ends at once with status 0."""
    cluster = submission.cluster
    (cluster.bin / "qdel").write_text("#!/bin/sh\necho 'qdel: no server' >&2\nexit 1\n")
    submission.submit("--buffer-nodes", "0", "--chain", "1")
    cluster.wait_until_idle(LIMIT_S)
    assert curve(submission.run_dir) == expected, submission.outputs()
    assert submission.states() == [(True, 0), (True, 0)]
    assert "2.pbs is not removed from the queue: exit status 1: qdel: no" in cluster.output(1)
    (line,) = cluster.output(2).splitlines()
    assert "the run has ended (done: " in line
    assert len(submission.history().attempts) == 1
