"""Rank and world size of this process, read from the environment variables of its launcher.

This module does not import torch, so that its import is fast.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from optimus.errors import LaunchError, counted


@dataclass(frozen=True)
class LaunchEnv:
    """Rank of this process in its run, and the rendezvous address of the ranks.

    Attributes:
        rank: From 0 to `world_size` - 1.
        world_size: Number of processes of the run.
        local_rank: Rank among the run's processes on this machine. It selects the device.
        local_world_size: Number of processes of the run on this machine.
        init_method: Rendezvous address, as for `torch.distributed.init_process_group`: `env://`,
            `tcp://HOST:PORT` or `file://...`.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    init_method: str

    @property
    def is_first(self) -> bool:
        """True for rank 0."""
        return self.rank == 0

    @property
    def is_single_machine(self) -> bool:
        """True if all processes of the run are on this machine."""
        return self.local_world_size == self.world_size


SINGLE = LaunchEnv(0, 1, 0, 1, "env://")


@dataclass(frozen=True)
class JobRank:
    """Rank of this process among all processes of a job or job array of Slurm or PBS. Each process
    handles a share of the input, and the processes do not communicate."""

    rank: int
    world: int


ALONE = JobRank(0, 1)

ATTEMPT = "OPTIMUS_ATTEMPT"
"""Environment variable that contains, for the ranks of a supervised run, the number of the current
attempt. An attempt is a launch of all ranks."""
RENDEZVOUS = "OPTIMUS_RENDEZVOUS"
"""Environment variable of the ranks that the option `--nproc` starts. It contains their rendezvous
address, which begins with `file://`."""


@dataclass(frozen=True)
class _Launcher:
    """The names of the environment variables by which a launcher passes ranks and world sizes. If a
    field has several names, the first variable that is set is used."""

    rank: str
    worlds: tuple[str, ...]
    local_ranks: tuple[str, ...]
    local_worlds: tuple[str, ...]
    is_step: bool = False
    """True if the launcher is srun. The variables SLURM_STEP_* then describe this run."""


