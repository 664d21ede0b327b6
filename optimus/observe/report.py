"""A run's curves as a picture, and its last figures in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimus.errors import DataError, counted
from optimus.observe.metrics import read_json_lines, spell_steps


def write_report(run_dir: Path) -> tuple[Path, str]:
    """Draw `report.png` from metrics.jsonl and eval.jsonl; return its path and a summary.

    Raises DataError if the run has no metrics.
    """
    metrics = read_json_lines(run_dir / "metrics.jsonl")
    if not metrics:
        raise DataError(f"{run_dir / 'metrics.jsonl'}: no metrics; is this a run directory?")
    evaluations = read_json_lines(run_dir / "eval.jsonl")
    picture = run_dir / "report.png"
    _draw(metrics, evaluations, picture)
    return picture, _summary(metrics, evaluations)


def _summary(metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> str:
    last = metrics[-1]
    seconds = sum(record["step_time_s"] for record in metrics)
    # Of the lines that are there: a file may begin late or have gaps.
    tokens = sum(record["step_time_s"] * record["tokens_per_s"] for record in metrics)
    text = (
        f"{counted(last['step'], 'step')}, {counted(last['tokens'], 'token')}; {seconds:.0f} s of "
        f"steps ({tokens / seconds:,.0f} tokens/s)"
    )
    if missing := _missing_steps(metrics):
        text += f"; the lines of {spell_steps(missing)} are missing"
    losses = [record["loss"] for record in metrics if record["loss"] is not None]
    if losses:  # that of an update skipped for an overflow may be missing
        text += f"; last training loss {losses[-1]:.4f}"
    if evaluations:
        text += f"; held-out loss {evaluations[-1]['loss']:.4f} at step {evaluations[-1]['step']}"
    return text


def _missing_steps(metrics: list[dict[str, Any]]) -> list[int]:
    """The steps without a line between the first and the last."""
    there = {record["step"] for record in metrics}
    return sorted({*range(min(there), max(there))} - there)


def _draw(metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 1))
    blank = {"loss": None, "grad_norm": None}  # breaks the curves
    gaps = [{"step": step, **blank} for step in _missing_steps(metrics)]
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
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
