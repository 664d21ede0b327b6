"""Creation of the process group of all ranks when a run starts, and its destruction at the end."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as distributed

from optimus.distributed.agreement import (
    Agreement,
    RunEnded,
    end_alone,
    end_without_store,
    outcome_of,
)
from optimus.distributed.collectives import ALONE, Group, barrier, group_of
from optimus.distributed.rendezvous import is_loopback, listen_at_meeting_point
from optimus.errors import (
    ConfigError,
    LostPeerError,
    OptimusError,
    Outcome,
    OutcomeKind,
    Phase,
    as_optimus_error,
    counted,
    one_line,
)
from optimus.launch.environment import LaunchEnv, read_launch_env
from optimus.platform import collective_backend, import_ipex, pick_device

_FAILED_WAIT_S = 120.0
"""Longest time, in seconds, that a rank waits for the other ranks if it cannot start itself."""
_CLOSE_S = 1.0
"""Longest time, in seconds, that a failed rank waits until gloo has closed its connections."""
_joined: list[str] = []
"""Backends of the world process groups that this process has joined, oldest first."""


@dataclass(frozen=True)
class World:
    """All ranks of a run, with the device, backend and rank of this process."""

    launch: LaunchEnv
    device: torch.device
    backend: str
    everyone: Group
    timeout_s: float = 600.0
    """Longest time, in seconds, that this rank waits for another rank in any operation."""
    agreement: Agreement | None = None
    """Agreement of the ranks on the reason why the run ends; None if the run has a single rank."""

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def size(self) -> int:
        return self.launch.world_size

    @property
    def is_first(self) -> bool:
        return self.launch.is_first


def start_world(
    launch_env: LaunchEnv | None = None,
    timeout_s: float = 600.0,
    device: str = "auto",
    failure: OptimusError | None = None,
) -> World:
    """Select the device of this rank. If the run has several ranks, create their process group.

    Args:
        launch_env: Rank and rendezvous address; by default read from environment variables.
        timeout_s: Time limit of the rendezvous and of every collective, in seconds.
        device: Value of the setting `train.device`.
        failure: The error that prevents this rank from starting; None if this rank can start.

    Returns:
        The World of this rank. In a run of a single rank, the World has no process group.

    Raises:
        OptimusError: The only rank of the run cannot start.
        LaunchError: The run has several ranks, and rank 0 cannot listen at the rendezvous address.
        RunEnded: The run has several ranks, and one of them cannot start. All ranks raise RunEnded.
    """
    launch = launch_env or read_launch_env(os.environ)
    picked = None
    try:
        import_ipex()  # before any device is used, because IPEX registers operators for devices
        picked = pick_device(launch.local_rank, device)
    except OptimusError as error:
        failure = failure or error
    if launch.world_size == 1:
        if failure is not None:
            raise failure
        assert picked is not None
        return World(launch, picked, "none", ALONE)
    store = _meet(launch, timeout_s, failure)
    agreement = Agreement(store, launch)
    outcome = None if failure is None else outcome_of(failure, launch.rank, "launch")
    absence = outcome_of(_unmet(launch, timeout_s), launch.rank, "meeting")
    try:
        agreement.start(outcome, absence, _limit_s(timeout_s, failure))
    except RunEnded as ended:
        raise ended from failure
    assert picked is not None, "no rank has a failure"
    backend = collective_backend(picked)
    try:
        everyone = _connect(launch, store, backend, timeout_s)
    except OptimusError as error:
        raise agreement.end(outcome_of(error, launch.rank, "meeting")) from error
    return World(launch, picked, backend, everyone, timeout_s, agreement)


def end_run(
    error: Exception,
    launch: LaunchEnv,
    agreement: Agreement | None,
    phase: Phase,
    step: int = 0,
) -> RunEnded:
    """Return the RunEnded with which this rank ends after it has raised `error`. If `agreement` is
    not None, the RunEnded has the Outcome on which all ranks agree.

    If `error` is a bug of Optimus, this function publishes the error for the other ranks and raises
    `error` again, so that this rank prints a traceback.

    Args:
        error: The error that ends this rank.
        launch: Rank of this process and rendezvous address.
        agreement: `World.agreement`; None for a run of a single rank and before the rendezvous.
        phase: The phase in which the error was raised.
        step: The update in which the error was raised; 0 before the first update.

    Raises:
        Exception: `error`, if it is a bug.
    """
    failure = as_optimus_error(error)
    if failure is None:
        if agreement is not None:
            text = one_line(f"{type(error).__name__}: {error}")
            host = socket.gethostname()
            kind = OutcomeKind.FAILED
            agreement.publish(Outcome(kind, text, launch.rank, host, step, phase))
        raise error
    if agreement is None:
        return end_alone(failure, phase)
    # Errors of other kinds are raised by all ranks together, or because another rank is lost.
    may_be_alone = failure.kind in (OutcomeKind.FAILED, OutcomeKind.USAGE)
    if (launch.is_first or may_be_alone) and _joined[-1:] == ["gloo"]:
        _close_connections()
    ended = agreement.end(outcome_of(failure, launch.rank, phase, step))
    if ended.is_shared:
        with contextlib.suppress(RuntimeError):  # an error here must not replace the agreed Outcome
            end_world()
    return ended


def _close_connections() -> None:
    """Close the connections of this rank. Other ranks that wait for this rank then fail at once,
    and read the Outcome of this rank from the store."""

    def close() -> None:
        with contextlib.suppress(RuntimeError):
            end_world()

    # Without this call, the connections would close at the end of the process, together with the
    # store. The wait is limited, because an operation in progress can delay the close.
    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(_CLOSE_S)


def _limit_s(timeout_s: float, failure: OptimusError | None) -> float:
    return timeout_s if failure is None else min(timeout_s, _FAILED_WAIT_S)


def _connect(launch: LaunchEnv, store: distributed.Store, backend: str, timeout_s: float) -> Group:
    """Create and return the group of all ranks. All ranks must have connected to `store` before."""
    host = urlsplit(launch.init_method).hostname or os.environ.get("MASTER_ADDR", "")
    is_met = launch.init_method[:4] != "file" and is_loopback(host) and launch.is_single_machine
    if sys.platform == "linux" and is_met:  # all ranks are on this machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    started = time.monotonic()
    try:
        with silent_libraries():
            distributed.init_process_group(
                backend,
                store=distributed.PrefixStore("default_pg", store),
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=timedelta(seconds=timeout_s),
                # No device_id: with a device_id, NCCL creates each later group by a split of this
                # group, and all ranks must take part in a split. In Optimus, only the members of a
                # group create the group.
            )
    except RuntimeError as error:
        raise _unconnected(error, backend, time.monotonic() - started) from error
    _joined.append(backend)
    assert distributed.group.WORLD is not None
    everyone = group_of(distributed.group.WORLD)
    barrier(everyone)  # otherwise, a rank that ends early would break the start of slower ranks
    return everyone


@contextlib.contextmanager
def silent_libraries() -> Iterator[None]:
    """Context manager that redirects standard output to standard error. Libraries print messages to
    standard output that would mix with the output of the command."""
    if sys.stdout is None or sys.stderr is None:  # closed: descriptors 1 and 2 may be any files
        yield
        return
    # gloo of torch 2.8 prints connected ranks to standard output.
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _meet(launch: LaunchEnv, timeout_s: float, failure: OptimusError | None) -> distributed.Store:
    """Connect to torch's store at the rendezvous address, and return the store. Raise RunEnded if
    the store cannot be reached."""
    limit = timedelta(seconds=_limit_s(timeout_s, failure))
    try:
        store = _open_store(launch, limit)
        store.set_timeout(limit)
    except RuntimeError as error:  # torch's DistError, and plain RuntimeErrors of gloo
        unmet = _unmet(launch, timeout_s, f" ({one_line(error)[:200]})")
        outcome = outcome_of(failure or unmet, launch.rank, "meeting")
        raise end_without_store(outcome, launch) from error
    return store


def _open_store(launch: LaunchEnv, limit: timedelta) -> distributed.Store:
    where = urlsplit(launch.init_method)
    if where.scheme != "tcp":
        meeting = distributed.rendezvous(
            launch.init_method, launch.rank, launch.world_size, timeout=limit
        )
        return next(meeting)[0]
    # torch's rendezvous is not used, because it waits for all ranks and listens on all addresses.
    assert where.hostname is not None and where.port is not None, launch.init_method
    return distributed.TCPStore(
        where.hostname,
        where.port,
        launch.world_size,
        is_master=launch.is_first,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=(
            listen_at_meeting_point(where, launch.is_single_machine) if launch.is_first else None
        ),
    )


def _unmet(launch: LaunchEnv, timeout_s: float, reason: str = "") -> LostPeerError:
    return LostPeerError(
        f"the {counted(launch.world_size, 'rank')} did not meet at {launch.init_method} within "
        f"parallel.timeout_s = {timeout_s:g}: a rank has not started, has ended, or cannot reach "
        "this address; read the output of all ranks, or set MASTER_ADDR to the host of rank 0"
        f"{reason}"
    )


def _unconnected(error: RuntimeError, backend: str, seconds: float) -> OptimusError:
    """Return the OptimusError that explains to the user why init_process_group raised `error`.

    All ranks had already connected to the store. `seconds` is the time from the call of
    init_process_group to the error.
    """
    text = one_line(error)
    interface = re.search(r"Unable to find address for: (\S+)", text)  # a message of gloo
    if interface is not None:
        return ConfigError(
            f"GLOO_SOCKET_IFNAME: the network interface {interface[1]} of {socket.gethostname()} "
            f"is absent, down or without an address; bring it up (ip link set {interface[1]} up) "
            "or export GLOO_SOCKET_IFNAME=NAME with the name of another interface"
        )
    return LostPeerError(
        f"all ranks have started, but after {seconds:.0f} s {backend} failed to connect them: "
        f"{text[:200]}; read the output of all ranks and check the network between them"
    )


def leaves_at_once() -> bool:
    """Return True if this process must end by os._exit, without the interpreter's shutdown.

    During the interpreter's shutdown, the process could wait for collectives in progress, or a
    thread of gloo could abort the process.
    """
    # With gloo, a library may keep a process group after `end_world`, as FSDP2 does. Other backends
    # need the interpreter's shutdown, in which oneCCL finalizes MPI.
    return bool(_joined) and (distributed.is_initialized() or _joined[-1] == "gloo")


def end_world() -> None:
    """Destroy all torch process groups of this process, if there are any, and end their threads.

    A gloo thread that still runs during the interpreter's shutdown could abort the process.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()
