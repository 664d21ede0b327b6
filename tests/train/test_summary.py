from __future__ import annotations

import os
import shutil

import pytest

from optimus.cli import main as optimus
from optimus.config import Config, dump_toml, make_config
from optimus.observe.events import EvalRecord
from optimus.train.resolve import RunPlan, resolve
from optimus.train.run_dir import RunDirectory
from optimus.train.summary import print_end, print_start
from tests.kit.runs.tiny import reshuffle, tiny_tree
from tests.kit.runs.training import printed_by, run_and_catch, run_tree


def resolved(data, run_dir, world_size=1, **overrides) -> tuple[Config, RunPlan]:
    config = make_config(tiny_tree(data, run_dir, **overrides))
    return config, resolve(config, world_size)


def table(text: str) -> dict[str, str]:
    """Parse a summary into values by row name. A line without a name continues the row above."""
    rows: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("  "):
            name, _, fact = line[2:].partition("  ")
            name = name or list(rows)[-1]
            rows[name] = f"{rows[name]} | {fact.strip()}" if name in rows else fact.strip()
    return rows


def test_start_summary_describes_the_run(tiny_data, tmp_path, capsys):
    layout = {"parallel__pp": 2, "parallel__ep": 2, "optim__sharding": "epso"}
    more = {"checkpoint__model_interval": 10, "train__eval_interval": 5, "train__eval_instances": 3}
    config, plan = resolved(tiny_data, tmp_path / "run", 8, **layout, **more)
    print_start(config, plan, 8)
    printed = capsys.readouterr()
    rows = table(printed.err)
    assert printed.out == "" and "warning" not in printed.err
    # Each of 2 layers has 4 experts of 3 * 32 * 16 parameters. A token uses 2 of the experts.
    assert "parameters" in rows["model"] and rows["model"].endswith("; fp32")
    total, active = (
        int(word.replace(",", "")) for word in rows["model"].split() if "," in word[:-1]
    )
    assert total - active == 2 * 2 * 3 * 32 * 16
    assert rows["layout"] == (
        "8 ranks (pp 2, dp 2, ep 2); schedule 1f1b, 2 stages; optim.sharding epso"
    )
    count = plan.data.training.num_instances
    epochs = f"{20 * 8 / count:.3g}"
    assert rows["data"] == f"{count} instances of 32 tokens, {epochs} epochs: {tiny_data}"
    assert rows["held out"] == f"3 instances, every 5 steps and at the end: {tiny_data}/eval"
    assert rows["batch"] == (
        "256 tokens per step: 2 microbatches of 1 instance on each of 4 data ranks"
    )
    assert rows["steps"] == "1 to 20, 5,120 tokens in all"
    assert rows["checkpoints"] == "full every 6 steps and at the end, model-only every 10 steps"
    assert rows["files"] == str(tmp_path / "run")


@pytest.mark.parametrize(("steps", "warned"), [(300, False), (310, True)])
def test_repeated_text_gives_a_warning(tiny_data, tmp_path, capsys, steps, warned):
    config, plan = resolved(tiny_data, tmp_path / "run", train__max_steps=steps)
    most = 4 * plan.data.training.num_instances // 8
    assert 300 <= most < 310, "the tiny data set has another size"
    print_start(config, plan, 1)
    text = capsys.readouterr().err
    assert (
        "more than about 4 epochs improve a model little; use more text, or set "
        f"train.max_steps={most}" in text
    ) == warned


def test_sources_of_a_mix_have_separate_epochs(tiny_data, tmp_path, capsys):
    other = reshuffle(tiny_data, tmp_path / "other", "--seed", "8")
    mix = [{"path": str(tiny_data), "weight": 3}, {"path": str(other), "weight": 1}]
    settings = {"data__path": "", "data__mix": mix, "train__max_steps": 400}
    config, plan = resolved("", tmp_path / "run", **settings)
    print_start(config, plan, 1)
    text = capsys.readouterr().err
    first, second = (
        400 * 8 * w / 4 / s.num_instances
        for w, s in zip((3, 1), plan.data.training.sources, strict=True)
    )
    facts = table(text)["data"].split(" | ")
    assert facts[0] == "a mix of 2 data sets"
    assert f"{first:.3g} epochs: {tiny_data}" in facts[1]
    assert f"{second:.3g} epochs: {other}" in facts[2]


