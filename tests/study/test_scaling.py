"""Tests of scaling studies: points and jobs, refused studies, submission of jobs, and results."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from optimus.cli import main
from optimus.config import load_config
from optimus.config.machine import Queue, load_machine
from optimus.errors import ConfigError
from optimus.observe.events import StepComponents
from optimus.study.commands import _submit
from optimus.study.directory import StudyDirectory
from optimus.study.results import (
    collect,
    efficiencies,
    format_results,
    measured_rate,
    planned_rate,
    rows,
)
from optimus.study.scaling import Job, Point, Settings, make_point, pack_jobs
from tests.kit.ranks import pbs as fake_pbs
from tests.kit.ranks.processes import install
from tests.kit.runs.tiny import CONTEXT, DENSE, tiny_tree
from tests.launch.test_spawn import write_config
from tests.planner.test_plan import CONFIGS

HERE = Path(__file__).parent / "machine.toml"
STEPS, WARMUP = 6, 2


@pytest.fixture
def config(tiny_data, tmp_path) -> Path:
    tree = tiny_tree(tiny_data, tmp_path / "unused", train__deterministic=False)
    return write_config(tmp_path / "run.toml", tree)


def study(config: Path, out: Path, *options: str, nodes: str = "1,2") -> list[str]:
    sizes = ["--steps", str(STEPS), "--warmup", str(WARMUP), "--machine", str(HERE)]
    return ["study", "scaling", str(config), "--nodes", nodes, *sizes, "--out", str(out), *options]


def metrics(step_s: float, steps: int = STEPS, tokens: int = 256) -> str:
    lines = [
        {"step": step, "loss": 6 - step / 10, "grad_norm": 1.0, "tokens": tokens * step}
        | {"step_time_s": 9.0 if step <= WARMUP else step_s * (1 + (step % 2) / 10)}
        | {"tokens_per_s": 1.0}
        for step in range(1, steps + 1)
    ]
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def _local(components: StepComponents) -> tuple[float, ...]:
    """Return the seconds of the components compute, optimizer and other. These components are above
    0 on every rank of every run."""
    return components.compute_s, components.optimizer_s, components.other_s


def with_components(text: str, shares: dict[str, float]) -> str:
    """Return the lines of metrics `text` with step components added to each line. `shares` maps
    each component, and each of the axes "dp x ep" and "ep", to its share of the step time."""
    lines = []
    for line in map(json.loads, text.splitlines()):
        values = {name: share * line["step_time_s"] for name, share in shares.items()}
        exposed_s = {axis: values.pop(axis) for axis in ("dp x ep", "ep")}
        lines.append(json.dumps(line | values | {"exposed_s": exposed_s}))
    return "".join(f"{line}\n" for line in lines)


SHARES = {"compute_s": 0.5, "dp x ep": 0.125, "ep": 0.0625, "bubble_s": 0.125}
SHARES |= {"optimizer_s": 0.125, "other_s": 0.0625}


def complete(out: Path, name: str, text: str, status: str = "0") -> None:
    """Write the files that a run of the point `name` with the exit status `status` would leave.
    `text` is the content of metrics.jsonl."""
    (out / "points" / name / "run").mkdir(parents=True)
    (out / "points" / name / "run" / "metrics.jsonl").write_text(text)
    (out / "points" / name / "status").write_text(status)


def test_points_of_a_weak_study_keep_the_tokens_of_a_rank():
    config = load_config(CONFIGS / "run" / "mula-20b-a2b.toml", [])
    machine = load_machine("aurora")
    settings = Settings("aurora", "weak", 30, 5, 2048)
    small, large = (
        make_point(config, settings, machine, nodes, "uniform", Path("P")) for nodes in (32, 256)
    )
    assert small.mesh == (1, 32, 12, 1) and large.mesh == (1, 256, 12, 1)
    assert 8 * small.tokens == large.tokens == config.train.global_batch_tokens
    checkpoint = small.config.checkpoint
    assert not (checkpoint.at_end or checkpoint.interval or checkpoint.model_interval)
    train, before = small.config.train, config.train
    assert (train.max_steps, train.stop_at_step) == (before.max_steps, 30)
    assert small.config.model.router == "uniform"
    assert small.planned and small.expected_s == 30 * small.planned["step_s"]
    strong = make_point(
        config, Settings("aurora", "strong", 30, 5, 0), machine, 32, "top-k", Path("P")
    )
    assert strong.tokens == large.tokens and strong.planned["step_s"] > large.planned["step_s"]


def test_jobs_have_queues_and_share_those_with_a_limit(config):
    machine = load_machine("aurora")
    point = make_point(
        load_config(config), Settings("h", "weak", 5, 1, 0), load_machine(str(HERE)), 1, "", Path()
    )

    def of(nodes: int, hours: float) -> Point:
        planned = {"step_s": 3600 * hours / 15}  # 3 x 5 updates
        return dataclasses.replace(point, nodes=nodes, planned=planned, name=f"{nodes}")

    small = [of(nodes, 0.25) for nodes in (32, 64, 128)]  # 0.25 h + 600 s each
    jobs = pack_jobs([*small, of(512, 2.0), of(1024, 2.0)], machine)
    assert [(job.queue, [p.nodes for p in job.points]) for job in jobs] == [
        ("debug-scaling", [128, 64]),
        ("debug-scaling", [32]),
        ("prod", [1024]),
        ("prod", [512]),
    ]
    assert [job.nodes for job in jobs] == [128, 32, 1024, 512]
    assert [job.walltime_s for job in jobs] == [3000, 1500, 7800, 7800]
    assert jobs[0].node_hours == 128 * 3000 / 3600
    queue = Queue(name="q", nodes=(1, 64), walltime=("0:10:00", "0:58:00"))
    limited = machine.model_copy(update={"queues": (queue,)})
    for limit_s, walltime_s in ((60, 600), (31 * 60, 2100), (57 * 60, 3480)):
        (alone,) = pack_jobs([of(64, 1.0)], limited, limit_s=limit_s)
        assert alone.walltime_s == walltime_s
    with pytest.raises(ConfigError, match="no queue that takes 64 nodes for 2.2 h"):
        pack_jobs([of(64, 2.0)], machine)
    with pytest.raises(ConfigError, match="--queue debug has no queue that takes 64 nodes"):
        pack_jobs([of(64, 0.1)], machine, queue="debug")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nodes", "1,x"), "'x' is not a number of nodes"),
        (("--nodes", "2,2"), "--nodes 2,2: 2 occurs twice"),
        (("--machine", "nowhere"), "no such machine"),
        (("--machine", "aurora", "--nodes", "32,20000"), "no queue takes a job of this size"),
        (("--max-node-hours", "0.1"), "could use 0.75 node-hours"),
        (("--warmup", "6"), "leaves none of the 6 updates"),
        (("--routing", "random"), "use top-k or uniform"),
        (
            ("--nodes", "2,3", "parallel.ep=2", "train.global_batch_tokens=0"),
            "machine.toml: parallel.pp * ep * tp = 2 does not divide the 3 ranks; use a multiple "
            "of 2 nodes, such as --nodes 4",
        ),
        (("--nodes", "3", "parallel.ep=2"), "error: on 3 nodes of "),
        (("--nodes", "1,99", "--local"), "more than the"),
        (("--submit", "pbs", "data.path=/nowhere"), "/nowhere"),
        (("--walltime", "1h", "--submit", "pbs"), "must be hours:minutes:seconds"),
        (
            ("train.global_batch_tokens=384", "--machine", "aurora", "--queue", "nope"),
            "no such queue; use one of debug, debug-scaling, prod",
        ),
        (("--walltime", "0:00:00"), "leaves no time for a point"),
        (("--walltime", "", "--local"), "must be hours:minutes:seconds"),
        (("train.global_batch_tokens=8192", "--scaling", "strong", "--nodes", "3"), "multiple"),
        (("--local", "train.dtype=bf16", "--max-node-hours", "9"), "products.bf16 is missing"),
        (("--local", "--queue", "debug"), "has no effect with --local"),
    ],
)
def test_mistake_is_refused_before_anything_is_written(
    config, tmp_path, monkeypatch, capsys, options, message
):
    for program in ("qsub", "sbatch"):
        (tmp_path / program).write_text(f"#!/bin/sh\ntouch {tmp_path}/submitted\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main([*study(config, tmp_path / "out"), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("optimus: error: ") and message in line
    assert not (tmp_path / "out").exists() and not (tmp_path / "submitted").exists()


def test_output_that_cannot_be_written_is_refused_at_once(config, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    with monkeypatch.context() as patched:
        patched.setattr("optimus.study.scaling.make_point", None)  # nothing is planned
        assert main(study(config, tmp_path / "file" / "out")) == 2
    text = f"optimus: error: --out {tmp_path}/file/out: Not a directory; use another directory\n"
    assert capsys.readouterr().err == text
    assert main(study(config, tmp_path / "out")) == 0
    capsys.readouterr()
    assert main(["study", "show", str(tmp_path / "out"), "--out", str(tmp_path / "file")]) == 2
    text = f"optimus: error: --out {tmp_path}/file: Not a directory; use another directory\n"
    assert capsys.readouterr().err == text
    assert main(["study", "runs", "--out", "/proc/f"]) == 2
    assert "--out /proc/f: No such file or directory; use another" in capsys.readouterr().err


def test_point_that_may_not_fit_gets_a_warning(config, tmp_path, capsys, caplog):
    """If a device has less memory than the lower bound for a point, the study is refused. If the
    device has at least the lower bound, but less memory than the prediction, the study logs a
    warning."""
    text = HERE.read_text()
    assert "value = 4e9" in text
    machine = tmp_path / "machine.toml"
    out, options = tmp_path / "out", ["--machine", str(machine), "train.fit_check=refuse"]
    machine.write_text(text.replace("value = 4e9", "value = 1e4"))
    assert main([*study(config, out, nodes="1"), *options]) == 2
    assert "error: point 00001-top-k cannot fit: a rank needs at least" in capsys.readouterr().err
    assert not out.exists() and not caplog.text
    machine.write_text(text.replace("value = 4e9", "value = 7e5"))
    assert main([*study(config, out, nodes="1"), *options]) == 0
    assert "point 00001-top-k possibly does not fit: a rank needs a predicted" in caplog.text


def test_study_of_another_configuration_is_refused(config, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(study(config, out)) == 0
    for option, message in (
        ("optim.lr=1e-2", "optim.lr is 0.01, but 0.003 in the study"),
        ("--scaling=strong", "scaling is 'strong', but 'weak' in the study"),
        ("--steps=7", "steps is 7, but 6 in the study"),
    ):
        assert main([*study(config, out), option]) == 2
        assert message in capsys.readouterr().err
    (out / "study.json").write_text("{")
    assert main(study(config, out)) == 2
    assert "study.json" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main(study(config, tmp_path / "full")) == 2
    assert "has other files, such as file; use another --out" in capsys.readouterr().err


def test_dense_model_has_no_routing(tiny_data, tmp_path, capsys):
    config = write_config(tmp_path / "run.toml", tiny_tree(tiny_data, "r", **DENSE))
    assert main(study(config, tmp_path / "out", "--routing", "uniform")) == 2
    assert "no effect on a dense model" in capsys.readouterr().err
    assert main(study(config, tmp_path / "out")) == 0
    assert (tmp_path / "out" / "points" / "00001-dense" / "config.toml").exists()


def test_results_name_failed_points_and_do_not_draw_them(config, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(study(config, out, "--routing", "top-k,uniform", nodes="1,2,4")) == 0
    complete_at = {"00001-top-k": 1.0, "00002-top-k": 1.25, "00001-uniform": 1.0}
    for name, step_s in complete_at.items():
        complete(out, name, with_components(metrics(step_s), SHARES))
    complete(out, "00004-top-k", metrics(1.0, steps=3), status="5")
    (out / "points" / "00004-top-k" / "log.txt").write_text(
        "a\noptimus: error: lost rank 3\nthe errors of rank 3 follow\n"
    )
    complete(out, "00002-uniform", "")
    complete(out, "00004-uniform", "", status="1")
    (out / "points" / "00004-uniform" / "log.txt").write_text("a\nb\n")
    capsys.readouterr()
    assert main(["study", "show", str(out)]) == 0
    text = capsys.readouterr().out
    assert "00004-uniform failed: exit status 1: the log has no line with 'error:'" in text
    assert "00004-top-k failed: exit status 5: optimus: error: lost rank 3" in text
    assert "00002-uniform failed: metrics.jsonl has 0 of 6 steps" in text
    results = collect(StudyDirectory(out))
    first, _, third = results[:3]
    assert first.measured is not None and first.measured.updates == STEPS - WARMUP
    assert first.measured.step_s == pytest.approx(1.05)
    assert (first.measured.low_s, first.measured.high_s) == pytest.approx((1.0, 1.1))
    assert third.measured is None
    measured = efficiencies(results, measured_rate)
    assert measured["00002-top-k"] == pytest.approx(0.8)
    assert measured.keys() == complete_at.keys()
    with open(out / "points.csv", newline="") as file:
        table = {row["point"]: row for row in csv.DictReader(file)}
    assert len(table) == 6
    assert {row["efficiency_relative_to"] for row in table.values()} == {
        "00001-top-k",
        "00001-uniform",
    }
    assert float(table["00002-top-k"]["measured_efficiency"]) < 1
    failed = table["00004-top-k"]
    assert failed["state"] == "failed" and failed["measured_step_s"] == ""
    assert float(failed["simulated_step_s"]) > 0
    with open(out / "loss.csv", newline="") as file:
        assert {row["point"] for row in csv.DictReader(file)} == complete_at.keys()
    for name in ("figure4.png", "throughput.png"):
        assert (out / name).read_bytes()[:4] == b"\x89PNG"


def test_components_are_measured_and_simulated_unless_damaged(config, tmp_path):
    out = tmp_path / "out"
    assert main(study(config, out, nodes="1,2,4")) == 0
    text = with_components(metrics(1.0), SHARES)
    complete(out, "00001-top-k", text)
    complete(out, "00002-top-k", metrics(1.25))
    assert text.count('"optimizer_s": 0.125,') == 2  # steps 4 and 6
    complete(out, "00004-top-k", text.replace('"optimizer_s": 0.125,', "", 1))
    results = collect(StudyDirectory(out))
    text = format_results(results)
    for name, missing in (("00002-top-k", 4), ("00004-top-k", 1)):
        reason = f"{missing} of 4 updates have no valid components in {out}/points/{name}/run/"
        assert f"{name}: components of a step are not measured: {reason}" in text
    assert "00001-top-k  measured   0.525 " in text
    first, *others = rows(results)
    axes = {f"exposed_{axis.replace(' ', '_')}_s": SHARES[axis] for axis in ("dp x ep", "ep")}
    wanted = {name: share for name, share in SHARES.items() if name.endswith("_s")}
    wanted |= axes | {"exposed_s": sum(axes.values())}
    assert sum(SHARES.values()) == 1.0
    for name, share in wanted.items():
        assert first[f"measured_{name}"] == pytest.approx(share * 1.05), name
        # Without measured components, the values are missing, not zero.
        assert [row[f"measured_{name}"] for row in others] == [None, None]
    simulated = ("compute_s", "exposed_s", "bubble_s", "optimizer_s")
    total_s = sum(first[f"simulated_{name}"] for name in simulated)
    assert total_s == pytest.approx(first["simulated_step_s"])


def test_both_efficiencies_have_the_same_reference_if_a_point_failed(config, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(study(config, out, nodes="1,2,4")) == 0
    complete(out, "00001-top-k", metrics(1.0, steps=3), status="5")
    complete(out, "00002-top-k", metrics(1.0))
    complete(out, "00004-top-k", metrics(1.25))
    results = collect(StudyDirectory(out))
    table = {row["point"]: row for row in rows(results)}
    assert {row["efficiency_relative_to"] for row in table.values()} == {"00002-top-k"}
    assert table["00002-top-k"]["measured_efficiency"] == 1
    assert table["00002-top-k"]["simulated_efficiency"] == 1
    assert table["00001-top-k"]["simulated_efficiency"] > 1  # less communication
    assert table["00004-top-k"]["measured_efficiency"] == pytest.approx(0.8)
    assert "of a rank, relative to 00002-top-k\n" in format_results(results)
    # If no point has both values, only the simulated points have an efficiency.
    first = dataclasses.replace(results[1], planned=None)
    assert list(efficiencies([results[0], first], planned_rate)) == ["00001-top-k"]
    assert not efficiencies([results[0], first], measured_rate)


def test_same_command_runs_only_missing_points(config, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(study(config, out)) == 0
    complete(out, "00001-top-k", metrics(1.0))
    before = (out / "points" / "00001-top-k" / "config.toml").stat().st_mtime_ns
    capsys.readouterr()
    assert main(study(config, out, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert [point["state"] for point in report["points"]] == ["done", "missing"]
    assert [job["points"] for job in report["jobs"]] == [["00002-top-k"]]
    assert (out / "points" / "00001-top-k" / "config.toml").stat().st_mtime_ns == before


def interrupt_after_output(log: Path) -> None:
    """Interrupt this process, as Ctrl-C does, after a point has written to its log."""
    while not log.exists() or not log.stat().st_size:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def test_local_points_run_again_after_an_interruption(config, tmp_path, capsys):
    """A local run of a point is interrupted. The next command runs this point again in the same run
    directory, and the command after that has nothing to run."""
    out = tmp_path / "out"
    command = [*study(config, out, nodes="1"), "--local"]
    assert main([*command, "--max-node-hours", "0.1"]) == 2
    assert "1 point could use 0.1" in capsys.readouterr().err and not out.exists()
    assert main(study(config, out, nodes="1")) == 0
    directory = StudyDirectory(out)
    point = make_point(
        load_config(config),
        Settings("h", "weak", 5, 1, 0),
        load_machine(str(HERE)),
        1,
        "top-k",
        out,
    )
    log = out / "points" / "00001-top-k" / "log.txt"
    interrupting = threading.Thread(target=interrupt_after_output, args=(log,), daemon=True)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        directory.run_local(point, None, 1)
    interrupting.join()
    (out / "points" / "00001-top-k" / "run").mkdir(exist_ok=True)
    (out / "points" / "00001-top-k" / "run" / "metrics.jsonl").write_text(metrics(1.0, steps=3))
    assert directory.state("00001-top-k", STEPS).reason == "interrupted after 3 of 6 steps"
    (out / "jobs" / "00001-top-k.sh").unlink()
    capsys.readouterr()
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "run 00001-top-k on this machine: killed after 0:10:01\n" in text
    assert text.endswith("1 point, one after the other: at most 10 minutes\n")
    assert directory.state("00001-top-k", STEPS).name == "done"
    assert not [*(out / "jobs").glob("*")]
    assert main(command) == 0
    assert capsys.readouterr().out.endswith("; done\nnothing is left to run\n")


def test_point_in_the_queue_is_not_submitted_again(config, tmp_path, monkeypatch, capsys):
    """A point whose job is in the queue gets no further job. If `qstat` fails, the study ends with
    an error, because the state of the job is unknown. `study show` still works."""
    out = tmp_path / "out"
    assert main(study(config, out)) == 0
    for point in ("00001-top-k", "00002-top-k"):
        job = out / "points" / point / "job.json"
        job.write_text(json.dumps({"name": "17", "system": "pbs"}))
    (tmp_path / "qstat").write_text("#!/bin/sh\n[ $1 = 17 ] && echo 17 R\n")
    (tmp_path / "qstat").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    capsys.readouterr()
    assert main(study(config, out, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert [point["state"] for point in report["points"]] == ["submitted"] * 2
    assert report["jobs"] == []
    (tmp_path / "qstat").write_text("#!/bin/sh\necho cannot connect >&2; exit 255\n")
    assert main(study(config, out)) == 1
    assert "cannot query job 17: qstat 17 ended with exit status 255" in capsys.readouterr().err
    assert main(["study", "show", str(out)]) == 0
    assert "00001-top-k submitted: cannot query job 17" in capsys.readouterr().out


def test_a_queue_gets_at_most_the_jobs_that_it_takes_from_a_user(capsys):
    machine = load_machine("aurora")
    (limited,) = {queue.name for queue in machine.queues if queue.max_jobs == 1} & {"debug-scaling"}
    jobs = [Job(name, queue, (), 60) for name, queue in (("a", limited), ("b", limited), ("c", ""))]
    submitted: list[str] = []
    directory = SimpleNamespace(submit=lambda job, *_: submitted.append(job.name))
    args = SimpleNamespace(submit="pbs", json=False)
    assert _submit(args, directory, jobs, [["qsub"]] * 3, machine) == 0
    assert submitted == ["a", "c"]
    assert "1 job not submitted, because the queue takes no more" in capsys.readouterr().out


def test_damaged_metrics_are_refused(config, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(study(config, out)) == 0
    complete(out, "00001-top-k", metrics(1.0).replace('"loss"', '"lost"', 1))
    for command in (["study", "show", str(out)], study(config, out, "--submit", "pbs")):
        capsys.readouterr()
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "metrics.jsonl: 1 line cannot be read" in line and "remove" in line


def test_show_names_the_remedy_for_a_damaged_point(config, tmp_path, capsys, caplog):
    out = tmp_path / "out"
    assert main(study(config, out, nodes="1")) == 0
    (out / "points" / "notes").mkdir()
    assert main(["study", "show", str(out)]) == 0
    assert f"{out}/points/notes has no plan.json" in caplog.text
    plan = out / "points" / "00001-top-k" / "plan.json"
    for text, problem in (('{"nodes": 1,', "Invalid JSON"), ('{"nodes": 0}', "nodes = 0: ")):
        plan.write_text(text)
        capsys.readouterr()
        assert main(["study", "show", str(out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"plan.json: {problem}" in line and "b'" not in line
        assert f"remove {plan.parent} and run the same" in line


def test_jobs_of_pbs_run_their_points(config, tmp_path, monkeypatch, capsys):
    """Two points share a job, which runs the larger point first. The smaller point fails. The next
    command plans a job only for the smaller point."""
    out = tmp_path / "out"
    fake_pbs.install(tmp_path / "bin")
    program, real = tmp_path / "bin" / "optimus", install(tmp_path / "real", "optimus.cli")
    fails = '[[ "$1 $2" != "train "*00001-top-k* ]] || exit 5'
    program.write_text(f'#!/bin/bash\n{fails}\nexec {real} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("OPTIMUS", str(program))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # the nodes of the fake PBS have no names
    assert main(study(config, out, "--submit", "pbs", "--share-jobs")) == 0
    assert "submitted 00002-top-k-and-1-more as job 1.here" in capsys.readouterr().out
    states = [result.state for result in collect(StudyDirectory(out))]
    assert [state.name for state in states] == ["failed", "done"]
    assert "exit status 5" in states[0].reason
    assert not [*out.glob("points/*/run/checkpoints/*")]
    (result,) = [result for result in collect(StudyDirectory(out)) if result.measured]
    assert result.measured.updates == STEPS - WARMUP
    assert result.lines[-1].tokens == 2 * STEPS * 8 * CONTEXT
    components = result.measured.components
    assert (
        components is not None and min(components.exposed_s["all ranks"], *_local(components)) > 0
    )
    assert main([*study(config, out), "--json"]) == 0
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert [job["points"] for job in jobs] == [["00001-top-k"]]
    # A job that has ended without a result of its point is submitted again.
    (out / "points" / "00002-top-k" / "status").unlink()
    assert StudyDirectory(out).state("00002-top-k", STEPS).name == "failed"
