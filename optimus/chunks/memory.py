"""Memory tiers of model states, and copies between them.

Each buffer is in the tier DEVICE, HOST or DISK. If the model computes on a CPU, the buffers of
DEVICE and of HOST are in the memory of the machine, and the device is emulated: a copy moves the
same bytes between the same buffers as on an accelerator. With `Links`, copies and updates on an
emulated device take as long as the rates of the links determine. `optimus.chunks.disk` reads and
writes buffers on disk.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from optimus import platform
from optimus.config.machine import Links
from optimus.launch.environment import available_cores, read_local_size

Action = Callable[[], Any]

CAN_REFUSE_ACCESS = hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg")
"""True if an access to the memory of a freed buffer raises RuntimeError. The functions for this
exist only in builds of torch for CUDA, where they also work for buffers on a CPU. With other
builds, such an access crashes the process."""
_IS_FREED = (
    "this tensor is an offloaded parameter, or a view of it, and has no memory now; use a copy: "
    "parameter.detach().clone()"
)


class Tier(Enum):
    """Memory in which a buffer is stored."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    # The hash function of Enum is slower, because it is implemented in Python.
    __hash__ = object.__hash__


class Copy:
    """A copy between the device and the host. The copy can be in progress until `wait` has
    returned."""

    def __init__(self, complete: Action) -> None:
        self._complete: Action | None = complete

    def wait(self) -> None:
        """Wait until the copy is complete. Code can call this method more than once. If the
        argument `after` or `then` of `Memory.copy` has raised an error, raise this error."""
        if self._complete is not None:
            self._complete()
            self._complete = None


class Pace:
    """Delays jobs, so that they take as long as on a resource with a fixed rate, such as a link.

    Args:
        rate: Units, such as bytes, per second.
    """

    def __init__(self, rate: float) -> None:
        self._rate, self._free_at = rate, 0.0

    def run(self, job: Action, size: int, ready: float) -> None:
        """Run a job. Return at the time at which the resource would have completed the job.

        Args:
            job: The job.
            size: Number of units, such as the bytes to copy.
            ready: Time of `time.monotonic` from which the resource can begin the job, if it has
                completed the previous job.
        """
        job()
        self._free_at = max(ready, self._free_at) + size / self._rate
        time.sleep(max(0.0, self._free_at - time.monotonic()))


def worker(name: str, threads: int) -> ThreadPoolExecutor:
    """Return an executor with one thread, which runs jobs one after the other.

    Operations of torch in the jobs use `threads` threads. In deterministic mode, the results of
    these operations do not depend on this number.
    """
    # By default, OpenMP would use all cores for the operations of a new thread.
    return ThreadPoolExecutor(1, name, torch.set_num_threads, (threads,))


def update_threads(threads: int, device: torch.device) -> int:
    """Return the number of threads that compute on the host while the model computes. This is the
    number of cores less one, but at least 1. The remaining core is for the main thread, which
    launches operations.

    Args:
        threads: Number of threads with which operations of the main thread compute. If the model
            computes on a CPU, this number is taken as the number of cores. With an accelerator, the
            argument has no effect, because the main thread only launches operations. The number of
            cores is then the number of available cores divided by the number of local ranks.
        device: Device of the model.
    """
    cores = threads if device.type == "cpu" else available_cores() // read_local_size()
    return max(1, cores - 1)


class _Job:
    """A function that a `_JobThread` runs."""

    def __init__(self, function: Action) -> None:
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self._unfinished = threading.Lock()
        self._unfinished.acquire()

    def run(self) -> None:
        """Run the function, and let other threads that wait in `result` continue."""
        try:
            self._result = self._function()
        except BaseException as error:  # `result` raises it
            self._error = error
        self._unfinished.release()

    def result(self) -> Any:
        """Wait for the end of the function. Return the function's result, or raise the function's
        error."""
        with self._unfinished:
            pass
        if self._error is not None:
            raise self._error
        return self._result


class _JobThread:
    """Thread that runs jobs one after the other. In contrast to an executor of `worker`, this
    thread needs less processor time per job, but its jobs cannot be cancelled.

    The thread completes the submitted jobs and ends when `close` is called, this object is deleted
    or the process ends.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        # A daemon thread, because the process would wait for another thread before it calls the
        # finalizer below, which ends the thread.
        thread = threading.Thread(
            target=_run_jobs, args=(self._jobs, threads), name=name, daemon=True
        )
        thread.start()
        self.close = weakref.finalize(self, _end_thread, self._jobs, thread)

    def submit(self, function: Action) -> _Job:
        """Let the thread run a function."""
        assert self.close.alive, "the thread has ended"
        job = _Job(function)
        self._jobs.put(job)
        return job


def _run_jobs(jobs: SimpleQueue[_Job | None], threads: int) -> None:
    """Run jobs up to the first None. Operations of torch use `threads` threads."""
    torch.set_num_threads(threads)
    while (job := jobs.get()) is not None:
        job.run()
        del job  # so that its tensors can be freed while this thread waits


def _end_thread(jobs: SimpleQueue[_Job | None], thread: threading.Thread) -> None:
    """End a thread that runs `_run_jobs`, after all of its jobs."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()


