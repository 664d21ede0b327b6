"""Non-finite losses and gradients: found on the rank that made them, before any reduction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from optimus import files


def is_finite(flat: Tensor) -> bool:
    """Whether a large buffer holds only finite values.

    One fast fp32 sum decides the common case; a sum that overflows is looked at element by element.
    """
    return math.isfinite(float(flat.sum())) or bool(torch.isfinite(flat).all())


def first_nonfinite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first name whose tensor holds a NaN or an infinity."""
    return next((name for name, tensor in named if not bool(torch.isfinite(tensor).all())), None)


def first_nonfinite_module(model: nn.Module, run: Callable[[], object]) -> str | None:
    """The innermost module that, while `run` runs, first makes a non-finite output of finite
    inputs."""
    found: list[str] = []

    def watch(name: str):
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            if not found and not _all_finite(output) and _all_finite(inputs):
                found.append(name)

        return hook

    handles = [m.register_forward_hook(watch(n)) for n, m in model.named_modules() if n]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def write_marker(log_dir: Path, rank: int, step: int, text: str, host: str) -> None:
    """Leave a durable note for whoever decides about a restart."""
    log_dir.mkdir(parents=True, exist_ok=True)
    files.write_json(
        log_dir / f"nonfinite-rank{rank}.json",
        {"rank": rank, "step": step, "host": host, "what": text},
    )


def _all_finite(value: object) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _floats(value))


def _floats(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, (tuple, list)):
        return [tensor for item in output for tensor in _floats(item)]
    return []
