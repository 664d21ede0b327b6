"""Time of a whole run with its checkpoints and failures, for `optimus plan`.

A full checkpoint has the fp32 master weights and moments of all parameters. A model-only checkpoint
has the weights in `optimus.checkpoint.weights.DTYPE`. All nodes together write at the lower of two
rates: the rate of the first file system in the machine file, and the rate at which all ranks
together send through the outermost level of the network. Without checkpoint.async_save, the
training stops while a checkpoint is written. With checkpoint.async_save, the training stops only
while states are copied to host memory; if a save takes longer than the interval, the training also
stops until the save is complete; and after a failure, the training during the last write is also
lost.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from optimus.chunks.options import options_of
from optimus.config import Config
from optimus.config.machine import Machine
from optimus.distributed.mesh import Mesh
from optimus.model.shapes import model_shapes
from optimus.planner.goodput import best_interval, goodput
from optimus.planner.states import plan_ranks

_FULL_BYTES, _FROZEN_BYTES, _MODEL_BYTES = 12, 4, 2
"""Bytes of a trained parameter and of a frozen parameter in a full checkpoint, and of any parameter
in a model-only checkpoint."""

_FOR_GOODPUT = ("storage.0.write", "failures_per_node_day")
"""Keys of the machine file that are necessary to compute the goodput."""


class Save(NamedTuple):
    """Size and times of a full or a model-only checkpoint."""

    size_bytes: int
    write_s: float
    """Seconds until the checkpoint is durable."""
    stop_s: float
    """Seconds for which the save stops the training."""


def checkpoint_bytes(config: Config) -> tuple[int, int]:
    """Return a pair: the bytes of a full checkpoint and of a model-only checkpoint."""
    full = model = 0
    for name, shape in model_shapes(config.model).items():
        size = math.prod(shape)
        full += size * (_FROZEN_BYTES if options_of(name, config.optim).frozen else _FULL_BYTES)
        model += size * _MODEL_BYTES
    return full, model


def plan_run(
    config: Config, mesh: Mesh, machine: Machine, nodes: int, step_s: float
) -> dict[str, Any]:
    """Return the time that checkpoints and failures add to a run, and the goodput, as a dict for
    JSON.

    Args:
        config: The run.
        mesh: Sizes of all axes.
        machine: The machine.
        nodes: Number of nodes of the run.
        step_s: Seconds of a step without checkpoints.

    Returns:
        - `interval`: number of steps between full checkpoints; 0 if the run saves none.
        - `storage`: name of the file system, or None. `checkpoint_bytes`, `checkpoint_write_s` and
          `checkpoint_stop_s`: the fields of `Save` for a full checkpoint. `model_checkpoint_bytes`
          and so on: the same for a model-only checkpoint, only with checkpoint.model_interval.
        - `checkpoint_s`: mean seconds per step for which checkpoints stop the training; None if the
          machine file has no rate of storage.
        - `goodput`: share of the time that is spent on training whose result is kept, with the
          given `checkpoint.interval`. `best_interval`: the number of steps between full checkpoints
          that gives the largest goodput. `best_goodput`: this goodput. All three are None if the
          run saves no full checkpoint, or if the machine file has no rate of storage or no rate of
          failures.
        - `work_share`: equal to `goodput`; if `goodput` is None, the share of the time in which no
          checkpoint stops the training.
        - `run_s`, `node_hours`: only with train.max_steps. The seconds and node-hours of the whole
          run, with the time lost to checkpoints and failures, without evaluation.
        - `missing_of_run`: keys of values that the machine file lacks. Results that need such a
          value are None or leave out the delay that the value determines.
    """
    checkpoint, missing = config.checkpoint, list[str]()
    steps = config.train.max_steps
    interval = checkpoint.interval or (steps if checkpoint.at_end else 0)
    result: dict[str, Any] = {"storage": None, "checkpoint_s": None, "interval": interval}
    result |= {"goodput": None, "best_interval": None, "best_goodput": None}
    full = model = Save(0, 0.0, 0.0)
    models_s = 0.0
    if machine.storage:
        result["storage"] = machine.storage[0].name
        full, model = _saves(config, mesh, machine, nodes, step_s, missing)
        result |= {f"checkpoint_{key}": value for key, value in _named(full).items()}
        if checkpoint.model_interval:
            models_s = model.stop_s / checkpoint.model_interval
            result |= {f"model_checkpoint_{key}": value for key, value in _named(model).items()}
        result["checkpoint_s"] = models_s + (full.stop_s / interval if interval else 0.0)
    else:
        missing.append(_FOR_GOODPUT[0])
    share = step_s / (step_s + (result["checkpoint_s"] or 0.0))
    if machine.failures_per_node_day is None:
        missing.append(_FOR_GOODPUT[1])
    elif machine.storage and interval:
        restart_s = _restart_s(config, machine, full, missing)
        rate = nodes * machine.failures_per_node_day.value / 86400

        def of_interval(count: int) -> float:
            stop_s = full.stop_s + count * models_s
            return goodput(count * step_s, stop_s, restart_s, rate)

        best_s = best_interval(full.stop_s, restart_s, rate)
        best = max(1, round(min(best_s / (step_s + models_s), steps or math.inf)))
        share = result["goodput"] = of_interval(interval)
        result |= {"best_interval": best, "best_goodput": of_interval(best)}
    result["work_share"] = share
    if steps and share:
        result["run_s"] = steps * step_s / share
        result["node_hours"] = nodes * result["run_s"] / 3600
    return result | {"missing_of_run": missing}


def _named(save: Save) -> dict[str, float]:
    return {"bytes": save.size_bytes, "write_s": save.write_s, "stop_s": save.stop_s}


def _saves(
    config: Config, mesh: Mesh, machine: Machine, nodes: int, step_s: float, missing: list[str]
) -> tuple[Save, Save]:
    """Return a `Save` for a full checkpoint and a `Save` for a model-only checkpoint. Add to
    `missing` the keys of values that the machine file lacks."""
    checkpoint, storage = config.checkpoint, machine.storage[0]
    sizes = checkpoint_bytes(config)
    rate = storage.write.value
    ranks = machine.ranks_per_node
    if machine.levels and not 0 < machine.levels[-1].ranks <= ranks:  # a network between nodes
        rate = min(rate, nodes * ranks * machine.levels[-1].rate)
    writes_s = [size / rate for size in sizes]
    if not checkpoint.async_save:
        full, model = (Save(n, s, s) for n, s in zip(sizes, writes_s, strict=True))
        return full, model
    staging = max(rank["staging"] for _, rank in plan_ranks(config, mesh))
    copied = sum(sizes) if checkpoint.model_interval else sizes[0]
    links = machine.links
    if links is None:
        missing.append("links.to_host")
    saves = []
    intervals = checkpoint.interval, checkpoint.model_interval
    for size, write_s, count in zip(sizes, writes_s, intervals, strict=True):
        copy_s = 0.0 if links is None else staging * size / copied / links.to_host
        late_s = max(0.0, write_s - count * step_s) if count else 0.0
        saves.append(Save(size, write_s, copy_s + late_s))
    return saves[0], saves[1]


def _restart_s(config: Config, machine: Machine, full: Save, missing: list[str]) -> float:
    """Return the seconds from a failure to the step that follows the last durable checkpoint. Add
    to `missing` the keys of values that the machine file lacks."""
    is_set = "heartbeat_s" in config.resilience.model_fields_set
    seconds = config.resilience.heartbeat_s if is_set else machine.heartbeat_s
    if config.checkpoint.async_save:
        seconds += full.write_s
    read = machine.storage[0].read
    if read is None:
        missing.append("storage.0.read")
    else:
        seconds += full.size_bytes / read.value
    if machine.restart_s is None:
        missing.append("restart_s")
    else:
        seconds += machine.restart_s.value
    return seconds


def _duration_text(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:,.4g} {unit}"
    return f"{seconds:,.4g} s"


def run_lines(result: dict[str, Any], is_one_replica: bool = False) -> list[tuple[str, str]]:
    """Return the result of `plan_run` as pairs (name, value) for a table. Node-hours are left out
    if the plan is for one replica, because the run can have more nodes."""
    lines = []
    for key, name in (("", "full checkpoint"), ("model_", "model-only checkpoint")):
        if f"{key}checkpoint_bytes" in result:
            size, write_s, stop_s = (
                result[f"{key}checkpoint_{figure}"] for figure in ("bytes", "write_s", "stop_s")
            )
            lines.append(
                (
                    name,
                    f"{size / 1e9:,.4g} GB in {write_s:,.3g} s on {result['storage']}, of which "
                    f"the training stops for {stop_s:,.3g} s",
                )
            )
    if result["goodput"] is not None:
        lines.append(
            (
                "goodput",
                f"{result['goodput']:.2%} with checkpoint.interval = {result['interval']}; best: "
                f"{result['best_goodput']:.2%} with {result['best_interval']}",
            )
        )
    elif unknown := [key for key in _FOR_GOODPUT if key in result["missing_of_run"]]:
        lines.append(("goodput", f"unknown: {', '.join(unknown)} not in the machine file"))
    if "node_hours" in result:
        text = _duration_text(result["run_s"])
        if not is_one_replica:
            text += f", {result['node_hours']:,.4g} node-hours"
        lines.append(("whole run", text))
    if result["missing_of_run"]:
        names = ", ".join(result["missing_of_run"])
        lines.append(("not in the machine file", f"{names}: their delays are not included"))
    return lines
