"""The result of `optimus plan`: the number of parameters, the FLOPs and the memory of a run. These
values depend only on the configuration. With a machine, the result also has the values of
`optimus.planner.machine_plan`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from optimus.chunks.layout import KINDS
from optimus.config import Config
from optimus.config.axes import UNEQUAL
from optimus.config.sizes import parse_bytes
from optimus.data.batch import plan_batch
from optimus.distributed.mesh import Mesh, make_mesh
from optimus.errors import DoesNotFit, counted
from optimus.launch.imports import without_collections
from optimus.model.flops import count_parameters, flops_per_token
from optimus.planner.allocation import Allocation
from optimus.planner.expert_loads import RunLoads, loads_for_plan
from optimus.planner.states import plan_ranks
from optimus.planner.topology import ALGORITHMS
from optimus.planner.traffic import better_order, plan_topology, topology_of

_GIB = 1 << 30


def plan(
    config: Config, allocation: Allocation | None = None, load: str | None = None
) -> dict[str, Any]:
    """Return the number of parameters, the FLOPs and the bytes of a run as a dict for JSON.

    Only the section `[model]` is required.

    Args:
        config: The configuration.
        allocation: The nodes of the run. If `allocation` has no number of nodes and `parallel.dp`
            is 0, the plan is for one replica.
        load: Directory of a run with expert loads. With `load`, `allocation` must not be None.

    These keys, among others, are always present:

    - `total_params`, `active_params`: numbers of parameters.
    - `world`: number of ranks.
    - `ranks`: list with one entry for each pair of pp and tp coordinates. An entry has the bytes of
      the model states on one rank with these coordinates. `total` counts only bytes on the device.
      Three more keys are not included in `total`: `host`, the bytes of states in host memory;
      `disk`, the bytes of states on disk; and `staging`, the bytes of host memory that
      checkpoint.async_save uses. With offloading, `tiers` has a dict for each of `device`, `host`
      and `disk`. Each dict has the bytes of each kind of states, and the bytes for four other uses:
      `cache`, for gathered parameters; `staging`, for buffers with copies of gradients and of
      states on disk; `early`, for the spare buffers of early updates; and `checkpoints`, for the
      copies of checkpoint.async_save.
    - `memory`: the entry of `ranks` with the largest `total`, without its coordinates.

    The following keys are present only if settings of `[train]` are given. The FLOPs are those of
    the forward and the backward pass.

    - `flops_per_token`: needs `seq_len`.
    - `flops_per_step`: also needs `global_batch_tokens`.
    - `tokens`, `flops`: totals of the run; also need `max_steps`.

    Raises:
        DoesNotFit: With offloading, a rank needs more memory than it may use.
        ConfigError: The mesh does not fit the allocation; or the allocation has a number of nodes,
            and the global batch cannot be divided over the ranks of these nodes; or as
            `plan_ranks`, `loads_for_plan` or `topology_of`.
    """
    train = config.train
    loads = loads_for_plan(load, config) if load else None
    total, active = count_parameters(config.model)
    mesh = make_mesh(config.parallel, allocation.world_size if allocation else None)
    if allocation and allocation.nodes and train.seq_len:
        plan_batch(train, mesh.num_data_ranks)
    ranks = [
        {axis: getattr(coordinate, axis) for axis in UNEQUAL} | sizes
        for coordinate, sizes in plan_ranks(config, mesh)
    ]
    if config.offload.mode == "manual":
        _check_tiers(config, ranks)
    fullest = max(ranks, key=lambda rank: rank["total"])
    result: dict[str, Any] = {
        "architecture": config.model.architecture,
        "total_params": total,
        "active_params": active,
        "dtype": train.dtype,
        "world": mesh.world_size,
        "mesh": mesh._asdict(),
        "sharding": config.optim.sharding,
        "offload": config.offload.mode,
        "is_one_replica": not (config.parallel.dp or (allocation and allocation.nodes)),
        "memory": {key: size for key, size in fullest.items() if key not in UNEQUAL},
        "ranks": ranks,
    }
    if allocation is not None:
        result |= _plan_on_nodes(config, mesh, allocation, loads)
    return result | _flops(config)


def _plan_on_nodes(
    config: Config, mesh: Mesh, allocation: Allocation, loads: RunLoads | None
) -> dict[str, Any]:
    """Return the values of a plan that need the nodes of the run."""
    topology = topology_of(allocation)
    better = better_order(config, mesh, allocation, topology)
    result: dict[str, Any] = {
        "machine": allocation.machine,
        "ranks_per_node": allocation.ranks_per_node,
        "nodes": allocation.nodes or -(-mesh.world_size // allocation.ranks_per_node),
        "topology": plan_topology(config, mesh, allocation, topology, better),
    }
    if config.train.seq_len:
        with without_collections():
            from optimus.planner.machine_plan import plan_on_machine  # imports torch

            orders = topology, None if better is None else better[1]
            result |= plan_on_machine(config, mesh, allocation.machine, loads, *orders)
    return result


def _flops(config: Config) -> dict[str, Any]:
    """Return the entries of the result of `plan` that need settings of `[train]`."""
    train = config.train
    if not train.seq_len:
        return {}
    per_token = flops_per_token(config.model, train.seq_len)
    result: dict[str, Any] = {"seq_len": train.seq_len, "flops_per_token": per_token}
    if train.global_batch_tokens:
        result["global_batch_tokens"] = train.global_batch_tokens
        result["flops_per_step"] = per_token * train.global_batch_tokens
        if train.max_steps:
            result["tokens"] = train.global_batch_tokens * train.max_steps
            result["flops"] = result["flops_per_step"] * train.max_steps
    return result


def _check_tiers(config: Config, ranks: list[dict[str, Any]]) -> None:
    """Raise DoesNotFit if the states of a rank exceed a limit of the section `[offload]`."""
    for tier in ("host", "disk"):
        key = f"{tier}_memory"
        limit = parse_bytes(getattr(config.offload, key))
        size = max(rank[tier] for rank in ranks)
        if limit and size > limit:
            raise DoesNotFit(
                f"offload.{key} must be at least {counted(size, 'byte')}, the size of a rank's "
                f"states on the {tier}; set this size, or a smaller offload.{tier}_share",
                {tier: size - limit},
            )


def format_plan(result: dict[str, Any]) -> str:
    """Return the result of `plan` as text, a table with a line for each value."""
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
    tiers = memory.get("tiers", {})
    # As in the text of a placement, the size is the sum of all kinds of bytes in host memory.
    if memory["host"]:
        lines.append(("in host memory in addition", _size_text(sum(tiers["host"].values()))))
    if not tiers:
        kinds_of = (*KINDS, "cache")
        lines += [(f"  {kind}", _size_text(memory[kind])) for kind in kinds_of if memory[kind]]
    lines.append(("  padding, included", _size_text(memory["padding"])))
    if memory["disk"]:
        lines.append(("on disk in addition", _size_text(memory["disk"])))
    if memory["staging"] and not memory["host"]:
        lines.append(
            ("host memory in addition", f"{_size_text(memory['staging'])}, for checkpoints")
        )
    if len(kinds) > 1:
        for rank in kinds:
            name = " ".join(f"{axis} {rank[axis]}" for axis in UNEQUAL if mesh[axis] > 1)
            lines.append((f"on ranks of {name}", _size_text(rank["total"])))
    lines += _tier_lines(kinds, mesh)
    if "kinds" not in result:
        note = f"{result['dtype']} training; activations are not included"
        if result["offload"] == "auto":
            lines.append(("placement", "offload.mode = 'auto' needs --machine NAME"))
        hint = "; --machine NAME adds them" if result.get("seq_len") else ""
        return [*lines, ("", note + hint)]
    from optimus.planner.machine_plan import machine_lines

    return lines + machine_lines(result)


def _tier_lines(ranks: list[dict[str, Any]], mesh: dict[str, int]) -> list[tuple[str, str]]:
    """Return a table of the bytes in each tier, as pairs (name, value). Ranks with equal bytes
    share the rows of the table."""
    names: dict[str, list[str]] = {}
    tables: dict[str, dict[str, dict[str, int]]] = {}
    for rank in ranks:
        if "tiers" in rank:
            key = repr(rank["tiers"])
            name = " ".join(f"{axis} {rank[axis]}" for axis in UNEQUAL if mesh[axis] > 1)
            names.setdefault(key, []).append(name)
            tables[key] = rank["tiers"]
    lines = []
    for key, tiers in tables.items():
        lines.append(("bytes by tier", _row(tiers)))
        if names[key][0]:
            lines.append(("  ranks", ", ".join(names[key])))
        rows = {kind: [of_tier[kind] for of_tier in tiers.values()] for kind in tiers["device"]}
        rows["total"] = [sum(of_tier.values()) for of_tier in tiers.values()]
        for kind, sizes in rows.items():
            if any(sizes):
                name = "early updates" if kind == "early" else kind
                lines.append((f"  {name}", _row(f"{size:,}" for size in sizes)))
    return lines


def _row(cells: Iterable[str]) -> str:
    return "".join(f"{cell:>20}" for cell in cells)


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
        digits = 1 if sent is None or sent >= 1e9 else 4
        size = "" if sent is None else f"{sent / 1e9:,.{digits}f} GB by all ranks: "
        lines.append((f"  {axes}", f"{size}{', '.join(shares)} %"))
    return lines


def _size_text(size: int) -> str:
    return f"{counted(size, 'byte')}, {size / _GIB:,.2f} GiB"
