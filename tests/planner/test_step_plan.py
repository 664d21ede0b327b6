"""Tests of the planned times of a step in `optimus plan`."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

from optimus.cli import main
from optimus.config import make_config
from optimus.config.load import load_config
from optimus.config.machine import FOLDER, load_machine
from optimus.distributed.mesh import Mesh, make_mesh
from optimus.errors import ConfigError
from optimus.model.flops import flops_per_token
from optimus.observe.chrome_trace import TracedAction
from optimus.parallel.pipeline.plan import schedule_of
from optimus.parallel.pipeline.simulate import simulate, unit_costs
from optimus.planner.machine_rates import rates_of
from optimus.planner.step_plan import StepTrace, plan_step, step_lines
from optimus.planner.step_time import play_step, played_time, step_time
from optimus.planner.workload import step_of
from tests.kit.runs.tiny import tiny_tree

RUN = FOLDER.parent / "run" / "mula-220b-a10b.toml"


@pytest.mark.parametrize("name", ["a100-80", "aurora", "h100", "h200"])
def test_figures_of_a_step_are_consistent(name):
    config = load_config(RUN, [])
    mesh, machine = make_mesh(config.parallel), load_machine(name)
    result = plan_step(config, mesh, machine, name)
    assert json.loads(json.dumps(result)) == result
    components = result["compute_s"] + result["bubble_s"] + result["optimizer_s"]
    assert result["step_s"] == pytest.approx(components + sum(result["exposed_s"].values()))
    batch = config.train.global_batch_tokens
    assert result["tokens_per_s"] == pytest.approx(batch / result["step_s"])
    flops = flops_per_token(config.model, config.train.seq_len) * batch
    achieved = flops / result["step_s"] / mesh.world_size
    assert result["mfu"] == pytest.approx(achieved / result["peak_flops"]) and result["mfu"] < 0.6
    assert result["nodes"] == -(-mesh.world_size // machine.ranks_per_node)
    hours = config.train.max_steps * result["step_s"] / 3600 / result["work_share"]
    assert result["node_hours"] == pytest.approx(hours * result["nodes"])
    days = hours / 24
    assert result["tokens_per_day"] == pytest.approx(batch * config.train.max_steps / days)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_trace_of_a_plan_has_the_actions_of_the_schedule(tmp_path, name):
    """The trace of a plan contains all actions of the schedule. The actions have the same names as
    in a trace of `optimus bench step --trace`."""
    path = tmp_path / "trace.json"
    run = RUN.with_name("mula-7b-a1b.toml")
    settings = [f"parallel.schedule={name}", "parallel.pp=4", "parallel.dp=2"]
    settings.append("train.global_batch_tokens=65536")
    assert main(["plan", str(run), "--machine", "aurora", "--trace", str(path), *settings]) == 0
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    config = load_config(run, settings)
    mesh = make_mesh(config.parallel)
    step = step_of(config, mesh)
    schedule = schedule_of(config, mesh, step.microbatches)
    for rank, spans in enumerate(simulate(schedule, unit_costs()).ranks):
        actions = [span.action for span in spans]
        names = [TracedAction(a.kind.name, a.stage, a.microbatch, 0, 0).name for a in actions]
        of_rank = [e["name"] for e in events if e["tid"] == rank and e["pid"] == 0]
        assert of_rank == names
    rates = rates_of(load_machine("aurora"), config.train.dtype)
    end_s = max(event["ts"] + event["dur"] for event in events) / 1e6
    assert end_s == pytest.approx(played_time(step, rates, schedule).total_s)
    sends = [
        e for e in events if e["pid"] == 1 and e["cat"] in ("SEND_ACTIVATION", "SEND_GRADIENT")
    ]
    assert len(sends) == 2 * (mesh.pp - 1) * step.microbatches
    assert min(event["dur"] for event in sends) > 0
    assert any(e["pid"] == 1 and e["cat"] == "REDUCE_GRAD" for e in events)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_play_of_a_step_is_close_to_the_closed_formulas(name):
    settings = [f"parallel.schedule={name}", "optim.sharding=epso"]
    config = load_config(RUN, settings)
    mesh = make_mesh(config.parallel)
    step, rates = step_of(config, mesh), rates_of(load_machine("aurora"), "bf16")
    schedule = schedule_of(config, mesh, step.microbatches)
    closed, played = step_time(step, rates), played_time(step, rates, schedule)
    assert played.total_s == pytest.approx(closed.total_s, rel=0.06)
    assert played.compute_s == closed.compute_s and played.exposed_s["pp"] > 0


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_launches_make_a_step_longer_by_at_most_those_of_each_pass(name):
    """If the host is ahead of the device, a pass can be shorter than its kernel launches. A step
    therefore takes at least the time without launches, and at most the time of a step in which host
    and device begin each pass together."""
    settings = [f"parallel.schedule={name}", "parallel.pp=4", "parallel.dp=2"]
    settings += ["train.microbatch_size=1", "train.global_batch_tokens=65536"]
    config = load_config(RUN.with_name("mula-7b-a1b.toml"), settings)
    mesh = make_mesh(config.parallel)
    machine = load_machine("a100-80")
    step, fitted = step_of(config, mesh), rates_of(machine, "bf16")
    assert machine.device is not None and machine.device.launch_s is not None
    launch_s = machine.device.launch_s.model_copy(update={"fitted_on": ""})
    device = machine.device.model_copy(update={"launch_s": launch_s})
    rates = rates_of(machine.model_copy(update={"device": device}), "bf16")
    assert rates.runs_ahead and not fitted.runs_ahead
    schedule = schedule_of(config, mesh, step.microbatches)
    played, longest = (played_time(step, each, schedule) for each in (rates, fitted))
    shortest = played_time(step, dataclasses.replace(rates, launch_s=0.0), schedule)
    assert shortest.total_s < played.total_s < longest.total_s
    assert played.total_s == pytest.approx(play_step(step, rates, schedule).end)
    assert played.bubble_s > 0
    hosts = play_step(step, rates, schedule).hosts
    launched = sum(span.end - span.start for span in hosts[0])
    backward = "I" if name == "zb-h1" else "B"
    assert {span.action.kind.name for span in hosts[0]} >= {"F", backward}
    assert launched < played.total_s


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_picture_has_whole_numbers_of_ranks(tmp_path, monkeypatch, pp):
    from matplotlib.figure import Figure

    ticks: list[float] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **settings: ticks.extend(shown(figure.axes[0]))
    )

    def shown(axes) -> list[float]:
        low, high = sorted(axes.get_ylim())
        return [tick for tick in axes.get_yticks() if low <= tick <= high]

    rank = [TracedAction("F", 0, 0, 0.0, 1.0)]
    StepTrace([rank] * pp, {}).draw(tmp_path / "p.png")
    assert ticks == list(range(pp))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_picture_has_the_actions_of_the_schedule(tmp_path, monkeypatch, schedule):
    """In the picture of a plan, each action that takes time is a box in the row of its rank. A path
    in a missing folder is refused."""
    from matplotlib.axes import Axes

    boxes: Counter[int] = Counter()
    broken_barh = Axes.broken_barh

    def count(axes, spans, rows, **settings):
        boxes[round(rows[0] + 0.4)] += len(spans)
        return broken_barh(axes, spans, rows, **settings)

    monkeypatch.setattr(Axes, "broken_barh", count)
    config = make_config(tiny_tree("d", "r", parallel__pp=2, parallel__schedule=schedule))
    step = StepTrace.of(config, Mesh(pp=2), load_machine("aurora"), "aurora")
    step.draw(tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    kinds = {"F", "B", "OPT_STEP"} | ({"I", "W"} if schedule == "zb-h1" else set())
    with_time = [[a for a in rank if a.end_s > a.start_s] for rank in step.actions]
    assert {action.kind for rank in with_time for action in rank} <= kinds
    assert all(boxes[rank] >= len(actions) > 0 for rank, actions in enumerate(with_time))
    with pytest.raises(ConfigError, match="--picture .*absent.*; use another file"):
        step.draw(tmp_path / "absent" / "p.png")


def test_trace_without_effect_is_refused(tmp_path, capsys):
    trace = ["--trace", str(tmp_path / "absent" / "t.json")]
    assert main(["plan", str(RUN), *trace]) == 2
    assert "--trace needs --machine NAME; add it" in capsys.readouterr().err
    assert main(["plan", str(RUN), "--machine", "aurora", *trace]) == 2
    assert "No such file or directory; use another file" in capsys.readouterr().err
    trace = ["--trace", str(tmp_path / "t.json")]
    assert main(["plan", str(RUN), "--machine", "aurora", "--search", *trace]) == 2
    assert "--search and --trace exclude each other" in capsys.readouterr().err
    picture = ["--picture", str(tmp_path / "p.png")]
    assert main(["plan", str(RUN), *picture]) == 2
    assert "--picture needs --machine NAME; add it" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("./t.json", "link/t.json"):
        same = ["--picture", f"{tmp_path}/{name}"]
        assert main(["plan", str(RUN), "--machine", "aurora", *trace, *same]) == 2
        assert "--trace and --picture name the same file" in capsys.readouterr().err
    memory = ["--search", "--memory", "nan"]
    assert main(["plan", str(RUN), "--machine", "aurora", *memory]) == 2
    assert "--memory nan must be a number above 0" in capsys.readouterr().err


def test_lines_name_fitted_and_missing_figures():
    config = load_config(RUN, [])
    mesh = make_mesh(config.parallel)
    lines = dict(step_lines(plan_step(config, mesh, load_machine("aurora"), "aurora")))
    assert "256 nodes" in lines["step on aurora"] and "exposed ep" in "".join(lines)
    assert "device.launch_s" in lines["rates not in the file"]
    assert "rates fitted on" not in lines
    lines = dict(step_lines(plan_step(config, mesh, load_machine("a100-80"), "a100-80")))
    assert "arXiv 2205.05198 Table 5" in lines["rates fitted on"]
    assert "rates not in the file" not in lines
