"""Tests of the planned time of a step: bounds, closed formulas of pipelines, numbers of operations,
and a time that never increases with a rate."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from optimus.config import Config
from optimus.config.load import load_config
from optimus.config.machine import FOLDER, Machine, load_machine
from optimus.distributed.mesh import Mesh, make_mesh
from optimus.errors import ConfigError
from optimus.model.flops import head_multiply_adds, layer_multiply_adds
from optimus.parallel.pipeline.actions import Action, Kind
from optimus.parallel.pipeline.schedules import make_schedule
from optimus.parallel.pipeline.simulate import simulate, unit_costs
from optimus.planner.machine_rates import ProductRates, Rates, UpdateBytes, rates_of
from optimus.planner.step_time import (
    Layers,
    Reduction,
    Step,
    pass_time,
    pipeline_s,
    play_step,
    played_time,
    step_time,
)
from optimus.planner.workload import Weights, stage_weights, step_of, updated_parameters
from optimus.rank.operations import FusedAttention, Operation, Pass, Product
from optimus.rank.profile import profile_work

RUNS = FOLDER.parent / "run"
MACHINES = ("a100-80", "aurora", "h100", "h200")


def a100() -> Rates:
    return rates_of(load_machine("a100-80"), "bf16")


def demo(**parallel: object) -> tuple[Config, Mesh]:
    overrides = [f"parallel.{axis}={value}" for axis, value in parallel.items()]
    config = load_config(
        RUNS / "mula-7b-a1b.toml", [*overrides, "train.global_batch_tokens=131072"]
    )
    return config, make_mesh(config.parallel)


@pytest.mark.parametrize(("p", "v", "m"), [(1, 1, 3), (4, 1, 8), (4, 2, 8), (8, 4, 16), (3, 1, 1)])
def test_span_of_equal_stages_equals_the_simulation(p, v, m):
    """With p ranks and v stages on each rank, an action takes 1/v in forward and 2/v in backward. A
    microbatch then takes 3 on a rank, and the bubble has the time of (p - 1) / v microbatches."""
    name = "interleaved" if v > 1 else "1f1b"
    simulated = simulate(make_schedule(name, p, v, m), unit_costs(v)).end
    stages = p * v
    span = pipeline_s(name, p, v, m, [1 / v] * stages, [2 / v] * stages)
    assert span == pytest.approx(simulated) == pytest.approx(3 * m + 3 * (p - 1) / v)


def test_span_of_gpipe_and_of_zero_bubble():
    simulated = simulate(make_schedule("gpipe", 4, 1, 6), unit_costs()).end
    assert pipeline_s("gpipe", 4, 1, 6, [1.0] * 4, [2.0] * 4) == pytest.approx(simulated)
    plain_s = pipeline_s("1f1b", 4, 1, 6, [1.0] * 4, [2.0] * 4)
    assert 18 < pipeline_s("zb-h1", 4, 1, 6, [1.0] * 4, [2.0] * 4) < plain_s


@pytest.mark.parametrize("formula", [False, True])
def test_transfers_occupy_the_cores_of_a_cpu(formula):
    """On a CPU, a transfer occupies the cores of the sender and of the receiver for half of its
    time. A pipeline of two ranks has one transfer for each pass of each microbatch. The step
    becomes longer by 2 * (4 + 1) of these half transfers: for both passes of 4 microbatches on a
    rank, and of one microbatch on the other rank."""
    layers = (Layers((Pass(1e11),), (Pass(2e11),)),)
    step = Step((layers,) * 2, 4, {"pp": [(0, 8)]}, transfer_bytes=1e8)
    cpu = dataclasses.replace(a100(), launches_queue=False)
    schedule = make_schedule("1f1b", 2, 1, 4)

    def added(rates: Rates) -> tuple[float, float]:
        """Return the seconds that transfers add to the step, and the seconds that they add to the
        sum of communication and bubble."""
        times = []
        for each in (step, dataclasses.replace(step, transfer_bytes=0.0)):
            time = step_time(each, rates) if formula else played_time(each, rates, schedule)
            times.append((time.total_s, time.exposed_s["pp"] + time.bubble_s))
        (total_s, waiting_s), (total_without_s, waiting_without_s) = times
        return total_s - total_without_s, waiting_s - waiting_without_s

    on_gpu, on_cpu = added(a100()), added(cpu)
    transfer_s = 1e8 / 24e9
    assert on_gpu[0] >= 2 * transfer_s * (1 - 1e-9)  # the pipeline fills and drains
    for gpu_s, cpu_s in zip(on_gpu, on_cpu, strict=True):
        assert cpu_s - gpu_s == pytest.approx(2 * (4 + 1) / 2 * transfer_s)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("heaviest", [0, 1, 2])
def test_transfers_on_a_cpu_of_three_ranks_take_the_time_of_the_busiest_rank(heaviest, schedule):
    """The middle rank has the most transfers. With many microbatches, the step takes as long as the
    passes and the transfers of the busiest rank, which is the heaviest one here."""
    sizes, m = [1e11] * 3, 300
    sizes[heaviest] = 1.5e11
    products = (Product(256, 256, 256),)
    stages = tuple((Layers((Pass(s), *products), (Pass(2 * s), *2 * products)),) for s in sizes)
    step = Step(stages, m, {"pp": [(0, 8, 16)]}, schedule=schedule, transfer_bytes=2e8)
    cpu = dataclasses.replace(a100(), launches_queue=False, launch_s=0.0)
    with_s, without_s = (
        [
            step_time(each, cpu).total_s,
            played_time(each, cpu, make_schedule(schedule, 3, 1, m)).total_s,
        ]
        for each in (step, dataclasses.replace(step, transfer_bytes=0.0))
    )
    half_s = 2e8 / 24e9 / 2
    halves = 2 * (2 if heaviest == 1 else 1)
    for longer, shorter in zip(with_s, without_s, strict=True):
        # In addition, transfers fill and drain the pipeline.
        assert longer - shorter == pytest.approx(m * halves * half_s, rel=0.05)


@pytest.mark.parametrize("heaviest", [1.0, 1.04, 1.5])
def test_components_of_three_ranks_on_a_cpu_add_up_to_the_simulated_step(heaviest):
    """The middle rank has more transfers than the last rank. It is therefore busier, even if the
    passes of the last rank take 1.04 times as long as those of the middle rank."""
    sizes = (1e11, 1e11, heaviest * 1e11)
    stages = tuple((Layers((Pass(size),), (Pass(2 * size),)),) for size in sizes)
    step = Step(stages, 40, {"pp": [(0, 8, 16)]}, transfer_bytes=2e8)
    cpu = dataclasses.replace(a100(), launches_queue=False, launch_s=0.0)
    schedule = make_schedule("1f1b", 3, 1, 40)
    end_s = play_step(step, cpu, schedule).end
    assert played_time(step, cpu, schedule).total_s == pytest.approx(end_s)
    assert step_time(step, cpu).total_s == pytest.approx(end_s, rel=0.05)  # closed formula


def test_span_of_zero_bubble_is_close_to_the_simulation():
    choose = random.Random("zb-h1")
    for _ in range(60):
        p = choose.choice((2, 4, 6, 8))
        m = p * choose.choice((1, 2, 4))
        forward = [choose.uniform(0.9, 1.1) for _ in range(p)]
        forward[-1] *= choose.uniform(1.0, 1.5)  # the head
        costs = dict.fromkeys((Kind.F, Kind.I, Kind.W), forward)

        def cost(action: Action, costs: dict = costs) -> float:
            return costs[action.kind][action.stage] if action.kind in costs else 0.0

        simulated = simulate(make_schedule("zb-h1", p, 1, m), cost).end
        span = pipeline_s("zb-h1", p, 1, m, forward, [2 * seconds for seconds in forward])
        assert span == pytest.approx(simulated, rel=0.03)


def test_span_of_unequal_stages_is_close_to_the_simulation():
    """The head makes the last stage 30 % longer. The formula ignores short waits, so it agrees with
    the simulation only within 2 %."""
    forward, backward = [1.0, 1.0, 1.0, 1.3], [2.0, 2.0, 2.0, 2.6]
    costs = {"F": forward, "B": backward}
    timeline = simulate(
        make_schedule("1f1b", 4, 1, 12),
        lambda action: costs.get(action.kind.name, [0.0] * 4)[action.stage],
    )
    assert pipeline_s("1f1b", 4, 1, 12, forward, backward) == pytest.approx(timeline.end, rel=0.02)


@pytest.mark.parametrize("model", ["mula-1b", "mula-7b-a1b", "olmo-1b"])
def test_products_of_a_layer_have_the_flops_of_the_model(model):
    """The products of a layer have the FLOPs by which MFU is defined. MFU counts all attention
    scores, but fused attention skips the masked half of the scores. This test therefore doubles the
    FLOPs of fused attention."""
    settings = ["train.seq_len=2048", "train.microbatch_size=2", "model.num_layers=2"]
    config = load_config(FOLDER.parent / "model" / f"{model}.toml", settings)
    work = profile_work(config, Mesh(1, 1, 1, 1))
    flops = 0.0
    for op in work.blocks[1].forward:
        flops += op.flops if isinstance(op, Product) else 0.0
        if isinstance(op, FusedAttention):
            flops += 2 * op.flops
            size_bytes = 2 * 4096 * 2 * config.model.head_size
            heads = config.model.num_attention_heads + config.model.num_kv_heads
            assert op.num_bytes == size_bytes * heads and op.heads * op.seq_len == 4096 * 16
    assert flops == pytest.approx(2 * 4096 * layer_multiply_adds(config.model, 2048, 1))
    head = sum(op.flops for op in work.head.forward if isinstance(op, Product))
    # The last token of a sequence has no target.
    assert head == pytest.approx(2 * 4094 * head_multiply_adds(config.model))


@pytest.mark.parametrize("products", [2, 5])
def test_fused_attention_takes_the_longer_of_its_products_and_its_traffic(products):
    rates = dataclasses.replace(
        a100(), products=ProductRates(1e12, 0.5, 0.0), memory=1e11, launch_s=0.0
    )

    def seconds(head_size: int, seq_len: int) -> float:
        size_bytes = 2.0 * 4 * seq_len * head_size * 4
        attention = FusedAttention(4, seq_len, head_size, products, size_bytes)
        return pass_time((attention,), rates, {}).total_s

    assert seconds(128, 4096) == pytest.approx(products * 4 * 4096**2 * 128 / 0.5e12)
    short = 2.0 * 4 * 2 * 128 * 4
    assert seconds(128, 2) == pytest.approx(short / 1e11)


def test_division_over_ranks_divides_the_products():
    def flops(ep: int = 1, tp: int = 1) -> float:
        config, mesh = demo(ep=ep, tp=tp)
        operations = profile_work(config, mesh).blocks[1].forward
        return sum(op.flops for op in operations if isinstance(op, Product))

    config, _ = demo()
    router = 2 * config.train.seq_len * config.model.hidden_size * config.model.experts_by_layer[0]
    assert flops(ep=8) == pytest.approx(flops())  # with uniform routing
    assert flops(tp=4) - router == pytest.approx((flops() - router) / 4)


def test_recomputation_adds_the_forward_of_the_block():
    config, mesh = demo(dp=1)
    recompute = config.recompute.model_copy(update={"modules": ("block",)})
    kept, again = (
        profile_work(c, mesh).blocks[1]
        for c in (config, config.model_copy(update={"recompute": recompute}))
    )
    rates = dataclasses.replace(a100(), launch_s=0.0)
    forward, backward, both = (
        pass_time(operations, rates, {}).total_s
        for operations in (kept.forward, kept.backward, again.backward)
    )
    assert both == pytest.approx(backward + forward, rel=0.02)


def test_short_operations_take_the_time_of_their_launches():
    rates = a100()
    operations = (Product(64, 64, 64), Pass(1e3, 4))
    with_launches = pass_time(operations, rates, {}).total_s
    without = pass_time(operations, dataclasses.replace(rates, launch_s=0.0), {}).total_s
    assert with_launches == pytest.approx(5 * rates.launch_s) and with_launches > 10 * without


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (16, 4096, 16), (128, 128, 128), (8192, 8192, 8192), (1e6, 1e6, 1e6)]
)
def test_no_product_is_faster_than_the_peak(name, shape):
    rates = rates_of(load_machine(name), "bf16", name)
    assert 0 < rates.products.rate(*shape) < rates.products.peak


@pytest.mark.parametrize(
    "change",
    [
        lambda r: dataclasses.replace(r, memory=2 * r.memory),
        lambda r: dataclasses.replace(r, launch_s=r.launch_s / 2),
        lambda r: dataclasses.replace(r, products=r.products._replace(peak=2 * r.products.peak)),
        lambda r: dataclasses.replace(r, products=r.products._replace(half_size=0.0)),
        lambda r: dataclasses.replace(
            r, links=tuple(link._replace(rate=2 * link.rate) for link in r.links)
        ),
        lambda r: dataclasses.replace(
            r, links=tuple(link._replace(step_s=0.0) for link in r.links)
        ),
    ],
    ids=["memory", "launches", "peak", "small products", "links", "latency"],
)
def test_a_better_machine_is_never_slower(change):
    for parallel in ({"dp": 4}, {"dp": 2, "ep": 8}, {"pp": 4, "dp": 2, "ep": 4}, {"tp": 2}):
        config, mesh = demo(**parallel)
        step, rates = step_of(config, mesh), a100()
        assert step_time(step, change(rates)).total_s <= step_time(step, rates).total_s * (
            1 + 1e-12
        )


def test_step_is_the_sum_of_its_components_and_within_bounds():
    config, mesh = demo(pp=4, dp=2, ep=4)
    rates = a100()
    time = step_time(step_of(config, mesh), rates)
    components = (time.compute_s, *time.exposed_s.values(), time.bubble_s, time.optimizer_s)
    assert min(components) >= 0 and time.total_s == pytest.approx(sum(components))
    assert time.bubble_s > 0 and time.exposed_s["ep"] > 0
    flops = 6 * layer_multiply_adds(config.model, 2048, 0) * config.model.num_layers * 131072
    assert time.total_s > 0.9 * flops / mesh.world_size / rates.products.peak


def test_the_bubble_has_no_rounding_errors():
    """A single rank never waits, so its bubble is exactly 0. The bubble of two ranks is not rounded
    away."""
    for m in (7, 11, 15):
        layers = Layers((Pass(7e8, 1),), (Pass(2.7 * 7e8, 3),))
        step = Step(((layers,),), m, {"pp": [(0,)]})
        assert played_time(step, a100(), make_schedule("1f1b", 1, 1, m)).bubble_s == 0.0
    layers = Layers((Pass(1e9, 1),), (Pass(2e9, 1),))
    step = Step(((layers,), (layers,)), 500, {"pp": [(0, 1)]})
    time = played_time(step, a100(), make_schedule("1f1b", 2, 1, 500))
    assert time.bubble_s == pytest.approx(time.compute_s / 500)


def test_overlap_hides_at_most_the_pass():
    operations = (Product(4096, 2048, 8192), Pass(1e9, 3))
    layers = Layers(operations, operations)
    groups = {"dp": [tuple(range(8))]}
    rates = a100()

    def dp_s(size_bytes: float, overlaps, repeats: int = 1) -> float:
        reduction = Reduction("dp", "all_reduce", size_bytes, overlaps, repeats)
        step = Step(((layers,),), 2, groups, reductions=(reduction,))
        return step_time(step, rates).exposed_s["dp"]

    backward = pass_time(operations, rates, groups).total_s
    assert dp_s(1e6, "backward") == 0.0
    assert dp_s(1e12, "backward") == pytest.approx(dp_s(1e12, "nothing") - backward)
    assert dp_s(1e9, "nothing", 2) == pytest.approx(2 * dp_s(1e9, "nothing"))


def test_epso_updates_fewer_parameters_than_so():
    mesh = Mesh(1, 4, 8, 1)
    weights = Weights(experts=800.0, others=320.0)
    assert updated_parameters("none", mesh, weights) == 1120
    assert updated_parameters("so", mesh, weights) == 280
    assert updated_parameters("epso", mesh, weights) == 210


def test_passes_over_gradients_have_another_rate_than_the_optimizer():
    rates = dataclasses.replace(a100(), memory=4e9, gradients=1e9)
    assert rates.update_s(UpdateBytes(optimizer=8e9, norm=1e9, gradients=3e9)) == 2 + 4
    assert dataclasses.replace(rates, gradients=None).update_s(UpdateBytes(8e9, 1e9, 3e9)) == 3
    # With states on the host, all gradients are checked and cleared three times as often here.
    assert UpdateBytes(8.0, 4.0, 6.0, 2.0).share(0.5, 2, 4) == UpdateBytes(4.0, 2.0, 18.0, 2.0)
    assert UpdateBytes(8.0, 4.0, 6.0, 2.0).share(1.0, 2, 4) == UpdateBytes(8.0, 4.0, 6.0, 2.0)


def test_new_memory_of_freed_gradients_and_parameters_takes_time():
    config, mesh = demo(dp=2, pp=1)
    for resident in ("all", "parameters", "cache"):
        optim = config.optim.model_copy(update={"sharding": "so", "resident": resident})
        step = step_of(config.model_copy(update={"optim": optim}), mesh)
        grads = 4 * step.microbatches if resident != "all" else 0
        params = 2 if resident == "cache" else 0
        size = (grads + params) * sum(stage_weights(config, mesh)[0])
        assert step.update.new == pytest.approx(size)
        times = (
            step_time(step, dataclasses.replace(a100(), new_memory=rate)).optimizer_s
            for rate in (1e9, math.inf)
        )
        assert next(times) - next(times) == pytest.approx(size / 1e9)


def test_missing_figures_are_named_and_needed_figures_are_demanded():
    missing = rates_of(load_machine("aurora"), "bf16", "aurora").missing
    assert "device.launch_s" in missing and "levels.3.latency_s" in missing
    assert step_time(Step(((),), 1, {}), a100()).missing == a100().missing
    with pytest.raises(ConfigError, match=r"x: device.products.fp16 is missing; add it with its"):
        rates_of(load_machine("aurora"), "fp16", "x")
    with pytest.raises(ConfigError, match=r"device.products.bf16 is missing"):
        rates_of(Machine(), "bf16")
    rates = rates_of(Machine(device=load_machine("aurora").device), "bf16")
    config, mesh = demo(dp=2)
    with pytest.raises(ConfigError, match="the machine file has no levels"):
        step_time(step_of(config, mesh), rates)


def test_batch_that_is_not_a_multiple_of_the_microbatches_is_refused():
    config, _ = demo(dp=1)
    with pytest.raises(ConfigError, match="train.global_batch_tokens = 131072 must be a multiple"):
        step_of(config, Mesh(1, 3, 1, 1))


def test_rate_of_a_product_halves_at_the_half_size():
    rates = ProductRates(100.0, 0.5, 64.0)
    large = rates.rate(1e12, 1e12, 1e12)
    assert large == pytest.approx(50.0)
    assert rates.rate(64, 1e12, 1e12) == pytest.approx(large / 2)


def test_launches_add_up_on_a_cpu():
    rates = dataclasses.replace(a100(), launches_queue=False, launch_s=1.0)
    operations: tuple[Operation, ...] = (Product(64, 64, 64), Product(64, 64, 64))
    without = pass_time(operations, dataclasses.replace(rates, launch_s=0.0), {}).total_s
    assert pass_time(operations, rates, {}).total_s == pytest.approx(2.0 + without)
