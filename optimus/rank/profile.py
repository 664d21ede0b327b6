"""Activation memory and FLOPs of a microbatch, from a run of the model on the meta device.

Tensors on the meta device have shapes but no memory, so a profile needs neither an accelerator nor
the memory of the model. It counts the bytes of all tensors that operations create. Model states are
not counted, because they exist before. Elixir's pre-runtime profiler provides the same figures
(arXiv 2212.05339, section 3.1).

Attention is profiled as the fused kernels of accelerators: it keeps its inputs, its output and, for
each row, the logarithm of the sum of the exponentials, but not the scores. For meta tensors, torch
would select the implementation that stores all scores.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from optimus.chunks.segments import register_uses
from optimus.config import Config, OffloadConfig
from optimus.distributed.groups import plan_groups
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.model.deferred_gradients import DeferredGradients
from optimus.model.transformer import Transformer
from optimus.observe.events import Recorder
from optimus.parallel.apply import build_model, make_layout
from optimus.parallel.pipeline.actions import Schedule
from optimus.parallel.pipeline.stage import Objective, Stage, backward
from optimus.platform import dtype_of
from optimus.rank.segments import segments_of
from optimus.rank.states import make_states, write_gradients_to
from optimus_kernels import experts_grouped
from optimus_kernels.experts_operands import Operands, WeightGrads


class UseProfile(NamedTuple):
    """Memory and operations of one use: the forward or the backward of a segment of the model for
    one microbatch."""

    segment: int
    """Index of the segment."""
    backward: bool
    kept: int
    """Bytes that the use allocates and does not free, less the bytes of earlier uses that it frees.
    The sum over all uses of a microbatch is almost 0."""
    peak: int
    """Largest number of bytes during the use, less the bytes before it."""
    flops: int
    """Floating-point operations of matrix products and attention."""
    moved: int
    """Bytes that other operations read and write, if no two of them are fused."""
    traffic: tuple[tuple[str, str, int], ...] = ()
    """The collectives in order, each with its mesh axes, its operation and its payload in bytes, as
    for `Recorder.collective`."""


class UseTracker(Recorder):
    """Context manager that profiles the uses of segments of a model on the meta device. As a
    recorder of process groups, it also profiles their collectives.

    Code within the context calls `use` at the beginning of each use. Operations before the first
    call are not profiled.

    Attributes:
        uses: The profiles of the uses so far, in order.
    """

    def __init__(self) -> None:
        self.uses: list[UseProfile] = []
        self._current: tuple[int, bool] | None = None
        self._start = 0
        self._traffic: list[tuple[str, str, int]] = []
        self._tensors = _TensorTracker()
        self._attention: torch.library.Library | None = None

    def __enter__(self) -> UseTracker:
        self._attention = torch.library.Library("aten", "IMPL")
        self._attention.impl("scaled_dot_product_attention", self._attend, "AutogradMeta")
        self._tensors.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tensors.__exit__(*error)
        assert self._attention is not None
        self._attention._destroy()
        self.end_use()

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Replace torch's scaled dot-product attention. The figures do not depend on dropout and
        causal masks."""
        return _Attention.apply(query, key, value, attn_mask, self._tensors)

    def use(self, segment: int, backward: bool) -> None:
        """Begin a use, and end the previous one. Do nothing if this use is the present one."""
        if self._current != (segment, backward):
            self.end_use()
            self._current = segment, backward

    def count_expert_rows(self, rows: int) -> None:
        """Set the number of rows that the experts of a layer on this rank compute for a microbatch,
        if some rows of their operands belong to experts of other ranks."""
        self._tensors.count_expert_rows(rows)

    def collective(self, axes: str, operation: str, num_bytes: int) -> None:
        self._traffic.append((axes, operation, num_bytes))

    def end_use(self) -> None:
        """End the present use."""
        live, peak, flops, moved = self._tensors.take()
        if self._current is not None:
            figures = live - self._start, peak - self._start, flops, moved
            self.uses.append(UseProfile(*self._current, *figures, tuple(self._traffic)))
        self._traffic.clear()
        self._current, self._start = None, live


