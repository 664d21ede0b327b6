"""Activation memory and FLOPs of a microbatch, from a run of the model on the meta device.

Tensors on the meta device have shapes but no memory, so a profile needs neither an accelerator nor
the memory of the model. A profile counts the bytes of all tensors that operations create. The count
excludes model states, because they exist before the microbatch. Elixir's pre-runtime profiler
measures the same quantities (arXiv 2212.05339, section 3.1).

Attention is profiled as if a fused kernel of an accelerator ran it. For backward, such a kernel
keeps its inputs, its output and, for each row, the logarithm of the sum of the exponentials, but
not the scores. For meta tensors, torch would select the implementation that stores all scores.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimus.chunks.segments import register_uses
from optimus.config import Config, OffloadConfig
from optimus.distributed.groups import plan_groups
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.model.deferred_gradients import DeferredGradients
from optimus.observe.events import Recorder
from optimus.parallel.apply import build_model, layout_of_layers
from optimus.parallel.expert import dispatched_experts
from optimus.parallel.pipeline.plan import plan_stages, schedule_of
from optimus.parallel.pipeline.stage import Objective, Stage, backward
from optimus.platform import dtype_of
from optimus.rank.operations import (
    Exchange,
    FusedAttention,
    ModelWork,
    Operation,
    Pass,
    SegmentWork,
)
from optimus.rank.segments import segments_of
from optimus.rank.states import make_states, write_gradients_to
from optimus.rank.tensor_tracker import TensorTracker, attend


class Gradient(NamedTuple):
    """Event in the backward of a segment: the gradient of a parameter is accumulated."""

    segment: int
    """Index of the segment."""
    name: str
    """Name of the parameter, relative to its block."""
    position: int
    """Number of collectives that this backward starts before this event."""


class UseProfile(NamedTuple):
    """Memory and operations of one use: the forward or the backward of a segment of the model for
    one microbatch."""

    segment: int
    """Index of the segment."""
    backward: bool
    kept: int
    """Bytes that the use allocates and does not free, minus the bytes of earlier uses that this use
    frees. The sum over all uses of a microbatch is almost 0."""
    peak: int
    """Largest number of allocated bytes during the use, minus the number before the use."""
    flops: int
    """Floating-point operations of matrix products and attention."""
    moved: int
    """Bytes that operations other than matrix products read and write."""
    traffic: tuple[tuple[str, str, int], ...] = ()
    """The collectives in order, each with its mesh axes, its operation and its payload in bytes, as
    for `Recorder.collective`."""
    operations: tuple[Operation, ...] = ()
    """All operations except collectives, combined by `optimus.rank.operations.merged`."""
    gradients: tuple[Gradient, ...] = ()
    """The gradients that backward accumulates, in order."""


class UseTracker(Recorder):
    """Context manager that profiles the uses of segments of a model on the meta device. As the
    recorder of the process groups, it also adds the collectives of each use to the profile of the
    use.

    Code within the context calls `use` at the beginning of each use. Operations before the first
    call are not profiled.

    Args:
        on_cpu: True to count the operations of a run on a CPU, False to count those of a run on an
            accelerator.

    Attributes:
        uses: The profiles of the uses so far, in order.
    """

    def __init__(self, on_cpu: bool = False) -> None:
        self.uses: list[UseProfile] = []
        self._current: tuple[int, bool] | None = None
        self._start = 0
        self._traffic: list[tuple[str, str, int]] = []
        self._gradients: list[Gradient] = []
        self._on_cpu, self._tensors = on_cpu, TensorTracker(on_cpu)
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
        """Implementation of torch's scaled dot-product attention for meta tensors. It counts a
        fused kernel, for which causal masks and dropout change no bytes and no FLOPs. On a CPU, it
        counts several operations if torch has no fused kernel, for example with dropout."""
        if attn_mask is not None and attn_mask.dtype is torch.bool:  # as torch does
            attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
        is_fused = dropout_p == 0 and query.shape[-1] == value.shape[-1] and query.dim() == 4
        is_grouped = options.get("enable_gqa", False)
        for tensor in (key, value):
            is_fused &= tensor.dim() == 4 and len(tensor) == len(query)
            is_fused &= tensor.shape[1] == query.shape[1] or is_grouped
        if attn_mask is not None:
            is_fused &= attn_mask.dim() in (2, 4) and not attn_mask.requires_grad
        if self._on_cpu and not is_fused:
            # torch has no fused kernel on a CPU for these cases.
            function = torch.ops.aten._scaled_dot_product_attention_math
            mask = attn_mask, dropout_p, is_causal
            return function(query, key, value, *mask, **options)[0]
        return attend(query, key, value, attn_mask, self._tensors)

    def use(self, segment: int, backward: bool) -> None:
        """End the present use, and begin the forward or backward use of `segment`. Do nothing if
        the present use is already this use."""
        if self._current != (segment, backward):
            self.end_use()
            self._current = segment, backward

    @property
    def segment(self) -> int:
        """Segment of the present use."""
        assert self._current is not None
        return self._current[0]

    def count_expert_rows(self, rows: int) -> None:
        """Set the number of rows that the experts of a layer on this rank compute for a microbatch.
        Call this method if operands also contain rows of experts on other ranks."""
        self._tensors.count_expert_rows(rows)

    def collective(self, axes: str, operation: str, num_bytes: int) -> None:
        self._traffic.append((axes, operation, num_bytes))

    def watch_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Register hooks that call `accumulated` when the gradient of a parameter has been
        accumulated. `parameters` has the parameters of the model by name."""
        for name, leaf in parameters.items():
            if leaf.requires_grad:
                hook = partial(self.accumulated, within_block(name))
                leaf.register_post_accumulate_grad_hook(hook)

    def accumulated(self, name: str, leaf: Tensor) -> None:
        """Record that the gradient of the parameter `name` has been accumulated. `leaf` is the
        parameter."""
        self._gradients.append(Gradient(self.segment, name, len(self._traffic)))

    def end_use(self) -> None:
        """End the present use."""
        live, peak, flops, operations = self._tensors.take()
        if self._current is not None:
            moved = sum(op.num_bytes for op in operations if isinstance(op, Pass | FusedAttention))
            figures = live - self._start, peak - self._start, flops, round(moved)
            traffic, gradients = tuple(self._traffic), tuple(self._gradients)
            use = UseProfile(*self._current, *figures, traffic, operations, gradients)
            self.uses.append(use)
        self._traffic.clear()
        self._gradients.clear()
        self._current, self._start = None, live


