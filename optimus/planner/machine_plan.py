"""Values of a plan that need a machine: the memory of each kind of rank, including activations, and
the times of a step and of the run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from optimus.config import Config
from optimus.config.axes import UNEQUAL
from optimus.config.machine import Machine, load_machine
from optimus.data.batch import plan_batch
from optimus.distributed.mesh import Mesh
from optimus.errors import ConfigError, counted
from optimus.launch.environment import available_cores
from optimus.parallel.expert_load import largest_imbalance
from optimus.parallel.pipeline.plan import schedule_of
from optimus.planner.expert_loads import RunLoads
from optimus.planner.machine_rates import is_cpu
from optimus.planner.memory import (
    RankMemory,
    RankProfiles,
    activations_of,
    depends_on_load,
    rank_memory,
)
from optimus.planner.offload import check_limits, largest_rank
from optimus.planner.offload_time import Placements, decide_placements, manual_placements
from optimus.planner.placement_search import with_reserve
from optimus.planner.states import plan_ranks, stages_of
from optimus.planner.step_plan import plan_step, step_lines
from optimus.planner.topology import Topology
from optimus.planner.workload import Works
from optimus.platform import device_name, num_threads
from optimus.rank.profile import Profiled, profile_work

_GIB = 1 << 30
_Run = tuple[Config, Mesh, Machine, str]
"""A run, its mesh, its machine and the name of the machine: the first arguments of `plan_step`."""


class RankKind(NamedTuple):
    """Pipeline ranks at the same position (first, middle or last) with the same kinds of layers.
    For each kind of rank, a plan shows only the rank that needs the most memory."""

    stage: str
    """Position: "first", "middle" or "last"; "only" if there is a single pipeline rank."""
    layers: str
    """Kinds of layers: "MoE", "dense", or "MoE and dense"."""
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


def _device_of(machine: Machine) -> str:
    """Return the type of the machine's devices, "cpu" or "cuda", for `rank_memory`."""
    return "cpu" if is_cpu(machine) else "cuda"


