"""Report of a run: a plot of the loss and the gradient norm, and a summary as text."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from optimus.errors import DataError, counted
from optimus.io import files
from optimus.observe.events import StepComponents
from optimus.observe.metrics import read_lines, spell_ranges

_TOLERANCE = 0.05
"""Largest accepted relative difference between the time of an update and the sum of its components.
In an undamaged file, the difference is the time of a few lines of Python and, on an accelerator,
the difference between the clocks of the host and the device."""
_Count = Annotated[int, Field(ge=0, lt=1 << 56)]
_Figure = Annotated[float, Field(ge=0, lt=1e300)]


def _check_size(value: float) -> float:
    """Return `value`, or raise ValueError if its magnitude is above 1e300. NaN is accepted, so that
    the report shows it."""
    if abs(value) > 1e300:
        raise ValueError("the magnitude of the value is above 1e300, too large for the plot")
    return value


_Loss = Annotated[float, AfterValidator(_check_size)]


class _Line(BaseModel):
    """Base class of pydantic models for a line of metrics.jsonl or eval.jsonl. A line is invalid if
    a field of the model is missing, has a wrong type or is out of range."""

    model_config = ConfigDict(strict=True, frozen=True)


class StepLine(_Line):
    """Fields that the report reads from a line of metrics.jsonl."""

    step: _Count
    loss: _Loss | None
    """None if the loss was not finite. The update was then skipped, and `grad_norm` is None."""
    grad_norm: _Loss | None
    tokens: _Count
    step_time_s: _Figure
    tokens_per_s: _Figure


class ComponentsLine(_Line):
    """Fields of `StepComponents` in a line of metrics.jsonl. A line is invalid if the sum of the
    components differs from `step_time_s` by more than 5 %."""

    step: _Count
    step_time_s: _Figure
    compute_s: _Figure
    exposed_s: dict[str, _Figure]
    bubble_s: _Figure
    optimizer_s: _Figure
    other_s: _Figure

    @property
    def components(self) -> StepComponents:
        return StepComponents(
            self.compute_s, self.exposed_s, self.bubble_s, self.optimizer_s, self.other_s
        )

    @model_validator(mode="after")
    def _check_sum(self) -> ComponentsLine:
        if not math.isclose(self.components.total_s, self.step_time_s, rel_tol=_TOLERANCE):
            raise ValueError("the sum of the components is not the time of the update")
        return self


class _Evaluation(_Line):
    """Fields that the report reads from a line of eval.jsonl."""

    step: _Count
    loss: _Loss | None


_AnyLine = TypeVar("_AnyLine", bound=_Line)


def write_report(run_dir: Path) -> tuple[Path, str]:
    """Draw `report.png` from metrics.jsonl and eval.jsonl.

    Lines that are damaged, lack a field or have a value of a wrong type are skipped. The summary
    states the number of skipped lines, and the steps without a valid line in metrics.jsonl.

    Args:
        run_dir: Run directory, to which the plot is written.

    Returns:
        The path of the plot and a summary of the run.

    Raises:
        DataError: The run has no metrics, or a file cannot be read, is not a regular file, or has
            a line longer than 1 MiB.
    """
    path = run_dir / "metrics.jsonl"
    steps, damaged_steps = read_valid(path, StepLine)
    if not steps:
        raise DataError(f"{path}: no metrics; use the directory of a run that completed a step")
    evaluations, damaged_evaluations = read_valid(run_dir / "eval.jsonl", _Evaluation)
    picture = run_dir / "report.png"
    _draw(steps, evaluations, picture)
    text = _summary(steps, evaluations)
    if damaged := damaged_steps + damaged_evaluations:
        text += f"; {counted(damaged, 'damaged line')} left out"
    return picture, text


def read_valid(path: Path, kind: type[_AnyLine]) -> tuple[list[_AnyLine], int]:
    """Return (valid lines of a file, as objects of the class `kind`; number of invalid lines). A
    last line without a newline is not counted as invalid, because a run that was killed can leave
    an incomplete line."""
    valid, damaged = [], 0
    for line in read_lines(path):
        try:
            valid.append(kind.model_validate_json(line))
        except ValidationError:
            damaged += line.endswith(b"\n")
    return valid, damaged


def _summary(steps: Sequence[StepLine], evaluations: Sequence[_Evaluation]) -> str:
    last = steps[-1]
    seconds = sum(step.step_time_s for step in steps)
    # These sums are over the lines that are present: a file may start late or have gaps.
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


def _missing_steps(steps: Sequence[StepLine]) -> list[tuple[int, int]]:
    """Return (first, last) of each range of missing steps between the first and the last element of
    `steps`."""
    numbers = sorted({step.step for step in steps})
    return [(low + 1, high - 1) for low, high in itertools.pairwise(numbers) if high > low + 1]


@contextlib.contextmanager
def _root_as_cwd() -> Iterator[None]:
    """Context manager that makes / the working directory.

    When matplotlib is imported, it prefers a file `matplotlibrc` in the working directory to the
    file that MATPLOTLIBRC names. Another user may have written the file in the working directory.

    At its end, the context manager returns to the original directory through a file descriptor,
    because a directory that has been deleted does not have a path.
    """
    cwd = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        os.chdir("/")
        yield
    finally:
        os.fchdir(cwd)
        os.close(cwd)


def load_pyplot() -> Any:
    """Import and return matplotlib's module pyplot, with default settings and without a
    display."""
    with _root_as_cwd():
        import matplotlib
        from matplotlib import pyplot
    matplotlib.rcdefaults()  # the user's matplotlibrc must not change the plot, either
    matplotlib.use("Agg")
    return pyplot


def _draw(steps: Sequence[StepLine], evaluations: Sequence[_Evaluation], path: Path) -> None:
    pyplot = load_pyplot()
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 1))
    # Points without values break the curves at gaps.
    gaps = [(first, None, None) for first, _ in _missing_steps(steps)]
    points = [*((step.step, step.loss, step.grad_norm) for step in steps), *gaps]
    numbers, losses, grad_norms = zip(*sorted(points, key=lambda point: point[0]), strict=True)
    top.plot(numbers, losses, lw=1, label="training")
    if evaluations:
        numbers_of_evaluations = [evaluation.step for evaluation in evaluations]
        held_out = [evaluation.loss for evaluation in evaluations]
        top.plot(numbers_of_evaluations, held_out, "o-", ms=4, label="held out")
    top.set_ylabel("cross-entropy, nats per token")
    top.legend()
    top.grid(alpha=0.3)
    bottom.plot(numbers, grad_norms, lw=1, color="tab:gray")
    bottom.set_yscale("log")
    bottom.set_ylabel("gradient norm")
    bottom.set_xlabel("step")
    bottom.grid(alpha=0.3)
    figure.tight_layout()
    with files.atomic_writer(path) as file:  # replaces a link, does not follow it
        figure.savefig(file, format="png", dpi=120)
    pyplot.close(figure)
