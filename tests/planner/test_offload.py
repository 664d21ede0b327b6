"""Tests of offload.mode = "auto": placements fit, and train to the bits of other placements."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from optimus.checkpoint.slices import writer_in_paper
from optimus.chunks.placement import TierBytes
from optimus.config import OffloadConfig, make_config
from optimus.config.machine import Links, load_machine
from optimus.data.batch import plan_batch
from optimus.distributed.mesh import Coordinate, make_mesh
from optimus.errors import ConfigError
from optimus.planner import memory as memory_module
from optimus.planner import offload as offload_module
from optimus.planner import placement_search as search_module
from optimus.planner.memory import rank_memory
from optimus.planner.offload import check_limits, host_limit, largest_rank
from optimus.planner.offload_time import decide_placements
from optimus.planner.placement_search import (
    Decision,
    PlacementSearch,
    RankLimits,
    decide_placement,
    decide_together,
    does_not_fit,
)
from optimus.rank.states import plan_rank
from tests.kit.runs.results import assert_same_run
from tests.kit.runs.tiny import DENSE, tiny_tree
from tests.kit.runs.training import printed_by, run_and_catch
from tests.planner.test_memory import WIDE, measure

FIRST = Coordinate(0, 0, 0, 0)
LINKS = Links(to_device=1e9, to_host=1e9, host_adam=1e8, flops=1e10, memory=1e10)
HOST = 1 << 30
AUTO = {"offload__mode": "auto"}


def decide(
    device: int,
    host: int = HOST,
    microbatches: int = 4,
    device_type: str = "cpu",
    links: Links = LINKS,
    disk: int = 0,
    **settings,
) -> Decision:
    config = make_config(tiny_tree("d", "r", **{**WIDE, **AUTO, **settings}))
    mesh = make_mesh(config.parallel)
    limits = RankLimits(device, host, links, disk)
    return decide_placement(config, mesh, FIRST, microbatches, limits, device_type)


def needed(**settings) -> int:
    """Return the bytes of device memory that a run without offloading needs."""
    config = make_config(tiny_tree("d", "r", **{**WIDE, **settings}))
    return rank_memory(config, make_mesh(config.parallel), FIRST, 4, "cpu").device


def test_nothing_is_offloaded_where_all_fits() -> None:
    decision = decide(needed())
    assert decision.config.offload.mode == "off" and decision.time is None
    assert decision.memory.device == needed()
    decision = decide(needed() - 1)
    assert decision.config.offload.mode == "manual" and decision.config.offload.host_share > 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="one-rank"),
        pytest.param({"parallel__pp": 2}, id="1f1b"),
        pytest.param({"parallel__pp": 2, "parallel__schedule": "gpipe"}, id="gpipe"),
        pytest.param({"parallel__pp": 2, "parallel__schedule": "zb-h1"}, id="zb-h1"),
        pytest.param({"optim__sharding": "so", "optim__resident": "cache"}, id="cache"),
        pytest.param(DENSE | {"offload__disk": ".", "optim__chunk_length": 20_000}, id="disk"),
    ],
)
def test_unlisted_microbatches_change_no_decision(settings, device, monkeypatch) -> None:
    """A plan that lists only some of 40 microbatches has the memory, the placement and nearly the
    time of a plan that lists all of them. The disk writes for longer than the listed microbatches
    compute."""
    links = LINKS.model_copy(update={"disk_write": 1e6, "disk_read": 1e9})
    has_disk, schedule = "offload__disk" in settings, settings.get("parallel__schedule")
    usable = 1.0 if device == "cpu" else 0.95  # without `reserve_of`
    config = make_config(tiny_tree("d", "r", **{**WIDE, **AUTO, **settings}))
    rank = config, make_mesh(config.parallel), FIRST, 40, device
    plain = config.model_copy(update={"offload": OffloadConfig()})
    decisions, memory, works = [], [], []
    for lists_all in (False, True):
        if lists_all:
            for module in (memory_module, search_module):
                monkeypatch.setattr(module, "planned_microbatches", lambda *arguments: 40)
        memory.append(rank_memory(plain, *rank[1:]))
        limits = RankLimits(
            int((0.98 if schedule == "gpipe" else 0.8) * memory[-1].device / usable),
            5_500_000 if has_disk else HOST,
            links,
            1 << 40 if has_disk else 0,
        )
        decisions.append(decide_placement(*rank[:-1], limits, device))
        of_search = PlacementSearch(*rank[:-1], limits, device)._workloads
        works.append([(work.device_bytes, work.idle_s) for work in of_search])
    assert memory[0] == memory[1] and works[0] == [pytest.approx(work) for work in works[1]]
    short, whole = decisions
    assert short.config == whole.config and short.memory == whole.memory
    assert short.placement is not None and whole.placement is not None
    assert (short.placement.num_disk > 0) == has_disk
    assert short.placement.step_s == pytest.approx(whole.placement.step_s, rel=1e-3)


def test_space_is_left_for_unbalanced_experts() -> None:
    layout = {"parallel__ep": 2, "parallel__ep_dispatch": "alltoall"}
    device = needed(**layout)
    equal = decide(device, **layout, offload__expert_imbalance=1.0)
    assert equal.memory.device == device and equal.config.offload.mode == "off"
    default = decide(device, **layout)
    assert default.memory.device <= device and default.config.offload.mode == "manual"
    config = make_config(tiny_tree("d", "r", **{**WIDE, **layout}))
    rank = config, make_mesh(config.parallel), FIRST, 4, "cpu"
    unbalanced = rank_memory(*rank, imbalance=1.5)
    assert decide(unbalanced.device, **layout).memory == unbalanced
    # A rank cannot have more rows than all ranks together.
    assert rank_memory(*rank, imbalance=9.0) == rank_memory(*rank, imbalance=2.0)


ZB = {"parallel__pp": 2, "parallel__schedule": "zb-h1"}
CACHE = {"parallel__dp": 2, "optim__sharding": "so", "optim__resident": "cache"}


@pytest.mark.parametrize(
    "settings", [{}, {"train__deterministic": True, "train__dtype": "bf16"}, ZB, CACHE]
)
def test_memory_is_limited_down_to_the_smallest_limit(settings: dict) -> None:
    with pytest.raises(ConfigError) as refused:
        decide(1000, **settings)
    text = str(refused.value)
    least = int(text.split("at least ")[1].split(" byte")[0].replace(",", ""))
    assert f"{least - 1000:,} bytes more than now" in text and "\n" not in text
    for limit in (least, (least + needed(**settings)) // 2):
        decision = decide(limit, **settings)
        assert decision.memory.device <= limit
        share = decision.config.offload.host_share
        assert 0 < share < 1
    with pytest.raises(ConfigError, match="1 byte more than now"):
        decide(least - 1, **settings)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_device_computes_at_the_rate_of_the_dtype_of_the_run(dtype: str) -> None:
    """If no other rates are given, the FLOP rates in the links file determine the times of matrix
    products."""
    settings = {"train__dtype": dtype, "offload__early_adam": "off"}
    limit = needed(train__dtype=dtype) * 6 // 10

    def compute_s(links: Links) -> float:
        time = decide(limit, links=links, **settings).time
        assert time is not None
        return time.compute

    slow, fast = LINKS, LINKS.model_copy(update={"flops": 1e13})
    expected = compute_s(slow if dtype == "fp32" else fast)
    assert compute_s(fast.model_copy(update={"flops_fp32": 1e10})) == expected
    assert compute_s(slow) > 1.01 * compute_s(fast)


def test_a_plan_for_an_accelerator_leaves_memory_to_its_allocator() -> None:
    limit = needed() * 20 // 19 + 1
    whole, offloaded = decide(limit, device_type="cuda"), decide(limit - 20, device_type="cuda")
    assert (whole.config.offload.mode, offloaded.config.offload.mode) == ("off", "manual")
    for decision in (whole, offloaded):
        assert decision.reserve == decision.limits.device // 20
        assert "(reserve for the allocator's fragmentation: " in str(decision)
    assert "reserve" not in str(decide(limit))


def test_host_memory_is_limited() -> None:
    decision = decide(needed() * 6 // 10)
    used = decision.memory.host
    assert used > 0
    with pytest.raises(ConfigError, match=r"offload\.host_memory must be at least [\d,]+ bytes"):
        decide(needed() * 6 // 10, host=used // 4)


def test_the_limit_holds_in_a_step(ranks) -> None:
    limit = needed() * 6 // 10
    decision = decide(limit)
    chosen = {f"offload__{key}": value for key, value in decision.config.offload if value}
    chosen |= {f"optim__{key}": getattr(decision.config.optim, key) for key in SIZES}
    tree = tiny_tree("d", "r", **{**WIDE, **chosen})
    ((_, planned, _, most),) = ranks(1, measure, tree, start_world=False)
    assert 0.9 * planned < most <= planned == decision.memory.device <= limit


SIZES = ("cache_chunks", "chunk_length")


SLOW_UPLOAD = Links(to_device=1e8, to_host=1e11, host_adam=1e10, flops=1e14, memory=1e14)
BY_LAYER = {"links": ""}
PIPELINE = DENSE | {
    "model__num_layers": 4,
    "model__hidden_size": 128,
    "model__intermediate_size": 192,
    "optim__chunk_length": 20_000,
    "recompute__modules": ["block"],
    "parallel__pp": 2,
}
"""Settings of a model with few activations, so that the activations of all microbatches fit."""


def test_ranks_of_a_pipeline_agree_on_the_order_with_the_shortest_step() -> None:
    """With few cache slots, the order "microbatch" copies each chunk to the device for each
    microbatch, so the order "layer" can be faster. All ranks must choose the order in which the
    step of the slowest rank is shortest."""
    config = make_config(tiny_tree("d", "r", **PIPELINE, **AUTO))
    mesh = make_mesh(config.parallel)
    orders = set()
    for limit in (3_200_000, 3_400_000):
        limits = RankLimits(limit, HOST, SLOW_UPLOAD)
        searches = [
            PlacementSearch(config, mesh, Coordinate(pp, 0, 0, 0), 8, limits, "cpu")
            for pp in range(2)
        ]
        decisions = decide_together(searches)
        of_orders = decisions[0].of_orders
        best = min(of_orders, key=of_orders.__getitem__)
        orders.add(best)
        assert {decision.config.offload.order for decision in decisions} == {best}
        slowest = max(s.seconds(d) for s, d in zip(searches, decisions, strict=True))
        assert of_orders[best] == pytest.approx(slowest)
        for search, decision in zip(searches, decisions, strict=True):
            shortest = search.seconds(search.decide("microbatch"))
            assert decision.in_cache_s is None or shortest <= decision.in_cache_s
            assert f"'layer': {of_orders['layer']:.3g} s" in str(decision)
    assert orders == {"layer", "microbatch"}


@pytest.mark.parametrize(
    ("size", "capped", "printed"),
    [
        (1, {"device_memory": "650000"}, "of the chunks on the host, "),
        (2, {"device_memory": "650000"}, "of the chunks on the host, "),
        (1, {"device_memory": "750000", "host_memory": "1150000"}, "of these on disk, "),
        (2, {"device_memory": "3200000"} | BY_LAYER, "order of microbatches 'layer'"),
    ],
)
def test_auto_trains_to_the_same_bits(
    ranks, tiny_data, tmp_path, size: int, capped: dict, printed: str
) -> None:
    run = {"train__max_steps": 4, "optim__chunk_length": 4000, "optim__sharding": "so"}
    links = LINKS
    if "host_memory" in capped:
        run |= DENSE | {"model__num_layers": 6}
        capped = {**capped, "disk": str(tmp_path), "links": str(tmp_path / "links.toml")}
    elif "links" in capped:
        run |= PIPELINE
        links, capped = SLOW_UPLOAD, {**capped, "links": str(tmp_path / "links.toml")}
    lines = [f"{name} = {rate}" for name, rate in links if rate is not None]
    (tmp_path / "links.toml").write_text("\n".join(["[links]", *lines]))
    plain, auto = tmp_path / "plain", tmp_path / "auto"
    alone = {"start_world": False, "timeout_s": 120}
    ranks(size, printed_by, tiny_tree(tiny_data, plain, **run), **alone)
    settings = {**run, **AUTO, **{f"offload__{key}": value for key, value in capped.items()}}
    log = ranks(size, printed_by, tiny_tree(tiny_data, auto, **settings), **alone)[0]
    assert printed in log
    assert ("links.flops_fp32 is not known" in log) == ("links" in capped)
    assert not list(tmp_path.glob("optimus-states*"))
    assert_same_run(plain, auto)


def test_a_run_that_does_not_fit_is_refused_before_its_first_step(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path / "run", **AUTO, offload__device_memory="1kB")
    tree["offload"]["device_memory"] = "1000"
    ((status, message),) = ranks(1, run_and_catch, tree, start_world=False)
    assert status == 2
    assert message.startswith("offload.mode = 'auto': the run does not fit: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("early", ["auto", "on"])
def test_early_updates_use_host_memory_that_is_left_over(early: str) -> None:
    """Early updates write to spare buffers in host memory. With "auto", spare buffers use at most
    half of the host memory that the states leave free, so a placement that fits without spare
    buffers still fits. With "on", all chunks on the host need spare buffers."""
    slow = LINKS.model_copy(update={"host_adam": 1e6})
    limit, settings = needed() * 6 // 10, {"train__dtype": "fp32", "links": slow}
    late = decide(limit, offload__early_adam="off", **settings).memory
    spare = late.states_on_host * 12 // 16
    for host in (late.host, late.host + spare, late.host + 2 * spare + 100_000):
        capped = {"offload__host_memory": str(host), "offload__early_adam": early, **settings}
        if early == "on" and host < late.host + spare // 2:
            with pytest.raises(ConfigError, match="offload.host_memory must be at least"):
                decide(limit, host, **capped)
            continue
        memory = decide(limit, host, **capped).memory
        assert memory.host <= host
        assert early == "on" or memory.host - late.host <= (host - late.host) // 2
        if host > late.host + 2 * spare:
            assert memory.host > late.host + spare // 2
    fast = decide(limit, host, offload__host_memory=str(host), **settings | {"links": LINKS})
    assert fast.config.offload.early_adam == "off" and not fast.placement.updates_early


@pytest.mark.parametrize("copies", [{}, {"checkpoint__async_save": True}])
def test_states_are_on_disk_where_the_host_is_too_small(tmp_path, copies: dict) -> None:
    """If `host_memory` is too small for all states, some states are placed on disk, and the planned
    bytes of each tier are within the limits. A limit that is one byte too small is refused. Chunks
    are small, because updates of states on disk need four buffers of the size of a chunk."""
    settings = {"train__dtype": "bf16", "offload__disk": str(tmp_path), **copies}
    settings |= DENSE | {"optim__chunk_length": 20_000}
    limit = needed(train__dtype="bf16", **DENSE) * 7 // 10
    on_host = decide(limit, disk=1 << 40, **settings)
    assert on_host.config.offload.disk_share == 0 and on_host.config.offload.disk == ""
    with pytest.raises(ConfigError) as refused:
        decide(limit, 1000, disk=1 << 40, **settings)
    text = str(refused.value)
    least = int(text.split("host_memory must be at least ")[1].split(" byte")[0].replace(",", ""))
    assert least < on_host.memory.host * 9 // 10
    for host in (least, (least + on_host.memory.host) // 2):
        decision = decide(limit, host, disk=1 << 40, **settings)
        memory, offload = decision.memory, decision.config.offload
        assert offload.disk_share > 0 and memory.device <= limit and memory.host <= host
        assert memory.disk > 0 and f"{memory.disk / 1e9:.4g} GB on disk" in str(decision)
        exact = decide(limit, host, disk=memory.disk, **settings)
        assert exact.memory.disk <= memory.disk
    with pytest.raises(ConfigError, match="1 byte more than now"):
        decide(limit, least - 1, disk=1 << 40, **settings)
    with pytest.raises(ConfigError, match="set offload.disk to a directory"):
        decide(limit, least, **settings | {"offload__disk": ""})
    with pytest.raises(ConfigError, match="make more than 0 bytes available in offload.disk"):
        decide(limit, least, **settings)
    with pytest.raises(ConfigError, match="make more than 1,000,000 bytes available in"):
        decide(limit, least, disk=1_000_000, **settings)


def test_limits_apply_to_manual_placements(ranks, tiny_data, tmp_path) -> None:
    manual = {"offload__mode": "manual", "offload__host_share": 0.5}
    tree = tiny_tree(tiny_data, tmp_path / "run", **manual, offload__host_memory="1000")
    ((status, message),) = ranks(1, run_and_catch, tree, start_world=False)
    assert status == 2 and "offload.host_memory must be at least" in message
    tree = tiny_tree(tiny_data, tmp_path / "run", **manual)
    ((status, message),) = ranks(1, run_with_little_memory, tree, start_world=False)
    assert status == 2 and "offload.host_memory must be at least" in message


def test_limits_of_a_manual_placement_are_exact() -> None:
    manual = {"offload__mode": "manual", "offload__host_share": 0.5}
    config = make_config(tiny_tree("d", "r", **WIDE, **manual))
    memory = rank_memory(config, make_mesh(config.parallel), FIRST, 4, "cpu")

    def check(device: int, host: int) -> None:
        limits = RankLimits(device, host, LINKS)
        check_limits(Decision(config, memory, limits, reserve=0), "cpu")

    check(memory.device, memory.host)
    for lacks in (1, 0), (0, 1):
        with pytest.raises(ConfigError, match=r", 1 byte more than now"):
            check(memory.device - lacks[0], memory.host - lacks[1])


def run_with_little_memory(tree: dict) -> tuple[int, str]:
    """Train on a simulated machine with 100 kB of memory. Return the exit status and the error
    message."""
    with mock.patch.object(offload_module, "usable_memory", lambda: 100_000):
        return run_and_catch(tree)


def test_host_memory_is_left_to_python() -> None:
    assert host_limit(8 << 30, 2) == (4 << 30) * 3 // 4
    assert host_limit(128 << 30, 1) == (126 << 30) - (128 << 30) // 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offload__device_memory": "20 bananas", **AUTO}, "must be a size such as"),
        ({"offload__device_memory": 0, **AUTO}, "must be at least 1 byte"),
        ({"offload__device_memory": "20GB"}, "has no meaning with offload.mode = 'off'"),
        ({"offload__host_share": 0.5, **AUTO}, "offload.mode = 'auto' chooses this value"),
        ({"offload__order": "layer", **AUTO}, "offload.mode = 'auto' chooses this value"),
        ({"optim__cache_chunks": 4, **AUTO}, "offload.mode = 'auto' chooses this value"),
        ({"offload__disk_share": 0.5, **AUTO}, "offload.mode = 'auto' chooses this value"),
        ({"offload__disk_memory": "1GB", **AUTO}, "offload.disk_memory = '1GB' needs offload.disk"),
    ],
)
def test_wrong_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(tiny_tree("d", "r", **settings))


@pytest.mark.parametrize("machine", ["h200", ""])
def test_a_run_decides_as_the_plan_of_its_machine(machine: str) -> None:
    """A run with `train.machine` and a plan for the same machine choose the same placement and
    print the same line. A run without `train.machine` uses measured rates, and prints another
    line."""
    settings = {**WIDE, **AUTO, "train__dtype": "bf16", "parallel__dp": 2}
    limit = needed(train__dtype="bf16") * 6 // 10
    limits = {"offload__device_memory": str(limit), "offload__host_memory": str(HOST)}
    config = make_config(tiny_tree("d", "r", **settings, **limits, train__machine=machine))
    mesh, lines = make_mesh(config.parallel), list[str]()
    groups = mock.Mock(mesh=mesh, coordinate=FIRST, everyone=mock.Mock(rank=0))
    plan = decide_placements(config, mesh, load_machine("h200"), "h200")
    with (
        mock.patch.object(offload_module, "greatest", lambda value, *_: value),
        mock.patch.object(offload_module, "broadcast_object", lambda value, *_: value),
        mock.patch.object(offload_module, "device_memory", lambda _: 1 << 37),
        mock.patch.object(offload_module, "usable_memory", lambda: 1 << 40),
        mock.patch.object(offload_module, "limit_device_memory"),
        mock.patch.object(offload_module, "find_links", lambda *_: LINKS),
    ):
        microbatches = plan_batch(config.train, mesh.num_data_ranks).microbatches_per_rank
        run = config, groups, microbatches, torch.device("cuda")
        chosen = offload_module.autotune_placement(*run, 8, lines.append)
    planned = plan.decisions[0]
    assert planned.config.offload.host_share > 0
    assert lines[-1].endswith(str(planned)) == bool(machine)
    assert not machine or chosen == planned.config


def test_the_rank_with_the_most_memory_decides() -> None:
    odd = {"parallel__tp": 2, "parallel__dp": 2, "model__vocab_size": 321}
    config = make_config(tiny_tree("d", "r", **AUTO, **odd, checkpoint__scatter="paper"))
    mesh = make_mesh(config.parallel)
    largest = largest_rank(config, mesh, 0)
    assert largest == Coordinate(0, writer_in_paper(mesh, largest), 0, 1)
    sizes = [plan_rank(config, mesh, Coordinate(0, 0, 0, tp)).engine.state_bytes() for tp in (0, 1)]
    assert sizes[0]["total"] < sizes[1]["total"]


def test_the_dtype_of_gradients_does_not_depend_on_the_decision() -> None:
    bf16 = {"train__dtype": "bf16"}
    for limit in (needed(**bf16) * 2, needed(**bf16) * 7 // 10):
        decision = decide(limit, **bf16)
        assert decision.config.offload.grad_dtype == "bf16"


def test_compiled_blocks_are_refused_only_if_states_must_be_offloaded() -> None:
    compiled = {"train__compile": True}
    assert decide(needed(), **compiled).config.offload.mode == "off"
    with pytest.raises(ConfigError, match=r"^offload.mode = 'auto': the device lacks .* compile"):
        decide(needed() // 2, **compiled)


@pytest.mark.parametrize(
    ("settings", "needs", "remedies"),
    [
        (
            {"train__microbatch_size": 2},
            (2000, 0),
            "set a smaller train.microbatch_size, set recompute.modules = ['block'], "
            "set a smaller optim.chunk_length, or use more ranks",
        ),
        (
            {"recompute__modules": ["block"], "offload__device_memory": "1000"},
            (2000, 0),
            "set a larger offload.device_memory, set a smaller optim.chunk_length, or use more "
            "ranks",
        ),
        (
            {},
            (0, 2000),
            "set offload.disk to a directory on a local disk, or use more ranks",
        ),
    ],
)
def test_remedies_change_the_memory_that_is_missing(settings, needs, remedies) -> None:
    config = make_config(tiny_tree("d", "r", **AUTO, **settings))
    error = does_not_fit("auto", config, TierBytes(*needs), RankLimits(1000, 1000, LINKS), "cpu")
    assert str(error).split("; ")[-1] == remedies
