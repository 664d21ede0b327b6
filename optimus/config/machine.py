"""Definitions of machines in TOML: environment variables, core binding, queues, addresses of nodes,
and speeds of the hardware.

`configs/machine/NAME.toml` defines the machine NAME. `optimus launch`, the job scripts for PBS and
the planner read this file.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from optimus.config.hardware import Device, Figure, Level, Quantity, Storage, check_levels
from optimus.config.load import explain, read_tree
from optimus.config.section import Count, CountOrZero, Section
from optimus.errors import ConfigError, counted, refuse_if

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "machine"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CORES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def parse_walltime(text: str) -> int:
    """Convert a time `hours:minutes:seconds` to seconds. Raises ValueError for other forms."""
    match = re.fullmatch(r"(\d{1,4}):([0-5]\d):([0-5]\d)", text)
    if match is None:
        raise ValueError(f"{text!r} must be hours:minutes:seconds, such as 12:00:00")
    hours, minutes, seconds = map(int, match.groups())
    return 3600 * hours + 60 * minutes + seconds


def _check_walltime(text: str) -> str:
    parse_walltime(text)
    return text


def _check_cores(text: str) -> str:
    if not _CORES.fullmatch(text):
        raise ValueError("must be a list of CPU core indices or ranges, such as 4-7 or 4,5")
    return text


def _check_host_group(pattern: str) -> str:
    try:
        has_group = not pattern or re.compile(pattern).groups > 0
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    if not has_group:
        raise ValueError(f"{pattern!r} has no group in parentheses, such as (x\\d+)c.*")
    return pattern


def _check_variables(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        if not NAME.fullmatch(name) or "\0" in value:
            raise ValueError(
                f"{name!r} = {value!r} cannot be an environment variable; use only letters, digits "
                "and _ in the name, and no NUL in the value"
            )
    return variables


Walltime = Annotated[str, AfterValidator(_check_walltime)]


class Queue(Section):
    """The limits of a job in a queue of the scheduler. If the limits depend on the number of nodes,
    the queue has several entries with the same name."""

    name: str
    """Name of the queue in the scheduler."""
    nodes: Annotated[tuple[Count, Count], Field(strict=False)]
    """Smallest and largest number of nodes of a job."""
    walltime: Annotated[tuple[Walltime, Walltime], Field(strict=False)]
    """Smallest and largest walltime of a job, as hours:minutes:seconds."""
    max_jobs: CountOrZero = 0
    """Maximum number of jobs that a user may have in the queue at the same time; 0: no limit."""


class Environment(Section):
    """Environment variables to set for all ranks and for mpiexec."""

    variables: Annotated[dict[str, str], AfterValidator(_check_variables)]
    min_nodes: Count = 1
    """Smallest number of nodes for which the variables are set."""
    replaces: bool = False
    """True: also set variables that have a value already. False: keep the value of such
    variables."""


class Links(Section):
    """Bandwidths between the tiers of memory (device, host, disk) and speeds of computation, for
    one rank. `optimus bench links` measures these values, from which offloading is planned."""

    to_device: Quantity = 25e9
    """Bytes per second that are copied from page-locked host memory to the device."""
    to_host: Quantity = 25e9
    """Bytes per second that are copied from the device to page-locked host memory."""
    host_adam: Quantity = 1e9
    """Elements per second that the host updates with AdamW."""
    flops: Quantity = 100e12
    """FLOP/s of matrix products of the device in bf16 and fp16."""
    flops_fp32: Quantity | None = None
    """FLOP/s of matrix products of the device in fp32; none: not measured."""
    memory: Quantity = 1e12
    """Bytes per second that the device reads and writes in its memory."""
    disk_read: Quantity = 5e9
    """Bytes per second that are read from the disk of `offload.disk`."""
    disk_write: Quantity = 3e9
    """Bytes per second that are written to the disk of `offload.disk`."""

    def flops_of(self, dtype: str) -> float:
        """Return the FLOP/s of matrix products in `dtype`, a value of `train.dtype`. If the FLOP/s
        in fp32 are not known, return the FLOP/s in bf16."""
        return self.flops if dtype != "fp32" or self.flops_fp32 is None else self.flops_fp32

    def missing_rate(self, dtype: str) -> str:
        """Return a message that says that the FLOP/s of matrix products in `dtype` are not known;
        "" if they are known."""
        if dtype != "fp32" or self.flops_fp32 is not None:
            return ""
        return (
            "links.flops_fp32 is not known, so the placement is planned with the rate of bf16 "
            "products instead; set links.flops_fp32, or write all rates with optimus bench links "
            "--out FILE"
        )


class Measurement(Section):
    """Conditions under which `optimus bench machine` has measured the values of a machine file."""

    device: str
    """Name of the device, as the driver reports it."""
    cores: Count
    """Number of cores that the ranks of a node could use."""
    threads: Count
    """Number of threads of a rank."""
    ranks: Count
    """Number of ranks on each node."""
    nodes: Count
    """Number of nodes."""
    torch: str
    """Version of torch."""
    date: str
    """Day of the measurement, as YYYY-MM-DD."""

    def differences(self, device: str, cores: int, threads: int, torch: str) -> list[str]:
        """Return a phrase for each condition that differs from the arguments, such as `threads: 1
        measured, 2 now`."""
        now = {"device": device, "cores": cores, "threads": threads, "torch": torch}
        return [
            f"{key}: {getattr(self, key)} measured, {value} now"
            for key, value in now.items()
            if getattr(self, key) != value
        ]


class Machine(Section):
    """Settings of a machine and its scheduler, from a file in `configs/machine`."""

    ranks_per_node: Count = 1
    """Number of ranks on each node."""
    cpu_bind: Annotated[
        tuple[Annotated[str, AfterValidator(_check_cores)], ...], Field(strict=False)
    ] = ()
    """Cores of each rank of a node, for the option --cpu-bind=list of PALS's mpiexec; empty: no
    option. If a node has more ranks than this list, the option is --cpu-bind=depth."""
    agent_options: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Options of mpiexec when it starts the agent of a node, the process that manages the node in a
    supervised run."""
    mpi_ranks: bool = False
    """True: mpiexec starts the ranks of a supervised run, as needed on machines on which oneCCL
    communicates over MPI. False: the agents of the nodes start the ranks."""
    filesystems: str = ""
    """Value of the PBS resource `filesystems`; empty: the resource is not requested."""
    address_suffix: str = ""
    """Suffix that makes MASTER_ADDR from the short name of a node (up to the first dot); empty:
    MASTER_ADDR is the name of the node, unchanged."""
    host_group: Annotated[str, AfterValidator(_check_host_group)] = ""
    """Regular expression that matches the short name of a node. Its first group in parentheses
    matches the name of the node's rack or dragonfly group. Few links connect a rack or dragonfly
    group to other nodes. Empty: the names of nodes do not contain such a group."""
    tolerate_node_failures: bool = True
    """True: the job script requests that PBS does not end a supervised job when a node is
    lost."""
    heartbeat_s: Annotated[float, Field(gt=0)] = 3.0
    """Default of `resilience.heartbeat_s` for runs on this machine."""
    links: Links | None = None
    """Bandwidths between the tiers of memory (device, host, disk); none: not measured."""
    measured: Measurement | None = None
    """Conditions under which the values of this file were measured; none: `optimus bench machine`
    did not write this file."""
    device: Device | None = None
    """The device of a rank; none: unknown, so that memory and step time are not planned."""
    levels: Annotated[tuple[Level, ...], Field(strict=False), AfterValidator(check_levels)] = ()
    """Levels of the network, from the fastest to the slowest."""
    algorithm: Literal["ring", "halving", "hierarchical"] = "ring"
    """Algorithm of large collectives, for the planner. `ring`: each rank sends to the next rank of
    the group. `halving`: recursive halving and doubling (Rabenseifner). `hierarchical`: first
    within the domains of each level, then between them."""
    host_memory_bytes: Figure | None = None
    """Size in bytes of the host memory of a node."""
    storage: Annotated[tuple[Storage, ...], Field(strict=False)] = ()
    """File systems. The planner assumes that checkpoints are in the first file system."""
    failures_per_node_day: Figure | None = None
    """Mean number of failures of a node in a day."""
    restart_s: Figure | None = None
    """Seconds from the detection of a failure to the first step after it, without the time to read
    the checkpoint."""
    queues: Annotated[tuple[Queue, ...], Field(strict=False)] = ()
    """The limits of queues. Jobs in other queues are not checked."""
    environment: Annotated[tuple[Environment, ...], Field(strict=False)] = ()
    """Environment variables to set, with the conditions for setting them."""

    def address(self, host: str) -> str:
        """Return MASTER_ADDR for ranks whose first node is `host`."""
        return host.partition(".")[0] + self.address_suffix if self.address_suffix else host

    def variables(self, nodes: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the environment variables to set for ranks on `nodes` nodes.

        Args:
            nodes: Number of nodes with ranks.
            environ: Variables that are set already.
        """
        chosen: dict[str, str] = {}
        for entry in self.environment:
            if nodes >= entry.min_nodes:
                values = entry.variables.items()
                chosen |= {k: v for k, v in values if entry.replaces or k not in environ}
        return chosen

    def bind_option(self, ranks_per_node: int) -> str:
        """Return mpiexec's option that binds the ranks of a node to cores; "" without binding."""
        if not self.cpu_bind:
            return ""
        if ranks_per_node > len(self.cpu_bind):
            return "--cpu-bind=depth"
        return f"--cpu-bind=list:{':'.join(self.cpu_bind[:ranks_per_node])}"

    def check_nodes(self, nodes: int) -> None:
        """Raise ConfigError if the machine has queues, but none of them accepts a job on `nodes`
        nodes."""
        limits = [queue.nodes for queue in self.queues]
        if limits and not any(least <= nodes <= most for least, most in limits):
            least, most = min(low for low, _ in limits), max(high for _, high in limits)
            raise ConfigError(
                f"--nodes {nodes}: the queues of the machine take jobs of {least:,} to {most:,} "
                "nodes, but no queue takes a job of this size; change --nodes"
            )

    def check_job(self, queue: str, nodes: int, walltime: str, jobs: int = 1) -> None:
        """Check that a job is within the limits of its queue.

        Args:
            queue: Name of the queue.
            nodes: Number of requested nodes, including buffer nodes.
            walltime: Requested time, as hours:minutes:seconds.
            jobs: Number of jobs of the user that are in the queue at the same time.

        Raises:
            ConfigError: `walltime` has another form, or the job exceeds the limits in `queues`.
        """
        try:
            seconds = parse_walltime(walltime)
        except ValueError as error:
            raise ConfigError(f"--walltime {error}") from None
        entries = [entry for entry in self.queues if entry.name == queue]
        if not entries:
            return
        least, most = entries[0].nodes[0], max(entry.nodes[1] for entry in entries)
        fitting = [entry for entry in entries if entry.nodes[0] <= nodes <= entry.nodes[1]]
        refuse_if(
            not fitting,
            f"--queue {queue} takes {least} to {most} nodes, not {nodes} (with buffer nodes); "
            "change --nodes or --queue",
        )
        shortest, longest = fitting[0].walltime
        refuse_if(
            not parse_walltime(shortest) <= seconds <= parse_walltime(longest),
            f"--queue {queue} takes jobs of {shortest} to {longest} on {counted(nodes, 'node')}, "
            f"not --walltime {walltime}; change --walltime",
        )
        limit = fitting[0].max_jobs
        refuse_if(
            limit and jobs > limit,
            f"--queue {queue} allows {counted(limit, 'job')} per user, but --chain needs {jobs}, "
            "because the next job waits in the queue while a job runs; use another queue, or "
            "remove --chain",
        )


def load_machine(name: str, key: str = "--machine") -> Machine:
    """Return the definition of a machine, read from its file.

    Args:
        name: Name of a file in configs/machine without `.toml`, or the path of a TOML file.
        key: Option or key that has the value `name`, for messages.

    Raises:
        ConfigError: There is no such machine, or its file has an unknown key or a wrong value.
    """
    is_path = os.sep in name or name.endswith(".toml")
    path = Path(name) if is_path else FOLDER / f"{name}.toml"
    if not is_path and not path.exists():
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.toml"))) or "none"
        raise ConfigError(
            f"{key} {name}: no such machine; use one of {known}, or the path of a TOML file"
        )
    try:
        return Machine.model_validate(read_tree(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, Machine)}") from None


def load_links(name: str) -> Links:
    """Return the table `links` from the file of a machine.

    Args:
        name: As for `load_machine`, or the path of a file that `optimus bench links --out` has
            written.

    Raises:
        ConfigError: There is no such machine or table, or the table has a wrong key or value.
    """
    remedy = "optimus bench links --out FILE writes a file with the rates of this machine"
    try:
        links = load_machine(name, "offload.links").links
    except ConfigError as error:
        raise ConfigError(f"offload.links = {name!r}: {error}; {remedy}") from error
    if links is None:
        raise ConfigError(f"offload.links = {name!r}: the file has no table [links]; {remedy}")
    return links


def shell_settings(
    machine: Machine, nodes: int, ranks_per_node: int, environ: Mapping[str, str] = os.environ
) -> str:
    """Return the settings of a machine as assignments of bash, for the job script of PBS.

    Args:
        machine: The machine.
        nodes: Number of nodes with ranks.
        ranks_per_node: Number of ranks on each node; 0 for the default of the machine.
        environ: Variables that are set already. If neither MASTER_ADDR nor PBS_NODEFILE is set,
            MASTER_ADDR in the result has the placeholder FIRST_NODE instead of a node's name.
    """
    ranks_per_node = ranks_per_node or machine.ranks_per_node
    variables = machine.variables(nodes, environ)
    if "MASTER_ADDR" not in environ:
        first = "FIRST_NODE"
        if "PBS_NODEFILE" in environ:
            try:
                first = Path(environ["PBS_NODEFILE"]).read_text().split()[0]
            except (OSError, IndexError) as error:
                raise ConfigError(f"PBS_NODEFILE: {error}; run this command in a PBS job") from None
        variables["MASTER_ADDR"] = machine.address(first)
    words = shlex.join(f"{name}={value}" for name, value in variables.items())
    return "\n".join(
        [
            f"ranks={ranks_per_node}",
            f"bind_option={shlex.quote(machine.bind_option(ranks_per_node))}",
            f"machine_filesystems={shlex.quote(machine.filesystems)}",
            f"tolerate={'all' if machine.tolerate_node_failures else ''}",
            f"environment=({words})",
        ]
    )
