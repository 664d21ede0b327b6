"""Tests of plans for the expert loads of a run (the numbers of rows of each expert)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from optimus.cli import main
from optimus.config import dump_toml, make_config
from optimus.config.machine import FOLDER, Machine, load_machine
from optimus.distributed.mesh import make_mesh
from optimus.planner.expert_loads import RunLoads
from optimus.planner.layouts import LayoutChecks, Space, layout_of
from optimus.planner.machine_plan import _Memory, machine_lines, plan_on_machine
from optimus.planner.machine_rates import rates_of
from optimus.planner.search_memory import LayoutMemory
from optimus.planner.search_time import StepSeconds
from optimus.planner.step_plan import plan_step
from optimus.planner.step_time import pass_time, step_time
from optimus.planner.topology import Topology
from optimus.planner.workload import step_of
from tests.kit.runs.tiny import tiny_config, tiny_tree
from tests.kit.runs.training import train_on

SETTINGS = {
    "model__num_experts": 16,
    "model__num_experts_per_tok": 4,
    "parallel__ep": 4,
    "parallel__ep_dispatch": "alltoall",
    "train__dtype": "bf16",
    "train__seq_len": 256,
    "train__global_batch_tokens": 16 * 256,
    "train__deterministic": False,
    "optim__overlap": False,  # overlapping reductions over ep are hidden by more computation
}
CONFIG = make_config(tiny_tree("d", "r", **SETTINGS))
MESH = make_mesh(CONFIG.parallel)
EQUAL = 16 * [100]
SKEWED = 4 * [220] + 12 * [60]  # 2.2 times an equal share on the first of 4 ranks


def write_run(run_dir: Path, *steps: tuple[int, list[int], list[int]], config=CONFIG) -> str:
    """Write a run directory with recorded expert loads, and return its path. Each element of
    `steps` is (step, number of rows of each expert in layer 0, the same in layer 1)."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.toml").write_text(dump_toml(config))
    lines = [
        json.dumps({"step": step, "layer": layer, "rows": rows}) + "\n"
        for step, *layers in steps
        for layer, rows in enumerate(layers)
    ]
    (run_dir / "expert_load.jsonl").write_text("".join(lines))
    return str(run_dir)


def test_a_run_records_the_loads_that_a_plan_reads(ranks, tiny_data, tmp_path) -> None:
    tree = tiny_tree(tiny_data, tmp_path, train__max_steps=4, observe__expert_load_interval=3)
    train_on(ranks, 1, tree)
    loads = RunLoads(str(tmp_path), make_config(tree).model).steps(2)
    assert sorted(load.step for load in loads) == [1, 3]
    for load in loads:
        assert list(load.imbalances) == [0, 1]
        assert all(sum(of_ranks) == pytest.approx(2) for of_ranks in load.imbalances.values())


