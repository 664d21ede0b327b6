"""Whether ranks can meet where they are told to. Needs no torch: it is asked before the import."""

from __future__ import annotations

import errno
import socket
from urllib.parse import SplitResult, urlsplit

from optimus.errors import ConfigError
from optimus.launch_env import LaunchEnv


def check_meeting_point(launch: LaunchEnv) -> None:
    """Raises ConfigError for a MASTER_ADDR that ranks would wait for in vain: torch would ask for an
    unknown name until the time limit, and the first rank can only listen on its own machine."""
    if not launch.init_method.startswith("tcp://"):
        return  # torchrun's own store may be elsewhere
    where = urlsplit(launch.init_method)
    try:
        family, _, _, _, address = socket.getaddrinfo(
            where.hostname, where.port, type=socket.SOCK_STREAM
        )[0]
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:  # a name server that is slow, not one that says no
            return
        raise ConfigError(
            f"MASTER_ADDR: {where.hostname} is no host that this machine knows "
            f"({error.strerror}); export MASTER_ADDR=HOST, with the host of rank 0"
        ) from None
    if not launch.is_first:
        return
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise _no_listener(error, where) from None


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
