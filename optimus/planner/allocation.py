"""The nodes on which a run is planned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from optimus.config.machine import load_machine
from optimus.errors import ConfigError, counted, reason_of, refuse_if


@dataclass(frozen=True)
class Allocation:
    """Nodes of a machine for a planned run."""

    machine: str
    """Name or path of the machine's file."""
    ranks_per_node: int
    nodes: int = 0
    """Number of nodes; 0 for the number that the mesh of the configuration needs."""
    hosts: tuple[str, ...] = ()
    """Names of the nodes in the order of their ranks; empty if they are not known."""
    host_group: str = ""
    """`Machine.host_group`."""

    @property
    def world_size(self) -> int | None:
        """Number of ranks; None if the configuration determines it."""
        return self.nodes * self.ranks_per_node or None


def allocate(machine: str | None, nodes: int | None, hosts: str | None) -> Allocation | None:
    """Return the allocation that the options of a command select; None if `--machine` is not given.

    Args:
        machine: Value of `--machine`.
        nodes: Value of `--nodes`.
        hosts: Value of `--hosts`, the path of a file with a host name in each line.

    Raises:
        ConfigError: An option has a wrong value, or `--nodes` or `--hosts` is given without
            `--machine`.
    """
    for option, value in (("--nodes", nodes), ("--hosts", hosts)):
        refuse_if(
            value is not None and machine is None,
            f"{option} {value} needs the number of ranks on a node; add --machine NAME",
        )
    if machine is None:
        return None
    refuse_if(nodes is not None and nodes < 1, f"--nodes {nodes} must be at least 1")
    definition = load_machine(machine)
    names = () if hosts is None else read_hosts(hosts)
    if names and nodes is not None and nodes != len(names):
        raise ConfigError(
            f"--hosts {hosts} has {counted(len(names), 'host')}, but --nodes is {nodes}; leave "
            "--nodes out, or give a file with this number of hosts"
        )
    count = nodes or len(names)
    if count:
        definition.check_nodes(count)
    return Allocation(machine, definition.ranks_per_node, count, names, definition.host_group)


def read_hosts(path: str) -> tuple[str, ...]:
    """Return the host names in a file with a name in each line, such as the file of PBS_NODEFILE.
    If consecutive lines have the same name, for example a line for each rank of a host, the result
    has this name once.

    Raises:
        ConfigError: The file cannot be read or has no host; two lines of a host have another host
            between them; or a host is named both with and without its domain name.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--hosts {path}: {reason}; give a text file of host names") from None
    names = [line.strip() for line in lines if line.strip()]
    refuse_if(not names, f"--hosts {path} has no host; write a host name in each line")
    hosts = [name for name, before in zip(names, ["", *names], strict=False) if name != before]
    first: dict[str, str] = {}  # from the name up to the first dot to the name
    for name in hosts:
        refuse_if(
            len(name.split()) > 1,
            f"--hosts {path}: {name!r} is not a single host name; write a host name in each line",
        )
        short = name.partition(".")[0]
        if short in first:
            same = first[short]
            again = "occurs twice" if same == name else f"is the same host as {same}"
            raise ConfigError(
                f"--hosts {path}: {name} {again}; write each host once, in the order of the ranks"
            )
        first[short] = name
    return tuple(hosts)
