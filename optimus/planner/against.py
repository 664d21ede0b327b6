"""Comparison of the predicted memory and step time of a run with the measured values: `optimus plan
--against`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from optimus.config import Config, OffloadConfig, load_config
from optimus.config.machine import load_machine
from optimus.data.batch import plan_batch
from optimus.distributed.mesh import Mesh, make_mesh
from optimus.errors import ConfigError, DataError, counted, reason_of, refuse_if
from optimus.io import files
from optimus.observe.metrics import read_lines

FIT_FILE = "fit.json"
"""File of the run directory with the measured memory and step time of the first updates.
`optimus.train.fit` writes it."""
FIT_FORMAT = 2
"""Version of the format of FIT_FILE."""
_MAX_FIT_BYTES = 1 << 26
_WARM_UP = 3
"""Number of updates at the start of metrics.jsonl whose times are left out of the median."""

_COMPARED = {
    "parallel": (
        *("pp", "dp", "ep", "tp", "schedule", "virtual_stages", "stage_layers"),
        "sequence_parallel",
    ),
    "train": (
        *("seq_len", "global_batch_tokens", "microbatch_size", "dtype", "deterministic"),
        "compile",
    ),
    "optim": (
        *("groups", "frozen", "sharding", "resident", "cache_chunks", "chunk_length"),
        *("grad_reduce_dtype", "grad_dtype", "overlap"),
    ),
    "recompute": ("modules",),
    "data": ("document_mask",),
    "offload": ("mode", "device_memory", "host_memory", "host_share", "disk_share", "order"),
}
"""Settings outside the section `[model]` that determine memory and step time: a dict from sections
to keys. All settings of `[model]` also determine memory and step time."""


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings that determine memory and step time, as a dict from "section.key" to the
    value, converted to types of JSON."""
    tree = config.model_dump(mode="json")
    flat = {f"model.{key}": value for key, value in tree["model"].items()}
    for section, keys in _COMPARED.items():
        flat |= {f"{section}.{key}": tree[section][key] for key in keys}
    return flat


def settings_key(config: Config, mesh: Mesh) -> str:
    """Return a hash of the settings that determine memory and step time, and of the mesh."""
    values = settings_of(config) | {"mesh": mesh._asdict()}
    return files.xxh3_bytes(json.dumps(values, sort_keys=True).encode())


def placement_of(config: Config) -> dict[str, Any]:
    """Return the settings that a run with offload.mode = "auto" chooses, with their values in
    `config`, as a dict for fit.json."""
    optim = config.optim
    return {
        "offload": config.offload.model_dump(mode="json"),
        "cache_chunks": optim.cache_chunks,
        "chunk_length": optim.chunk_length,
    }


class _Kind(BaseModel):
    """Measured memory of the ranks with the same pp and tp coordinates."""

    model_config = ConfigDict(strict=True, frozen=True)
    pp: Annotated[int, Field(ge=0)]
    tp: Annotated[int, Field(ge=0)]
    process_bytes: Annotated[int, Field(ge=0)]
    """On a CPU, bytes of the process before its model was created; otherwise 0."""
    peak_bytes: Annotated[int, Field(gt=0)]


class _Placement(BaseModel):
    """Result of `placement_of` for the first rank of a run."""

    model_config = ConfigDict(strict=True, frozen=True)
    offload: OffloadConfig
    cache_chunks: Annotated[int, Field(ge=0)]
    chunk_length: Annotated[int, Field(ge=1)]


class _Fit(BaseModel):
    """Fields of FIT_FILE that the comparison reads."""

    model_config = ConfigDict(strict=True, frozen=True)
    format: Annotated[int, Field(ge=FIT_FORMAT, le=FIT_FORMAT)]
    settings: str
    device: str
    mesh: dict[str, Annotated[int, Field(ge=1)]]
    microbatches: Annotated[int, Field(ge=1)]
    ranks: Annotated[list[_Kind], Field(min_length=1)]
    placement: _Placement

    def placed(self, config: Config) -> Config:
        """Return `config` with the placement settings that the first rank of the run has used."""
        sizes = {
            "cache_chunks": self.placement.cache_chunks,
            "chunk_length": self.placement.chunk_length,
        }
        optim = config.optim.model_copy(update=sizes)
        return config.model_copy(update={"offload": self.placement.offload, "optim": optim})


class _Update(BaseModel):
    """Fields of a line of metrics.jsonl that the comparison reads."""

    model_config = ConfigDict(strict=True, frozen=True)
    step: Annotated[int, Field(ge=1)]
    step_time_s: Annotated[float, Field(gt=0, lt=1e9)]
    mem_bytes: Annotated[int, Field(gt=0)]


