"""The warm process of a node: it has imported all modules of a run, and forks ranks on request.

The agent, which starts the ranks of a supervised run on its node, starts this process as `python -P
-m optimus.warm` with a socket as standard input. The warm process initialises no device and
computes nothing. A forked rank therefore starts like a new interpreter, but saves the seconds that
imports take. Each request is a JSON object with the environment and the arguments of a rank,
together with the descriptor of a pipe for the rank's output. The answers to the agent are the
process IDs and, later, the exit statuses of the ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from optimus.launch import environment
from optimus.launch.imports import without_collections
from optimus.launch.spawn import prepare_rank

_MODULES = (
    "optimus.train.loop",
    "optimus.train.startup",
    "optimus_kernels",
    "optimus.bench.commands",  # the parser of the command line needs this module
    "optimus.planner.commands",  # the parser also needs this module
    "optimus.checkpoint.commands",
    "optimus.study.commands",
    "optimus.train.commands",
    "encodings.idna",  # for the look-up of a host name
    "torch.utils._device",  # for torch.set_default_device and `with device`
)


def main() -> NoReturn:
    """Import the modules of a run, and fork a rank for each request of the agent, until the agent
    closes the socket."""
    from optimus.cli import set_library_variables
    from optimus.resilience.supervision.warm_process import MAX_BYTES

    # Slurm sends SIGTERM to all processes of a job. If the warm process ended, the kernel would
    # kill its ranks before the ranks could save.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    requests = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    set_library_variables()
    # A thread pool does not survive a fork, and the BLAS of numpy creates its pool at import.
    with _single_blas_thread(), without_collections():
        _import_all()
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    requests.send(json.dumps({"is": "ready"}).encode())
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == woken.fileno():
                woken.recv(4096)
                with contextlib.suppress(ChildProcessError):
                    while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                        status = os.waitstatus_to_exitcode(ended[1])
                        end = {"is": "ended", "pid": ended[0], "status": status}
                        requests.send(json.dumps(end).encode())
                continue
            data, fds, _, _ = socket.recv_fds(requests, MAX_BYTES, 1)
            if not data:
                os._exit(0)
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                for inherited in (requests, woken, waker):
                    inherited.close()
                status = 1
                try:
                    _become_rank(json.loads(data), fds[0], parent)
                except SystemExit as end:  # from a rank without a process group
                    status = end.code if isinstance(end.code, int) else 1
                except Exception:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            os.close(fds[0])
            requests.send(json.dumps({"is": "forked", "pid": pid}).encode())


@contextlib.contextmanager
def _single_blas_thread() -> Iterator[None]:
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OPENBLAS_NUM_THREADS"]
        if before is not None:
            os.environ["OPENBLAS_NUM_THREADS"] = before


def _import_all() -> None:
    """Import all modules that a rank uses, including modules that a rank imports after its start.

    A forked rank then reads no module files. tests/bench/test_supervision.py checks this.
    """
    for name in _MODULES:
        importlib.import_module(name)
    with contextlib.suppress(ImportError):  # TensorBoard is optional
        importlib.import_module("torch.utils.tensorboard")
    kernels = importlib.import_module("optimus_kernels.backend")
    # Read the sources of the kernels. Load the kernels' library if it is already compiled.
    with contextlib.suppress(kernels.KernelError):
        kernels.build.plan("cpu")
    with contextlib.suppress(kernels.KernelError):
        kernels.find("cpu", may_build=False)


def _become_rank(request: dict[str, Any], output: int, parent: int) -> NoReturn:
    """Run `optimus` in this child process, as a new interpreter would.

    Args:
        request: Environment variables (`environ`) and arguments (`arguments`) of the rank.
        output: Descriptor of the pipe for the rank's standard output and standard error.
        parent: Process ID of the warm process.
    """
    from optimus.cli import process

    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    prepare_rank(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # The existing stream objects still have the positions and settings of the files to which
    # descriptors 1 and 2 referred before.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv = ["optimus", *request["arguments"]]
    environment.STARTED = time.monotonic()
    process()


if __name__ == "__main__":
    main()
