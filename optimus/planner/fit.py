"""Check that the ranks of a run fit in memory, before the ranks start.

A run is refused if a lower bound of its memory exceeds the capacity, so that every run that fits
can start. `least_bytes` documents the bound. If only the memory that `optimus plan` predicts
exceeds the capacity, a warning is logged. The prediction takes seconds. It is therefore computed
only if an upper limit of the prediction, which is fast to compute, exceeds the capacity.

This module imports torch only for the prediction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from optimus.config import Config
from optimus.config.hardware import BYTES
from optimus.config.machine import Machine, load_machine
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.errors import ConfigError, counted, one_line, refuse_if
from optimus.launch.environment import usable_memory
from optimus.parallel.pipeline.actions import Kind
from optimus.parallel.pipeline.plan import schedule_of
from optimus.planner.states import StateSizes, stages_of

logger = logging.getLogger(__name__)

_GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dri", "/dev/dxg", "/dev/kfd")
"""Files that the drivers of accelerators create. If none of them exists, torch finds no
accelerator."""
_PROCESS_BYTES = 400_000_000
"""Upper estimate of the bytes that a rank on a CPU needs in addition to its tensors. Runs of tiny
models need 0.29 to 0.33 GB; builds of torch for accelerators have larger libraries. Only the
prediction and the upper limit include this estimate, not the lower bound that refuses a run."""


@dataclass(frozen=True)
class Capacity:
    """Memory for the tensors of ranks."""

    num_bytes: int
    name: str
    """Phrase for messages, such as `the cuda device of the first rank`."""
    ranks: int = 1
    """Number of ranks that share the memory. These ranks have consecutive numbers."""
    kind: Literal["device", "host"] = "device"
    """`host` if offloaded states use the same memory, as on a CPU; `device` otherwise."""


def capacity_of(machine: Machine, ranks_on_node: int) -> Capacity:
    """Return the memory that the ranks of a run have on a machine.

    Args:
        machine: A machine whose file has a device.
        ranks_on_node: Number of ranks of the run on a node. On a CPU, they share the memory.
    """
    device = machine.device
    assert device is not None, "the machine has no device"
    size, name = device.memory_bytes.value, f"the device {device.name!r}"
    if not device.threads:
        return Capacity(int(size), name)
    # In a machine file for a CPU, `memory_bytes` is the memory of a node divided by the number of
    # ranks with which `optimus bench machine` measured.
    node = f"a node with {name}"
    return Capacity(int(size * machine.ranks_per_node), node, ranks_on_node, "host")


def capacity_of_machine(name: str, ranks_on_node: int) -> Capacity:
    """Return the memory of the ranks of a run on a machine.

    Args:
        name: Value of `train.machine`, as for `load_machine`.
        ranks_on_node: As for `capacity_of`.

    Raises:
        ConfigError: The machine does not exist, or the file of the machine has no device.
    """
    machine = load_machine(name, "train.machine")
    if machine.device is None:
        raise ConfigError(
            f"train.machine = {name!r}: the file has no table [device]; write it with `optimus "
            "bench machine --out FILE`, or select another machine"
        )
    return capacity_of(machine, ranks_on_node)


def capacity_of_host(ranks: int) -> Capacity:
    """Return the memory that `ranks` ranks share if they run on the CPU of this machine: the memory
    of the machine or, if it is smaller, the limit of this process's control group."""
    return Capacity(usable_memory(), "this machine", ranks, "host")


def has_accelerator_files() -> bool:
    """Return False if this machine certainly has no accelerator, and True otherwise. This function
    does not import torch."""
    return any(Path(path).exists() for path in _GPU_FILES)


def least_bytes(config: Config, mesh: Mesh, num_microbatches: int, kind: str) -> _Bytes:
    """Return a function from a coordinate to a lower bound of the bytes of its rank.

    The bound is the sum of

    - the exact bytes of the model states that are allocated between steps (`StateSizes`), without
      the gathered parameters of optim.resident = "cache". Offloading has two exceptions. If `kind`
      is "host", only parameters, masters and moments are counted; with offload.disk, only
      parameters. If `kind` is "device" and offload.mode is "auto", no states are counted, because a
      placement can have all states on the host;
    - the bytes of the inputs of all layers, for the largest number of microbatches that are in
      progress at the same time. Backward needs the input of each layer even if all other
      activations are recomputed. With optim.frozen, the inputs are left out, because layers before
      the first trained parameter have no backward.

    The states are allocated throughout a step, so a rank needs at least the sum of states and
    inputs.

    Args:
        config: The run, with `train.seq_len`.
        mesh: Sizes of the axes.
        num_microbatches: Number of microbatches of a rank in a step.
        kind: `Capacity.kind`.

    Raises:
        ConfigError: As `stages_of`.
    """
    offload, stages = config.offload, stages_of(config, mesh)
    if offload.mode == "auto":  # parameters on the host are divided over the shard group
        offload = offload.model_copy(update={"host_share": 1.0})
    states = StateSizes(config.model_copy(update={"offload": offload}))
    inputs = _layer_inputs(config, mesh, stages, num_microbatches)

    def least(coordinate: Coordinate) -> int:
        sizes = states.of_rank(mesh, stages, coordinate).sizes
        size = sizes["total"] - sizes["cache"]
        if config.offload.mode != "off" and kind == "host":
            size = sizes["parameters"]
            if not offload.disk:
                size += sizes["masters"] + sizes["moments"]
        elif config.offload.mode == "auto":
            size = 0
        return size + inputs(coordinate.pp)

    return least