def read_fit(run_dir: Path) -> dict[str, Any] | None:
    """Return the content of fit.json; None if the run directory has no such file. Raises
    ConfigError if the file is damaged or cannot be read."""
    path = run_dir / FIT_FILE
    try:
        figures = files.parse_checked_json(files.read_regular(path, _MAX_FIT_BYTES))
        mesh = _Fit.model_validate(figures).mesh
        Mesh(**mesh)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {reason_of(error)}; make the file readable") from None
    except (ValueError, TypeError, RecursionError):
        raise ConfigError(
            f"{path}: damaged; remove it, and the next start of the run writes it again"
        ) from None
    return figures


def compare(config: Config, run_dir: str, machine: str | None) -> dict[str, Any]:
    """Return the predicted and the measured memory and step time of a run, as a dict for JSON.

    Args:
        config: The configuration of the run.
        run_dir: The run directory of the run.
        machine: Machine for the predicted step time; None for `train.machine`.

    Returns:
        - `memory`: list with an entry for each pair of coordinates `pp` and `tp`, with
          `predicted_bytes` and `measured_bytes`. Without fit.json, the list has only the first
          rank, and the prediction has only the memory of the device. On a CPU, such a prediction
          lacks the memory of the process, of libraries and of offloaded states. With offload.mode =
          "auto", the list has only the entry of the first rank, whose placement is in fit.json.
        - `step`: `measured_s`, the median time of `updates` updates; `low_s` and `high_s`, the 10th
          and the 90th percentile of these times; `predicted_s`, the predicted seconds, or None;
          `no_prediction`, the reason if `predicted_s` is None; and `machine`, the name of the
          machine. If the path of a machine file is given instead of a name, `machine` is the name
          of the device in this file.

    Raises:
        ConfigError: The directory has no run, the run has another configuration, or the metrics of
            the run are damaged.
    """
    path = Path(run_dir)
    _check_same(config, path, run_dir)
    updates = _read_updates(path)
    figures = read_fit(path)
    fit = None if figures is None else _Fit.model_validate(figures)
    if fit is None and not config.parallel.dp:
        raise ConfigError(
            f"--against {run_dir}: the number of ranks is unknown, since the run has no {FIT_FILE} "
            "and parallel.dp = 0; add parallel.dp=N"
        )
    mesh = make_mesh(config.parallel, None) if fit is None else Mesh(**fit.mesh)
    return {
        "run_dir": run_dir,
        "mesh": mesh._asdict(),
        "memory": list(_memory(config, mesh, fit, updates)),
        "step": _step(config, mesh, updates, machine or config.train.machine),
    }


def _check_same(config: Config, path: Path, run_dir: str) -> None:
    stored_path = path / "config.toml"
    refuse_if(
        not stored_path.is_file(),
        f"--against {run_dir}: not a run directory, since it has no config.toml; give the "
        "train.run_dir of a run",
    )
    try:
        stored = settings_of(load_config(stored_path))
    except ConfigError as error:
        raise ConfigError(f"--against {run_dir}: {error}") from None
    planned = settings_of(config)
    for key, value in planned.items():
        if stored[key] != value and (key != "parallel.dp" or (stored[key] and value)):
            raise ConfigError(
                f"--against {run_dir}: the run has {key} = {stored[key]!r}, but the configuration "
                f"has {value!r}; use {stored_path} as the configuration"
            )


def _read_updates(path: Path) -> list[_Update]:
    metrics = path / "metrics.jsonl"
    try:
        lines = b"".join(read_lines(metrics)).splitlines(keepends=True)
    except (OSError, DataError) as error:
        raise ConfigError(f"--against: {metrics}: {error}; give another run directory") from None
    updates = []
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith(b"\n"):
            break  # the run is writing this line, or was killed
        try:
            updates.append(_Update.model_validate_json(line))
        except ValidationError:
            raise ConfigError(
                f"--against: {metrics}: line {number} is damaged; start the run again, which "
                "repairs the file, or remove the line"
            ) from None
    refuse_if(not updates, f"--against: {metrics} has no update; wait for the first update")
    return updates


def predict(run_dir: Path) -> dict[str, Any]:
    """Return the predicted memory and step time of a run that has written fit.json.

    Args:
        run_dir: The run directory.

    Returns:
        - `bytes`: predicted bytes of the fullest of the ranks that the first entry of `ranks` in
          fit.json describes.
        - `step_s`: predicted seconds of a step; None if they cannot be predicted.
        - `no_step`: the reason if `step_s` is None; "" otherwise.

    Raises:
        ConfigError: A file of the run directory is missing or damaged.
    """
    config, figures = load_config(run_dir / "config.toml"), read_fit(run_dir)
    if figures is None:
        raise ConfigError(f"{run_dir}: no {FIT_FILE}")
    fit = _Fit.model_validate(figures)
    mesh = Mesh(**fit.mesh)
    step_s, reason = _predicted_step(fit.placed(config), mesh, config.train.machine)
    first = _predicted_bytes(config, mesh, fit, fit.ranks[0])
    return {"bytes": first, "step_s": step_s, "no_step": reason}