def test_median_and_worst_steps_are_those_of_the_mean_over_layers(tmp_path) -> None:
    run = write_run(
        tmp_path,
        (1, SKEWED, SKEWED),
        (100, EQUAL, EQUAL),
        (200, SKEWED, EQUAL),
        (300, EQUAL, EQUAL),
    )
    chosen = RunLoads(run, CONFIG.model).at(4)
    assert {key: load.step for key, load in chosen.items()} == {"median": 300, "worst": 1}
    assert chosen["worst"].fullest == {0: 2.2, 1: 2.2} and chosen["worst"].mean == 2.2
    assert RunLoads(run, CONFIG.model).at(2)["worst"].fullest == {0: 1.4, 1: 1.4}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run / "config.toml").unlink(), "config.toml is missing; give the run dir"),
        (lambda run: (run / "expert_load.jsonl").unlink(), "is missing or empty; run with observe"),
        (
            lambda run: write_run(run, config=tiny_config("d", "r", model__num_layers=3)),
            "the run has model.num_layers = 3, but the plan has 2; give the run directory",
        ),
        (
            lambda run: (run / "expert_load.jsonl").write_text('{"step": 1, "layer": 0}\n{}\n'),
            "line 1 of expert_load.jsonl is damaged; restore",
        ),
        (lambda run: write_run(run, (1, EQUAL, EQUAL[1:])), "line 2 of expert_load.jsonl is dam"),
        (lambda run: write_run(run, (1, EQUAL, 16 * [0])), "line 2 of expert_load.jsonl is dam"),
        (lambda run: write_run(run, (1, EQUAL)), "has no update with all MoE layers"),
    ],
)
def test_a_directory_without_valid_loads_is_refused(tmp_path, capsys, damage, message) -> None:
    run = tmp_path / "run"
    config = Path(write_run(run, (1, EQUAL, EQUAL))) / "config.toml"
    path = tmp_path / "plan.toml"
    path.write_text(config.read_text())
    damage(run)
    assert main(["plan", str(path), "--machine", "h200", "--load", str(run)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize(
    "changes", [{}, {"pp": 2, "schedule": "zb-h1"}, {"pp": 2, "microbatch_size": 2, "ep": 2}]
)
def test_search_has_the_figures_of_a_plan_for_the_loads_of_a_run(tmp_path, changes) -> None:
    """The search and the plan compute the same values: the step time with the expert loads of the
    median update, and the memory with the expert loads of the worst update."""
    run = write_run(tmp_path, (1, SKEWED, SKEWED[::-1]), (2, EQUAL, SKEWED), (3, EQUAL, EQUAL))
    layout = layout_of(CONFIG, MESH.world_size)._replace(**changes)
    config, mesh, checks = layout.apply(CONFIG), layout.mesh, LayoutChecks(CONFIG)
    rates, loads = rates_of(load_machine("h200"), "bf16"), RunLoads(run, CONFIG.model)
    plan = plan_on_machine(config, mesh, "h200", loads)["load"]
    memory = LayoutMemory(CONFIG, checks, loads=loads)(layout)
    assert memory == plan["worst"]["needed"] > LayoutMemory(CONFIG, checks)(layout)
    seconds = StepSeconds(CONFIG, checks, rates, loads=loads)(layout)
    step = step_of(config, mesh, imbalances=loads.at(mesh.ep)["median"].fullest)
    assert seconds == pytest.approx(step_time(step, rates).total_s)
    assert seconds > StepSeconds(CONFIG, checks, rates)(layout)


def test_a_search_on_the_command_line_uses_the_loads(tmp_path, monkeypatch, capsys) -> None:
    run = write_run(tmp_path, (1, SKEWED, SKEWED[::-1]), (2, EQUAL, SKEWED), (3, EQUAL, EQUAL))
    sizes = {"pp": [1], "ep": [4], "tp": [1], "schedules": [("1f1b", 1)], "states": [("so", "all")]}
    small = Space(**sizes, microbatch_sizes=[1], recompute=[()])
    monkeypatch.setattr("optimus.planner.layouts.space_of", lambda *args: small)
    options = ["--search", "--machine", "h200", "--nodes", "1", "--json"]
    command = ["plan", str(tmp_path / "config.toml"), "parallel.dp=0", *options]
    (layout,) = small.layouts(8)
    costs = []
    for load in ([], ["--load", run]):
        assert main([*command, *load]) == 0
        (first,) = json.loads(capsys.readouterr().out)["ranking"]
        costs.append((first["step_s"], first["memory_bytes"]))
    checks, loads = LayoutChecks(CONFIG), RunLoads(run, CONFIG.model)
    rates = rates_of(load_machine("h200"), "bf16")
    assert costs[1][0] == StepSeconds(CONFIG, checks, rates, loads=loads)(layout) > costs[0][0]
    assert costs[1][1] == LayoutMemory(CONFIG, checks, loads=loads)(layout) > costs[0][1]


def test_a_line_that_a_kill_has_cut_is_ignored(tmp_path) -> None:
    path = Path(write_run(tmp_path, (1, EQUAL, EQUAL), (100, EQUAL, SKEWED)))
    file = path / "expert_load.jsonl"
    file.write_text(file.read_text()[:-10])
    assert [load.step for load in RunLoads(str(path), CONFIG.model).steps(4)] == [1]


def test_load_without_effect_is_refused(capsys) -> None:
    config = str(FOLDER.parent / "model" / "mula-7b-a1b.toml")
    assert main(["plan", config, "--load", "r"]) == 2
    assert "--load needs --machine NAME; add it" in capsys.readouterr().err
    assert main(["plan", config, "--machine", "h200", "--load", "r"]) == 2
    assert "--load r needs train.seq_len; set it" in capsys.readouterr().err
    words = ["plan", str(FOLDER.parent / "run" / "mula-7b-a1b.toml"), "--machine", "h200"]
    for options in ([], ["--search", "--nodes", "1"]):
        assert main([*words, *options, "--load", "r", "offload.mode=auto"]) == 2
        assert "--load r has no effect with offload.mode = 'auto'" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--search"]])
def test_a_wrong_directory_is_refused_before_torch_is_imported(options) -> None:
    """The command must check the run directory before it imports torch and profiles the model,
    which take seconds."""
    words = ["plan", str(FOLDER.parent / "run" / "mula-7b-a1b.toml"), "--machine", "h200"]
    words += ["--nodes", "1", "--load", "missing", *options]
    code = f"import sys; from optimus.cli import main; s = main({words}); "
    code += "print(s, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.endswith(
        "--load missing: config.toml is missing; give the run directory of a run of this model\n"
    )
    assert done.stdout.split() == ["2", "False"]


def test_plan_for_the_loads_of_a_run(tmp_path) -> None:
    run = write_run(tmp_path, (1, SKEWED, EQUAL), (100, EQUAL, EQUAL), (200, EQUAL, EQUAL))
    result = plan_on_machine(CONFIG, MESH, "h200", RunLoads(run, CONFIG.model))
    load = result["load"]
    assert (load["steps"], load["median"]["step"], load["worst"]["step"]) == (3, 200, 1)
    assert load["median"]["needed"] == result["needed"] < load["worst"]["needed"]
    worst = load["worst"]
    assert (worst["imbalance"], worst["layer"]) == (2.2, 0)
    assert worst["mean_imbalance"] == pytest.approx(1.6)
    balanced, slow = result["step"], worst["step_plan"]
    assert load["median"]["step_plan"]["step_s"] == pytest.approx(balanced["step_s"])
    assert slow["step_s"] > balanced["step_s"]
    lines = dict(machine_lines(result | {"machine": "h200", "ranks": []}))
    assert "2.20 times an equal share" in lines["worst load, step 1"]
    assert (
        f"MFU {slow['mfu']:.1%}, {slow['tokens_per_day']:.3g} tokens a day"
        in lines["worst load, step 1"]
    )
    assert "exposed ep" in lines["median load, step 200"]
    without = {key: value for key, value in result.items() if key != "imbalance"}  # parallel.ep = 1
    alone = machine_lines(without | {"machine": "h200", "ranks": []})
    assert alone[-1][1].startswith("no effect: with parallel.ep = 1")
    load["median"] = worst  # as in a record of one step
    names = [name for name, _ in machine_lines(result | {"machine": "h200", "ranks": []})]
    assert [name for name in names if "load" in name] == ["load, one sample, step 1"]


def test_a_better_order_of_the_hosts_without_a_shorter_step_has_no_gain() -> None:
    order = Topology(1, tuple(range(MESH.world_size)), (8,))
    result = plan_on_machine(CONFIG, MESH, "h200", topology=order, better=order)
    line = dict(machine_lines(result | {"machine": "h200", "ranks": []}))["step with better hosts"]
    assert "s, as long as in the given order, with the hosts of --write-hosts FILE" in line


def test_the_load_of_a_run_is_timed_for_the_order_of_the_hosts(tmp_path) -> None:
    """If the ep ranks are in different domains, the collectives over ep use the network between the
    domains, which is slower than NVLink within a domain."""
    loads = RunLoads(write_run(tmp_path, (1, SKEWED, EQUAL)), CONFIG.model)
    topology = Topology(1, tuple(range(MESH.world_size)), (8,))
    near, far = (
        plan_on_machine(CONFIG, MESH, "h200", loads, each)["load"]["worst"]["step_plan"]
        for each in (None, topology)
    )
    assert far["exposed_s"]["ep"] > 2 * near["exposed_s"]["ep"]


def exchange_s(imbalance: float) -> float:
    """Return the seconds of the collectives over ep in the backward of a microbatch if the fullest
    rank has `imbalance` times an equal share of the rows."""
    step = step_of(CONFIG, MESH, imbalances=dict.fromkeys((0, 1), imbalance))
    rates = rates_of(load_machine("h200"), CONFIG.train.dtype, "h200")
    passes = (pass_time(x.backward, rates, step.groups, x.number) for x in step.stages[0])
    return sum(time.exposed_s.get("ep", 0.0) for time in passes)


def test_time_of_a_step_follows_the_fullest_rank() -> None:
    """The fullest rank (the rank whose experts process most rows) has 1, 2.5 or 4 times an equal
    share of the rows. The time of computation grows linearly with this share, and the time of the
    collectives over ep grows, too. With 4 of 4 shares, all tokens are sent to this rank."""
    machine = load_machine("h200")
    plans = [
        plan_step(CONFIG, MESH, machine, "h200", None, dict.fromkeys((0, 1), imbalance))
        for imbalance in (1.0, 2.5, 4.0)
    ]
    assert plans[0] == plan_step(CONFIG, MESH, machine, "h200")
    times = [plan["compute_s"] for plan in plans]
    assert times[1] == pytest.approx((times[0] + times[2]) / 2) and times[2] > times[0]
    # plan["exposed_s"] also contains the reduction of gradients. A longer pass hides more of it.
    sent = [exchange_s(imbalance) for imbalance in (1.0, 2.5, 4.0)]
    assert sent[0] < sent[1] < sent[2]
    of_layer = step_of(CONFIG, MESH, imbalances=dict.fromkeys((0, 1), 4.0)).stages[0][:2]
    assert sorted(each.number for each in of_layer) == [0, 1]  # only the profile with all rows


def test_largest_imbalance_that_fits() -> None:
    memory = _Memory(CONFIG, MESH, 4, Machine())
    needed = {
        f: max(kind["total"] for kind in memory.kinds(dict.fromkeys((0, 1), (f,))))
        for f in (1.0, 1.5, 2.0, 4.0)
    }
    assert sorted(needed.values()) == list(needed.values())
    assert memory.largest_fitting(4.0, needed[1.0] - 1) is None
    assert memory.largest_fitting(4.0, needed[4.0]) == 4.0
    for imbalance in (1.5, 2.0):
        assert memory.largest_fitting(4.0, needed[imbalance]) == pytest.approx(imbalance, abs=0.02)
    result = plan_on_machine(CONFIG, MESH, "h200")
    assert result["imbalance"]["largest"] == result["imbalance"]["limit"] == 4.0
    assert result["imbalance"]["step_s"] > result["step"]["step_s"]