class _EqualRanks:
    """Pipeline ranks of the same kind that have equal layers, so that the profile of the first of
    these ranks is valid for all of them."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        pp: Sequence[int],
        microbatches: int,
        machine: Machine,
        known: tuple[Profiled, Profiled],
    ) -> None:
        """Profile the first of the pipeline ranks `pp`. `known` is the pair of the arguments
        `balanced` and `concentrated` of `RankProfiles`."""
        self._config, self._mesh, self._pp = config, mesh, pp
        self._device = device = _device_of(machine)
        self._microbatches, self._stages = microbatches, stages_of(config, mesh)
        rank = largest_rank(config, mesh, pp[0])
        self._schedule = schedule_of(config, mesh, microbatches)
        self._profiles = RankProfiles(config, mesh, rank, device, *known)
        equal = self._profiles.at({})
        code = machine.device.product_code_bytes if machine.device is not None else None
        self._memory = rank_memory(
            config,
            mesh,
            rank,
            microbatches,
            device,
            equal,
            product_code=0.0 if code is None else code.value,
        )

    def largest(self, imbalances: Mapping[int, Sequence[float]]) -> RankMemory:
        """Return the memory of the rank that needs the most memory. `imbalances` has, for each MoE
        layer and each ep rank, the number of rows that the experts of the ep rank compute, divided
        by the mean over the ep ranks."""
        memories = (self._of_rank(pp, imbalances) for pp in self._pp)
        return max(memories, key=lambda memory: memory.device)

    def _of_rank(self, pp: int, imbalances: Mapping[int, Sequence[float]]) -> RankMemory:
        # The profiles belong to the first of the equal ranks. Layers at the same position in the
        # stages of two of these ranks are equal.
        layers, theirs = self._layers(pp), self._layers(self._pp[0])
        sparse = [(a, b) for a, b in zip(layers, theirs, strict=True) if a in imbalances]
        ep_ranks = range(len(imbalances[sparse[0][0]]) if sparse else 0)
        fullest = max(ep_ranks, key=lambda ep: sum(imbalances[a][ep] for a, _ in sparse), default=0)
        profiles = self._profiles.at({b: imbalances[a][fullest] for a, b in sparse})
        numbers = range(pp, len(self._stages), self._mesh.pp)
        of_stage = dict(zip(numbers, profiles.values(), strict=True))
        rank = self._config, self._mesh, self._schedule, pp
        activations, temporary = activations_of(*rank, of_stage, self._microbatches, self._device)
        return dataclasses.replace(self._memory, activations=activations, temporary=temporary)

    def _layers(self, pp: int) -> list[int]:
        return [layer for stage in self._stages[pp :: self._mesh.pp] for layer in stage]


class _Memory:
    """Device memory of the ranks of each kind, for any load of the experts."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        microbatches: int,
        machine: Machine,
        profiled: Profiled | None = None,
    ) -> None:
        """Profile the ranks. `profiled` has known profiles with equal loads of the experts."""
        self._model = config.model
        self._depends = depends_on_load(config, mesh, _device_of(machine))
        stages = stages_of(config, mesh)
        known: tuple[Profiled, Profiled] = ({} if profiled is None else profiled), {}
        self._kinds: list[tuple[RankKind, list[_EqualRanks]]] = []
        for kind in rank_kinds(config, mesh):
            groups: dict[Any, list[int]] = {}
            for pp in kind.pp:
                experts = config.model.experts_by_layer
                layers = tuple(tuple(experts[layer] for layer in s) for s in stages[pp :: mesh.pp])
                groups.setdefault(layers, []).append(pp)
            ranks = [
                _EqualRanks(config, mesh, pp, microbatches, machine, known)
                for pp in groups.values()
            ]
            self._kinds.append((kind, ranks))

    def kinds(self, imbalances: Mapping[int, Sequence[float]] | None = None) -> list[dict]:
        """Return `kinds` of `plan_on_machine`. `imbalances` is the argument of
        `_EqualRanks.largest`; None for equal loads."""
        loads = imbalances if imbalances and self._depends else {}
        largest = (
            (kind, max((r.largest(loads) for r in ranks), key=lambda memory: memory.device))
            for kind, ranks in self._kinds
        )
        return [_sizes_of(kind, memory) for kind, memory in largest]

    def largest_fitting(self, limit: float, device: int) -> float | None:
        """Return the largest imbalance of an ep rank with which all ranks fit in `device` bytes.
        The imbalance is the same in all layers and at most `limit`. Return None if the ranks do not
        fit even with equal loads."""

        def fits(imbalance: float) -> bool:
            loads = dict.fromkeys(self._model.sparse_layers, (imbalance,))
            return max(kind["total"] for kind in self.kinds(loads)) <= device

        if not fits(1.0):
            return None
        if not self._depends or fits(limit):
            return limit
        low, high = 1.0, limit
        while high - low > _PRECISION:
            middle = (low + high) / 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


_PRECISION = 0.01
"""Largest error of the result of `_Memory.largest_fitting`."""


