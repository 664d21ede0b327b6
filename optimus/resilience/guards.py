"""Non-finite losses and gradients: found on the rank that made them, before any reduction."""

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
    """Whether a large buffer holds only finite values.

    One fast fp32 sum decides the common case; a sum that overflows is looked at element by element.
    """
    return math.isfinite(float(flat.sum())) or bool(torch.isfinite(flat).all())


def first_nonfinite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first name whose tensor holds a NaN or an infinity."""
    return next((name for name, tensor in named if not bool(torch.isfinite(tensor).all())), None)


class ForwardWatch:
    """Finds where, on this rank, a forward pass first makes a non-finite value of finite inputs.

    Ranks that share layers run the same modules and collectives in the same order, and a collective
    spreads what one of them put in: whose `when` is least, made it.
    """

    def __init__(self) -> None:
        self.module = ""
        """The innermost module that did; "" if none did."""
        self.when = 0
        """At which module's end or collective, counted on this rank."""
        self._events = 0
        self._running: list[tuple[str, bool]] = []  # modules, and whether their inputs are finite

    @contextlib.contextmanager
    def over(self, model: nn.Module) -> Iterator[None]:
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
        """At a module's output, or at what this rank is about to put into a collective."""
        self._events += 1
        if self.module or _all_finite(value):
            return
        sound = [name for name, finite in self._running if finite]
        if sound:
            self.module, self.when = sound[-1], self._events


def write_marker(log_dir: Path, rank: int, step: int, text: str, host: str, **more: object) -> None:
    """Leave a durable note, ready for JSON, that a restart can be decided on; a disk that does not
    take it only warns."""
    path = log_dir / f"nonfinite-rank{rank}.json"
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        files.write_json(path, {"rank": rank, "step": step, "host": host, "what": text, **more})
    except OSError as error:
        logger.warning("%s not written: %s", path, error.strerror)


def _all_finite(value: object) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _floats(value))


def _floats(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, (tuple, list)):
        return [tensor for item in output for tensor in _floats(item)]
    return []
