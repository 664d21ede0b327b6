"""Check that ranks can meet at the rendezvous address (MASTER_ADDR and MASTER_PORT).

This module does not import torch, so that its import is fast.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit

from optimus.errors import LaunchError, LostPeerError, OptimusError
from optimus.launch.environment import ATTEMPT, LaunchEnv


def check_meeting_point(launch: LaunchEnv) -> None:
    """Raise LaunchError if the ranks cannot meet at MASTER_ADDR and MASTER_PORT.

    Possible reasons are an unknown host name, an address that does not belong to the machine of
    rank 0, and a port that is in use.
    """
    if not launch.init_method.startswith("tcp://"):
        return  # the store is a file, or torchrun's store, which may be at another address
    # torch would repeat the lookup of an unknown host name until its time limit.
    where = urlsplit(launch.init_method)
    addresses = _addresses(where)
    if launch.is_first and addresses:
        _bind(addresses, where).close()


def listen_at_meeting_point(where: SplitResult, single_machine: bool) -> int | None:
    """Listen at MASTER_ADDR for connections to the store.

    Args:
        where: Rendezvous address.
        single_machine: True if all ranks are on this machine.

    Returns:
        The file descriptor of the listening socket; None if torch's store must open the socket and
        listen on all addresses.

    Raises:
        LaunchError: This machine cannot listen at the rendezvous address.
    """
    addresses = _addresses(where)
    if not addresses:
        return None
    listener = _bind(addresses, where)
    # A supervisor gives all ranks the same MASTER_ADDR, even if it emulates nodes on one machine.
    is_local = is_loopback(where.hostname or "") and (single_machine or ATTEMPT in os.environ)
    # Other machines may resolve MASTER_ADDR to another address: Debian's /etc/hosts maps the name
    # of the machine to a loopback address, and some launchers set localhost for rank 0 only.
    if is_loopback(listener.getsockname()[0]) and not is_local:
        listener.close()
        return None
    try:
        listener.listen(socket.SOMAXCONN)  # fails if another process has also bound the port
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
    """Return (family, address) pairs, with the port of `where`, for all addresses of the host in
    `where`. Loopback addresses are last. Return [] if the name server does not answer."""
    try:
        entries = socket.getaddrinfo(where.hostname, where.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: an empty or long label
        if isinstance(error, OSError) and error.errno == socket.EAI_AGAIN:
            return []  # the name server does not answer
        reason = error.strerror if isinstance(error, OSError) else "not a valid name"
        raise LaunchError(
            f"MASTER_ADDR: {where.hostname} is not a host name that this machine can resolve "
            f"({reason}); export MASTER_ADDR=HOST, where HOST is the machine of rank 0"
        ) from None
    addresses = [(family, address) for family, _, _, _, address in entries]
    return sorted(addresses, key=lambda entry: is_loopback(entry[1][0]))


def _bind(
    addresses: Sequence[tuple[socket.AddressFamily, tuple]], where: SplitResult
) -> socket.socket:
    """Return a socket that is bound to the first of `addresses` to which this machine can bind. The
    socket does not listen yet."""
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


def _no_listener(error: OSError, where: SplitResult) -> OptimusError:
    if error.errno == errno.EADDRINUSE and ATTEMPT in os.environ:
        return LostPeerError(
            f"port {where.port} of {where.hostname} is in use; the supervisor starts the ranks "
            "again with another port"
        )
    if error.errno == errno.EADDRINUSE:
        return LaunchError(
            f"MASTER_PORT: port {where.port} of {where.hostname} is in use; export another "
            "MASTER_PORT",
            of_rank=True,
        )
    return LaunchError(
        f"MASTER_ADDR: {where.hostname} is not the machine of rank 0 "
        f"({error.strerror}); export MASTER_ADDR={socket.gethostname()}",
        of_rank=True,
    )
