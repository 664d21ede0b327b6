"""Records of a run, and the recorders that receive them.

Each observation of a run is a value of one of these types. The training loop, the pipeline executor
and the collectives pass it to a `Recorder`; the sinks (files, TensorBoard, progress, log) are
recorders. The base class ignores everything: without a sink, a record costs one method call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

Value = int | float | str | None
"""A value in a line of metrics.jsonl or eval.jsonl."""


@dataclass(frozen=True)
class MoeFigures:
    """Router losses and expert load of one update. Loads are relative to their layer's mean."""

    aux_loss: float | None
    """Mean over MoE layers and microbatches; None for an update skipped for an overflow."""
    z_loss: float | None
    expert_load_min: float
    """Least load of all experts of all layers."""
    expert_load_max: float
    expert_load_min_layer: int
    """Layer of the model that has the expert with the least load."""
    expert_load_max_layer: int
    experts_without_rows: int


@dataclass(frozen=True)
class LossScaleFigures:
    """Dynamic loss scaling (fp16) of one update."""

    loss_scale: float
    skipped_steps: int
    """Updates skipped for an overflow since the run began."""


@dataclass(frozen=True)
class StepRecord:
    """One update, over all ranks. `values` has the fields in the order of metrics.jsonl."""

    step: int
    loss: float | None
    """Cross-entropy in nats, mean over the global batch; None for a skipped update."""
    grad_norm: float | None
    """Gradient norm before clipping; None for a skipped update."""
    lr: float
    tokens: int
    """Tokens read since the run began, including those of this update."""
    step_time_s: float
    tokens_per_s: float
    tflops_per_device: float
    mfu: float | None
    """FLOP/s of the model over the peak FLOP/s of the device; None if above 1."""
    mem_bytes: int
    """Peak memory of the first rank's device."""
    moe: MoeFigures | None = None
    """None for a dense model."""
    loss_scaling: LossScaleFigures | None = None
    """None unless train.dtype is fp16."""

    def values(self) -> dict[str, Value]:
        """Return the entries of this record's line of metrics.jsonl, in their order."""
        values: dict[str, Value] = {}
        for name, value in vars(self).items():
            if isinstance(value, MoeFigures | LossScaleFigures):
                values |= vars(value)
            elif name not in ("moe", "loss_scaling"):
                values[name] = value
        return values


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation."""

    step: int
    source: str
    """Name of the data that was read, such as `held-out`."""
    loss: float
    """Mean cross-entropy in nats."""
    tokens: int

    def values(self) -> dict[str, Value]:
        """Return the entries of this record's line of eval.jsonl, in their order."""
        return dict(vars(self))

    @classmethod
    def from_values(cls, values: Mapping[str, object]) -> EvalRecord | None:
        """Return the record of a line of eval.jsonl, or None if a field is missing or has another
        type than in the result of `values`."""
        kinds = {"step": int, "source": str, "loss": float, "tokens": int}
        if any(type(values.get(name)) is not kind for name, kind in kinds.items()):
            return None
        return cls(**{name: values[name] for name in kinds})  # type: ignore[arg-type]  # checked above


class LayerLoad(NamedTuple):
    """Expert load of one MoE layer, in units of the layer's mean."""

    layer: int
    """Index in the model."""
    min: float
    max: float
    experts_without_rows: int


class ExpertLoad(NamedTuple):
    """Expert load of one update by layer, over all ranks."""

    step: int
    layers: tuple[LayerLoad, ...]

    def figures(self, aux_loss: float | None, z_loss: float | None) -> MoeFigures:
        """Return the figures over all layers, for the StepRecord of the update."""
        lowest = min(self.layers, key=lambda load: load.min)
        highest = max(self.layers, key=lambda load: load.max)
        idle = sum(load.experts_without_rows for load in self.layers)
        return MoeFigures(
            aux_loss, z_loss, lowest.min, highest.max, lowest.layer, highest.layer, idle
        )


class Traffic(NamedTuple):
    """Payload of one rank's collectives and messages in one update."""

    step: int
    bytes_by_axes: dict[str, int]
    """Bytes by the mesh axes of the group, such as `dp` or `dp x ep`."""


