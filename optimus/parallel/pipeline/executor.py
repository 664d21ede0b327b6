"""Executor of a pipeline schedule: runs the actions of one rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from optimus.distributed.collectives import Transfer, receive, send
from optimus.distributed.groups import Channels
from optimus.errors import LostPeerError
from optimus.model.deferred_gradients import DeferredGradients
from optimus.observe.events import COMPUTE, NO_RECORDER, OPTIMIZER, ActionEvent, Recorder
from optimus.parallel.pipeline.actions import Action, Kind, Schedule, last_actions
from optimus.parallel.pipeline.schedules import make_evaluation
from optimus.parallel.pipeline.stage import Output, Stage, Terms, backward
from optimus_kernels import fastest_library

Microbatch = tuple[Tensor, Tensor | None]
"""Pair (tokens, document_ids) for B sequences of length S. The tokens are int64 [B, S] on the
device. The document ids are [B, S] on the host, or None."""

FEW_TOKENS = 256
"""Shortest sequence length, in tokens, for which the executor uses oneDNN for matrix products. For
shorter sequences, torch's default library is faster."""

LastBackward = Callable[[int, Collection[Tensor] | None], AbstractContextManager]
"""Type of `last_backward(stage, deferred)`, which returns a context manager.

In each step, the executor runs one action of the stage inside this context: the last action of the
step that computes weight gradients of the stage. If this action is of kind W, `deferred` contains
the weights whose gradients the action computes. If the action is of kind B, `deferred` is None.
"""


class _Saved(NamedTuple):
    """Input and output of a stage for one microbatch, kept from forward to backward."""

    x: Tensor | None
    output: Output