class _TensorTracker(TorchDispatchMode):
    """Counts the bytes of the storages that operations create until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.flops = self.moved = 0
        self._expert_rows = 0
        """Number of rows that the experts of a layer on this rank compute for a microbatch. 0 if
        each row of their operands belongs to an expert of this rank."""
        self._known: dict[int, tuple[weakref.ref, int]] = {}
        """Storages by address: a reference that removes the entry, and the counted bytes. Storages
        that existed before the first operation count as 0 bytes."""

    def take(self) -> tuple[int, int, int, int]:
        """Return the present bytes and, since the last call, the most bytes, the FLOPs and the
        bytes that other operations have read and written."""
        figures = self.live, self.peak, self.flops, self.moved
        self.peak, self.flops, self.moved = self.live, 0, 0
        return figures

    def count_flops(self, flops: int) -> None:
        """Count the FLOPs of an operation that has no formula."""
        self.flops += flops

    def count_expert_rows(self, rows: int) -> None:
        """As for `UseTracker`."""
        self._expert_rows = rows

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        read = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        for tensor in read:
            self._add(tensor, is_new=False)
        packet = function._overloadpacket
        if packet is torch.ops.aten._local_scalar_dense and args[0].is_meta:
            # Code that reads a value, such as a test for padding, gets True or 1.
            return True if args[0].dtype is torch.bool else 1
        experts = _EXPERTS.get(packet)
        if experts is None:
            out = function(*args, **kwargs)
        else:
            with self:  # the implementation allocates temporary tensors
                out = experts(*args)
        written = [t for t in tree_iter(out) if isinstance(t, Tensor)]
        for tensor in written:
            self._add(tensor, is_new=True)
        self.peak = max(self.peak, self.live)
        if packet in _GROUPED_PRODUCTS:
            rows = self._expert_rows or args[0].shape[0]
            self.flops += 2 * rows * args[0].shape[-1] * args[1].shape[-1]
        elif packet in flop_registry and experts is None:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        elif not function.is_view:
            self.moved += sum(tensor.nbytes for tensor in (*read, *written))
        return out

    def _add(self, tensor: Tensor, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if is_new else 0

        def remove(_: Any) -> None:
            self.live -= self._known.pop(key)[1]

        self._known[key] = weakref.ref(storage, remove), size
        self.live += size


class _Attention(torch.autograd.Function):
    """Attention of query [..., H, S, C], with the memory and the FLOPs of a fused kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        tensors: _TensorTracker,
    ) -> Tensor:
        # Fused kernels store the heads of a token side by side.
        heads_last = query.transpose(-3, -2).shape[:-1]
        out = query.new_empty(*heads_last, value.shape[-1]).transpose(-3, -2)
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        # Two matrix products of all scores, even masked scores, as in `flops_per_token`.
        ctx.flops = 2 * lse.numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        ctx.tensors = tensors
        tensors.count_flops(ctx.flops)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        ctx.tensors.count_flops(5 * ctx.flops // 2)  # three more products than forward
        grads = (torch.empty_like(tensor) for tensor in (query, key, value))
        return *grads, None, None


def _experts(*arguments: Any) -> tuple[Tensor, Tensor]:
    return experts_grouped.forward(Operands(*arguments[:8]), arguments[8])


def _experts_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    operands, (h, with_weights) = Operands(*arguments[:8]), arguments[8:]
    into = None
    if with_weights:
        gate_up, down = torch.empty_like(operands.gate_up), torch.empty_like(operands.down)
        into = WeightGrads(gate_up, down, add=False)
    dx, dw, _ = experts_grouped.backward(grad, operands, h, into)
    empty = operands.x.new_empty(0)
    return dx, dw.to(operands.weights.dtype), *(into[:2] if into else (empty, empty))


def _experts_backward_into(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    operands, into = Operands(*arguments[:8]), WeightGrads(*arguments[9:])
    dx, dw, _ = experts_grouped.backward(grad, operands, arguments[8], into)
    return dx, dw.to(operands.weights.dtype)


_EXPERTS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.optimus.experts: _experts,
    torch.ops.optimus.experts_backward: _experts_backward,
    torch.ops.optimus.experts_backward_into: _experts_backward_into,
}
"""Implementations of the ops of the experts on accelerators, by op."""
_GROUPED_PRODUCTS = {torch.ops.optimus.grouped_mm, torch.ops.optimus.grouped_mm_weight}
"""Products of R rows for all experts: [R, A] and [E, A, B], or [R, A] and [R, B]."""


class StageProfile(NamedTuple):
    """Uses of the segments of a pipeline stage for one microbatch, in order."""

    forward: tuple[UseProfile, ...]
    backward: tuple[UseProfile, ...]
    """The uses of the backward. If the schedule divides the backward, those of the action I."""
    weights: UseProfile | None = None
    """The action W of a schedule that divides the backward."""


Profiled = dict[Any, tuple["StageProfile", Sequence[int]]]
"""Profiles of stages by their kind, each with the segments of the stage that was run."""


def profile_stages(
    config: Config, mesh: Mesh, coordinate: Coordinate, profiled: Profiled | None = None
) -> dict[int, StageProfile]:
    """Profile the stages of the rank at `coordinate` for one microbatch.

    Experts are assumed to have balanced loads. At most two layers of each kind are
    run on a stage. The figures of the second also hold for further layers of this kind.

    Args:
        config: The run's configuration, with `train.seq_len` and `train.microbatch_size`.
        mesh: Sizes of all axes.
        coordinate: The rank.
        profiled: Profiles of other ranks with the same pp, ep, tp sizes and configuration. Stages
            of a kind in it are not run; others are added.

    Returns:
        A profile of each stage of the rank. `UseProfile.segment` is an index in the result of
        `segments_of`.
    """
    train, kind = config.train, config.model
    tracker = UseTracker()
    layout = make_layout(config, mesh, coordinate, num_microbatches=mesh.pp)
    groups = plan_groups(mesh, mesh.rank_at(coordinate), tracker)
    model = build_model(config, layout, groups, torch.device("meta"))
    resident = config.optim.model_copy(update={"resident": "all", "cache_chunks": 0})
    states = make_states(resident, train, OffloadConfig(), layout, groups, model)
    write_gradients_to(model, states)
    segments = segments_of(model, layout)
    numbers = {segment.name: number for number, segment in enumerate(segments)}
    objective = Objective(1, 1, len(kind.sparse_layers), kind.aux_loss_coef, kind.z_loss_coef)
    tokens = torch.empty(train.microbatch_size, train.seq_len, dtype=torch.int64, device="meta")
    model.rotary(train.seq_len, tokens.device)  # create the tables, which are shared by all uses
    shape = train.microbatch_size, train.seq_len // layout.sequence_shares, kind.hidden_size
    # Each choice of a token is computed by one of the ep ranks, which have equal loads.
    tracker.count_expert_rows(tokens.numel() * kind.num_experts_per_tok)
    boundary = torch.empty(shape, dtype=dtype_of(train.dtype), device="meta")
    profiles: dict[int, StageProfile] = {}
    profiled = {} if profiled is None else profiled
    with tracker:
        register_uses(segments, tracker.use, True)
        for number in layout.stages:
            of_stage = [n for n, segment in enumerate(segments) if segment.stage == number]
            kinds = _kinds_of_layers(model, layout.layers[number])
            is_last = number == layout.schedule.num_stages - 1
            key = tuple(kinds.values()), number == 0, is_last
            if key not in profiled:
                of_kind = {
                    n: same[min(at, 1)] for same in _grouped(kinds) for at, n in enumerate(same)
                }
                stage = Stage(model, set(of_kind.values()), number == 0, is_last, objective)
                run = _profile_stage(tracker, stage, of_stage, tokens, boundary, layout.schedule)
                copies = {numbers[f"block {n}"]: numbers[f"block {o}"] for n, o in of_kind.items()}
                profiled[key] = _with_all_layers(run, of_stage, copies), of_stage
            profile, theirs = profiled[key]
            profiles[number] = _renumbered(profile, dict(zip(theirs, of_stage, strict=True)))
    return profiles


def _kinds_of_layers(model: Transformer, layers: range) -> dict[int, Any]:
    """Return a value for each layer of a stage. Layers with equal values have the same figures,
    except for the first of them."""
    kinds = {}
    embedding = [] if model.embed is None else [model.embed]
    trains_before = layers[0] > 0 and not embedding
    trains_before |= any(p.requires_grad for module in embedding for p in module.parameters())
    for number in layers:
        trained = tuple(p.requires_grad for p in model.blocks[str(number)].parameters())
        kinds[number] = model.config.layer(number), trained, trains_before
        trains_before |= any(trained)
    return kinds


def _grouped(kinds: Mapping[int, Any]) -> Iterable[list[int]]:
    """Return the layers of each kind."""
    groups: dict[Any, list[int]] = {}
    for number, kind in kinds.items():
        groups.setdefault(kind, []).append(number)
    return groups.values()


def _profile_stage(
    tracker: UseTracker,
    stage: Stage,
    segments: Sequence[int],
    tokens: Tensor,
    boundary: Tensor,
    schedule: Schedule,
) -> StageProfile:
    """Profile the forward and the backward of a microbatch, as the executor runs them. `boundary`
    has the shape of the tensors between stages."""
    first = len(tracker.uses)
    tracker.use(segments[0], False)
    x = None if stage.is_first else torch.empty_like(boundary).requires_grad_()
    output = stage.forward(x, tokens)
    tracker.end_use()
    middle = len(tracker.uses)
    tracker.use(segments[-1], True)
    grad = None if output.x is None else torch.empty_like(boundary)
    deferred = DeferredGradients() if schedule.splits_backward else None
    with deferred or nullcontext():
        backward(output, grad)
    del output, x, grad
    tracker.end_use()
    end = len(tracker.uses)
    weights = None
    if deferred is not None:
        tracker.use(segments[0], True)
        deferred.compute()
        tracker.end_use()
        weights = tracker.uses[-1]
    return StageProfile(tuple(tracker.uses[first:middle]), tuple(tracker.uses[middle:end]), weights)


def _with_all_layers(
    profile: StageProfile, segments: Sequence[int], copies: Mapping[int, int]
) -> StageProfile:
    """Return a profile with the uses of all segments of a stage. `copies` contains, for each
    segment of a block, the profiled segment whose figures it has."""

    def expand(uses: Iterable[UseProfile], order: Iterable[int]) -> Iterator[UseProfile]:
        by_segment = {use.segment: use for use in uses}
        for segment in order:
            use = by_segment.get(copies.get(segment, segment))
            if use is not None:  # a segment before the first trained parameter has no backward
                yield use._replace(segment=segment)

    forward = tuple(expand(profile.forward, segments))
    return StageProfile(
        forward, tuple(expand(profile.backward, reversed(segments))), profile.weights
    )


def _renumbered(profile: StageProfile, segments: Mapping[int, int]) -> StageProfile:
    """Return a profile with other indices of segments."""
    forward, backward = (
        tuple(use._replace(segment=segments[use.segment]) for use in uses) for uses in profile[:2]
    )
    return profile._replace(forward=forward, backward=backward)
