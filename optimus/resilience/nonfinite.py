"""Detection of non-finite losses and gradients, and of the rank and layer that computed them.

Gradients are checked before they are reduced over ranks, and all ranks know the result of the check
before the optimizer step."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from optimus.chunks.buffers import GradBuffer
from optimus.chunks.engine import ChunkEngine
from optimus.chunks.grad_reducer import GradReducer
from optimus.config import OptimConfig, TrainConfig
from optimus.data.batch import BatchPlan
from optimus.data.dataset import InstanceSource
from optimus.data.loader import Microbatch, microbatch_starts
from optimus.distributed.collectives import (
    all_gather_objects,
    greatest,
    observing_contributions,
)
from optimus.distributed.groups import Groups
from optimus.errors import NonFiniteError, counted
from optimus.io import files
from optimus.io.workspace import Workspace
from optimus.model.transformer import Block
from optimus.observe.events import ActionEvent, Recorder
from optimus.parallel.pipeline.actions import Kind
from optimus.rank.model import RankModel, uncompiled
from optimus.resilience.finite import is_finite, refuse_bad_states
from optimus.resilience.supervision.markers import Instance, write_marker

logger = logging.getLogger(__name__)


class ForwardWatch(Recorder):
    """Finds the first module of this rank that computes a non-finite value from finite inputs, and
    computes statistics of the outputs of transformer blocks.

    Collectives spread non-finite values to other ranks. If several ranks of a pipeline stage find
    such a module, the rank with the smallest `when` computed the first non-finite value.

    If this object is the recorder of a pipeline executor, it also finds the microbatch of the
    non-finite value and of each measured output.
    """

    records_actions = True

    def __init__(self) -> None:
        self.module = ""
        """Name of the first module that computed a non-finite value from finite inputs; "" if there
        is no such module."""
        self.when = 0
        """Position of the non-finite value among the checked module outputs and collective inputs,
        counted from 1; 0 if `module` is empty."""
        self.microbatch: int | None = None
        """Microbatch for which `module` computed the value; None if it is unknown."""
        self.outputs: dict[int, dict[str, dict[str, float | None]]] = {}
        """Result of `measure` for the output of each block, by microbatch and by the block's
        name."""
        self._measured: dict[str, dict[str, float | None]] = {}
        self._events = 0
        self._running: list[tuple[str, bool]] = []  # (module, True if its inputs are finite)

    @contextlib.contextmanager
    def over(self, model: nn.Module) -> Iterator[None]:
        """Return a context manager that checks the outputs of all modules in forward passes of
        `model`."""
        handles = []
        for name, module in model.named_modules():
            if name:
                handles.append(module.register_forward_pre_hook(partial(self._enter, name)))
                handles.append(module.register_forward_hook(self._leave))
            if isinstance(module, Block):
                handles.append(module.register_forward_hook(partial(self._measure, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, module: nn.Module, inputs: object) -> None:
        self._running.append((name, _all_finite(inputs)))

    def _leave(self, module: nn.Module, inputs: object, output: object) -> None:
        self.look(output)
        self._running.pop()

    def _measure(self, name: str, module: nn.Module, inputs: object, output: object) -> None:
        self._measured[name] = measure(_floats(output)[0])

    def action(self, event: ActionEvent) -> None:
        if event.kind != Kind.F.name:
            return
        self.outputs.setdefault(event.microbatch, {}).update(self._measured)
        self._measured = {}
        if self.module and self.microbatch is None:
            self.microbatch = event.microbatch

    def look(self, value: object) -> None:
        """Check that `value` is finite. It is the output of a module, or this rank's input to a
        collective. At the first non-finite value that a module has computed from finite inputs, set
        `module` and `when`."""
        self._events += 1
        if self.module or _all_finite(value):
            return
        with_finite_inputs = [name for name, finite in self._running if finite]
        if with_finite_inputs:
            self.module, self.when = with_finite_inputs[-1], self._events


class _GradientWatch(Recorder):
    """Finds the microbatch whose backward pass computes the first non-finite gradient of this rank.

    Args:
        is_reduced_bad: Function that returns True if a gradient was non-finite just before it was
            reduced over ranks.
        gradients: GradReducer that contains and reduces the gradient buffers of the rank.
    """

    records_actions = True

    def __init__(self, is_reduced_bad: Callable[[], bool], gradients: GradReducer) -> None:
        self.microbatch: int | None = None
        self._is_reduced_bad, self._gradients = is_reduced_bad, gradients

    def action(self, event: ActionEvent) -> None:
        if self.microbatch is not None:
            return
        # A sum over ranks may contain the non-finite value of another rank, so only buffers that
        # are not reduced yet are checked here.
        computes = event.kind in (Kind.B.name, Kind.I.name, Kind.W.name)
        local = self._gradients.unreduced(event.stage) if computes else ()
        if self._is_reduced_bad() or any(not is_finite(buffer.grads) for buffer in local):
            self.microbatch = event.microbatch


def measure(values: Tensor) -> dict[str, float | None]:
    """Return a tensor's statistics as a dict with the keys "min", "max", "mean" and "nonfinite".

    "min", "max" and "mean" are computed from the finite values, and are None if no value is finite.
    "nonfinite" is the fraction of all values that are not finite, from 0 to 1.
    """
    is_value = values.isfinite()
    finite = values[is_value].double()
    share = 1.0 - len(finite) / max(1, values.numel())
    if not len(finite):
        return {"min": None, "max": None, "mean": None, "nonfinite": share}
    least, greatest = finite.aminmax()
    figures = {"min": float(least), "max": float(greatest), "mean": float(finite.mean())}
    return {**figures, "nonfinite": share}


def _all_finite(value: object) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _floats(value))


def _floats(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, (tuple, list)):
        return [tensor for entry in output for tensor in _floats(entry)]
    return []


class Finding(NamedTuple):
    """A non-finite value that a rank has found.

    Findings are compared as tuples. The smallest Finding of all ranks is nearest to the cause.

    Attributes:
        distance: Distance of the value from the cause, by the kind of value: 0 for a parameter, 1
            for an output computed from finite inputs, 2 for a gradient, 3 for a value that is
            finite when it is computed again.
        stage: Pipeline rank; negated for a gradient, because gradients spread towards the first
            stage.
        when: For a module output, its position in the order of the checks. The rank checks module
            outputs and inputs of collectives; the first check has the position 1. For a gradient,
            the number of finite inputs of collectives before the first non-finite input; infinity
            if all inputs were finite. 0 for a value of another kind.
        depth: Number of parameters after the gradient's parameter in the gradient buffer; 0 for a
            value of another kind.
        rank: The rank that found the value.
        text: Description of the value for the error message.
        host: Host name of the rank's machine.
        layer: Name of the module or parameter; "" if it is unknown.
        direction: The pass that computed the value; None for a parameter.
        microbatch: Index of the microbatch among the rank's microbatches, from 0; None if it is
            unknown.
    """

    distance: int
    stage: int
    when: float
    depth: int
    rank: int
    text: str
    host: str
    layer: str = ""
    direction: Literal["forward", "backward"] | None = None
    microbatch: int | None = None

    @property
    def was_repeated(self) -> bool:
        """True if a second computation of the step also gave a non-finite value."""
        return self.distance < _ONCE


_ONCE = 3
"""`Finding.distance` of a value that is finite when it is computed again."""


class Watch:
    """Checks the losses and gradients of one rank for non-finite values.

    Before each optimizer step, a collective shows all ranks if any rank has a non-finite value.

    A rank with a non-finite value still completes its pipeline schedule, because other ranks wait
    for its messages.
    """

    def __init__(
        self,
        train: TrainConfig,
        optim: OptimConfig,
        groups: Groups,
        rank_model: RankModel,
        states: ChunkEngine,
        workspace: Workspace | None,
        batch: BatchPlan,
        data: InstanceSource | None,
    ) -> None:
        """Prepare to check the training updates of a rank.

        Args:
            train, optim: Sections `[train]` and `[optim]` of the run's configuration.
            groups: Process groups of this rank.
            rank_model: Model of this rank.
            states: Parameters, gradients and optimizer states of this rank.
            workspace: Workspace through which this rank writes a marker, a JSON file that describes
                a non-finite value; None if markers are not written.
            batch: The batch sizes of an update.
            data: The training data, from which the marker names the instances (sequences) of the
                microbatch; None if the marker does not name instances.
        """
        self._train, self._optim, self._workspace = train, optim, workspace
        self._groups, self._rank_model, self._states = groups, rank_model, states
        self._batch, self._data = batch, data
        self._device = next(rank_model.model.parameters()).device
        self._outputs: dict[int, dict[str, dict[str, float | None]]] = {}
        self.start(0)

    def start(self, step: int) -> None:
        """Discard the recorded values of the last update. Begin the check of update `step`."""
        self._step = step
        self._extremes: list[tuple[list[str], list[Tensor]]] = []
        """A pair (names, extremes) for each gradient buffer, in the order of the backward pass.
        `names` are the names of the buffer's parameters, last layers first. `extremes` has a tensor
        [2] on the device for each parameter: the least and the greatest value of the gradient, or
        two NaNs if any value of the gradient is NaN."""

    def look_at(self, buffer: GradBuffer) -> None:
        """Record the extreme values of the gradients in `buffer` before the gradients are reduced
        over ranks; `any_rank_is_nonfinite` checks these values. The caller passes the buffers in
        the order of the backward pass, from the last layers to the first."""
        # The results stay on the device: copying them to the host here would make the host wait for
        # the device once per chunk.
        names = [name for name, view in buffer.grad_views.items() if view.numel()][::-1]
        extremes = [torch.stack(torch.aminmax(buffer.grad_views[name])) for name in names]
        self._extremes.append((names, extremes))

    def any_rank_is_nonfinite(self) -> bool:
        """Return True if any rank has a non-finite loss or gradient. All ranks must call this
        method, in which the host waits for the device once."""
        values = [pair for _, extremes in self._extremes for pair in extremes]
        values += [loss.reshape(-1) for loss in self._losses()]
        nonfinite = torch.zeros(1, dtype=torch.int64, device=self._device)
        if values:
            nonfinite += (~torch.cat(values).isfinite()).any()
        return bool(greatest(nonfinite, self._groups.everyone, self._device))

    def refuse_bad_states(self) -> None:
        """Raise the same NonFiniteError on all ranks if an optimizer state of any rank is not
        finite. All ranks must call this method."""
        refuse_bad_states(
            self._train,
            self._optim,
            self._states,
            self._groups.everyone,
            self._workspace,
            self._step,
            self._step - 1,
        )

    def _losses(self) -> list[Tensor]:
        """Return the loss terms of this rank's microbatches, without empty tensors."""
        return [value for _, value in self._losses_by_microbatch()]

    def _losses_by_microbatch(self) -> Iterator[tuple[int, Tensor]]:
        for (_, microbatch), terms in self._rank_model.executor.terms.items():
            for value in (terms.ce_sum, terms.aux, terms.z):
                if value is not None and value.numel():
                    yield microbatch, value

    def _bad_gradient(self) -> tuple[str, int]:
        """Return (parameter, index) of the first non-finite gradient in the order of the backward
        pass; ("", 0) if all gradients are finite. The index is the number of parameters after this
        parameter in its gradient buffer."""
        for names, extremes in self._extremes:
            for index, pair in enumerate(extremes):
                if not is_finite(pair):
                    return names[index], index
        return "", 0

    def explain(self, microbatches: list[Microbatch], circumstance: str = "") -> NoReturn:
        """Find the cause of a non-finite value and raise the same NonFiniteError on all ranks.

        All ranks must call this method after `any_rank_is_nonfinite` has returned True. To find the
        cause, the ranks may run the forward and backward passes of the step again.

        Args:
            microbatches: This rank's microbatches of the step.
            circumstance: Text to add at the end of the message.

        Raises:
            NonFiniteError: Always.
        """
        everyone = self._groups.everyone
        self.refuse_bad_states()  # a non-finite state is the cause of other non-finite values
        findings = self._findings(microbatches)
        first = findings[0]
        if first.rank == everyone.rank:
            self._write_marker(first, microbatches)
        more = len([finding for finding in findings if finding[:4] == first[:4]]) - 1
        also = f" (and {counted(more, 'more rank')})" if more else ""
        raise NonFiniteError(
            f"non-finite values on rank {first.rank} ({first.host}) at step {self._step}: "
            f"{first.text}{also}{circumstance}"
        )

    def _write_marker(self, finding: Finding, microbatches: list[Microbatch]) -> None:
        if self._workspace is None:
            return
        # The hash covers all microbatches of the rank. Failures with the same data therefore have
        # the same hash, even if the microbatch of a non-finite value is unknown.
        tokens = b"".join(batch.tokens.cpu().numpy().tobytes() for batch in microbatches)
        instances, layers = [], {}
        if finding.microbatch is not None:
            if self._data is not None:
                batch, data = self._batch, self._groups.data
                size = batch.microbatch_size
                starts = microbatch_starts(self._step, batch.instances, size, data.rank, data.size)
                start = starts[finding.microbatch]
                instances = self._data.locate(start, start + size)
            layers = self._outputs.get(finding.microbatch, {})
        write_marker(
            self._workspace,
            self._train.run_dir,
            finding.rank,
            self._step,
            text=finding.text,
            host=finding.host,
            device=str(self._device),
            microbatch=finding.microbatch,
            layer=finding.layer,
            direction=finding.direction,
            was_repeated=finding.was_repeated,
            instances=[Instance(data=path, instance=number) for path, number in instances],
            data_xxh3=files.xxh3_bytes(tokens),
            layers=layers,
        )

    def _findings(self, microbatches: list[Microbatch]) -> list[Finding]:
        """Return the findings of all ranks, sorted. The first finding is nearest to the cause.

        All ranks must call this method.
        """
        everyone = self._groups.everyone
        in_update, _ = self._bad_gradient()
        bad = [number for number, loss in self._losses_by_microbatch() if not is_finite(loss)]
        finding = self._find_in_forward(microbatches)
        findings = all_gather_objects(finding, everyone, Finding | None)
        if not any(findings):
            finding = self._find_in_backward(microbatches)
            if finding is None and (in_update or bad):
                finding = self._once_finding(in_update, bad)
            findings = all_gather_objects(finding, everyone, Finding | None)
        return sorted(finding for finding in findings if finding is not None)

    def _finding(
        self,
        distance: int,
        stage: int,
        when: float,
        depth: int,
        text: str,
        layer: str,
        direction: Literal["forward", "backward"] | None,
        microbatch: int | None,
    ) -> Finding:
        rank, host = self._groups.everyone.rank, socket.gethostname()
        where = layer, direction, microbatch
        return Finding(distance, stage, when, depth, rank, text, host, *where)

    def _find_in_forward(self, microbatches: list[Microbatch]) -> Finding | None:
        """Run the forward passes again. Return a Finding for this rank's first non-finite parameter
        or, if there is none, for its first non-finite module output. Return None if all parameters
        and outputs are finite."""
        watch, stage = ForwardWatch(), self._groups.coordinate.pp
        executor = self._rank_model.executor
        parameter = self._states.first_parameter(lambda values: not is_finite(values))
        observing = observing_contributions(watch.look)
        with (
            uncompiled(self._train.compile),
            observing,
            watch.over(self._rank_model.model),
            executor.recording(watch),
        ):
            executor.evaluate(microbatches)
        self._outputs = watch.outputs
        if parameter:
            text = f"parameter {parameter} is non-finite"
            return self._finding(0, stage, 0, 0, text, parameter, None, None)
        if watch.module:
            text, where = f"the output of layer {watch.module} is non-finite", watch.microbatch
            return self._finding(1, stage, watch.when, 0, text, watch.module, "forward", where)
        return None

    def _find_in_backward(self, microbatches: list[Microbatch]) -> Finding | None:
        """Run the forward and backward passes again. Return a Finding for this rank's first
        non-finite gradient; None if all gradients are finite."""
        states, sent, self._extremes = self._states, [], []
        watch = _GradientWatch(lambda: bool(self._bad_gradient()[0]), states.gradients)
        states.gradients.finish()  # wait for reductions in progress
        states.start_step()
        observing = observing_contributions(lambda tensor: sent.append(is_finite(tensor)))
        executor = self._rank_model.executor
        with uncompiled(self._train.compile), observing, executor.recording(watch):
            executor.run(
                microbatches,
                lambda stage, _: states.gradients.reduce(stage),
                lambda: None,
                states.gradients.before_backward,
            )
        name, depth = self._bad_gradient()
        if not name:
            return None
        # Collectives spread a non-finite gradient. Its origin is the first rank that sent a
        # non-finite gradient.
        when, stage = sent.index(False) if False in sent else math.inf, self._groups.coordinate.pp
        text = f"the gradient of {name} is non-finite, although the forward pass is finite"
        return self._finding(2, -stage, when, depth, text, name, "backward", watch.microbatch)

    def _once_finding(self, gradient: str, losses: list[int]) -> Finding:
        """Return a Finding for non-finite values of an update that are finite when computed again.

        Args:
            gradient: Name of the first gradient of the update that was not finite; "" if all
                gradients were finite.
            losses: Indices of the microbatches of the update whose loss was not finite.
        """
        values = f"the gradient of {gradient} is" if gradient else "the values are"
        text = f"{values} finite when computed again, which points to the hardware"
        stage, microbatch = self._groups.coordinate.pp, min(losses, default=None)
        direction: Literal["forward", "backward"] = "forward" if losses else "backward"
        return self._finding(_ONCE, stage, 0, 0, text, gradient, direction, microbatch)