class StageProfile(NamedTuple):
    """Uses of the segments of a pipeline stage for one microbatch, in order. Backward frees what
    forward keeps, so the sum of `UseProfile.kept` over all uses is 0."""

    forward: tuple[UseProfile, ...]
    backward: tuple[UseProfile, ...]
    """The uses of the backward or, if the schedule divides the backward, of the action I."""
    weights: UseProfile | None = None
    """The action W of a schedule that divides the backward."""


class SegmentProfile(NamedTuple):
    """Uses of a segment for one microbatch, in a model where another segment precedes it and
    another segment follows it."""

    forward: UseProfile
    backward: UseProfile | None
    """None if neither this segment nor an earlier segment has trained parameters."""
    weights: UseProfile | None
    """The action W of this segment alone; None if the backward is not divided or the segment has no
    deferred gradients."""


class ModelProfile(NamedTuple):
    """Profiles of the segments from which all stages of a model are composed."""

    embedding: SegmentProfile | None
    layers: Mapping[int, SegmentProfile]
    """Profiles of the layers, by the values of `kinds_of_layers`."""
    head: SegmentProfile | None
    boundary: int
    """Bytes of the tensor that a stage sends to the next stage."""
    frees_input: bool
    """True if layers free their input after the forward. Their backward does not need the input."""
    divides_backward: bool

    def stage(
        self, kinds: Sequence[int], is_first: bool, is_last: bool, first: int = 0
    ) -> StageProfile:
        """Return the profile of a stage.

        The first stage begins with the embedding; any other stage receives its input from the
        previous stage. The last stage ends with the head; any other stage receives the gradient of
        its output from the next stage. Each received tensor has `boundary` bytes, and stays
        allocated until the end of the backward. If the backward is divided, the received input
        stays allocated until the action W.

        Args:
            kinds: The kinds of the stage's layers (`kinds_of_layers`), in order.
            is_first, is_last: True for the first and the last stage of the model.
            first: Index of the stage's first segment among the segments of the rank.
        """
        segments = [self.layers[kind] for kind in kinds]
        if is_first:
            assert self.embedding is not None
            segments.insert(0, self.embedding)
        if is_last:
            assert self.head is not None
            segments.append(self.head)
        numbered = [*enumerate(segments, first)]
        forward = [_of_segment(s.forward, n) for n, s in numbered]
        backward = [_of_segment(s.backward, n) for n, s in numbered[::-1] if s.backward is not None]
        size = self.boundary
        freed = size * self.frees_input
        if is_first:  # the output of the embedding has memory until the end of the forward
            forward[1] = _add_bytes(forward[1], freed)
            forward[len(kinds)] = _add_bytes(forward[len(kinds)], -freed)
        else:
            forward[0] = _add_bytes(forward[0], size + freed, size)
            if self.divides_backward:
                backward[-1] = _add_bytes(backward[-1], size - freed)
        if not is_last and backward:
            # Unlike gradients within the stage, the received gradient is neither freed after its
            # first use nor reused for another tensor.
            backward[0] = _add_bytes(backward[0], 2 * size, 2 * size)
            backward[-1] = _add_bytes(backward[-1], -2 * size)
        live = sum(use.kept for use in (*forward, *backward))
        if self.divides_backward:
            weights = _together(
                [_of_segment(s.weights, n) for n, s in numbered[::-1] if s.weights is not None],
                first,
            )._replace(kept=-live)
            return StageProfile(tuple(forward), tuple(backward), weights)
        # Scalars of the objective are freed at the end.
        if backward:
            backward[-1] = _add_bytes(backward[-1], -live)
        else:
            forward[-1] = _add_bytes(forward[-1], -live)
        return StageProfile(tuple(forward), tuple(backward))


