"""Checks of the rendezvous address (MASTER_ADDR and MASTER_PORT), before ranks wait for each other.

This module does not import torch, because the import takes seconds.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit

from optimus.errors import LaunchError
from optimus.launch.environment import LaunchEnv


def check_meeting_point(launch: LaunchEnv) -> None:
    """Raise LaunchError if the ranks cannot meet at MASTER_ADDR and MASTER_PORT.

    They cannot meet if the host name is unknown, if the address does not belong to the machine of
    rank 0, or if the port is in use on that machine. torch would not report an unknown host name at
    once: it would repeat the lookup until its time limit.
    """
    if not launch.init_method.startswith("tcp://"):
        return  # a file, or the store of torchrun, which may be at another address
    where = urlsplit(launch.init_method)
    addresses = _addresses(where)
    if launch.is_first and addresses:
        _bind(addresses, where).close()


def listen_at_meeting_point(where: SplitResult, single_machine: bool) -> int | None:
    """Return the file descriptor of a socket that listens only at MASTER_ADDR, or None if the store
    must listen on all addresses of this machine.

    The store must listen on all addresses in two cases. In the first case, the name server does not
    answer. In the second case, MASTER_ADDR is a loopback address on this machine, but may be
    another address on other machines. This happens because Debian's /etc/hosts maps a machine's own
    name to a loopback address, and because some launchers set MASTER_ADDR to localhost for rank 0
    and to the name of rank 0's machine for the other ranks.

    Args:
        where: Rendezvous address.
        single_machine: True if all ranks are on this machine.

    Raises:
        LaunchError: This machine cannot listen at the address.
    """
    addresses = _addresses(where)
    if not addresses:
        return None
    listener = _bind(addresses, where)
    is_local = single_machine and is_loopback(where.hostname or "")
    if is_loopback(listener.getsockname()[0]) and not is_local:
        listener.close()
        return None
    try:
        listener.listen(socket.SOMAXCONN)  # fails if another process also has bound the port
    except OSError as error:
        listener.close()
        raise _no_listener(error, where) from None
    return listener.detach()


def is_loopback(host: str) -> bool:
    """Return True if `host` is "localhost" or a loopback IP address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _addresses(where: SplitResult) -> list[tuple[socket.AddressFamily, tuple]]:
    """Look up the host of `where`; return its addresses, with loopback addresses last. Return an
    empty list if the name server does not answer. Raises LaunchError if the name is unknown."""
    try:
        entries = socket.getaddrinfo(where.hostname, where.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:  # the name server does not answer
            return []
        raise LaunchError(
            f"MASTER_ADDR: {where.hostname} is not a host name that this machine can resolve "
            f"({error.strerror}); export MASTER_ADDR=HOST, where HOST is the machine of rank 0"
        ) from None
    addresses = [(family, address) for family, _, _, _, address in entries]
    return sorted(addresses, key=lambda entry: is_loopback(entry[1][0]))


def _bind(
    addresses: Sequence[tuple[socket.AddressFamily, tuple]], where: SplitResult
) -> socket.socket:
    """Return a socket that is bound to the first usable address and does not listen yet. Raises
    LaunchError if no address belongs to this machine or if the port is in use."""
    problem: OSError | None = None
    for family, address in addresses:
        bound = None
        try:
            bound = socket.socket(family, socket.SOCK_STREAM)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            return bound
        except OSError as error:  # try the next address: IPv6 may be switched off
            if bound is not None:
                bound.close()
            problem = error if problem is None or error.errno == errno.EADDRINUSE else problem
    assert problem is not None
    raise _no_listener(problem, where)


def _no_listener(error: OSError, where: SplitResult) -> LaunchError:
    if error.errno == errno.EADDRINUSE:
        return LaunchError(
            f"MASTER_PORT: port {where.port} of {where.hostname} is in use; export another "
            "MASTER_PORT",
            of_rank=True,
        )
    return LaunchError(
        f"MASTER_ADDR: {where.hostname} is not the machine of rank 0, which is "
        f"{socket.gethostname()} "
        f"({error.strerror}); export MASTER_ADDR={socket.gethostname()}",
        of_rank=True,
    )
