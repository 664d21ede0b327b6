"""Records of a training run, and `Recorder`, the base class of objects that receive the records.

The training loop, the pipeline executor and the collectives pass records to a `Recorder`. The
subclasses of `Recorder`, called sinks, write metrics files, TensorBoard events, progress and the
log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

Value = int | float | str | dict[str, float] | None
"""Type of a value in the JSON object of a line of metrics.jsonl or eval.jsonl."""

COMPUTE, BUBBLE, OPTIMIZER = "compute", "bubble", "optimizer"
"""Phases of an update that `Recorder.begin_phase` receives. All other phases have the names of mesh
axes, such as `dp x ep`. In such a phase, the rank executes a collective over these axes or waits
for the collective."""


@dataclass(frozen=True)
class MoeFigures:
    """Router losses of one update, and the smallest and largest load of an expert.

    The load of an expert is the number of tokens routed to it, divided by the mean number of tokens
    over all experts of the layer.
    """

    aux_loss: float | None
    """Load-balancing loss, averaged over the microbatches; None if the loss is not finite, which is
    possible in a skipped update."""
    z_loss: float | None
    expert_load_min: float
    """Smallest load among all experts of all MoE layers."""
    expert_load_max: float
    expert_load_min_layer: int
    """Index of the layer with the smallest load, counted over all layers of the model."""
    expert_load_max_layer: int
    experts_without_rows: int


@dataclass(frozen=True)
class LossScaleFigures:
    """Loss scale of one update (fp16), and number of skipped updates of the run."""

    loss_scale: float
    skipped_steps: int
    """Total number of skipped updates of the run, up to this update."""


@dataclass(frozen=True)
class StepComponents:
    """Seconds of one update on the first rank, by component, as in the result of
    `optimus.planner.step_plan.plan_step`. The sum of all values is the time of the update."""

    compute_s: float
    """Forward passes, backward passes, and the computation of gradient reductions on this rank."""
    exposed_s: dict[str, float]
    """Maps the mesh axes of a process group to the time in which this rank executes the collectives
    of the group or waits for them."""
    bubble_s: float
    """Waiting for messages of other pipeline stages. The value includes the time of the transfers.
    A plan, in contrast, counts these transfers as exposed communication of pp."""
    optimizer_s: float
    """Clipping of the gradients and update of the states, without collectives."""
    other_s: float
    """Rest of the update, such as reading the data. A plan does not contain this component."""

    @property
    def total_s(self) -> float:
        exposed_s = sum(self.exposed_s.values())
        return self.compute_s + exposed_s + self.bubble_s + self.optimizer_s + self.other_s


@dataclass(frozen=True)
class StepRecord:
    """Metrics of one update, computed over all ranks unless a field states otherwise.

    The fields have the same order as the keys in metrics.jsonl.
    """

    step: int
    loss: float | None
    """Mean cross-entropy of the global batch in nats; None if the mean is not finite, which is
    possible in a skipped update."""
    grad_norm: float | None
    """Gradient norm before clipping; None if the update was skipped."""
    lr: float
    tokens: int
    """Total number of training tokens of the run, up to and including this update."""
    step_time_s: float
    tokens_per_s: float
    tflops_per_device: float
    mfu: float | None
    """Model FLOP/s divided by the peak FLOP/s of the device; None if the quotient is above 1."""
    mem_bytes: int
    """Peak memory of the first rank in bytes: the memory of its tensors on an accelerator, or the
    memory of its process on a CPU."""
    moe: MoeFigures | None = None
    """Router losses and expert loads; None for a dense model."""
    loss_scaling: LossScaleFigures | None = None
    """State of dynamic loss scaling; None unless the setting `train.dtype` is fp16."""
    components: StepComponents | None = None
    """Components of `step_time_s`; None unless the setting `observe.step_components` is True."""

    def values(self) -> dict[str, Value]:
        """Return the keys and values of this record for its line in metrics.jsonl, in order."""
        values: dict[str, Value] = {}
        for name, value in vars(self).items():
            if isinstance(value, MoeFigures | LossScaleFigures | StepComponents):
                values |= vars(value)
            elif name not in ("moe", "loss_scaling", "components"):
                values[name] = value
        return values


@dataclass(frozen=True)
class EvalRecord:
    """Result of one evaluation on one data set."""

    step: int
    source: str
    """Name of the evaluated data set, such as `held-out`."""
    loss: float
    """Mean cross-entropy over the evaluated tokens, in nats."""
    tokens: int

    def values(self) -> dict[str, Value]:
        """Return the keys and values of this record for its line in eval.jsonl, in order."""
        return dict(vars(self))

    @classmethod
    def from_values(cls, values: Mapping[str, object]) -> EvalRecord | None:
        """Return the record for `values`, the parsed JSON object of a line of eval.jsonl; None if a
        field is missing or has a wrong type."""
        kinds = {"step": int, "source": str, "loss": float, "tokens": int}
        if any(type(values.get(name)) is not kind for name, kind in kinds.items()):
            return None
        return cls(**{name: values[name] for name in kinds})  # type: ignore[arg-type]  # checked above


class LayerLoad(NamedTuple):
    """Smallest and largest expert load of one MoE layer in one update.

    The load of an expert is the number of tokens routed to it, divided by the mean number of tokens
    over all experts of the layer.
    """

    layer: int
    """Index of the layer in the model."""
    min: float
    max: float
    experts_without_rows: int


class ExpertLoad(NamedTuple):
    """Smallest and largest expert load of each MoE layer in one update, over all ranks."""

    step: int
    layers: tuple[LayerLoad, ...]
    rows: tuple[tuple[int, ...], ...] = ()
    """Number of tokens that were routed to each expert of each MoE layer."""

    def lines(self) -> Iterator[dict[str, object]]:
        """Yield the keys and values of the lines in expert_load.jsonl, one for each MoE layer."""
        for layer, rows in zip(self.layers, self.rows, strict=True):
            yield {"step": self.step, "layer": layer.layer, "rows": rows}

    def figures(self, aux_loss: float | None, z_loss: float | None) -> MoeFigures:
        """Return a `MoeFigures` with the smallest and largest load of all layers, and the given
        router losses."""
        lowest = min(self.layers, key=lambda load: load.min)
        highest = max(self.layers, key=lambda load: load.max)
        idle = sum(load.experts_without_rows for load in self.layers)
        return MoeFigures(
            aux_loss, z_loss, lowest.min, highest.max, lowest.layer, highest.layer, idle
        )


class Traffic(NamedTuple):
    """Payload bytes of one rank's collectives and point-to-point messages in one update."""

    step: int
    bytes_by_axes: dict[str, int]
    """Payload bytes of each process group. A key names the group's mesh axes, such as `dp x ep`."""


