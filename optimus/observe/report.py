"""Report of a run: a plot of its loss and gradient norm, and a summary in text."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from optimus.errors import DataError, counted
from optimus.io import files
from optimus.observe.metrics import read_json_lines, spell_ranges

_MAX_COUNT = 1 << 56
_MAX_FIGURE = 1e300


class _Step(NamedTuple):
    """Fields of a line of metrics.jsonl that the report uses."""

    step: int
    loss: float | None
    """None if an overflow skipped the update; then `grad_norm` is None, too."""
    grad_norm: float | None
    tokens: int
    step_time_s: float
    tokens_per_s: float


class _Evaluation(NamedTuple):
    """Fields of a line of eval.jsonl that the report uses."""

    step: int
    loss: float | None


def write_report(run_dir: Path) -> tuple[Path, str]:
    """Draw `report.png` from metrics.jsonl and eval.jsonl.

    A line that is damaged, lacks a field or has a value of a wrong type is skipped. The summary
    names the steps that have no usable line in metrics.jsonl.

    Args:
        run_dir: Run directory, to which the plot is written.

    Returns:
        The path of the plot and a summary of the run.

    Raises:
        DataError: The run has no metrics, or a file cannot be read, is not a regular file, or has
            a line longer than 1 MiB.
    """
    path = run_dir / "metrics.jsonl"
    steps = [step for line in read_json_lines(path) if (step := _read_step(line)) is not None]
    if not steps:
        raise DataError(f"{path}: no metrics; use the directory of a run that made a step")
    lines = read_json_lines(run_dir / "eval.jsonl")
    evaluations = [
        _Evaluation(line["step"], line["loss"])
        for line in lines
        if _is_count(line.get("step")) and _is_loss(line.get("loss", ""))
    ]
    picture = run_dir / "report.png"
    _draw(steps, evaluations, picture)
    return picture, _summary(steps, evaluations)


def _read_step(line: Mapping[str, Any]) -> _Step | None:
    """Return the fields of a line, or None if a value is missing, invalid or out of range."""
    values = [line.get(name, "") for name in _Step._fields]
    step, loss, grad_norm, tokens, *times = values
    usable = _is_count(step) and _is_count(tokens) and _is_loss(loss) and _is_loss(grad_norm)
    if not usable or not all(_is_number(value) and 0 <= value < _MAX_FIGURE for value in times):
        return None
    return _Step(*values)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_loss(value: Any) -> bool:
    return value is None or (_is_number(value) and not abs(value) > _MAX_FIGURE)


def _summary(steps: Sequence[_Step], evaluations: Sequence[_Evaluation]) -> str:
    last = steps[-1]
    seconds = sum(step.step_time_s for step in steps)
    # Both sums are over the lines that are present: a file may start late or have gaps.
    tokens = sum(step.step_time_s * step.tokens_per_s for step in steps)
    text = (
        f"{counted(last.step, 'step')}, {counted(last.tokens, 'token')}; {seconds:.0f} s of "
        f"steps ({tokens / seconds if seconds else 0:,.0f} tokens/s)"
    )
    if missing := _missing_steps(steps):
        text += f"; the lines of {spell_ranges(missing)} are missing"
    losses = [step.loss for step in steps if step.loss is not None]
    if losses:
        text += f"; last training loss {losses[-1]:.4f}"
    if evaluations and evaluations[-1].loss is not None:
        text += f"; held-out loss {evaluations[-1].loss:.4f} at step {evaluations[-1].step}"
    return text


def _missing_steps(steps: Sequence[_Step]) -> list[tuple[int, int]]:
    """Return the gaps between the steps as ranges (first missing step, last missing step)."""
    numbers = sorted({step.step for step in steps})
    return [(low + 1, high - 1) for low, high in itertools.pairwise(numbers) if high > low + 1]


@contextlib.contextmanager
def _root_as_cwd() -> Iterator[None]:
    """Make / the working directory while the context is active.

    When matplotlib is imported, it prefers a file `matplotlibrc` in the working directory to the
    file that MATPLOTLIBRC names. Another user may have written the file in the working directory.

    A file descriptor is used to return to the original directory, which has no path if it has been
    deleted.
    """
    cwd = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        os.chdir("/")
        yield
    finally:
        os.fchdir(cwd)
        os.close(cwd)


def _draw(steps: Sequence[_Step], evaluations: Sequence[_Evaluation], path: Path) -> None:
    with _root_as_cwd():
        import matplotlib
        from matplotlib import pyplot
    matplotlib.rcdefaults()  # the user's matplotlibrc must not change the picture either
    matplotlib.use("Agg")
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 1))
    # Points without values break the curves at gaps.
    gaps = [_Step(first, None, None, 0, 0.0, 0.0) for first, _ in _missing_steps(steps)]
    points = sorted([*steps, *gaps], key=lambda step: step.step)
    numbers = [point.step for point in points]
    top.plot(numbers, [point.loss for point in points], lw=1, label="training")
    if evaluations:
        x, y = zip(*evaluations, strict=True)
        top.plot(x, y, "o-", ms=4, label="held out")
    top.set_ylabel("cross-entropy, nats per token")
    top.legend()
    top.grid(alpha=0.3)
    bottom.plot(numbers, [point.grad_norm for point in points], lw=1, color="tab:gray")
    bottom.set_yscale("log")
    bottom.set_ylabel("gradient norm")
    bottom.set_xlabel("step")
    bottom.grid(alpha=0.3)
    figure.tight_layout()
    with files.atomic_writer(path) as file:  # replaces a link of this name, does not follow it
        figure.savefig(file, format="png", dpi=120)
    pyplot.close(figure)
