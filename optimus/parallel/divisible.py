"""Check that the size of each mesh axis divides the model's dimensions.

This module does not import torch, so that launchers can also run the check.
"""

from __future__ import annotations

import math
from typing import Any

from optimus.config import Config, nearest_divisor
from optimus.config.axes import AXES
from optimus.distributed.mesh import Mesh
from optimus.errors import ConfigError, counted


def check_divisible(config: Config, mesh: Mesh) -> None:
    """Check that the size of each mesh axis divides the settings in `Axis.divides`.

    With sequence parallelism, the size of tp must also divide train.seq_len.

    Raises:
        ConfigError: the size of an axis does not divide the value of a setting.
        ConfigError: parallel.sequence_parallel is true, but parallel.tp is 1.
    """
    in_sequence = config.parallel.sequence_parallel
    if in_sequence and mesh.tp == 1:
        raise ConfigError(
            "parallel.sequence_parallel = true has no effect with parallel.tp = 1; set "
            "parallel.sequence_parallel = false, or use parallel.tp = 2 or more"
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
                    f"parallel.{name} = {size} does not divide {key} = {count}; use another size: "
                    "the nearest size that fits the model and "
                    f"{counted(mesh.world_size, 'rank')} is {near}"
                )


def _sizes(config: Config, key: str) -> list[int]:
    """Return the distinct values of the setting `key` in all layers, ascending. Zeros are omitted
    unless all values are 0."""
    section, name = key.split(".")
    if section != "model":
        return [getattr(getattr(config, section), name)]
    model = config.model
    sizes: set[Any] = {model.layer(number).setting(name) for number in range(model.num_layers)}
    return sorted(sizes - {0}) or [0]  # dense layers have num_experts = 0
