"""Function calls in a forked child process, for functions that could crash, hang or fill the
memory."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import resource
import select
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from optimus.launch.signals import STOP_SIGNALS

_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_RETURNED, _RAISED = b"r", b"e"
_MESSAGE_BYTES = 4096
"""Longest message of an exception, in bytes. A pipe accepts such a message in a single write."""

_PID = struct.Struct("q")
"""Format of the child's process id, which the child writes to the pipe before its result. The
parent uses this id if a signal handler raises an exception before `fork` returns the id."""

_PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that a process receives when its parent ends."""
_STOP_S = 1.0
"""Seconds that `run` waits before it raises an error, if a stop signal such as SIGTERM ended the
child. The parent usually receives the same signal, and the signal handler of the parent should run
before `run` raises. `run` also waits at most this time for the id of a child whose `fork` was
interrupted."""


class CrashError(Exception):
    """Raised if the function that `run` called crashed the child process (for example by a
    segmentation fault), or exceeded the limit of processor time or memory. The message states the
    signal or the limit."""


class UnfinishedError(Exception):
    """Raised if the child process of `run` did not start, did not end in time, or ended without a
    result for a reason other than the called function. The message states the reason."""


def run(
    call: Callable[[], object], *, limit_s: float, cpu_s: int = 0, memory_bytes: int = 0
) -> str | None:
    """Call `call` in a forked child process. The standard error of the child is discarded.

    Args:
        call: The function, which must not use locks that another thread of this process could hold.
        limit_s: Limit of the wall-clock time in seconds.
        cpu_s: Limit of the processor time in seconds. 0: no limit.
        memory_bytes: Limit of the memory that the child allocates. 0: no limit.

    Returns:
        None if `call` returned, else the message of its exception.

    Raises:
        CrashError: `call` crashed the process, or exceeded `cpu_s` or `memory_bytes`.
        UnfinishedError: The process cannot be started, has no result within `limit_s`, or ended for
            another reason, such as a lack of memory.
    """
    pid, status, ended, result, pipe = 0, 0, False, b"", None
    with contextlib.ExitStack() as stack:
        stack.enter_context(_child_statuses())
        try:
            parent = os.getpid()
            reader, writer = _pipe()
            pipe = stack.enter_context(open(reader, "rb", buffering=0))
            with open(writer, "wb", buffering=0), _blocked_signals() as mask:
                pid = os.fork()
                if pid == 0:
                    _run_and_exit(call, parent, writer, mask, cpu_s, memory_bytes)
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            # Wait for the end of the child too, not only for the end of the pipe: a process that
            # another thread has forked can keep the pipe open after the child has ended.
            with contextlib.suppress(OSError, AttributeError):  # Linux 5.3 or newer
                process = os.pidfd_open(pid)
                stack.callback(os.close, process)
                poll.register(process, select.POLLIN)
            os.set_blocking(pipe.fileno(), False)
            poll.poll(1000 * limit_s)
            pipe.read(_PID.size)
            ended = bool(poll.poll(1000 * limit_s))
            result = pipe.read(1 + _MESSAGE_BYTES) or b""
        except OSError as error:
            raise UnfinishedError(f"no process can be started ({error.strerror})") from None
        finally:  # also if a handler of a signal raises
            if pipe and not pid and select.select([pipe], [], [], _STOP_S)[0]:
                pid = _PID.unpack(pipe.read(_PID.size).ljust(_PID.size, b"\0"))[0]
            # ChildProcessError: the system did not keep the exit status.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if pid and not ended:
                    os.kill(pid, signal.SIGKILL)
                if pid:
                    _, status = os.waitpid(pid, 0)
    if result[:1] == _RETURNED:
        return None
    if result[:1] == _RAISED:
        return result[1:].decode(errors="replace")
    if not ended:
        raise UnfinishedError(f"no result within {limit_s:.0f} s")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in STOP_SIGNALS:
        time.sleep(_STOP_S)
    raise _error_of(status, cpu_s)


def _error_of(status: int, cpu_s: int) -> CrashError | UnfinishedError:
    """Return the error for a child process that ended with `status` and without a result."""
    if not os.WIFSIGNALED(status):
        return UnfinishedError("the child process ended without a result; perhaps memory was short")
    number = os.WTERMSIG(status)
    if number == signal.SIGXCPU:
        return CrashError(f"it takes more than {cpu_s} s of processor time")
    if number in _CRASHES:
        return CrashError(f"signal {number}")
    return UnfinishedError(f"signal {number} ended the child process; perhaps memory was short")


def _pipe() -> tuple[int, int]:
    """Create a pipe, and return its descriptors (read end, write end).

    The descriptor of the write end is above 2: in a process without standard error, the pipe could
    get descriptor 2, which the child redirects to /dev/null.
    """
    reader, writer = os.pipe()
    try:
        return reader, fcntl.fcntl(writer, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)


@contextlib.contextmanager
def _child_statuses() -> Iterator[None]:
    """Context manager that makes the system keep the exit status of a child process.

    If this process ignores SIGCHLD, the system discards the statuses of its children. The context
    manager therefore sets the default action of SIGCHLD. Only the main thread can set an action. In
    another thread, the status of the child is discarded, and `run` reports a crash as a lack of
    memory. Other children of this process that end while the context is active remain zombies.
    """
    is_ignored = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    if not is_ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


@contextlib.contextmanager
def _blocked_signals() -> Iterator[set[int]]:
    """Context manager that blocks all signals to this thread. It yields the previous signal mask of
    the thread.

    A child that is forked in this context therefore cannot call a signal handler of its parent.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _run_and_exit(
    call: Callable[[], object],
    parent: int,
    writer: int,
    mask: set[int],
    cpu_s: int,
    memory_bytes: int,
) -> NoReturn:
    """Call `call`, write the result to the descriptor `writer` and end this process."""
    result = b""
    try:
        os.write(writer, _PID.pack(os.getpid()))
        with contextlib.suppress(OSError, AttributeError):  # Linux only
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # the parent ended before the call of prctl
            os._exit(0)
        _isolate(cpu_s, memory_bytes)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        call()
        result = _RETURNED
    except MemoryError:
        if memory_bytes:
            os.abort()
    except BaseException as error:
        result = _RAISED + str(error).encode(errors="replace")[:_MESSAGE_BYTES]
    finally:
        os.write(writer, result)
        os._exit(0)


def _isolate(cpu_s: int, memory_bytes: int) -> None:
    """Prepare this child process: set its resource limits, restore the default action of stop
    signals that have a handler, and redirect standard error to /dev/null."""
    faulthandler.disable()
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
    _limit(resource.RLIMIT_CORE, 0)
    if cpu_s:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        _limit(resource.RLIMIT_CPU, cpu_s)
    if memory_bytes:
        with contextlib.suppress(OSError), open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
            _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory_bytes)


def _limit(kind: int, value: int) -> None:
    """Set the soft limit of the resource `kind` to `value`, but at most to the hard limit.

    The hard limit is not changed. At the soft limit of processor time, the child therefore gets
    SIGXCPU, by which the parent recognizes the reason. At the hard limit, the child would get
    SIGKILL.
    """
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, hard))