def plan_on_machine(
    config: Config,
    mesh: Mesh,
    name: str,
    loads: RunLoads | None = None,
    topology: Topology | None = None,
    better: Topology | None = None,
) -> dict[str, Any]:
    """Return the values of a plan that need a machine.

    Args:
        config: The run, with `train.seq_len`.
        mesh: Sizes of all axes.
        name: Name of the machine.
        loads: Expert loads of a run, for `load` in the result. Not with offload.mode = "auto".
        topology: The order of the hosts. None: consecutive hosts fill one group of nodes after the
            other.
        better: A better order of the hosts, for `better_step_s` in the result.

    Returns:
        - `step`: the result of `plan_step`. If the time of a step cannot be predicted, the result
          has `no_step`, the reason, instead.
        - `better_step_s`: the seconds of a step in the order `better` of the hosts; only with
          `better` and `step`, and not with offload.mode = "auto".
        - `kinds`: an entry for each kind of rank, with `stage`, `layers` and `pp` as in `RankKind`.
          The other values of the entry are bytes on the device, for the rank of this kind that
          needs the most memory: `states`; `gathered`, for gathered parameters; `activations` of all
          microbatches in progress; `temporary`, for temporary tensors and communication; and the
          sum `total`.
        - `mismatch`: list of phrases. Each phrase names a difference between the conditions of the
          measurement for the machine file and the conditions of a run on this machine. Empty if the
          file does not record its conditions. Also empty if the file describes an accelerator but
          this machine has no accelerator, for example on a login node.
        - `needed`: the largest `total`. `device_bytes`: the memory of the device in bytes, or None
          if the machine's file does not have it. With offload.device_memory, `device_bytes` is this
          limit, and `limited_by` is "offload.device_memory".
        - `imbalance`: only for a model with experts and ep > 1. An imbalance is the number of rows
          that the experts of an ep rank compute, divided by the mean over the ep ranks. `largest`:
          the largest imbalance, the same in all layers, with which the ranks fit on the device;
          None if the ranks do not fit even with equal loads, or if the memory of the device is
          unknown. `limit`: the largest possible imbalance. It occurs if all tokens choose experts
          of the same ep rank. `step_s`: only if `largest` is not None. The seconds of a step with
          the imbalance `largest`; None if `step` is missing.
        - `load`: only with `loads`. `run`, the run directory; `steps`, the number of steps with
          loads; and `median` and `worst`, two steps of the run. Each of these two has `step`, the
          number of the step; `imbalance`, the largest imbalance of an ep rank in any layer;
          `layer`, the layer with this imbalance; `mean_imbalance`, the mean over the layers of the
          largest imbalance in the layer; and `kinds` and `needed` with this load. If the time of a
          step can be predicted, each also has `step_plan`, the result of `plan_step` with this
          load.
        - `reserve`: only with offloading. The bytes of the device memory that a placement leaves
          unused (`reserve_of`); 0 on a CPU.
        - `placements`: only with offloading. The placements of the first and the last pipeline rank
          as text. `ranks` and `memory` have the keys and values of the result of `plan`, for these
          placements. With offload.mode = "auto", `ranks` and `kinds` have only the first and the
          last pipeline rank.
        - `smallest`: an entry for each of the `placements`, in bytes: `device`, the smallest
          offload.device_memory with which some placement fits into the given host memory, and
          `host`, the smallest offload.host_memory with which some placement fits into the given
          device memory. With offload.mode = "manual", `device` and `host` are the bytes that the
          given placement needs.

    Raises:
        ConfigError: There is no machine `name`; the global batch cannot be divided over the data
            ranks; or for the reasons of `decide_placements` or `check_limits`.
    """
    train, machine = config.train, load_machine(name)
    microbatches = mesh.pp
    if train.global_batch_tokens:
        microbatches = plan_batch(train, mesh.num_data_ranks).microbatches_per_rank
    run = config, mesh, machine, name
    limited = {"limited_by": "offload.device_memory"} if config.offload.device_memory else {}
    if config.offload.mode == "auto":
        assert loads is None, "a placement does not depend on loads"
        return _placed(*run, topology) | limited | _mismatch(config, machine)
    profiled: Profiled = {}
    works = {False: profile_work(config, mesh, is_cpu(machine), profiled=profiled)}
    result: dict[str, Any] = _step(run, works, topology=topology) | _mismatch(config, machine)
    if better is not None and "step" in result:
        result["better_step_s"] = plan_step(*run, works, topology=better)["step_s"]
    memory = _Memory(config, mesh, microbatches, machine, profiled)
    device = None if machine.device is None else int(machine.device.memory_bytes.value)
    result |= _needs(memory.kinds(), device)
    if config.offload.mode == "manual":
        result |= _manual(config, mesh, machine) | limited
    if config.model.sparse_layers and mesh.ep > 1:
        result["imbalance"] = _imbalance(run, works, memory, device, topology)
    if loads is not None:
        result["load"] = _load(loads, run, works, memory, topology)
    return result


