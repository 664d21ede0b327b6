"""Tests of the search of the placement of chunks: it equals a full enumeration, and the benefits of
Elixir equal those of the paper."""

from __future__ import annotations

import itertools
import random

import pytest

from optimus.chunks.placement import (
    ChunkCost,
    NoPlacement,
    Rates,
    Workload,
    cache_benefit,
    search,
    upload_benefit,
)
from optimus.chunks.residency import Use
from optimus.config.machine import Links

LINKS = Links(to_device=100.0, to_host=80.0, host_adam=50.0, flops=1.0, memory=1.0)
HUGE = 1 << 60


def workload(
    chunks: int,
    microbatches: int = 1,
    order: str = "microbatch",
    device_bytes: int = 0,
    compute_s: float = 1.0,
    seed: int = 0,
) -> Workload:
    """Return a workload with one chunk for each segment."""
    size = random.Random(seed).choice([4, 8])
    needs = [frozenset({number}) for number in range(chunks)]
    forward = [Use(number, False, need) for number, need in enumerate(needs)]
    backward = [Use(number, True, need) for number, need in enumerate(needs)][::-1]
    if order == "microbatch":
        uses = microbatches * [*forward, *backward]
    else:
        uses = [use for use in (*forward, *backward) for _ in range(microbatches)]
    return Workload(
        order,
        size,
        [ChunkCost(9 * size, 10 * size, size, size, 2 * size, size, size)] * chunks,
        uses,
        needs,
        needs,
        [compute_s] * chunks,
        [2 * compute_s] * chunks,
        device_bytes,
        reductions=microbatches if order == "microbatch" else 1,
    )


def test_everything_on_the_device_has_no_copies() -> None:
    work = workload(4)
    assert work.estimate(0, 0, LINKS) == work.compute_s == 12.0


@pytest.mark.parametrize("seed", range(6))
def test_search_equals_a_full_enumeration(seed: int) -> None:
    draw = random.Random(seed)
    compute_s = draw.choice([0.01, 0.1, 1.0])
    works = [
        workload(6, 3, "microbatch", 20, compute_s, seed),
        workload(6, 3, "layer", 60, compute_s, seed),
    ]
    limit = draw.randrange(60, 300)
    placement = search(works, limit, HUGE, LINKS)
    times = [
        work.predict(num_host, slots, LINKS).step
        for work in works
        for num_host in range(1, 7)
        for slots in range(1, num_host + 1)
        if work.device(num_host, slots) <= limit
    ]
    assert placement.device <= limit
    # The search simulates only the placements with the best estimates.
    assert min(times) <= placement.time.step <= 1.02 * min(times)


def test_memory_of_a_placement_by_hand() -> None:
    work, size = workload(5, device_bytes=7), workload(5).chunk_length
    # 3 resident chunks of 9 units, 1 slot, and the gradients of 2 chunks.
    assert work.device(2, 1) == 7 + size * (3 * 9 + 1 + 2 * 2)
    # A chunk of the present segment, and two whose gradients are being copied.
    assert work.device(5, 2) == 7 + size * (2 + 3 * 2)
    assert work.host(2) == size * (2 * 10 + 2)


def test_a_limit_that_lacks_a_byte_is_refused_with_the_fewest_bytes() -> None:
    works = [workload(4, device_bytes=5), workload(4, order="layer", device_bytes=9)]
    least = min(w.device(n, 1) for w, n in itertools.product(works, range(1, 5)))
    assert search(works, least, HUGE, LINKS).device == least
    with pytest.raises(NoPlacement) as refused:
        search(works, least - 1, HUGE, LINKS)
    assert refused.value.device == least


def test_host_limit_keeps_chunks_on_the_device() -> None:
    work = workload(4)
    placement = search([work], HUGE, work.host(2), LINKS)
    assert placement.num_host <= 2
    with pytest.raises(NoPlacement) as refused:
        search([work], work.device(4, 1), work.host(1), LINKS)
    assert refused.value.host == work.host(4)


def test_layer_order_is_chosen_for_many_microbatches_on_a_slow_link() -> None:
    slow = LINKS.model_copy(update={"to_device": 1.0, "to_host": 1.0})
    works = [workload(6, 4, "microbatch"), workload(6, 4, "layer")]
    assert search(works, works[0].device(6, 2), HUGE, slow).workload.order == "layer"


SERVERS = {
    # to_device, to_host, device_update, host_update of 1, 2 and 4 processes; Tables 4 and 5.
    "development": [(22, 16, 50, 5), (50, 40, 100, 6.5), (70, 60, 200, 7.5)],
    "aws": [(12, 13, 44, 3.7), (12, 13, 86, 5.6), (25, 26, 171, 5)],
}
BENEFITS = {
    "development": [(0.1080, 0.0502), (0.0450, 0.0520), (0.0310, 0.0802)],
    "aws": [(0.1603, 0.0754), (0.1603, 0.1392), (0.0785, 0.1680)],
}


@pytest.mark.parametrize("server", SERVERS)
def test_benefits_of_the_papers_servers(server: str) -> None:
    for processes, row, expected in zip((1, 2, 4), SERVERS[server], BENEFITS[server], strict=True):
        rates = Rates(*row)
        benefits = cache_benefit(rates), upload_benefit(rates, processes, low=2, state=4, factor=3)
        assert benefits == pytest.approx(expected, abs=6e-5)
