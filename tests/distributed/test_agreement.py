"""Tests of the agreement of ranks on the Outcome that ends a run. In these tests, the ranks are
threads of one process."""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as distributed

from optimus.distributed import agreement as agreements
from optimus.distributed.agreement import Agreement, RunEnded, end_alone, outcome_of
from optimus.errors import (
    DataError,
    LaunchError,
    LostPeerError,
    NonFiniteError,
    OptimusError,
    Outcome,
    OutcomeKind,
    Stopped,
)
from optimus.launch.environment import LaunchEnv, prints_for_machine, read_launch_env

ABSENCE = Outcome(OutcomeKind.LOST_PEER, "not all ranks are here", phase="meeting")


@pytest.fixture(params=["file", "tcp"])
def open_store(request, tmp_path) -> Callable[[], Any]:
    """Return a function that opens a new connection to the same store at each call."""
    if request.param == "file":
        return lambda: distributed.FileStore(str(tmp_path / "store"))
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connect() -> Any:
        assert server is not None
        return distributed.TCPStore(
            "127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=10)
        )

    return connect


def run_ranks(size: int, function: Callable[[int], Any], ranks: range | None = None) -> list[Any]:
    """Run `function(rank)` in a thread for each of `ranks` (default: all ranks). Return a list that
    contains, for each rank, its result or the RunEnded that it raised."""
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except RunEnded as ended:
            results[rank] = ended

    ranks = range(size) if ranks is None else ranks
    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank waits without a limit"
    return [results[rank] for rank in ranks]


def agreement_of(rank: int, size: int, store: Any, local_size: int | None = None) -> Agreement:
    local = size if local_size is None else local_size
    return Agreement(store, LaunchEnv(rank, size, rank % local, local, ""))


def ended_with(open_store, errors: dict[int, OptimusError], size: int = 3) -> list[RunEnded]:
    """End each rank in `errors` with its error. Return a list with the RunEnded of each of these
    ranks and None for all other ranks."""

    def end(rank: int) -> RunEnded:
        outcome = outcome_of(errors[rank], rank, "training", step=7)
        return agreement_of(rank, size, open_store()).end(outcome)

    return run_ranks(size, lambda rank: end(rank) if rank in errors else None)


def test_an_error_of_all_ranks_is_that_of_rank_0(open_store):
    errors = {rank: Stopped("stopped after step 7") for rank in range(3)}
    ends = ended_with(open_store, errors)
    assert {ended.outcome.rank for ended in ends} == {0}
    assert [ended.prints for ended in ends] == [True, False, False]
    assert all(ended.is_shared for ended in ends)
    assert ends[0].line == "optimus: stopped after step 7" and ends[0].exit_code == 3


def test_a_cause_comes_before_the_loss_of_a_peer(open_store, monkeypatch):
    monkeypatch.setattr(agreements, "_OTHERS_S", 0.5)
    ends = ended_with(
        open_store, {0: LostPeerError("rank 1 is gone"), 1: DataError("a.npy cannot be read")}
    )[:2]
    for ended in ends:
        assert ended.outcome.message == "a.npy cannot be read" and ended.outcome.step == 7
        assert ended.exit_code == 2 and not ended.is_shared
    assert [ended.prints for ended in ends] == [False, True]
    assert ends[1].line == "optimus: [rank 1] error: a.npy cannot be read"


def test_a_rank_that_fails_later_adopts_the_decision(open_store, monkeypatch):
    monkeypatch.setattr(agreements, "_OTHERS_S", 0.5)
    ended_with(open_store, {2: NonFiniteError("NaN in layer 3")})
    monkeypatch.setattr(agreements, "_OTHERS_S", 60.0)
    start = time.monotonic()
    later = ended_with(open_store, {0: LostPeerError("rank 2 is gone")})[0]
    assert time.monotonic() - start < 30  # rank 0 does not wait for other ranks
    assert later.outcome.rank == 2 and later.exit_code == 4 and not later.prints


@pytest.mark.parametrize("error", [LostPeerError("rank 0 is gone"), DataError("a.npy")])
def test_error_after_the_end_of_rank_0_is_not_shared(open_store, monkeypatch, error):
    """Rank 0 ends with an error before rank 1 fails. `is_shared` is False on both ranks, because
    rank 0 does not know if rank 1 waits for rank 0 in a collective."""
    monkeypatch.setattr(agreements, "_OTHERS_S", 0.3)
    assert not ended_with(open_store, {0: DataError("metrics.jsonl")}, size=2)[0].is_shared
    late = ended_with(open_store, {1: error}, size=2)[1]
    assert late.outcome.message == "metrics.jsonl" and not late.is_shared


