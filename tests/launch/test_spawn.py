"""Processes, signals, exit statuses and kills of `optimus train --nproc N`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from optimus.config import dump_toml, make_config
from optimus.launch import spawn
from tests.kit.ranks.processes import (
    assert_gone,
    children_of,
    started,
    wait_until,
    write_hostile_modules,
)
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import train_on
from tests.train.test_run import assert_same_run, metrics_of


def write_config(path: Path, tree: dict) -> Path:
    path.write_text(dump_toml(make_config(tree)))
    return path


def start(config: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "optimus.cli", "train", str(config), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_steps(run_dir: Path, steps: int, process: subprocess.Popen) -> None:
    metrics = run_dir / "metrics.jsonl"

    def are_done() -> bool:
        assert process.poll() is None, process.communicate()
        return metrics.exists() and metrics.read_text().count("\n") >= steps

    wait_until(are_done, within_s=60)


def test_a_killed_run_resumes_to_the_same_bits(ranks, tiny_data, tmp_path):
    settings = {"train__max_steps": 60, "checkpoint__interval": 7}
    tree = tiny_tree(tiny_data, tmp_path / "killed", **settings)
    config = write_config(tmp_path / "run.toml", tree)
    first = start(config, "--nproc", "2")
    wait_for_steps(tmp_path / "killed", 17, first)
    processes = children_of(first.pid)
    assert len(processes) == 2
    first.kill()
    first.wait()
    assert_gone(processes)  # a rank that survives could write into the next run
    second = start(config, "--nproc", "2")
    _, errors = second.communicate(timeout=120)
    assert second.returncode == 0, errors
    assert "starting at step" in errors
    train_on(ranks, 2, tiny_tree(tiny_data, tmp_path / "unbroken", **settings))
    assert len(metrics_of(tmp_path / "unbroken")) == 60
    assert_same_run(tmp_path / "unbroken", tmp_path / "killed")


@pytest.mark.parametrize("number, status", [(signal.SIGKILL, 5), (signal.SIGTERM, 3)])
def test_a_signal_to_a_rank_ends_all_with_its_status(tiny_data, tmp_path, number, status):
    tree = tiny_tree(tiny_data, tmp_path / "run", train__max_steps=100_000)
    process = start(write_config(tmp_path / "run.toml", tree), "--nproc", "2")
    wait_for_steps(tmp_path / "run", 3, process)
    ranks = children_of(process.pid)
    os.kill(ranks[1], number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == status, errors
    assert "Traceback" not in errors
    assert_gone(ranks)


@pytest.mark.parametrize(
    ("number", "label", "nproc"),
    [(signal.SIGINT, "Ctrl-C", ["--nproc", "2"]), (signal.SIGUSR1, "SIGUSR1", [])],
)
def test_stop_signal_ends_in_a_checkpoint_and_names_the_signal(
    tiny_data, tmp_path, number, label, nproc
):
    tree = tiny_tree(tiny_data, tmp_path / "run", train__max_steps=100_000)
    process = start(write_config(tmp_path / "run.toml", tree), *nproc)
    wait_for_steps(tmp_path / "run", 3, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    last = metrics_of(tmp_path / "run")[-1]["step"]
    checkpoint = tmp_path / "run" / "checkpoints" / f"step-{last:08d}"
    assert checkpoint.is_dir()
    assert f"optimus: {label}: finishing this step and saving a checkpoint" in errors
    assert errors.splitlines()[-1] == (
        f"optimus: stopped after step {last} ({label}), checkpoint at {checkpoint}; run the same "
        "command again to continue"
    )
    assert "error" not in errors and "SIGTERM" not in errors


@pytest.mark.parametrize(("lost", "status"), [(False, 130), (True, 5)])
def test_second_ctrl_c_ends_all_ranks(tiny_data, tmp_path, lost, status):
    """SIGSTOP on the ranks simulates a step that does not end. The second Ctrl-C must end all
    ranks. If a rank was killed before the second Ctrl-C, the error must report this rank."""
    tree = tiny_tree(tiny_data, tmp_path / "run", train__max_steps=100_000)
    process = start(write_config(tmp_path / "run.toml", tree), "--nproc", "2")
    wait_for_steps(tmp_path / "run", 1, process)
    ranks = children_of(process.pid)
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    wait_until(lambda: all(map(is_stopped, ranks)), within_s=30)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: is_pending(ranks[1], signal.SIGTERM), within_s=30)
    if lost:
        os.kill(ranks[1], signal.SIGKILL)
        gone = Path(f"/proc/{ranks[1]}")  # exists until the parent process reads the exit status
        wait_until(lambda: not gone.exists(), within_s=30)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == status, errors
    last = "error: rank 1 was ended by SIGKILL" if lost else "interrupted"
    assert errors.splitlines()[-1] == f"optimus: {last}"
    assert errors.count("error") == lost
    assert_gone(ranks)


def start_scripts(*scripts: str) -> list[subprocess.Popen]:
    return [subprocess.Popen([sys.executable, "-S", "-c", script]) for script in scripts]


@pytest.mark.parametrize(("status", "result"), [(3, 3), (4, 4)])
def test_ranks_that_end_late_after_a_stop_are_waited_for(monkeypatch, status, result):
    """After a rank has stopped (status 3), the launcher waits for a rank that ends 1.5 s later.
    After a rank has failed (status 4), the launcher kills the late rank."""
    monkeypatch.setattr(spawn, "_GRACE_S", 0.1)
    late = f"import time; time.sleep(1.5); raise SystemExit({status})"
    ranks = start_scripts(late, f"raise SystemExit({status})")
    assert spawn._watch(ranks, []) == result
    assert ranks[0].returncode == (3 if status == 3 else -signal.SIGKILL)


def test_a_rank_that_hangs_after_a_stop_is_killed_and_reported(monkeypatch, capsys):
    monkeypatch.setattr(spawn, "_STOP_GRACE_S", 0.3)
    ranks = start_scripts("import time; time.sleep(60)", "raise SystemExit(3)")
    assert spawn._watch(ranks, []) == 5
    assert ranks[0].returncode == -signal.SIGKILL
    assert "rank 0 was killed: it did not end within 0 s" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "result"), [(1, 1), (5, 5)])
def test_a_rank_that_hangs_after_a_stop_and_a_failure(monkeypatch, capsys, status, result):
    monkeypatch.setattr(spawn, "_GRACE_S", 0.3)
    late = "import time; time.sleep(60)"
    ranks = start_scripts(late, "raise SystemExit(3)", f"raise SystemExit({status})")
    assert spawn._watch(ranks, []) == result
    assert "within 0 s after another rank had failed" in capsys.readouterr().err


def test_the_time_after_a_failure_counts_from_the_failure(monkeypatch):
    """After a failure, the other ranks have 2 s to end. The 2 s start at the failure of rank 1, not
    at the earlier stop of rank 0, so the launcher does not kill rank 2."""
    monkeypatch.setattr(spawn, "_GRACE_S", 2.0)
    late = "import time; time.sleep({}); raise SystemExit({})"
    ranks = start_scripts("raise SystemExit(3)", late.format(1.5, 4), late.format(2.5, 3))
    assert spawn._watch(ranks, []) == 4
    assert [rank.returncode for rank in ranks] == [3, 4, 3]


def status_of(pid: int, field: str) -> str:
    """Return the first word of a field of /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{field}:"))