def _mismatch(config: Config, machine: Machine) -> dict[str, list[str]]:
    """Return `mismatch` of `plan_on_machine`."""
    train, measured, device = config.train, machine.measured, torch.device("cpu")
    if measured is None:
        return {"mismatch": []}
    if not is_cpu(machine):
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return {"mismatch": []}
        device = accelerator
    threads = num_threads(train.threads, train.deterministic, machine.ranks_per_node)
    now = device_name(device), available_cores(), threads, torch.__version__
    return {"mismatch": measured.differences(*now)}


def _load(
    loads: RunLoads, run: _Run, works: Works, memory: _Memory, topology: Topology | None
) -> dict[str, Any]:
    """Return `load` of `plan_on_machine`: for two steps of a run, the imbalance of the expert
    loads, and the memory and the step time that the ranks would have with these loads."""
    ep = run[1].ep
    result: dict[str, Any] = {"run": loads.run_dir, "steps": len(loads.steps(ep))}
    for key, of_step in loads.at(ep).items():
        fullest, kinds = of_step.fullest, memory.kinds(of_step.imbalances)
        layer = max(fullest, key=lambda n: fullest[n])
        result[key] = {
            "step": of_step.step,
            "imbalance": fullest[layer],
            "layer": layer,
            "mean_imbalance": of_step.mean,
            "kinds": kinds,
            "needed": max(kind["total"] for kind in kinds),
        }
        timed = _step(run, works, fullest, topology=topology)
        if "step" in timed:
            result[key]["step_plan"] = timed["step"]
    return result


def needed_bytes(
    config: Config, mesh: Mesh, num_microbatches: int, machine: Machine, profiled: Profiled
) -> int:
    """Return `needed` of `plan_on_machine`, in bytes, for a run whose offload.mode is not "auto".
    `profiled` has profiles that are already known, such as those of `nearest_fitting`."""
    kinds = _Memory(config, mesh, num_microbatches, machine, profiled).kinds()
    return max(kind["total"] for kind in kinds)


def _imbalance(
    run: _Run, works: Works, memory: _Memory, device: int | None, topology: Topology | None
) -> dict[str, Any]:
    """Return `imbalance` of `plan_on_machine`."""
    config, mesh, *_ = run
    model = config.model
    limit = min(
        largest_imbalance(model.experts_by_layer[layer], model.num_experts_per_tok, mesh.ep)
        for layer in model.sparse_layers
    )
    largest = None if device is None else memory.largest_fitting(limit, device)
    result: dict[str, Any] = {"largest": largest, "limit": limit}
    if largest is not None:
        loads = dict.fromkeys(model.sparse_layers, largest)
        step = _step(run, works, loads, topology=topology).get("step")
        result["step_s"] = None if step is None else step["step_s"]
    return result


def _sizes_of(kind: RankKind, memory: RankMemory) -> dict[str, Any]:
    return kind._asdict() | {
        "states": memory.states,
        "gathered": memory.cache,
        "activations": memory.activations - memory.temporary,
        "temporary": memory.temporary + memory.gradients + memory.copies + memory.code,
        "total": memory.device,
    }


def _needs(kinds: list[dict[str, Any]], device: int | None) -> dict[str, Any]:
    return {
        "kinds": kinds,
        "needed": max(kind["total"] for kind in kinds),
        "device_bytes": device,
    }