def test_end_summary_has_results_and_next_commands(tiny_data, tmp_path, capsys):
    run_dir = tmp_path / "it's a run"
    config, plan = resolved(tiny_data, run_dir)
    evaluation = EvalRecord(20, "held-out", 3.3, 512)
    checkpoint = run_dir / "checkpoints" / "step-00000020"
    print_end(config.train, config.model, plan, 20, 184.2, 3.21, evaluation, checkpoint)
    text = capsys.readouterr().err
    rows = table(text)
    assert text.startswith("optimus: done\n")
    assert rows["steps"] == "1 to 20 in 3 min 4 s; 5,120 tokens in all"
    assert (rows["loss"], rows["held-out loss"]) == ("3.2100", "3.3000 at step 20")
    assert rows["checkpoint"] == f"{run_dir}/checkpoints/step-00000020"
    quoted = "'" + str(run_dir).replace("'", "'\"'\"'") + "'"
    assert f"optimus eval {quoted} {tiny_data}/eval" in rows["next"].split(" | ")
    commands = [command.split()[1] for command in rows["next"].split(" | ")]
    assert commands == ["report", "generate", "eval", "convert"]
    print_end(config.train, config.model, plan, 7, 1, None, None, None)
    text = capsys.readouterr().err
    assert text.startswith("optimus: stopped at step 7 of 20\n") and "loss" not in text


def test_run_without_checkpoints_saves_nothing_and_starts_again(ranks, tiny_data, tmp_path):
    """A run without checkpoints completes. A second command for the same run starts at step 1
    again, is stopped by its deadline after the first update, and saves no checkpoint."""
    settings = {"checkpoint__interval": 0, "checkpoint__at_end": False, "train__max_steps": 3}
    tree = tiny_tree(tiny_data, tmp_path, **settings)
    text = ranks(1, printed_by, tree, start_world=False, timeout_s=120)[0]
    assert table(text.partition("done")[0])["checkpoints"] == "no full checkpoint"
    rows = table(text.partition("done")[2])
    assert rows["checkpoint"] == "none" and rows["next"] == f"optimus report {tmp_path}"
    tree["train"]["deadline_s"] = 1e-3
    (status, message), *_ = ranks(1, run_and_catch, tree, start_world=False, timeout_s=120)
    assert status == 3 and "stopped after step 1" in message and "no checkpoint" in message
    assert not [*(tmp_path / "checkpoints").glob("*")]


def test_run_logs_each_summary_once(ranks, tiny_data, tmp_path):
    """The first command stops at step 2, the second command has no steps left, and the third
    command completes the run. Each command must log one summary, only on rank 0."""
    settings = {"train__max_steps": 4, "train__global_batch_tokens": 0}
    stop = {"train__stop_at_step": 2}
    tree = tiny_tree(tiny_data, tmp_path / "run", **settings)
    stopped = tiny_tree(tiny_data, tmp_path / "run", **settings, **stop)
    first, second = ranks(2, printed_by, stopped, start_world=False, timeout_s=120)
    assert second == ""
    assert "optimus: stopped at step 2 of 4; raise train.stop_at_step to continue" in first
    nothing = ranks(2, printed_by, stopped, start_world=False, timeout_s=120)[0]
    assert "nothing to do: the run is at step 2" in nothing
    assert "raise train.stop_at_step to continue" in nothing
    assert "none left after step 2 (train.max_steps = 4)" in nothing
    was, now = table(first.partition("stopped")[2]), table(nothing.partition("stopped")[2])
    assert now.pop("steps").startswith("none;") and was.pop("steps").startswith("1 to 2 in")
    assert now == was and "held-out loss" in was
    done = ranks(2, printed_by, tree, start_world=False, timeout_s=120)[0]
    assert done.count("optimus: this run\n") == done.count("optimus: done\n") == 1
    assert table(done.partition("optimus: done")[2])["steps"].startswith("3 to 4 in")


MISSING = {"data__path": "/nowhere"}


def dry(tmp_path, capfd, data, *options: str, **overrides) -> tuple[int, list[str]]:
    """Run `optimus train --dry-run`. Return the exit status, and the lines that the command prints
    on stderr: the summary or an error."""
    config = tmp_path / "run.toml"
    config.write_text(dump_toml(make_config(tiny_tree(data, tmp_path / "run", **overrides))))
    code = optimus(["train", str(config), "--dry-run", *options])
    printed = capfd.readouterr()
    assert printed.out == ""
    return code, printed.err.splitlines()