def is_stopped(pid: int) -> bool:
    """Return True if SIGSTOP has stopped the process.

    A test must wait for the stop before it sends SIGTERM. If both signals are pending, the kernel
    delivers SIGTERM first, because SIGTERM has the lower number.
    """
    return status_of(pid, "State") == "T"


def is_pending(pid: int, number: int) -> bool:
    """Return True if signal `number` was sent to process `pid` and is not delivered yet."""
    return bool(int(status_of(pid, "ShdPnd"), 16) >> (number - 1) & 1)


def test_ctrl_c_before_the_first_step_prints_a_single_line(tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path / "run")
    process = start(write_config(tmp_path / "run.toml", tree), "--nproc", "2")
    wait_until(lambda: len(children_of(process.pid)) == 2, within_s=60)
    ranks = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert errors == (
        "optimus: starting 2 ranks\noptimus: stopped before the first step (Ctrl-C); run the same "
        "command again to start\n"
    )
    assert_gone(ranks)


@pytest.mark.parametrize("nproc", [[], ["--nproc", "2"]])
def test_training_continues_without_a_reader_of_its_output(tiny_data, tmp_path, nproc):
    """The run completes although the reader closes the pipes of stdout and stderr after the first
    line, as `| head -1` does."""
    tree = tiny_tree(tiny_data, tmp_path / "run", train__max_steps=8, observe__tensorboard=True)
    tree["observe"]["log_interval"] = 1
    config = write_config(tmp_path / "run.toml", tree)
    process = start(config, *nproc)
    assert process.stderr.readline().startswith("optimus: ")
    process.stderr.close()
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert [record["step"] for record in metrics_of(tmp_path / "run")] == list(range(1, 9))
    assert (tmp_path / "run" / "checkpoints" / "step-00000008").is_dir()


def test_training_runs_with_closed_outputs(tiny_data, tmp_path):
    """The run completes although stdin, stdout and stderr are closed when the command starts."""
    tree = tiny_tree(tiny_data, tmp_path / "run", train__max_steps=4)
    config = write_config(tmp_path / "run.toml", tree)
    command = [sys.executable, "-m", "optimus.cli", "train", str(config)]
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    assert subprocess.run(shell, timeout=120).returncode == 0
    assert len(metrics_of(tmp_path / "run")) == 4


def test_ranks_import_nothing_from_the_working_directory(ranks, tiny_data, tmp_path):
    """The run completes although the working directory contains modules that raise an error on
    import."""
    settings = {"train__max_steps": 4, "kernels__grouped_gemm": "loop"}
    trees = [tiny_tree(tiny_data, tmp_path / name, **settings) for name in "ab"]
    train_on(ranks, 2, trees[0])
    config = write_config(tmp_path / "run.toml", trees[1])
    # -P: like the command `optimus`, the main process imports nothing from the working directory.
    words = [sys.executable, "-P", "-m", "optimus.cli", "train", str(config), "--nproc", "2"]
    done = started(words, write_hostile_modules(tmp_path / "folder"))
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_mistake_is_printed_once_before_ranks_start(tiny_data, tmp_path):
    config = write_config(tmp_path / "run.toml", tiny_tree(tiny_data, tmp_path / "run"))
    process = start(config, "train.seq_len=16", "--nproc", "2", "train.global_batch_tokens=256")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.count("\n") == 1 and "train.seq_len = 16" in errors and output == ""


@pytest.mark.parametrize(
    ("statuses", "result"),
    [([0, 0], 0), ([0, 5], 5), ([5, 4], 4), ([-9, 5], 5), ([5, 1], 1), ([3, 3], 3)],
)
def test_a_cause_comes_before_a_lost_peer(statuses, result):
    ranks = [
        SimpleNamespace(returncode=status, poll=lambda status=status: status, wait=lambda: None)
        for status in statuses
    ]
    assert spawn._watch(ranks, []) == result