def _step(
    run: _Run,
    works: Works | None = None,
    imbalances: Mapping[int, float] | None = None,
    placements: Placements | None = None,
    topology: Topology | None = None,
) -> dict[str, Any]:
    try:
        return {"step": plan_step(*run, works, imbalances, placements, topology)}
    except ConfigError as error:
        return {"no_step": str(error)}


def _placed(
    config: Config, mesh: Mesh, machine: Machine, name: str, topology: Topology | None
) -> dict[str, Any]:
    """Return the result of `plan_on_machine` for offload.mode = "auto"."""
    works: Works = {}
    placements = decide_placements(config, mesh, machine, name, works, topology=topology)
    decisions = placements.decisions
    ends = [largest_rank(config, mesh, pp) for pp in dict.fromkeys((0, mesh.pp - 1))]
    smallest = [search.smallest() for search in placements.searches]
    sizes = {
        end.pp: size
        for end, decision in zip(ends, decisions, strict=True)
        for coordinate, size in plan_ranks(decision.config, mesh)
        if (coordinate.pp, coordinate.tp) == (end.pp, end.tp)
    }
    ranks = [{axis: getattr(end, axis) for axis in UNEQUAL} | sizes[end.pp] for end in ends]
    run = config, mesh, machine, name
    result = _step(run, works, placements=placements, topology=topology)
    # Without a step time, only the rates of the links determined the placement.
    if "no_step" in result:
        missing = decisions[0].limits.links.missing_rate(config.train.dtype)
        result["no_step"] += f"; {missing}" if missing else ""
    of_ends = [kind for kind in rank_kinds(config, mesh) if kind.stage != "middle"]
    kinds = [
        _sizes_of(kind, decision.memory) for kind, decision in zip(of_ends, decisions, strict=True)
    ]
    largest = max(ranks, key=lambda rank: rank["total"])
    return (
        result
        | _needs(kinds, decisions[0].limits.device)
        | {
            "ranks": ranks,
            "memory": {key: size for key, size in largest.items() if key not in UNEQUAL},
            "reserve": decisions[0].reserve,
            "placements": [str(decision) for decision in decisions],
            "smallest": [{"device": least.device, "host": least.host} for least in smallest],
        }
    )


def _manual(config: Config, mesh: Mesh, machine: Machine) -> dict[str, Any]:
    """Return the values of `plan_on_machine` that only offload.mode = "manual" has."""
    decisions = manual_placements(config, mesh, machine)
    if not decisions:
        return {}
    device, first = _device_of(machine), decisions[0]
    is_limited = bool(config.offload.device_memory or config.offload.host_memory)
    # As in a run, the host memory is checked even if [offload] sets no limit.
    for decision in decisions:
        if is_limited or decision.memory.host > decision.limits.host:
            check_limits(decision, device)
    ranks = [
        {axis: getattr(coordinate, axis) for axis in UNEQUAL} | sizes
        for coordinate, sizes in plan_ranks(first.config, mesh)
    ]
    largest = max(ranks, key=lambda rank: rank["total"])
    smallest = []
    for pp, decision in zip(dict.fromkeys((0, mesh.pp - 1)), decisions, strict=True):
        host = decision.memory.host
        if decision.config.offload.early_adam == "auto":
            host -= max(rank["tiers"]["host"]["early"] for rank in ranks if rank["pp"] == pp)
        smallest.append({"device": with_reserve(decision.memory.device, device), "host": host})
    return {
        "ranks": ranks,
        "memory": {key: size for key, size in largest.items() if key not in UNEQUAL},
        "reserve": first.reserve,
        "device_bytes": first.limits.device,
        "placements": [str(decision) for decision in decisions],
        "smallest": smallest,
    }


