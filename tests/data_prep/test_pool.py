"""Tests of jobs in several processes: results, progress, errors and kills."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest

from data_prep.runtime.pool import run_jobs
from data_prep.runtime.progress import Progress
from optimus.errors import DataError, OptimusError
from tests.data_prep.corpus import run_arguments, tree
from tests.kit.ranks.processes import (
    assert_gone,
    children_of,
    started,
    wait_until,
    write_hostile_modules,
)


def square(context, index, advance):
    for _ in range(200):
        advance(1)
    return context * index * index, os.getpid()


def fail_or_wait(context, index, advance):
    if index == 0:
        raise DataError("number 0")
    for _ in range(600):  # 60 s, unless the job is cancelled
        time.sleep(0.1)
        advance(1)


def die(context, index, advance):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_jobs_return_results_by_index_and_report_progress(capsys, workers):
    with Progress("work", 50 * 200, "") as progress:
        results = run_jobs(square, 3, [*range(49, -1, -1)], workers, progress)
    assert {index: value for index, (value, _) in results.items()} == {
        i: 3 * i * i for i in range(50)
    }
    processes = {pid for _, pid in results.values()}
    assert processes == {os.getpid()} if workers == 1 else os.getpid() not in processes
    assert "work: 10k/10k" in capsys.readouterr().err


def test_first_error_ends_the_other_jobs():
    start = time.monotonic()
    with pytest.raises(DataError, match="number 0"), Progress("work", 1, "") as progress:
        run_jobs(fail_or_wait, None, [1, 0, 2, 3], 2, progress)
    assert time.monotonic() - start < 20


def test_killed_worker_is_an_error():
    with pytest.raises(OptimusError, match="a worker process was killed"):
        run_jobs(die, None, [0, 1], 2, Progress("work", 1, ""))


def test_workers_end_if_their_parent_is_killed():
    """Workers of a killed parent exit, because no process would read their results."""
    waiting = (fail_or_wait, None, [1, 2], 2, Progress("work", 1, ""))
    command = multiprocessing.get_context("fork").Process(target=run_jobs, args=waiting)
    command.start()
    wait_until(lambda: len(children_of(command.pid)) == 2, within_s=30)
    workers = children_of(command.pid)
    command.kill()
    command.join()
    assert_gone(workers)


def hold_and_die(context, index, advance):
    """Kill the process of job 0 one second after the end of the job, while the process holds the
    lock of the job queue."""
    started, locked = context
    if index == 1:
        started.set()
        assert locked.wait(30)
        return
    frame = sys._getframe()
    while (
        "call_queue" not in frame.f_locals
    ):  # the loop of the executor, which called this function
        frame = frame.f_back
    lock = frame.f_locals["call_queue"]._rlock

    def die():
        lock.acquire()
        locked.set()
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    assert started.wait(30)
    threading.Thread(target=die, daemon=True).start()
    assert locked.wait(30)


def test_worker_killed_at_the_end_leaves_no_worker_waiting():
    """A worker is killed while it holds the lock of the job queue. The other worker waits for the
    lock, and the executor waits for the other worker. The command must end nevertheless."""
    fork = multiprocessing.get_context("fork")
    arguments = (hold_and_die, (fork.Event(), fork.Event()), [0, 1], 2, Progress("work", 1, ""))
    command = fork.Process(target=run_jobs, args=arguments)
    command.start()
    command.join(60)
    status = command.exitcode
    command.kill()
    assert status == 0


def test_workers_import_nothing_from_the_working_directory(made, tmp_path):
    arguments = run_arguments(made.text, made.tokenizer, tmp_path / "data", "--workers", "2")
    words = [sys.executable, "-P", "-m", "data_prep.cli", *arguments]
    done = started(words, write_hostile_modules(tmp_path / "folder"))
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "data") == tree(made.data)
