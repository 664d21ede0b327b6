"""Non-finite losses and gradients: found on the rank that made them, before any reduction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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


def first_nonfinite_module(model: nn.Module, batch: tuple[Tensor | None, ...]) -> str | None:
    """The innermost module that first gives a non-finite output in `model.losses(*batch)`."""
    found: list[str] = []

    def watch(name: str):
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            if not found and not all(bool(torch.isfinite(t).all()) for t in _floats(output)):
                found.append(name)

        return hook

    handles = [m.register_forward_hook(watch(n)) for n, m in model.named_modules() if n]
    try:
        with torch.no_grad():
            model.losses(*batch)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def diagnose(
    model: nn.Module,
    parameters: dict[str, Tensor],
    gradients: dict[str, Tensor],
    batches: Sequence[tuple[Tensor | None, ...]],
) -> str:
    """One clause that says where on this rank the trouble began: parameter, layer or gradient.

    `batches` are the microbatches (tokens, ids) of the step so far; they are run forward again.
    """
    if name := first_nonfinite(parameters.items()):
        return f"parameter {name} is non-finite"
    if name := next(filter(None, (first_nonfinite_module(model, b) for b in batches)), None):
        return f"the output of layer {name} is non-finite"
    if name := first_nonfinite(reversed(list(gradients.items()))):
        return f"the gradient of {name} is non-finite, although the forward pass is finite"
    return "the values are finite when computed again, which points to the hardware"


def write_marker(log_dir: Path, rank: int, step: int, text: str, host: str) -> None:
    """Leave a durable note for whoever decides about a restart."""
    log_dir.mkdir(parents=True, exist_ok=True)
    files.write_json(
        log_dir / f"nonfinite-rank{rank}.json",
        {"rank": rank, "step": step, "host": host, "what": text},
    )


def _floats(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, (tuple, list)):
        return [tensor for item in output for tensor in _floats(item)]
    return []
