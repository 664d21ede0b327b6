"""Tests of ranks that share the work of a command through files: shares, waiting, lost ranks, and
changed world sizes."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from data_prep.cli import main
from data_prep.cli.options import worker_group_of
from data_prep.runtime import ranks as ranks_module
from data_prep.runtime import workspace
from data_prep.runtime.ranks import (
    RankFiles,
    WorkerGroup,
    failure_scope,
    run_task,
    share,
    wait_for,
)
from data_prep.runtime.workspace import working_in
from data_prep.tokenize.plan import read_plan
from optimus.errors import DataError, LostPeerError
from optimus.io import files
from tests.data_prep.corpus import refused, run_arguments, tree


def start_rank(arguments: list[str], delay_s: float | None = None) -> int:
    """Fork a process that runs a command. If `delay_s` is set, a signal ends the process after this
    number of seconds. Return the process id."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            if delay_s is not None:
                signal.setitimer(signal.ITIMER_REAL, delay_s)  # SIGALRM kills as SIGKILL would
            status = main(arguments)
        finally:
            os._exit(status)
    return pid


def statuses(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def test_shares_are_complete_and_balanced():
    rng = random.Random(0)
    sizes = [rng.choice([0, 1, 10, 1000, rng.randrange(10**6)]) for _ in range(300)]
    for world in (1, 2, 7, 400):
        shares = [share(sizes, rank, world) for rank in range(world)]
        assert sorted(index for shared in shares for index in shared) == list(range(300))
        loads = [sum(sizes[index] for index in shared) for shared in shares]
        best = max(sum(sizes) / world, max(sizes))
        assert max(loads) <= 4 / 3 * best + 300
    assert share([], 0, 3) == []
    assert [len(share([8] + [1] * 8, rank, 2)) for rank in (0, 1)] == [1, 8]


def test_largest_size_is_assigned_first():
    """If items were assigned in the order of their numbers, the rank with the large item would also
    get half of the other items."""
    sizes = [1] * 8 + [8]
    assert [sorted(share(sizes, rank, 2)) for rank in (0, 1)] == [[8], list(range(8))]


def test_killed_ranks_continue_with_another_world_size(made, tmp_path):
    """Three ranks are killed at random times. Then two ranks complete the work."""
    out, rng = tmp_path / "data", random.Random(3)
    killed = 0
    for _ in range(12):  # a rank also ends early if another rank is lost
        arguments = run_arguments(made.text, made.tokenizer, out, "--world", "3")
        ranks = [
            start_rank([*arguments, "--rank", str(rank)], 0.05 + 0.2 * rng.random())
            for rank in range(3)
        ]
        ended = statuses(ranks)
        killed += sum(status == -signal.SIGALRM for status in ended)
        if killed >= 6:
            break
        if not any(ended):  # the ranks ended before the kills
            shutil.rmtree(out)
    assert killed >= 6
    arguments = run_arguments(made.text, made.tokenizer, out, "--world", "2")
    assert statuses([start_rank([*arguments, "--rank", str(rank)]) for rank in range(2)]) == [0] * 2
    assert main(run_arguments(made.text, made.tokenizer, out)) == 0  # removes temporary files
    assert tree(out) == tree(made.data)


@pytest.mark.parametrize("rank", [0, 2])
def test_rank_without_the_others_does_its_share_and_names_the_remedy(
    made, tmp_path, rank, monkeypatch, capsys
):
    out = tmp_path / "data"
    arguments = run_arguments(made.text, made.tokenizer, out, "--world", "3")
    command = [*arguments, "--rank", str(rank)]
    with monkeypatch.context() as patch:
        patch.setattr(
            "data_prep.cli.options.worker_group_of", lambda args: WorkerGroup(rank, 3, 0.1)
        )
        assert main(command) == 5
    error = capsys.readouterr().err.splitlines()[-1]
    lost = "0, 1" if rank else "1, 2"
    assert f"no heartbeat of rank {lost} for 0.1 s while waiting for items in" in error
    assert "run the same command again on all ranks" in error
    assert any((out / "tokens").glob("unit-*.json")) and not (out / "manifest.json").exists()
    assert statuses([start_rank([*arguments, "--rank", str(rank)]) for rank in range(3)]) == [0] * 3
    assert main(arguments[:-2]) == 0  # removes temporary files
    assert tree(out) == tree(made.data)


@pytest.mark.parametrize("command", ["run", "tokenize", "shard", "blend"])
def test_patience_is_refused_with_the_remedy(command, capsys):
    error = refused(capsys, [command, "--patience", "9"])
    assert "--patience 9 is not an option any more" in error
    assert "run the same command again on all ranks" in error


def test_ranks_make_missing_and_damaged_files_again(made, tmp_path):
    out = tmp_path / "data"
    shutil.copytree(made.data, out)
    (out / "tokens" / "unit-00003.npy").unlink()
    (out / "shards" / "shard-00002.json").write_bytes(b"{}")
    (out / "manifest.json").unlink()
    arguments = run_arguments(made.text, made.tokenizer, out, "--world", "2")
    assert statuses([start_rank([*arguments, "--rank", rank]) for rank in "01"]) == [0] * 2
    assert tree(out) == tree(made.data)


def test_rank_with_other_options_is_refused(made, tmp_path, capsys):
    out = tmp_path / "data"
    assert main(run_arguments(made.text, made.tokenizer, out)) == 0
    for option, value in (("--seed", "9"), ("--context", "17"), ("--shard-size", "4096")):
        more = ["--rank", "1", "--world", "2", option, value]
        refused(capsys, run_arguments(made.text, made.tokenizer, out, *more), "was shuffled with")
    error = refused(
        capsys, run_arguments(made.text, made.tokenizer, out, "--rank", "2", "--world", "2")
    )
    assert "--rank 2 must be below --world 2" in error


class Items:
    """A task of two items, one for each rank. Rank 1 never completes its item."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: list[int] = []
        self.do = self.done.extend

    def plan(self) -> list[int]:
        return [1, 1]

    def missing(self) -> list[int]:
        return [index for index in (0, 1) if index not in self.done]

    def verify(self) -> list[int]:
        return []


def test_rank_waits_while_another_rank_sends_heartbeats(tmp_path):
    """The other rank sends heartbeats but writes nothing, because it hashes for a long time. Then
    the other rank is killed."""
    start, items = time.monotonic(), Items(tmp_path)
    pid = os.fork()
    if pid == 0:
        with failure_scope(WorkerGroup(1, 2, 0.4), tmp_path):
            time.sleep(1.2)
            os.kill(os.getpid(), signal.SIGKILL)
    with (
        pytest.raises(LostPeerError, match="no heartbeat of rank 1 for 0.4 s .* same command"),
        failure_scope(WorkerGroup(0, 2, 0.4), tmp_path) as group,
    ):
        run_task(group, items)
    assert items.done == [0] and 1.3 < time.monotonic() - start < 5
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    (left,) = tmp_path.glob(".alive-rank-*")
    assert left.name.startswith(".alive-rank-1.")
    assert [path.read_text() for path in tmp_path.glob(".failed-rank-1.*")] == [
        "no heartbeat of this rank for 0.4 s; check its process"
    ]
    with working_in(tmp_path), failure_scope(WorkerGroup(0, 2), tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_rank_that_has_not_started_is_lost_only_if_the_others_make_no_progress():
    watch, left = ranks_module._Watch(WorkerGroup(0, 3)), Counter({1: 1, 2: 1})
    assert {str(watch.look(left, lambda n=n: n)) for n in range(40)} == {"([], False)"}
    assert [watch.look(left, lambda: 40)[0] for _ in range(16)][-1] == [1, 2]


def test_rank_whose_signs_stop_is_lost_though_others_make_progress(tmp_path):
    group = WorkerGroup(0, 3, files=RankFiles(tmp_path))
    watch, left, sign = ranks_module._Watch(group), Counter({1: 1}), tmp_path / ".alive-rank-1.tmp"
    results = []
    for n in range(30):
        if n < 20:
            sign.touch()
            os.utime(sign, ns=(0, n))
        results.append(watch.look(left, lambda n=n: n)[0])
    assert results == [[]] * 27 + [[1]] * 3


def test_files_of_killed_ranks_of_an_earlier_run_are_no_signs_of_life(tmp_path):
    """Files that killed ranks of an earlier run have left must not count as heartbeats. The removal
    of these files by a starting rank must not count either."""
    old = tmp_path / ".alive-rank-1.tmp"
    old.touch()
    watch = ranks_module._Watch(WorkerGroup(0, 3, files=RankFiles(tmp_path)))
    for n in range(30):
        assert watch.look(Counter({1: 1}), lambda n=n: n) == ([], False)
        if n == 5:
            old.unlink()


def test_rank_that_was_killed_between_two_waits_is_lost(tmp_path):
    files_of_run, sign = RankFiles(tmp_path), tmp_path / ".alive-rank-1.tmp"
    sign.touch()
    watch = ranks_module._Watch(WorkerGroup(0, 3, files=files_of_run))
    lost = [watch.look(Counter({1: 1}), lambda n=n: n)[0] for n in range(9)]
    assert lost == [[]] * 8 + [[1]]


def test_each_waiting_rank_watches_the_ranks_after_it():
    left = Counter(range(0, 100, 2))
    watched = []
    for rank in (0, 51, 98):  # without heartbeats, all watched ranks are lost
        watch = ranks_module._Watch(WorkerGroup(rank, 100))
        watched.append([watch.look(left, lambda: None)[0] for _ in range(9)][-1])
    assert watched[0] == list(range(2, 34, 2)) and watched[1] == list(range(52, 84, 2))
    assert watched[2] == list(range(0, 32, 2))


def test_rank_zero_that_is_killed_is_noticed_soon(tmp_path):
    pid = os.fork()
    if pid == 0:
        with failure_scope(WorkerGroup(0, 2, 0.4), tmp_path) as group:
            wait_for(group, lambda: False, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    start = time.monotonic()
    with (
        pytest.raises(LostPeerError, match="rank 0 for 0.4 s while waiting for work that rank 0"),
        failure_scope(WorkerGroup(1, 2, 0.4), tmp_path) as group,
    ):
        wait_for(group, lambda: False, lambda: None)
    assert time.monotonic() - start < 5


def test_waiting_for_a_rank_without_progress_has_a_limit(tmp_path, monkeypatch):
    """The other rank sends heartbeats, but the file that the rank writes grows only for a
    second."""
    monkeypatch.setattr(ranks_module, "_STUCK_FACTOR", 2)
    start, items, unfinished = time.monotonic(), Items(tmp_path), tmp_path / ".unit.tmp"

    def missing() -> list[int]:
        if time.monotonic() - start < 1.0:
            unfinished.write_bytes(b"x" * int(1000 * (time.monotonic() - start)))
        return [1]

    items.missing = missing
    with (
        RankFiles(tmp_path).alive(1, 0.05),
        pytest.raises(
            LostPeerError,
            match=r"no progress for 0.8 s .* \(1 rank not ready\); check the process of rank 1,",
        ),
        failure_scope(WorkerGroup(0, 2, 0.4), tmp_path) as group,
    ):
        run_task(group, items)
    assert 1.7 < time.monotonic() - start < 6


def test_error_of_a_rank_ends_the_other_ranks(made, tmp_path):
    """The last line that each other rank prints contains the error of the rank that failed. When
    the input is corrected, the same command completes the output."""
    text, out = tmp_path / "text", tmp_path / "data"
    shutil.copytree(made.text, text)
    lines = (text / "a.jsonl").read_bytes()
    (text / "a.jsonl").write_bytes(lines + b"{\n")
    arguments = run_arguments(text, made.tokenizer, out, "--world", "3")

    def start(rank: int) -> subprocess.Popen:
        words = [sys.executable, "-m", "data_prep.cli", *arguments, "--rank", str(rank)]
        return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)

    assert main([*arguments, "--world", "1"]) == 2
    plan = read_plan(out / "tokens")
    index = [file.name for file in plan.inputs].index(str(text / "a.jsonl"))
    unit = [first <= index < stop for first, stop in plan.units].index(True)
    sizes = list(map(plan.unit_bytes, range(len(plan.units))))
    failing = next(rank for rank in range(3) if unit in share(sizes, rank, 3))
    for _ in range(2):  # the second run finds failure marks of the first
        waiting = [start(rank) for rank in range(3) if rank != failing]
        for rank in waiting:
            assert "tokenize" in rank.stderr.readline()  # the rank has done its share
        bad = start(failing)
        assert "a.jsonl:" in bad.communicate(timeout=60)[1] and bad.returncode == 2
        for rank in waiting:
            line = rank.communicate(timeout=20)[1].splitlines()[-1]
            assert f"error: rank {failing} failed: {text}/a.jsonl:" in line
            assert rank.returncode == 5
    (out / ".failed-rank-1.elsewhere.1.abc.tmp").write_text("of another machine, once")
    (text / "a.jsonl").write_bytes(lines + b"\n\n")  # has the planned size
    assert statuses([start_rank([*arguments, "--rank", str(rank)]) for rank in range(3)]) == [0] * 3
    assert not list(out.glob(".failed*"))


def test_rank_zero_acts_and_others_wait():
    made: list[str] = []
    wait_for(WorkerGroup(0, 3), lambda: False, lambda: made.append("first"))
    wait_for(WorkerGroup(1, 3), lambda: True, lambda: made.append("never"))
    with pytest.raises(LostPeerError, match="work that rank 0 does for all ranks.* same command"):
        wait_for(WorkerGroup(1, 3, 0.01), lambda: False, lambda: made.append("never"))
    assert made == ["first"]


def test_temporary_files_of_other_machines_are_kept_for_a_day(tmp_path):
    local = files.temporary_name(tmp_path / "a.b.npy")
    host = os.uname().nodename.replace(".", "-")[:24]
    remote = tmp_path / local.name.replace(f".{host}.", ".elsewhere.")
    old = tmp_path / ".old.elsewhere.1.abc.tmp"
    for path in (local, remote, old):
        path.write_bytes(b"half")
    os.utime(old, (0, time.time() - 90_000))
    assert files.is_temporary_of_this_host(local) and not files.is_temporary_of_this_host(remote)
    with working_in(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {remote.name, ".lock"}
    assert [path.name for path in tmp_path.iterdir()] == [remote.name]


def test_reader_of_a_directory_cannot_stop_a_run(tmp_path):
    """The lock of a run is on a file that only the user of the run can read. A lock on the
    directory, which other users can read, has no effect."""
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with working_in(tmp_path):
        assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600
        (tmp_path / ".lock").chmod(0o644)
        with working_in(tmp_path):  # another run, after chmod -R
            assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600
    os.close(fd)
    assert not list(tmp_path.iterdir())


def test_lock_that_stays_locked_ends_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(workspace, "_LOCK_S", 0.1)
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with (
            pytest.raises(
                DataError, match=r"\.lock: another process has locked this file for 0\.1 s; end"
            ),
            working_in(tmp_path),
        ):
            pass


def test_run_with_a_foreign_lock_file_removes_nothing(tmp_path):
    """The temporary files must not be removed, because another run could be writing them."""
    secret, mine = tmp_path / "secret", files.temporary_name(tmp_path / "a.npy")
    for path in (secret, mine):
        path.write_bytes(b"half")
    secret.chmod(0o644)
    lock = tmp_path / ".lock"
    for make in (lock.mkdir, lambda: os.mkfifo(lock), lambda: lock.symlink_to(secret)):
        make()
        with working_in(tmp_path):
            assert mine.exists()
        lock.rmdir() if lock.is_dir() else lock.unlink()
    lock.hardlink_to(secret)
    with working_in(tmp_path):
        assert mine.exists()
    assert secret.read_bytes() == b"half" and secret.stat().st_mode & 0o777 == 0o644
    lock.unlink()
    with working_in(tmp_path):
        assert not mine.exists()


def test_waiting_run_locks_the_file_that_has_the_name(tmp_path):
    """The last run that ends removes the lock file. A run that waited for this file then locks a
    new file of the same name."""
    path = tmp_path / ".lock"
    first, second = workspace._Lock(path), workspace._Lock(path)
    assert first.is_alone()
    first.close()
    second.share()
    third = workspace._Lock(path)
    assert path.exists() and not third.is_alone()
    second.close()
    assert not path.exists() and not third.is_alone()
    third.share()
    assert path.exists()
    third.close()
    assert not path.exists()


def test_rank_comes_from_options_or_environment(monkeypatch):
    from data_prep.cli.commands import _parser

    def group(*words: str) -> tuple[int, int]:
        parsed = worker_group_of(_parser().parse_args(["shard", "X", *words]))
        return parsed.rank, parsed.world

    for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "SLURM_PROCID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    assert group() == (0, 1) and group("--rank", "1", "--world", "2") == (1, 2)
    monkeypatch.setenv("PBS_ARRAY_INDEX", "3")
    assert group("--world", "5") == (3, 5) and group("--world", "1") == (0, 1)
    monkeypatch.setenv("OPTIMUS_ARRAY_SIZE", "4")
    assert group() == (3, 4)


def test_failure_with_a_non_utf8_name_reaches_the_other_ranks(made, tmp_path, capfd):
    """The rank prints its error and writes it to a hidden file, which the other ranks read."""
    out, text = tmp_path / "out", tmp_path / "text"
    text.mkdir()
    (text / os.fsdecode(b"b\xff.jsonl")).write_text("{bad\n")
    command = run_arguments(text, made.tokenizer, out, "--world", "2")
    assert main([*command, "--rank", "0"]) == 2
    assert "invalid JSON" in capfd.readouterr().err.splitlines()[-1]
    (mark,) = out.glob(".failed-rank-0.*")
    assert "b\\udcff.jsonl:1: invalid JSON" in mark.read_text()
    rank_files = RankFiles(out)
    rank_files.write_failure(1, OSError(5, "broken", os.fsdecode(b"x\xff\ny")))
    mark.with_name(".failed-rank-2.a.1.b.tmp").write_bytes(b"\xff")
    for rank in ("1", "2"):
        with pytest.raises(
            LostPeerError, match=f"rank {rank} failed: .+; remove the cause and run"
        ):
            rank_files.check()
        next(out.glob(f".failed-rank-{rank}.*")).unlink()
