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
