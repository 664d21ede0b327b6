"""Train with a preloaded library that records the file calls of the ranks. The library can also let
selected calls fail, or kill a rank at a selected call.

disk.py builds the library from file_calls.c.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from optimus.checkpoint import store
from optimus.checkpoint.format import is_checkpoint, read_manifest
from optimus.errors import OptimusError, OutcomeKind
from tests.kit.faults.disk import (
    Action,
    Breakage,
    Call,
    arm,
    build_library,
    hits,
    kill_after,
    read_log,
)
from tests.kit.faults.power_check import RUN
from tests.kit.ranks.pool import RankPool, RanksFailed
from tests.kit.ranks.server import Outcome
from tests.kit.runs.results import assert_same_run
from tests.kit.runs.saves import block_bytes
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import run_tree

RANKS = 2
NOT_REACHED = "the call was not reached"
STEPS = 8
"""Number of updates of a run. The run saves a full checkpoint every 2 updates, and a model-only
checkpoint every 3 updates."""
BASE, BROKEN = 5, 6
"""Numbers of two steps. A run continues from step BASE. At step BROKEN, the run saves a full and a
model-only checkpoint. A file call of these saves fails, or a rank is killed at the call."""

BLOCK_BYTES = 1 << 14
"""Block size of shard files in bytes. With this size, about six calls write one shard file."""
GROWING = ("create", "mkdir", "write", "truncate", "extend", "rename", "link")
"""Kinds of file calls that fail on a full disk."""


@contextmanager
def breaking_pool(scratch: Path) -> Iterator[RankPool]:
    """Yield a pool whose ranks preload file_calls.c, which `arm` and `kill_after` need."""
    pool = RankPool(scratch, LD_PRELOAD=str(build_library(scratch)))
    try:
        yield pool
    finally:
        pool.close()


def run_broken(
    tree: dict[str, Any],
    under: Path,
    log: Path | None,
    breakage: Breakage | None,
    kills: Mapping[int, float],
) -> tuple[str, int]:
    """Run the training of a configuration on this rank, with recorded and broken file calls.

    Args:
        tree: The configuration.
        under: The directory whose calls are counted.
        log: File to which the calls are recorded; None: no record.
        breakage: The calls to break and the rank on which to break them; None: no broken call.
        kills: For each rank that is killed, the seconds until SIGKILL.

    Returns:
        The standard error of this rank, and its number of broken calls.
    """
    rank = int(os.environ["RANK"])
    if breakage and breakage.rank != rank:
        breakage = None
    if log or breakage:
        # With saves in the background, the numbers of the calls differ between runs, so a single
        # failure can break any save. The last save is excluded, because its failure would end the
        # run with an error.
        is_single_failure = (
            breakage and breakage.first == breakage.last and breakage.action >= Action.ENOSPC
        )
        arm(under, log, breakage, f"-{STEPS:08d}." if is_single_failure else "")
    if rank in kills:
        kill_after(kills[rank])
    with block_bytes(BLOCK_BYTES):
        run_tree(tree)
    sys.stderr.flush()
    return Path(os.readlink("/proc/self/fd/2")).read_text(), hits()


def run_ranks(
    pool: RankPool,
    tree: dict[str, Any],
    *,
    under: Path | None = None,
    log: Path | None = None,
    breakage: Breakage | None = None,
    kills: Mapping[int, float] | None = None,
    grace_s: float = 20.0,
) -> list[Outcome]:
    """Run `run_broken` on RANKS ranks. By default, `under` is the directory of the checkpoints.

    Returns:
        The outcomes of the ranks; [] if all ranks reached the end of the run.

    Raises:
        RanksFailed: A rank ended for a reason other than SIGKILL or the loss of a peer.
    """
    arguments = (tree, under or checkpoints(tree), log, breakage, dict(kills or {}))
    try:
        pool.run(RANKS, run_broken, *arguments, start_world=False, timeout_s=120, grace_s=grace_s)
    except RanksFailed as error:
        for outcome in error.outcomes:
            if outcome.how == "died" and "SIGKILL" in outcome.text:
                continue
            if outcome.how == "raised" and outcome.value().kind is OutcomeKind.LOST_PEER:
                continue
            if outcome.how not in ("returned", "stopped"):
                raise
        return error.outcomes
    return []


def checkpoints(tree: Mapping[str, Any]) -> Path:
    """Return the directory of a run's checkpoints."""
    return store.checkpoints_dir(tree["train"]["run_dir"])