_Bytes = Callable[[Coordinate], int]


def _layer_inputs(
    config: Config, mesh: Mesh, stages: tuple[range, ...], num_microbatches: int
) -> Callable[[int], int]:
    """Return a function from a pp index to the largest number of bytes of layer inputs that a rank
    with this index keeps at the same time."""
    train = config.train
    if config.optim.frozen or not train.seq_len:
        return lambda pp: 0
    rows = train.seq_len // (mesh.tp if config.parallel.sequence_parallel else 1)
    size = train.microbatch_size * rows * config.model.hidden_size * BYTES[train.dtype]
    is_gpipe = config.offload.order == "layer" or (
        config.parallel.schedule == "gpipe" and len(stages) > 1
    )
    # The number of microbatches in progress reaches its maximum within the first 2 * pp
    # microbatches, except with gpipe, which keeps all microbatches.
    schedule = schedule_of(config, mesh, min(num_microbatches, 2 * mesh.pp))

    def most(pp: int) -> int:
        if is_gpipe:
            return size * num_microbatches * sum(map(len, stages[pp :: mesh.pp]))
        live = largest = 0
        for action in schedule.ranks[pp]:
            if action.kind is Kind.F:
                live += len(stages[action.stage])
                largest = max(largest, live)
            elif action.kind in (Kind.B, Kind.I):
                live -= len(stages[action.stage])
        return size * largest

    return most


def most_bytes(config: Config, mesh: Mesh, num_microbatches: int) -> _Bytes:
    """Return a function from a coordinate to an upper limit of the bytes that `rank_memory`
    predicts for its rank. The limit is fast to compute. The arguments are those of
    `least_bytes`."""
    model, train, stages = config.model, config.train, stages_of(config, mesh)
    states = StateSizes(config)
    optim = config.optim.model_copy(update={"resident": "all", "sharding": "none"})
    whole = StateSizes(config.model_copy(update={"optim": optim}))
    tokens = train.microbatch_size * train.seq_len
    is_gpipe = config.offload.order == "layer" or config.parallel.schedule == "gpipe"
    kept = num_microbatches if is_gpipe else min(num_microbatches, 2 * len(stages) - 1)
    width = max(1, model.num_experts_per_tok) * model.intermediate_size
    width = max(width, model.dense_intermediate_size) + model.hidden_size
    experts = max(model.experts_by_layer, default=0)
    # With ep, a rank can receive the tokens of all ep ranks.
    layer = 4 * tokens * mesh.ep * (_LAYER_TENSORS * width + _EXPERT_VALUES * experts)
    head = 4 * tokens * _HEAD_TENSORS * (model.vocab_size + model.hidden_size)

    def most(coordinate: Coordinate) -> int:
        sizes = states.of_rank(mesh, stages, coordinate).sizes
        unsharded = whole.of_rank(mesh, stages, coordinate).sizes
        layers = sum(map(len, stages[coordinate.pp :: mesh.pp]))
        size = sizes["total"] + unsharded["gradients"] + unsharded["parameters"]
        if config.offload.mode != "off":
            size += unsharded["total"]
        size += kept * layers * layer + (kept if is_gpipe else 1) * head
        return _PROCESS_BYTES + size + num_microbatches * tokens * _TOKEN_BYTES

    return most


_LAYER_TENSORS, _EXPERT_VALUES, _HEAD_TENSORS, _TOKEN_BYTES = 12, 8, 6, 32
"""Upper limits of the memory that `most_bytes` counts for a token: (1) the number of fp32 tensors
that a layer keeps, each with as many values as the hidden size plus the intermediate sizes of all
chosen experts; (2) the number of fp32 values that a layer keeps for each expert; (3) the number of
fp32 tensors of the head, each with as many values as the vocabulary size plus the hidden size; and
(4) the bytes of inputs and loss terms."""