def machine_lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the result of `plan_on_machine` as pairs (name, value) for a table."""
    device, needed = result["device_bytes"], result["needed"]
    share = ""
    if device is not None:
        whole = result.get("limited_by", f"the device of {result['machine']}")
        share = f": {needed / device:.1%} of {whole}"
        share += "; it does not fit" if needed > device else ""
    lines = [("with activations", _size_text(needed) + share)]
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
    if reserve := result.get("reserve"):
        text = f"{_size_text(reserve)} of the device memory, for the allocator's fragmentation"
        lines.append(("reserve", text))
    for number, text in enumerate(result.get("placements", ())):
        pp = result["mesh"]["pp"] - 1 if number else 0
        lines.append((f"placement on pp {pp}", text))
        lines += [
            (f"  smallest offload.{tier}_memory", _size_text(size))
            for tier, size in result["smallest"][number].items()
            if size
        ]
    if mismatch := result.get("mismatch"):
        text = f"{'; '.join(mismatch)}; measure again with optimus bench machine"
        lines.append(("not this machine", text))
    if "no_step" in result:
        lines.append(("no step time", result["no_step"]))
    if "step" in result:
        lines += step_lines(result["step"], result.get("is_one_replica", False))
    if "better_step_s" in result:
        better_s, step_s = result["better_step_s"], result["step"]["step_s"]
        gain = f"{abs(step_s - better_s):,.4g} s {'less' if better_s < step_s else 'more'}"
        if math.isclose(step_s, better_s, rel_tol=1e-6):
            gain = "as long as in the given order"
        text = f"{better_s:,.4g} s, {gain}, with the hosts of --write-hosts FILE"
        lines.append(("step with better hosts", text))
    return lines + _load_lines(result)


def _load_lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return `imbalance` and `load` of `plan_on_machine` as pairs (name, value) for a table."""
    balanced = result.get("step")
    lines = []
    if "imbalance" in result and result["imbalance"]["largest"] is not None:
        largest, limit = result["imbalance"]["largest"], result["imbalance"]["limit"]
        text = f"{largest:.2f} times an equal share of the tokens on an ep rank's experts"
        text += ", the largest possible share" if largest == limit else f" of {limit:.2f} possible"
        if balanced is not None:
            text += f": {_slower(result['imbalance']['step_s'], balanced['step_s'])}"
        lines.append(("largest imbalance that fits", text))
    if "load" in result and "imbalance" not in result:
        lines.append(("load", "no effect: with parallel.ep = 1, each rank has all experts"))
        return lines
    keys = ["median", "worst"] if "load" in result else []
    if keys and result["load"]["median"]["step"] == result["load"]["worst"]["step"]:
        keys = ["worst"]
    for key in keys:
        load = result["load"][key]
        text = (
            f"in layer {load['layer']}, the experts of an ep rank have {load['imbalance']:.2f} "
            f"times an equal share of the tokens (mean of all layers: {load['mean_imbalance']:.2f})"
            f"; memory {load['needed'] / _GIB:,.2f} GiB"
        )
        device = result["device_bytes"]
        if device is not None and load["needed"] > device:
            text += ", which does not fit"
        if balanced is not None:
            step = load["step_plan"]
            text += f"; {_slower(step['step_s'], balanced['step_s'])}"
            exposed = (each["exposed_s"].get("ep", 0.0) for each in (step, balanced))
            text += ", exposed ep {:,.4g} s (uniform: {:,.4g} s)".format(*exposed)
            text += f", pipeline bubble {step['bubble_s']:,.4g} s, MFU {step['mfu']:.1%}, "
            text += f"{step['tokens_per_day']:.3g} tokens a day"
            if "node_hours" in step:
                text += f", whole run {step['node_hours']:,.4g} node-hours"
        name = f"{key} load" if len(keys) > 1 else "load, one sample"
        lines.append((f"{name}, step {load['step']}", text))
    return lines


def _slower(step_s: float, balanced_s: float) -> str:
    return f"step {step_s:,.4g} s, {step_s - balanced_s:,.4g} s more than with uniform routing"


def _size_text(size: int) -> str:
    return f"{counted(size, 'byte')}, {size / _GIB:,.2f} GiB"


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
