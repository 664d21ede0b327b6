"""Segments of a module that is not ours: modules whose parameters are needed at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

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
