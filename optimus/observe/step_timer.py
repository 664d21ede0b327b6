"""Measurement of the components of an update on one rank."""

from __future__ import annotations

import time
from itertools import pairwise

import torch

from optimus.observe.events import BUBBLE, COMPUTE, OPTIMIZER, Recorder, StepComponents

_OTHER = "other"
"""Phase of an update outside all phases that the timer receives."""


class StepTimer(Recorder):
    """Recorder that measures the components of updates on this rank.

    If a phase contains another phase, the time of the inner phase is not counted for the outer
    phase. On a CPU, the timer reads the clock of the host at the start and at the end of each
    phase. On an accelerator, the timer records events in the current stream at these moments. It
    reads the times of the events after the update, so that the host never waits for the device.
    These times include waits of the stream for a collective or for the host.

    Args:
        device: The device of the rank.

    Raises:
        RuntimeError: The device is an accelerator without timed events.
    """

    records_phases = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phases: list[str] = []
        """The phases that contain the current moment, the innermost last; empty between updates."""
        self._changes: list[str] = []
        """The innermost phase after each change of the innermost phase."""
        self._times_ns: list[int] = []
        """On a CPU, the time of each change, from `time.perf_counter_ns`."""
        self._events: list[torch.Event] = []
        """On an accelerator, the event of each change. Later updates record the same events."""
        if device.type != "cpu":
            self.start(0)
            torch.accelerator.synchronize(device)
            self.stop(0)

    def start(self, now_ns: int) -> None:
        """Begin an update. `now_ns` is the start of the update, from `time.perf_counter_ns`."""
        self._phases = [_OTHER]
        self._changes.clear()
        self._times_ns.clear()
        self._change(now_ns)

    def begin_phase(self, phase: str) -> None:
        if self._phases:
            self._phases.append(phase)
            self._change(time.perf_counter_ns())

    def end_phase(self) -> None:
        if self._phases:
            self._phases.pop()
            self._change(time.perf_counter_ns())

    def stop(self, now_ns: int) -> StepComponents:
        """End the update, and return the components of its time. On an accelerator, call this
        method after the device has completed the update. `now_ns` is the end of the update, from
        `time.perf_counter_ns`."""
        self._change(now_ns)
        self._phases = []
        if self._device.type == "cpu":
            intervals_s = [(end - start) / 1e9 for start, end in pairwise(self._times_ns)]
        else:
            events = self._events[: len(self._changes)]
            events[-1].synchronize()  # the device is idle, so that this event is complete at once
            intervals_s = [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]
        seconds: dict[str, float] = {}
        for phase, interval_s in zip(self._changes, intervals_s, strict=False):
            seconds[phase] = seconds.get(phase, 0.0) + interval_s
        compute_s, bubble_s, optimizer_s, other_s = (
            seconds.pop(phase, 0.0) for phase in (COMPUTE, BUBBLE, OPTIMIZER, _OTHER)
        )
        return StepComponents(compute_s, seconds, bubble_s, optimizer_s, other_s)

    def _change(self, now_ns: int) -> None:
        """Store the innermost phase and the current time."""
        number = len(self._changes)
        self._changes.append(self._phases[-1])
        if self._device.type == "cpu":
            self._times_ns.append(now_ns)
            return
        if number == len(self._events):
            self._events.append(torch.Event(self._device, enable_timing=True))
        self._events[number].record()
