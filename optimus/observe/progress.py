"""Progress of a run on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys

from tqdm import tqdm

from optimus.errors import printable
from optimus.observe.events import Record, Recorder, StepRecord
from optimus.observe.log import redirect_lines


class Progress(Recorder):
    """Shows the figures of the latest step on standard error."""

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
            bar = tqdm(total=last_step, initial=first_step, unit="step", dynamic_ncols=True)
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
            line = f"step {step}/{self._last_step}  {_figures(record)}"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the bar. Later log lines are printed below it."""
        if self._bar is not None:
            redirect_lines(None)
            self._bar.close()


def indented(text: str) -> str:
    """Indent each line of `text`. Escape control characters, so that no terminal obeys them."""
    return "\n".join("    " + printable(line) for line in text.split("\n"))


def _figures(record: StepRecord) -> str:
    loss = "overflow" if record.loss is None else f"{record.loss:.4f}"
    norm = "overflow, skipped" if record.grad_norm is None else f"norm {record.grad_norm:.3f}"
    text = f"loss {loss}  {norm}  lr {record.lr:.2e}  {record.tokens_per_s:,.0f} tok/s"
    if record.moe is not None:
        low, high = record.moe.expert_load_min, record.moe.expert_load_max
        text += f"  expert load {low:.2f}-{high:.2f}"
    return text
