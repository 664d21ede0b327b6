"""Segments of a rank's model, in the order in which a step uses them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from optimus.chunks.units import Notice, Unit, on_gradient, watch_module
from optimus.model.transformer import Transformer
from optimus.parallel.layout import Layout


def units_of(model: Transformer, layout: Layout) -> list[Unit]:
    """Return the segments of a rank's model in order of first use: the embedding, each block, final
    norm and head.

    A tied head is a further use of the embedding by the name `head.weight`; on another stage than
    the embedding's it also has the embedding's parameter.
    """
    units = []
    parameters = dict(model.named_parameters())
    if layout.has_first:
        watch = partial(watch_module, model.embed)
        units.append(Unit("the embedding", 0, _below("embed.", parameters), watch))
    for number, block in model.blocks.items():
        stage = layout.stage_of(f"blocks.{number}.")
        names = _below(f"blocks.{number}.", parameters)
        units.append(Unit(f"block {number}", stage, names, partial(watch_module, block)))
    if layout.has_last:
        names = (
            *_below("final_norm.", parameters),
            *_below("head.", parameters),
            *model.tied_uses(),
        )
        if not layout.has_first:
            names += _below("embed.", parameters)
        stage = layout.schedule.num_stages - 1
        units.append(Unit("the head", stage, names, partial(_watch_head, model)))
    return units


def _below(prefix: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name.startswith(prefix))


def _watch_head(model: Transformer, before_forward: Notice, before_backward: Notice) -> None:
    """Watch from the final norm, whose weights belong to the head, to the logits."""
    model.final_norm.register_forward_pre_hook(lambda *_: before_forward())
    model.cross_entropy.register_forward_pre_hook(
        lambda module, inputs: on_gradient(inputs[0], before_backward)
    )