@pytest.mark.parametrize(
    ("options", "overrides", "message"),
    [
        (
            ["--nodes", "3"],
            {"parallel__pp": 2},
            "world of 3 ranks; use a multiple of 2 ranks, such as 4",
        ),
        (
            ["--nodes", "2", "--nproc", "8"],
            {"parallel__dp": 4},
            "parallel.dp = 4 needs a world of 4",
        ),
        (["--nodes", "0"], {}, "--nodes 0 and --nproc 1: both must be at least 1"),
        (["--nproc", "0"], {}, "--nodes 1 and --nproc 0: both must be at least 1"),
        ([], MISSING, "/nowhere"),
        ([], {"train__seq_len": 64}, "train.seq_len = 64, but data.path"),
        ([], {"checkpoint__load": "/nowhere"}, "/nowhere: no such checkpoint"),
        (
            ["--skip-data-check"],
            {"data__path": "/nowhere", "checkpoint__load": "model@3"},
            "model@3",
        ),
    ],
)
def test_dry_run_refuses_as_a_run_does(tiny_data, tmp_path, capfd, options, overrides, message):
    code, (line,) = dry(tmp_path, capfd, tiny_data, *options, **overrides)
    assert code == 2 and line.startswith("optimus: error: ") and message in line
    assert not (tmp_path / "run").exists()


def test_dry_run_prints_the_summary_and_creates_nothing(tiny_data, tmp_path, capfd):
    layout = {"parallel__pp": 2, "train__global_batch_tokens": 0}
    code, lines = dry(tmp_path, capfd, tiny_data, "--nodes", "2", "--nproc", "4", **layout)
    assert code == 0 and lines[0] == "optimus: this run"
    assert any("8 ranks (pp 2, dp 4)" in line for line in lines)
    assert lines[-1] == "optimus: dry run: all checks passed, and no file was created"
    assert not (tmp_path / "run").exists()
    skip = ["--skip-data-check", "--skip-run-dir-check"]
    code, lines = dry(tmp_path, capfd, "/nowhere", *skip, train__run_dir="/no/where")
    assert code == 0 and not any("/nowhere" in line for line in lines)
    last = "dry run: all checks except the skipped checks passed, and no file was created"
    assert lines[-1] == f"optimus: {last}"


@pytest.mark.parametrize("split", ["", "eval"])
def test_dry_run_and_run_refuse_a_missing_or_short_shard(tiny_data, tmp_path, capfd, split):
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    shard = data / split / "shards" / "shard-00000.npy"
    for damage, problem, status in (
        (lambda: os.truncate(shard, 1000), "has 1000 bytes, the manifest says", 1),
        (shard.unlink, "cannot be read: No such file or directory", 2),
    ):
        damage()
        code, lines = dry(tmp_path, capfd, str(data))
        assert code == status
        assert f"{shard}: {problem}" in lines[-1] and "run optimus-data verify" in lines[-1]
        assert optimus(["train", str(tmp_path / "run.toml")]) == status
        assert f"{shard}: {problem}" in capfd.readouterr().err
        assert not (tmp_path / "run").exists()


def test_dry_run_without_data_takes_a_start_from_a_model(tiny_data, tmp_path, capfd):
    train = {"train__max_steps": 2, "optim__warmup_steps": 0}
    run_tree(tiny_tree(tiny_data, tmp_path / "run", **train, checkpoint__model_interval=1))
    options = {"train__max_steps": 3, "checkpoint__load": "model@1"}
    code, lines = dry(tmp_path, capfd, "/nowhere", "--skip-data-check", **options)
    assert code == 0 and any("model-00000001" in line for line in lines)


def test_dry_run_looks_at_the_run_directory_without_changing_it(tiny_data, tmp_path, capfd):
    run_tree(tiny_tree(tiny_data, tmp_path / "run", train__max_steps=1, optim__warmup_steps=0))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    code, lines = dry(tmp_path, capfd, tiny_data)
    assert code == 0 and any("starting at step 1 from" in line for line in lines)
    code, (line,) = dry(tmp_path, capfd, tiny_data, model__num_layers=3)
    assert code == 2 and "model.num_layers = 3 (checkpoint of step 1: 2)" in line
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    locked = RunDirectory(tmp_path / "run")
    code, (line,) = dry(tmp_path, capfd, tiny_data)
    assert code == 2 and "is in use by another run" in line
    del locked


@pytest.mark.parametrize(
    "option", [["--nodes", "2"], ["--nodes", "0"], ["--machine", "aurora"], ["--skip-data-check"]]
)
def test_options_of_a_dry_run_are_refused_without_it(option, capfd):
    assert optimus(["train", "any.toml", *option]) == 2
    assert f"{option[0]} has an effect only with --dry-run" in capfd.readouterr().err
