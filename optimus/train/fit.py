"""Check that a run fits in memory before its ranks start, and comparison of predicted and measured
memory and step time after its first updates.

`check_before_ranks` runs in the command that starts the ranks. If only a rank can determine its
device, the first rank makes the check, before the rendezvous. This module imports torch only in
functions that run on a rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from optimus.config import Config, TrainConfig
from optimus.config.machine import Machine, load_machine
from optimus.distributed.mesh import Mesh
from optimus.errors import ConfigError, one_line
from optimus.io import files
from optimus.planner.against import FIT_FILE, FIT_FORMAT, difference, read_fit, settings_key
from optimus.planner.fit import (
    Capacity,
    capacity_of,
    capacity_of_host,
    capacity_of_machine,
    check_fit,
    has_accelerator_files,
)
from optimus.resilience.supervision.attempt import read_attempt

if TYPE_CHECKING:
    from optimus.distributed.world import World
    from optimus.launch.environment import LaunchEnv
    from optimus.train.run_dir import RunDirectory

logger = logging.getLogger(__name__)

FIT_CHECKED = "OPTIMUS_FIT_CHECKED"
"""Environment variable of ranks. The command that starts them sets it after it has checked that the
run fits."""
FIRST_UPDATES, _FEWEST_UPDATES, _WARM_UP = 5, 3, 2
"""The comparison follows after `FIRST_UPDATES` updates of a command, or after its last update if it
has fewer, but at least `_FEWEST_UPDATES`. The measured step time is the median without the first
`_WARM_UP` updates."""


def capacity_before_ranks(
    train: TrainConfig, ranks_per_node: int, machine: Machine | None = None, is_node: bool = True
) -> Capacity | None:
    """Return the memory that the ranks of a run can use. Imports no torch.

    Args:
        train: Section of the run's configuration.
        ranks_per_node: Number of ranks of the run on a node.
        machine: Value of `--machine`, which has an effect if `train.machine` is not set and the
            file of the machine has a device.
        is_node: False if this machine, such as a login node, is not a node of the run.

    Returns:
        The memory; None if only a rank on a node can determine it.

    Raises:
        ConfigError: The file of `train.machine` has no device.
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
    """Check that a run fits in the memory `capacity`. Return False if `capacity` is None, so that a
    rank must make the check.

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
    """Check that a run fits, if the command that started this rank has not done so. Later attempts
    of a supervised run do not repeat the check.

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
    """Return the memory of `train.machine` or, if it is not set, of the device of the rank with the
    number `local_rank` on this node. Raises ConfigError as `pick_device`."""
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
    """On a CPU, memory of the process before its model was made; otherwise 0."""
    peak_bytes: int
    """Peak memory after the first updates, from `peak_memory_bytes`."""


class FirstUpdates:
    """Comparison of predicted and measured memory and step time after the first updates of a
    command. Every rank creates an object before its model, and calls `after_update`.

    The first rank logs one line and writes the values to the file `fit.json` of the run directory,
    which `optimus plan --against` reads. If the file already has the values of a run with the same
    settings, as after a restart, the comparison is left out.
    """

    def __init__(self, config: Config, mesh: Mesh, num_microbatches: int, world: World) -> None:
        """Measure the memory of the process.

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
        if world.device.type == "cpu":
            from optimus.platform import peak_memory_bytes

            self._process_bytes = peak_memory_bytes(world.device)

    def after_update(
        self, step: int, is_last: bool, seconds: float, directory: RunDirectory | None
    ) -> None:
        """Record the duration of an update. After the number of updates that `FIRST_UPDATES`
        explains, make the comparison. All ranks must call this method.

        Args:
            step: Number of the update.
            is_last: True if the command ends after this update.
            seconds: Duration of the update.
            directory: The run directory; None except on the first rank.
        """
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
        try:
            figures = self._compare(step, ranks) | {"settings": key}
        except Exception as error:  # a run must not end because of a prediction
            logger.warning(
                "cannot predict the memory of this run because of a bug in Optimus; training "
                "continues; please report: %s: %s",
                type(error).__name__,
                one_line(error),
            )
            return
        with contextlib.suppress(OSError):  # metrics are on the same disk and report its errors
            path = directory.path / FIT_FILE
            directory.workspace.write_bytes(path, files.checked_json(figures))
        logger.info(format_line(figures))

    def _compare(self, step: int, ranks: Sequence[_RankFigures]) -> dict[str, Any]:
        """Return the content of fit.json."""
        largest: dict[tuple[int, int], _RankFigures] = {}
        for figures in ranks:
            at = self._mesh.coordinate(figures.rank)
            known = largest.get((at.pp, at.tp))
            if known is None or figures.peak_bytes > known.peak_bytes:
                largest[at.pp, at.tp] = figures
        step_s, no_step = self._predicted_step()
        return {
            "format": FIT_FORMAT,
            "step": step,
            "device": self._world.device.type,
            "mesh": self._mesh._asdict(),
            "microbatches": self._num_microbatches,
            "ranks": [
                {
                    "pp": pp,
                    "tp": tp,
                    "process_bytes": figures.process_bytes,
                    "peak_bytes": figures.peak_bytes,
                }
                for (pp, tp), figures in sorted(largest.items())
            ],
            "first_rank_bytes": ranks[0].peak_bytes,
            "predicted_first_rank_bytes": self._predicted_bytes(),
            "step_s": statistics.median(self._seconds[_WARM_UP:]),
            "predicted_step_s": step_s,
            "no_predicted_step": no_step,
        }

    def _predicted_bytes(self) -> int:
        from optimus.planner.memory import rank_memory

        kind, first = self._world.device.type, self._mesh.coordinate(self._world.rank)
        memory = rank_memory(self._config, self._mesh, first, self._num_microbatches, kind)
        host = memory.host if kind == "cpu" else 0
        return self._process_bytes + memory.device + host

    def _predicted_step(self) -> tuple[float | None, str]:
        """Return the predicted seconds of a step and "", or None and the reason why there is no
        prediction."""
        from optimus.planner.step_plan import plan_step

        name = self._config.train.machine
        if not name:
            return None, "train.machine is not set"
        try:
            machine = load_machine(name, "train.machine")
            return plan_step(self._config, self._mesh, machine, name)["step_s"], ""
        except ConfigError as error:
            return None, str(error)


def _has_figures(directory: Path, key: str) -> bool:
    try:
        figures = read_fit(directory)
    except ConfigError as error:
        logger.warning("%s; it is replaced", error)
        return False
    return figures is not None and figures["settings"] == key


def format_line(figures: dict[str, Any]) -> str:
    """Return the log line that compares measured and predicted values. `figures` is the content of
    fit.json."""
    memory = _clause(
        figures["first_rank_bytes"] / 1e9, figures["predicted_first_rank_bytes"] / 1e9, "GB"
    )
    step = f"step {figures['step_s']:.4g} s, without a prediction ({figures['no_predicted_step']})"
    if figures["predicted_step_s"] is not None:
        step = f"step {_clause(figures['step_s'], figures['predicted_step_s'], 's')}"
    process = "the process of the first rank" if figures["device"] == "cpu" else "the first rank"
    return f"after update {figures['step']}: peak memory of {process} {memory}; {step}"


def _clause(measured: float, predicted: float, unit: str) -> str:
    return (
        f"{measured:.4g} {unit}, predicted {predicted:.4g} {unit} "
        f"({difference(predicted, measured)})"
    )
