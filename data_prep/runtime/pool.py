"""Worker processes on this machine that run jobs. The jobs are calls of the same function. With a
single worker, the calling process runs all jobs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from data_prep.runtime.progress import Progress
from optimus.errors import OptimusError
from optimus.launch.environment import available_cores, read_local_size

_POLL_S = 0.2

Job = Callable[[Any, int, Callable[[int], None]], Any]
"""Function `job(context, index, advance) -> result` that does the item of work with the number
`index`. The function calls `advance(n)` each time it has processed n more bytes or instances."""

_state: tuple[Any, Any, Any] | None = None  # (context, counter, stop flag) of a worker process


class _Cancelled(Exception):
    """The function `advance` that a job receives raises this exception to end the job, if the
    result of the job is no longer needed."""


def cores_of_this_rank() -> int:
    """Return the number of processor cores that this rank can use.

    If a launcher started several ranks on this machine and did not bind the ranks to cores, each
    rank gets an equal share of the cores.
    """
    cores = available_cores()
    unbound = cores == (os.cpu_count() or 1)
    return max(1, cores // read_local_size()) if unbound else cores


def run_jobs(
    job: Job, context: Any, order: Sequence[int], workers: int, progress: Progress
) -> dict[int, Any]:
    """Call `job(context, index, advance)` for every index in `order`. Jobs start in this order.

    `context` is sent to each worker once. If a job raises an error, `run_jobs` ends the other jobs
    and raises this error. Files that jobs have completed are not removed.

    Returns:
        A dict that maps each index to the result of its job.

    Raises:
        OptimusError: a worker process was killed, for example because of too little memory.
    """
    if workers == 1 or len(order) <= 1:
        return {index: job(context, index, progress.advance) for index in order}
    methods = multiprocessing.get_all_start_methods()
    processes = multiprocessing.get_context("fork" if "fork" in methods else None)
    counter, stop = processes.Value("q", 0), processes.RawValue("b", 0)
    executor = ProcessPoolExecutor(
        min(workers, len(order)),
        mp_context=processes,
        initializer=_start_worker,
        initargs=(context, counter, stop, os.getpid()),
    )
    others, started = multiprocessing.active_children(), []
    try:
        futures = {executor.submit(_work, job, index): index for index in order}
        started = [child for child in multiprocessing.active_children() if child not in others]
        _watch(set(futures), counter, progress)
        return {index: future.result() for future, index in futures.items()}
    except BrokenProcessPool:
        raise OptimusError(
            "a worker process was killed, perhaps because memory was short; run the same command "
            "again to continue; if a worker is killed again, use a smaller --workers"
        ) from None
    finally:
        stop.value = 1  # after an error, jobs end at their next `advance`
        threading.Thread(target=_end_with_each_other, args=(started,), daemon=True).start()
        executor.shutdown(wait=True, cancel_futures=True)


def _end_with_each_other(workers: Sequence[Any]) -> None:
    """Wait until all workers have ended. If a worker is killed, kill the other workers.

    A worker that is killed while it receives a message does not release the lock of the message
    queue. The other workers and the executor could then wait for this lock forever.
    """
    while alive := [worker for worker in workers if worker.is_alive()]:
        if any(worker.exitcode not in (None, 0) for worker in workers):
            for worker in alive:
                worker.kill()
        time.sleep(_POLL_S / 10)


def _watch(waiting: set[Future], counter: Any, progress: Progress) -> None:
    """Show the progress of all jobs until every future in `waiting` is done. If a job fails, raise
    its error."""
    shown = 0
    while waiting:
        done, waiting = wait(waiting, _POLL_S, FIRST_EXCEPTION)
        now = counter.get_obj().value  # without the lock, which a killed worker may hold
        progress.advance(now - shown)
        shown = now
        for future in done:
            future.result()


def _start_worker(context: Any, counter: Any, stop: Any, parent: int) -> None:
    global _state
    _state = (context, counter, stop)
    # The parent process gets these signals too, and kills the workers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent: int) -> None:
    """Wait until the process `parent` has ended. Then end this worker process, because no process
    would read its results."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


def _work(job: Job, index: int) -> Any:
    assert _state is not None
    context, counter, stop = _state

    def advance(amount: int) -> None:
        if stop.value:
            raise _Cancelled
        with counter.get_lock():
            counter.value += amount

    return job(context, index, advance)
