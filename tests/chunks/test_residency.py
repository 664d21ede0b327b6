"""The plan of what is resident: Belady's fetches, the closed formulas, early fetches."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from optimus.chunks.residency import (
    Pass,
    ResidencyPlan,
    Visit,
    fewest_slots,
    plan_residency,
    visit_order,
)
from tests.helpers.tower import fetched

F, B = Pass(0, False), Pass(0, True)


def tower(n: int) -> list[frozenset[int]]:
    """Units that need a chunk each."""
    return [frozenset({unit}) for unit in range(n)]


def fetches(n: int, slots: int, passes: Sequence[Pass], regions=()) -> int:
    visits = visit_order(passes, [0] * n, tower(n), [True] * n, regions)
    return len(fetched(plan_residency(visits, slots)))


def trace_of(needs: Sequence[Sequence[int]]) -> list[Visit]:
    return [Visit(place, False, frozenset(need)) for place, need in enumerate(needs)]


def fewest_fetches(visits: Sequence[Visit], slots: int) -> int:
    """Over every way to keep chunks: what is resident behind a visit, and its least cost."""
    reached = {frozenset(): 0}
    for visit in visits:
        following: dict[frozenset[int], int] = {}
        for resident, cost in reached.items():
            cost += len(visit.need - resident)
            rest = resident - visit.need
            for count in range(min(len(rest), slots - len(visit.need)) + 1):
                for kept in itertools.combinations(sorted(rest), count):
                    state = visit.need | set(kept)
                    following[state] = min(cost, following.get(state, cost))
        reached = following
    return min(reached.values())


def replay(plan: ResidencyPlan) -> None:
    """Hold a plan against its rules: needed chunks are there, slots suffice, nothing goes while it
    is used or on its way, nothing is fetched twice or freed that is not there."""
    resident: set[int] = set()
    on_the_way: set[int] = set()
    for step in plan.steps:
        assert not set(step.evict) & on_the_way
        for chunk in step.evict:
            resident.remove(chunk)
        assert not resident & set(step.gather)
        resident |= set(step.gather)
        assert len(resident) <= plan.slots and step.visit.need <= resident
        on_the_way -= step.visit.need
        assert not set(step.evict_early) & (step.visit.need | on_the_way)
        for chunk in step.evict_early:
            resident.remove(chunk)
        assert not resident & set(step.prefetch)
        resident |= set(step.prefetch)
        on_the_way |= set(step.prefetch)
        assert len(resident) <= plan.slots and resident == step.resident
        assert step.visit.need <= resident
    assert not on_the_way


def random_trace(draw: random.Random, chunks: int, length: int) -> list[Visit]:
    return trace_of(
        [draw.sample(range(chunks), draw.randint(0, min(3, chunks))) for _ in range(length)]
    )


@pytest.mark.parametrize("seed", range(60))
def test_no_replacement_fetches_less(seed):
    draw = random.Random(seed)
    visits = random_trace(draw, draw.randint(1, 6), draw.randint(1, 14))
    least = max(1, fewest_slots(visit.need for visit in visits))
    for slots in range(least, 7):
        plan = plan_residency(visits, slots)
        assert len(fetched(plan)) == fewest_fetches(visits, slots)
        assert [step.visit for step in plan.steps] == visits
        replay(plan)


def test_microbatches_in_turn():
    for k, n in itertools.product(range(1, 6), range(1, 9)):
        for slots in range(1, n + 1):
            assert fetches(n, slots, [F, B] * k) == 2 * k * n - (2 * k - 1) * slots


def test_recomputed_regions():
    for m, count in itertools.product(range(2, 5), range(1, 5)):
        n = m * count
        regions = [range(first, first + m) for first in range(0, n, m)]
        assert fetches(n, 1, [F, B], regions) == 3 * n - 1
        # Without a visit before the last unit of a region, which recomputation ends with anyway.
        visits = visit_order([F, B], [0] * n, tower(n), [True] * n, regions)
        last = {region[-1] for region in regions}
        fewer = [visit for visit in visits if not (visit.backward and visit.unit in last)]
        assert len(fetched(plan_residency(fewer, 1))) == 3 * n - n // m
        for slots in range(m, n + 1):
            assert fetches(n, slots, [F, B], regions) == 2 * n - slots


def test_fetches_travel_beside_computation():
    """With two slots every fetch but the first and that at the turn's end is begun a visit ahead,
    with one slot none."""
    n = 8
    visits = visit_order([F, B], [0] * n, tower(n), [True] * n)
    for slots, waited_for in ((1, 2 * n - 1), (2, 1), (n, 1)):
        plan = plan_residency(visits, slots)
        assert sum(len(step.gather) for step in plan.steps) == waited_for, slots
        assert len({*fetched(plan)}) == n


def test_what_is_not_needed_again_goes():
    plan = plan_residency(visit_order([F, B], [0] * 4, tower(4), [True] * 4), 4)
    backward = [step.resident for step in plan.steps[4:]]
    assert backward == [set(range(unit + 1)) for unit in (3, 2, 1, 0)]
    assert max(len(step.resident) for step in plan.steps) == 4


def test_visits_follow_stages_and_skip_the_frozen_start():
    passes = [Pass(0, False), Pass(1, False), Pass(1, True), Pass(0, True)]
    visits = visit_order(passes, [0, 0, 1, 1], tower(4), [False, True, True, True])
    assert [(visit.unit, visit.backward) for visit in visits] == [
        *((unit, False) for unit in (0, 1, 2, 3)),
        *((unit, True) for unit in (3, 2, 1)),
    ]
