"""Whether the sizes of the mesh divide the model. Needs no torch, so a launcher can ask first."""

from __future__ import annotations

from collections.abc import Sequence

from optimus.config import Config
from optimus.dist.mesh import Mesh
from optimus.errors import ConfigError


def check_divisible(config: Config, mesh: Mesh) -> None:
    """Raise ConfigError, naming the nearest legal choice, where sizes do not divide the model."""
    model = config.model
    heads = model.num_attention_heads
    kv_heads = model.num_key_value_heads or heads
    sparse = [model.experts_by_layer[layer] for layer in model.sparse_layers] or [0]
    inner = {model.layer(layer).intermediate_size for layer in range(model.num_layers)}
    checks = [
        ("tp", mesh.tp, "num_attention_heads", heads),
        ("tp", mesh.tp, "num_key_value_heads", kv_heads),
        *(("tp", mesh.tp, "intermediate_size", size) for size in sorted(inner)),
        *(("ep", mesh.ep, "num_experts", count) for count in sorted(set(sparse))),
    ]
    for axis, size, key, count in checks:
        if size == 1:
            continue
        if not count:
            raise ConfigError(
                f"parallel.{axis} = {size}, but model.{key} = 0: a dense model has no experts to "
                f"divide; use parallel.{axis} = 1"
            )
        if count % size:
            near = _nearest(size, [d for d in range(1, count + 1) if count % d == 0])
            raise ConfigError(
                f"parallel.{axis} = {size} does not divide model.{key} = {count}; the nearest "
                f"that does is {near}"
            )
    if mesh.tp > 1 and config.parallel.sequence_parallel and config.train.seq_len % mesh.tp:
        seq_len = config.train.seq_len
        near = _nearest(mesh.tp, [d for d in range(1, seq_len + 1) if seq_len % d == 0])
        raise ConfigError(
            f"parallel.sequence_parallel with parallel.tp = {mesh.tp} does not divide "
            f"train.seq_len = {seq_len}; the nearest tp that does is {near}"
        )


def _nearest(size: int, legal: Sequence[int]) -> int:
    return min(legal, key=lambda one: abs(one - size))
