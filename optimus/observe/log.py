"""Output of a process on standard error: the log, and the progress of a run.

The loggers `optimus.*` write lines. If standard error is a terminal, progress is shown as a bar,
otherwise as lines. Only the commands call `set_up_logging`. A program that imports Optimus must
configure logging itself.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from optimus.errors import printable, printable_lines
from optimus.observe.events import (
    EvalRecord,
    Record,
    Recorder,
    StartUpRecord,
    StepRecord,
    Traffic,
)

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)


class _LineHandler(logging.Handler):
    """Logging handler that prints records as `program: [rank N] level: message`.

    Lines of rank 0 do not contain `[rank N]`, and lines of the level INFO do not contain `level:`.
    """

    program, rank = "optimus", 0
    write: Callable[[str], None] | None = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Emit the record, and return True. Does not acquire the lock of this logging handler.

        With the lock, a signal handler that logs a message could deadlock.
        """
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        rank = f" [rank {self.rank}]" if self.rank else ""
        level = f" {record.levelname.lower()}:" if record.levelno > logging.INFO else ""
        try:
            line = printable_lines(f"{self.program}:{rank}{level} {record.getMessage()}")
            if self.write is not None:
                self.write(line)
            elif sys.stderr is not None:  # looked up for each line, because callers may replace it
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()
        except Exception:
            self.handleError(record)


_LINES = _LineHandler()


def set_up_logging(rank: int = 0, program: str = "optimus") -> None:
    """Print the log of this process on standard error.

    Rank 0 prints records from INFO up. Other ranks print only warnings and errors.

    Args:
        rank: Global rank of this process. Each line of a rank above 0 names the rank.
        program: Name of the command, with which each line starts.
    """
    _LINES.program, _LINES.rank = program, rank
    logger = logging.getLogger("optimus")
    logger.addHandler(_LINES)
    logger.setLevel(logging.WARNING if rank else logging.INFO)
    logger.propagate = False  # a handler that a library adds to the root would repeat each line


class LogRecorder(Recorder):
    """Recorder that logs the results of evaluations, the durations of the start-up phases, and the
    number of bytes communicated in the first update."""

    def __init__(self) -> None:
        self._logged_traffic = False

    def record(self, record: Record) -> None:
        match record:
            case EvalRecord():
                logger.info("%s loss %.4f at step %d", record.source, record.loss, record.step)
            case StartUpRecord():
                phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in record.phases_s)
                total_s, processor_s = record.total_s, record.processor_s
                logger.info(
                    "start-up %.2f s: %s; processor time %.2f s", total_s, phases, processor_s
                )
            case Traffic() if not self._logged_traffic:
                self._logged_traffic = True
                sizes = [f"{axes} {size:,} bytes" for axes, size in record.bytes_by_axes.items()]
                if sizes:  # a single rank sends nothing
                    logger.info("communication of rank 0 in one update: %s", ", ".join(sizes))


def redirect_lines(write: Callable[[str], None] | None) -> None:
    """Pass all later log lines to `write` instead of standard error. If `write` is None, later log
    lines are printed on standard error again."""
    _LINES.write = write


def bar_size() -> dict[str, Any]:
    """Return the keyword arguments of tqdm that set the size of a progress bar on standard
    error."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # not a terminal
        columns = 0
    # Some pseudo-terminals have no size. tqdm would not print anything on them.
    return {"dynamic_ncols": True} if columns else {"ncols": 80, "nrows": 24}


class Progress(Recorder):
    """Recorder that shows the progress and the metrics of the latest step on standard error."""

    def __init__(self, first_step: int, last_step: int, log_interval: int) -> None:
        """Open a progress bar if standard error is a terminal. If not, `record` prints lines.

        Args:
            first_step: Step at which the run starts.
            last_step: Step at which the run ends.
            log_interval: Number of steps from one printed line to the next. A line is also printed
                for the last step.
        """
        self._last_step, self._interval = last_step, log_interval
        self._bar: tqdm | None = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            bar = tqdm(total=last_step, initial=first_step, unit="step", **bar_size())
            redirect_lines(lambda line: bar.write(line, file=sys.stderr))
            self._bar = bar

    def record(self, record: Record) -> None:
        if not isinstance(record, StepRecord):
            return
        step = record.step
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            self._bar.set_postfix_str(_figures(record))
        elif step % self._interval == 0 or step == self._last_step:
            sys.stderr.write(f"step {step}/{self._last_step}  {_figures(record)}\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Close the bar. Later log lines are printed below it."""
        if self._bar is not None:
            redirect_lines(None)
            self._bar.close()


def indented(text: str) -> str:
    """Return `text` with each line indented and with control characters escaped, so that a terminal
    does not execute the control characters."""
    return "\n".join("    " + printable(line) for line in text.split("\n"))


def _figures(record: StepRecord) -> str:
    loss = "non-finite" if record.loss is None else f"{record.loss:.4f}"
    norm = "update skipped" if record.grad_norm is None else f"norm {record.grad_norm:.3f}"
    text = f"loss {loss}  {norm}  lr {record.lr:.2e}  {record.tokens_per_s:,.0f} tok/s"
    if record.moe is not None:
        low, high = record.moe.expert_load_min, record.moe.expert_load_max
        text += f"  expert load {low:.2f}-{high:.2f}"
    return text
