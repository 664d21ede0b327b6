"""Segments of a module that is not ours: modules whose parameters are needed at the same time, and
the chunks of their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.layout import ALIGNMENT
from optimus.chunks.options import ParamOptions

_CONTAINERS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class ModuleSegment:
    """A module that is a segment."""

    name: str
    """Name of the module in the model, "" for the model."""
    module: nn.Module
    parameters: tuple[str, ...]
    """Names of the parameters of the module. A tied parameter has the first name under which
    `named_parameters` yields it, and belongs to several segments."""
    inherited: tuple[str, ...]
    """Names of the parameters that belong directly to the modules above. These modules may use them
    before and after each call of the segment."""
    is_block: bool
    """True for an element of a list of blocks, such as a transformer layer."""


@dataclass(frozen=True)
class _ChunkOptions(ParamOptions):
    """Options that parameters of a chunk have in common."""

    segment: str = ""
    """The segment, unless it is a block. Large parameters, such as embeddings, then neither
    determine the chunk length of the blocks, nor share a chunk with a norm, which would need it on
    the device."""


def find_segments(model: nn.Module) -> list[ModuleSegment]:
    """Return the segments of a model in the order in which its modules are registered.

    Segments are the blocks of the model, which are elements of lists or sequences of modules; the
    largest modules without blocks, such as an embedding; and the modules above them, if they have
    direct parameters. A model without lists has its children as segments.
    """
    blocks = set(_blocks(model, sum(p.numel() for p in model.parameters())))
    if not blocks:
        blocks = {child for child in model.children() if any(True for _ in child.parameters())}
    canonical = {id(p): name for name, p in model.named_parameters()}
    return list(_walk(model, "", blocks, canonical, ()))


def _blocks(module: nn.Module, total: int) -> Iterator[nn.Module]:
    """Yield the blocks in a module.

    Args:
        module: The module.
        total: Number of elements of all parameters of the model.
    """
    is_list = isinstance(module, _CONTAINERS)
    for child in module.children():
        size = sum(p.numel() for p in child.parameters())
        # An element with most of the parameters, such as the body between an embedding and a head,
        # is not a block if it contains blocks.
        contains_blocks = any(isinstance(m, _CONTAINERS) and len(m) > 1 for m in child.modules())
        if size and is_list and not (2 * size > total and contains_blocks):
            yield child
        elif size:
            yield from _blocks(child, total)


def _walk(
    module: nn.Module,
    name: str,
    blocks: set[nn.Module],
    canonical: dict[int, str],
    inherited: tuple[str, ...],
) -> Iterator[ModuleSegment]:
    """Yield the segments in a module. The modules above have the direct parameters `inherited`."""
    is_whole = module in blocks or not any(child in blocks for child in module.modules())
    is_whole = is_whole and _is_called(module)
    parameters = module.parameters() if is_whole else _direct_parameters(module)
    if not (_is_called(module) or name == ""):
        parameters = iter(())  # those of a module above
    names = dict.fromkeys(canonical[id(p)] for p in parameters)
    direct = tuple(parameter for parameter in names if parameter not in inherited)
    if direct:
        yield ModuleSegment(name, module, direct, inherited, module in blocks)
    if not is_whole:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            yield from _walk(child, path, blocks, canonical, inherited + direct)


def _is_called(module: nn.Module) -> bool:
    """Return False for a module without a forward, such as a ModuleDict or a ParameterList. The
    module above uses its parameters and children."""
    return isinstance(module, nn.Sequential) or type(module).forward is not nn.Module.forward


def _direct_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the direct parameters of a module, and those of the modules below that are not called,
    because the module uses them."""
    yield from (p for p in module._parameters.values() if p is not None)
    for child in module.children():
        if not _is_called(child):
            yield from _direct_parameters(child)


def chunk_keys(
    named: dict[str, nn.Parameter], segments: Sequence[ModuleSegment]
) -> dict[str, ParamProcessGroups]:
    """Return the key of each parameter's chunk, in order of first use."""
    in_block = {name for segment in segments if segment.is_block for name in segment.parameters}
    ordered: dict[str, str] = {}
    for segment in segments:
        for name in segment.parameters:
            ordered.setdefault(name, "" if name in in_block else segment.name or "model")
    assert ordered.keys() == named.keys(), "a parameter is in no segment"
    return {
        name: ParamProcessGroups(
            options=_ChunkOptions(
                frozen=not named[name].requires_grad,
                dtype=named[name].dtype,
                segment=of_segment,
            )
        )
        for name, of_segment in ordered.items()
    }


def default_chunk_length(named: dict[str, nn.Parameter], segments: Sequence[ModuleSegment]) -> int:
    """Return the number of elements of the largest block."""

    def length(segment: ModuleSegment) -> int:
        return sum(-(-named[name].numel() // ALIGNMENT) * ALIGNMENT for name in segment.parameters)

    blocks = [segment for segment in segments if segment.is_block] or list(segments)
    return max(ALIGNMENT, max(map(length, blocks)))
