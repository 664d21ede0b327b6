"""Check that the sizes of the mesh divide the model.

The module needs no torch, so that launchers can run the check too.
"""

from __future__ import annotations

import math
from typing import Any

from optimus.config import Config
from optimus.config.axes import AXES
from optimus.config.checks import nearest_divisor
from optimus.distributed.mesh import Mesh
from optimus.errors import ConfigError, counted
from optimus.model.identity import setting


def check_divisible(config: Config, mesh: Mesh) -> None:
    """Check the sizes of the mesh against the model.

    Raises:
        ConfigError: the size of an axis does not divide the model (the message has the nearest size
            that does), or parallel.sequence_parallel is set and parallel.tp is 1.
    """
    in_sequence = config.parallel.sequence_parallel
    if in_sequence and mesh.tp == 1:
        raise ConfigError(
            "parallel.sequence_parallel = true divides norms over the tensor-parallel ranks, and "
            "parallel.tp = 1; remove it, or use parallel.tp of at least 2"
        )
    for name, axis in AXES.items():
        size, keys = getattr(mesh, name), axis.divides
        if name == "tp" and in_sequence:
            keys += ("train.seq_len",)
        counts = [(key, count) for key in keys for count in _sizes(config, key)]
        for key, count in counts if size > 1 else ():
            if not count and key == "model.num_experts":
                raise ConfigError(
                    f"parallel.{name} = {size}, but {key} = 0: a dense model has no experts to "
                    f"divide; use parallel.{name} = 1"
                )
            if count % size:
                divisor = math.gcd(mesh.dp * size, *(count for _, count in counts))
                near = nearest_divisor(divisor, size)
                raise ConfigError(
                    f"parallel.{name} = {size} does not divide {key} = {count}; the nearest that "
                    f"fits the model and {counted(mesh.world_size, 'rank')} is {near}"
                )


def _sizes(config: Config, key: str) -> list[int]:
    """Return the distinct values of a setting over the model's layers.

    The 0 of layers that have no experts is left out, unless no layer has any.
    """
    section, name = key.split(".")
    if section != "model":
        return [getattr(getattr(config, section), name)]
    model = config.model
    sizes: set[Any] = {setting(model.layer(number), name) for number in range(model.num_layers)}
    return sorted(sizes - {0}) or [0]
