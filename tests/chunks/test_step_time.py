"""Tests of predicted times of training steps with offloaded chunks."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from optimus.bench.offload import draw_mixes
from optimus.chunks.residency import Pass, plan_residency, use_order
from optimus.chunks.step_time import StepWork, predict_step
from optimus.config.machine import Links

F, B = Pass(0, False), Pass(0, True)


def work_of(n: int, slots: int, microbatches: int = 1) -> StepWork:
    """Return the StepWork of n segments with one chunk each. A forward takes 1 s, a backward takes
    2 s. A chunk has 4 elements, 8 bytes of parameters and 16 bytes of gradients."""
    needs = [frozenset({segment}) for segment in range(n)]
    plan = plan_residency(use_order([F, B] * microbatches, [0] * n, needs, [True] * n), slots)
    return StepWork(plan, needs, [1.0] * n, [2.0] * n, [8] * n, [16] * n, [4] * n)


INSTANT = dict.fromkeys(("to_device", "to_host", "host_adam", "disk_read", "disk_write"), 1e30)


@pytest.mark.parametrize(
    ("rates", "slots", "expected"),
    [
        ({}, 3, 9.0),
        # The updates of all 3 chunks, and the copies of all 3 chunks, run one after the other
        # before the forward of the last segment.
        ({"host_adam": 1.0}, 3, 3 * 4 + 1 + 6),
        ({"to_device": 2.0}, 3, 3 * 4 + 1 + 6),
        ({"to_device": 2.0, "host_adam": 1.0}, 3, 4 + 3 * 4 + 1 + 6),
        # The copy of the gradients of a segment begins after its backward of 2 s.
        ({"to_host": 4.0}, 3, 3 + 2 + 3 * 4),
        ({"to_host": 16.0}, 3, 9 + 1),
        # With one slot, each use waits for its copy, except the first backward, whose chunk is in
        # the cache.
        ({"to_device": 8.0}, 1, 9 + 5),
        # With two slots, forward waits only for the first copy, and backward waits for no copy.
        ({"to_device": 8.0}, 2, 9 + 1),
    ],
)
def test_prediction_of_three_segments_is_the_time_computed_by_hand(rates, slots, expected):
    predicted = predict_step(work_of(3, slots), Links(**(INSTANT | rates)))
    assert predicted.step == pytest.approx(expected)
    assert predicted.shortest <= predicted.step + 1e-9


def test_the_host_updates_while_the_device_ends_its_step():
    work = replace(work_of(3, 3), end_s=10.0)
    assert predict_step(work, Links(**INSTANT)).step == pytest.approx(9 + 10)
    predicted = predict_step(work, Links(**(INSTANT | {"host_adam": 1.0})))  # 12 s for 3 chunks
    assert predicted.step == pytest.approx(12 + 1 + 6) and predicted.others == 10
    gathers = replace(work, gather_s=[1.0, 2.0, 3.0])
    predicted = predict_step(gathers, Links(**INSTANT))
    assert predicted.step == pytest.approx(9 + 6 + 10) and predicted.others == 16


@pytest.mark.parametrize(
    ("adam_s", "early_chunks", "clips", "expected"),
    [
        (4, 0, False, 3 * 4 + 1 + 6),
        # Backward takes 6 s and completes the gradients of chunk 2 after 2 s. The update of chunk 2
        # ends when backward ends.
        (4, 1, False, 2 * 4 + 2 + 6),
        (4, 3, False, 2 * 4 + 2 + 6),
        (4, 3, True, 3 * 4 + 1 + 6),
        # The update of chunk 1 begins 1 s before the end of backward, and delays the update of
        # chunk 0.
        (3, 3, False, 2 + 3 + 3 + 6),
        (3, 3, True, 2 + 3 * 3 + 1 + 6),
        (3, 1, False, 2 * 3 + 2 + 6),
        (3, 1, True, 3 * 3 + 1 + 6),
    ],
)
def test_prediction_of_early_updates_is_the_time_computed_by_hand(
    adam_s, early_chunks, clips, expected
):
    """The update of a chunk takes `adam_s` seconds. The last `early_chunks` of 3 chunks have spare
    buffers."""
    work = replace(work_of(3, 3), early=frozenset(range(3 - early_chunks, 3)), clips=clips)
    predicted = predict_step(work, Links(**(INSTANT | {"host_adam": 4 / adam_s})))
    assert predicted.step == pytest.approx(expected)
    assert predicted.shortest <= predicted.step + 1e-9


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({}, 9.0),
        # All chunks are read one after the other before the forward of the last segment.
        ({"disk_read": 12.0}, 3 * 4 + 1 + 6),
        # Writes after the updates overlap with the computation. The writes lengthen the step only
        # if all writes together take longer than the computation.
        ({"disk_write": 24.0}, 9.0),
        ({"disk_write": 6.0}, 3 * 8),
        ({"disk_read": 12.0, "disk_write": 12.0}, 3 * 4 + 1 + 6),
        ({"disk_read": 24.0, "disk_write": 6.0}, 2 + 3 * 8),
        ({"disk_read": 48.0, "host_adam": 1.0}, 1 + 3 * 4 + 1 + 6),
    ],
)
def test_prediction_with_states_on_disk_is_the_time_computed_by_hand(rates, expected):
    """The states of a chunk have 48 bytes."""
    work = replace(work_of(3, 3), disk_bytes=[48] * 3)
    predicted = predict_step(work, Links(**(INSTANT | rates)))
    assert predicted.step == pytest.approx(expected)
    assert predicted.shortest <= predicted.step + 1e-9


def test_reads_wait_for_a_free_buffer():
    """With 4 buffers, the read of the sixth chunk begins when the write of the second chunk ends,
    at 7 s. The forward of the last segment begins at 8 s."""
    work = replace(work_of(6, 6), disk_bytes=[48] * 6)
    predicted = predict_step(work, Links(**(INSTANT | {"disk_read": 48.0, "disk_write": 16.0})))
    assert predicted.step == pytest.approx(8 + 1 + 6 * 2)
    assert predicted.disk_read == 6 and predicted.disk_write == 18


def test_times_of_the_resources_equal_the_formulas():
    """A step with k microbatches, n segments and B cache slots copies 2kn - (2k-1)B chunks to the
    device, and the gradients of kn chunks to the host."""
    n, slots, k = 5, 3, 2
    predicted = predict_step(work_of(n, slots, k), Links(to_device=8, to_host=16, host_adam=4))
    assert predicted.to_device == 2 * k * n - (2 * k - 1) * slots
    assert predicted.to_host == k * n and predicted.host_adam == n
    assert predicted.compute == k * n * 3 and predicted.limit == k * n * 3


@pytest.mark.parametrize(
    "changes", [{}, {"early": True}, {"early": True, "clips": True}], ids=["late", "early", "clip"]
)
def test_no_random_mix_is_faster_than_possible_and_most_are_as_fast(changes):
    ratios = []
    for mix in draw_mixes(100, seed=3):
        mix = mix._replace(**changes)
        predicted = predict_step(mix.work, mix.links)
        ratios.append(predicted.step / predicted.shortest)
    assert min(ratios) > 1 - 1e-9
    assert sum(ratio < 1.1 for ratio in ratios) >= 90


def test_early_updates_save_time_where_updates_are_slow():
    """If updates take longer than forward passes, early updates make a step shorter. If the norm is
    clipped, early updates can make a step longer, but by at most the time of one update."""
    saved = []
    for mix in draw_mixes(200, seed=5):
        late = predict_step(mix.work, mix.links)
        early, clipped = (mix._replace(early=True, clips=clips) for clips in (False, True))
        assert predict_step(clipped.work, mix.links).step <= late.step + mix.adam_s + 1e-9
        if late.host_adam > late.compute / 3:
            saved.append(1 - predict_step(early.work, mix.links).step / late.step)
    assert len(saved) > 40 and statistics.median(saved) > 0.05
