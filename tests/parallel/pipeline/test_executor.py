"""Tests of the executor on a stage with a single scalar parameter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from optimus.distributed.groups import Channels
from optimus.observe.events import COMPUTE, NO_RECORDER, OPTIMIZER, ActionTrace, Recorder
from optimus.parallel.pipeline import executor as subject
from optimus.parallel.pipeline.executor import FEW_TOKENS, Executor
from optimus.parallel.pipeline.schedules import make_schedule
from optimus.parallel.pipeline.stage import Output, Terms
from optimus_kernels import product


class OneNumber:
    """Stage that multiplies its tokens by a scalar weight, its only parameter."""

    is_first = is_last = True

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: None, tokens: Tensor, document_ids: None) -> Output:
        loss = (self.weight * tokens).sum()
        return Output(None, loss, Terms(loss.detach(), loss, loss, []))


def run(
    stage: OneNumber | None = None,
    length: int = 3,
    document_ids: Tensor | None = None,
    recorder: Recorder = NO_RECORDER,
) -> None:
    """Run a step of two microbatches on a pipeline with a single stage. `length` is the number of
    tokens of a microbatch."""
    schedule = make_schedule("1f1b", 1, 1, 2)
    stages = {0: stage or OneNumber()}
    executor = Executor(schedule, stages, Channels(), lambda tokens: (1,), torch.float32, recorder)
    microbatch = torch.ones(1, length), document_ids
    executor.run([microbatch] * 2, lambda stage, microbatch: None, lambda: None)


def test_a_profiler_sees_each_action_by_its_name():
    trace = ActionTrace()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run(recorder=trace)
    seen = [event.name for event in profiler.events() if "microbatch" in event.name]
    assert sorted(seen) == sorted(
        f"{event.kind}(stage {event.stage}, microbatch {event.microbatch})"
        for event in trace.events
    )


def test_no_ranges_without_a_profiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(subject, "record_function", None)  # a call would raise
    trace = ActionTrace()
    run(recorder=trace)
    assert len(trace.events) == 2 * 2 + 2


def test_a_recorder_receives_each_action_with_its_times():
    trace = ActionTrace()
    run(recorder=trace)
    kinds = [(event.kind, event.microbatch) for event in trace.events]
    assert kinds[:4] == [("F", 0), ("B", 0), ("F", 1), ("B", 1)]
    assert all(0 < event.busy_ns == event.end_ns - event.start_ns for event in trace.events)
    starts = [event.start_ns for event in trace.events]
    assert starts == sorted(starts)


@pytest.mark.parametrize("records_phases", [False, True])
def test_a_recorder_receives_the_phase_of_each_action(records_phases: bool):
    class Phases(Recorder):
        def __init__(self) -> None:
            self.records_phases = records_phases
            self.seen: list[str] = []

        def begin_phase(self, phase: str) -> None:
            self.seen.append(phase)

        def end_phase(self) -> None:
            self.seen.append("end")

    recorder = Phases()
    run(recorder=recorder)
    passes = [COMPUTE, "end"] * 5  # F and B of two microbatches, and REDUCE_GRAD
    assert recorder.seen == ([*passes, OPTIMIZER, "end"] if records_phases else [])


def test_without_a_recorder_no_clock_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(subject.time, "perf_counter_ns", None)  # a call would raise
    run()


@pytest.mark.skipif(not product.onednn_is_exact(), reason="oneDNN has no fp32 products here")
@pytest.mark.parametrize("where", ["long", "short", "documents"])
def test_both_passes_take_the_faster_library(monkeypatch: pytest.MonkeyPatch, where: str):
    """For sequences of at least FEW_TOKENS tokens without document ids, oneDNN computes the fp32
    products of forward and backward. The setting `fp32_precision` is then "bf16". For other
    sequences, the setting is unchanged."""
    settings, seen = torch.backends.mkldnn.matmul, []
    before = settings.fp32_precision

    class Watched(OneNumber):
        def forward(self, *args) -> Output:
            self.weight.register_hook(lambda grad: seen.append(settings.fp32_precision))
            seen.append(settings.fp32_precision)
            return super().forward(*args)

    monkeypatch.setattr(product, "_onednn_is_better", lambda: True)
    length = FEW_TOKENS - (where == "short")
    run(Watched(), length, torch.zeros(1, length) if where == "documents" else None)
    assert set(seen) == {"bf16" if where == "long" else before} and len(seen) > 4
    assert settings.fp32_precision == before
