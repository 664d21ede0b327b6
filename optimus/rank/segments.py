"""Segments of a rank's model, in the order in which a step uses them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from torch import nn

from optimus.chunks.units import Notice, Unit, on_gradient, watch_module
from optimus.model.transformer import Transformer
from optimus.parallel.layout import Layout


class Segment(NamedTuple):
    """Modules whose parameters must be gathered at the same time, such as a block."""

    module: nn.Module
    """First module of the segment. The segment's parameters must be gathered before it runs."""
    unit: Unit
    """Names of the segment's parameters, and a function that registers the hooks of the segment."""


def segments_of(model: Transformer, layout: Layout) -> list[Segment]:
    """Return the segments of a rank's model in order of first use.

    The segments are the embedding, each block, and the final norm with the head.
    """
    segments, names = [], [name for name, _ in model.named_parameters()]
    if layout.has_first:
        watch = partial(watch_module, model.embed)
        unit = Unit("the embedding", 0, _starting_with("embed.", names), watch)
        segments.append(Segment(model.embed, unit))
    for number, block in model.blocks.items():
        prefix, watch = f"blocks.{number}.", partial(watch_module, block)
        parameters = tuple(prefix + name for name, _ in block.named_parameters())
        unit = Unit(f"block {number}", layout.stage_of(prefix), parameters, watch)
        segments.append(Segment(block, unit))
    if layout.has_last:
        parameters = _starting_with(("final_norm.", "head."), names) + tuple(model.tied_uses())
        if not layout.has_first:  # the copy of the embedding for a tied head
            parameters += _starting_with("embed.", names)
        stage = layout.schedule.num_stages - 1
        unit = Unit("the head", stage, parameters, partial(_watch_head, model))
        segments.append(Segment(model.final_norm, unit))
    return segments


def _starting_with(prefix: str | tuple[str, ...], names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name.startswith(prefix))


def _watch_head(model: Transformer, before_forward: Notice, before_backward: Notice) -> None:
    """Register the hooks of the head's segment, whose first module is the final norm."""
    model.final_norm.register_forward_pre_hook(lambda *_: before_forward())
    model.cross_entropy.register_forward_pre_hook(
        lambda module, inputs: on_gradient(inputs[0], before_backward)
    )
