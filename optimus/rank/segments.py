"""The segments of a rank's model: modules whose parameters are needed at the same time."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from optimus.chunks.segments import Hook, ModelSegment, on_gradient, register_module
from optimus.model.transformer import Transformer
from optimus.parallel.layout import Layout


def segments_of(model: Transformer, layout: Layout) -> list[ModelSegment]:
    """Return the segments of a rank's model in order of first use.

    A segment is a group of parameters that are needed at the same time. The embedding, each
    transformer block, and the final norm with the head are segments. The result contains the
    segments that the rank has.
    """
    segments, names = [], [name for name, _ in model.named_parameters()]
    if layout.has_first:
        register = partial(register_module, model.embed)
        parameters = _starting_with("embed.", names)
        segments.append(ModelSegment("the embedding", 0, parameters, register))
    for number, block in model.blocks.items():
        prefix, register = f"blocks.{number}.", partial(register_module, block)
        parameters = tuple(prefix + name for name, _ in block.named_parameters())
        stage = layout.stage_of(prefix)
        segments.append(ModelSegment(f"block {number}", stage, parameters, register))
    if layout.has_last:
        parameters = _starting_with(("final_norm.", "head."), names) + tuple(model.separated_uses())
        if not layout.has_first:  # a copy of the embedding, which the tied head uses
            parameters += _starting_with("embed.", names)
        stage = layout.schedule.num_stages - 1
        segments.append(ModelSegment("the head", stage, parameters, partial(_register_head, model)))
    return segments


def _starting_with(prefix: str | tuple[str, ...], names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name.startswith(prefix))


def _register_head(model: Transformer, before_forward: Hook, before_backward: Hook | None) -> None:
    """Register hooks before the forward and the backward pass of the segment of the head, which
    consists of the final norm and the head."""
    model.final_norm.register_forward_pre_hook(lambda *_: before_forward())
    if before_backward is not None:
        model.cross_entropy.register_forward_pre_hook(
            lambda module, inputs: on_gradient(inputs[0], before_backward)
        )