def _memory(
    config: Config, mesh: Mesh, fit: _Fit | None, updates: list[_Update]
) -> Iterator[dict[str, int]]:
    if fit is None:
        kinds = [_Kind(pp=0, tp=0, process_bytes=0, peak_bytes=updates[-1].mem_bytes)]
    else:  # with "auto", the ranks of other stages can have other placements
        kinds = fit.ranks[:1] if config.offload.mode == "auto" else fit.ranks
    for kind in kinds:
        yield {
            "pp": kind.pp,
            "tp": kind.tp,
            "predicted_bytes": _predicted_bytes(config, mesh, fit, kind),
            "measured_bytes": kind.peak_bytes,
        }


def _predicted_bytes(config: Config, mesh: Mesh, fit: _Fit | None, kind: _Kind) -> int:
    """Return the predicted bytes of the fullest of the ranks with the pp and tp coordinates of
    `kind`."""
    from optimus.planner.memory import library_bytes, rank_memory  # imports torch
    from optimus.planner.offload import largest_rank

    if fit is None:
        device, microbatches = "cuda", mesh.pp
        if config.train.global_batch_tokens:
            microbatches = plan_batch(config.train, mesh.num_data_ranks).microbatches_per_rank
    else:
        config, device, microbatches = fit.placed(config), fit.device, fit.microbatches
    coordinate = largest_rank(config, mesh, kind.pp)._replace(tp=kind.tp)
    memory = rank_memory(config, mesh, coordinate, microbatches, device)
    size = kind.process_bytes + memory.device
    if device == "cpu":
        size += memory.host + library_bytes(config, mesh, kind.pp)
    return size


def _predicted_step(config: Config, mesh: Mesh, name: str) -> tuple[float | None, str]:
    """Return the pair (predicted seconds of a step on a machine, ""), or (None, reason) if the
    seconds cannot be predicted."""
    from optimus.planner.step_plan import plan_step

    if not name:
        return None, "train.machine is not set"
    try:
        machine = load_machine(name, "train.machine")
        return plan_step(config, mesh, machine, name)["step_s"], ""
    except ConfigError as error:
        return None, str(error)


def _step(config: Config, mesh: Mesh, updates: list[_Update], machine: str) -> dict[str, Any]:
    seconds = sorted(update.step_time_s for update in updates[_WARM_UP:] or updates)
    predicted, reason = None, "no machine; add --machine NAME"
    name = machine
    if machine:
        definition = load_machine(machine)
        if "/" in machine and definition.device is not None:
            name = definition.device.name
        predicted, reason = _predicted_step(config, mesh, machine)
    return {
        "machine": name,
        "measured_s": statistics.median(seconds),
        "low_s": seconds[len(seconds) // 10],
        "high_s": seconds[-1 - len(seconds) // 10],
        "updates": len(seconds),
        "predicted_s": predicted,
        "no_prediction": reason,
    }


def format_comparison(result: dict[str, Any]) -> str:
    """Return the result of `compare` as a table."""
    rows = [("", "predicted", "measured", "predicted - measured")]
    for kind in result["memory"]:
        axes = [f"{axis} {kind[axis]}" for axis in ("pp", "tp") if result["mesh"][axis] > 1]
        predicted, measured = kind["predicted_bytes"], kind["measured_bytes"]
        rows.append(
            (
                " ".join(["peak memory", *axes]),
                f"{predicted / 1e9:,.4g} GB",
                f"{measured / 1e9:,.4g} GB",
                difference(predicted, measured),
            )
        )
    step = result["step"]
    predicted = step["predicted_s"]
    spread = f"{step['low_s']:.4g} to {step['high_s']:.4g} s, {counted(step['updates'], 'update')}"
    rows.append(
        (
            f"step on {step['machine']}" if step["machine"] else "step",
            "unknown" if predicted is None else f"{predicted:.4g} s",
            f"{step['measured_s']:.4g} s ({spread})",
            step["no_prediction"]
            if predicted is None
            else difference(predicted, step["measured_s"]),
        )
    )
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows)


def difference(predicted: float, measured: float) -> str:
    """Return the relative error of a prediction, such as `+2.5 %`."""
    return f"{100 * (predicted / measured - 1):+.1f} %"