class _CopyThread:
    """One direction of the link between the device and the host. A first thread makes copies, one
    after the other. A second thread calls the functions that run after a copy (`then` of
    `Memory.copy`).

    On an accelerator, copies run on a separate stream. A copy begins when the operations that the
    caller launched before the copy are complete.
    """

    def __init__(self, name: str, device: torch.device, rate: float, threads: int) -> None:
        self._name, self._num_threads = name, threads
        self._copies = _JobThread(name, threads)
        self._followers: _JobThread | None = None
        self._device = device
        self._pace = Pace(rate) if device.type == "cpu" else None
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def copy(self, into: Tensor, values: Tensor, after: Action | None, then: Action | None) -> Copy:
        """Start a copy. The arguments are those of `Memory.copy`."""
        if self._stream is None:
            now = time.monotonic()
            copy = partial(self._copy_at_rate, into, values, after, now)
        else:
            ready = torch.Event(self._device)
            ready.record()
            copy = partial(self._copy_on_stream, into, values, after, ready)
        job, follower = self._copies.submit(copy), None
        if then is not None:
            if self._followers is None:
                self._followers = _JobThread(f"after {self._name}", self._num_threads)
            follower = self._followers.submit(partial(self._follow, job, then))
        return Copy(partial(self._wait_for, job, follower))

    def close(self) -> None:
        """End the two threads, after all copies."""
        self._copies.close()
        if self._followers is not None:
            self._followers.close()

    @staticmethod
    def _follow(job: _Job, then: Action) -> None:
        job.result()
        then()

    def _wait_for(self, job: _Job, follower: _Job | None) -> None:
        done = job.result()
        if follower is not None:
            follower.result()
        elif done is not None:  # on the device, later operations of the caller wait for the copy
            torch.accelerator.current_stream(self._device).wait_event(done)

    def _copy_at_rate(
        self, into: Tensor, values: Tensor, after: Action | None, ready: float
    ) -> torch.Event | None:
        if after is not None:
            after()
            ready = time.monotonic()
        assert self._pace is not None
        self._pace.run(partial(into.copy_, values), values.nbytes, ready)
        return None

    def _copy_on_stream(
        self, into: Tensor, values: Tensor, after: Action | None, ready: torch.Event
    ) -> torch.Event | None:
        """Make a copy on the separate stream. For a copy to the device, return the event that marks
        the end of the copy. For a copy to the host, wait for the end of the copy and return
        None."""
        if after is not None:
            after()
        assert self._stream is not None
        done = torch.Event(self._device)
        with self._stream:
            self._stream.wait_event(ready)
            into.copy_(values, non_blocking=True)
            done.record(self._stream)
        if into.is_cpu:
            done.synchronize()
            return None
        return done


