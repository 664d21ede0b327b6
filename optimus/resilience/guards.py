"""Detection of non-finite values on the rank that computed them, before any reduction."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from optimus.io import files

logger = logging.getLogger(__name__)


def is_finite(flat: Tensor) -> bool:
    """Return True if all values of a large buffer are finite."""
    # The sum is fast to compute, but it can overflow although all values are finite.
    return math.isfinite(float(flat.sum())) or bool(torch.isfinite(flat).all())


def first_nonfinite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor with a NaN or an infinity; None if all are finite."""
    return next((name for name, tensor in named if not bool(torch.isfinite(tensor).all())), None)


class ForwardWatch:
    """Finds the first module of this rank that computes a non-finite value from finite inputs.

    Collectives spread non-finite values to other ranks. If several ranks of a pipeline stage find
    such a module, the rank with the smallest `when` computed the first non-finite value.
    """

    def __init__(self) -> None:
        self.module = ""
        """Name of the first module that computed a non-finite value from finite inputs; "" if none
        did."""
        self.when = 0
        """Position of the non-finite value among the checked module outputs and collective inputs,
        counted from 1; 0 if `module` is empty."""
        self._events = 0
        self._running: list[tuple[str, bool]] = []  # module, and whether its inputs are finite

    @contextlib.contextmanager
    def over(self, model: nn.Module) -> Iterator[None]:
        """Return a context that checks all forward passes of `model`."""
        handles = []
        for name, module in model.named_modules():
            if name:
                handles.append(module.register_forward_pre_hook(partial(self._enter, name)))
                handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, module: nn.Module, inputs: object) -> None:
        self._running.append((name, _all_finite(inputs)))

    def _leave(self, module: nn.Module, inputs: object, output: object) -> None:
        self.look(output)
        self._running.pop()

    def look(self, value: object) -> None:
        """Check a module's output, or this rank's contribution to a collective."""
        self._events += 1
        if self.module or _all_finite(value):
            return
        with_finite_inputs = [name for name, finite in self._running if finite]
        if with_finite_inputs:
            self.module, self.when = with_finite_inputs[-1], self._events


def write_marker(log_dir: Path, rank: int, step: int, text: str, host: str, **more: object) -> None:
    """Write a JSON file about a non-finite value. If this fails, log a warning.

    Users and scripts can read the file to decide whether to restart the run.

    Args:
        log_dir: Directory of the file `nonfinite-rank{rank}.json`.
        rank: The rank that computed the value.
        step: Number of the update.
        text: Description of the value.
        host: Host name of the rank's machine.
        more: Other keys and values of the file.
    """
    path = log_dir / f"nonfinite-rank{rank}.json"
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        files.write_json(path, {"rank": rank, "step": step, "host": host, "what": text, **more})
    except OSError as error:
        logger.warning("could not write %s: %s", path, error.strerror)


def _all_finite(value: object) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _floats(value))


def _floats(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, (tuple, list)):
        return [tensor for entry in output for tensor in _floats(entry)]
    return []
