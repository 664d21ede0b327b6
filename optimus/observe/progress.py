"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from optimus.errors import printable
from optimus.observe.log import redirect_lines


class Progress:
    """Shows the latest figures of training on standard error."""

    def __init__(self, first_step: int, last_step: int, log_interval: int) -> None:
        self._last_step, self._interval = last_step, log_interval
        self._bar = None
        if sys.stderr.isatty():
            bar = tqdm(total=last_step, initial=first_step, unit="step", dynamic_ncols=True)
            redirect_lines(lambda line: bar.write(line, file=sys.stderr))
            self._bar = bar

    def show(self, record: Mapping[str, Any]) -> None:
        step = record["step"]
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            self._bar.set_postfix_str(_figures(record))
        elif step % self._interval == 0 or step == self._last_step:
            line = f"step {step}/{self._last_step}  {_figures(record)}"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            redirect_lines(None)
            self._bar.close()


def indented(text: str) -> str:
    """`text` as lines to print on a terminal: indented, with control characters escaped."""
    return "\n".join("    " + printable(line) for line in text.split("\n"))


def _figures(record: Mapping[str, Any]) -> str:
    loss, norm = record["loss"], record["grad_norm"]
    gradient = "overflow, skipped" if norm is None else f"norm {norm:.3f}"
    text = (
        f"loss {'overflow' if loss is None else f'{loss:.4f}'}  {gradient}  "
        f"lr {record['lr']:.2e}  {record['tokens_per_s']:,.0f} tok/s"
    )
    if "expert_load_max" in record:
        text += f"  expert load {record['expert_load_min']:.2f}-{record['expert_load_max']:.2f}"
    return text
