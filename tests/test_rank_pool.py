"""The forked rank pool: it computes, and it hides nothing that goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.processes import assert_gone, is_running, wait_until
from tests.helpers.rank_pool import RankPool, RanksFailed

# What the ranks run. They import this module themselves, after the fork.


def add_up(offset: int) -> tuple[int, float]:
    import torch
    import torch.distributed as distributed

    value = torch.tensor([float(distributed.get_rank() + offset)])
    distributed.all_reduce(value)
    return distributed.get_rank(), value.item()


def describe_surroundings() -> dict:
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


def leave_with(status: int) -> None:
    sys.exit(status)


def one_raises(culprit: int) -> None:
    import torch
    import torch.distributed as distributed

    print("about to fail on purpose" if distributed.get_rank() == culprit else "waiting")
    if distributed.get_rank() == culprit:
        raise ValueError("the culprit's own words")
    distributed.all_reduce(torch.ones(1))


def one_raises_while_others_sleep() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("early")
    time.sleep(600)


def one_is_killed(culprit: int, how: int) -> None:
    import torch.distributed as distributed

    if distributed.get_rank() == culprit:
        os.kill(os.getpid(), how)
    distributed.barrier()


def wait_here(pid_folder: str) -> None:
    """Leave a file named after this process, holding its parent's number; rank 0 does not wait."""
    Path(pid_folder, str(os.getpid())).write_text(str(os.getppid()))
    if os.environ["RANK"] != "0":
        time.sleep(600)


def test_ranks_form_a_group_and_results_come_by_rank(ranks):
    assert ranks(4, add_up, 10) == [(rank, 46.0) for rank in range(4)]


def test_surroundings_of_a_rank(ranks, rank_pool, monkeypatch, tmp_path):
    monkeypatch.setenv("POOL_TEST", "seen")
    monkeypatch.chdir(tmp_path)
    found = ranks(2, describe_surroundings)
    assert [one["env"] for one in found] == [(r, "2", r, "2", "seen") for r in ("0", "1")]
    assert all(one["threads"] == 1 and one["started"] for one in found)
    assert all(one["folder"] == str(tmp_path) for one in found)
    assert all(one["parent"] == rank_pool.server_pid for one in found)
    assert len({one["pid"] for one in found}) == 2
    assert found[0]["rendezvous"] == found[1]["rendezvous"]


def test_without_a_process_group_and_a_fresh_rendezvous_each_time(ranks):
    first = ranks(2, describe_surroundings, start_world=False)
    second = ranks(2, describe_surroundings, start_world=False)
    assert not any(one["started"] for one in first)
    assert first[0]["rendezvous"] != second[0]["rendezvous"]
    assert first[0]["rendezvous"].startswith("file://")


def test_an_exception_names_its_rank(ranks):
    with pytest.raises(RanksFailed) as caught:
        ranks(4, one_raises, 2)
    outcome = caught.value.outcomes[2]
    assert outcome.how == "raised"
    assert isinstance(outcome.value(), ValueError)
    message = str(caught.value)
    assert "rank 2 raised" in message and "the culprit's own words" in message
    assert "in one_raises" in message, "the traceback is missing"
    assert "about to fail on purpose" in message, "the rank's output is missing"
    assert not any(other.returned for other in caught.value.outcomes)


def test_after_a_failure_the_others_are_not_waited_for(ranks):
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        ranks(2, one_raises_while_others_sleep, timeout_s=60.0, grace_s=0.5, start_world=False)
    assert time.monotonic() - start < 30
    assert [outcome.how for outcome in caught.value.outcomes] == ["stopped", "raised"]
    assert "in one_raises_while_others_sleep" in caught.value.outcomes[0].text
    assert str(caught.value).index("rank 1 raised") < str(caught.value).index("rank 0 stopped")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_named(ranks, how):
    with pytest.raises(RanksFailed) as caught:
        ranks(3, one_is_killed, 1, how)
    assert caught.value.outcomes[1].how == "died"
    assert f"killed by {how.name}" in str(caught.value)


def test_leaving_early_is_a_failure_even_with_status_zero(ranks):
    for status in (0, 7):
        with pytest.raises(RanksFailed) as caught:
            ranks(2, leave_with, status, start_world=False)
        assert [outcome.value().code for outcome in caught.value.outcomes] == [status, status]


def test_a_function_that_cannot_be_found_is_named(ranks, monkeypatch):
    monkeypatch.setattr(add_up, "__qualname__", "no_such_function")
    with pytest.raises(RanksFailed, match="no_such_function"):
        ranks(1, add_up, 0, start_world=False)


def test_timeout_names_the_waiting_ranks_with_their_stacks_and_kills_them(ranks, tmp_path):
    with pytest.raises(RanksFailed) as caught:
        ranks(3, wait_here, str(tmp_path), timeout_s=2.0, start_world=False)
    assert [outcome.how for outcome in caught.value.outcomes] == [
        "returned",
        "timed out",
        "timed out",
    ]
    assert "in wait_here" in caught.value.outcomes[1].text
    pids = [int(entry.name) for entry in tmp_path.iterdir()]
    assert len(pids) == 3 and not any(map(is_running, pids))


@pytest.mark.parametrize("victim", ["test process", "server"])
def test_ranks_do_not_outlive_a_killed(victim, tmp_path):
    scratch, noted = tmp_path / "scratch", tmp_path / "noted"
    scratch.mkdir()
    noted.mkdir()
    code = (
        "from tests.helpers.rank_pool import RankPool; from tests.test_rank_pool import wait_here; "
        f"RankPool({str(scratch)!r}).run(3, wait_here, {str(noted)!r}, start_world=False)"
    )
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stderr=subprocess.PIPE) as client:
        wait_until(lambda: _filled(noted) == [True] * 3, within_s=120)
        server = int(next(noted.iterdir()).read_text())
        os.kill(client.pid if victim == "test process" else server, signal.SIGKILL)
        errors = client.stderr.read().decode()
    pids = [int(entry.name) for entry in noted.iterdir()]
    assert_gone([server, *pids])
    if victim == "server":
        assert "the rank server ended with status -9" in errors


def test_a_lost_server_is_reported_and_replaced(tmp_path):
    pool = RankPool(tmp_path)
    try:
        assert pool.run(1, describe_surroundings, start_world=False)
        os.kill(pool.server_pid, signal.SIGKILL)
        with pytest.raises((RuntimeError, OSError)):
            pool.run(1, describe_surroundings, start_world=False)
        assert pool.run(1, describe_surroundings, start_world=False)
    finally:
        pool.close()


def _filled(folder: Path) -> list[bool]:
    """For each file in the folder, whether anything has been written to it."""
    return [entry.stat().st_size > 0 for entry in folder.iterdir()]
