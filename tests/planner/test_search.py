"""Tests of the search over layouts. The result of the search equals the result of a separate, full
evaluation of each layout."""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import logging
import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest

from optimus.cli import main
from optimus.config import Config, load_config, make_config
from optimus.config.load import dump_toml
from optimus.config.machine import load_machine
from optimus.data.batch import plan_batch
from optimus.distributed.mesh import Coordinate, make_mesh
from optimus.errors import ConfigError, OptimusError
from optimus.model.flops import flops_per_token, layer_multiply_adds
from optimus.parallel.divisible import check_divisible
from optimus.planner import search as search_module
from optimus.planner import search_report
from optimus.planner.layouts import (
    RECOMPUTE,
    RECOMPUTE_EXPERTS,
    SCHEDULES,
    STATES,
    Layout,
    LayoutChecks,
    Space,
    layout_changes,
    layout_of,
    override,
    reason_of,
    space_of,
)
from optimus.planner.machine_plan import needed_bytes
from optimus.planner.machine_rates import rates_of
from optimus.planner.memory import rank_memory
from optimus.planner.placement_search import with_offload
from optimus.planner.search import (
    _ONE_RANK,
    _SLOWER,
    Evaluation,
    _changed_layouts,
    nearest_fitting,
    search,
)
from optimus.planner.search_memory import LayoutMemory
from optimus.planner.search_offload import (
    TOO_MANY_ACTIVATIONS,
    TOO_MANY_STATES,
    OffloadedLayouts,
)
from optimus.planner.search_time import ComputeBound, StepSeconds
from optimus.planner.states import check_slots, stages_of
from optimus.planner.step_time import step_time
from optimus.planner.workload import step_of
from optimus.rank.profile import Profiled, profile_stages, profile_work
from tests.kit.runs.tiny import CONTEXT, DENSE, tiny_config, tiny_tree
from tests.launch.test_spawn import write_config
from tests.planner.test_plan import CONFIGS

WORLD = 8
SPACE = Space(
    pp=(1, 2, 3, 4),
    ep=(1, 2, 4),
    tp=(1, 2),
    schedules=(("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)),
    microbatch_sizes=(1, 2, 4),
    recompute=((), ("block",)),
    states=(("none", "all"), ("none", "cache"), ("so", "parameters"), ("epso", "cache")),
)
BASE = {
    "train__deterministic": False,
    "train__global_batch_tokens": 32 * CONTEXT,
    "optim__chunk_length": 3000,
    "model__num_layers": 4,
}


def memory_alone(config: Config, layout: Layout, world_size: int, profiled: Profiled) -> int | None:
    """Return the memory of the fullest rank of a layout in bytes, computed by the functions that
    plan a single configuration, rank by rank. Return None if these functions refuse the layout."""
    if layout.pp == 1 and (layout.schedule, layout.virtual_stages) != ("1f1b", 1):
        return None  # the same run as with 1f1b
    try:
        checked = make_config(layout.apply(config).model_dump(exclude_none=True))
        mesh = make_mesh(checked.parallel, world_size)
        check_divisible(checked, mesh)
        microbatches = plan_batch(checked.train, mesh.num_data_ranks).microbatches_per_rank
        stages_of(checked, mesh)
        check_slots(checked, mesh)
    except ConfigError:
        return None
    ranks = [Coordinate(pp, 0, 0, tp) for pp in range(mesh.pp) for tp in range(mesh.tp)]
    profiles = [profile_stages(checked, mesh, rank, profiled) for rank in ranks]
    return max(
        rank_memory(checked, mesh, rank, microbatches, profiles=of_rank).device
        for rank, of_rank in zip(ranks, profiles, strict=True)
    )


RATES = rates_of(load_machine("a100-80"), "bf16")


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({"parallel__ep_dispatch": "alltoall", "model__router": "uniform"}, 6),
        (
            {
                "optim__cache_chunks": 12,
                "optim__resident": "cache",
                "optim__sharding": "so",
                "train__deterministic": True,
                "model__num_experts": [0, 4, 4, 0],
                "model__dense_intermediate_size": 64,
            },
            4,
        ),
        ({"model__tie_embeddings": True, "optim__grad_dtype": "bf16", "train__dtype": "bf16"}, 6),
        (DENSE | {"model__vocab_size": 259, "optim__overlap": False}, 6),
    ],
    ids=["moe", "cache", "bf16", "dense"],
)
def test_memory_of_random_layouts_is_that_of_the_fullest_rank(settings, number):
    """For random layouts, whose schedule, recomputation, sharding and residency vary, the search
    computes the memory of the fullest rank exactly to the byte."""
    config = tiny_config("d", "r", **(BASE | settings))
    checks, profiled = LayoutChecks(config), Profiled()
    memory = LayoutMemory(config, checks)
    is_moe = bool(config.model.sparse_layers)
    space = dataclasses.replace(
        SPACE,
        schedules=SCHEDULES[:4],
        recompute=RECOMPUTE + (RECOMPUTE_EXPERTS if is_moe else ()),
        states=STATES,
    )
    layouts = [*space.layouts(WORLD)]
    random.Random(len(settings)).shuffle(layouts)
    seen: list[Layout] = []
    for layout in layouts:
        if len(seen) == number:
            break
        if checks.refusal_of_mesh(layout) or checks.refusal(layout):
            continue
        expected = memory_alone(config, layout, WORLD, profiled)
        if expected is not None:
            seen.append(layout)
            assert memory(layout) == expected, layout
    assert len(seen) == number and len({layout.schedule for layout in seen}) > 1