def _add_bytes(use: UseProfile, kept: int, peak: int = 0) -> UseProfile:
    return use._replace(kept=use.kept + kept, peak=use.peak + peak)


def _of_segment(use: UseProfile, segment: int) -> UseProfile:
    gradients = tuple(gradient._replace(segment=segment) for gradient in use.gradients)
    return use._replace(segment=segment, gradients=gradients)


def _together(uses: Sequence[UseProfile], segment: int) -> UseProfile:
    """Return the profile of several successive uses as if they were a single use of `segment`."""
    live = peak = flops = moved = 0
    traffic: list[tuple[str, str, int]] = []
    operations: list[Operation] = []
    gradients: list[Gradient] = []
    for use in uses:
        before = len(traffic)
        gradients += [g._replace(position=before + g.position) for g in use.gradients]
        peak, live = max(peak, live + use.peak), live + use.kept
        flops, moved = flops + use.flops, moved + use.moved
        traffic += use.traffic
        operations += use.operations
    use = UseProfile(segment, True, live, peak, flops, moved)
    return use._replace(
        traffic=tuple(traffic), operations=tuple(operations), gradients=tuple(gradients)
    )


Profiled = dict[Any, ModelProfile]
"""Cache of profiles. The keys contain the settings on which the profiles depend, as documented in
`profile_model`."""