class Memory:
    """Allocates, frees and copies flat buffers, and counts the bytes of the buffers in each tier.

    A read of a freed buffer raises an error or crashes the process (`CAN_REFUSE_ACCESS`). With
    `poison`, which tests set, a freed buffer keeps its memory and is filled with NaN. The target of
    a copy is also filled with NaN until the copy is complete. A read of such a buffer causes NaN in
    the results.

    Args:
        device: Device of the tier DEVICE. On the meta device, the host buffers are meta tensors,
            too.
        poison: True to fill freed buffers with NaN.
        copies: Time at which copies on a CPU without `links` are made, for tests. "early": in
            `copy` or, if the argument `after` is given, in `Copy.wait`. "late": in `Copy.wait`.
            "random": at one of these two times. `optimus.chunks.disk.DiskTier` uses the same
            values.
        links: Rates of the links of an emulated device. Copies are then made in the background. On
            an accelerator, `links` has no effect.
    """

    def __init__(
        self,
        device: torch.device,
        poison: bool = False,
        copies: str = "early",
        links: Links | None = None,
    ) -> None:
        self._device = device
        self._has_threads = device.type != "meta" and (device.type != "cpu" or links is not None)
        """True if threads make the copies, False if the caller of `copy` makes them."""
        self.poison = poison
        self.copies, self._chance = copies, random.Random(0)
        self._links = links
        # Read in this thread, because torch.get_num_threads() can differ in autograd's threads.
        self.num_threads = update_threads(torch.get_num_threads(), device)
        """Number of threads that compute on the host while the model computes."""
        self._threads: dict[Tier, _CopyThread] = {}
        """The threads for copies, by the tier of the target. They are started at the first copy."""
        self.num_copied = 0
        """Bytes copied between the device and the host, in both directions."""
        self._tiers: dict[int, Tier] = {}
        """Tier of each buffer that this object has created, by the storage of the buffer."""
        self._freed: set[int] = set()
        """Storages of the buffers that are freed."""
        self._locked: list[Tensor] = []
        """Buffers in page-locked host memory."""
        self.num_bytes = dict.fromkeys(Tier, 0)
        """Bytes of the buffers that are not freed."""

    def new(self, length: int, dtype: torch.dtype, tier: Tier = Tier.DEVICE) -> Tensor:
        """Return a new 1-D buffer of `length` zeros in a tier. For the tier DISK, return a tensor
        on the meta device, a placeholder for `optimus.chunks.disk.DiskTier`. This object keeps a
        reference to the buffer only if `close` must unlock its memory."""
        device = torch.device("meta") if tier is Tier.DISK else self._device
        if tier is Tier.DEVICE or device.type == "meta":
            flat = torch.zeros(length, dtype=dtype, device=device)
        else:
            flat = platform.host_zeros(length, dtype, device)
            if device.type != "cpu":
                self._locked.append(flat)
        self._tiers[flat.untyped_storage()._cdata] = tier
        self.num_bytes[tier] += flat.nbytes
        return flat

    def close(self) -> None:
        """End the threads that make copies, and unlock the buffers in host memory, which keep their
        values. Call this method after the last copy is complete."""
        for thread in self._threads.values():
            thread.close()
        if self._locked:  # first wait for copies to the device that read these pages
            platform.synchronize(self._device)
        for flat in self._locked:
            platform.free_host(flat)
        self._locked.clear()

    def tier_of(self, flat: Tensor) -> Tier | None:
        """Return the tier of a buffer; None if it is freed."""
        return self._tiers[flat.untyped_storage()._cdata] if self.has(flat) else None

    def free(self, flat: Tensor) -> None:
        """Free the memory of a buffer; its values are lost."""
        storage = flat.untyped_storage()
        key = storage._cdata
        assert key not in self._freed, "the buffer is freed already"
        self._freed.add(key)
        self.num_bytes[self._tiers[key]] -= flat.nbytes
        if self.poison:
            flat.fill_(torch.nan)
        else:
            storage.resize_(0)
            if CAN_REFUSE_ACCESS:
                torch._C._set_storage_data_ptr_access_error_msg(key, _IS_FREED)

    def allocate(self, flat: Tensor) -> None:
        """Allocate memory for a freed buffer; its values are undefined."""
        storage = flat.untyped_storage()
        key, num_bytes = storage._cdata, flat.nbytes
        self._freed.remove(key)
        self.num_bytes[self._tiers[key]] += num_bytes
        if not self.poison:
            if CAN_REFUSE_ACCESS:
                torch._C._clear_storage_data_ptr_access_error_msg(key)
            storage.resize_(num_bytes)

    def copy(
        self,
        into: Tensor,
        values: Tensor,
        after: Action | None = None,
        then: Action | None = None,
    ) -> Copy:
        """Start to copy `values` from the device to the host or from the host to the device.

        Other code must use neither tensor until `wait` of the returned Copy has returned.

        Args:
            into: The target.
            values: A tensor of the same dtype and length.
            after: Function that waits until `values` can be read; None if `values` can be read now.
            then: Function that is called on the host when the copy is complete. With this argument,
                `into` must be a tensor in host memory. If threads make the copies, the function is
                called in another thread. The functions of several copies are called in the order of
                the copies. `Copy.wait` waits for the end of the function.
        """
        self.num_copied += values.nbytes
        if self._has_threads:
            if self.poison:
                into.fill_(torch.nan)
            return self._thread_of(values).copy(into, values, after, then)

        def complete() -> None:
            if after is not None:
                after()
            into.copy_(values)
            if then is not None:
                then()

        copy = Copy(complete)
        is_random = self.copies == "random" and self._chance.random() < 0.5
        if (self.copies == "early" and after is None) or is_random:
            copy.wait()
        elif self.poison:
            into.fill_(torch.nan)
        return copy

    def _thread_of(self, values: Tensor) -> _CopyThread:
        """Return the thread for a copy of `values`."""
        is_on_host = self._tiers.get(values.untyped_storage()._cdata) is Tier.HOST
        target = Tier.DEVICE if is_on_host else Tier.HOST
        if (thread := self._threads.get(target)) is None:
            rates = self._links or Links()
            rate = rates.to_device if target is Tier.DEVICE else rates.to_host
            thread = _CopyThread(f"to {target.value}", self._device, rate, self.num_threads)
            self._threads[target] = thread
        return thread

    def on_device(self, flat: Tensor) -> Tensor:
        """Return the buffer `flat` itself if it is on the device, otherwise a copy of the buffer on
        the device."""
        if self.tier_of(flat) is Tier.DEVICE:
            return flat
        copy = torch.empty_like(flat, device=self._device)
        self.copy(copy, flat).wait()
        return copy

    def store(self, into: Tensor, values: Tensor) -> None:
        """Copy `values`, a tensor on the device, to a buffer in any tier. Do nothing if `values` is
        the buffer itself."""
        if into.data_ptr() == values.data_ptr():
            return
        if self.tier_of(into) is Tier.HOST:
            self.copy(into, values).wait()
        else:
            into.copy_(values)

    def has(self, flat: Tensor) -> bool:
        """Return True if a buffer is not freed. The result is False for a freed buffer that keeps
        its memory because of `poison`."""
        return flat.untyped_storage()._cdata not in self._freed
