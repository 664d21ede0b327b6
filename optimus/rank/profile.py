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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimus.chunks.segments import register_uses
from optimus.config import Config, OffloadConfig
from optimus.distributed.groups import plan_groups
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.model.deferred_gradients import DeferredGradients
from optimus.model.transformer import Transformer
from optimus.observe.events import Recorder
from optimus.parallel.apply import build_model, make_layout
from optimus.parallel.expert import dispatched_experts
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
    """Bytes that operations other than matrix products read and write."""
    traffic: tuple[tuple[str, str, int], ...] = ()
    """The collectives in order, each with its mesh axes, its operation and its payload in bytes, as
    for `Recorder.collective`."""
    operations: tuple[Operation, ...] = ()
    """All operations except collectives, merged (`optimus.rank.operations`)."""


class UseTracker(Recorder):
    """Context manager that profiles the uses of segments of a model on the meta device. As a
    recorder of process groups, it also profiles their collectives.

    Code within the context calls `use` at the beginning of each use. Operations before the first
    call are not profiled.

    Args:
        on_cpu: True for the operations of a run on a CPU.

    Attributes:
        uses: The profiles of the uses so far, in order.
    """

    def __init__(self, on_cpu: bool = False) -> None:
        self.uses: list[UseProfile] = []
        self._current: tuple[int, bool] | None = None
        self._start = 0
        self._traffic: list[tuple[str, str, int]] = []
        self._tensors = TensorTracker(on_cpu)
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
        return attend(query, key, value, attn_mask, self._tensors)

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
        live, peak, flops, operations = self._tensors.take()
        if self._current is not None:
            moved = sum(op.num_bytes for op in operations if isinstance(op, Pass | FusedAttention))
            figures = live - self._start, peak - self._start, flops, round(moved)
            lists = tuple(self._traffic), operations
            self.uses.append(UseProfile(*self._current, *figures, *lists))
        self._traffic.clear()
        self._current, self._start = None, live


class StageProfile(NamedTuple):
    """Uses of the segments of a pipeline stage for one microbatch, in order."""

    forward: tuple[UseProfile, ...]
    backward: tuple[UseProfile, ...]
    """The uses of the backward. If the schedule divides the backward, those of the action I."""
    weights: UseProfile | None = None
    """The action W of a schedule that divides the backward."""


Profiled = dict[Any, tuple["StageProfile", Sequence[int]]]
"""Profiles of stages by their kind, each with the segments of the stage that was run."""


def profile_work(
    config: Config, mesh: Mesh, on_cpu: bool = False, concentrated: bool = False
) -> ModelWork:
    """Profile the operations of a model for one microbatch on one tp and ep rank.

    The result does not depend on pp, dp and the settings of `[optim]`, except the dtype of
    gradients and frozen parameters.

    Args:
        config: As for `profile_stages`.
        mesh: Sizes of all axes.
        on_cpu: True for a run on a CPU, which runs some operations for each expert.
        concentrated: As for `profile_stages`.
    """
    model = config.model
    chosen = list(range(model.num_layers))
    if not config.optim.frozen:  # layers with equal numbers of experts are equal
        of_kind = _grouped(dict(enumerate(model.experts_by_layer)))
        chosen = sorted(layer for layers in of_kind for layer in layers[:2])
    experts = tuple(model.experts_by_layer[layer] for layer in chosen)
    small = config.model_copy(
        update={
            "model": model.model_copy(
                update={"num_layers": len(chosen), "num_experts": experts if any(experts) else 0}
            ),
            "parallel": config.parallel.model_copy(
                update={
                    "pp": 1,
                    "dp": 1,
                    "schedule": "1f1b",
                    "virtual_stages": 1,
                    "stage_layers": (),
                }
            ),
        }
    )
    ranks = mesh._replace(pp=1, dp=1)
    divides = config.parallel.schedule == "zb-h1"
    rank = small, ranks, Coordinate(0, 0, 0, 0), None, on_cpu
    (whole,) = profile_stages(*rank, concentrated=concentrated).values()
    divided = None
    if divides:
        (divided,) = profile_stages(*rank, True, concentrated).values()
    backward = {use.segment: use for use in whole.backward}
    input_backward = {use.segment: use for use in divided.backward} if divided else None
    work = [
        SegmentWork(
            _operations(use),
            _operations(backward.get(use.segment)),
            None if input_backward is None else _operations(input_backward.get(use.segment)),
        )
        for use in whole.forward
    ]
    embedding, *blocks, head = work
    assert len(blocks) == len(chosen), (len(blocks), len(chosen))
    if config.optim.frozen:
        return ModelWork(embedding, tuple(blocks), head)
    # The first layer of a kind has other figures than the others.
    by_experts = dict(zip(experts, blocks, strict=True))
    return ModelWork(embedding, tuple(by_experts[e] for e in model.experts_by_layer), head)


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
    divides_backward: bool | None = None,
    concentrated: bool = False,
) -> dict[int, StageProfile]:
    """Profile the stages of the rank at `coordinate` for one microbatch.

    At most two layers of each kind are run on a stage. The figures of the second also hold for
    further layers of this kind.

    Args:
        config: The run's configuration, with `train.seq_len` and `train.microbatch_size`.
        mesh: Sizes of all axes.
        coordinate: The rank.
        profiled: Profiles of other ranks with the same pp, ep, tp sizes, configuration and further
            arguments. Stages of a kind in it are not run; others are added.
        on_cpu: True for the operations of a run on a CPU, where operands of experts have only the
            rows of the experts of the rank.
        divides_backward: True to divide the backward as zb-h1 does; None for the configuration's
            schedule.
        concentrated: True if all tokens of all ep ranks choose only experts of this rank, so that
            it computes ep times as many rows as with equal loads. False: experts have equal loads.

    Returns:
        A profile of each stage of the rank. `UseProfile.segment` is an index in the result of
        `segments_of`.
    """
    train, kind = config.train, config.model
    tracker = UseTracker(on_cpu)
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
    # Each choice of a token is computed by one of the ep ranks.
    rows = tokens.numel() * kind.num_experts_per_tok
    tracker.count_expert_rows(rows * (mesh.ep if concentrated else 1))
    for experts in dispatched_experts(model) if concentrated else ():
        experts.assume_all_tokens()
    boundary = torch.empty(shape, dtype=dtype_of(train.dtype), device="meta")
    divides = layout.schedule.splits_backward if divides_backward is None else divides_backward
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
                run = _profile_stage(tracker, stage, of_stage, tokens, boundary, divides)
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
    divides_backward: bool,
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
    deferred = DeferredGradients() if divides_backward else None
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
