"""Division of any torch module into segments, which are modules whose parameters are needed at the
same time. Division of these parameters into classes that share chunks. Hooks of the segments."""

from __future__ import annotations

import sys
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from optimus.chunks.buffers import ChunkState
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.layout import ALIGNMENT
from optimus.chunks.options import ParamOptions
from optimus.chunks.segments import Hook
from optimus.errors import ConfigError, refuse_if
from optimus.offloading import guard
from optimus.offloading.checks import NotCopied, refuse_compiled

_CONTAINERS = (nn.ModuleList, nn.Sequential)
_CALL = nn.Module._call_impl.__code__
"""Code that calls the forward and the hooks of a module."""
_BACKWARD = BackwardCFunction.apply.__code__
"""Code that calls the backward of an autograd function, such as a reentrant checkpoint."""
_RUN_BACKWARD = _engine_run_backward.__code__
"""Code that runs a backward pass."""
_OUTSIDE = (
    "parameter {} has a gradient from outside of the forward of its module; call the module for "
    "each use of the parameter, return all its outputs, and use no results of an earlier forward"
)
_OBSERVED = "_optimus_observed"
"""Name of an attribute of output tensors. Its value is the `grad_fn` that the tensor had when a
`_BackwardTrigger` was registered. After an in-place operation, the `grad_fn` differs from this
value, and the tensor needs another trigger."""


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
    """Name of the segment; "" for a block. Only parameters with equal values of this field share
    chunks. Large parameters, such as embeddings, therefore have separate chunks and do not
    determine the chunk length of blocks. A small parameter, such as the weight of a norm, never
    needs a large chunk on the device."""


def find_segments(model: nn.Module) -> list[ModuleSegment]:
    """Return the segments of a model in the order in which its modules are registered.

    There are three kinds of segments: the blocks of the model, which are the elements of each
    ModuleList or Sequential; the largest modules without blocks, such as an embedding; and modules
    that enclose segments of the first two kinds, if they have direct parameters. If the model has
    no ModuleList and no Sequential, its children are the blocks.
    """
    blocks = set(_blocks(model, sum(p.numel() for p in model.parameters())))
    if not blocks:
        blocks = {child for child in model.children() if any(True for _ in child.parameters())}
    canonical = {id(p): name for name, p in model.named_parameters()}
    segments: dict[nn.Module, ModuleSegment] = {}
    for segment in _walk(model, "", blocks, canonical, ()):
        known = segments.get(segment.module)
        segments[segment.module] = segment if known is None else _merge(known, segment)
    return list(segments.values())


def _merge(first: ModuleSegment, second: ModuleSegment) -> ModuleSegment:
    """Return a single segment for a module that occurs in two other modules. `first` and `second`
    are its segments in these modules."""
    inherited = tuple(dict.fromkeys(first.inherited + second.inherited))
    names = dict.fromkeys(first.parameters + second.parameters)
    direct = tuple(name for name in names if name not in inherited)
    return replace(first, parameters=direct, inherited=inherited)


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
        parameters = iter(())  # these belong to an enclosing module
    names = dict.fromkeys(canonical[id(p)] for p in parameters)
    direct = tuple(parameter for parameter in names if parameter not in inherited)
    if direct:
        yield ModuleSegment(name, module, direct, inherited, module in blocks)
    if not is_whole:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            yield from _walk(child, path, blocks, canonical, inherited + direct)


def _is_called(module: nn.Module) -> bool:
    """Return True if a module has a forward. A module without a forward, such as a ModuleDict or a
    ParameterList, is not called; the enclosing module uses its parameters and children."""
    forward = getattr(type(module), "forward", None)  # no attribute: scripted
    return isinstance(module, nn.Sequential) or forward is not nn.Module.forward


