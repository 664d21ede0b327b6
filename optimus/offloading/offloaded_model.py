"""Any torch module whose states are in chunks: hooks, guards and gradients of the module."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from optimus import platform
from optimus.chunks.buffers import ChunkState, ParamChunk
from optimus.chunks.engine import ChunkEngine
from optimus.chunks.layout import Slot
from optimus.chunks.residency import Residency, Use
from optimus.chunks.segments import ModelSegment
from optimus.errors import ConfigError, counted, one_line, refuse_if
from optimus.offloading import guard
from optimus.offloading.checks import DDP_IGNORED, MARK, NotCopied, RefuseDDP, Structure
from optimus.offloading.placement import ModelChunks, ReleasedValues
from optimus.offloading.segments import (
    ModuleSegment,
    SegmentCalls,
    SegmentHooks,
    check_gradient_buffer,
    record_gradient,
)
from optimus.offloading.state_dicts import StateDictHooks

logger = logging.getLogger(__name__)

_MAX_USES = 1_000_000
"""Largest number of uses of segments that are recorded in a step. Later uses are not recorded, so
that the plan of the next step does not contain them."""
_VMAP = torch._C._functorch.TransformType.Vmap
_raw = torch._C.DisableTorchFunctionSubclass
"""Context manager in which functions on guarded tensors are not intercepted."""


class OffloadedModel(NotCopied):
    """A module whose parameters, gradients and optimizer states are in chunks.

    Args:
        model: The module.
        chunks: Chunks of the model.
        residency: Placement of the states.
        device: Device on which the model computes.
        expected_update: Function that returns the argument of `ChunkEngine.expect_update` for a
            step. It is called before the first backward of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        chunks: ModelChunks,
        residency: Residency,
        device: torch.device,
        expected_update: Callable[[], tuple[float, float] | None],
    ) -> None:
        self._module, self._expected_update = model, expected_update
        self.is_released = False
        self.named = {name: chunks.named[name] for name in chunks.keys}
        self.trained = [name for name, p in self.named.items() if p.requires_grad]
        self.engine = ChunkEngine(
            self.named,
            chunks.keys.__getitem__,
            chunks.rule,
            initial=ReleasedValues(self.named, 4 * chunks.length),
            dtype=torch.float32,
            chunk_length=chunks.length,
            deterministic=True,
            residency=residency,
            device=device,
        )
        platform.trim_heap()
        self._slots: dict[str, tuple[ParamChunk, Slot]] = {
            slot.name: (chunk, slot)
            for chunk in [*self.engine.chunks, *self.engine.frozen.chunks]
            for slot in chunk.chunk.slots
        }
        self._grads = {name: self.engine.gradient(name) for name in self.trained}
        self._open: list[nn.Parameter] = []
        """Parameters on the host that the present segments may use. These are not guarded now."""
        self._uses: list[tuple[int, bool]] = []
        self._planned: list[tuple[int, bool]] = []
        self._in_step = False
        self._is_updated = False
        """True from an update until the gradients are cleared."""
        self._tasks: list[int] = []
        """Autograd's ids of the backward passes in progress, which can be nested."""
        self._is_complete = True
        """False from the start of a backward until the backward is complete. After a backward that
        fails, it stays False."""
        self._larger_cache = "cache_chunks = {}"
        """Argument of `optimus.offload` that makes the cache larger, with {} for its chunks."""
        self.num_backwards = 0
        self._first_backward = 0
        """Value of `num_backwards` before the present step."""
        self._expected_backwards = 0
        self._received: set[str] = set()
        """Parameters that have received a gradient since the gradients were cleared."""
        # These hooks do not refer to `self`, because Python cannot collect reference cycles that
        # contain such a hook.
        self._handles: list[RemovableHandle] = [
            self.named[name].register_post_accumulate_grad_hook(
                partial(record_gradient, self._received, self._tasks, name)
            )
            for name in self.trained
        ]
        self._device_views: dict[str, Tensor] = {}
        segments = reversed(chunks.segments)
        self.segment_of = {name: s.name or "model" for s in segments for name in s.parameters}
        """Name of the first segment that has a parameter, by the name of the parameter."""
        self._guarded = self._guard_tensors()
        self._versions = {name: parameter._version for name, parameter in self.named.items()}
        """Version counters of the parameters when their values were last set."""
        self._watched = self._watch_tensors()
        self._hooks = [
            SegmentHooks(self, index, segment, self._guarded)
            for index, segment in enumerate(chunks.segments)
        ]
        self.calls = SegmentCalls(self._hooks)
        self._needs = self._attach(chunks.segments)
        self.clear_gradients(set_to_none=True)
        StateDictHooks(self, model).register()
        self._mark = NotCopied()
        for marked in (model, *self.named.values()):
            setattr(marked, MARK, self._mark)
        self._ignored = vars(model).get(DDP_IGNORED)
        setattr(model, DDP_IGNORED, RefuseDDP())
        self._structure = Structure(model, self.named, self._mark)

    def _attach(self, segments: Sequence[ModuleSegment]) -> Sequence[frozenset[int]]:
        """Register the hooks of all segments with the engine. Return, for each segment, the numbers
        of the transient chunks that it needs."""
        of_engine = [
            ModelSegment(s.name, 0, s.parameters + s.inherited, hooks.register)
            for s, hooks in zip(segments, self._hooks, strict=True)
        ]
        self.engine.attach(of_engine, passes=())
        return self.engine.transient_needs(of_engine)

    def _guard_tensors(self) -> dict[str, nn.Parameter]:
        """Guard the parameters and gradients whose home is the host. Return the guarded parameters
        by name."""
        guarded = {}
        for name, (chunk, _) in self._slots.items():
            if not chunk.is_transient:
                continue
            parameter = guarded[name] = self.named[name]
            if isinstance(chunk, ChunkState):
                check = partial(check_gradient_buffer, self.engine.gradients.allocated, chunk, name)
                self._handles.append(parameter.register_hook(check))
            self._device_views[name] = parameter.detach()
            guard.guard(parameter, guard.GuardedParameter, name, self)
            guard.close(parameter)
        self._raw_grads = {name: grad.detach() for name, grad in self._grads.items()}
        for name, grad in self._grads.items():
            if name in guarded:
                guard.guard(grad, guard.GuardedGradient, name, self)
        return guarded

    def _watch_tensors(self) -> list[str]:
        """Watch for in-place changes of all parameters that are on the device and have a master.
        Return the names of these parameters."""
        names = [n for n in self.trained if n not in self._guarded and self._has_master(n)]
        for name in names:
            guard.watch(self.named[name])
        return names

    def limit_states(self, device_bytes: float, selects_cache: bool) -> None:
        """Refuse a backward whose gradients, with the other states and the cache of parameters,
        would need more than `device_bytes` on the device. With `selects_cache`, the limit has also
        selected the size of the cache."""
        self._larger_cache = "a larger device_memory"
        if not selects_cache:
            self._larger_cache = "cache_chunks = {}, if necessary with a larger device_memory"
        spare = device_bytes - self.engine.state_bytes()["total"] - self.engine.cache_bytes
        self.engine.gradients.limit_bytes = max(spare, self.engine.temporary_bytes)

    def keep(self, *handles: RemovableHandle) -> None:
        """Keep handles of hooks, so that `release` can remove the hooks."""
        self._handles += handles

    def release(self) -> None:
        """Complete all updates, and make the module a plain module without gradients: remove hooks
        and guards, and free all states except the parameters. A parameter whose home is the host is
        then in host memory. May be called more than once.

        If an update has failed, some weights are updated and others are not. In this case, only the
        file on disk is removed, and uses of the module raise the error.
        """
        if self.is_released:
            return
        try:
            self.engine.wait()
        except Exception as error:
            self.engine.close()
            logger.warning("the weights are lost, because an update failed: %s", one_line(error))
            return
        self.engine.close()
        self.is_released = True
        for handle in self._handles:
            handle.remove()
        self._close_all()
        with _raw():
            for name, parameter in self.named.items():
                chunk, slot = self._slots[name]
                if getattr(parameter, MARK, None) is not self._mark:
                    continue  # torch.utils.swap_tensors has replaced the parameter
                parameter.grad = None
                if name in self._guarded:
                    guard.remove(parameter)
                    parameter.data = chunk.view(chunk.shard, slot)
                if name in self._grads and parameter.dtype is not self._grads[name].dtype:
                    parameter.grad_dtype = parameter.dtype
                guard.open_(parameter)
                delattr(parameter, MARK)
        delattr(self._module, MARK)
        delattr(self._module, DDP_IGNORED)
        if self._ignored is not None:
            setattr(self._module, DDP_IGNORED, self._ignored)
        self.engine.memory.close()
        for name in [*vars(self)]:  # user code may have hooks that refer to this object
            if name != "is_released":
                delattr(self, name)

    def check_open(self) -> None:
        """Raise ConfigError after `release`."""
        refuse_if(
            self.is_released,
            "the optimizer of optimus.offload is closed; call optimus.offload again to train",
        )

    # -- uses of segments ------------------------------------------------------------------------

    def use(self, index: int, backward: bool, callers: Collection[int]) -> None:
        """Provide a segment with its parameters and, for a backward, with its gradient buffers. Do
        the same for `callers`: the segments that call it in the forward (`SegmentCalls`)."""
        self.check_open()
        refuse_if(
            backward and torch.is_grad_enabled() and bool(self._guarded),
            "backward with create_graph=True needs offloaded parameters again in a later backward, "
            "when they have no memory; use host_share=0.0, or leave create_graph out",
        )
        task = torch._C._current_graph_task_id()
        hooks = self._hooks[index]
        refuse_if(
            any(i.key() is not _VMAP for i in torch._C._functorch.get_interpreter_stack() or ()),
            "an offloaded model does not support torch.func.grad and similar transforms; use "
            "loss.backward() or torch.autograd.grad",
        )
        # Casts of weights in the cache of torch.autocast would stay on the device to the end of the
        # context, and their gradients in a later forward would come after the backward of all
        # segments. A recomputation must cast the weights that the forward has cast. With gradients,
        # clear the cache also if no parameter is offloaded, for equal bits: backward adds the
        # gradients of two casts in fp32, and those of a single cast in bf16.
        if self._guarded or backward or torch.is_grad_enabled():
            torch.clear_autocast_cache()
        if backward:
            self._begin_backward(task)
        else:
            if task == -1:
                self._tasks.clear()  # ids of a backward that has failed
                if torch.is_grad_enabled() and not self._in_step:
                    self._begin_step()
        if not self._guarded:
            return
        self._close_all()
        # In this order, because a backward frees the gradient buffers of later segments.
        together = sorted({index, *callers}) if callers else [index]
        if backward:
            self.engine.gradients.need(together)
        with _raw(), guard.without_modes():  # the engine reads no freed memory
            for number in together:
                self._hooks[number].before(backward)
        self._open = hooks.needed if not callers else self._gather_together(index, together)
        for parameter in self._open:
            guard.open_(parameter)
        if backward:
            self.calls.begin_backward(together)
        else:
            self.calls.begin_forward(index, callers)
        if self._in_step and len(self._uses) < _MAX_USES:
            self._uses += ((number, backward) for number in together)

    def _gather_together(self, index: int, together: Sequence[int]) -> list[nn.Parameter]:
        """Gather the parameters of several segments, and return them. `index` is the segment that
        the others call."""
        assert self.engine.params.plan is not None
        slots = self.engine.params.plan.slots
        needed = len({number for i in together for number in self._needs[i]})
        outer = " and of ".join(self._hooks[i].name for i in together if i != index)
        remedy = self._larger_cache.format(needed)
        refuse_if(
            needed > slots,
            f"{self._hooks[index].name} is called by the forward or a hook of {outer}, but is not "
            f"inside of the caller; together they need {counted(needed, 'chunk')}, but the cache "
            f"has {slots}; use {remedy}, or leave out the call",
        )
        return self._gather_all(together)

    def _gather_all(self, indices: Sequence[int]) -> list[nn.Parameter]:
        """Gather the parameters of the segments `indices` at the same time, and return them."""
        names = dict.fromkeys(name for i in indices for name in sorted(self._hooks[i].names))
        with _raw(), guard.without_modes():
            self.engine.gather(names)
        return [self._guarded[name] for name in names]

    def close(self, index: int) -> None:
        """Guard the parameters of a segment that has computed its forward. If this forward has
        interrupted a backward, gather the parameters for the rest of this backward again."""
        if not self.calls.end_forward(index):
            return
        others = [self._hooks[i].names for i in self.calls.callers_of(index)]
        for name, parameter in self._hooks[index].parameters.items():
            if not any(name in names for names in others):
                guard.close(parameter)
        interrupted = self.calls.interrupted_backward()
        if any(self._hooks[i].needed for i in interrupted):
            self._close_all()
            self._open = self._gather_all(interrupted)
            for parameter in self._open:
                guard.open_(parameter)

    def read(self, name: str) -> None:
        """Gather a parameter that code outside of its segment reads."""
        self.check_open()
        # Include the parameters of the present segment, so that the gather does not evict them.
        names = [guard.name_of(parameter) for parameter in self._open]
        with _raw(), guard.without_modes():
            self.engine.gather([name, *names])

    def restore(self, name: str) -> None:
        """Copy the parameters of the present segment from the host to the device again, after a
        write to the parameter `name`."""
        with _raw():
            self._versions.update({name: p._version for name, p in self._guarded.items()})
            self.engine.params.invalidate()
            self.engine.gather([guard.name_of(parameter) for parameter in self._open])
            self._versions[name] = self.named[name]._version

    def _begin_step(self) -> None:
        self._in_step = True
        self._uses = []
        if self.engine.params.plan is not None:
            with guard.without_modes():
                self.engine.params.start_step()

    def _close_all(self) -> None:
        for parameter in self._open:
            guard.close(parameter)
        self._open = []

    # -- gradients -------------------------------------------------------------------------------

    def gradient_sum(self, name: str) -> Tensor:
        """Return the tensor with the values of a gradient: during the backward of its segment, the
        buffer on the device; otherwise the sum on the host."""
        self.check_open()
        chunk, slot = self._slots[name]
        assert isinstance(chunk, ChunkState)
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and self.engine.memory.has(chunk.grads):
            return self._raw_grads[name]
        self.engine.wait()  # for updates that read the gradient
        return chunk.view(self.engine.gradients.sum_so_far(chunk), slot)

    def clear_gradients(self, set_to_none: bool) -> None:
        """Clear all gradients, as torch's `Optimizer.zero_grad` does."""
        if self._received and not self._is_updated:
            self._in_step = False  # the step is abandoned
        self._tasks.clear()
        self.calls.clear()
        self._close_all()
        with _raw():
            zero = {n for n in self._received if not (set_to_none or self.named[n].grad is None)}
            for name in self.trained:
                self.named[name].grad = self._grads[name] if name in zero else None
        if zero:
            self._start_gradients()
            self._received |= zero  # the next step updates these, as torch does

    def _start_gradients(self) -> None:
        self.engine.gradients.start()
        self.engine.expect_update(self._expected_update())
        self._received.clear()
        self._is_updated, self._is_complete = False, True
        self._first_backward = self.num_backwards

    def _without_gradient(self) -> list[str]:
        """Return the names of the trained parameters whose `.grad` is None. Raise ConfigError if a
        `.grad` was replaced by another tensor."""
        missing = []
        with _raw():
            for name, grad in self._grads.items():
                if (current := self.named[name].grad) is grad:
                    continue
                missing.append(name)
                if current is not None:
                    raise ConfigError(
                        f"the gradient of parameter {name} was replaced by another tensor; change "
                        "it in place, and do not use create_graph=True"
                    )
        return missing

    def _begin_backward(self, task: int) -> None:
        """Prepare the gradients at the first segment of a backward pass, whose id is `task`."""
        if task in self._tasks:
            return
        if not self._tasks:
            with _raw():
                self._structure.check()
        self._tasks.append(task)
        if len(self._tasks) > 1:  # inside of a reentrant checkpoint
            return
        missing = self._without_gradient()
        if len(missing) == len(self.trained):
            self._start_gradients()
        elif self._is_updated:
            self._tasks.clear()
            raise ConfigError(
                "backward would add to the gradients of the last step; call optimizer.zero_grad() "
                "between optimizer.step() and the next backward"
            )
        self._clear_some(missing)
        with _raw():
            for name in missing:
                self.named[name].grad = self._grads[name]
        self._is_complete = False
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(self._end_backward, task))

    def _clear_some(self, names: Sequence[str]) -> None:
        """Set the gradients of those parameters in `names` to zero that have received a
        gradient."""
        for name in self._received.intersection(names):
            chunk, slot = self._slots[name]
            assert isinstance(chunk, ChunkState)
            chunk.view(self.engine.gradients.sum_so_far(chunk), slot).zero_()
            self._received.discard(name)

    def _end_backward(self, task: int) -> None:
        if not self._tasks or self._tasks[0] != task:
            return
        self._close_all()
        self._tasks.clear()
        self.calls.begin_backward(())
        self.num_backwards += 1
        missing = self._without_gradient()
        if missing:
            raise ConfigError(
                f"the gradient of parameter {missing[0]} was set to None during backward; set it "
                "to None before or after backward"
            )
        with _raw():
            self.engine.gradients.reduce(0)
        self._is_complete = True

    # -- a step ----------------------------------------------------------------------------------

    def complete_gradients(self) -> set[str]:
        """Complete the gradients of a step, and return the names of the parameters that have a
        gradient."""
        missing = self._without_gradient()
        if len(missing) == len(self.trained):
            self._received.clear()
        refuse_if(
            self._is_updated and self._received,
            "optimizer.step() was called twice for the same gradients; call "
            "optimizer.zero_grad() after each step",
        )
        self._check_unchanged()
        if not self._received:
            return set()
        refuse_if(
            not self._is_complete,
            "the last backward has failed, so that gradients are incomplete; call "
            "optimizer.zero_grad() before the next backward",
        )
        self._clear_some(missing)
        self._close_all()
        with _raw():
            self.engine.gradients.finish()
        self.adopt_changes()
        return set(self._received)

    def end_step(self) -> None:
        """End a step after its update. Plan the next step, which is expected to use the segments in
        the same order."""
        self._in_step, self._is_updated = False, True
        torch.clear_autocast_cache()  # which may have casts of the weights before the update
        backwards = self.num_backwards - self._first_backward
        if backwards != self._expected_backwards:
            self._expected_backwards = backwards
            self.engine.gradients.expect_backwards(0, backwards)
        if self.engine.params.plan is None or self._uses == self._planned:
            return
        log = logger.debug if self._planned else logger.info
        log(
            "recorded %s of %s in the step; the next steps prefetch parameters in this order",
            counted(len(self._uses), "use"),
            counted(len(self._hooks), "segment"),
        )
        self._planned, self._uses = self._uses, []
        self.engine.params.replan([Use(i, b, self._needs[i]) for i, b in self._planned])

    def _check_unchanged(self) -> None:
        """Raise ConfigError if the model was converted, moved, frozen, unfrozen or extended."""
        with _raw():
            self._structure.check()
            for name, parameter in self.named.items():
                if parameter.requires_grad is not (name in self._grads):
                    raise ConfigError(
                        f"requires_grad of parameter {name} was changed after optimus.offload; set "
                        "it before the call"
                    )
            for name in filter(self._is_changed, self._guarded):
                raise ConfigError(
                    f"parameter {name} is offloaded and was changed in place, by its module or in "
                    "the result of state_dict(); use model.load_state_dict to change it"
                )

    # -- states ----------------------------------------------------------------------------------

    def state_names(self, name: str) -> list[str]:
        """Return the names of the optimizer states of a trained parameter: the moments, and
        "master" unless the parameter is fp32."""
        chunk, _ = self._slots[name]
        assert isinstance(chunk, ChunkState)
        return [*chunk.moments, *(["master"] if self._has_master(name) else [])]

    def _has_master(self, name: str) -> bool:
        """Return True if a trained parameter has a separate fp32 master."""
        chunk, _ = self._slots[name]
        return isinstance(chunk, ChunkState) and chunk.master is not chunk.shard

    def state_of(self, name: str) -> dict[str, Tensor]:
        """Return the optimizer states of a trained parameter by name, as views."""
        chunk, slot = self._slots[name]
        assert isinstance(chunk, ChunkState)
        disk, states = self.engine.disk, {}
        for state in self.state_names(name):
            flat = chunk.states[state][slot.start : slot.stop]
            on_disk = disk is not None and disk.has(flat)
            states[state] = (disk.map(flat) if disk and on_disk else flat).view(slot.shape)
        return states

    def show_values(self, parameters: dict[str, nn.Parameter]) -> None:
        """Wait for all updates. Then set `data` of each offloaded parameter in `parameters` to a
        view of host memory."""
        self.engine.wait()
        for name, parameter in parameters.items():
            if name in self._guarded:
                chunk, slot = self._slots[guard.name_of(parameter)]
                guard.open_(parameter)
                parameter.data = chunk.view(chunk.shard, slot)

    def hide_values(self, parameters: dict[str, nn.Parameter]) -> None:
        """Undo `show_values`."""
        for name, parameter in parameters.items():
            if name in self._guarded:
                guard.open_(parameter)
                parameter.data = self._device_views[name]
                guard.close(parameter)

    def adopt_changes(self) -> None:
        """Find the parameters on the device that other code has changed in place, and set their
        masters from the new values."""
        changed = [name for name in self._watched if self._is_changed(name)]
        if changed:
            self.adopt_values({name: self.named[name] for name in changed})

    def _is_changed(self, name: str) -> bool:
        """Return True if code has changed a parameter in place since the last call of
        `adopt_values`."""
        return self.named[name]._version != self._versions[name]

    def adopt_values(self, parameters: dict[str, nn.Parameter]) -> None:
        """Set the master weights from the values of `parameters`, which code has written after
        `show_values`."""
        torch.clear_autocast_cache()
        for name, parameter in parameters.items():
            self._versions[name] = parameter._version
            chunk, slot = self._slots[name]
            if isinstance(chunk, ChunkState) and self._has_master(name):
                values = chunk.shard[slot.start : slot.stop]
                master = self.engine.read(chunk.master[slot.start : slot.stop])
                # Keep a master that rounds to the loaded value, because the master is more precise.
                is_same = master.to(values.dtype) == values
                self.engine.put("master", name, torch.where(is_same, master, values.float()))
        self.engine.expect_update(None)
        self.engine.params.invalidate()