class PipelineTimes(NamedTuple):
    """Seconds that one rank spent in the actions of one update. A GPU computes after its host has
    launched the kernels, so for a GPU these are the times of the launches."""

    step: int
    seconds_by_kind: dict[str, float]
    """Seconds by kind of action. They exclude the time of waiting for other stages, which is the
    entry `wait`."""


class StartUpRecord(NamedTuple):
    """Seconds from the command to the end of the first update, on one rank."""

    phases_s: tuple[tuple[str, float], ...]
    """Phases in their order with their seconds."""
    total_s: float
    processor_s: float
    """Processor time of this process alone."""


class ActionEvent(NamedTuple):
    """One action of a pipeline schedule as it ran. Times are of `time.perf_counter_ns`."""

    kind: str
    """Name of the action's kind, such as `F` (optimus.parallel.pipeline.actions)."""
    stage: int
    microbatch: int
    start_ns: int
    end_ns: int
    waited_ns: int
    """Time within the action in which it waited for data from another stage."""

    @property
    def busy_ns(self) -> int:
        return self.end_ns - self.start_ns - self.waited_ns


Record = StepRecord | EvalRecord | ExpertLoad | Traffic | PipelineTimes | StartUpRecord
"""A record that a run makes at most once for each update."""


class Recorder:
    """Receives records and ignores them; sinks override the methods for those that they write."""

    records_actions = False
    """True if the recorder uses `action`. Only then do executors read the clock for each action."""

    def record(self, record: Record) -> None:
        """Receive a record of the run."""

    def collective(self, axes: str, operation: str, num_bytes: int) -> None:
        """Receive one collective or message of this rank.

        Args:
            axes: Mesh axes along which the ranks of its group differ.
            operation: Name of the operation, such as `all_gather`.
            num_bytes: Bytes of the payload: the tensor that is reduced, broadcast or sent; the
                whole tensor for all-gather and reduce-scatter; for all-to-all, all rows that this
                rank sends, including those to itself.
        """

    def action(self, event: ActionEvent) -> None:
        """Receive one action of the pipeline schedule, if `records_actions`."""


NO_RECORDER = Recorder()
"""The recorder of ranks without a sink."""


class Recorders(Recorder):
    """Passes everything to several recorders, which may be added during the run."""

    def __init__(self, *recorders: Recorder) -> None:
        self._recorders: list[Recorder] = []
        for recorder in recorders:
            self.add(recorder)

    def add(self, recorder: Recorder) -> None:
        self._recorders.append(recorder)
        self.records_actions = self.records_actions or recorder.records_actions

    def record(self, record: Record) -> None:
        for recorder in self._recorders:
            recorder.record(record)

    def collective(self, axes: str, operation: str, num_bytes: int) -> None:
        for recorder in self._recorders:
            recorder.collective(axes, operation, num_bytes)

    def action(self, event: ActionEvent) -> None:
        for recorder in self._recorders:
            recorder.action(event)


class TrafficMeter(Recorder):
    """Counts collectives and their payload."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], list[int]] = {}
        """Number of calls and payload bytes since the last `clear`, by (axes, operation)."""

    def collective(self, axes: str, operation: str, num_bytes: int) -> None:
        count = self.counts.setdefault((axes, operation), [0, 0])
        count[0] += 1
        count[1] += num_bytes

    def clear(self) -> None:
        self.counts.clear()

    def bytes_by_axes(self) -> dict[str, int]:
        """Return the payload bytes since the last `clear` by the axes of the group."""
        totals: dict[str, int] = {}
        for (axes, _), (_, num_bytes) in self.counts.items():
            totals[axes] = totals.get(axes, 0) + num_bytes
        return totals


class ActionTrace(Recorder):
    """Keeps the actions of the pipeline schedule."""

    records_actions = True

    def __init__(self) -> None:
        self.events: list[ActionEvent] = []
        """Events in the order in which the actions ended. Callers clear the list between steps."""

    def action(self, event: ActionEvent) -> None:
        self.events.append(event)

    def seconds_by_kind(self) -> dict[str, float]:
        """Return the sums of the events' times, as in `PipelineTimes`."""
        seconds = {"wait": sum(event.waited_ns for event in self.events) / 1e9}
        for event in self.events:
            seconds[event.kind] = seconds.get(event.kind, 0.0) + event.busy_ns / 1e9
        return seconds
