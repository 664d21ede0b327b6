"""Computation of the number of parameters, the FLOPs and the memory of a run from its configuration
alone."""

from __future__ import annotations

from typing import Any

from optimus.chunks.layout import KINDS
from optimus.config import Config
from optimus.config.axes import UNEQUAL
from optimus.config.machine import Machine, load_links, load_machine
from optimus.data.batch import plan_batch
from optimus.distributed.mesh import Coordinate, Mesh, make_mesh
from optimus.errors import ConfigError, counted, refuse_if
from optimus.model.flops import count_parameters, flops_per_token
from optimus.planner.allocation import Allocation
from optimus.planner.states import plan_ranks
from optimus.planner.step_plan import plan_step, step_lines
from optimus.planner.topology import ALGORITHMS
from optimus.planner.traffic import plan_topology

_GIB = 1 << 30


def plan(config: Config, allocation: Allocation | None = None) -> dict[str, Any]:
    """Return the number of parameters, the FLOPs and the memory of a run as a dict for JSON.

    Only the section `[model]` is required.

    Args:
        config: The configuration.
        allocation: The nodes of the run. If it has no number of nodes and `parallel.dp` is 0, the
            plan is for one replica.

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

    Raises:
        ConfigError: The mesh does not fit the allocation, or as `plan_ranks`. With a number of
            nodes, also if the global batch cannot be divided over the ranks.
    """
    train = config.train
    total, active = count_parameters(config.model)
    mesh = make_mesh(config.parallel, allocation.world_size if allocation else None)
    if allocation and allocation.nodes and train.seq_len:
        plan_batch(train, mesh.num_data_ranks)
    ranks = [
        {axis: getattr(coordinate, axis) for axis in UNEQUAL} | sizes
        for coordinate, sizes in plan_ranks(config, mesh)
    ]
    result: dict[str, Any] = {
        "architecture": config.model.architecture,
        "total_params": total,
        "active_params": active,
        "dtype": train.dtype,
        "world": mesh.world_size,
        "mesh": mesh._asdict(),
        "sharding": config.optim.sharding,
        "is_one_replica": not (config.parallel.dp or (allocation and allocation.nodes)),
        "memory": _fullest(ranks),
        "ranks": ranks,
    }
    if allocation is not None:
        result["machine"] = allocation.machine
        result["ranks_per_node"] = allocation.ranks_per_node
        result["nodes"] = allocation.nodes or -(-mesh.world_size // allocation.ranks_per_node)
        result["topology"] = plan_topology(config, mesh, allocation)
        if train.seq_len:
            result |= _on_machine(config, mesh, allocation.machine)
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


def _fullest(ranks: list[dict[str, int]]) -> dict[str, int]:
    """Return the sizes of the rank with the largest `total`, without its coordinates."""
    fullest = max(ranks, key=lambda rank: rank["total"])
    return {key: size for key, size in fullest.items() if key not in UNEQUAL}


def _on_machine(config: Config, mesh: Mesh, name: str) -> dict[str, Any]:
    """Return the figures of a plan that need a machine.

    - `step`: the result of `plan_step`, or `no_step`: the reason why there is none.
    - `activations`: bytes of activations and temporary tensors on the first and the last pipeline
      rank; `needed`: the most bytes on the device of the fuller of these ranks; and
      `device_bytes`: the memory of the device, or None if the machine's file does not have it.
    - `placements`: with offload.mode = "auto", the decisions for these ranks as text. `needed` and
      `device_bytes` are then those of the decisions, and `ranks` the first and the last rank.
    """
    from optimus.planner.memory import activations_of_ranks, rank_memory  # needs torch
    from optimus.planner.offload import largest_rank

    train, machine = config.train, load_machine(name)
    microbatches = mesh.pp
    if train.global_batch_tokens:
        microbatches = plan_batch(train, mesh.num_data_ranks).microbatches_per_rank
    ends = [largest_rank(config, mesh, pp) for pp in dict.fromkeys((0, mesh.pp - 1))]
    if config.offload.mode == "auto":
        return _placed_on_machine(config, mesh, ends, microbatches, machine, name)
    result: dict[str, Any] = _step(config, mesh, machine, name)
    device = None if machine.device is None else int(machine.device.memory_bytes.value)
    result["activations"] = list(activations_of_ranks(config, mesh, ends, microbatches))
    states = {coordinate.pp: sizes["total"] for coordinate, sizes in plan_ranks(config, mesh)}
    needs = [states[end.pp] + a for end, a in zip(ends, result["activations"], strict=True)]
    fullest = ends[needs.index(max(needs))]
    result["needed"] = rank_memory(config, mesh, fullest, microbatches).device
    result["device_bytes"] = device
    return result


def _step(config: Config, mesh: Mesh, machine: Machine, name: str) -> dict[str, Any]:
    try:
        return {"step": plan_step(config, mesh, machine, name)}
    except ConfigError as error:
        return {"no_step": str(error)}


def _placed_on_machine(
    config: Config,
    mesh: Mesh,
    ends: list[Coordinate],
    microbatches: int,
    machine: Machine,
    name: str,
) -> dict[str, Any]:
    """Return the figures of `_on_machine` for offload.mode = "auto"."""
    from optimus.planner.offload import decide_placement, limits_of

    links = load_links(config.offload.links) if config.offload.links else machine.links
    if links is None:
        raise ConfigError(
            f"offload.mode = 'auto': the file of {name} has no table [links]; set offload.links to "
            "a file that optimus bench links --out FILE has written there"
        )
    device = 0 if machine.device is None else int(machine.device.memory_bytes.value)
    refuse_if(
        not (device or config.offload.device_memory),
        f"offload.mode = 'auto': the file of {name} has no device; set offload.device_memory",
    )
    memory = machine.host_memory_bytes
    host = _UNKNOWN if memory is None else int(memory.value) // machine.ranks_per_node
    limits = limits_of(config, links, device, host)
    decisions = [decide_placement(config, mesh, end, microbatches, limits, "cuda") for end in ends]
    sizes = {
        end.pp: size
        for end, decision in zip(ends, decisions, strict=True)
        for coordinate, size in plan_ranks(decision.config, mesh)
        if (coordinate.pp, coordinate.tp) == (end.pp, end.tp)
    }
    ranks = [{axis: getattr(end, axis) for axis in UNEQUAL} | sizes[end.pp] for end in ends]
    result: dict[str, Any] = {"no_step": "the placement has the time of a step of a rank"}
    if all(decision.time is None for decision in decisions):
        result = _step(decisions[0].config, mesh, machine, name)
    return result | {
        "ranks": ranks,
        "memory": _fullest(ranks),
        "placements": [str(decision) for decision in decisions],
        "activations": [decision.memory.activations for decision in decisions],
        "needed": max(decision.memory.device for decision in decisions),
        "device_bytes": limits.device,
    }


_UNKNOWN = 1 << 62
"""Limit of host memory if the machine's file does not have it."""


def check_fit(result: dict[str, Any]) -> None:
    """Raise ConfigError if the model states of a rank are larger than the memory of the device."""
    device, states = result.get("device_bytes"), result["memory"]["total"]
    if device is not None and states > device:
        raise ConfigError(
            f"--machine {result['machine']}: the model states of a rank need "
            f"{counted(states, 'byte')}, {counted(states - device, 'byte')} more than its device "
            "has; use more ranks, optim.sharding = 'epso', or --search, which lists layouts that "
            "fit"
        )


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
    memory, kinds, mesh = result["memory"], result["ranks"], result["mesh"]
    axes = " ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
    ranks_of = f"{result['world']:,} ranks ({axes})" if axes else "one rank"
    head = f"{_size_text(memory['total'])} of model states"
    lines = [("world", f"{ranks_of}, optim.sharding = {result['sharding']}")]
    if "nodes" in result:
        ranks = counted(result["ranks_per_node"], "rank")
        lines.append(
            ("nodes", f"{counted(result['nodes'], 'node')} of {result['machine']}, {ranks} each")
        )
        lines += _topology_lines(result["topology"])
    if result["is_one_replica"]:
        lines.append(
            ("", "parallel.dp = 0: one replica; --machine NAME --nodes N plans the whole world")
        )
    lines.append(("on the fullest rank" if len(kinds) > 1 else "on each rank", head))
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
    if len(kinds) > 1:
        for rank in kinds:
            name = " ".join(f"{axis} {rank[axis]}" for axis in UNEQUAL if mesh[axis] > 1)
            lines.append((f"on ranks of {name}", _size_text(rank["total"])))
    lines += _activation_lines(result)
    return lines


def _activation_lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    if "activations" not in result:
        note = f"{result['dtype']} training; activations are not included"
        return [("", f"{note}; --machine NAME adds them" if result.get("seq_len") else note)]
    first, *last = map(_size_text, result["activations"])
    lines = [("activations in addition", first + (" on the first stage" if last else ""))]
    lines += [("", f"{size} on the last stage") for size in last]
    device, needed = result["device_bytes"], result["needed"]
    if device is not None:
        lines.append(
            (
                "with activations",
                f"{_size_text(needed)}: {needed / device:.1%} of the device of {result['machine']}"
                + ("; it does not fit" if needed > device else ""),
            )
        )
    for rank, text in zip(result["ranks"], result.get("placements", ()), strict=False):
        lines.append((f"placement on pp {rank['pp']}", text))
    if "no_step" in result:
        lines.append(("no step time", result["no_step"]))
    return lines + step_lines(result["step"]) if "step" in result else lines


def _topology_lines(topology: dict[str, Any]) -> list[tuple[str, str]]:
    known = topology["num_groups"]
    text = f"unknown: {topology['unknown']}" if known is None else f"{known:,} ({topology['gain']})"
    lines = [("groups of nodes", text)]
    if topology["crossings"]:
        levels = "nodes" if known is None else "nodes/groups"
        lines.append(("sent in a step", f"share across {levels} with {', '.join(ALGORITHMS)}"))
    for axes, crossing in topology["crossings"].items():
        shares = [
            "/".join(f"{100 * share:.1f}" for share in crossing[name].values() if share is not None)
            for name in ALGORITHMS
        ]
        sent = crossing["step_bytes"]
        size = "" if sent is None else f"{sent / 1e9:,.1f} GB by all ranks: "
        lines.append((f"  {axes}", f"{size}{', '.join(shares)} %"))
    return lines


def _size_text(size: int) -> str:
    return f"{counted(size, 'byte')}, {size / _GIB:,.2f} GiB"
