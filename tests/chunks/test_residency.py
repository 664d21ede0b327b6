"""Tests of the plan of the chunk cache: no other plan has fewer gathers, the number of gathers
equals the formulas, and gathers begin before their chunks are used."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from optimus.chunks.residency import (
    Pass,
    ResidencyPlan,
    Use,
    farthest,
    fewest_slots,
    likely_uses,
    plan_residency,
    use_order,
)
from tests.kit.layouts.tower import planned_gathers

F, B = Pass(0, False), Pass(0, True)


def tower_needs(n: int) -> list[frozenset[int]]:
    """Return the set of chunks that each of n segments needs. Segment i needs only chunk i."""
    return [frozenset({segment}) for segment in range(n)]


def num_gathers(n: int, slots: int, passes: Sequence[Pass], regions=()) -> int:
    uses = use_order(passes, [0] * n, tower_needs(n), [True] * n, regions)
    return len(planned_gathers(plan_residency(uses, slots)))


def forward_uses(needs: Sequence[Sequence[int]]) -> list[Use]:
    return [Use(segment, False, frozenset(need)) for segment, need in enumerate(needs)]


def fewest_gathers(uses: Sequence[Use], slots: int) -> int:
    """Return the smallest number of gathers that any sequence of evictions allows, for a cache of
    `slots` chunks.

    After each use, `reached` maps each possible content of the cache to the least number of gathers
    up to this use.
    """
    reached = {frozenset(): 0}
    for use in uses:
        following: dict[frozenset[int], int] = {}
        for resident, cost in reached.items():
            cost += len(use.need - resident)
            rest = resident - use.need
            for count in range(min(len(rest), slots - len(use.need)) + 1):
                for kept in itertools.combinations(sorted(rest), count):
                    state = use.need | set(kept)
                    following[state] = min(cost, following.get(state, cost))
        reached = following
    return min(reached.values())


def check_plan(plan: ResidencyPlan) -> None:
    """Check that each use has its chunks, that the slots suffice, that no chunk is freed while it
    is used or gathered, and that no chunk is gathered twice or freed twice."""
    resident: set[int] = set()
    in_flight: set[int] = set()
    for step in plan.steps:
        assert not set(step.evict) & in_flight
        for chunk in step.evict:
            resident.remove(chunk)
        assert not resident & set(step.gather)
        resident |= set(step.gather)
        assert len(resident) <= plan.slots and step.use.need <= resident
        in_flight -= step.use.need
        assert not set(step.evict_early) & (step.use.need | in_flight)
        for chunk in step.evict_early:
            resident.remove(chunk)
        assert not resident & set(step.prefetch)
        resident |= set(step.prefetch)
        in_flight |= set(step.prefetch)
        assert len(resident) <= plan.slots and resident == step.resident
        assert step.use.need <= resident
    assert not in_flight


def random_uses(draw: random.Random, chunks: int, length: int) -> list[Use]:
    return forward_uses(
        [draw.sample(range(chunks), draw.randint(0, min(3, chunks))) for _ in range(length)]
    )


@pytest.mark.parametrize("seed", range(60))
def test_plan_of_random_uses_has_the_fewest_gathers(seed):
    """Plan random uses for several sizes of the cache. No sequence of evictions needs fewer
    gathers, and the plan has all uses and is valid."""
    draw = random.Random(seed)
    uses = random_uses(draw, draw.randint(1, 6), draw.randint(1, 14))
    least = max(1, fewest_slots(use.need for use in uses))
    for slots in range(least, 7):
        plan = plan_residency(uses, slots)
        assert len(planned_gathers(plan)) == fewest_gathers(uses, slots)
        assert [step.use for step in plan.steps] == uses
        check_plan(plan)


def test_gathers_of_microbatches_in_turn_equal_the_formula():
    """Plan k microbatches on n segments. The backward of a microbatch comes before the forward of
    the next microbatch. The number of gathers equals the formula for all sizes of the cache."""
    for k, n in itertools.product(range(1, 6), range(1, 9)):
        for slots in range(1, n + 1):
            assert num_gathers(n, slots, [F, B] * k) == 2 * k * n - (2 * k - 1) * slots


def test_gathers_of_recomputed_regions_equal_the_formulas():
    """Plan one microbatch on n segments, recomputed in regions of m segments. The number of gathers
    equals the formulas for one slot and for at least m slots."""
    for m, count in itertools.product(range(2, 5), range(1, 5)):
        n = m * count
        regions = [range(first, first + m) for first in range(0, n, m)]
        assert num_gathers(n, 1, [F, B], regions) == 3 * n - 1
        # The backward of a region's last segment is not a separate use, because the recomputation
        # of the region ends with this segment.
        uses = use_order([F, B], [0] * n, tower_needs(n), [True] * n, regions)
        last = {region[-1] for region in regions}
        fewer = [use for use in uses if not (use.backward and use.segment in last)]
        assert len(planned_gathers(plan_residency(fewer, 1))) == 3 * n - n // m
        for slots in range(m, n + 1):
            assert num_gathers(n, slots, [F, B], regions) == 2 * n - slots


def unforeseen_orders(draw: random.Random) -> tuple[int, dict[str, list[tuple[int, bool]]]]:
    """Return (number of segments, dict from the name of an order to the uses of two microbatches in
    this order). The cache does not know the orders in advance. A use is a pair (segment, True for
    backward)."""
    n = draw.randint(8, 16)
    orders: dict[str, list[tuple[int, bool]]] = {"whole": [], "skipped": [], "recomputed": []}
    for _ in range(2):
        for name in ("whole", "skipped"):
            used = [s for s in range(n) if name == "whole" or draw.random() < 0.7]
            orders[name] += [(s, False) for s in used] + [(s, True) for s in reversed(used)]
        orders["recomputed"] += [(s, False) for s in range(n)]
        for start in reversed(range(0, n, 4)):
            region = range(start, min(n, start + 4))
            orders["recomputed"] += [(s, False) for s in region]
            orders["recomputed"] += [(s, True) for s in reversed(region)]
    return n, orders


def gathers_without_plan(n: int, slots: int, uses: list[tuple[int, bool]], seed: int = -1) -> int:
    """Return the number of gathers of a cache without a plan. With a seed of -1, evictions follow
    guesses of the next use, as in `ParamStore`; with another seed, evictions are random."""
    draw = None if seed < 0 else random.Random(seed)
    cached: set[int] = set()
    gathers = last_backward = 0
    for segment, backward in uses:
        last_backward = segment if backward else last_backward
        ahead = likely_uses(n, segment, backward, last_backward, trains=True)
        if segment not in cached:
            gathers += 1
            if len(cached) == slots:
                guessed = farthest(cached, 1, ahead.index)[0]
                cached.remove(draw.choice(sorted(cached)) if draw else guessed)
            cached.add(segment)
    return gathers


def test_guessed_uses_need_fewer_gathers_than_random_replacement() -> None:
    """A cache without a plan needs fewer gathers with evictions by guessed uses than with random
    evictions. If all segments compute, evictions by guessed uses need the smallest possible number
    of gathers. With recomputed regions, these evictions need less than 2 % more gathers than this
    number."""
    ratios: dict[str, list[tuple[float, float]]] = {}
    for seed in range(12):
        draw = random.Random(seed)
        n, orders = unforeseen_orders(draw)
        slots = draw.randint(2, n - 1)
        for name, uses in orders.items():
            known = [Use(segment, backward, frozenset({segment})) for segment, backward in uses]
            least = len(planned_gathers(plan_residency(known, slots)))
            guessed = gathers_without_plan(n, slots, uses) / least
            chance = [gathers_without_plan(n, slots, uses, number) for number in range(8)]
            ratios.setdefault(name, []).append((guessed, sum(chance) / len(chance) / least))
    means = {
        name: [sum(r) / len(r) for r in zip(*all_, strict=True)] for name, all_ in ratios.items()
    }
    assert means["whole"][0] == 1 and means["recomputed"][0] < 1.02
    assert all(guessed < 0.97 * chance for guessed, chance in means.values()), means


def test_gathers_overlap_with_computation():
    """Plan a forward and a backward. With one slot, each use waits for its gather. With two or more
    slots, only the first use waits. The gather of each later use begins during an earlier use."""
    n = 8
    uses = use_order([F, B], [0] * n, tower_needs(n), [True] * n)
    for slots, waited_for in ((1, 2 * n - 1), (2, 1), (n, 1)):
        plan = plan_residency(uses, slots)
        assert sum(len(step.gather) for step in plan.steps) == waited_for, slots
        assert len({*planned_gathers(plan)}) == n
    resident = [step.resident for step in plan_residency(uses, 3).steps]
    assert all(segment + 2 in resident[segment] for segment in range(n - 2))  # two uses ahead


def test_chunks_that_are_not_needed_again_are_freed():
    """Plan a forward and a backward of four segments with four slots. The chunk of a segment is
    freed after the backward of the segment, although the cache is not full."""
    plan = plan_residency(use_order([F, B], [0] * 4, tower_needs(4), [True] * 4), 4)
    backward = [step.resident for step in plan.steps[4:]]
    assert backward == [set(range(segment + 1)) for segment in (3, 2, 1, 0)]
    assert max(len(step.resident) for step in plan.steps) == 4


def test_use_order_follows_stages_and_skips_frozen_first_segments():
    """Two stages have two segments each, and the first of the four segments is frozen. The uses are
    in the order of the passes, and the frozen segment has no backward."""
    passes = [Pass(0, False), Pass(1, False), Pass(1, True), Pass(0, True)]
    uses = use_order(passes, [0, 0, 1, 1], tower_needs(4), [False, True, True, True])
    assert [(use.segment, use.backward) for use in uses] == [
        *((segment, False) for segment in (0, 1, 2, 3)),
        *((segment, True) for segment in (3, 2, 1)),
    ]