def profile_work(
    config: Config,
    mesh: Mesh,
    on_cpu: bool = False,
    concentrated: bool = False,
    profiled: Profiled | None = None,
) -> ModelWork:
    """Return the operations of a model for one microbatch on one tp and ep rank, from a profile.

    The result does not depend on pp and dp. Of the settings of `[optim]`, only `grad_dtype` and
    `frozen` change it.

    Args:
        config: As for `profile_stages`.
        mesh: Sizes of all axes.
        on_cpu: True for a run on a CPU, which runs some operations once for each expert.
        concentrated, profiled: As for `profile_stages`.
    """
    profiled = {} if profiled is None else profiled
    layers = range(config.model.num_layers)
    stage = config, mesh, Coordinate(0, 0, 0, 0), layers, True, True
    whole = profile_model(*stage, False, profiled, on_cpu, concentrated)
    divided = None
    if config.parallel.schedule == "zb-h1":
        divided = profile_model(*stage, True, profiled, on_cpu, concentrated)

    def work_of(segment: SegmentProfile, other: SegmentProfile | None) -> SegmentWork:
        return SegmentWork(
            _operations(segment.forward),
            _operations(segment.backward),
            None if other is None else _operations(other.backward),
        )

    assert whole.embedding is not None and whole.head is not None
    of_kind = {
        kind: work_of(segment, divided and divided.layers[kind])
        for kind, segment in whole.layers.items()
    }
    return ModelWork(
        work_of(whole.embedding, divided and divided.embedding),
        tuple(of_kind[kind] for kind in kinds_of_layers(config, layers).values()),
        work_of(whole.head, divided and divided.head),
    )


def _operations(use: UseProfile | None) -> tuple[Operation, ...]:
    if use is None:
        return ()
    return (*use.operations, *(Exchange(*collective) for collective in use.traffic))


def profile_stages(
    config: Config,
    mesh: Mesh,
    coordinate: Coordinate,
    profiled: Profiled | None = None,
    on_cpu: bool = False,
    concentrated: bool = False,
) -> dict[int, StageProfile]:
    """Profile the stages of the rank at `coordinate` for one microbatch.

    Only one layer of each kind is run. The profile of this layer also holds for the other layers
    of this kind.

    Args:
        config: The run's configuration, with `train.seq_len` and `train.microbatch_size`.
        mesh: Sizes of all axes.
        coordinate: Coordinate of the rank in the mesh.
        profiled: Cache of profiles from earlier calls, also with another rank or other settings.
            Segments in the cache are not run again. The profiles of other segments are added to the
            cache.
        on_cpu: True for the operations of a run on a CPU. On a CPU, operands of experts have only
            rows of the experts of this rank.
        concentrated: True if all tokens of all ep ranks choose only experts of this rank, so that
            the rank computes ep times as many rows as with equal loads. False if experts have equal
            loads.

    Returns:
        A profile of each stage of the rank. `UseProfile.segment` is an index in the result of
        `segments_of`.
    """
    schedule = schedule_of(config, mesh, mesh.pp)
    profiles: dict[int, StageProfile] = {}
    profiled = {} if profiled is None else profiled
    stages, first = plan_stages(config, mesh.pp), 0
    for number in schedule.stages_of(coordinate.pp):
        is_first, is_last = number == 0, number == schedule.num_stages - 1
        ends = is_first, is_last
        divides = schedule.splits_backward
        stage = config, mesh, coordinate, stages[number], *ends, divides
        model = profile_model(*stage, profiled, on_cpu, concentrated)
        kinds = [*kinds_of_layers(config, stages[number]).values()]
        profiles[number] = model.stage(kinds, *ends, first)
        first += len(kinds) + is_first + is_last
    return profiles


