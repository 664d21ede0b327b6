"""Tests of sharded and offloaded states: training gives the same bits as with whole (unsharded)
states on the device, gathers follow the plan, and the numbers of moved bytes equal the formulas of
the Elixir papers."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optimus.chunks.buffers import ChunkState
from optimus.chunks.memory import Copy, Tier
from optimus.chunks.norm import squares_of
from optimus.chunks.optimizer import AdamW, UpdateQueue
from optimus.chunks.reductions import ReducePerMicrobatch
from optimus.chunks.residency import Use
from optimus.config import OptimConfig
from optimus.config.machine import Links
from optimus.distributed.collectives import Group
from tests.chunks.test_residency import fewest_gathers, forward_uses
from tests.kit.layouts.tower import (
    ALL_HOOKS,
    CHUNK,
    Case,
    Outcome,
    Tower,
    batch,
    count_gathers,
    make_engine,
    run_with_missing_hooks,
    train_in_order,
    train_towers,
    use_in_order,
)

FP32, BF16 = torch.float32, torch.bfloat16
WHOLE = {"gradients": False, "parameters": False}


def train_on_two(ranks, *cases: Case) -> list[list[Outcome]]:
    """Return the outcomes of two ranks for each case."""
    return list(zip(*ranks(2, train_towers, cases, start_world=False), strict=True))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("slots", "microbatches", "region"),
    [(1, 1, 0), (2, 3, 0), (0, 2, 0), (1, 2, 3), (2, 1, 3), (3, 2, 3)],
)
def test_sharded_states_train_to_the_bits_of_whole_states(
    ranks, tmp_path, dtype, slots, microbatches, region
):
    """Train with whole states, with sharded gradients, with sharded gradients and parameters, and
    with some or all states on the host or on disk. With sharded or offloaded states, train again
    with NaN in freed buffers. Losses and masters have the same bits."""
    case = Case(6, slots, microbatches, region, dtype=dtype, steps=3)
    changes = (
        WHOLE,
        {},
        {"poison": True},
        {"parameters": False},
        {"parameters": False, "poison": True},
        {"host_share": 0.5},
        {"parameters": False, "host_share": 1.0, "poison": True, "copies": "late"},
        {"host_share": 0.8, "disk_share": 0.7, "disk": str(tmp_path), "poison": True},
    )
    whole, *sharded = train_on_two(ranks, *(case._replace(**change) for change in changes))
    for outcomes in sharded:
        for outcome, expected in zip(outcomes, whole, strict=True):
            assert outcome.losses == expected.losses and outcome.weights == expected.weights


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("slots", "microbatches", "region"), [(1, 1, 0), (2, 3, 0), (0, 2, 0), (3, 2, 3)]
)
def test_a_single_rank_offloads_to_the_same_bits(
    ranks, tmp_path, dtype, slots, microbatches, region
):
    """Train on a single rank, with whole states and with some or all states on the host or on disk.
    Losses and masters have the same bits."""
    case = Case(6, slots, microbatches, region, dtype=dtype, steps=3)
    shares = [{"host_share": 0.33}, {"host_share": 1.0}]
    times = ("early", "late", "random")
    shares += [{"host_share": 0.7, "poison": True, "copies": time} for time in times]
    changes = (WHOLE, *({"parameters": False, **share} for share in shares))
    cases = [case._replace(**change) for change in changes]
    cases += [case._replace(**changes[1], disk_share=0.6, disk=str(tmp_path), poison=True)]
    whole, *offloaded = ranks(1, train_towers, cases, start_world=False)[0]
    for outcome in offloaded:
        assert outcome.losses == whole.losses and outcome.weights == whole.weights
    layer = CHUNK * dtype.itemsize
    for outcome, on_device in zip(offloaded[:2], (4, 0), strict=True):
        expected = [(*use, on_device * layer + resident) for *use, resident in outcome.plan]
        assert outcome.planned and outcome.trace == expected
        assert outcome.between == {"params": on_device * layer, "grads": on_device * 4 * CHUNK}


@pytest.mark.parametrize("is_planned", [True, False])
@pytest.mark.parametrize(("slots", "microbatches"), [(1, 1), (2, 3), (4, 2)])
def test_copied_bytes_equal_the_formula(slots, microbatches, is_planned):
    """All states of n bf16 chunks are on the host. The cache on the device has B slots. A step that
    runs k microbatches one after the other copies 2kn - (2k-1)B chunks of parameters to the device
    and kn chunks of fp32 gradients to the host, also if the order of uses is not known. After the
    step, no chunk has memory on the device."""
    n, k = 4, microbatches
    case = Case(n, slots, k, dtype=BF16, parameters=False, host_share=1.0)
    tower = Tower(n)
    engine = make_engine(tower, case, Group(1, 0))
    memory = engine.memory
    assert memory.num_bytes == {
        Tier.DEVICE: 0,
        Tier.HOST: n * CHUNK * (2 + 4 + 4 + 4 + 4),
        Tier.DISK: 0,
    }
    if not is_planned:
        engine.params.replan([])
    use_in_order(tower, engine, case, "forward")
    copied = (2 * k * n - (2 * k - 1) * slots) * CHUNK * 2 + k * n * CHUNK * 4
    assert memory.num_copied == case.steps * copied
    chunk = engine.chunks[0]
    tiers = [memory.tier_of(flat) for flat in (chunk.params, chunk.grads, chunk.master)]
    assert tiers == [None, None, Tier.HOST] and not memory.num_bytes[Tier.DEVICE]


@pytest.mark.parametrize("order", ["reverse", "twice", "skip"])
def test_another_order_of_use_costs_time_and_changes_no_bit(order, caplog):
    """The layers of a stack compute in another order than planned, with NaN in freed buffers. The
    results keep their bits, unplanned uses are counted, and a single warning is logged."""
    case = Case(5, 2, 2, poison=True, parameters=False)
    results = []
    for share in (0.0, 1.0):
        changes = {"host_share": share, "gradients": share > 0}
        results.append(train_in_order(case._replace(**changes), order))
    assert results[0][:2] == results[1][:2]
    assert results[0][2] == 0 and results[1][2] > 0
    assert [r.message for r in caplog.records if "in another order than planned" in r.message] == [
        caplog.records[0].message
    ]


def test_a_recorded_order_replaces_the_plan():
    """The layers compute in the reverse of the planned order. After `replan` with the order in
    which the layers compute, every use is in the plan."""
    case = Case(5, 2, 2, poison=True, parameters=False, steps=1)
    results = []
    for share in (0.0, 1.0):
        tower = Tower(case.n)
        engine = make_engine(tower, case._replace(host_share=share), Group(1, 0))
        losses = use_in_order(tower, engine, case, "reverse")
        if engine.params.plan is not None:
            assert engine.params.num_unplanned > 0
            needs = {step.use.segment: step.use.need for step in engine.params.plan.steps}
            backward = [Use(n, True, needs[n]) for n in range(case.n)]
            forward = [Use(n, False, needs[n]) for n in reversed(range(case.n))]
            engine.params.replan((forward + backward) * case.microbatches)
        losses += use_in_order(tower, engine, case, "reverse")
        assert engine.params.num_unplanned == 0
        results.append(losses)
    assert results[0] == results[1]


@pytest.mark.parametrize("copies", ["early", "late"])
def test_code_outside_of_segments_gathers_and_reads_sums_within_a_step(copies):
    """After each microbatch, gather a parameter at a time that is not in the plan, and read the
    sums of the gradients so far. The results have the same bits as with all states on the
    device."""
    case = Case(4, 2, 3, poison=True, parameters=False, copies=copies)
    results = []
    for share in (0.0, 1.0):
        tower = Tower(case.n)
        engine = make_engine(tower, case._replace(host_share=share), Group(1, 0))
        norms = []
        for _ in range(case.steps):
            engine.start_step()
            for number in range(case.microbatches):
                tower(batch(number, case.dtype)).square().sum().backward()
                engine.gradients.reduce(0)
                engine.gather(["layers.3.linear.weight"])
                norms.append(float(tower.layers[3].linear.weight.detach().norm()))
                norms += [float(engine.gradients.sum_so_far(s).norm()) for s in engine.chunks]
            engine.gradients.finish()
            engine.update(1e-3)
        results.append(norms)
    assert results[0] == results[1]


@pytest.mark.parametrize("order", ["forward", "skip", "alternate"])
def test_updates_of_the_host_in_the_background_change_no_bit(tmp_path, order):
    """Each update of a chunk is delayed by 10 ms, so that the host still updates chunks during the
    next forward. The results keep their bits."""
    case = Case(5, 2, 2, steps=3, poison=True, parameters=False)
    whole = train_in_order(case._replace(gradients=False), order)
    for share, copies, on_disk in ((0.4, "early", 0), (1.0, "late", 0.4), (1.0, "random", 1.0)):
        changes = {"host_share": share, "copies": copies, "delay_s": 0.01}
        if on_disk:
            changes |= {"disk_share": on_disk, "disk": str(tmp_path)}
        offloaded = train_in_order(case._replace(**changes), order)
        assert offloaded[:2] == whole[:2]


@pytest.mark.parametrize("order", ["forward", "skip", "alternate"])
@pytest.mark.parametrize(("to_device_s", "to_host_s"), [(0.002, 0.0), (0.0, 0.002)])
def test_copies_of_an_emulated_link_change_no_bit(order, to_device_s, to_host_s):
    """A copy of a chunk takes `to_device_s` or `to_host_s` seconds. The value 0 means 10 us."""
    case = Case(5, 2, 2, steps=3, poison=True, parameters=False)
    whole = train_in_order(case._replace(gradients=False), order)
    size = 4 * CHUNK
    links = Links(to_device=size / (to_device_s or 1e-5), to_host=size / (to_host_s or 1e-5))
    for share in (0.4, 1.0):
        offloaded = train_in_order(case._replace(host_share=share, links=links), order)
        assert offloaded[:2] == whole[:2]


@pytest.mark.parametrize(("microbatches", "share"), [(1, 1.0), (3, 0.5)])
def test_host_computes_the_squares_of_gradients_in_backward(microbatches, share):
    """The host squares gradients only after they are summed over all microbatches. In a step with
    another number of microbatches than planned, the host computes no squares in backward."""
    case = Case(4, 2, microbatches, parameters=False, host_share=share)
    tower = Tower(4)
    engine = make_engine(tower, case, Group(1, 0))
    for extra in (0, 1):
        engine.start_step()
        for number in range(microbatches + extra):
            tower(batch(number, case.dtype)).square().sum().backward()
            engine.gradients.reduce(0)
        engine.gradients.finish()
        for state in engine.chunks:
            squares = engine.gradients.squares_of(state)
            assert (squares is not None) == (state.home is Tier.HOST and not extra)
            if squares is not None:
                assert torch.equal(squares, squares_of(state.grad, exact=True))
        known = engine.grad_norm()
        engine.gradients._strategy.squares.clear()
        assert known == engine.grad_norm() > 0


def test_squares_of_a_chunk_without_backward_are_not_those_of_the_last_step(monkeypatch):
    """Some layers do not compute in the third step. The norm of the third step must not contain the
    squares of the gradients that these layers had in the second step."""
    case = Case(4, 2, parameters=False, host_share=1.0)
    tower = Tower(4)
    engine = make_engine(tower, case, Group(1, 0))
    for layers in (tower.layers, tower.layers, tower.layers[:2]):
        engine.start_step()
        values = batch(0, case.dtype)
        for layer in layers:
            values = layer(values)
        values.square().sum().backward()
        engine.gradients.reduce(0)
        engine.gradients.finish()
        known = engine.grad_norm()
        with monkeypatch.context() as patched:
            patched.setattr(engine.gradients, "squares_of", lambda state: None)
            assert known == engine.grad_norm()
        engine.update(1e-3)


class ScriptedUpdate:
    """Optimizer whose updates change nothing. The update of chunk 1 fails if `failing` is set, and
    the update of chunk 2 waits for the event `last`."""

    def __init__(self) -> None:
        self.moments: dict = {}
        self.num_updates = 0
        self.failing, self.last = threading.Event(), threading.Event()

    def update(self, state: Any, lr: float, grad_scale: float) -> None:
        if state.chunk.number == 1:
            assert self.failing.wait(30)
            raise MemoryError("no memory")
        if state.chunk.number == 2:
            assert self.last.wait(30)


def numbered(number: int) -> Any:
    return SimpleNamespace(chunk=SimpleNamespace(number=number), shard=[], on_disk={})


def start_waiting(
    queue: UpdateQueue, numbers: list[int]
) -> tuple[list[threading.Thread], list[BaseException]]:
    """For each chunk number in `numbers`, start a thread that waits for the update of the chunk.
    Return (threads, list to which the threads append their errors)."""
    errors: list[BaseException] = []

    def wait(number: int) -> None:
        try:
            queue.wait(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=wait, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    return threads, errors


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_several_threads_wait_for_an_update():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        queue = UpdateQueue(ScriptedUpdate())
        for _ in range(300):
            queue.add(numbered(3), 1.0, 1.0)
            threads, errors = start_waiting(queue, [3, 3, 3])
            join(threads)
            assert not errors
    finally:
        sys.setswitchinterval(interval)


def test_each_thread_gets_the_first_error_of_an_update():
    """Updates 3 and 4 are cancelled, because update 1 fails while update 2 is in progress. All
    threads that wait for update 1, 3 or 4 raise the error of update 1."""
    optimizer = ScriptedUpdate()
    queue = UpdateQueue(optimizer)
    for number in range(5):
        queue.add(numbered(number), 1.0, 1.0)
    threads, errors = start_waiting(queue, [4, 3, 1])
    optimizer.failing.set()
    join(threads)
    optimizer.last.set()
    assert [str(error) for error in errors] == ["no memory"] * 3
    never_added = 7
    for use in (
        queue.wait_for_all,
        lambda: queue.wait(never_added),
        lambda: queue.add(numbered(never_added), 1.0, 1.0),
    ):
        with pytest.raises(MemoryError, match="no memory"):
            use()


FAST = Links(to_device=1e12, to_host=1e12)


def test_sums_of_gradients_in_their_thread_are_waited_for(monkeypatch):
    """Each sum of gradients begins 10 ms after the copy of the gradients. The norm, the update and
    the next copy to the same memory wait for the sum."""
    case = Case(4, 2, 2, parameters=False, host_share=1.0, poison=True, links=FAST)
    expected = train_in_order(case, "forward")
    add = ReducePerMicrobatch._add

    def add_late(*args: Any) -> None:
        time.sleep(0.01)
        add(*args)

    monkeypatch.setattr(ReducePerMicrobatch, "_add", add_late)
    assert train_in_order(case, "forward")[:2] == expected[:2]


def test_an_error_of_a_sum_is_raised(monkeypatch):
    case = Case(4, 2, 2, parameters=False, host_share=1.0, links=FAST)

    def fail(*args: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(ReducePerMicrobatch, "_add", fail)
    with pytest.raises(MemoryError, match="no memory"):
        train_in_order(case, "forward")


class FailingAdamW(AdamW):
    """AdamW whose update of chunk 1 fails."""

    def update(self, state: ChunkState, lr: float, grad_scale: float) -> None:
        if state.chunk.number == 1:
            raise ValueError("no update")
        super().update(state, lr, grad_scale)


def test_an_error_of_an_update_is_raised_at_each_later_wait():
    """After the error of an update, states are only partly updated. Each later use of the states
    raises the error again."""
    tower, case = Tower(3), Case(3, parameters=False, host_share=1.0)
    engine = make_engine(tower, case, Group(1, 0))
    engine.optimizer = engine._updates._optimizer = FailingAdamW(OptimConfig(lr=1.0))
    engine.start_step()
    engine.gradients.finish()
    engine.update(1.0)
    engine._updates._pending[1].exception()  # wait until the update has failed
    with pytest.raises(ValueError, match="no update"):
        tower(batch(0, case.dtype))
    for use in (engine.wait, engine.shards, engine.sync_params, lambda: engine.update(1.0)):
        with pytest.raises(ValueError, match="no update"):
            use()


@pytest.mark.parametrize(
    "user", ["shards", "first_shard", "put", "clear_moments", "first_parameter", "sync_params"]
)
def test_states_are_read_after_all_updates(user, monkeypatch):
    """Each update of a chunk is delayed by 20 ms. Code that reads or writes states waits for the
    updates."""
    case = Case(3, parameters=False, host_share=1.0, delay_s=0.02, dtype=BF16)
    engine = make_engine(Tower(3), case, Group(1, 0))

    def read(flat: torch.Tensor) -> torch.Tensor:
        assert not engine._updates._pending
        return flat

    monkeypatch.setattr(engine, "read", read)
    engine.start_step()
    engine.gradients.finish()
    engine.update(1.0)
    use = {
        "shards": engine.shards,
        "first_shard": lambda: engine.first_shard("master", lambda values: False),
        "put": lambda: engine.put("master", "layers.0.linear.weight", torch.zeros(1)),
        "clear_moments": engine.clear_moments,
        "first_parameter": lambda: engine.first_parameter(lambda values: False),
        "sync_params": engine.sync_params,
    }[user]
    use()
    assert not engine._updates._pending


def test_wait_completes_copies_for_later_uses():
    tower, case = Tower(4), Case(4, 3, parameters=False, host_share=1.0, copies="late")
    engine = make_engine(tower, case, Group(1, 0))
    engine.start_step()
    tower.layers[0](batch(0, case.dtype))
    assert engine.params._uploads  # uploads of the next layers
    engine.wait()
    assert not engine.params._uploads


@pytest.mark.parametrize(
    ("user", "order"),
    [("optimus.chunks.memory", "forward"), ("optimus.chunks.reductions", "alternate")],
)
def test_a_missing_wait_for_an_update_is_noticed(monkeypatch, user, order):
    """If the code that copies parameters (chunks.memory) does not wait for updates, a forward uses
    old parameters. If the code that stores gradients (chunks.reductions) does not wait, an update
    reads gradients of the next step. A layer that computes in the next step waits for its
    parameters before its gradients are stored. Therefore a missing wait in chunks.reductions is
    noticed only with an order in which some layers do not compute in the next step."""
    case = Case(5, 2, steps=3, parameters=False, host_share=1.0, delay_s=0.01)
    expected = train_in_order(case, order)
    wait = UpdateQueue.wait

    def wait_unless_user(queue: UpdateQueue, number: int) -> None:
        if sys._getframe(1).f_globals["__name__"] != user:
            wait(queue, number)

    monkeypatch.setattr(UpdateQueue, "wait", wait_unless_user)
    assert train_in_order(case, order)[:2] != expected[:2]


SLOW = Links(to_device=4 * CHUNK / 0.02, to_host=4 * CHUNK / 0.02)
"""Rates with which the copy of a chunk takes 20 ms."""


@pytest.mark.parametrize("changes", [{"copies": "late"}, {"links": SLOW}], ids=["late", "link"])
@pytest.mark.parametrize("user", ["optimus.chunks.param_store", "optimus.chunks.reductions"])
def test_a_missing_wait_for_a_copy_changes_bits(monkeypatch, user, changes):
    """In the case "late", a copy is done when code waits for it. In the case "link", an emulated
    link makes copies in the background. If a wait is removed, a layer reads NaN, or the update
    begins before all gradients are on the host."""
    case = Case(5, 2, 2, parameters=False, host_share=1.0, poison=True)._replace(**changes)
    expected = train_in_order(case, "forward")
    wait = Copy.wait

    def wait_unless_user(copy: Copy) -> None:
        if sys._getframe(1).f_globals["__name__"] != user:
            wait(copy)

    monkeypatch.setattr(Copy, "wait", wait_unless_user)
    assert train_in_order(case, "forward")[:2] != expected[:2]


CASES = [
    *(Case(n, slots) for n, slots in itertools.product((1, 4), (1, 2, 4, 5))),
    *(Case(4, slots, microbatches=3) for slots in (1, 2, 4)),
    *(Case(6, slots, region=3) for slots in (1, 3, 5)),
    Case(6, 2, microbatches=2, region=2),
]


def test_gathers_and_reductions_equal_the_formulas(ranks):
    """Train stacks of layers with several numbers of cache slots, microbatches and recomputed
    layers. The number and the bytes of gathers and reductions equal the formulas. The uses of
    chunks and the resident bytes equal the values in the plan."""
    for case, outcomes in zip(CASES, train_on_two(ranks, *CASES), strict=True):
        n, slots, k, m = case.n, min(case.slots, case.n), case.microbatches, case.region
        gathers = 2 * k * n - (2 * k - 1) * slots
        if m and slots < m:
            gathers = 3 * n - 1
        size = 4 * CHUNK
        for outcome in outcomes:
            assert outcome.traffic["all_gather"] == [gathers, gathers * size], case
            assert outcome.traffic["all_to_all"] == [k * n, k * n * size], case
            assert outcome.planned == gathers
            assert outcome.trace == outcome.plan
            assert max(resident for *_, resident in outcome.trace) <= slots * size


def test_forward_passes_outside_of_a_step_have_the_fewest_gathers(ranks):
    """Run three forward passes without a plan. The store assumes that each pass is followed by
    another pass. The number of gathers is the smallest possible number."""
    cases = [Case(n, slots) for n, slots in ((6, 1), (6, 3), (5, 4), (4, 4))]
    uses = [forward_uses([[segment] for segment in range(case.n)] * 3) for case in cases]
    fewest = [
        fewest_gathers(of_case, case.slots) for of_case, case in zip(uses, cases, strict=True)
    ]
    assert ranks(2, count_gathers, cases, 3, start_world=False) == [fewest] * 2


@pytest.mark.parametrize("region", [0, 2])
def test_traffic_equals_table_1_of_the_second_elixir_paper(ranks, region):
    """Train n chunks of C elements, in sum S = n*C elements, in bf16 (L_c = 2 bytes). In a step, a
    rank exchanges 2 L_c S bytes if all chunks fit into the cache (rCache-max), and at most 4 L_c S
    bytes if the cache has a slot for a single chunk (rCache-min)."""
    case = Case(6, 0, region=region, dtype=BF16, deterministic=False)
    largest, least = (
        sum(size for _, size in outcomes[0].traffic.values())
        for outcomes in train_on_two(ranks, case, case._replace(slots=1))
    )
    whole = 2 * 6 * CHUNK
    assert largest == 2 * whole
    assert least == ((3 if region else 2) * 6 - 1) * 2 * CHUNK + whole <= 4 * whole


def test_only_shards_have_memory_between_updates(ranks):
    """Train with whole states, with sharded gradients, and with sharded gradients and parameters.
    After an update, the unsharded buffers of sharded states have no memory. In backward, the
    unsharded gradients of only one layer at a time have memory."""
    size = 4 * 4 * CHUNK
    changes = (WHOLE, {"parameters": False}, {})
    resident = ((size, size), (size, 0), (0, 0))
    of_changes = train_on_two(ranks, *(Case(4, 2)._replace(**change) for change in changes))
    for (params, grads), outcomes in zip(resident, of_changes, strict=True):
        for outcome in outcomes:
            assert outcome.between == {"params": params, "grads": grads}
            assert outcome.gradients == [grads or 4 * CHUNK] * 4


@pytest.mark.parametrize("region", [0, 3])
def test_a_use_of_an_evicted_chunk_has_nan_results(ranks, region):
    """Freed buffers are filled with NaN. With all hooks, outputs and gradients are finite. If the
    forward hook of a layer is missing, outputs and gradients contain NaN. If the backward hook of a
    layer is missing, only gradients contain NaN."""
    case = Case(6, 1, region=region, poison=True)
    missing_hooks = [ALL_HOOKS, (1, False), (1, True)]
    is_finite = ranks(2, run_with_missing_hooks, case, missing_hooks, start_world=False)[0]
    assert is_finite == [(True, True), (False, False), (True, False)]
