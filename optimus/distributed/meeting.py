"""Whether ranks can meet where they are told to, and whether they then go on. Imports no torch: the
first is asked before it is there."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from optimus.errors import ConfigError, OptimusError
from optimus.launch.environment import LaunchEnv

if TYPE_CHECKING:
    from torch.distributed import Store

_ALL_HERE, _ALL_LEFT = "optimus/all-here", "optimus/all-left"
_UNMET = b"unmet"
_LEAVE_S = 5.0


def check_meeting_point(launch: LaunchEnv) -> None:
    """Raise ConfigError for a MASTER_ADDR where ranks would wait in vain: torch asks for an unknown
    name until the time limit, and the first rank can only listen on its own machine."""
    if not launch.init_method.startswith("tcp://"):
        return  # torchrun's own store may be elsewhere
    where = urlsplit(launch.init_method)
    addresses = _addresses(where)
    if launch.is_first and addresses:
        _bind(addresses, where).close()


def listen_at_meeting_point(where: SplitResult, one_machine: bool) -> int | None:
    """Return the file descriptor of a socket that listens at the meeting address alone.

    None where the store must listen on all addresses: the name server does not answer, or
    MASTER_ADDR means the loopback interface on this machine alone. Debian's /etc/hosts maps a
    machine's name to it; some launchers of several machines (not `one_machine`) give rank 0
    localhost and the others its name. Raises ConfigError.
    """
    addresses = _addresses(where)
    if not addresses:
        return None
    listener = _bind(addresses, where)
    is_local = one_machine and is_loopback(where.hostname or "")
    if is_loopback(listener.getsockname()[0]) and not is_local:
        listener.close()
        return None
    try:
        listener.listen(socket.SOMAXCONN)  # another process may have bound the port, too
    except OSError as error:
        listener.close()
        raise _no_listener(error, where) from None
    return listener.detach()


def is_loopback(host: str) -> bool:
    """Return whether `host`, an IP address or localhost, means this machine on every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _addresses(where: SplitResult) -> list[tuple[socket.AddressFamily, tuple]]:
    """Return what MASTER_ADDR resolves to here, loopback addresses last; nothing where the name
    server does not answer. Raises ConfigError for an unknown name."""
    try:
        found = socket.getaddrinfo(where.hostname, where.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:  # a name server that is slow, not one that says no
            return []
        raise ConfigError(
            f"MASTER_ADDR: {where.hostname} is no host that this machine knows "
            f"({error.strerror}); export MASTER_ADDR=HOST, with the host of rank 0"
        ) from None
    addresses = [(family, address) for family, _, _, _, address in found]
    return sorted(addresses, key=lambda entry: is_loopback(entry[1][0]))


def _bind(
    addresses: Sequence[tuple[socket.AddressFamily, tuple]], where: SplitResult
) -> socket.socket:
    """Return a socket bound to the first of the addresses that this machine has; it does not listen
    yet. Raises ConfigError."""
    problem: OSError | None = None
    for family, address in addresses:
        bound = None
        try:
            bound = socket.socket(family, socket.SOCK_STREAM)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            return bound
        except OSError as error:  # IPv6 may be switched off
            if bound is not None:
                bound.close()
            problem = error if problem is None or error.errno == errno.EADDRINUSE else problem
    assert problem is not None
    raise _no_listener(problem, where)


def _no_listener(error: OSError, where: SplitResult) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"MASTER_PORT: port {where.port} of {where.hostname} is taken; export another "
            "MASTER_PORT"
        )
    return ConfigError(
        f"MASTER_ADDR: {where.hostname} is not the machine of rank 0, {socket.gethostname()} "
        f"({error.strerror}); export MASTER_ADDR={socket.gethostname()}"
    )


class NotAllHereError(RuntimeError):
    """Some ranks have not come to the meeting within its time limit."""

    def __init__(self, reason: str, told_by_another: bool) -> None:
        super().__init__(reason)
        self.told_by_another = told_by_another


def agree_to_start(
    store: Store, launch: LaunchEnv, trouble: OptimusError | None, limit_s: float
) -> None:
    """Every rank says, with its `trouble` or None, whether it can go on; return if all can.

    Otherwise all raise: one rank what it found, to be told (the first rank if it found anything,
    else whoever was the first to), the others its exit status. Raises NotAllHereError, or
    RuntimeError where the store is gone.
    """
    first_to_find = False
    if trouble is not None:
        if launch.is_first:
            store.set("optimus/first-rank-in-trouble", "1")
        first_to_find = store.add("optimus/in-trouble", 1) == 1
        if first_to_find:
            store.set("optimus/exit-code", str(trouble.exit_code))
    if store.add("optimus/here", 1) == launch.world_size:
        store.set(_ALL_HERE, "all")
    _wait_for_all(store, limit_s)
    if not store.add("optimus/in-trouble", 0):
        return
    if trouble is None:
        trouble = OptimusError("another rank cannot start")
        trouble.exit_code = int(store.get("optimus/exit-code"))
        trouble.told_by_another = True
    elif store.check(["optimus/first-rank-in-trouble"]):
        trouble.told_by_another = not launch.is_first
    else:
        trouble.told_by_another = not first_to_find
    _leave(store, launch)
    raise trouble


def _wait_for_all(store: Store, limit_s: float) -> None:
    try:
        store.wait([_ALL_HERE], timedelta(seconds=limit_s))
    except RuntimeError as error:
        told_by_another = store.add("optimus/unmet", 1) > 1
        store.set(_ALL_HERE, _UNMET.decode())  # those who came later need not wait as long again
        raise NotAllHereError(str(error), told_by_another) from error
    if store.get(_ALL_HERE) == _UNMET:
        raise NotAllHereError("another rank waited in vain", told_by_another=True)


def _leave(store: Store, launch: LaunchEnv) -> None:
    """The first rank may keep the store: it goes last."""
    if store.add("optimus/left", 1) == launch.world_size:
        store.set(_ALL_LEFT, "1")
    if launch.is_first:
        with contextlib.suppress(RuntimeError):
            store.wait([_ALL_LEFT], timedelta(seconds=_LEAVE_S))
