"""Checks of the address where ranks meet, before they wait there.

The module does not import torch, which takes seconds to import.
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
    """Raise LaunchError if ranks cannot meet at MASTER_ADDR: its name is unknown (torch would look
    it up until the time limit), or rank 0 cannot listen there since it is another machine's address
    or the port is taken."""
    if not launch.init_method.startswith("tcp://"):
        return  # torchrun has a store, which may be at another address
    where = urlsplit(launch.init_method)
    addresses = _addresses(where)
    if launch.is_first and addresses:
        _bind(addresses, where).close()


def listen_at_meeting_point(where: SplitResult, single_machine: bool) -> int | None:
    """Return the file descriptor of a socket that listens only at the meeting address, or None if
    the store must listen on all addresses.

    The latter is so if the name server does not answer, or if MASTER_ADDR is a loopback address on
    this machine and another address on other machines: Debian's /etc/hosts maps a machine's name to
    a loopback address, and some launchers of several machines (not `single_machine`) pass localhost
    to rank 0 and its machine's name to the others.

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
        listener.listen(socket.SOMAXCONN)  # fails if another process has bound the port, too
    except OSError as error:
        listener.close()
        raise _no_listener(error, where) from None
    return listener.detach()


def is_loopback(host: str) -> bool:
    """Return whether `host` is "localhost" or an IP address by which each machine means itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _addresses(where: SplitResult) -> list[tuple[socket.AddressFamily, tuple]]:
    """Return the addresses of MASTER_ADDR's name on this machine, loopback addresses last; none if
    the name server does not answer. Raises LaunchError for an unknown name."""
    try:
        entries = socket.getaddrinfo(where.hostname, where.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:  # the name server does not answer
            return []
        raise LaunchError(
            f"MASTER_ADDR: {where.hostname} is no host that this machine knows "
            f"({error.strerror}); export MASTER_ADDR=HOST, with the host of rank 0"
        ) from None
    addresses = [(family, address) for family, _, _, _, address in entries]
    return sorted(addresses, key=lambda entry: is_loopback(entry[1][0]))


def _bind(
    addresses: Sequence[tuple[socket.AddressFamily, tuple]], where: SplitResult
) -> socket.socket:
    """Return a socket bound to the first of the addresses that this machine has; it does not listen
    yet. Raises LaunchError."""
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
            f"MASTER_PORT: port {where.port} of {where.hostname} is taken; export another "
            "MASTER_PORT",
            of_rank=True,
        )
    return LaunchError(
        f"MASTER_ADDR: {where.hostname} is not the machine of rank 0, {socket.gethostname()} "
        f"({error.strerror}); export MASTER_ADDR={socket.gethostname()}",
        of_rank=True,
    )
