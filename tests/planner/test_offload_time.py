"""Tests of the time of a step with offloading on a machine."""

from __future__ import annotations

import itertools
import json

import pytest

from optimus.chunks.step_time import predict_step
from optimus.config import Config, make_config
from optimus.config.machine import Links, Machine, load_machine
from optimus.distributed.mesh import Mesh, make_mesh
from optimus.errors import ConfigError
from optimus.planner import offload_time
from optimus.planner.machine_plan import plan_on_machine
from optimus.planner.machine_rates import rates_of
from optimus.planner.offload_time import OffloadedStep, time_offloaded
from optimus.planner.segment_times import SegmentTimes
from optimus.planner.step_plan import StepTrace, plan_step
from optimus.planner.step_time import StepTime, played_time
from optimus.planner.topology import Topology
from optimus.planner.workload import step_of
from tests.kit.runs.tiny import DENSE, tiny_tree
from tests.planner.test_memory import WIDE

MANUAL = {"offload__mode": "manual", "offload__host_share": 1.0, "offload__early_adam": "off"}
SLOW = Links(to_device=2e8, to_host=4e8, host_adam=2e7, disk_read=1e9, disk_write=1e9)
UNLIMITED = Links(**dict.fromkeys(Links.model_fields, 1e30))


def machine(links: Links) -> Machine:
    return load_machine("h200").model_copy(update={"links": links})


def run_of(**settings) -> tuple[Config, Mesh]:
    sizes = {**WIDE, **DENSE, "optim__chunk_length": 40_000, "train__dtype": "bf16"}
    config = make_config(tiny_tree("d", "r", **(sizes | settings)))
    return config, make_mesh(config.parallel)


def timed(links: Links, **settings) -> OffloadedStep:
    return time_offloaded(*run_of(**settings), machine(links), "h200")


def plain_s(**settings) -> StepTime:
    """Return the time of a step with all states on the device. As with offloading, the step reduces
    gradients after each microbatch."""
    config, mesh = run_of(**settings, optim__resident="parameters")
    step, rates = step_of(config, mesh), rates_of(machine(UNLIMITED), "bf16")
    schedule = offload_time.schedule_of(config, mesh, step.microbatches)
    return played_time(step, rates, schedule)


@pytest.mark.parametrize("settings", [{}, {"optim__cache_chunks": 8}, {"offload__order": "layer"}])
def test_a_rank_alone_takes_the_time_that_the_simulation_of_its_copies_predicts(
    settings, monkeypatch
):
    """All chunks are on the host, so the device updates nothing. While the host updates, the device
    checks and clears gradients. The step time, and the busy time of each link and of the host,
    equal the times that `predict_step` computes from the copied bytes and the updated elements."""
    ranks, plan_ranks = [], offload_time._plan_ranks

    def spy(*arguments):
        ranks.extend(plan_ranks(*arguments))
        return ranks

    monkeypatch.setattr(offload_time, "_plan_ranks", spy)
    step = timed(SLOW, **MANUAL, **settings)
    predicted = predict_step(ranks[0].work, SLOW)
    passes_s = rates_of(machine(SLOW), "bf16").update_s(step.step.update)
    assert step.step.update.optimizer == step.step.update.norm == 0 < passes_s
    assert step.time.optimizer_s == pytest.approx(passes_s)
    assert step.time.total_s == pytest.approx(predicted.step)
    assert step.time.compute_s == pytest.approx(predicted.compute)
    assert step.time.offload_s > step.time.compute_s
    assert step.seconds["to device"] == pytest.approx(predicted.to_device)
    assert step.seconds["to host"] == pytest.approx(predicted.to_host)
    assert step.seconds["host Adam"] == pytest.approx(predicted.host_adam)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"parallel__pp": 2, "parallel__schedule": "1f1b"},
        {"parallel__pp": 2, "parallel__schedule": "zb-h1"},
        {"parallel__pp": 2, "parallel__dp": 2, "optim__sharding": "none"},
    ],
)
def test_with_unlimited_links_a_step_takes_the_time_without_offloading(settings):
    """With offloading, the host updates all chunks. In this test, the updates take no time on the
    host. The step is therefore shorter by the time of the update on the device. The device only
    checks and clears gradients."""
    step, plain = timed(UNLIMITED, **MANUAL, **settings), plain_s(**settings)
    assert step.time.offload_s == pytest.approx(0, abs=1e-12)
    assert step.time.compute_s == pytest.approx(plain.compute_s)
    assert step.time.bubble_s == pytest.approx(plain.bubble_s)
    if not settings.get("parallel__dp"):  # a collective of each chunk has a latency
        passes_s = step.time.optimizer_s - plain.optimizer_s
        assert step.time.total_s == pytest.approx(plain.total_s + passes_s)


def test_ranks_that_share_chunks_gather_each_copy():
    """Each of two ranks copies its half of a chunk to the device, and updates this half on the
    host. The ranks then gather the whole chunk on the devices."""
    alone, both = (
        timed(SLOW, **MANUAL),
        timed(
            SLOW, **MANUAL, parallel__dp=2, optim__sharding="so", train__global_batch_tokens=8 * 256
        ),
    )
    assert both.seconds["to device"] == pytest.approx(alone.seconds["to device"] / 2, rel=0.02)
    assert both.seconds["host Adam"] == pytest.approx(alone.seconds["host Adam"] / 2, rel=0.02)
    gathers = [r for r in both.step.reductions if r.name == "all_gather"]
    assert not gathers  # at the end of a step, only chunks on the device are gathered
    config, mesh = run_of(parallel__dp=2, optim__sharding="so", train__global_batch_tokens=8 * 256)
    times = SegmentTimes(config, mesh, rates_of(machine(SLOW), "bf16"))
    assert both.time.exposed_s["dp"] > 1.2 * times.total_s(both.step.reductions) > 0