_BY_HAND = _Launcher("RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))

_LAUNCHERS = (
    _BY_HAND,  # torchrun, the spawner of --nproc, and users who set these variables
    _Launcher(  # Open MPI
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(  # PALS, which does not always set a world size
        "PALS_RANKID",
        ("PMI_SIZE", "WORLD_SIZE"),
        ("PALS_LOCAL_RANKID", "LOCAL_RANK"),
        ("PALS_LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
    ),
    _Launcher(  # MPICH, Intel MPI, srun --mpi=pmi2
        "PMI_RANK",
        ("PMI_SIZE", "WORLD_SIZE"),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID", "LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE", "LOCAL_WORLD_SIZE"),
    ),
    _Launcher(  # srun --mpi=pmix
        "PMIX_RANK",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "WORLD_SIZE"),
        ("PMIX_LOCAL_RANK", "SLURM_LOCALID", "LOCAL_RANK"),
        ("SLURM_STEP_TASKS_PER_NODE", "LOCAL_WORLD_SIZE"),
        is_step=True,
    ),
    _Launcher(
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE",),
        is_step=True,
    ),
)
"""Known launchers in order of precedence. The order matters if variables of several launchers are
set, for example if a process of mpiexec has started torchrun."""

_OF_RANK = {name for launcher in _LAUNCHERS for name in (launcher.rank, *launcher.local_ranks)}
"""Names of the environment variables whose values differ between the ranks of a machine."""

STARTED = time.monotonic()
"""`time.monotonic()` at about the start of this process, before imports that take seconds. A rank
forked from the warm process, which has done these imports, sets the value at its start."""
COMMAND_STARTED = "OPTIMUS_COMMAND_STARTED"
"""Environment variable by which `optimus train --nproc` passes its value of `STARTED` to the
ranks."""
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable that torchrun sets to True if the torchrun agent already serves the TCPStore
at MASTER_ADDR and MASTER_PORT."""
_LOOPBACK = "127.0.0.1"
_PORTS = range(20000, 30000)
"""Range of the default MASTER_PORT. By default, Linux does not assign these ports to outgoing
connections."""
_DEFAULT_PORT = 29500


def read_launch_env(environ: Mapping[str, str] = os.environ) -> LaunchEnv:
    """Return the rank and the rendezvous address of this process, from its launcher's variables.

    The launcher is torchrun, `optimus train --nproc`, mpiexec or srun. Without a launcher, the
    function returns `SINGLE`, which describes a run of a single process. The default of MASTER_ADDR
    is the first machine of the run. The default of MASTER_PORT depends on the job ID. Each job of a
    job array is a separate run.

    Args:
        environ: Environment variables.

    Raises:
        LaunchError: Variables are missing or contradict each other.
    """
    launcher, job_rank = _launcher_of(environ), _launched(environ)
    if launcher is None:
        return SINGLE
    local_rank, local_world = _local(environ, launcher)
    if local_rank is None and job_rank.world > 1 and launcher is not _BY_HAND:
        raise LaunchError(
            f"{launcher.rank} is set, but the local rank, which selects the device, is in none of "
            f"the variables {', '.join(launcher.local_ranks)}; export LOCAL_RANK"
        )
    if local_rank is not None and local_world is not None and local_rank >= local_world:
        raise LaunchError(
            f"local rank {local_rank} is not among the {counted(local_world, 'rank')} of this "
            "machine; "
            f"correct {launcher.local_ranks[0]} or {launcher.local_worlds[0]}",
            of_rank=True,
        )
    return LaunchEnv(
        rank=job_rank.rank,
        world_size=job_rank.world,
        local_rank=job_rank.rank if local_rank is None else local_rank,
        local_world_size=local_world or job_rank.world,
        init_method=_init_method(environ, launcher, job_rank.world, local_world == job_rank.world),
    )


def read_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return the rank of this process for use in messages; 0 if the rank is unknown. The function
    raises no errors."""
    launcher = _launcher_of(environ)
    text = environ[launcher.rank] if launcher else "0"
    return int(text) if text.isdigit() else 0


def prints_for_machine(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if this process prints an error that all ranks of its machine raise. The function
    itself raises no errors.

    Usually, only the process with local rank 0 prints such an error. If the user has set RANK
    without a launcher, every process prints the error.
    """
    launcher = _launcher_of(environ)
    if launcher is _BY_HAND and RENDEZVOUS not in environ and _AGENT_STORE not in environ:
        return True  # possibly only this rank's variables are wrong
    names = launcher.local_ranks if launcher else ()
    text = next((environ[name] for name in names if name in environ), "0")
    return not text.isdigit() or int(text) == 0


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if variables of a launcher are set, even if their values are invalid."""
    return _launcher_of(environ) is not None


def is_started_by_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if srun or mpiexec has started this process. Return False without a launcher, and
    for processes that torchrun or `optimus train --nproc` has started."""
    return "RANK" not in environ and is_launched(environ)


def prints_start(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if this process prints the messages about the start of a command.

    Without the option `--nproc`, rank 0 prints these messages. With `--nproc`, only the parent
    process of the ranks prints them.
    """
    return RENDEZVOUS not in environ and read_rank(environ) == 0


def read_job_rank(environ: Mapping[str, str] = os.environ, world: int | None = None) -> JobRank:
    """Return the rank of this process among all processes of its Slurm or PBS job, or of its job
    array.

    A job array of n jobs with w processes each has n * w ranks. Without a launcher and without a
    job array, the function returns `ALONE`: rank 0 of 1.

    Args:
        environ: Environment variables.
        world: World size to use if the variables contain a rank but not the world size.

    Raises:
        LaunchError: Variables are missing or contradict each other.
    """
    try:
        inner, outer = _launched(environ, world), _array(environ, world)
    except LaunchError as error:
        raise LaunchError(f"{error}, or pass --rank and --world") from None
    return JobRank(outer.rank * inner.world + inner.rank, outer.world * inner.world)


_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def usable_memory() -> int:
    """Return the bytes of physical memory that this process can use: the minimum of the machine's
    memory and the limits of this process's control groups."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_limits()])


def _limits() -> Iterator[int]:
    """Yield the memory limits of this process's control group and of all groups above it.

    A line of /proc/self/cgroup is `0::/PATH` for control groups v2 and `N:memory:/PATH` for v1.
    """
    try:
        lines = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = _CGROUPS, "memory.max"
        if controllers:
            root, name = _CGROUPS / "memory", "memory.limit_in_bytes"
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # the file is missing or contains `max`
                yield int((folder / name).read_text())
            if folder == root:
                break


def available_cores() -> int:
    """Return the number of cores that this process can use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_local_size(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes of the job on this machine; 1 if this number is unknown."""
    launcher = _launcher_of(environ)
    return (_local(environ, launcher)[1] or 1) if launcher else 1


def _launcher_of(environ: Mapping[str, str]) -> _Launcher | None:
    for launcher in _LAUNCHERS:
        # Slurm also sets SLURM_PROCID in a batch script outside any step.
        if launcher.rank == "SLURM_PROCID" and "SLURM_STEP_ID" not in environ:
            continue
        if launcher.rank in environ:
            return launcher
    return None


def _launched(environ: Mapping[str, str], world: int | None = None) -> JobRank:
    launcher = _launcher_of(environ)
    if launcher is None:
        if "WORLD_SIZE" in environ and _integer(environ, "WORLD_SIZE") > 1:
            raise LaunchError(
                f"WORLD_SIZE={environ['WORLD_SIZE']} is set, but RANK is not set; start the "
                "command with srun, mpiexec or torchrun; for a single process, unset WORLD_SIZE"
            )
        return ALONE
    names = [name for name in launcher.worlds if name in environ]
    if not names and world is not None:
        return _checked(_integer(environ, launcher.rank), world, launcher.rank)
    if not names:
        raise LaunchError(
            f"{launcher.rank}={environ[launcher.rank]} is set, but the world size is in none of "
            f"the variables {', '.join(launcher.worlds)}; export WORLD_SIZE"
        )
    if "WORLD_SIZE" in environ and environ["WORLD_SIZE"] != environ[names[0]]:
        raise LaunchError(
            f"WORLD_SIZE={environ['WORLD_SIZE']}, but the launcher has set {names[0]}="
            f"{environ[names[0]]}; unset WORLD_SIZE or change the number of ranks",
        )
    return _job_rank(environ, launcher.rank, names[0])


def _local(environ: Mapping[str, str], launcher: _Launcher) -> tuple[int | None, int | None]:
    """Return (local rank of this process, number of ranks on this machine), from the variables of
    `launcher`. Each of the two values is None if it is unknown."""
    ranks = [name for name in launcher.local_ranks if name in environ]
    worlds = [name for name in launcher.local_worlds if name in environ]
    rank = _integer(environ, ranks[0]) if ranks else None
    if not worlds:
        return rank, None
    if worlds[0] == "SLURM_STEP_TASKS_PER_NODE":
        counts: list[int] = []  # 2, 2, 2, 1 for Slurm's short form `2(x3),1`
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ[worlds[0]]):
            counts += [max(1, int(count))] * int(times or 1)
        node = _integer(environ, "SLURM_NODEID", 0)
        return rank, counts[node] if node < len(counts) else None
    return rank, max(1, _integer(environ, worlds[0]))


def _init_method(
    environ: Mapping[str, str], launcher: _Launcher, world: int, single_machine: bool
) -> str:
    if launcher is _BY_HAND and RENDEZVOUS in environ:
        return environ[RENDEZVOUS]
    is_set = all(environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    if world == 1 or (launcher is _BY_HAND and is_set and environ.get(_AGENT_STORE) == "True"):
        return "env://"
    address = environ.get("MASTER_ADDR") or (
        _LOOPBACK if single_machine else _first_machine(environ, launcher)
    )
    if not address:
        raise LaunchError(
            f"a run of {counted(world, 'rank')} needs MASTER_ADDR, since neither Slurm nor PBS "
            "provides a node list here; export MASTER_ADDR=HOST, the machine of rank 0"
        )
    host = f"[{address}]" if ":" in address else address  # IPv6
    return f"tcp://{host}:{_port(environ, launcher)}"


def _first_machine(environ: Mapping[str, str], launcher: _Launcher) -> str:
    """Return the first host in the node list of Slurm or PBS. Rank 0 runs on this host. Return ""
    if there is no node list."""
    step = environ.get("SLURM_STEP_NODELIST", "") if launcher.is_step else ""
    if nodes := step or environ.get("SLURM_JOB_NODELIST", ""):
        return first_of_nodelist(nodes)
    try:  # PBS may have written this file on the first node only
        return Path(environ.get("PBS_NODEFILE", "")).read_text().split()[0]
    except (OSError, IndexError):
        return ""


def first_of_nodelist(nodes: str) -> str:
    """Return the first host of a Slurm node list, such as rack1-03n1 for
    `rack1-[03-07,9]n[1-2],x5`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None, "the pattern matches the empty text"
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _port(environ: Mapping[str, str], launcher: _Launcher) -> int:
    if environ.get("MASTER_PORT"):
        port = _integer(environ, "MASTER_PORT")
        if not 0 < port < 1 << 16:
            raise LaunchError(f"MASTER_PORT={port} is not a port; export a number from 1 to 65535")
        return port
    names = ["PMIX_NAMESPACE", "SLURM_JOB_ID", "PBS_JOBID"]
    if launcher.is_step:
        names = ["SLURM_JOB_ID"]
    job = next((environ[name] for name in names if name in environ), "")
    if not job:
        return _DEFAULT_PORT
    step = environ.get("SLURM_STEP_ID", "") if launcher.is_step else ""
    return _PORTS[zlib.crc32(f"{job}.{step}".encode()) % len(_PORTS)]


def _array(environ: Mapping[str, str], world: int | None) -> JobRank:
    if "SLURM_ARRAY_TASK_ID" in environ:
        first = _integer(environ, "SLURM_ARRAY_TASK_MIN", 0)
        step = max(1, _integer(environ, "SLURM_ARRAY_TASK_STEP", 1))
        index = (_integer(environ, "SLURM_ARRAY_TASK_ID") - first) // step
        return _checked(index, _integer(environ, "SLURM_ARRAY_TASK_COUNT"), "SLURM_ARRAY_TASK_ID")
    if "PBS_ARRAY_INDEX" in environ:
        if "OPTIMUS_ARRAY_SIZE" not in environ and world is not None:
            return _checked(_integer(environ, "PBS_ARRAY_INDEX"), world, "PBS_ARRAY_INDEX")
        if "OPTIMUS_ARRAY_SIZE" not in environ:
            raise LaunchError(
                f"PBS_ARRAY_INDEX={environ['PBS_ARRAY_INDEX']} is set, but PBS does not provide "
                "the size of the array; export it as OPTIMUS_ARRAY_SIZE"
            )
        return _job_rank(environ, "PBS_ARRAY_INDEX", "OPTIMUS_ARRAY_SIZE")
    return ALONE


def _job_rank(environ: Mapping[str, str], rank_name: str, world_name: str) -> JobRank:
    rank, world = _integer(environ, rank_name), _integer(environ, world_name)
    return _checked(rank, world, rank_name, f"{world_name}=")


def _checked(rank: int, world: int, rank_name: str, world_name: str = "") -> JobRank:
    if not 0 <= rank < world:
        raise LaunchError(
            f"{rank_name}={rank} is not a rank: a rank is at least 0 and less than the world size, "
            f"{world_name}{world}; correct the rank or the world size",
            of_rank=True,
        )
    return JobRank(rank, world)


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        raise LaunchError(
            f"environment variable {name}={text!r} must be a whole number >= 0; correct the value",
            of_rank=name in _OF_RANK,
        )
    return int(text)
