"""Tests of the pool of forked ranks, which runs functions on ranks and reports every failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit.ranks.pool import RankPool, RanksFailed
from tests.kit.ranks.processes import assert_gone, is_running, wait_until

# Functions that the forked ranks run. Each rank imports this module after the fork.


def add_up(offset: int) -> tuple[int, float]:
    import torch
    import torch.distributed as distributed

    value = torch.tensor([float(distributed.get_rank() + offset)])
    distributed.all_reduce(value)
    return distributed.get_rank(), value.item()


def describe_environment() -> dict:
    import torch

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "POOL_TEST")
    return {
        "threads": torch.get_num_threads(),
        "started": torch.distributed.is_initialized(),
        "env": tuple(os.environ.get(name) for name in names),
        "rendezvous": os.environ["OPTIMUS_RENDEZVOUS"],
        "folder": os.getcwd(),
        "pid": os.getpid(),
        "parent": os.getppid(),
    }


def exit_with(status: int) -> None:
    sys.exit(status)


def raise_on(culprit: int) -> None:
    import torch
    import torch.distributed as distributed

    print("about to fail on purpose" if distributed.get_rank() == culprit else "waiting")
    if distributed.get_rank() == culprit:
        raise ValueError("the message of the culprit")
    distributed.all_reduce(torch.ones(1))


def raise_while_others_sleep() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("early")
    time.sleep(600)


def kill_rank(culprit: int, signal_number: int) -> None:
    import torch.distributed as distributed

    if distributed.get_rank() == culprit:
        os.kill(os.getpid(), signal_number)
    distributed.barrier()


def sleep_unless_first(pid_folder: str) -> None:
    """Write a file to `pid_folder`: its name is the process id of this rank, and its content is the
    process id of the parent process. Ranks other than 0 then sleep for 600 s."""
    Path(pid_folder, str(os.getpid())).write_text(str(os.getppid()))
    if os.environ["RANK"] != "0":
        time.sleep(600)


def test_ranks_form_a_group_and_results_are_ordered_by_rank(ranks):
    assert ranks(4, add_up, 10) == [(rank, 46.0) for rank in range(4)]


def test_environment_of_a_rank(ranks, rank_pool, monkeypatch, tmp_path):
    monkeypatch.setenv("POOL_TEST", "seen")
    monkeypatch.chdir(tmp_path)
    environments = ranks(2, describe_environment)
    assert [environment["env"] for environment in environments] == [
        (r, "2", r, "2", "seen") for r in ("0", "1")
    ]
    assert all(
        environment["threads"] == 1 and environment["started"] for environment in environments
    )
    assert all(environment["folder"] == str(tmp_path) for environment in environments)
    assert all(environment["parent"] == rank_pool.server_pid for environment in environments)
    assert len({environment["pid"] for environment in environments}) == 2
    assert environments[0]["rendezvous"] == environments[1]["rendezvous"]


def test_without_a_process_group_each_call_has_a_new_rendezvous(ranks):
    first = ranks(2, describe_environment, start_world=False)
    second = ranks(2, describe_environment, start_world=False)
    assert not any(environment["started"] for environment in first)
    assert first[0]["rendezvous"] != second[0]["rendezvous"]
    assert first[0]["rendezvous"].startswith("file://")


def test_exception_names_its_rank(ranks):
    with pytest.raises(RanksFailed) as caught:
        ranks(4, raise_on, 2)
    outcome = caught.value.outcomes[2]
    assert outcome.how == "raised"
    assert isinstance(outcome.value(), ValueError)
    message = str(caught.value)
    assert "rank 2 raised" in message and "the message of the culprit" in message
    assert "in raise_on" in message, "the traceback is missing"
    assert "about to fail on purpose" in message, "the rank's output is missing"
    assert not any(other.returned for other in caught.value.outcomes)


def test_failure_stops_the_other_ranks(ranks):
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        ranks(2, raise_while_others_sleep, timeout_s=60.0, grace_s=0.5, start_world=False)
    assert time.monotonic() - start < 30
    assert [outcome.how for outcome in caught.value.outcomes] == ["stopped", "raised"]
    assert "in raise_while_others_sleep" in caught.value.outcomes[0].text
    assert str(caught.value).index("rank 1 raised") < str(caught.value).index("rank 0 stopped")


@pytest.mark.parametrize("killer", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_rank_is_named(ranks, killer):
    with pytest.raises(RanksFailed) as caught:
        ranks(3, kill_rank, 1, killer)
    assert caught.value.outcomes[1].how == "died"
    assert f"killed by {killer.name}" in str(caught.value)


def test_exit_is_a_failure_even_with_status_zero(ranks):
    for status in (0, 7):
        with pytest.raises(RanksFailed) as caught:
            ranks(2, exit_with, status, start_world=False)
        assert [outcome.value().code for outcome in caught.value.outcomes] == [status, status]


def test_missing_function_is_named(ranks, monkeypatch):
    monkeypatch.setattr(add_up, "__qualname__", "no_such_function")
    with pytest.raises(RanksFailed, match="no_such_function"):
        ranks(1, add_up, 0, start_world=False)


def test_timeout_reports_the_stacks_of_waiting_ranks_and_kills_them(ranks, tmp_path):
    with pytest.raises(RanksFailed) as caught:
        ranks(3, sleep_unless_first, str(tmp_path), timeout_s=2.0, start_world=False)
    assert [outcome.how for outcome in caught.value.outcomes] == [
        "returned",
        "timed out",
        "timed out",
    ]
    assert "in sleep_unless_first" in caught.value.outcomes[1].text
    pids = [int(entry.name) for entry in tmp_path.iterdir()]
    assert len(pids) == 3 and not any(map(is_running, pids))


@pytest.mark.parametrize("victim", ["test process", "server"])
def test_ranks_end_after_a_kill_of(victim, tmp_path):
    scratch, pid_folder = tmp_path / "scratch", tmp_path / "pids"
    scratch.mkdir()
    pid_folder.mkdir()
    code = (
        "from tests.kit.ranks.pool import RankPool; import tests.test_rank_pool as functions; "
        f"pool = RankPool({str(scratch)!r}); "
        f"pool.run(3, functions.sleep_unless_first, {str(pid_folder)!r}, start_world=False)"
    )
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stderr=subprocess.PIPE) as client:
        wait_until(lambda: _filled(pid_folder) == [True] * 3, within_s=120)
        server = int(next(pid_folder.iterdir()).read_text())
        os.kill(client.pid if victim == "test process" else server, signal.SIGKILL)
        errors = client.stderr.read().decode()
    pids = [int(entry.name) for entry in pid_folder.iterdir()]
    assert_gone([server, *pids])
    if victim == "server":
        assert "the rank server ended with status -9" in errors


def test_lost_server_is_reported_and_replaced(tmp_path):
    pool = RankPool(tmp_path)
    try:
        assert pool.run(1, describe_environment, start_world=False)
        os.kill(pool.server_pid, signal.SIGKILL)
        with pytest.raises((RuntimeError, OSError)):
            pool.run(1, describe_environment, start_world=False)
        assert pool.run(1, describe_environment, start_world=False)
    finally:
        pool.close()


def _filled(folder: Path) -> list[bool]:
    """Return a bool for each file in the folder: True if the file is not empty."""
    return [entry.stat().st_size > 0 for entry in folder.iterdir()]