def test_the_host_is_named_on_several_machines(open_store, monkeypatch):
    monkeypatch.setattr(agreements, "_OTHERS_S", 0.5)
    outcome = Outcome(OutcomeKind.FAILED, "disk full", rank=3, host="node1")
    ended = agreement_of(3, 4, open_store(), local_size=2).end(outcome)
    assert ended.line == "optimus: [rank 3, node1] error: disk full"


def test_ranks_without_a_failure_start(open_store):
    assert (
        run_ranks(3, lambda rank: agreement_of(rank, 3, open_store()).start(None, ABSENCE, 20.0))
        == [None] * 3
    )


@pytest.mark.parametrize("failing", [(0, 1, 2), (0, 2), (1, 2), (2,)])
def test_a_failure_of_some_ranks_is_printed_once_and_ends_all(open_store, failing):
    def start(rank: int) -> None:
        error = DataError(f"rank {rank} has no data")
        failure = outcome_of(error, rank, "launch") if rank in failing else None
        agreement_of(rank, 3, open_store()).start(failure, ABSENCE, 20.0)

    ends = run_ranks(3, start)
    assert len({ended.outcome for ended in ends}) == 1
    (printing,) = [rank for rank, ended in enumerate(ends) if ended.prints]
    assert printing in failing and (printing == 0 or 0 not in failing)
    assert ends[0].outcome.message == f"rank {printing} has no data"


def test_a_missing_rank_is_printed_once_and_ends_all(open_store):
    ends = run_ranks(
        4,
        lambda rank: agreement_of(rank, 4, open_store()).start(None, ABSENCE, 1.0),
        ranks=range(1, 4),
    )
    assert {ended.outcome.message for ended in ends} == {ABSENCE.message}


def test_a_slow_rank_finds_the_store_after_the_decision(monkeypatch):
    """Rank 3 is killed. Ranks 0 and 2 decide and leave before rank 1 notices the loss. Rank 0,
    whose process has the store, waits for rank 1, so that the loss is printed once."""
    monkeypatch.setattr(agreements, "_OTHERS_S", 0.3)
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ended_at: dict[int, float] = {}

    def end(rank: int) -> RunEnded:
        store = distributed.TCPStore("127.0.0.1", server.port, is_master=False)
        if rank == 1:
            time.sleep(2.0)
        ended = agreement_of(rank, 4, store).end(
            outcome_of(LostPeerError("rank 3 is gone"), rank, "training")
        )
        ended.leave()
        ended_at[rank] = time.monotonic()
        return ended

    ends = run_ranks(4, end, ranks=range(3))
    assert [ended.prints for ended in ends] == [True, False, False]
    assert ended_at[2] < ended_at[1] and ended_at[0] > ended_at[2] + 1.0


def test_no_rank_ends_before_the_line_is_printed(open_store, monkeypatch):
    """All ranks wait until a rank has printed the error, because Open MPI ends all ranks as soon as
    the first rank ends."""
    monkeypatch.setattr(agreements, "_OTHERS_S", 60.0)
    times: dict[int, float] = {}

    def end(rank: int) -> None:
        outcome = outcome_of(DataError("no data"), rank, "training")
        ended = agreement_of(rank, 3, open_store()).end(outcome)
        if ended.prints:
            time.sleep(0.5)
            times[-1] = time.monotonic()
        ended.leave()
        times[rank] = time.monotonic()

    run_ranks(3, end)
    assert min(times[1], times[2]) >= times[-1] and max(times.values()) - times[-1] < 30