def make_tree(data: Path, run_dir: Path, **overrides: Any) -> dict[str, Any]:
    """Return the configuration of a run of STEPS updates; `overrides` as for `tiny_tree`."""
    settings = {
        "train__max_steps": STEPS,
        "model__hidden_size": 16,
        "model__num_layers": 1,
        "train__global_batch_tokens": 4 * 32,
        "checkpoint__interval": 2,
        "checkpoint__model_interval": 3,
        "checkpoint__keep_models": 1,
        "parallel__timeout_s": 60.0,
    }
    return tiny_tree(data, run_dir, **settings | overrides)


class RecordedSave(NamedTuple):
    """The save of step BROKEN in a run that continues from `base`."""

    base: Path
    """The run directory after BASE updates."""
    unbroken: Path
    """The run directory of a run of STEPS updates without interruption."""
    overrides: Mapping[str, Any]
    calls: list[list[Call]]
    """For each rank, the file calls with which the rank changes files during the save."""

    def numbers(self, rank: int) -> range:
        """Return the indices of all file calls of a rank during the save, including calls that only
        read."""
        return range(self.calls[rank][0].number, self.calls[rank][-1].number + 1)

    def kills(self) -> list[Breakage]:
        """Return breakages that kill a rank. For each call of each rank, there is a kill before and
        a kill after the call. For each write, there is also a kill in the middle of the write."""
        cases = []
        for rank in range(RANKS):
            writes = {call.number for call in self.calls[rank] if call.op == "write"}
            for number in self.numbers(rank):
                actions = [Action.KILL_BEFORE, Action.KILL_AFTER]
                actions += [Action.KILL_HALF_WAY] * (number in writes)
                cases += [Breakage(rank, action, number, number) for action in actions]
        return cases

    def errors(self) -> list[Breakage]:
        """Return breakages that do not kill a rank. For each call of each rank, there is a breakage
        with EIO. For each call that needs disk space, there are two breakages with ENOSPC: for this
        call alone, and for this call and all later calls of the save. For each write, there is a
        short write."""
        cases = []
        for rank in range(RANKS):
            ops = {call.number: call.op for call in self.calls[rank]}
            for number in self.numbers(rank):
                cases.append(Breakage(rank, Action.EIO, number, number))
                if ops.get(number) in GROWING:
                    cases.append(Breakage(rank, Action.ENOSPC, number, number))
                    cases.append(Breakage(rank, Action.ENOSPC, number, self.numbers(rank)[-1]))
                if ops.get(number) == "write":
                    cases.append(Breakage(rank, Action.SHORT, number, number))
        return cases


def record_save(pool: RankPool, data: Path, scratch: Path, **overrides: Any) -> RecordedSave:
    """Make the base run and the unbroken run in `scratch`, and record the calls of the save of step
    BROKEN."""
    base, unbroken, log = scratch / "base", scratch / "unbroken", scratch / "save.log"
    assert not run_ranks(pool, make_tree(data, unbroken, **overrides))
    assert not run_ranks(pool, make_tree(data, base, train__stop_at_step=BASE, **overrides))
    recorded = scratch / "recorded"
    shutil.copytree(base, recorded)
    assert not run_ranks(pool, make_tree(data, recorded, **overrides), log=log)
    assert_same_run(recorded, unbroken)
    return RecordedSave(base, unbroken, overrides, _calls_of_save(read_log(log)))


def _calls_of_save(calls: Sequence[Call]) -> list[list[Call]]:
    """Return the calls of the save of step BROKEN: for each rank, a list in order."""
    first = next(call.pid for call in calls if call.op == "mkdir")
    start = next(n for n, call in enumerate(calls) if f"-{BROKEN:08d}." in call.path)
    stop = next(n for n, call in enumerate(calls) if f"-{STEPS:08d}." in call.path)
    others = {call.pid for call in calls[start:stop]} - {first}
    assert len(others) == RANKS - 1
    return [[call for call in calls[start:stop] if call.pid == pid] for pid in (first, *others)]


