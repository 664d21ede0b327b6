"""Bytes that the ranks of a run send along each axis in a step, and the shares of these bytes that
cross nodes and groups of nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from optimus.config import Config
from optimus.config.axes import AXES
from optimus.config.hardware import BYTES
from optimus.config.machine import load_machine
from optimus.data.batch import plan_batch
from optimus.distributed.mesh import Mesh
from optimus.errors import counted, refuse_if
from optimus.parallel.expert_load import arrivals
from optimus.parallel.pipeline.plan import stages_per_rank
from optimus.planner.allocation import Allocation
from optimus.planner.state_traffic import ENDS, StateTraffic
from optimus.planner.states import stages_of
from optimus.planner.topology import (
    ALGORITHMS,
    Algorithm,
    Crossing,
    Topology,
    all_reduce_crossing,
    best_order,
    first_without_group,
    groups_of_hosts,
    pipeline_crossing,
)


def axis_crossings(
    config: Config, mesh: Mesh, topology: Topology, algorithm: Algorithm
) -> dict[str, tuple[Crossing, bool]]:
    """Return the bytes that all ranks send over each axis or pair of axes.

    Axes are left out if their process groups have a single rank.

    Returns:
        A dict from axes, such as "dp x ep", to a pair (bytes, is_step). `is_step` is True if the
        bytes of a step are known. Otherwise, the bytes are those of an all-reduce of 1 byte or, for
        pp, of transfers of 1 byte. The shares of these bytes that cross nodes and groups are the
        same as in a step.

        The bytes of a step are known for pp if `train.seq_len` is set. They are known for gradients
        and parameters over dp and dp x ep, except in the cases that `_state_bytes` describes.
    """
    result = {"pp": _pipeline(config, mesh, topology)} if mesh.pp > 1 else {}
    for axes, halves in _state_bytes(config, mesh).items():
        # A reduce-scatter or an all-gather sends half of the bytes of an all-reduce.
        whole = [size / 2 for size in halves]
        names = tuple(axes.split(" x "))
        result[axes] = all_reduce_crossing(mesh, names, topology, algorithm, whole), True
    for axis in AXES:
        if axis not in result and getattr(mesh, axis) > 1:
            result[axis] = all_reduce_crossing(mesh, (axis,), topology, algorithm), False
    return result


def plan_crossings(config: Config, mesh: Mesh, topology: Topology) -> dict[str, Any]:
    """Return the shares of the bytes that cross nodes and groups, as a dict for JSON.

    Returns:
        A dict from axes to a dict. The value of its key "step_bytes" is the number of bytes that
        all ranks send in a step; None if it is not known. Its other keys are the algorithms. The
        value of an algorithm is a dict with two shares of the bytes, from 0 to 1: "nodes" is the
        share that is sent to other nodes, and "groups" is the share that is sent to other groups.
        "groups" is None if the groups are unknown.
    """
    result: dict[str, Any] = {}
    for algorithm in ALGORITHMS:
        for axes, (crossing, is_step) in axis_crossings(config, mesh, topology, algorithm).items():
            entry = result.setdefault(axes, {"step_bytes": None})
            if is_step and algorithm == "ring":
                entry["step_bytes"] = round(crossing.sent)
            groups = None if crossing.groups is None else crossing.groups / crossing.sent
            entry[algorithm] = {"nodes": crossing.nodes / crossing.sent, "groups": groups}
    return result


def topology_of(allocation: Allocation) -> Topology:
    """Return the nodes and groups of an allocation.

    Raises:
        ConfigError: `allocation.hosts` has more nodes of a group than the machine file permits.
    """
    levels = [level for level in load_machine(allocation.machine).levels if level.ranks]
    size, hosts = allocation.ranks_per_node, allocation.hosts
    groups = groups_of_hosts(hosts, allocation.host_group) if hosts else None
    topology = Topology(size, groups, tuple(level.ranks for level in levels))
    if groups and levels and levels[-1].ranks > size:
        group, count = Counter(groups).most_common(1)[0]
        most = levels[-1].ranks // size
        refuse_if(
            count > most,
            f"--hosts: the group of {hosts[groups.index(group)]} has {counted(count, 'host')}, but "
            f"a {levels[-1].name} of {allocation.machine} has {counted(most, 'node')}; correct the "
            f"list, or host_group or ranks of the level {levels[-1].name} in the machine file",
        )
    return topology


HostOrder = tuple[tuple[str, ...], Topology]
"""Hosts in another order, and their topology."""


def plan_topology(
    config: Config,
    mesh: Mesh,
    allocation: Allocation,
    topology: Topology,
    better: HostOrder | None,
) -> dict[str, Any]:
    """Return a dict for JSON about the bytes that ranks send to other nodes and groups in a step.

    Args:
        config: The run.
        mesh: Sizes of all axes.
        allocation: The nodes of the run.
        topology: The result of `topology_of`.
        better: The result of `better_order`.

    Returns:
        - `crossings`: the result of `plan_crossings`.
        - `num_groups`: the number of groups of nodes, or None if the groups are unknown.
        - `unknown`: only if the groups are unknown, the reason.
        - `gain`: only if the groups are known, a text about a better order of the hosts.
    """
    crossings, hosts = plan_crossings(config, mesh, topology), allocation.hosts
    if topology.groups is None:
        reason = "--hosts FILE names the nodes"
        if hosts:
            host = first_without_group(hosts, allocation.host_group)
            reason = (
                f"host names, such as {host}, do not contain the group; the step time assumes that "
                "consecutive ranks fill group after group"
            )
        return {"crossings": crossings, "num_groups": None, "unknown": reason}
    gain = "no better order of the hosts is known"
    if better is not None:
        before, after = (_group_bytes(config, mesh, each) for each in (topology, better[1]))
        # The axes whose bytes are not known count only if the known bytes are equal.
        old, new = next((b, a) for b, a in zip(before, after, strict=True) if a < b)
        gain = (
            f"another order of the hosts sends {100 * (1 - new / old):.0f} % fewer bytes across "
            "groups; --write-hosts FILE writes this order"
        )
        if topology.positions() is None:
            gain += "; the machine file has no level for groups, so the step time ignores groups"
    return {"crossings": crossings, "num_groups": len(set(topology.groups)), "gain": gain}


def better_order(
    config: Config, mesh: Mesh, allocation: Allocation, topology: Topology
) -> HostOrder | None:
    """Return the hosts of an allocation in the order of `best_order`. Return None if the groups are
    unknown, or if this order does not reduce `_group_bytes`."""
    groups = topology.groups
    if groups is None:
        return None
    hosts, ordered = best_order(mesh, allocation.hosts, groups, allocation.ranks_per_node)
    better = replace(topology, groups=ordered)
    before, after = (_group_bytes(config, mesh, each) for each in (topology, better))
    is_better = after != before and all(a <= b for a, b in zip(after, before, strict=True))
    return (tuple(hosts), better) if is_better else None


def _group_bytes(config: Config, mesh: Mesh, topology: Topology) -> tuple[float, float]:
    """Return two sums of the bytes that cross groups with ring collectives. The first sum has the
    bytes of a step over all axes for which these bytes are known or estimated. The second sum has
    the bytes of an all-reduce of 1 byte over each of the other axes."""
    crossings = axis_crossings(config, mesh, topology, "ring")
    for axis, sizes in _activation_bytes(config, mesh).items():
        crossings[axis] = all_reduce_crossing(mesh, (axis,), topology, "ring", sizes), True
    of_step = sum(crossing.groups or 0.0 for crossing, is_step in crossings.values() if is_step)
    others = sum(crossing.groups or 0.0 for crossing, is_step in crossings.values() if not is_step)
    return of_step, others


def _activation_bytes(config: Config, mesh: Mesh) -> dict[str, list[float]]:
    """Return a dict from "ep" and "tp" to a list with the size of a buffer for each pipeline rank.
    The size in bytes is an estimate: in a step, the collectives of activations and of their
    gradients over the axis together send as many bytes as an all-reduce of the buffer.

    Over ep, each MoE layer gathers and reduces the tokens of all ep ranks in the forward and in the
    backward; with `parallel.ep_dispatch` = "alltoall", only the tokens that have an expert on the
    rank. Over tp, each layer has two all-reduces in the forward and two in the backward.
    Recomputation is not included. The result is empty without `train.seq_len`.
    """
    train, model, ep = config.train, config.model, mesh.ep
    if not train.seq_len:
        return {}
    microbatches = plan_batch(train, mesh.num_data_ranks).microbatches_per_rank
    rows = microbatches * train.microbatch_size * train.seq_len
    size, stages = rows * model.hidden_size * BYTES[train.dtype], stages_of(config, mesh)
    layers = [[n for stage in stages[pp :: mesh.pp] for n in stage] for pp in range(mesh.pp)]
    result = {}
    if mesh.tp > 1:
        result["tp"] = [4.0 * size * len(of_rank) for of_rank in layers]
    if ep > 1 and model.sparse_layers:
        experts, k = model.experts_by_layer, model.num_experts_per_tok
        is_sparse = config.parallel.ep_dispatch == "alltoall"
        result["ep"] = [
            2.0 * size * ep * sum(arrivals(experts[n], k, ep) if is_sparse else 1.0 for n in sparse)
            for sparse in ([n for n in of_rank if experts[n]] for of_rank in layers)
        ]
    return result


def _pipeline(config: Config, mesh: Mesh, topology: Topology) -> tuple[Crossing, bool]:
    train, size = config.train, 1.0
    if train.seq_len:
        rows = train.microbatch_size * train.seq_len
        if config.parallel.sequence_parallel:
            rows //= mesh.tp
        microbatches = plan_batch(train, mesh.num_data_ranks).microbatches_per_rank
        size = microbatches * rows * config.model.hidden_size * BYTES[train.dtype]
    virtual = stages_per_rank(config, mesh.pp)
    return pipeline_crossing(mesh, virtual, topology, size), bool(train.seq_len)


def _state_bytes(config: Config, mesh: Mesh) -> dict[str, list[float]]:
    """Return the sizes of the buffers that reduce-scatters and all-gathers of gradients and
    parameters use in a step: a dict from axes to a list with the sum of the sizes in bytes for each
    pipeline rank. An all-reduce counts as a reduce-scatter and an all-gather.

    The result is empty with offloading. It is also empty if gradients are reduced for each
    microbatch and `train.seq_len` is not set, because the number of microbatches is then unknown.
    The axes tp and ep are left out, because most of their bytes are activations. In deterministic
    mode, the axes of gradients are left out, because an all-to-all sends its bytes over other links
    than an all-reduce.
    """
    optim, train = config.optim, config.train
    is_rounded = config.offload.rounds_gradients(train)
    is_each = optim.resident != "all" or train.deterministic or is_rounded
    if config.offload.mode != "off" or (is_each and not train.seq_len):
        return {}
    microbatches = 1
    if train.seq_len:
        microbatches = plan_batch(train, mesh.num_data_ranks).microbatches_per_rank
    traffic, stages = StateTraffic(config), stages_of(config, mesh)
    result: dict[str, list[float]] = {}
    unknown = {ENDS, "tp", "ep"}  # most bytes over tp and ep are activations
    for pp in range(mesh.pp):
        for sums in traffic.of_rank(config, mesh, stages, pp, microbatches):
            if sums.name == "all_to_all":
                unknown.add(sums.axis)
            halves = 2 if sums.name == "all_reduce" else 1
            of_axes = result.setdefault(sums.axis, [0.0] * mesh.pp)
            of_axes[pp] += halves * sums.repeats * sums.size_bytes
    return {axes: sizes for axes, sizes in result.items() if axes not in unknown}
