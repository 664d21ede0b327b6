"""Computation of the number of parameters, the FLOPs and the memory of a run from its configuration
alone."""

from __future__ import annotations

from typing import Any

from optimus.chunks.buffers import KINDS
from optimus.config import Config
from optimus.config.axes import UNEQUAL
from optimus.distributed.mesh import make_mesh
from optimus.errors import counted
from optimus.model.flops import count_parameters, flops_per_token
from optimus.rank.states import plan_ranks

_GIB = 1 << 30


def plan(config: Config) -> dict[str, Any]:
    """Return the number of parameters, the FLOPs and the memory of a run as a dict for JSON.

    Only the section `[model]` is required. If `parallel.dp` is 0, the plan is for one replica.

    These keys, among others, are always present:

    - `total_params`, `active_params`: numbers of parameters.
    - `world`: number of ranks.
    - `ranks`: list with one entry for each pair of pp and tp coordinates. An entry has the bytes of
      the model states on one rank with these coordinates. The `total` of an entry excludes `host`,
      the states in host memory, `disk`, the states on disk, and `staging`, the host memory that
      checkpoint.async_save uses.
    - `memory`: the entry of `ranks` with the largest `total`, without its coordinates.

    The following keys are present only if settings of `[train]` are given. The FLOPs are those of
    the forward and the backward pass.

    - `flops_per_token`: needs `seq_len`.
    - `flops_per_step`: also needs `global_batch_tokens`.
    - `tokens`, `flops`: totals of the run; also need `max_steps`.
    """
    train = config.train
    total, active = count_parameters(config.model)
    mesh = make_mesh(config.parallel)
    ranks = [
        {axis: getattr(coordinate, axis) for axis in UNEQUAL} | sizes
        for coordinate, sizes in plan_ranks(config, mesh)
    ]
    fullest = max(ranks, key=lambda rank: rank["total"])
    result: dict[str, Any] = {
        "architecture": config.model.architecture,
        "total_params": total,
        "active_params": active,
        "dtype": train.dtype,
        "world": mesh.world_size,
        "mesh": mesh._asdict(),
        "sharding": config.optim.sharding,
        "memory": {key: size for key, size in fullest.items() if key not in UNEQUAL},
        "ranks": ranks,
    }
    if not train.seq_len:
        return result
    result["seq_len"] = train.seq_len
    result["flops_per_token"] = flops_per_token(config.model, train.seq_len)
    if train.global_batch_tokens:
        result["global_batch_tokens"] = train.global_batch_tokens
        result["flops_per_step"] = result["flops_per_token"] * train.global_batch_tokens
        if train.max_steps:
            result["tokens"] = train.global_batch_tokens * train.max_steps
            result["flops"] = result["flops_per_step"] * train.max_steps
    return result


def format_plan(result: dict[str, Any]) -> str:
    """Return the result of `plan` as text, with one line per figure."""
    lines = [
        ("parameters", f"{result['total_params']:,}"),
        ("active for a token", f"{result['active_params']:,}"),
    ]
    if "flops_per_token" in result:
        per_token = result["flops_per_token"] / 1e9
        lines.append((f"per token of {result['seq_len']}", f"{per_token:,.3f} GFLOP"))
    if "flops_per_step" in result:
        batch, work = result["global_batch_tokens"], result["flops_per_step"] / 1e12
        lines.append(("per update", f"{counted(batch, 'token')}, {work:,.1f} TFLOP"))
    if "flops" in result:
        lines.append(
            ("whole run", f"{counted(result['tokens'], 'token')}, {result['flops']:.3e} FLOP")
        )
    lines += _memory_lines(result)
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _memory_lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    memory, ranks, mesh = result["memory"], result["ranks"], result["mesh"]
    axes = " ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
    ranks_of = f"{result['world']:,} ranks ({axes})" if axes else "one rank"
    head = f"{_size_text(memory['total'])} of model states"
    lines = [("world", f"{ranks_of}, optim.sharding = {result['sharding']}")]
    lines.append(("on the fullest rank" if len(ranks) > 1 else "on each rank", head))
    if memory["host"]:
        lines.append(("in host memory in addition", _size_text(memory["host"])))
    lines += [(f"  {kind}", _size_text(memory[kind])) for kind in (*KINDS, "cache") if memory[kind]]
    lines.append(("  padding, included", _size_text(memory["padding"])))
    if memory["disk"]:
        lines.append(("on disk in addition", _size_text(memory["disk"])))
    if memory["staging"]:
        lines.append(
            ("host memory in addition", f"{_size_text(memory['staging'])}, for checkpoints")
        )
    if len(ranks) > 1:
        for rank in ranks:
            name = " ".join(f"{axis} {rank[axis]}" for axis in UNEQUAL if mesh[axis] > 1)
            lines.append((f"on ranks of {name}", _size_text(rank["total"])))
    lines.append(("", f"{result['dtype']} training; activations are not included"))
    return lines


def _size_text(size: int) -> str:
    return f"{counted(size, 'byte')}, {size / _GIB:,.2f} GiB"