class PipelineTimes(NamedTuple):
    """Time of one rank in the actions of the pipeline schedule in one update.

    An action is, for example, the forward pass of one microbatch. On a GPU, the time of an action
    includes only the kernel launches.
    """

    step: int
    seconds_by_kind: dict[str, float]
    """Seconds for each kind of action, except the time for which actions wait for other stages. The
    value of the key `wait` is the sum of these waiting times."""


class StartUpRecord(NamedTuple):
    """Durations of one rank's start-up phases, from the start of the command to the end of the
    first update."""

    phases_s: tuple[tuple[str, float], ...]
    """(name, duration in seconds) of each start-up phase, in chronological order."""
    total_s: float
    processor_s: float
    """CPU time of the rank's process in seconds, without child processes."""


class ActionEvent(NamedTuple):
    """One executed action of a pipeline schedule, such as the forward pass of one microbatch. Times
    are from `time.perf_counter_ns`."""

    kind: str
    """Kind of action, such as `F` for forward (see optimus.parallel.pipeline.actions)."""
    stage: int
    microbatch: int
    start_ns: int
    end_ns: int
    waited_ns: int
    """Time for which the action waited for data from another stage, in nanoseconds."""

    @property
    def busy_ns(self) -> int:
        return self.end_ns - self.start_ns - self.waited_ns


Record = StepRecord | EvalRecord | ExpertLoad | Traffic | PipelineTimes | StartUpRecord
"""The types of records that `Recorder.record` receives."""


