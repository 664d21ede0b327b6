"""Parameters and gradients that are whole only while they are needed: the same bits, the planned
fetches, the bytes of the papers."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.chunks.test_residency import fewest_fetches, trace_of
from tests.helpers.tower import (
    CHUNK,
    Case,
    Outcome,
    fetches_of_passes,
    train_towers,
    use_with_silent_triggers,
)

FP32, BF16 = torch.float32, torch.bfloat16
WHOLE = {"gradients": False, "parameters": False}


def two(ranks, *cases: Case) -> list[list[Outcome]]:
    """By case, what each of two ranks saw."""
    return list(zip(*ranks(2, train_towers, cases, start_world=False), strict=True))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("slots", "microbatches", "region"),
    [(1, 1, 0), (2, 3, 0), (0, 2, 0), (1, 2, 3), (2, 1, 3), (3, 2, 3)],
)
def test_the_bits_of_whole_states(ranks, dtype, slots, microbatches, region):
    case = Case(6, slots, microbatches, region, dtype=dtype, steps=3)
    changes = (
        WHOLE,
        {},
        {"poison": True},
        {"parameters": False},
        {"parameters": False, "poison": True},
    )
    whole, *divided = two(ranks, *(case._replace(**change) for change in changes))
    for outcome in divided:
        for one, other in zip(outcome, whole, strict=True):
            assert one.losses == other.losses and one.weights == other.weights


CASES = [
    *(Case(n, slots) for n, slots in itertools.product((1, 4), (1, 2, 4, 5))),
    *(Case(4, slots, microbatches=3) for slots in (1, 2, 4)),
    *(Case(6, slots, region=3) for slots in (1, 3, 5)),
    Case(6, 2, microbatches=2, region=2),
]


def test_fetches_and_reductions_are_the_formulas(ranks):
    for case, outcome in zip(CASES, two(ranks, *CASES), strict=True):
        n, slots, k, m = case.n, min(case.slots, case.n), case.microbatches, case.region
        fetches = 2 * k * n - (2 * k - 1) * slots
        if m and slots < m:
            fetches = 3 * n - 1
        size = 4 * CHUNK
        for one in outcome:
            assert one.traffic["all_gather"] == [fetches, fetches * size], case
            assert one.traffic["all_to_all"] == [k * n, k * n * size], case
            assert one.planned == fetches
            assert one.trace == one.plan  # visits, and the bytes that are resident in each
            assert max(held for *_, held in one.trace) <= slots * size


def test_passes_outside_of_a_step_fetch_the_fewest(ranks):
    """Each is assumed to be followed by another."""
    cases = [Case(n, slots) for n, slots in ((6, 1), (6, 3), (5, 4), (4, 4))]
    visits = [trace_of([[unit] for unit in range(case.n)] * 3) for case in cases]
    fewest = [fewest_fetches(one, case.slots) for one, case in zip(visits, cases, strict=True)]
    assert ranks(2, fetches_of_passes, cases, 3, start_world=False) == [fewest] * 2


@pytest.mark.parametrize("region", [0, 2])
def test_table_1_of_the_second_elixir_paper(ranks, region):
    """Payload bytes between GPUs, L_c = 2, S = n*C: 2 L_c S with rCache-max, at most 4 L_c S with
    rCache-min."""
    case = Case(6, 0, region=region, dtype=BF16, deterministic=False)
    largest, least = (
        sum(size for _, size in outcome[0].traffic.values())
        for outcome in two(ranks, case, case._replace(slots=1))
    )
    whole = 2 * 6 * CHUNK
    assert largest == 2 * whole
    assert least == ((3 if region else 2) * 6 - 1) * 2 * CHUNK + whole <= 4 * whole


def test_a_rank_keeps_its_shard_between_updates(ranks):
    size = 4 * 4 * CHUNK
    changes = (WHOLE, {"parameters": False}, {})
    held = ((size, size), (size, 0), (0, 0))
    outcomes = two(ranks, *(Case(4, 2)._replace(**change) for change in changes))
    for (params, grads), outcome in zip(held, outcomes, strict=True):
        for one in outcome:
            assert one.between == {"params": params, "grads": grads}
            # In backward a layer's gradient goes before the next one's comes.
            assert one.gradients == [grads or 4 * CHUNK] * 4


@pytest.mark.parametrize("region", [0, 3])
def test_a_use_of_an_evicted_chunk_shows(ranks, region):
    case, silent = Case(6, 1, region=region, poison=True), [(-1, False), (1, False), (1, True)]
    found = ranks(2, use_with_silent_triggers, case, silent, start_world=False)[0]
    assert found == [(True, True), (False, False), (True, False)]
