"""Rank and world from whichever launcher started this process. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from optimus.errors import ConfigError


@dataclass(frozen=True)
class LaunchEnv:
    """Where this process stands among all processes of the run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    init_method: str
    """What `torch.distributed.init_process_group` is given: `env://` or `file://...`."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0


SINGLE = LaunchEnv(0, 1, 0, 1, "env://")

RENDEZVOUS = "OPTIMUS_RENDEZVOUS"
"""Set by our own spawner: a `file://` address, so that no port can be taken meanwhile."""


def read_launch_env(environ: Mapping[str, str] = os.environ) -> LaunchEnv:
    """The launcher's word: torchrun's variables (also set by our spawner), or a single process.

    Raises ConfigError for a half-set or contradictory environment.
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return SINGLE
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK={rank} does not lie in a world of WORLD_SIZE={world_size}")
    init_method = environ.get(RENDEZVOUS, "env://")
    if init_method == "env://" and world_size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environ.get(name):
                raise ConfigError(
                    f"WORLD_SIZE={world_size} needs {name} in the environment; set it"
                )
    return LaunchEnv(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(environ, "LOCAL_RANK", rank),
        local_world_size=_integer(environ, "LOCAL_WORLD_SIZE", world_size),
        init_method=init_method,
    )


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        raise ConfigError(f"environment variable {name}={text!r} must be a whole number >= 0")
    return int(text)


@dataclass(frozen=True)
class Place:
    """Which of the processes of a job this is, where they share work without talking."""

    rank: int
    world: int


ALONE = Place(0, 1)

_LAUNCHERS = (
    ("RANK", ("WORLD_SIZE",)),  # torchrun, and whoever sets both by hand
    ("PMI_RANK", ("PMI_SIZE", "WORLD_SIZE")),  # MPICH, Intel MPI, PALS, which may set no size
    ("PALS_RANKID", ("PMI_SIZE", "WORLD_SIZE")),
    ("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("PMIX_RANK", ("SLURM_STEP_NUM_TASKS", "WORLD_SIZE")),
    ("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
)
"""Each launcher's rank and the names its world may have, in the order in which they are asked."""

_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "PALS_LOCAL_SIZE",
    "PMI_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)


def read_place(environ: Mapping[str, str] = os.environ, world: int | None = None) -> Place:
    """Rank and world that a launcher and a job array give together; ALONE without either.

    An array of n jobs with w processes each is a world of n * w. Slurm sets SLURM_PROCID in a batch
    script too, outside any step: it counts only where SLURM_STEP_ID stands. PBS does not say how
    many jobs an array has: OPTIMUS_ARRAY_SIZE does. `world` stands in where a launcher tells only a
    rank. Raises ConfigError for a half-set environment.
    """
    inner, outer = _launched(environ, world), _array(environ, world)
    return Place(outer.rank * inner.world + inner.rank, outer.world * inner.world)


def read_local_size(environ: Mapping[str, str] = os.environ) -> int:
    """How many processes of the job run on this machine, where the launcher tells; else 1."""
    for name in _LOCAL_SIZES:
        if name in environ:
            return max(1, _integer(environ, name))
    if "SLURM_STEP_ID" in environ:
        first = environ.get("SLURM_STEP_TASKS_PER_NODE", "1").partition("(")[0].partition(",")[0]
        return max(1, int(first)) if first.isdigit() else 1
    return 1


def _launched(environ: Mapping[str, str], world: int | None) -> Place:
    for rank_name, world_names in _LAUNCHERS:
        if rank_name not in environ:
            continue
        if rank_name == "SLURM_PROCID" and "SLURM_STEP_ID" not in environ:
            continue
        found = [name for name in world_names if name in environ]
        if not found and world is not None:
            return _checked(_integer(environ, rank_name), world, rank_name)
        if not found:
            raise ConfigError(
                f"{rank_name}={environ[rank_name]} is set but none of {', '.join(world_names)}; "
                "export WORLD_SIZE, or give --rank and --world"
            )
        return _place(environ, rank_name, found[0])
    if "WORLD_SIZE" in environ and _integer(environ, "WORLD_SIZE") > 1:
        raise ConfigError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} is set but no rank; start it by srun, mpiexec or "
            "torchrun, unset WORLD_SIZE, or give --rank and --world"
        )
    return ALONE


def _array(environ: Mapping[str, str], world: int | None) -> Place:
    if "SLURM_ARRAY_TASK_ID" in environ:
        first = _integer(environ, "SLURM_ARRAY_TASK_MIN", 0)
        step = max(1, _integer(environ, "SLURM_ARRAY_TASK_STEP", 1))
        index = (_integer(environ, "SLURM_ARRAY_TASK_ID") - first) // step
        return _checked(index, _integer(environ, "SLURM_ARRAY_TASK_COUNT"), "SLURM_ARRAY_TASK_ID")
    if "PBS_ARRAY_INDEX" in environ:
        if "OPTIMUS_ARRAY_SIZE" not in environ and world is not None:
            return _checked(_integer(environ, "PBS_ARRAY_INDEX"), world, "PBS_ARRAY_INDEX")
        if "OPTIMUS_ARRAY_SIZE" not in environ:
            raise ConfigError(
                f"PBS_ARRAY_INDEX={environ['PBS_ARRAY_INDEX']} is set but PBS does not tell the "
                "size of the array; export OPTIMUS_ARRAY_SIZE, or give --rank and --world"
            )
        return _place(environ, "PBS_ARRAY_INDEX", "OPTIMUS_ARRAY_SIZE")
    return ALONE


def _place(environ: Mapping[str, str], rank_name: str, world_name: str) -> Place:
    rank, world = _integer(environ, rank_name), _integer(environ, world_name)
    return _checked(rank, world, f"{rank_name} with {world_name}")


def _checked(rank: int, world: int, names: str) -> Place:
    if not 0 <= rank < world:
        raise ConfigError(
            f"rank {rank} of {names} does not lie in a world of {world}; give --rank and --world"
        )
    return Place(rank, world)
