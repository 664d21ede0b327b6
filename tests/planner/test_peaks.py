"""Tests of the peak memory of a schedule. The fast computation by matrix products gives the same
peaks as adding up the bytes action by action."""

from __future__ import annotations

import random

import pytest

from optimus.parallel.pipeline.schedules import make_schedule
from optimus.planner.memory import bytes_of_stage, peak_of_step
from optimus.planner.peaks import peaks_of
from optimus.rank.profile import StageProfile, UseProfile


def stage_profile(numbers: random.Random, divides: bool) -> StageProfile:
    kept = numbers.randrange(1, 1000)
    deferred = numbers.randrange(kept) if divides else 0
    forward = kept + numbers.randrange(1000)
    return StageProfile(
        (UseProfile(0, False, kept, forward, 0, 0),),
        (UseProfile(0, True, deferred - kept, numbers.randrange(1000), 0, 0),),
        UseProfile(0, True, -deferred, numbers.randrange(1000), 0, 0) if divides else None,
    )


@pytest.mark.parametrize(
    ("name", "virtual_stages"),
    [("1f1b", 1), ("zb-h1", 1), ("gpipe", 1), ("gpipe", 2), ("interleaved", 2), ("interleaved", 3)],
)
def test_peaks_equal_those_of_the_actions(name: str, virtual_stages: int) -> None:
    numbers = random.Random(virtual_stages)
    for num_ranks in (1, 2, 3, 5) if virtual_stages == 1 else (2, 3):
        for microbatches in (1, 2, 3, 5, 8, 12, 13, 30, 45):
            schedule = make_schedule(name, num_ranks, virtual_stages, microbatches)
            stages = range(schedule.num_stages)
            profiles = [stage_profile(numbers, name == "zb-h1") for _ in stages]
            boundary = numbers.choice([0, 10, 1000])
            of_schedule = name, num_ranks, virtual_stages, microbatches
            for rank in range(num_ranks):
                of_rank = [*schedule.stages_of(rank)]
                expected = peak_of_step(schedule, rank, {s: profiles[s] for s in of_rank}, boundary)
                peaks = peaks_of(*of_schedule, (rank,))
                stage_bytes = [bytes_of_stage(profiles[s]) for s in of_rank]
                assert peaks.bytes(stage_bytes, boundary) == expected.total
            # Ranks with equal stages are planned with the largest peak of these ranks.
            of_each = [
                peaks_of(*of_schedule, (rank,)).bytes(stage_bytes, boundary)
                for rank in range(num_ranks)
            ]
            together = peaks_of(*of_schedule, tuple(range(num_ranks)))
            assert together.bytes(stage_bytes, boundary) == max(of_each)
