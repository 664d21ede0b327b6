"""Whether the sizes of the mesh divide the model. Needs no torch, so a launcher can ask first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from optimus.config import Config
from optimus.dist.mesh import Mesh
from optimus.errors import ConfigError


def check_divisible(config: Config, mesh: Mesh) -> None:
    """Raise ConfigError, naming the nearest legal choice, where sizes do not divide the model, or
    where nothing would be divided that a setting wants divided."""
    if config.parallel.sequence_parallel and mesh.tp == 1:
        raise ConfigError(
            "parallel.sequence_parallel = true divides norms over the tensor-parallel ranks, and "
            "parallel.tp = 1; leave it out, or use parallel.tp of at least 2"
        )
    model = config.model
    sparse = [model.experts_by_layer[layer] for layer in model.sparse_layers] or [0]
    inner = {model.layer(layer).intermediate_size for layer in range(model.num_layers)}
    divided = {
        "tp": [
            ("model.num_attention_heads", model.num_attention_heads),
            ("model.num_key_value_heads", model.num_kv_heads),
            *(("model.intermediate_size", size) for size in sorted(inner)),
        ],
        "ep": [("model.num_experts", count) for count in sorted(set(sparse))],
    }
    if config.parallel.sequence_parallel:
        divided["tp"].append(("train.seq_len", config.train.seq_len))
    for axis, counts in divided.items():
        size = getattr(mesh, axis)
        if size == 1:
            continue
        for key, count in counts:
            if not count:
                raise ConfigError(
                    f"parallel.{axis} = {size}, but {key} = 0: a dense model has no experts to "
                    f"divide; use parallel.{axis} = 1"
                )
            if count % size:
                near = _nearest(mesh, axis, [count for _, count in counts])
                raise ConfigError(
                    f"parallel.{axis} = {size} does not divide {key} = {count}; the nearest that "
                    f"fits the model and {mesh.world_size} ranks is {near}"
                )


def _nearest(mesh: Mesh, axis: str, counts: Sequence[int]) -> int:
    """The size nearest to the axis's that divides all counts and leaves a whole number of dp."""
    size = getattr(mesh, axis)
    ranks = mesh.world_size // (mesh.pp * mesh.ep * mesh.tp // size)  # for this axis and dp
    together = math.gcd(ranks, *counts)
    legal = [one for one in range(1, together + 1) if together % one == 0]
    return min(legal, key=lambda one: abs(one - size))
