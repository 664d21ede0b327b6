"""A run's curves as a picture, and its last figures in words."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from optimus.errors import DataError, counted
from optimus.io import files
from optimus.observe.metrics import read_json_lines, spell_ranges

_FIELDS = ("step", "loss", "grad_norm", "tokens", "step_time_s", "tokens_per_s")
_EVAL_FIELDS = ("step", "loss")
_BY_UPDATE = ("loss", "grad_norm")
"""Null for an update that was skipped for an overflow."""
_MOST = 1e300


def write_report(run_dir: Path) -> tuple[Path, str]:
    """Draw `report.png` from metrics.jsonl and eval.jsonl; return its path and a summary.

    A line that lacks a field or has one of another type is left out, as damaged ones are: the
    summary names the steps that are missing. Raises DataError if the run has no metrics.
    """
    metrics = _read_records(run_dir / "metrics.jsonl", _FIELDS)
    if not metrics:
        raise DataError(f"{run_dir / 'metrics.jsonl'}: no metrics; is this a run directory?")
    evaluations = _read_records(run_dir / "eval.jsonl", _EVAL_FIELDS)
    picture = run_dir / "report.png"
    _draw(metrics, evaluations, picture)
    return picture, _summary(metrics, evaluations)


def _read_records(path: Path, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    return [one for one in read_json_lines(path) if all(_is_figure(one, name) for name in fields)]


def _is_figure(record: dict[str, Any], name: str) -> bool:
    """Return whether a line has a number of this name that can be drawn and summed up."""
    value = record.get(name, "")
    if name in ("step", "tokens"):
        return type(value) is int and 0 <= value < 1 << 56
    if name in _BY_UPDATE:
        return value is None or (type(value) in (int, float) and not abs(value) > _MOST)
    return type(value) in (int, float) and 0 <= value < _MOST


def _summary(metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> str:
    last = metrics[-1]
    seconds = sum(record["step_time_s"] for record in metrics)
    # Of the lines that are there: a file may begin late or have gaps.
    tokens = sum(record["step_time_s"] * record["tokens_per_s"] for record in metrics)
    text = (
        f"{counted(last['step'], 'step')}, {counted(last['tokens'], 'token')}; {seconds:.0f} s of "
        f"steps ({tokens / seconds if seconds else 0:,.0f} tokens/s)"
    )
    if missing := _missing_steps(metrics):
        text += f"; the lines of {spell_ranges(missing)} are missing"
    losses = [record["loss"] for record in metrics if record["loss"] is not None]
    if losses:  # that of an update skipped for an overflow may be missing
        text += f"; last training loss {losses[-1]:.4f}"
    if evaluations and evaluations[-1]["loss"] is not None:
        text += f"; held-out loss {evaluations[-1]['loss']:.4f} at step {evaluations[-1]['step']}"
    return text


def _missing_steps(metrics: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return the ranges (first, last) of steps without a line between two that have one."""
    there = sorted({record["step"] for record in metrics})
    return [(low + 1, high - 1) for low, high in itertools.pairwise(there) if high > low + 1]


def _draw(metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.rcdefaults()  # import obeys a matplotlibrc of the working directory
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 1))
    blank = {"loss": None, "grad_norm": None}  # breaks the curves
    gaps = [{"step": first, **blank} for first, _ in _missing_steps(metrics)]
    metrics = sorted([*metrics, *gaps], key=lambda record: record["step"])
    steps = [record["step"] for record in metrics]
    top.plot(steps, [record["loss"] for record in metrics], lw=1, label="training")
    if evaluations:
        at = [record["step"] for record in evaluations]
        top.plot(at, [record["loss"] for record in evaluations], "o-", ms=4, label="held out")
    top.set_ylabel("cross-entropy, nats per token")
    top.legend()
    top.grid(alpha=0.3)
    bottom.plot(steps, [record["grad_norm"] for record in metrics], lw=1, color="tab:gray")
    bottom.set_yscale("log")
    bottom.set_ylabel("gradient norm")
    bottom.set_xlabel("step")
    bottom.grid(alpha=0.3)
    figure.tight_layout()
    with files.atomic_writer(path) as file:  # not through a link of this name
        figure.savefig(file, format="png", dpi=120)
    pyplot.close(figure)