def test_states_of_a_layout_do_not_depend_on_earlier_layouts():
    """The search caches the bytes of states. With sequence parallelism and tp > 1, the gradients of
    norms have another process group, so a cached value for tp = 1 must not be used for tp = 2."""
    settings = ["parallel.tp=2", "parallel.sequence_parallel=true", "optim.chunk_length=1000000"]
    config = load_config(CONFIGS / "run" / "mula-7b-a1b.toml", settings)
    checks, layout = LayoutChecks(config), layout_of(config, 24)
    later, first = LayoutMemory(config, checks), LayoutMemory(config, checks)
    later._bytes_of_states(layout._replace(tp=1, dp=2 * layout.dp))
    assert later._bytes_of_states(layout) == first._bytes_of_states(layout)


def test_search_equals_the_evaluation_of_each_layout():
    config = tiny_config("d", "r", **BASE, train__dtype="bf16")
    checks, profiled = LayoutChecks(config), Profiled()
    space = Space(
        pp=(1, 2, 3),
        ep=(1, 2),
        tp=(1,),
        schedules=SPACE.schedules,
        microbatch_sizes=(1, 2),
        recompute=(("attention",),),
        states=(("none", "all"), ("epso", "cache")),
    )
    memory, time = LayoutMemory(config, checks), StepSeconds(config, checks, RATES, profiled)
    layouts = [*space.layouts(4)]
    expected = []
    for layout in layouts:
        if (used := memory_alone(config, layout, 4, profiled)) is not None:
            applied = layout.apply(config)
            work = profile_work(applied, layout.mesh, profiled=profiled)
            step = step_of(applied, layout.mesh, works={False: work})
            expected.append(Evaluation(step_time(step, RATES).total_s, used, layout))
    expected.sort()
    ranking = search(config, 4, space, memory, time, checks)
    evaluations = ranking.evaluations
    assert {e.layout: e.memory for e in evaluations} == {e.layout: e.memory for e in expected}
    times = {e.layout: e.time for e in expected}
    assert [e.time for e in evaluations] == pytest.approx([times[e.layout] for e in evaluations])
    assert evaluations[0].time == pytest.approx(expected[0].time)
    assert len(expected) + ranking.rejected.total() == 3 * 2 * 3 * 2 * 2
    assert 20 < len(expected) < len(layouts)
    # With a limit between the sizes of layouts, the first result is the fastest layout that fits.
    limit = sorted(evaluation.memory for evaluation in expected)[len(expected) // 3]
    limited = LayoutMemory(config, checks, limit)
    fitting = search(config, 4, space, limited, time, checks, limit)
    fastest = min(e.time for e in expected if e.memory <= limit)
    assert fitting.evaluations[0].time == pytest.approx(fastest)
    too_large = sum(e.memory > limit for e in expected)
    assert fitting.rejected["more memory than a rank has"] == too_large
    figures = {evaluation[:2] for evaluation in evaluations}
    assert [e[:2] for e in ranking.pareto] == sorted(
        e for e in figures if not any(o[0] <= e[0] and o[1] <= e[1] for o in figures - {e})
    )


def test_offloaded_winner_is_that_of_an_evaluation_of_each_layout():
    """No layout fits on the device without offloading. The search finds the fastest layout with
    offloading, although it evaluates no layout whose lower bound of the step time, or of the
    memory, is too high."""
    config = tiny_config("d", "r", **BASE, **DENSE, train__dtype="bf16", offload__mode="auto")
    checks, profiled = LayoutChecks(config), Profiled()
    space = Space(
        pp=(1, 2),
        ep=(1,),
        tp=(1,),
        schedules=(("1f1b", 1), ("zb-h1", 1)),
        microbatch_sizes=(2,),
        recompute=(("block",),),
        states=(("none", "all"), ("so", "all"), ("epso", "parameters")),
    )
    memory = LayoutMemory(config, checks)
    valid = [
        layout
        for layout in space.layouts(2)
        if not (checks.refusal_of_mesh(layout) or checks.refusal(layout))
    ]
    limit = int(0.9 * min(map(memory, valid)))
    machine = load_machine("h200")
    links = machine.links.model_copy(update={"to_device": 1e8, "to_host": 1e8})
    machine = machine.model_copy(update={"ranks_per_node": 2, "links": links})

    def layouts_of(**limits):
        limited = LayoutMemory(config, checks, limit, profiled)
        seconds = StepSeconds(config, checks, rates_of(machine, "bf16"), profiled)
        settings = with_offload(config, device_memory=str(limit), **limits)
        offloaded = OffloadedLayouts(settings, machine, "h200", seconds, limited, checks)
        return offloaded, (limited, seconds, checks, limit)

    offloaded, functions = layouts_of()
    offloaded.evaluate = functools.cache(offloaded.evaluate)
    ranking = search(config, 2, space, *functions, offloaded=offloaded)
    times = {}
    for layout in valid:
        if layout.resident != "all":
            continue
        candidate = offloaded.candidate(layout)
        layout = layout._replace(offload="auto")
        try:
            times[layout], used = offloaded.evaluate(layout)
        except ConfigError:
            continue
        assert used <= limit and candidate.least_s <= times[layout]
        least_s = offloaded._least_s(layout, by_layer=False)  # the order of the fastest placements
        assert 0.3 * times[layout] < least_s <= times[layout]
    best = ranking.evaluations[0]
    assert best.time == min(times.values()) == times[best.layout]
    assert {e.layout: e.time for e in ranking.evaluations}.items() <= times.items()
    assert ranking.rejected[_ONE_RANK] == 2 and not ranking.candidates
    # Layouts whose states or activations do not fit have no placement.
    small, _ = layouts_of(host_memory="1000")
    assert {small.candidate(layout) for layout in valid} == {TOO_MANY_STATES}
    with pytest.raises(ConfigError, match="offload.host_memory must be at least"):
        small.evaluate(best.layout)
    limit = max(functions[0].activations(best.layout))
    assert layouts_of()[0].candidate(best.layout) == TOO_MANY_ACTIVATIONS
    # If a layout is faster than the bounds of all other layouts, no layout is evaluated with
    # offloading.
    limit = functions[3]
    fast = (lambda layout: limit + (layout.sharding != "epso")), (lambda layout: 1e-9)
    ranking = search(config, 2, space, *fast, checks, limit, offloaded=offloaded)
    assert {e.layout.sharding for e in ranking.evaluations} == {"epso"}
    assert ranking.rejected[_SLOWER] == 4


def test_nearest_fitting_changes_the_fewest_settings():
    config = tiny_config("d", "r", **(BASE | DENSE))
    machine = load_machine("a100-80").model_copy(update={"ranks_per_node": 4})
    checks = LayoutChecks(config)
    memory = LayoutMemory(config, checks)
    present = layout_of(config, 8)
    space = space_of(config, 8)

    profiled = Profiled()

    def fitting(limit: int) -> list:
        figure = machine.device.memory_bytes.model_copy(update={"value": float(limit)})
        device = machine.device.model_copy(update={"memory_bytes": figure})
        of_device = machine.model_copy(update={"device": device})
        return list(nearest_fitting(config, of_device, 2, profiled=profiled))

    single = [
        memory(layout)
        for layout in space.layouts(8)
        if len(layout_changes(present, layout).keys() - {"parallel.dp"}) == 1
        and not (checks.refusal_of_mesh(layout) or checks.refusal(layout))
    ]
    least = min(single)
    assert least < memory(present)
    (best, *others) = fitting(least)
    assert best.evaluation.memory == least
    assert len(best.changes.keys() - {"parallel.dp"}) == 1
    for near in fitting(least - 1):
        assert len(near.changes.keys() - {"parallel.dp"}) == 2
        assert memory(near.evaluation.layout) == near.evaluation.memory < least
        key, value = next(iter(near.changes.items()))
        assert f"{key}={override(value)}" in str(near)
    assert fitting(10) == []
    # The full memory of a result needs no further profile, on any tp rank.
    known = len(profiled)
    for near in fitting(least - 1):
        layout = near.evaluation.layout
        of_mesh = layout.apply(config), layout.mesh, memory.microbatches(layout)
        assert needed_bytes(*of_mesh, machine, profiled) <= least - 1
    assert known == len(profiled)
    assert all(len(near.changes.keys() - {"parallel.dp"}) >= 1 for near in others)


def test_layouts_with_more_changes_are_evaluated_only_if_needed(monkeypatch):
    """`nearest_fitting` yields layouts with one changed setting before layouts with two changed
    settings. Pairs of changes are evaluated only when a caller asks for further layouts."""
    config = tiny_config("d", "r", **(BASE | DENSE))
    machine = load_machine("a100-80").model_copy(update={"ranks_per_node": 4})
    counts = []

    def changed_layouts(present, space, world_size, count):
        counts.append(count)
        return _changed_layouts(present, space, world_size, count)

    monkeypatch.setattr(search_module, "_changed_layouts", changed_layouts)
    layouts = nearest_fitting(config, machine, 2, limit=1000)
    first = [next(layouts) for _ in range(3)]
    assert counts == [1]
    assert [*first, *layouts] == list(nearest_fitting(config, machine, 2, limit=1000))
    assert counts == [1, 2, 1, 2]


def test_processes_do_not_change_the_result():
    config = tiny_config("d", "r", train__deterministic=False)
    checks = LayoutChecks(config)
    space = dataclasses.replace(SPACE, microbatch_sizes=(1,), recompute=((),))
    functions = LayoutMemory(config, checks), ComputeBound(config, checks)
    alone = search(config, WORLD, space, *functions, checks, 10**9)
    assert search(config, WORLD, space, *functions, checks, 10**9, processes=3) == alone


def test_end_of_a_process_of_a_search_is_a_single_line():
    """If a worker process of the search is killed or raises an error, the search ends its other
    worker processes, and raises an error with a message of one line."""
    config = tiny_config("d", "r", train__deterministic=False)
    checks = LayoutChecks(config)
    space = dataclasses.replace(SPACE, microbatch_sizes=(1,), recompute=((),))

    def killed(layout):
        if layout.pp > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return 1

    def refused(layout):
        raise OptimusError("refused")

    for memory, message in (
        (killed, r"a process of the search ended \(signal 9, probably out of memory\); use fewer"),
        (refused, "refused"),
    ):
        with pytest.raises(OptimusError, match=message):
            search(config, WORLD, space, memory, lambda layout: 0.0, checks, processes=2)
        assert not multiprocessing.active_children()


def test_search_reports_the_number_of_layouts_and_its_progress(monkeypatch, caplog):
    config = tiny_config("d", "r", train__deterministic=False)
    checks = LayoutChecks(config)
    space = dataclasses.replace(SPACE, microbatch_sizes=(1,), recompute=((),))
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(search_report, "_PROGRESS_S", 0.0)
    functions = (lambda layout: 1), (lambda layout: 0.0)
    search(config, WORLD, space, *functions, checks, None, 2, search_report.SearchProgress())
    lines = [record.getMessage() for record in caplog.records]
    total = int(lines[0].split()[1])
    assert lines[0] == f"evaluating {total} layouts" and len(lines) > 2
    assert lines[-1] == f"evaluated {total} of {total} layouts (100 %)"
    caplog.clear()
    monkeypatch.undo()
    search(config, WORLD, space, *functions, checks, None, 1, search_report.SearchProgress())
    assert [record.getMessage() for record in caplog.records] == lines[:1]


def test_reasons_are_counted_without_numbers():
    config = tiny_config("d", "r")
    checks = LayoutChecks(config)
    memory = LayoutMemory(config, checks, 0)  # the bytes of the states are enough
    ranking = search(config, WORLD, SPACE, memory, ComputeBound(config, checks), checks)
    inner = 3 * 2 * 4
    # pp = 3 with each ep and tp; three meshes of 16 ranks, and one of 32
    assert ranking.rejected["parallel.pp * ep * tp does not divide the number of ranks"] == (
        (6 + 3 + 1) * 3 * inner
    )
    assert any(reason.startswith("train.global_batch_tokens = N is") for reason in ranking.rejected)
    assert "parallel.pp * parallel.virtual_stages = N stages, but model.num_layers = N" in (
        ranking.rejected
    )
    error = ConfigError("a.b = 12: 3 ranks (1 x 2) of v1.5 and 1f1b; use 2")
    assert reason_of(error) == "a.b = N: N ranks of v1.5 and 1f1b"


def test_bound_is_the_flops_of_a_rank():
    config = tiny_config("d", "r", train__deterministic=False)
    bound = ComputeBound(config, LayoutChecks(config))
    step = flops_per_token(config.model, CONTEXT) * 8 * CONTEXT
    alone = Layout(1, 8, 1, 1, "1f1b", 1, 1, (), "none", "all")
    assert bound(alone) == pytest.approx(step / 8)
    assert bound(alone._replace(dp=4, tp=2)) == pytest.approx(step / 8)
    layers = sum(layer_multiply_adds(config.model, CONTEXT, n) for n in range(2))
    repeated = bound(alone._replace(recompute=("block",))) - bound(alone)
    assert repeated == pytest.approx(2 * layers * CONTEXT)
    both = bound(alone._replace(recompute=("attention", "moe"))) - bound(alone)
    assert both == pytest.approx(repeated)
    assert 0 < bound(alone._replace(recompute=("experts",))) - bound(alone) < repeated
    assert bound(alone._replace(recompute=("norm",))) == bound(alone)
    # Two stages: the second has the head. Two microbatches of 1f1b have a bubble of 1/2.
    head = config.model.hidden_size * config.model.vocab_size
    staged = alone._replace(pp=2, dp=4)
    busiest = 6 * (layers / 2 + head) * CONTEXT
    assert bound(staged) == pytest.approx(2 * busiest * 1.5)


def test_seconds_are_those_of_the_step_model():
    config = load_config(CONFIGS / "run" / "mula-7b-a1b.toml")
    checks, choose = LayoutChecks(config), random.Random(0)
    rates = rates_of(load_machine("aurora"), "bf16")
    seconds = StepSeconds(config, checks, rates)
    layouts = [
        layout
        for layout in space_of(config, 48).layouts(48)
        if not checks.refusal_of_mesh(layout) and not checks.refusal(layout)
    ]
    for layout in sorted(choose.sample(layouts, 12)):
        applied = layout.apply(config)
        expected = step_time(step_of(applied, layout.mesh), rates).total_s
        assert seconds(layout) == pytest.approx(expected), layout
        assert seconds(layout) >= seconds(layout._replace(resident="all"))
    # With a limited cache, a layout has other collectives than with whole parameters.
    optim = config.optim.model_copy(update={"cache_chunks": 100})
    limited = config.model_copy(update={"optim": optim})
    seconds = StepSeconds(limited, checks, rates)
    layout = layouts[0]._replace(sharding="so", resident="parameters")
    cached = layout._replace(resident="cache")
    applied = cached.apply(limited)
    assert seconds(layout) != seconds(cached)
    expected = step_time(step_of(applied, cached.mesh), rates).total_s
    assert seconds(cached) == pytest.approx(expected)


def test_search_on_a_machine_with_figures_ranks_by_seconds(capsys):
    run = str(CONFIGS / "run" / "mula-1b.toml")
    settings = ["model.num_layers=2", "model.num_attention_heads=2"]
    settings.append("train.global_batch_tokens=49152")
    options = ["--machine", "aurora", "--nodes", "1", "--search", "--json"]
    assert main(["plan", run, *options, *settings]) == 0
    result = json.loads(capsys.readouterr().out)
    times = [row["step_s"] for row in result["ranking"]]
    assert times == sorted(times) and times[0] > 0
    assert all(row["memory_bytes"] <= 68.7e9 for row in result["ranking"])


def test_space_has_the_divisors_of_the_ranks_up_to_the_sizes_of_the_model():
    config = tiny_config("d", "r", model__num_layers=3)
    space = space_of(config, 12)
    assert (space.pp, space.ep, space.tp) == ([1, 2, 3], [1, 2, 3, 4], [1, 2])
    dense = load_config(CONFIGS / "model" / "olmo-1b.toml")
    assert space_of(dense, 12).ep == [1]
    assert not any("moe" in modules for modules in space_of(dense, 12).recompute)


MACHINE = "ranks_per_node = 2\n"


def search_options(tmp_path: Path, tree: dict, nodes: int = 1) -> list[str]:
    machine = tmp_path / "machine.toml"
    machine.write_text(MACHINE)
    config = write_config(tmp_path / "config.toml", tree)
    return ["plan", str(config), "--machine", str(machine), "--nodes", str(nodes), "--search"]


def test_search_writes_table_picture_and_a_configuration_that_train_accepts(
    tiny_data, tmp_path, capsys
):
    tree = tiny_tree(tiny_data, tmp_path / "run", train__deterministic=False, **DENSE)
    options = search_options(tmp_path, tree)
    best, out = tmp_path / "best.toml", tmp_path / "out"
    assert main([*options, "--write", str(best), "--out", str(out), "--top", "3"]) == 0
    text = capsys.readouterr().out
    assert "layouts evaluated" in text and "layouts rejected: " in text
    with open(out / "layouts.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    times = [float(row["bound_pflop"]) for row in rows]
    assert times == sorted(times) and f"{len(rows):,} layouts evaluated" in text
    assert (out / "pareto.png").read_bytes().startswith(b"\x89PNG")
    config = load_config(best)
    for section, key in (("parallel", "pp"), ("parallel", "tp"), ("train", "microbatch_size")):
        assert str(getattr(getattr(config, section), key)) == rows[0][key]
    assert main(["train", str(best), "--nproc", "2", "--dry-run"]) == 0


def test_search_offloads_if_no_layout_fits(tiny_data, tmp_path, capsys):
    machine = tmp_path / "machine.toml"
    text = (CONFIGS / "machine" / "h200.toml").read_text()
    machine.write_text(text.replace("ranks_per_node = 8", "ranks_per_node = 1"))
    changes = {"train__global_batch_tokens": CONTEXT, "train__dtype": "bf16"}
    tree = tiny_tree(tiny_data, tmp_path / "run", train__deterministic=False, **DENSE, **changes)
    config, best = write_config(tmp_path / "config.toml", tree), tmp_path / "best.toml"
    command = ["plan", str(config), "--machine", str(machine), "--nodes", "1", "--search"]
    assert main([*command, "--json", "--memory", "0.0008", "--write", str(best)]) == 0
    result = json.loads(capsys.readouterr().out)
    first, written = result["ranking"][0], load_config(best)
    assert first["offload"] == written.offload.mode == "auto"
    assert first["memory_bytes"] <= int(written.offload.device_memory) == int(0.0008 * 2**30)
    assert main(["train", str(best), "--nproc", "1", "--dry-run"]) == 0


def test_search_prints_a_json_object(tmp_path, capsys):
    tree = tiny_tree("d", "r", train__deterministic=False, **DENSE)
    assert main([*search_options(tmp_path, tree), "--json", "--top", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["ranking"]) == 2 and result["world"] == 2
    assert result["evaluated"] > 0 and sum(result["rejected"].values()) > 0
    assert result["pareto"][0]["bound_pflop"] == result["ranking"][0]["bound_pflop"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "1e-6"], "none of 16,384 layouts is possible"),
        (["--top", "0"], "--top 0 must be a number above 0"),
        (["--resolved"], "--search and --resolved exclude each other"),
        (["train.global_batch_tokens=0"], "train.global_batch_tokens = 0: a search compares steps"),
        (["optim.frozen=['nothing']"], "optim.frozen names 'nothing'"),
        (["offload.mode='auto'"], "so the time of a step with offloading is unknown; use another"),
        (
            ["offload.mode='manual'", "offload.host_share=1"],
            "offload.mode = 'manual': a search chooses the placement of the states; set",
        ),
    ],
)
def test_impossible_search_is_a_single_line_and_status_2(options, message, tmp_path, capsys):
    tree = tiny_tree("d", "r", train__deterministic=False)
    assert main([*search_options(tmp_path, tree), *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1]
    assert [line for line in lines[:-1] if "evaluating 16,384 layouts" not in line] == []


def test_options_of_the_search_need_it(tmp_path, capsys):
    config = write_config(tmp_path / "config.toml", tiny_tree("d", "r"))
    assert main(["plan", str(config), "--search"]) == 2
    assert "--search needs a number of ranks" in capsys.readouterr().err
    assert main(["plan", str(config), "--write", "x"]) == 2
    assert "--write x has no effect; add --search" in capsys.readouterr().err


def test_a_written_layout_is_read_again():
    config = tiny_config("d", "r", train__deterministic=False)
    layout = Layout(2, 2, 1, 2, "interleaved", 1, 2, ("norm", "moe"), "epso", "cache")
    assert make_config(layout.apply(config).model_dump(exclude_none=True)) == layout.apply(config)
    assert 'modules = ["norm", "moe"]' in dump_toml(layout.apply(config))
