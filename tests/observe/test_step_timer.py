"""Tests of the timer of the components of an update."""

from __future__ import annotations

import itertools

import pytest
import torch

from optimus.observe import step_timer as subject
from optimus.observe.events import BUBBLE, COMPUTE, OPTIMIZER, Recorders, StepComponents
from optimus.observe.step_timer import StepTimer


class FakeEvent:
    """Fake of `torch.Event` on an accelerator, with a clock that advances by 1 ms whenever an event
    is recorded."""

    clock = itertools.count()
    made = 0

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert device.type == "cuda" and enable_timing
        FakeEvent.made += 1

    def record(self) -> None:
        self.time_ms = next(self.clock)

    def synchronize(self) -> None:
        assert hasattr(self, "time_ms")

    def elapsed_time(self, end: FakeEvent) -> float:
        return float(end.time_ms - self.time_ms)


def run_update(timer: StepTimer) -> StepComponents:
    """Run an update, and return its measured components. The phase changes ten times, so the update
    has eleven intervals."""
    recorder = Recorders()
    recorder.add(timer)
    assert recorder.records_phases
    recorder.begin_phase("dp")  # ignored: the update has not started
    recorder.end_phase()
    timer.start(0)
    recorder.begin_phase(COMPUTE)
    recorder.begin_phase(BUBBLE)
    recorder.end_phase()
    recorder.begin_phase("ep")
    recorder.end_phase()
    recorder.end_phase()
    recorder.begin_phase(OPTIMIZER)
    recorder.begin_phase("dp x ep")
    recorder.end_phase()
    recorder.end_phase()
    return timer.stop(11_000_000)


WANTED = StepComponents(0.003, {"ep": 0.001, "dp x ep": 0.001}, 0.001, 0.002, 0.003)


def test_each_moment_of_an_update_belongs_to_the_innermost_phase(monkeypatch):
    timer = StepTimer(torch.device("cpu"))
    for _ in range(2):
        clock = iter(range(1_000_000, 11_000_000, 1_000_000))
        monkeypatch.setattr(subject.time, "perf_counter_ns", lambda clock=clock: next(clock))
        assert run_update(timer) == WANTED
        assert next(clock, None) is None  # outside an update, no clock is read


def test_on_an_accelerator_events_are_read_after_the_update(monkeypatch):
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    timer = StepTimer(torch.device("cuda"))
    for _ in range(2):
        assert run_update(timer) == WANTED
    assert FakeEvent.made == 12  # later updates record the same events


def test_an_accelerator_without_timed_events_is_refused(monkeypatch):
    def refuse(device: torch.device, *, enable_timing: bool) -> None:
        raise RuntimeError("the device has no timed events")

    monkeypatch.setattr(torch, "Event", refuse)
    with pytest.raises(RuntimeError, match="no timed events"):
        StepTimer(torch.device("cuda"))