class Executor:
    """Executor of a pipeline schedule on one rank. A run uses the same Executor in all training
    steps.

    Args:
        schedule: the actions of all ranks for one step.
        stages: this rank's stages, by stage index.
        channels: communicators to and from the neighbouring pipeline ranks.
        boundary_shape: function from tokens [B, S] to the shape of a stage's output.
        dtype: the dtype of activations.
        recorder: object that receives an event for each action.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        channels: Channels,
        boundary_shape: Callable[[Tensor], tuple[int, ...]],
        dtype: torch.dtype,
        recorder: Recorder = NO_RECORDER,
    ) -> None:
        self._rank = channels.rank
        assert set(stages) == set(schedule.stages_of(self._rank)), (set(stages), self._rank)
        self._schedule, self._stages = schedule, stages
        self._channels = {
            Kind.SEND_ACTIVATION: channels.activations_out,
            Kind.RECV_ACTIVATION: channels.activations_in,
            Kind.SEND_GRADIENT: channels.gradients_out,
            Kind.RECV_GRADIENT: channels.gradients_in,
        }
        used = {action.kind for action in schedule.ranks[channels.rank]} & self._channels.keys()
        assert all(self._channels[kind].size == 2 for kind in used), "a channel was not opened"
        self._boundary_shape, self._dtype = boundary_shape, dtype
        self._last = last_actions(schedule.ranks[channels.rank])
        self._table: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._weights,
            Kind.SEND_ACTIVATION: self._send,
            Kind.SEND_GRADIENT: self._send,
            Kind.RECV_ACTIVATION: self._receive,
            Kind.RECV_GRADIENT: self._receive,
        }
        self.loss_scale = 1.0
        """Loss scale for fp16: the factor by which backward multiplies the objective."""
        self.recorder = recorder
        self._before_backward: Callable[[int], None] = lambda stage: None
        self.terms: dict[tuple[int, int], Terms] = {}
        """Loss terms of the current or most recent step, by (stage, microbatch)."""

    def run(
        self,
        microbatches: Sequence[Microbatch],
        reduce_grad: Callable[[int, int], None],
        opt_step: Callable[[], None],
        before_backward: Callable[[int], None] = lambda stage: None,
        last_backward: LastBackward = lambda stage, deferred: nullcontext(),
    ) -> dict[tuple[int, int], Terms]:
        """Run one training step.

        Args:
            microbatches: the microbatches of this data-parallel rank, in order.
            reduce_grad: function that is called with (stage, microbatch) for each REDUCE_GRAD
                action.
            opt_step: function that is called for the OPT_STEP action.
            before_backward: function that is called before each backward action (B, I or W) with
                the index of the action's stage.
            last_backward: function that returns a context manager. Each stage's last action of kind
                B or W runs inside the context. See `LastBackward`.

        Returns:
            The loss terms of this rank's stages, by (stage, microbatch).

        Raises:
            LostPeerError: another rank was lost.
        """
        assert len(microbatches) == self._schedule.num_microbatches
        self._last_backward = last_backward
        self._before_backward = before_backward
        table = self._table | {
            Kind.REDUCE_GRAD: lambda action: reduce_grad(action.stage, action.microbatch),
            Kind.OPT_STEP: lambda action: opt_step(),
        }
        return self._play(self._schedule.ranks[self._rank], microbatches, table)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> dict[tuple[int, int], Terms]:
        """Run the forward passes of any number of microbatches, without backward passes.

        Returns:
            The loss terms of this rank's stages, by (stage, microbatch).
        """
        return self._play(self._forwards(len(microbatches)), microbatches, self._table)

    @torch.no_grad()
    def logits(self, tokens: Tensor, position: int) -> Tensor | None:
        """Run the forward pass of tokens [B, S] and return the logits at `position`.

        Returns:
            [B, V] on the rank of the last stage, None on other ranks. V is the size of this rank's
            share of the vocabulary.
        """
        logits: list[Tensor] = []

        def infer(action: Action) -> None:
            stage = self._stages[action.stage]
            out = stage.infer(self._input(action), tokens, position)
            if stage.is_last:
                logits.append(out)
            else:
                self._pass_on(action._replace(kind=Kind.SEND_ACTIVATION), out)

        self._play(self._forwards(1), [(tokens, None)], self._table | {Kind.F: infer})
        return logits[0] if logits else None

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Context manager that sends the events of actions to `recorder` instead of
        `self.recorder`."""
        before, self.recorder = self.recorder, recorder
        try:
            yield
        finally:
            self.recorder = before

    def _forwards(self, num_microbatches: int) -> Sequence[Action]:
        ranks, virtual_stages = self._schedule.num_ranks, self._schedule.virtual_stages
        return make_evaluation(ranks, virtual_stages, num_microbatches).ranks[self._rank]

    def _play(
        self,
        actions: Sequence[Action],
        microbatches: Sequence[Microbatch],
        table: Mapping[Kind, Callable[[Action], None]],
    ) -> dict[tuple[int, int], Terms]:
        self._microbatches = microbatches
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._arrived: dict[Action, Tensor | Transfer] = {}
        self._leaving: dict[Action, Tensor] = {}
        self._sent: deque[Transfer] = deque()
        self._deferred: dict[tuple[int, int], DeferredGradients] = {}
        self._waited_ns = 0
        self.terms = {}
        if self.recorder.records_actions:
            table = {kind: self._recorded(do) for kind, do in table.items()}
        if self.recorder.records_phases:
            table = {kind: self._in_phase(kind, do) for kind, do in table.items()}
        is_profiled = torch.autograd._profiler_enabled()
        tokens, document_ids = microbatches[0]
        library: AbstractContextManager = nullcontext()
        action = None
        try:
            # oneDNN compiles a kernel for each new shape, and documents have many lengths.
            if document_ids is None and tokens.shape[1] >= FEW_TOKENS:
                library = fastest_library(tokens.new_empty(0, dtype=self._dtype))
            with library:
                for action in actions:
                    with record_function(str(action)) if is_profiled else nullcontext():
                        table[action.kind](action)
            while self._sent:
                self._sent.popleft().wait()
        except LostPeerError as error:
            raise LostPeerError(f"{error}; this rank was running {action}") from error
        assert not (self._saved or self._arrived or self._leaving or self._deferred), (
            "an action stored a tensor that no later action used"
        )
        return self.terms

    def _recorded(self, do: Callable[[Action], None]) -> Callable[[Action], None]:
        """Return a function that runs `do(action)` and sends the start and end time of the action
        to `self.recorder`."""

        def run_and_record(action: Action) -> None:
            self._waited_ns = 0
            start = time.perf_counter_ns()
            do(action)
            end, kind = time.perf_counter_ns(), action.kind.name
            event = ActionEvent(kind, action.stage, action.microbatch, start, end, self._waited_ns)
            self.recorder.action(event)

        return run_and_record

    def _in_phase(self, kind: Kind, do: Callable[[Action], None]) -> Callable[[Action], None]:
        """Return a function that runs `do(action)` and reports the phase of the action to
        `self.recorder`. For sends and receives, return `do`, because the functions of
        `optimus.distributed.collectives` report the phase."""
        if kind in self._channels:
            return do
        phase = OPTIMIZER if kind is Kind.OPT_STEP else COMPUTE

        def run_in_phase(action: Action) -> None:
            self.recorder.begin_phase(phase)
            do(action)
            self.recorder.end_phase()

        return run_in_phase

    def _forward(self, action: Action) -> None:
        stage = self._stages[action.stage]
        x = self._input(action)
        if x is not None:
            x.requires_grad_(torch.is_grad_enabled())
        output = stage.forward(x, *self._microbatches[action.microbatch])
        key = (action.stage, action.microbatch)
        self.terms[key] = output.terms
        if output.x is not None:
            self._pass_on(action._replace(kind=Kind.SEND_ACTIVATION), output.x.detach())
        if torch.is_grad_enabled():
            self._saved[key] = _Saved(x, output)

    def _input(self, action: Action) -> Tensor | None:
        """Return the input of the action's stage: the output of the previous stage, or None for the
        first stage."""
        if self._stages[action.stage].is_first:
            return None
        return self._take(action._replace(kind=Kind.RECV_ACTIVATION))

    def _backward(self, action: Action) -> None:
        """Run an action of kind B or I: the backward pass of one microbatch on one stage."""
        stage = self._stages[action.stage]
        saved = self._saved.pop((action.stage, action.microbatch))
        grad = None
        if not stage.is_last:
            grad = self._take(action._replace(kind=Kind.RECV_GRADIENT))
        self._before_backward(action.stage)
        if action.kind is Kind.I:
            with DeferredGradients() as deferred:
                backward(saved.output, grad, self.loss_scale)
            self._deferred[action.stage, action.microbatch] = deferred
        else:
            with self._perhaps_last(action, None):
                backward(saved.output, grad, self.loss_scale)
        if saved.x is not None:
            assert saved.x.grad is not None
            self._pass_on(action._replace(kind=Kind.SEND_GRADIENT), saved.x.grad)

    def _weights(self, action: Action) -> None:
        self._before_backward(action.stage)
        deferred = self._deferred.pop((action.stage, action.microbatch))
        with self._perhaps_last(action, deferred.weights):
            deferred.compute()

    def _perhaps_last(
        self, action: Action, deferred: Collection[Tensor] | None
    ) -> AbstractContextManager:
        is_last = self._last[action.kind, action.stage] == action
        return self._last_backward(action.stage, deferred) if is_last else nullcontext()

    def _pass_on(self, send_action: Action, tensor: Tensor) -> None:
        """Store a stage's result until `send_action` sends it to the neighbour stage.

        If the neighbour stage is on this rank, nothing is sent: that stage uses the stored tensor.
        """
        forward = send_action.kind is Kind.SEND_ACTIVATION
        neighbour = send_action.stage + (1 if forward else -1)
        if self._schedule.rank_of(neighbour) != self._rank:
            self._leaving[send_action] = tensor
            return
        # A schedule has no sends within a rank: store the tensor like a received tensor.
        kind = Kind.RECV_ACTIVATION if forward else Kind.RECV_GRADIENT
        self._arrived[send_action._replace(kind=kind, stage=neighbour)] = tensor

    def _take(self, receive_action: Action) -> Tensor:
        """Return the tensor that `receive_action` receives. Wait until the transfer is complete."""
        arrived = self._arrived.pop(receive_action)
        if not isinstance(arrived, Transfer):
            return arrived
        start = time.perf_counter_ns()
        tensor = arrived.wait()
        self._waited_ns += time.perf_counter_ns() - start
        return tensor

    def _send(self, action: Action) -> None:
        while self._sent and self._sent[0].is_done():
            self._sent.popleft().wait()
        channel = self._channels[action.kind]
        self._sent.append(send(self._leaving.pop(action).contiguous(), channel, 1 - channel.rank))

    def _receive(self, action: Action) -> None:
        channel = self._channels[action.kind]
        tokens, _ = self._microbatches[action.microbatch]
        empty = torch.empty(self._boundary_shape(tokens), dtype=self._dtype, device=tokens.device)
        self._arrived[action] = receive(empty, channel, 1 - channel.rank)