def _direct_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the direct parameters of a module and of those children that have no forward, because
    the module uses the parameters of such children."""
    yield from (p for p in module._parameters.values() if p is not None)
    for child in module.children():
        if not _is_called(child):
            yield from _direct_parameters(child)


def chunk_keys(
    named: dict[str, nn.Parameter], segments: Sequence[ModuleSegment]
) -> dict[str, ParamProcessGroups]:
    """Return a dict from the name of each parameter to its key for the layout
    (`optimus.chunks.layout.Parameter.key`), in order of first use. Parameters with equal keys share
    chunks."""
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


class Owner(Protocol):
    """The offloaded model."""

    def use(self, index: int, backward: bool, callers: Collection[int]) -> None:
        """Provide a segment and `callers` with their parameters and, for a backward, their gradient
        buffers."""

    @property
    def calls(self) -> SegmentCalls:
        """The record of the segments that compute."""

    def close(self, index: int) -> None:
        """Guard the parameters of a segment that has computed its forward."""

    def keep(self, *handles: RemovableHandle) -> None:
        """Keep handles of hooks."""

    def check_open(self) -> None:
        """Raise ConfigError if the offloading has ended."""


class SegmentHooks(NotCopied):
    """Hooks of a segment.

    Args:
        owner: The model.
        index: Index of the segment.
        segment: The segment.
        guarded: Guarded parameters by name.
    """

    def __init__(
        self,
        owner: Owner,
        index: int,
        segment: ModuleSegment,
        guarded: dict[str, nn.Parameter],
    ) -> None:
        self._owner, self._index, self._module = owner, index, segment.module
        self.name = segment.name or "model"
        self.parameters = {name: guarded[name] for name in segment.parameters if name in guarded}
        """Guarded parameters of the segment's module, by name."""
        self.needed = [guarded[n] for n in segment.parameters + segment.inherited if n in guarded]
        """Guarded parameters that the segment's computation can read: those of its module, and
        direct parameters of the modules around it."""
        self._is_offloaded = bool(guarded)
        """True if a parameter of the model is guarded."""
        self.names = guarded.keys() & {*segment.parameters, *segment.inherited}
        """Names of the parameters `needed`."""
        self._storages = guard.storages_of([*self.parameters.values()])
        self._of_engine: tuple[Hook, Hook | None] = (lambda: None, None)

    def register(self, before_forward: Hook, before_backward: Hook | None) -> None:
        """As `ModelSegment.register`."""
        self._of_engine = before_forward, before_backward
        # This hook must be the first, because other hooks may read parameters, as torch's
        # weight_norm does.
        first = self._module.register_forward_pre_hook(self._before_forward, prepend=True)
        self._owner.keep(first)
        if self._is_offloaded:
            # Also for a segment on the device, because its forward in a recomputation interrupts
            # the backward of another segment.
            hook = self._module.register_forward_hook(self._close, always_call=True)
            self._owner.keep(hook)
        self._owner.keep(self._module.register_forward_hook(self._after_forward))

    def before(self, backward: bool) -> None:
        """Call the engine's hook for a forward or, with `backward`, for a backward."""
        hook = self._of_engine[backward]
        assert hook is not None
        hook()

    def num_running(self) -> int:
        """Return the number of calls of the module that run in this thread."""
        count, frame = 0, sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            count += frame.f_code is _CALL and frame.f_locals["self"] is self._module
        return count

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            refuse_compiled()
        self._owner.use(self._index, False, self._owner.calls.callers_of(self._index))

    def _close(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._owner.close(self._index)

    def _after_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        tensors = list(guard.tensors_in(outputs))
        if self._storages and (views := guard.views_of(self._storages, tensors)):
            outputs = guard.keep_views(outputs, views, self._storages)
            tensors = list(guard.tensors_in(outputs))
        if not torch.is_grad_enabled():
            return outputs
        refuse_if(
            not tensors and not isinstance(outputs, (bool, int, float, str)),
            f"{type(module).__name__} returns a {type(outputs).__name__}, in which no tensor is "
            "found; return tensors, or tuples, lists, dicts or dataclasses of tensors",
        )
        callers = self._owner.calls.callers_of(self._index)
        trigger = _BackwardTrigger(self._owner, self._index, callers)
        # An in-place operation on a view removes the hooks of the view, but not the hooks of its
        # base.
        for tensor in [*tensors, *(t._base for t in tensors if t._base is not None)]:
            # A leaf is not the result of an operation and needs no trigger. An output of an inner
            # segment already has a trigger, which provides the parameters of the inner segment and
            # of the enclosing modules.
            if not tensor.requires_grad or tensor.is_leaf:
                continue
            if getattr(tensor, _OBSERVED, None) is not tensor.grad_fn:
                setattr(tensor, _OBSERVED, tensor.grad_fn)
                tensor.register_hook(trigger)
        return outputs


class _BackwardTrigger:
    """Tensor hook of the outputs of a forward. In each backward pass, the first call of the hook
    calls `Owner.use` for the backward of the segment.

    Autograd runs operations in the reverse order of their creation. Therefore the backward of all
    later segments is complete at the first call.
    """

    def __init__(self, owner: Owner, index: int, callers: Collection[int]) -> None:
        self._owner, self._index, self._callers = owner, index, callers
        self._task = -1

    def __call__(self, grad: Tensor) -> None:
        self._owner.check_open()
        if self._task != (task := torch._C._current_graph_task_id()):
            self._task = task
            self._owner.use(self._index, True, self._callers)


class SegmentCalls(NotCopied):
    """Records which segments compute now, to find the callers of a segment.

    Segment A is a caller of segment B if the forward or a hook of A calls B, and A does not enclose
    B. Then B does not have all parameters of A, and A may use its parameters before and after the
    call, also in backward.

    Args:
        hooks: Hooks of all segments.
    """

    def __init__(self, hooks: Sequence[SegmentHooks]) -> None:
        self._hooks = hooks
        self._in_forward: list[int] = []
        """Segments whose forward or hooks run now, with the outermost first. A forward that
        KeyboardInterrupt has ended, for which torch calls no hook, also stays here."""
        self._recorded: dict[int, set[int]] = {}
        """Callers of each segment in all forwards, for recomputations in backward."""
        self._in_backward: Sequence[int] = ()
        """Segments of the last use in backward, whose backward may still run."""
        self._recomputed_for: tuple[int, int] | None = None
        """The operation of backward for which a checkpoint recomputes the forward of such a
        segment, as `_present_operation` returns it."""

    def callers_of(self, index: int) -> list[int]:
        """Return the callers of a segment that run now. In a recomputation, also return each caller
        of the segment in an earlier forward, if the backward of this caller may still run. In a
        hook of backward, also return all other segments whose backward may still run."""
        names = self._hooks[index].names
        calling = [i for i in self._in_forward if not self._hooks[i].names <= names]
        calling = [i for i in calling if self._hooks[i].num_running()]
        if torch._C._current_graph_task_id() != -1:
            others = [i for i in self._in_backward if not self._hooks[i].names <= names]
            recorded = self._recorded.get(index, set())
            calling = [*(i for i in others if i in recorded), *calling]
            if others and not _is_recomputation():
                calling += others  # a hook of backward calls the module
        return list(dict.fromkeys(calling))

    def begin_forward(self, index: int, callers: Collection[int]) -> None:
        """Record the start of a segment's forward, with its callers."""
        self._in_forward.append(index)
        if callers and torch._C._current_graph_task_id() == -1:
            self._recorded.setdefault(index, set()).update(callers)

    def end_forward(self, index: int) -> bool:
        """Record the end of a segment's forward. Return False if an outer call of the same module
        still runs. Also return False if the backward of the segment runs, because a nested
        checkpoint may then recompute the forward without hooks."""
        if index not in self._in_forward:  # a hook has failed before the use
            return True
        while self._in_forward.pop() != index:
            pass
        if index in self._in_backward and torch._C._current_graph_task_id() != -1:
            self._recomputed_for = _present_operation()
            return False
        return index not in self._in_forward or self._hooks[index].num_running() <= 1

    def begin_backward(self, indices: Sequence[int]) -> None:
        """Record that the backward of the segments `indices` begins; () after a backward pass."""
        self._in_backward, self._recomputed_for = indices, None

    def interrupted_backward(self) -> Sequence[int]:
        """Return the segments whose backward was interrupted by a forward and now continues. Call
        this method at the end of a forward.

        A recomputation interrupts the backward of a segment. The recomputation can also compute
        other segments after this segment, such as a block under `torch.no_grad()`. The last use is
        then the use of another segment, and no new use begins when the backward continues.
        """
        operation = _present_operation()
        if operation is None or operation != self._recomputed_for:
            return ()
        if any(self._hooks[i].num_running() for i in self._in_forward):
            return ()
        return self._in_backward

    def clear(self) -> None:
        """Forget the forwards that run."""
        self._in_forward.clear()


def _present_operation() -> tuple[int, int] | None:
    """Return the numbers of the backward pass and of the autograd node that run in this thread;
    None outside of backward. A reference to the node would keep the activations of its graph."""
    node = torch._C._current_autograd_node()
    return None if node is None else (torch._C._current_graph_task_id(), node._sequence_nr())


def _is_recomputation() -> bool:
    """Return True if code of this thread runs in the recomputation of a checkpoint or in the
    backward of an autograd function, and False if it runs in a hook of the present backward."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code is not _RUN_BACKWARD:
        frame = frame.f_back
        if frame.f_code is _BACKWARD or frame.f_globals.get("__name__") == checkpoint.__module__:
            return True
    return False


def record_gradient(received: set[str], tasks: list[int], name: str, parameter: Tensor) -> None:
    """Record in a hook that the parameter `name` has received a gradient."""
    if not tasks:  # no segment has started its backward
        raise ConfigError(_OUTSIDE.format(name))
    received.add(name)


def check_gradient_buffer(
    allocated: Container[Any], chunk: ChunkState, name: str, grad: Tensor
) -> None:
    """Raise ConfigError in a hook if the memory to which backward adds a gradient is freed, or is
    being copied to the host."""
    if chunk not in allocated:
        raise ConfigError(_OUTSIDE.format(name))