def profile_model(
    config: Config,
    mesh: Mesh,
    coordinate: Coordinate,
    layers: range,
    is_first: bool,
    is_last: bool,
    divides_backward: bool,
    profiled: Profiled,
    on_cpu: bool = False,
    concentrated: bool = False,
) -> ModelProfile:
    """Return the profiles of the segments of a stage. The segments are run only if `profiled` does
    not contain their profiles.

    If all parameters are trained, the profiles hold for all stages of the model. The profiles
    depend on the sizes of ep and tp, the indices of the rank along these axes, `[model]`, the
    microbatch size, `train.seq_len`, `train.dtype`, `optim.grad_dtype`, `optim.frozen`,
    `recompute.modules`, `parallel.ep_dispatch`, `parallel.sequence_parallel`, `divides_backward`,
    `on_cpu` and `concentrated`.

    Args:
        config, mesh, coordinate: As for `profile_stages`.
        layers: Numbers of the layers of the stage.
        is_first, is_last: `is_first` is True if the stage has the embedding, `is_last` if it has
            the head.
        divides_backward: True if the schedule divides the backward into the actions I and W.
        profiled, on_cpu, concentrated: As for `profile_stages`.
    """
    if not config.optim.frozen:
        layers, is_first, is_last = range(config.model.num_layers), True, True
    kinds = kinds_of_layers(config, layers)
    parallel, train = config.parallel, config.train
    # With this vocabulary, the parameters of all tp ranks have equal shapes.
    if config.model.vocab_size % mesh.tp == 0:
        coordinate = coordinate._replace(tp=0)
    key = (
        (mesh.ep, mesh.tp, coordinate.ep, coordinate.tp),
        (train.microbatch_size, train.seq_len, train.dtype, config.optim.grad_dtype),
        (config.recompute.modules, parallel.ep_dispatch, parallel.sequence_parallel),
        (layers, is_first, is_last, config.optim.frozen, divides_backward),
        (on_cpu, concentrated),
    )
    if key not in profiled:
        of_kind = {kind: layer for layer, kind in reversed(kinds.items())}
        chosen = dict(sorted((layer, kind) for kind, layer in of_kind.items()))
        rank = config, mesh, coordinate, chosen, is_first, is_last, divides_backward
        profiled[key] = _run_segments(*rank, on_cpu, concentrated)
    return profiled[key]


def within_block(name: str) -> str:
    """Return the name of a parameter relative to its block; the name itself outside of blocks."""
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def kinds_of_layers(config: Config, layers: range) -> dict[int, int]:
    """Return a dict from the number of each layer to its kind. Layers of the same kind have equal
    profiles. If all parameters are trained, the kind of a layer is its number of experts; otherwise
    the kind of a layer is the number of the layer."""
    experts = config.model.experts_by_layer
    return {n: n if config.optim.frozen else experts[n] for n in layers}


