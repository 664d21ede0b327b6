"""Starting and ending the process group of all ranks."""

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

from optimus.distributed.collectives import ALONE, Group, barrier, group_of
from optimus.distributed.meeting import (
    NotAllHereError,
    agree_to_start,
    is_loopback,
    listen_at_meeting_point,
)
from optimus.errors import ConfigError, LostPeerError, OptimusError, counted, one_line
from optimus.launch.environment import LaunchEnv, read_launch_env
from optimus.platform import collective_backend, import_ipex, pick_device

_TROUBLED_WAIT_S = 120.0
"""How long a rank that cannot go on waits for the others before it says so by itself."""
_joined: list[str] = []
"""The backend of each world that this process has joined."""


@dataclass(frozen=True)
class World:
    """All ranks of the run, seen from this one."""

    launch: LaunchEnv
    device: torch.device
    backend: str
    everyone: Group
    timeout_s: float = 600.0
    """What bounds every wait for another rank."""

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
    trouble: OptimusError | None = None,
) -> World:
    """Take this rank's device and, if there are others, join them in one process group.

    `timeout_s` bounds the meeting and every collective. A single process starts no group. With
    `trouble`, that this rank cannot go on, or with another rank's, all raise instead: one rank
    the error itself, the others with its exit status and `told_by_another`.
    """
    launch = launch_env or read_launch_env(os.environ)
    own_device = None
    try:
        import_ipex()  # before any device is touched: it registers operators for them
        own_device = pick_device(launch.local_rank, device)
    except OptimusError as error:
        trouble = trouble or error
    if launch.world_size == 1:
        if trouble is not None:
            raise trouble
        assert own_device is not None
        return World(launch, own_device, "none", ALONE)
    limit_s = timeout_s if trouble is None else min(timeout_s, _TROUBLED_WAIT_S)
    try:
        store = _meet(launch, limit_s)
        agree_to_start(store, launch, trouble, limit_s)
    except RuntimeError as error:  # torch's DistError, and plain ones of gloo
        if trouble is not None:
            raise trouble from None
        raise _unmet(error, launch, timeout_s) from error
    assert own_device is not None  # otherwise `agree_to_start` has raised
    backend = collective_backend(own_device)
    _stay_on_this_machine(launch)
    started = time.monotonic()
    try:
        with silent_libraries():
            distributed.init_process_group(
                backend,
                store=distributed.PrefixStore("default_pg", store),
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=timedelta(seconds=timeout_s),
                # No device_id: with one, nccl splits every later group from this one, which all
                # ranks of the world would have to join in; ours are made by their own ranks alone.
            )
    except RuntimeError as error:
        raise _unconnected(error, backend, store, time.monotonic() - started) from error
    _joined.append(backend)
    assert distributed.group.WORLD is not None
    everyone = group_of(distributed.group.WORLD)
    barrier(everyone)  # a rank that ended now would break the start of slower ones
    return World(launch, own_device, backend, everyone, timeout_s)


@contextlib.contextmanager
def silent_libraries() -> Iterator[None]:
    """Meanwhile standard output is standard error: gloo (in torch 2.8) tells there who is
    connected, amidst what a command prints for programs."""
    if sys.stdout is None or sys.stderr is None:  # closed, and 1 or 2 may be any file
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _meet(launch: LaunchEnv, limit_s: float) -> distributed.Store:
    """The store through which ranks find each other; others may not have come to it yet."""
    limit = timedelta(seconds=limit_s)
    where = urlsplit(launch.init_method)
    if where.scheme == "tcp":  # as torch's own rendezvous, which waits for all and listens on all
        assert where.hostname is not None and where.port is not None, launch.init_method
        store: distributed.Store = distributed.TCPStore(
            where.hostname,
            where.port,
            launch.world_size,
            is_master=launch.is_first,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=(
                listen_at_meeting_point(where, _is_one_machine(launch)) if launch.is_first else None
            ),
        )
    else:
        meeting = distributed.rendezvous(
            launch.init_method, launch.rank, launch.world_size, timeout=limit
        )
        store, _, _ = next(meeting)
    store.set_timeout(limit)
    return store


def _stay_on_this_machine(launch: LaunchEnv) -> None:
    """Let gloo listen on the loopback interface alone where ranks meet on it; what the user has
    set counts."""
    host = urlsplit(launch.init_method).hostname or os.environ.get("MASTER_ADDR", "")
    is_met = launch.init_method[:4] != "file" and is_loopback(host) and _is_one_machine(launch)
    if sys.platform == "linux" and is_met:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _is_one_machine(launch: LaunchEnv) -> bool:
    return launch.local_world_size == launch.world_size


def _unmet(error: RuntimeError, launch: LaunchEnv, timeout_s: float) -> LostPeerError:
    text = one_line(error)
    unmet = LostPeerError(
        f"the {counted(launch.world_size, 'rank')} did not meet at {launch.init_method} within "
        f"parallel.timeout_s = {timeout_s:g}: one has not started, has ended, or cannot reach it; "
        f"look at the ranks' own messages, or set MASTER_ADDR to the host of rank 0 ({text[:200]})"
    )
    if isinstance(error, NotAllHereError):
        unmet.told_by_another = error.told_by_another
    return unmet


def _unconnected(
    error: RuntimeError, backend: str, store: distributed.Store, seconds: float
) -> OptimusError:
    """Return the error of ranks that met at the store and could not make a process group."""
    text = one_line(error)
    interface = re.search(r"Unable to find address for: (\S+)", text)  # gloo's
    if interface is not None:
        unconnected: OptimusError = ConfigError(
            f"GLOO_SOCKET_IFNAME: the network interface {interface[1]} of {socket.gethostname()} "
            f"is absent, down or without an address; bring it up (ip link set {interface[1]} up) "
            "or export GLOO_SOCKET_IFNAME=NAME with another"
        )
    else:
        unconnected = LostPeerError(
            f"the ranks met, but {backend} did not connect them ({seconds:.0f} s): {text[:200]}; "
            "look at the ranks' own messages and at the network between them"
        )
    with contextlib.suppress(RuntimeError):  # the store is gone: each rank prints its error
        unconnected.told_by_another = store.add("optimus/unconnected", 1) > 1
    return unconnected


def tells_first(limit_s: float = 2.0) -> bool:
    """Whether this rank, which lost another, is the first to say so: all ask the store through
    which they met. True too where it does not answer within `limit_s`: who kept it is gone."""
    answer: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            store = distributed.distributed_c10d._get_default_store()
            answer.append(store.add("optimus/lost-peer-told", 1) == 1)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(limit_s)
    return answer[0] if answer else True


def leaves_at_once() -> bool:
    """Whether this process is to end without the interpreter's own end.

    In a world that it has not left, that would wait for what ranks were doing together, until
    parallel.timeout_s. And a group that somebody keeps behind `end_world`, as FSDP2 does in a
    benchmark, has threads of gloo that could abort it. Other backends have something to do then:
    oneCCL ends MPI, whose launchers take a rank that did not for a lost one.
    """
    return bool(_joined) and (distributed.is_initialized() or _joined[-1] == "gloo")


def end_world() -> None:
    """Leave the process group, if one was started: its threads have ended then.

    A thread of gloo lets go of an operation's tensors behind our wait for it, and needs the
    interpreter for that; were it still to do so as the interpreter ends, C++ would abort the
    process. torch holds the only references to process groups (`Group.handle`), so they end here.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()
