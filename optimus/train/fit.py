"""Check before a run starts that the run fits in memory. After the first updates, compare the
predicted memory and step time with the measured values.

`check_before_ranks` runs in the command that starts the ranks. If this command cannot determine the
device of the ranks, the first rank makes the check instead, before the rendezvous. This module
imports torch only in functions that run on a rank.
"""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from optimus.config import Config, TrainConfig
from optimus.config.machine import Machine
from optimus.distributed.mesh import Mesh
from optimus.errors import ConfigError, reason_of
from optimus.io import files
from optimus.launch.environment import usable_memory
from optimus.planner.against import (
    FIT_FILE,
    FIT_FORMAT,
    difference,
    placement_of,
    read_fit,
    settings_key,
)
from optimus.planner.fit import (
    Capacity,
    capacity_of,
    capacity_of_host,
    capacity_of_machine,
    check_fit,
    has_accelerator_files,
)
from optimus.resilience.supervision.attempt import read_attempt
from optimus.train.prediction import Prediction

if TYPE_CHECKING:
    from optimus.distributed.world import World
    from optimus.launch.environment import LaunchEnv
    from optimus.train.run_dir import RunDirectory

logger = logging.getLogger(__name__)

FIT_CHECKED = "OPTIMUS_FIT_CHECKED"
"""Environment variable of ranks. The command that starts the ranks sets the variable after it has
checked that the run fits."""
FIRST_UPDATES, _FEWEST_UPDATES, _WARM_UP = 5, 3, 2
"""Predicted and measured values are compared after `FIRST_UPDATES` updates of a command. If the
command ends earlier, the values are compared after its last update, provided that the command has
run at least `_FEWEST_UPDATES` updates. The measured step time is the median without the first
`_WARM_UP` updates."""
_ENDED = "the run ended before the prediction was complete"
_PREDICTION_BYTES = 1_000_000_000
"""Bytes that ranks on a CPU must leave free on their node for the process of the prediction. This
process needs less than half of these bytes."""


def capacity_before_ranks(
    train: TrainConfig, ranks_per_node: int, machine: Machine | None = None, is_node: bool = True
) -> Capacity | None:
    """Return the memory that the ranks of a run can use. This function imports no torch.

    Args:
        train: The section `[train]` of the run's configuration.
        ranks_per_node: Number of ranks of the run on a node.
        machine: Value of `--machine`, which has an effect if `train.machine` is not set and the
            file of the machine has a device.
        is_node: False if this machine, such as a login node, is not a node of the run.

    Returns:
        The memory; None if only a rank on a node can determine the memory.

    Raises:
        ConfigError: The machine `train.machine` does not exist, or its file has no device.
    """
    if train.machine:
        return capacity_of_machine(train.machine, ranks_per_node)
    if machine is not None and machine.device is not None:
        return capacity_of(machine, ranks_per_node)
    if not is_node or train.device not in ("auto", "cpu"):
        return None
    if train.device == "auto" and has_accelerator_files():
        return None
    return capacity_of_host(ranks_per_node)


def check_before_ranks(
    config: Config, mesh: Mesh, num_microbatches: int, capacity: Capacity | None
) -> bool:
    """Check that a run fits in the memory `capacity`, unless `train.fit_check` is "off". Return
    False if the check was not made because `capacity` is None. A rank must then make the check.
    Otherwise return True.

    Raises:
        ConfigError: The run cannot fit.
    """
    if config.train.fit_check != "off":
        if capacity is None:
            return False
        check_fit(config, mesh, num_microbatches, capacity)
    return True


def check_on_first_rank(
    config: Config, mesh: Mesh, num_microbatches: int, launch: LaunchEnv
) -> None:
    """Check that a run fits, unless the command that started this rank has made the check. Later
    attempts of a supervised run do not repeat the check.

    Raises:
        ConfigError: The run cannot fit, or this rank has no device of the type `train.device`.
    """
    attempt = read_attempt()
    if FIT_CHECKED in os.environ or (attempt is not None and attempt.number > 1):
        return
    if config.train.fit_check == "off":
        return
    capacity = capacity_of_rank(config.train, launch.local_rank, launch.local_world_size)
    check_fit(config, mesh, num_microbatches, capacity)


def capacity_of_rank(train: TrainConfig, local_rank: int, ranks_per_node: int) -> Capacity:
    """Return the memory of the machine `train.machine`. If this setting is empty, return the memory
    of the device of a rank on this node; `local_rank` is the number of the rank on the node. Raises
    ConfigError if the machine or the device does not exist."""
    from optimus.platform import device_memory, pick_device

    if train.machine:
        return capacity_of_machine(train.machine, ranks_per_node)
    device = pick_device(local_rank, train.device)
    if device.type == "cpu":
        return capacity_of_host(ranks_per_node)
    return Capacity(device_memory(device), f"the {device.type} device of the first rank")


class _RankFigures(NamedTuple):
    """Measured memory of a rank."""

    rank: int
    process_bytes: int
    """On a CPU, bytes of the process before its model was created; otherwise 0."""
    peak_bytes: int
    """Peak memory in bytes up to the end of the first updates (`peak_memory_bytes`)."""


