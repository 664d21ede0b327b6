"""Placement of the model states of a rank with offload.mode = "auto", and limits of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from optimus.checkpoint.slices import writer_in_paper
from optimus.chunks.placement import TierBytes
from optimus.chunks.state_file import free_bytes
from optimus.config import Config
from optimus.config.machine import Links, Machine, load_links, load_machine
from optimus.config.sizes import parse_bytes
from optimus.distributed.collectives import Group, broadcast_object, greatest
from optimus.distributed.groups import Groups
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.errors import counted, refuse_if
from optimus.launch.environment import usable_memory
from optimus.planner.memory import RankMemory, gb_text, rank_memory, states_memory
from optimus.planner.placement_search import (
    Decision,
    PlacementSearch,
    RankLimits,
    decide_together,
    does_not_fit,
    placement_text,
    reserve_of,
    with_offload,
)
from optimus.planner.rates import find_links
from optimus.planner.segment_times import segment_times
from optimus.platform import device_memory, dtype_of, limit_device_memory


def autotune_placement(
    config: Config,
    groups: Groups,
    num_microbatches: int,
    device: torch.device,
    ranks_per_node: int,
    log: Callable[[str], None],
) -> Config:
    """Return the configuration with the placement of the states that this rank uses.

    With offload.mode = "auto", decide on the placement. The decision uses the rates of
    `train.machine`, as `optimus plan` does. If `train.machine` is not set, the decision uses rates
    that this function measures, and ignores the time of collectives. With offload.mode = "manual",
    check the limits of memory. On an accelerator, `offload.device_memory` then limits the
    allocations of torch. All ranks must call this function.

    Args:
        config: The run's configuration.
        groups: Process groups of this rank.
        num_microbatches: Number of microbatches of a rank in a step.
        device: Device of this rank.
        ranks_per_node: Number of ranks that share the memory of this machine.
        log: Function that writes one line to the log.

    Raises:
        ConfigError: The run does not fit.
    """
    offload = config.offload
    if offload.mode == "off":
        return config
    everyone = groups.everyone
    largest = largest_rank(config, groups.mesh, groups.coordinate.pp)
    rank = groups.mesh, largest, num_microbatches
    host = host_limit(usable_memory(), ranks_per_node)
    host = -greatest(-host, everyone, device)
    if offload.mode == "manual" and not (offload.device_memory or offload.host_memory):
        memory = states_memory(config, *rank)
        if memory.host > host:
            limits = RankLimits(0, host, Links())
            raise does_not_fit("manual", config, TierBytes(0, memory.host), limits, device.type)
        log(f"offload.mode = 'manual': {_states_text(config, memory)}")
        return config
    times = machine = None
    if config.train.machine and offload.mode == "auto":
        machine = load_machine(config.train.machine, "train.machine")
        times = segment_times(config, groups.mesh, machine, config.train.machine)
    links = _links_of(config, machine, everyone, device, ranks_per_node, log)
    local = device_memory(device) // (ranks_per_node if device.type == "cpu" else 1)
    smallest = -greatest(-local, everyone, device)
    for key, available in (("device_memory", smallest), ("host_memory", host)):
        asked = parse_bytes(getattr(offload, key))
        refuse_if(
            asked > available,
            f"offload.{key} = {getattr(offload, key)!r} is {counted(asked - available, 'byte')} "
            f"more than the states of a rank may use; use at most {counted(available, 'byte')}, or "
            "remove the key",
        )
    free = 0
    if offload.disk and offload.mode == "auto":
        free = -greatest(-free_bytes(Path(offload.disk)) // ranks_per_node, everyone, device)
    limits = limits_of(config, links, smallest, host, free)
    if offload.mode == "auto":
        searches = [PlacementSearch(config, *rank, limits, device.type, times)]
        (decision,) = decide_together(searches, lambda value: greatest(value, everyone, device))
        # An accelerator needs offload.links only for the decision. On a CPU, which emulates a
        # device, copies and updates of the run then take the time of these rates.
        if device.type != "cpu":
            decision = dataclasses.replace(decision, config=with_offload(decision.config, links=""))
    else:
        imbalance = config.offload.expert_imbalance
        memory = rank_memory(config, *rank, device.type, imbalance=imbalance)
        reserve = reserve_of(limits.device, device.type)
        decision = Decision(config, memory, limits, reserve=reserve)
        check_limits(decision, device.type)
    if offload.device_memory:
        limit_device_memory(device, limits.device)
    log(f"offload.mode = {offload.mode!r}: {decision}")
    return decision.config


def _links_of(
    config: Config,
    machine: Machine | None,
    everyone: Group,
    device: torch.device,
    ranks_per_node: int,
    log: Callable[[str], None],
) -> Links:
    """Return the rates of the links, the same on all ranks: the rates in the file `offload.links`;
    if this setting is empty, the rates in the machine file; and if the machine file has none, the
    rates that the first rank measures."""
    offload, links = config.offload, None
    if offload.links:
        links = load_links(offload.links)
        if offload.mode == "auto" and (missing := links.missing_rate(config.train.dtype)):
            log(f"offload.links = {offload.links!r}: {missing}")
    elif machine is not None and machine.links is not None:
        links = machine.links
    elif everyone.rank == 0:
        disk = Path(offload.disk) if offload.disk and offload.mode == "auto" else None
        links = find_links(device, dtype_of(config.train.dtype), log, ranks_per_node, disk)
    rates = broadcast_object(None if links is None else links.model_dump(), everyone, dict)
    return Links.model_validate(rates)


def _states_text(config: Config, memory: RankMemory) -> str:
    """Return the placement of a rank's states as text. The text has the bytes on the device without
    activations, because the activations are not known."""
    on_device = memory.states + memory.cache + memory.gradients
    tiers = [
        f"{gb_text(on_device)} of device memory without activations",
        f"{gb_text(memory.host)} of host memory",
    ]
    if memory.disk:
        tiers.append(f"{gb_text(memory.disk)} on disk")
    return f"{placement_text(config)}: {', '.join(tiers)}"


def largest_rank(config: Config, mesh: Mesh, pp: int) -> Coordinate:
    """Return the coordinate of the rank that needs the most memory of all ranks with the pipeline
    index `pp`. These ranks must have the same placement. A placement that fits on the returned rank
    fits on all of them."""
    # If tp does not divide a size, the last rank has the largest share. With checkpoint.scatter =
    # "paper", only a rank that writes checkpoints has staging memory.
    coordinate = Coordinate(pp, 0, 0, mesh.tp - 1)
    if config.checkpoint.scatter == "paper":
        coordinate = coordinate._replace(dp=writer_in_paper(mesh, coordinate))
    return coordinate


def limits_of(config: Config, links: Links, device: int, host: int, disk: int = 0) -> RankLimits:
    """Return the limits of a rank. `device`, `host` and `disk` are the limits in bytes that apply
    if the section `[offload]` sets no limit."""
    offload = config.offload
    return RankLimits(
        parse_bytes(offload.device_memory) or device,
        parse_bytes(offload.host_memory) or host,
        links,
        min(disk, parse_bytes(offload.disk_memory) or disk) if offload.disk else 0,
    )


def check_limits(decision: Decision, device: str) -> None:
    """Raise ConfigError if a placement does not fit. `device` is the type of the device."""
    memory, limits = decision.memory, decision.limits
    allowed = limits.device - reserve_of(limits.device, device)
    if memory.device > allowed or memory.host > limits.host:
        config, needs = decision.config, TierBytes(memory.device, memory.host)
        raise does_not_fit(config.offload.mode, config, needs, limits, device)


def host_limit(memory: int, ranks_per_node: int) -> int:
    """Return the host memory that the states of a rank may use without `offload.host_memory`.

    The limit leaves memory for Python and its libraries, the loader, messages and the page cache: 2
    GiB plus 5 % of a rank's share of the memory, but at most a quarter of this share. A process on
    a CPU uses 0.25 GB before its states are allocated; the libraries of accelerators add 1 to 2 GB.

    Args:
        memory: Bytes of a node that its processes can use.
        ranks_per_node: Number of ranks that share these bytes.
    """
    share = memory // ranks_per_node
    return share - min(share // 4, (2 << 30) + share // 20)
