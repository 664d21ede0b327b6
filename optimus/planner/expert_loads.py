"""Loads of the experts of a run, from its file expert_load.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from optimus.config import Config, ModelConfig, load_config
from optimus.errors import ConfigError, DataError, refuse_if
from optimus.observe.metrics import metrics_paths, read_lines
from optimus.parallel.expert_load import rank_imbalances


class StepLoad(NamedTuple):
    """Loads of the ep ranks in an update. The load of an ep rank is a sum over all microbatches and
    all ep process groups."""

    step: int
    imbalances: dict[int, list[float]]
    """For each MoE layer, a value for each ep rank: the number of rows that the experts of this ep
    rank have computed, divided by the mean over the ep ranks. A token gives a row to each of the
    experts that the router chooses for it."""

    @property
    def fullest(self) -> dict[int, float]:
        """For each MoE layer, the largest value in `imbalances`, which belongs to the ep rank with
        the most rows."""
        return {layer: max(ranks) for layer, ranks in self.imbalances.items()}

    @property
    def mean(self) -> float:
        """The mean of `fullest` over the layers. The time that the experts need in a step is
        proportional to this mean."""
        return sum(self.fullest.values()) / len(self.imbalances)


class RunLoads:
    """The expert loads of a run, for any number of ep ranks.

    Args:
        run_dir: The run directory.
        model: Model of the plan. The run must have the same model.

    Raises:
        ConfigError: The run has another model, or the file expert_load.jsonl of the run is missing
            or damaged. An incomplete last line, which a killed run can leave, is ignored.
    """

    def __init__(self, run_dir: str, model: ModelConfig) -> None:
        self.run_dir = run_dir
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
        rows: dict[int, dict[int, list[int]]] = {}
        for number, line in enumerate(lines, 1):
            record = _parse(line, model)
            if record is not None:
                step, layer, of_experts = record
                rows.setdefault(step, {})[layer] = of_experts
            elif number < len(lines) or line.endswith(b"\n"):
                raise ConfigError(
                    f"{option}: line {number:,} of {path.name} is damaged; restore the file from "
                    "its hidden copy, or give another run"
                )
        # Updates for which the file has a line for each MoE layer
        count = len(model.sparse_layers)
        self._rows = {step: layers for step, layers in rows.items() if len(layers) == count}
        refuse_if(
            not self._rows, f"{option}: {path.name} has no update with all MoE layers; {remedy}"
        )
        self._of_ep: dict[int, list[StepLoad]] = {}

    def steps(self, ep: int) -> list[StepLoad]:
        """Return the loads of each update as if the experts were divided over `ep` ranks, sorted by
        `mean`. `ep` can differ from the number of ep ranks in the run."""
        if ep not in self._of_ep:
            loads = (
                StepLoad(step, {layer: rank_imbalances(rows, ep) for layer, rows in layers.items()})
                for step, layers in self._rows.items()
            )
            self._of_ep[ep] = sorted(loads, key=lambda load: load.mean)
        return self._of_ep[ep]

    def at(self, ep: int) -> dict[str, StepLoad]:
        """Return a dict with the loads of two updates, as if the experts were divided over `ep`
        ranks: `median`, the update with the median of `StepLoad.mean`, and `worst`, the update with
        the largest `StepLoad.mean`."""
        loads = self.steps(ep)
        return {"median": loads[(len(loads) - 1) // 2], "worst": loads[-1]}


def loads_for_plan(run_dir: str, config: Config) -> RunLoads:
    """Return the expert loads of the run directory that `--load` names. This function does not
    import torch, so that a wrong directory is refused immediately. Raises ConfigError for the
    reasons of `RunLoads`, and if the loads would have no effect on a plan of `config`."""
    refuse_if(not config.train.seq_len, f"--load {run_dir} needs train.seq_len; set it")
    refuse_if(
        config.offload.mode == "auto",
        f"--load {run_dir} has no effect with offload.mode = 'auto', since a placement assumes "
        "the load offload.expert_imbalance; remove --load, or set offload.mode = 'off'",
    )
    return RunLoads(run_dir, config.model)


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
    """Return the step, the layer and the rows of each expert from a line of expert_load.jsonl, or
    None if the line is damaged."""
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