def test_a_pipeline_waits_for_its_slowest_rank():
    """The spans of a resource (a link or the host) of a rank do not overlap. The step ends when the
    slowest rank ends, and faster copies to the device make the step shorter."""
    step = timed(SLOW, **MANUAL, parallel__pp=2)
    assert step.time.total_s == pytest.approx(step.played.end)
    assert len(step.spans) == 2
    for spans in step.spans:
        assert all(0 <= span.start <= span.end for span in spans)
        for resource in step.seconds:
            of_resource = sorted(span[2:] for span in spans if span.resource == resource)
            pairs = itertools.pairwise(of_resource)
            assert all(before[1] <= after[0] + 1e-12 for before, after in pairs)
    faster = SLOW.model_copy(update={"to_device": 4e8})
    assert timed(faster, **MANUAL, parallel__pp=2).time.total_s < step.time.total_s


def test_automatic_placement_on_a_machine_is_within_its_limits():
    """The limits of device and host memory of a rank come from the machine file, as do the rates by
    which the placement is chosen. The planned step time is the time of the chosen placement."""
    config, mesh = run_of(offload__mode="auto")
    small = machine(SLOW)
    assert small.device is not None
    assert time_offloaded(config, mesh, small, "h200").seconds == {}  # all states fit
    figure = small.device.memory_bytes
    memory = figure.model_copy(update={"value": 7.5e6})
    device = small.device.model_copy(update={"memory_bytes": memory})
    host = memory.model_copy(update={"value": 8 * 4e7})
    small = small.model_copy(update={"device": device, "host_memory_bytes": host})
    placements = offload_time.decide_placements(config, mesh, small, "h200")
    (decision,) = placements.decisions
    assert decision.memory.device <= 7.5e6 and decision.memory.host <= 4e7
    step = time_offloaded(config, mesh, small, "h200", placements=placements)
    assert decision.placement is not None
    assert step.time.total_s == pytest.approx(decision.placement.step_s, rel=1e-3)
    figures = plan_step(config, mesh, small, "h200")
    assert figures["step_s"] == pytest.approx(step.time.total_s)
    assert figures["offload_s"] == step.time.offload_s > 0
    assert "links.to_device" not in figures["missing"]


def test_hosts_in_two_groups_slow_the_collectives_of_offloaded_states(tmp_path):
    """If the two data ranks are in different domains of 8 ranks, not in the same domain, the
    gathers and reductions of chunks take more than three times as long."""
    sharded = {"parallel__dp": 2, "optim__sharding": "so", "train__global_batch_tokens": 8 * 256}
    near, far = (Topology(1, groups, (8,)) for groups in ((0, 0), (0, 1)))
    run = *run_of(**MANUAL, **sharded), machine(UNLIMITED), "h200"
    plain, same, apart = (time_offloaded(*run, topology=each) for each in (None, near, far))
    assert same.time == plain.time
    # 370 GB/s and a latency of 3.4 us within the domain, 37 GB/s and 9.6 us between domains: more
    # than 3 times as long for the gathers of chunks, too.
    assert apart.time.exposed_s["dp"] > 3.2 * plain.time.exposed_s["dp"]
    assert plan_step(*run, topology=far)["step_s"] == apart.time.total_s
    StepTrace.of(*run, topology=far).write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ends = (event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert max(ends) == pytest.approx(apart.played.end * 1e6, rel=1e-5)


def test_hosts_in_two_groups_change_the_automatic_placement():
    """If the two hosts are in different groups, collectives take longer than the updates on the
    host. Early updates then do not make the step shorter, so the placement has no early updates."""
    sharded = {"parallel__dp": 2, "optim__sharding": "so", "train__global_batch_tokens": 8 * 256}
    settings = {"offload__mode": "auto", "offload__device_memory": "7500000"}
    run = *run_of(**settings, **sharded), load_machine("h200"), "h200"
    near, far = (Topology(1, groups, (8,)) for groups in ((0, 0), (0, 1)))
    placements = [offload_time.decide_placements(*run, topology=each) for each in (near, far)]
    early = [each.decisions[0].config.offload.early_adam for each in placements]
    assert early == ["auto", "off"]
    steps = [time_offloaded(*run, topology=far, placements=each) for each in placements]
    assert time_offloaded(*run, topology=far).spans == steps[1].spans != steps[0].spans
    planned = plan_on_machine(*run[:2], "h200", topology=far)
    assert planned["step"]["step_s"] == steps[1].time.total_s
    assert planned["placements"] == [str(placements[1].decisions[0])]


def test_trace_has_a_row_for_the_copies_and_updates_of_each_rank(tmp_path):
    config, mesh = run_of(**MANUAL, parallel__pp=2)
    StepTrace.of(config, mesh, machine(SLOW), "h200").write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    for resource in ("to device", "to host", "host Adam"):
        (process,) = (pid for pid, name in names.items() if name == f"planned {resource}")
        work = [e for e in events if e["pid"] == process and e["ph"] == "X"]
        assert {e["tid"] for e in work} == {0, 1}
        assert all(e["name"].startswith(f"{resource} chunk ") for e in work)


def test_a_machine_without_links_is_refused():
    config, mesh = run_of(**MANUAL)
    without = load_machine("h100")
    with pytest.raises(ConfigError, match="offload.mode = 'manual': the file of h100 has no table"):
        time_offloaded(config, mesh, without, "h100")
    links = Links(to_device=1e9, to_host=1e9)
    missing = time_offloaded(config, mesh, machine(links), "h200").time.missing
    assert "links.host_adam" in missing and "links.disk_read" not in missing