def check_fit(
    config: Config,
    mesh: Mesh,
    num_microbatches: int,
    capacity: Capacity,
    run_name: str = "the run",
) -> None:
    """Check that each rank of a run fits in its memory. `train.fit_check` = "off" disables the
    check, and "warn" replaces the error with a warning.

    Log a warning if the lower bound fits but the prediction exceeds the memory.

    Args:
        config: The run.
        mesh: Sizes of the axes.
        num_microbatches: Number of microbatches of a rank in a step.
        capacity: The memory.
        run_name: Phrase for messages, such as `the run`.

    Raises:
        ConfigError: The lower bound of `least_bytes` exceeds the memory, and `train.fit_check` is
            "refuse".
    """
    if config.train.fit_check == "off":
        return
    settings = config, mesh, num_microbatches
    try:
        refuse_if_too_large(*settings, capacity, run_name)
    except ConfigError as error:
        if config.train.fit_check == "refuse":
            raise
        logger.warning(one_line(error))
        return
    if _on_fullest(mesh, capacity, most_bytes(*settings)) <= capacity.num_bytes:
        return
    if (predicted := predicted_bytes(*settings, capacity)) > capacity.num_bytes:
        logger.warning(
            "%s possibly does not fit: %s; `optimus plan CONFIG --machine NAME` lists layouts that "
            "fit",
            run_name,
            _message(predicted, capacity, "a predicted "),
        )


def refuse_if_too_large(
    config: Config,
    mesh: Mesh,
    num_microbatches: int,
    capacity: Capacity,
    run_name: str = "the run",
) -> None:
    """Raise ConfigError if the lower bound of `least_bytes` exceeds the memory. The arguments are
    those of `check_fit`."""
    bound = least_bytes(config, mesh, num_microbatches, capacity.kind)
    least = _on_fullest(mesh, capacity, bound)
    refuse_if(
        least > capacity.num_bytes,
        f"{run_name} cannot fit: {_message(least, capacity, 'at least ')}; use more ranks or "
        "another layout of `optimus plan CONFIG --machine NAME`, or set train.fit_check = 'warn' "
        "to start it anyway",
    )


def predicted_bytes(config: Config, mesh: Mesh, num_microbatches: int, capacity: Capacity) -> int:
    """Return the predicted bytes of the ranks that share a memory: the bytes of the fullest rank,
    times the number of ranks that share the memory. Return 0 with offload.mode = "auto", since the
    run then chooses a placement that fits."""
    if config.offload.mode == "auto":
        return 0
    from optimus.planner.memory import rank_memory  # imports torch
    from optimus.planner.offload import largest_rank

    device = "cpu" if capacity.kind == "host" else "cuda"
    ends = [largest_rank(config, mesh, pp) for pp in dict.fromkeys((0, mesh.pp - 1))]
    ranks = [rank_memory(config, mesh, end, num_microbatches, device) for end in ends]
    on_host = capacity.kind == "host"
    sizes = [rank.device + (rank.host + _PROCESS_BYTES if on_host else 0) for rank in ranks]
    return capacity.ranks * max(sizes)


def _on_fullest(mesh: Mesh, capacity: Capacity, bytes_of: _Bytes) -> int:
    """Return the bytes of the fullest memory: `bytes_of`, added up over the ranks that share the
    memory."""
    known: dict[tuple[int, int], int] = {}

    def cached(coordinate: Coordinate) -> int:
        # Ranks that differ only along dp and ep have the same bytes.
        key = coordinate.pp, coordinate.tp
        if key not in known:
            known[key] = bytes_of(coordinate)
        return known[key]

    if capacity.ranks == 1:
        return max(
            cached(Coordinate(pp, 0, 0, tp)) for pp in range(mesh.pp) for tp in range(mesh.tp)
        )
    ranks = range(mesh.world_size)
    nodes = [ranks[first : first + capacity.ranks] for first in ranks[:: capacity.ranks]]
    return max(sum(cached(mesh.coordinate(rank)) for rank in node) for node in nodes)


def _message(needed: int, capacity: Capacity, quality: str) -> str:
    missing = counted(needed - capacity.num_bytes, "byte")
    ranks = "a rank needs" if capacity.ranks == 1 else f"{counted(capacity.ranks, 'rank')} need"
    has = f"{capacity.name} has ({capacity.num_bytes:,})"
    return f"{ranks} {quality}{counted(needed, 'byte')} of memory, {missing} more than {has}"