class StoppedStore:
    """A store whose process is suspended: no call returns."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: time.sleep(60)


class LostStore:
    """A store whose process has ended: every call raises an error."""

    def __getattr__(self, name: str) -> Any:
        def fail(*args: Any) -> None:
            raise RuntimeError("Broken pipe")

        return fail


@pytest.mark.parametrize("store", [StoppedStore(), LostStore()], ids=["stopped", "lost"])
def test_a_rank_whose_store_does_not_answer_ends_in_time(monkeypatch, tmp_path, store):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(agreements, "_OTHERS_S", 0.2)
    monkeypatch.setattr(agreements, "_STORE_S", 0.2)
    monkeypatch.setattr(agreements, "_LEAVE_S", 0.2)
    lost = Outcome(OutcomeKind.LOST_PEER, "lost", rank=1)
    start = time.monotonic()
    ends = [agreement_of(rank, 8, store, local_size=4).end(lost) for rank in (1, 2, 4, 5)]
    for ended in ends:
        assert ended.exit_code == 5 and not ended.is_shared
        ended.leave()
    assert [ended.prints for ended in ends] == [True, False, True, False]
    assert agreement_of(5, 8, store).end(outcome_of(DataError("x"), 5, "training")).prints
    with pytest.raises(RunEnded):
        agreement_of(1, 2, store).start(None, ABSENCE, 0.2)
    assert time.monotonic() - start < 10


def test_a_loss_is_printed_once_if_ranks_0_and_1_are_lost(monkeypatch, tmp_path):
    monkeypatch.setattr(agreements, "_OTHERS_S", 0.1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lost = Outcome(OutcomeKind.LOST_PEER, "lost", rank=2)
    for _ in range(2):
        ends = [agreement_of(rank, 4, LostStore()).end(lost) for rank in (2, 3)]
        assert [ended.prints for ended in ends] == [True, False]
        (mark,) = tmp_path.iterdir()
        os.utime(mark, (0, 0))  # as old as the mark of an earlier run
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert agreement_of(3, 4, LostStore()).end(lost).prints


def test_a_published_outcome_of_another_kind_of_process_is_not_adopted(tmp_path):
    store = distributed.FileStore(str(tmp_path / "store"))
    store.set("optimus/decision", '{"kind": "evil"}')
    store.set("optimus/cause", "{}")
    ended = agreement_of(1, 2, store).end(outcome_of(DataError("x"), 1, "training"))
    assert ended.outcome.message == "x" and ended.prints


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_file_store_that_loses_its_keys_is_a_lost_store(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    agreement = agreement_of(1, 2, distributed.FileStore(str(tmp_path / "store")))
    publish = agreement._publish

    def publish_and_remove(outcome: Outcome) -> None:
        publish(outcome)
        (tmp_path / "store").write_bytes(b"")
        agreement._store = distributed.FileStore(str(tmp_path / "store"))

    monkeypatch.setattr(agreement, "_publish", publish_and_remove)
    monkeypatch.setattr(agreements, "_OTHERS_S", 0.1)
    ended = agreement.end(Outcome(OutcomeKind.LOST_PEER, "lost", rank=1))
    assert ended.outcome.message == "lost" and ended.prints


def test_a_rank_that_cannot_meet_others_prints_once_per_machine(monkeypatch):
    for name in ("RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PALS_RANKID", "5")
    for local_rank, prints in (("0", True), ("1", False), ("x", True)):
        monkeypatch.setenv("PALS_LOCAL_RANKID", local_rank)
        assert end_alone(LaunchError("MASTER_PORT=0 is not a port")).prints == prints
        assert end_alone(DataError("no data")).prints
    assert end_alone(DataError("no data")).line == "optimus: [rank 5] error: no data"


@pytest.mark.parametrize(
    ("environ", "prints"),
    [
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}, True),
        ({"LOCAL_RANK": "1"}, True),  # WORLD_SIZE can be missing on this rank alone
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "0"}, True),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"PMI_RANK": "2", "PMI_SIZE": "2", "LOCAL_RANK": "1"}, True),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "LOCAL_RANK": "1", "WORLD_SIZE": "7"}, False),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "x"}, False),
    ],
)
def test_a_launch_error_of_this_rank_alone_is_printed(monkeypatch, environ, prints):
    by_hand = {} if "PMI_RANK" in environ else {"RANK": "1"}
    monkeypatch.setattr("os.environ", environ | by_hand)
    monkeypatch.setattr(prints_for_machine, "__defaults__", (environ | by_hand,))
    with pytest.raises(LaunchError) as raised:
        read_launch_env(environ | by_hand)
    assert end_alone(raised.value).prints == prints


def test_an_end_survives_pickling():
    ended = RunEnded(Outcome(OutcomeKind.STOPPED, "so", 2, "here", 9, "training"), False, True)
    copy = pickle.loads(pickle.dumps(ended))
    assert (copy.outcome, copy.prints, copy.is_shared) == (ended.outcome, False, True)
    assert copy.exit_code == 3 and str(copy) == "so"