class FirstUpdates:
    """Comparison of predicted and measured memory and step time after the first updates of a
    command. Every rank creates this object before its model, and calls `after_update` and `close`.

    The first rank writes the measured values to fit.json in the run directory, and starts a
    `Prediction`. When the prediction is complete, the first rank logs one line. If fit.json already
    has the values of a run with the same settings, as after a restart, the comparison is left out.
    The command `optimus plan --against` also reads fit.json.
    """

    def __init__(self, config: Config, mesh: Mesh, num_microbatches: int, world: World) -> None:
        """On a CPU, measure the memory of the process before the model is created.

        Args:
            config: The run's configuration, with the placement of the rank's states.
            mesh: Sizes of the axes.
            num_microbatches: Number of microbatches of a rank in a step.
            world: The ranks.
        """
        self._config, self._mesh, self._world = config, mesh, world
        self._num_microbatches = num_microbatches
        self._seconds: list[float] = []
        self._is_done = config.train.fit_check == "off"
        self._process_bytes = 0
        self._figures: dict[str, Any] = {}
        self._prediction: Prediction | None = None
        if world.device.type == "cpu":
            from optimus.platform import peak_memory_bytes

            self._process_bytes = peak_memory_bytes(world.device)

    def after_update(
        self, step: int, is_last: bool, seconds: float, directory: RunDirectory | None
    ) -> None:
        """Record the duration of an update. After the last of the first updates (see
        `FIRST_UPDATES`), measure the memory and start the prediction. All ranks must call this
        method.

        Args:
            step: Number of the update.
            is_last: True if the command ends after this update.
            seconds: Duration of the update in seconds.
            directory: The run directory; None except on the first rank.
        """
        if self._prediction is not None and (result := self._prediction.result()) is not None:
            self._prediction = None
            logger.info(format_line(self._figures, result))
        if self._is_done:
            return
        self._seconds.append(seconds)
        if len(self._seconds) < (_FEWEST_UPDATES if is_last else FIRST_UPDATES):
            return
        self._is_done = True
        from optimus.distributed.collectives import all_gather_objects
        from optimus.platform import peak_memory_bytes

        world = self._world
        measured = _RankFigures(world.rank, self._process_bytes, peak_memory_bytes(world.device))
        ranks = all_gather_objects(measured, world.everyone, _RankFigures)
        if directory is None:
            return
        key = settings_key(self._config, self._mesh)
        if _has_figures(directory.path, key):
            return
        self._figures = self._measured(step, ranks) | {"settings": key}
        try:
            path = directory.path / FIT_FILE
            directory.workspace.write_bytes(path, files.checked_json(self._figures))
            problem = _ENDED if is_last else self._lacking_memory(ranks)
            if not problem:
                self._prediction = Prediction(directory.path)
        except OSError as error:
            problem = reason_of(error)
        if problem:
            logger.info(format_line(self._figures, {"problem": problem}))

    def close(self) -> None:
        """End the prediction if it is not complete."""
        if self._prediction is not None:
            self._prediction.close()
            self._prediction = None
            logger.info(format_line(self._figures, {"problem": _ENDED}))

    def _measured(self, step: int, ranks: Sequence[_RankFigures]) -> dict[str, Any]:
        """Return the content of fit.json."""
        largest: dict[tuple[int, int], _RankFigures] = {}
        for figures in ranks:
            at = self._mesh.coordinate(figures.rank)
            known = largest.get((at.pp, at.tp))
            if known is None or figures.peak_bytes > known.peak_bytes:
                largest[at.pp, at.tp] = figures
        return {
            "format": FIT_FORMAT,
            "step": step,
            "device": self._world.device.type,
            "mesh": self._mesh._asdict(),
            "microbatches": self._num_microbatches,
            "placement": placement_of(self._config),
            "ranks": [
                {
                    "pp": pp,
                    "tp": tp,
                    "process_bytes": figures.process_bytes,
                    "peak_bytes": figures.peak_bytes,
                }
                for (pp, tp), figures in sorted(largest.items())
            ],
            "step_s": statistics.median(self._seconds[_WARM_UP:]),
        }

    def _lacking_memory(self, ranks: Sequence[_RankFigures]) -> str:
        """Return a text with the problem if ranks on a CPU leave too little memory for the process
        of the prediction, otherwise ""."""
        if self._world.device.type != "cpu":
            return ""
        on_node = self._world.launch.local_world_size * max(rank.peak_bytes for rank in ranks)
        return "" if usable_memory() - on_node > _PREDICTION_BYTES else "too little memory is left"


def _has_figures(directory: Path, key: str) -> bool:
    try:
        figures = read_fit(directory)
    except ConfigError as error:
        logger.warning("%s; the file is replaced", error)
        return False
    return figures is not None and figures["settings"] == key


def format_line(figures: dict[str, Any], prediction: dict[str, Any]) -> str:
    """Return the log line that compares measured and predicted values. `figures` is the content of
    fit.json, and `prediction` the result of a `Prediction`."""
    at = [f"{axis} 0" for axis in ("pp", "tp") if figures["mesh"][axis] > 1]
    rank = f"the fullest rank{' of ' if at else ''}{', '.join(at)}"
    process = f"the process of {rank}" if figures["device"] == "cpu" else rank
    memory = _clause(
        figures["ranks"][0]["peak_bytes"] / 1e9, prediction.get("bytes", 0) / 1e9, "GB"
    )
    step = _clause(figures["step_s"], prediction.get("step_s"), "s")
    if prediction.get("no_step"):
        step += f", without a prediction ({prediction['no_step']})"
    line = f"after update {figures['step']}: peak memory of {process} {memory}; step {step}"
    if problem := prediction.get("problem"):
        line += f"; no prediction ({problem}); `optimus plan CONFIG --against RUN_DIR` makes it"
    return line


def _clause(measured: float, predicted: float | None, unit: str) -> str:
    text = f"{measured:.4g} {unit}"
    if predicted:
        text += f", predicted {predicted:.4g} {unit} ({difference(predicted, measured)})"
    return text
