"""Division of any torch module into segments, whose parameters are needed at the same time, and of
their parameters into classes of chunks."""

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
    """A segment of a model: a module whose parameters are needed at the same time."""

    name: str
    """Name of the module in the model, "" for the model."""
    module: nn.Module
    parameters: tuple[str, ...]
    """Names of the parameters of the module. A tied parameter has the first name under which
    `named_parameters` yields it, and belongs to several segments."""
    inherited: tuple[str, ...]
    """Names of the parameters that belong directly to the enclosing modules, which may use them
    before and after each call of the segment."""
    is_block: bool
    """True for an element of a list of blocks, such as a transformer layer."""


@dataclass(frozen=True)
class _ChunkOptions(ParamOptions):
    """Options that parameters of a chunk have in common."""

    segment: str = ""
    """Name of the segment; "" for a block. Only parameters with equal names share chunks. Large
    parameters, such as embeddings, therefore do not determine the chunk length of blocks. Nor do
    they share a chunk with a small parameter, such as that of a norm, which would then need the
    large chunk on the device."""


def find_segments(model: nn.Module) -> list[ModuleSegment]:
    """Return the segments of a model in the order in which its modules are registered.

    There are three kinds of segments: the blocks of the model, which are the elements of each
    ModuleList or Sequential; the largest modules without blocks, such as an embedding; and the
    modules that enclose these, if they have direct parameters. If the model has no ModuleList and
    no Sequential, its children are the blocks.
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
    """Yield the segments in a module. `inherited` are the direct parameters of the enclosing
    modules, and `canonical` maps the id of each parameter to its first name in the model."""
    is_whole = module in blocks or not any(child in blocks for child in module.modules())
    is_whole = is_whole and _is_called(module)
    parameters = module.parameters() if is_whole else _direct_parameters(module)
    if not (_is_called(module) or name == ""):
        parameters = iter(())  # they are direct parameters of an enclosing module
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
    enclosing module uses its parameters and children."""
    return isinstance(module, nn.Sequential) or type(module).forward is not nn.Module.forward


def _direct_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the direct parameters of a module and of its children without a forward, whose
    parameters the module uses."""
    yield from (p for p in module._parameters.values() if p is not None)
    for child in module.children():
        if not _is_called(child):
            yield from _direct_parameters(child)


def chunk_keys(
    named: dict[str, nn.Parameter], segments: Sequence[ModuleSegment]
) -> dict[str, ParamProcessGroups]:
    """Return the key of each parameter for the layout (`optimus.chunks.layout.Parameter.key`), by
    name, in order of first use. Parameters with equal keys share chunks."""
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