def record_run(pool: RankPool, data: Path, root: Path, log: Path, **overrides: Any) -> list[Call]:
    """Return the calls of a whole run in the directory `root`/run."""
    assert not run_ranks(pool, make_tree(data, root / RUN, **overrides), under=root, log=log)
    return read_log(log)


def kill_save(
    pool: RankPool, data: Path, run_dir: Path, save: RecordedSave, breakage: Breakage
) -> int:
    """Kill a rank in the save, verify the checkpoints, resume the run, and compare the result of
    the run with the unbroken run. Return the step from which the run resumed."""
    shutil.copytree(save.base, run_dir)
    tree = make_tree(data, run_dir, **save.overrides)
    outcomes = run_ranks(pool, tree, breakage=breakage)
    assert outcomes and outcomes[breakage.rank].how == "died", "the rank was not killed"
    assert not any(outcome.how == "stopped" for outcome in outcomes), (
        "a rank waited for a rank that was killed"
    )
    step = newest_step(run_dir)
    assert step in (BASE, BROKEN), step
    _resume(pool, tree, run_dir, save)
    return step


def fail_save(
    pool: RankPool, data: Path, run_dir: Path, save: RecordedSave, breakage: Breakage
) -> str:
    """Let calls of the save fail.

    The run must reach its end with the result of the unbroken run, and print a warning if a
    checkpoint is not saved.

    Returns:
        A description of the outcome; NOT_REACHED if no call was broken, which is possible for saves
        in the background.
    """
    shutil.copytree(save.base, run_dir)
    tree = make_tree(data, run_dir, **save.overrides)
    printed, has_ended, num_broken = _run_with_errors(pool, tree, breakage)
    if has_ended and not num_broken:
        shutil.rmtree(run_dir)
        return NOT_REACHED
    step = newest_step(run_dir)
    assert step == STEPS if has_ended else step >= BASE
    missing = [kind for kind, path_of in _PATHS.items() if not path_of(run_dir, BROKEN).exists()]
    lost = missing if has_ended else []
    has_warning = "warning:" in printed
    assert not lost or (has_warning and f"step {BROKEN} is not saved" in printed), (lost, printed)
    assert breakage.action is not Action.SHORT or not lost, printed
    _resume(pool, tree, run_dir, save)
    if not has_ended:
        return "the last save failed"
    return f"lost {' and '.join(lost)}" if lost else "warned" if has_warning else "all saved"


def _resume(pool: RankPool, tree: dict[str, Any], run_dir: Path, save: RecordedSave) -> None:
    """Resume the run to its end, compare the result of the run with the unbroken run, and remove
    the run directory."""
    assert not run_ranks(pool, tree)
    assert_same_run(run_dir, save.unbroken)
    assert not list(checkpoints(tree).glob(".*"))
    shutil.rmtree(run_dir)


def _run_with_errors(
    pool: RankPool, tree: dict[str, Any], breakage: Breakage
) -> tuple[str, bool, int]:
    """Run the training with broken calls.

    Assert that the run ends with an error only if the disk remains full. In this case, all ranks
    must report that the last step is not saved.

    Returns:
        The messages of the first rank, True if the run reached its end, and the number of broken
        calls.
    """
    arguments = (tree, checkpoints(tree), None, breakage, dict[int, float]())
    try:
        results = pool.run(RANKS, run_broken, *arguments, start_world=False, timeout_s=120)
        return results[0][0], True, results[breakage.rank][1]
    except RanksFailed as error:
        errors = [outcome.value() for outcome in error.outcomes]
        if breakage.first == breakage.last or not all(isinstance(e, OptimusError) for e in errors):
            raise
        if not all(f"step {STEPS} is not saved" in str(e) for e in errors):
            raise
        return str(errors[0]), False, 1


_PATHS = {"the full checkpoint": store.full_path, "the model": store.model_path}


def newest_step(run_dir: Path) -> int:
    """Verify all checkpoints with final names. Return the step of the newest checkpoint; 0 if there
    is no checkpoint."""
    directory = store.checkpoints_dir(run_dir)
    for path in directory.glob("*-????????"):
        assert is_checkpoint(path), path
        read_manifest(path).verify()
    newest = store.newest_valid(run_dir)
    return newest.step if newest else 0
