"""Loads of the experts of a run, from its file expert_load.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from optimus.config import ModelConfig, load_config
from optimus.errors import ConfigError, DataError
from optimus.observe.metrics import metrics_paths, read_lines
from optimus.parallel.expert_load import rank_imbalances


class StepLoad(NamedTuple):
    """Loads of the ep ranks in an update, over all microbatches and all groups of ep ranks."""

    step: int
    imbalances: dict[int, list[float]]
    """For each MoE layer, the rows that the experts of each ep rank have computed, divided by the
    mean over the ep ranks. A token is a row for each of its experts."""

    @property
    def fullest(self) -> dict[int, float]:
        """The largest imbalance of an ep rank in each MoE layer."""
        return {layer: max(ranks) for layer, ranks in self.imbalances.items()}

    @property
    def mean(self) -> float:
        """The mean of `fullest` over the layers. The time of the experts in a step is proportional
        to it."""
        return sum(self.fullest.values()) / len(self.imbalances)


def read_loads(run_dir: str, model: ModelConfig, ep: int) -> list[StepLoad]:
    """Return the loads of each update in a run's expert_load.jsonl, sorted by `mean`.

    Args:
        run_dir: The run directory.
        model: Model of the plan. The run must have the same model.
        ep: Number of ep ranks of the plan, which may differ from that of the run.

    Raises:
        ConfigError: The run has another model, or its file is missing or damaged. An incomplete
            last line, which a killed run can leave, is ignored.
    """
    option, path = f"--load {run_dir}", metrics_paths(Path(run_dir), "expert_load")[0]
    remedy = "give the run directory of a run of this model"
    _check_model(option, Path(run_dir) / "config.toml", model, remedy)
    try:
        lines = read_lines(path)
    except DataError as error:
        raise ConfigError(f"{option}: {error}") from None
    if not lines:
        raise ConfigError(
            f"{option}: {path.name} is missing or empty; run with observe.expert_load_interval "
            "above 0, or give another run"
        )
    steps: dict[int, dict[int, list[float]]] = {}
    for number, line in enumerate(lines, 1):
        record = _parse(line, model)
        if record is not None:
            step, layer, rows = record
            steps.setdefault(step, {})[layer] = rank_imbalances(rows, ep)
        elif number < len(lines) or line.endswith(b"\n"):
            raise ConfigError(
                f"{option}: line {number:,} of {path.name} is damaged; restore the file from its "
                "hidden copy, or give another run"
            )
    loads = list(_complete(steps, model))
    if not loads:
        raise ConfigError(f"{option}: {path.name} has no update with all MoE layers; {remedy}")
    return sorted(loads, key=lambda load: load.mean)


class RunLoads:
    """The expert loads of a run, for any number of ep ranks.

    Args:
        run_dir, model: As for `read_loads`.

    Raises:
        ConfigError: As `read_loads`.
    """

    def __init__(self, run_dir: str, model: ModelConfig) -> None:
        self._run = run_dir, model
        self._of_ep: dict[int, dict[str, StepLoad]] = {}
        self.at(1)

    def at(self, ep: int) -> dict[str, StepLoad]:
        """Return the updates with the `median` and with the `worst` load of `ep` ranks."""
        if ep not in self._of_ep:
            self._of_ep[ep] = median_and_worst(read_loads(*self._run, ep))
        return self._of_ep[ep]


def _check_model(option: str, path: Path, model: ModelConfig, remedy: str) -> None:
    if not path.is_file():
        raise ConfigError(f"{option}: {path.name} is missing; {remedy}")
    theirs = load_config(path).model
    if difference := model.first_difference(theirs):
        key, planned, of_run = difference
        raise ConfigError(
            f"{option}: the run has model.{key} = {of_run!r}, but the plan has {planned!r}; "
            f"{remedy}"
        )


def _parse(line: bytes, model: ModelConfig) -> tuple[int, int, list[int]] | None:
    """Return step, layer and rows of a line, or None if it is damaged."""
    try:
        record = json.loads(line)
        step, layer, rows = record["step"], record["layer"], record["rows"]
        is_valid = (
            type(step) is int
            and layer in model.sparse_layers
            and len(rows) == model.experts_by_layer[layer]
            and all(type(count) is int and count >= 0 for count in rows)
            and sum(rows) > 0
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (step, layer, rows) if is_valid else None


def _complete(
    steps: Mapping[int, dict[int, list[float]]], model: ModelConfig
) -> Iterator[StepLoad]:
    """Yield the updates of which all MoE layers have a line."""
    for step, layers in steps.items():
        if len(layers) == len(model.sparse_layers):
            yield StepLoad(step, layers)


def median_and_worst(loads: Sequence[StepLoad]) -> dict[str, StepLoad]:
    """Return the updates with the median and with the largest `mean`. `loads` is sorted by
    `mean`."""
    return {"median": loads[(len(loads) - 1) // 2], "worst": loads[-1]}