def _run_segments(
    config: Config,
    mesh: Mesh,
    coordinate: Coordinate,
    layers: Mapping[int, int],
    is_first: bool,
    is_last: bool,
    divides_backward: bool,
    on_cpu: bool,
    concentrated: bool,
) -> ModelProfile:
    """Run the forward and the backward of a microbatch through some layers, as the executor runs
    them, and return the profile of each segment.

    Args:
        config, mesh, coordinate: As for `profile_model`.
        layers: Kind of each layer, by the number of the layer.
        is_first: True to run the embedding, too.
        is_last: True to run the head, too. Another operation replaces a missing embedding or head,
            so that there are operations before and after each layer.
        divides_backward, on_cpu, concentrated: As for `profile_model`.
    """
    train, kind = config.train, config.model
    tracker = UseTracker(on_cpu)
    mesh, coordinate = mesh._replace(pp=1, dp=1), coordinate._replace(pp=0, dp=0)
    layout = layout_of_layers(config, mesh, coordinate, tuple(layers), divides_backward)
    groups = plan_groups(mesh, mesh.rank_at(coordinate), tracker)
    model = build_model(config, layout, groups, torch.device("meta"))
    resident = config.optim.model_copy(update={"resident": "all", "cache_chunks": 0})
    states = make_states(resident, train, OffloadConfig(), layout, groups, model)
    write_gradients_to(model, states)
    segments = segments_of(model, layout)
    objective = Objective(1, 1, len(kind.sparse_layers), kind.aux_loss_coef, kind.z_loss_coef)
    stage = Stage(model, layers, is_first, is_last, objective)
    tokens = torch.empty(train.microbatch_size, train.seq_len, dtype=torch.int64, device="meta")
    seq_len = train.seq_len // layout.sequence_shares
    model.rotary(seq_len, tokens.device)  # create the tables, which are shared by all uses
    shape = train.microbatch_size, seq_len, kind.hidden_size
    # Each token adds a row for each of its experts, and one of the ep ranks computes this row.
    rows = tokens.numel() * kind.num_experts_per_tok
    tracker.count_expert_rows(rows * (mesh.ep if concentrated else 1))
    for experts in dispatched_experts(model) if concentrated else ():
        experts.assume_all_tokens()
    boundary = torch.empty(shape, dtype=dtype_of(train.dtype), device="meta")
    head = len(segments) - 1
    with tracker:
        register_uses(segments, tracker.use, True)
        tracker.watch_gradients(dict(model.named_parameters()) | model.separated_uses())
        inputs: list[weakref.ref] = []
        model.blocks[str(min(layers))].register_forward_pre_hook(
            lambda _, arguments: inputs.append(weakref.ref(arguments[0].untyped_storage()))
        )
        tracker.use(0, False)
        x = None if is_first else boundary.requires_grad_().clone()
        output = stage.forward(x, tokens)
        del x
        frees_input = inputs[0]() is None
        if output.x is not None:
            tracker.use(head, False)
            output = output._replace(x=2 * output.x)
        tracker.end_use()
        number = len(tracker.uses)
        tracker.use(head, True)
        deferred = _SegmentDeferral(tracker, len(segments)) if divides_backward else None
        with deferred or nullcontext():
            backward(output, None if is_last else torch.empty_like(boundary))
        del output
        tracker.end_use()
        if deferred is not None:
            deferred.compute()
            tracker.end_use()
    profiles = _by_segment(tracker.uses[:number], tracker.uses[number:], len(segments))
    return ModelProfile(
        profiles[0] if is_first else None,
        dict(zip(layers.values(), profiles[1:-1], strict=True)),
        profiles[-1] if is_last else None,
        boundary.nbytes,
        frees_input,
        divides_backward,
    )


def _by_segment(
    forward: Iterable[UseProfile], backward: Iterable[UseProfile], num_segments: int
) -> list[SegmentProfile]:
    """Return the profile of each segment. In `backward`, the uses with the segment numbers
    `num_segments` and larger compute deferred gradients of weights."""
    of_forward = {use.segment: use for use in forward}
    of_backward: dict[int, list[UseProfile]] = {}
    of_weights: dict[int, list[UseProfile]] = {}
    for use in backward:
        is_deferred = use.segment >= num_segments
        segment = use.segment % num_segments
        (of_weights if is_deferred else of_backward).setdefault(segment, []).append(use)
    return [
        SegmentProfile(
            of_forward[n],
            _together(of_backward[n], n) if n in of_backward else None,
            _together(of_weights[n], n) if n in of_weights else None,
        )
        for n in range(num_segments)
    ]


class _SegmentDeferral(DeferredGradients):
    """Deferred weight gradients, whose computation is profiled separately for each segment."""

    def __init__(self, tracker: UseTracker, num_segments: int) -> None:
        super().__init__()
        self._tracker, self._num_segments = tracker, num_segments

    def defer(self, work: Callable[[], None], *weights: Tensor) -> None:
        super().defer(partial(self._run, self._tracker.segment, work), *weights)

    def _run(self, segment: int, work: Callable[[], None]) -> None:
        self._tracker.use(self._num_segments + segment, True)
        work()