class Recorder:
    """Base class of sinks. A sink receives records and writes, for example, metrics or the log.

    The base class ignores all records. A sink overrides the methods for the records that it uses.
    """

    records_actions = False
    """True if the pipeline executor must time its actions and pass them to the method `action`."""
    records_phases = False
    """True if the pipeline executor and the collectives must call the methods `begin_phase` and
    `end_phase`."""

    def record(self, record: Record) -> None:
        """Receive a record of the run, such as the metrics of an update."""

    def collective(self, axes: str, operation: str, num_bytes: int) -> None:
        """Receive the description of a collective of tensors, or of a message that this rank sends.

        Args:
            axes: Mesh axes of the process group, such as `dp x ep`.
            operation: Name of the operation, such as `all_gather`.
            num_bytes: Payload in bytes: the size of the tensor. For all-gather and reduce-scatter,
                the size of the unsharded tensor. For all-to-all, the size of all rows that this
                rank sends.
        """

    def action(self, event: ActionEvent) -> None:
        """Receive an executed action of the pipeline schedule. Called only if `records_actions` is
        True."""

    def begin_phase(self, phase: str) -> None:
        """Receive the start of a phase. `phase` is `COMPUTE`, `BUBBLE`, `OPTIMIZER` or the mesh
        axes of a process group. A phase can contain other phases."""

    def end_phase(self) -> None:
        """Receive the end of the innermost phase."""


NO_RECORDER = Recorder()
"""Recorder that ignores all records, for ranks that do not write metrics or a log."""


class Recorders(Recorder):
    """Recorder that passes all records to several other recorders. `add` adds a recorder, also
    during the run."""

    def __init__(self, *recorders: Recorder) -> None:
        self._recorders: list[Recorder] = []
        self._of_phases: list[Recorder] = []
        for recorder in recorders:
            self.add(recorder)

    def add(self, recorder: Recorder) -> None:
        self._recorders.append(recorder)
        self.records_actions = self.records_actions or recorder.records_actions
        if recorder.records_phases:
            self.records_phases = True
            self._of_phases.append(recorder)

    def record(self, record: Record) -> None:
        for recorder in self._recorders:
            recorder.record(record)

    def collective(self, axes: str, operation: str, num_bytes: int) -> None:
        for recorder in self._recorders:
            recorder.collective(axes, operation, num_bytes)

    def action(self, event: ActionEvent) -> None:
        for recorder in self._recorders:
            recorder.action(event)

    def begin_phase(self, phase: str) -> None:
        for recorder in self._of_phases:
            recorder.begin_phase(phase)

    def end_phase(self) -> None:
        for recorder in self._of_phases:
            recorder.end_phase()


class TrafficMeter(Recorder):
    """Recorder that counts collectives, point-to-point messages and their payload bytes."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], list[int]] = {}
        """Maps (axes, operation) to [number of calls, payload bytes] since the last `clear`."""

    def collective(self, axes: str, operation: str, num_bytes: int) -> None:
        count = self.counts.setdefault((axes, operation), [0, 0])
        count[0] += 1
        count[1] += num_bytes

    def clear(self) -> None:
        self.counts.clear()

    def bytes_by_axes(self) -> dict[str, int]:
        """Return the payload bytes of each process group since the last `clear`.

        The keys of the dict are names of the groups' mesh axes, such as `dp x ep`.
        """
        totals: dict[str, int] = {}
        for (axes, _), (_, num_bytes) in self.counts.items():
            totals[axes] = totals.get(axes, 0) + num_bytes
        return totals


class ActionTrace(Recorder):
    """Recorder that collects the executed actions of the pipeline schedule in a list."""

    records_actions = True

    def __init__(self) -> None:
        self.events: list[ActionEvent] = []
        """Events in the order in which the actions ended. Users of this recorder clear the list
        between steps."""

    def action(self, event: ActionEvent) -> None:
        self.events.append(event)

    def seconds_by_kind(self) -> dict[str, float]:
        """Return the total seconds of the collected events for each kind of action. The value of
        the key `wait` is the total time for which actions waited for other stages."""
        seconds = {"wait": sum(event.waited_ns for event in self.events) / 1e9}
        for event in self.events:
            seconds[event.kind] = seconds.get(event.kind, 0.0) + event.busy_ns / 1e9
        return seconds
