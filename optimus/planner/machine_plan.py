"""Figures of a plan that need a machine: memory of each kind of rank, time of a step, run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from optimus.config import Config
from optimus.config.axes import UNEQUAL
from optimus.config.machine import Machine, load_links, load_machine
from optimus.data.batch import plan_batch
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.errors import ConfigError, counted, refuse_if
from optimus.planner.memory import RankMemory, rank_memory
from optimus.planner.offload import decide_placement, largest_rank, limits_of
from optimus.planner.states import plan_ranks, stages_of
from optimus.planner.step_plan import plan_step, step_lines
from optimus.rank.profile import Profiled, profile_stages

_GIB = 1 << 30
_UNKNOWN = 1 << 62
"""Limit of host memory if the machine's file does not have it."""


class RankKind(NamedTuple):
    """Pipeline ranks whose stages have the same ends and the same kinds of layers."""

    stage: str
    """first, middle, last or only."""
    layers: str
    """MoE, dense, or MoE and dense."""
    pp: tuple[int, ...]
    """Indices along pp."""


def rank_kinds(config: Config, mesh: Mesh) -> list[RankKind]:
    """Return the kinds of ranks in the order of their first pipeline rank."""
    stages = stages_of(config, mesh)
    kinds: dict[tuple[str, str], list[int]] = {}
    for pp in range(mesh.pp):
        experts = {
            config.model.experts_by_layer[layer]
            for stage in stages[pp :: mesh.pp]
            for layer in stage
        }
        names = [name for name, has in (("MoE", any(experts)), ("dense", 0 in experts)) if has]
        stage = "first" if pp == 0 else "last" if pp == mesh.pp - 1 else "middle"
        key = "only" if mesh.pp == 1 else stage, " and ".join(names)
        kinds.setdefault(key, []).append(pp)
    return [RankKind(*key, tuple(pp)) for key, pp in kinds.items()]


def _candidates(config: Config, mesh: Mesh, kind: RankKind) -> list[Coordinate]:
    """Return the ranks of a kind that may need the most memory. Of ranks with equal layers, the
    first one keeps the activations of at least as many microbatches as later ones."""
    stages = stages_of(config, mesh)
    first: dict[Any, int] = {}
    for pp in kind.pp:
        experts = config.model.experts_by_layer
        layers = tuple(tuple(experts[layer] for layer in s) for s in stages[pp :: mesh.pp])
        first.setdefault(layers, pp)
    return [largest_rank(config, mesh, pp) for pp in first.values()]


def plan_on_machine(config: Config, mesh: Mesh, name: str) -> dict[str, Any]:
    """Return the figures of a plan that need a machine.

    Returns:
        - `step`: the result of `plan_step`, or `no_step`: the reason why there is none.
        - `kinds`: for each kind of rank, its fullest rank: `stage`, `layers` and `pp` as in
          `RankKind`, and bytes on the device: `states`, `gathered` parameters, `activations` of all
          microbatches in progress, `temporary` tensors and communication, and their sum `total`.
        - `needed`: the largest `total`; `device_bytes`: the memory of the device, or None if the
          machine's file does not have it.
        - `placements`: with offload.mode = "auto", the decisions for the first and the last rank as
          text. `kinds` then has these ranks, and `ranks` and `memory` are those of the decisions.

    Raises:
        ConfigError: As `decide_placement`, or the machine has no rates for it.
    """
    train, machine = config.train, load_machine(name)
    microbatches = mesh.pp
    if train.global_batch_tokens:
        microbatches = plan_batch(train, mesh.num_data_ranks).microbatches_per_rank
    if config.offload.mode == "auto":
        return _placed(config, mesh, microbatches, machine, name)
    result: dict[str, Any] = _step(config, mesh, machine, name)
    profiled: Profiled = {}
    kinds = []
    for kind in rank_kinds(config, mesh):
        sizes = [
            rank_memory(
                config,
                mesh,
                rank,
                microbatches,
                profiles=profile_stages(config, mesh, rank, profiled),
            )
            for rank in _candidates(config, mesh, kind)
        ]
        kinds.append(_sizes_of(kind, max(sizes, key=lambda memory: memory.device)))
    device = None if machine.device is None else int(machine.device.memory_bytes.value)
    return result | _needs(kinds, device)


def _sizes_of(kind: RankKind, memory: RankMemory) -> dict[str, Any]:
    return kind._asdict() | {
        "states": memory.states,
        "gathered": memory.cache,
        "activations": memory.activations - memory.temporary,
        "temporary": memory.temporary + memory.gradients,
        "total": memory.device,
    }


def _needs(kinds: list[dict[str, Any]], device: int | None) -> dict[str, Any]:
    return {
        "kinds": kinds,
        "needed": max(kind["total"] for kind in kinds),
        "device_bytes": device,
    }


def _step(config: Config, mesh: Mesh, machine: Machine, name: str) -> dict[str, Any]:
    try:
        return {"step": plan_step(config, mesh, machine, name)}
    except ConfigError as error:
        return {"no_step": str(error)}


def _placed(
    config: Config, mesh: Mesh, microbatches: int, machine: Machine, name: str
) -> dict[str, Any]:
    """Return the figures of `plan_on_machine` for offload.mode = "auto"."""
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
    ends = [largest_rank(config, mesh, pp) for pp in dict.fromkeys((0, mesh.pp - 1))]
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
    of_ends = [kind for kind in rank_kinds(config, mesh) if kind.stage != "middle"]
    kinds = [
        _sizes_of(kind, decision.memory) for kind, decision in zip(of_ends, decisions, strict=True)
    ]
    largest = max(ranks, key=lambda rank: rank["total"])
    return (
        result
        | _needs(kinds, limits.device)
        | {
            "ranks": ranks,
            "memory": {key: size for key, size in largest.items() if key not in UNEQUAL},
            "placements": [str(decision) for decision in decisions],
        }
    )


def machine_lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the result of `plan_on_machine` as pairs (name, value) for a table."""
    device, needed = result["device_bytes"], result["needed"]
    share = ""
    if device is not None:
        share = f": {needed / device:.1%} of the device of {result['machine']}"
        share += "; it does not fit" if needed > device else ""
    lines = [("with activations", f"{counted(needed, 'byte')}, {needed / _GIB:,.2f} GiB{share}")]
    for kind in result["kinds"]:
        sizes = (
            f"{kind[key] / _GIB:,.2f} {text}"
            for key, text in (
                ("states", "states"),
                ("gathered", "gathered parameters"),
                ("activations", "activations"),
                ("temporary", "communication and temporary"),
            )
        )
        total = f"{kind['total'] / _GIB:,.2f} GiB"
        if device is not None:
            total += f", {kind['total'] / device:.1%}"
        lines.append((f"  {_kind_text(kind)}", f"{total}: {', '.join(sizes)}"))
    for rank, text in zip(result["ranks"], result.get("placements", ()), strict=False):
        lines.append((f"placement on pp {rank['pp']}", text))
    if "no_step" in result:
        lines.append(("no step time", result["no_step"]))
    return lines + step_lines(result["step"]) if "step" in result else lines


def _kind_text(kind: dict[str, Any]) -> str:
    if kind["stage"] == "only":
        return f"all ranks, {kind['layers']}"
    stage = f"{kind['stage']} stage" + ("s" if len(kind["pp"]) > 1 else "")
    return f"{stage}, pp {_ranges(kind['pp'])}, {kind['layers']}"


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, such as `1-6, 9`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
