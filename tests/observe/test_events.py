"""Tests of the records of a run and of the recorders that receive them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from optimus.io.workspace import Workspace
from optimus.observe.events import (
    NO_RECORDER,
    ActionEvent,
    ActionTrace,
    EvalRecord,
    ExpertLoad,
    LayerLoad,
    LossScaleFigures,
    PipelineTimes,
    Recorder,
    Recorders,
    StartUpRecord,
    StepComponents,
    StepRecord,
    Traffic,
    TrafficMeter,
)
from optimus.observe.log import LogRecorder, Progress
from optimus.observe.metrics import MetricsFiles, TensorBoard, read_json_lines

STEP = StepRecord(4, 2.5, 1.25, 1e-3, 4096, 0.5, 2048.0, 0.1, None, 1 << 20)
EVALUATION = EvalRecord(4, "held-out", 2.75, 512)
LOAD = ExpertLoad(4, (LayerLoad(1, 0.5, 1.5, 0), LayerLoad(3, 0.0, 2.0, 2)), ((1, 3), (0, 0, 4, 4)))
EVENT = ActionEvent("F", 1, 2, 10, 50, 15)


def test_lines_have_fixed_keys_in_a_fixed_order():
    """Programs of users read metrics.jsonl and eval.jsonl, so the keys of these files must not
    change."""
    dense = "step loss grad_norm lr tokens step_time_s tokens_per_s tflops_per_device mfu mem_bytes"
    moe = (
        "aux_loss z_loss expert_load_min expert_load_max expert_load_min_layer "
        "expert_load_max_layer experts_without_rows"
    )
    fp16 = "loss_scale skipped_steps"
    assert list(STEP.values()) == dense.split()
    record = dataclasses.replace(STEP, moe=LOAD.figures(0.1, 0.2))
    assert list(record.values()) == [*dense.split(), *moe.split()]
    record = dataclasses.replace(record, loss_scaling=LossScaleFigures(1024.0, 1))
    assert list(record.values()) == [*dense.split(), *moe.split(), *fp16.split()]
    components = StepComponents(1.0, {"dp": 0.5}, 0.25, 2.0, 0.125)
    record = dataclasses.replace(STEP, components=components)
    assert list(record.values()) == [*dense.split(), *vars(components)]
    assert components.total_s == 3.875
    assert list(EVALUATION.values()) == ["step", "source", "loss", "tokens"]


def test_figures_are_of_the_layers_with_least_and_greatest_load():
    assert vars(LOAD.figures(0.1, None)) == {
        "aux_loss": 0.1,
        "z_loss": None,
        "expert_load_min": 0.0,
        "expert_load_max": 2.0,
        "expert_load_min_layer": 3,
        "expert_load_max_layer": 3,
        "experts_without_rows": 2,
    }


def test_an_evaluation_comes_back_from_its_line():
    line = json.loads(json.dumps(EVALUATION.values()))
    assert EvalRecord.from_values(line) == EVALUATION
    for name in line:
        assert EvalRecord.from_values({**line, name: None}) is None


def test_recorders_pass_on_everything():
    class Sink(Recorder):
        records_actions = True

        def __init__(self) -> None:
            self.received: list[object] = []

        def record(self, record) -> None:
            self.received.append(record)

        def collective(self, *arguments) -> None:
            self.received.append(arguments)

        def action(self, event) -> None:
            self.received.append(event)

    sink, recorders = Sink(), Recorders(NO_RECORDER)
    assert not recorders.records_actions
    recorders.add(sink)
    assert recorders.records_actions
    recorders.record(STEP)
    recorders.collective("dp", "all_gather", 64)
    recorders.action(EVENT)
    assert sink.received == [STEP, ("dp", "all_gather", 64), EVENT]


def test_a_meter_counts_by_axes_and_operation():
    meter = TrafficMeter()
    for operation, num_bytes in (("all_gather", 64), ("all_gather", 32), ("all_reduce", 4)):
        meter.collective("dp", operation, num_bytes)
    meter.collective("ep", "all_to_all", 8)
    assert meter.counts["dp", "all_gather"] == [2, 96]
    assert meter.bytes_by_axes() == {"dp": 100, "ep": 8}
    meter.clear()
    assert meter.bytes_by_axes() == {}


def test_a_trace_keeps_actions():
    trace = ActionTrace()
    trace.action(EVENT)
    assert trace.events == [EVENT] and EVENT.busy_ns == 25
    trace.action(EVENT._replace(kind="B"))
    trace.action(EVENT)
    assert trace.seconds_by_kind() == pytest.approx({"wait": 45e-9, "F": 50e-9, "B": 25e-9})


def test_the_log_has_evaluations_phases_and_traffic_once(capsys):
    log = LogRecorder()
    start_up = StartUpRecord((("imports", 1.5), ("first update", 0.25)), 1.75, 1.0)
    for record in (STEP, start_up, EVALUATION):
        log.record(record)
    for step in (1, 2):
        log.record(Traffic(step, {"dp": 4096, "ep": 12}))
    assert capsys.readouterr().err.splitlines() == [
        "optimus: start-up 1.75 s: imports 1.50 s, first update 0.25 s; processor time 1.00 s",
        "optimus: held-out loss 2.7500 at step 4",
        "optimus: communication of rank 0 in one update: dp 4,096 bytes, ep 12 bytes",
    ]


def test_files_return_the_last_record_also_after_a_resume(tmp_path):
    (tmp_path / "log").mkdir()
    nothing: dict[str, range] = {"metrics": range(0), "eval": range(0)}
    files = MetricsFiles(tmp_path, Workspace.open(tmp_path / "checkpoints"), 0, nothing)
    assert (files.last_loss(), files.last_evaluation()) == (None, None)
    for record in (STEP, LOAD, EVALUATION):
        files.record(record)
    assert (files.last_loss(), files.last_evaluation()) == (2.5, EVALUATION)
    files.close()
    assert read_json_lines(tmp_path / "metrics.jsonl") == [STEP.values()]
    assert not (tmp_path / "expert_load.jsonl").exists()
    files = MetricsFiles(tmp_path, Workspace.open(tmp_path / "checkpoints"), 4, nothing)
    assert (files.last_loss(), files.last_evaluation()) == (2.5, EVALUATION)
    files.close()


def test_expert_loads_have_a_line_for_each_layer_at_the_interval(tmp_path):
    (tmp_path / "log").mkdir()
    workspace = Workspace.open(tmp_path / "checkpoints")
    files = MetricsFiles(tmp_path, workspace, 0, {}, load_interval=3)
    for step in range(1, 8):
        files.record(LOAD._replace(step=step))
    files.close()
    lines = read_json_lines(tmp_path / "expert_load.jsonl")
    assert [(line["step"], line["layer"]) for line in lines] == [
        (step, layer) for step in (1, 3, 6) for layer in (1, 3)
    ]
    assert lines[-1] == {"step": 6, "layer": 3, "rows": [0, 0, 4, 4]}
    # A resume removes the lines of later steps, and restores lost lines from the copy.
    (tmp_path / "expert_load.jsonl").write_text("")
    MetricsFiles(tmp_path, workspace, 3, {}, load_interval=3).close()
    kept = read_json_lines(tmp_path / "expert_load.jsonl")
    assert kept == lines[:4]


def test_progress_has_a_line_at_the_interval_and_at_the_end(capsys):
    progress = Progress(0, 5, log_interval=2)
    for step in range(1, 6):
        progress.record(dataclasses.replace(STEP, step=step, moe=LOAD.figures(0.1, 0.2)))
    progress.record(EVALUATION)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["2/5", "4/5", "5/5"]
    figures = "loss 2.5000  norm 1.250  lr 1.00e-03  2,048 tok/s  expert load 0.00-2.00"
    assert lines[-1] == f"step 5/5  {figures}"
    progress.record(dataclasses.replace(STEP, step=2, loss=None, grad_norm=None))
    assert "loss non-finite  update skipped  lr" in capsys.readouterr().err


def test_tensorboard_has_load_traffic_and_pipeline_times(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path, 0)
    for record in (
        STEP,
        EVALUATION,
        LOAD,
        Traffic(4, {"dp": 4096}),
        PipelineTimes(4, {"wait": 0.5}),
    ):
        board.record(record)
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]}
    assert scalars["train/loss"] == 2.5 and scalars["eval/loss"] == 2.75
    assert (
        scalars["expert_load/layer_3/max"] == 2.0
        and scalars["expert_load/layer_3/experts_without_rows"] == 2
    )
    assert scalars["traffic_bytes/dp"] == 4096 and scalars["pipeline_s/wait"] == 0.5
    assert "train/mfu" not in scalars
    assert {event.step for event in events.Scalars("train/loss")} == {4}
