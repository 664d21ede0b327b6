"""Real runs whose file calls are recorded and broken, on a pool with the shim preloaded."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from optimus.checkpoint import format as format_module
from optimus.checkpoint import shard_file, store
from optimus.checkpoint.format import is_checkpoint, read_manifest
from optimus.errors import OptimusError, OutcomeKind
from tests.kit.faults.disk import Action, Breakage, Call, arm, build, hits, kill_after, read_log
from tests.kit.faults.power_check import RUN
from tests.kit.ranks.pool import RankPool, RanksFailed
from tests.kit.ranks.server import Outcome
from tests.kit.runs.results import assert_same_run
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import run_tree

RANKS = 2
NOT_REACHED = "the call was not reached"
STEPS = 8
"""Of a whole run; full checkpoints of every second, models of every third."""
BASE, BROKEN = 5, 6
"""The run goes on from BASE; the save of step BROKEN, a model and a full one, is broken."""

BLOCK_BYTES = 1 << 14
"""So that a shard file is some six writes."""
GROWING = ("create", "mkdir", "write", "truncate", "extend", "rename", "link")
"""Calls that a full disk refuses."""


@contextmanager
def breaking_pool(scratch: Path) -> Iterator[RankPool]:
    """A pool whose ranks `arm` and `kill_after` reach."""
    pool = RankPool(scratch, LD_PRELOAD=str(build(scratch)))
    try:
        yield pool
    finally:
        pool.close()


def run_broken(
    tree: dict[str, Any],
    under: str,
    log: str | None,
    breakage: Breakage | None,
    deaths: Mapping[int, float],
) -> tuple[str, int]:
    """One rank of a run: calls below `under` are recorded in `log` and, on its rank, broken; of
    `deaths`, SIGKILL after so many seconds by rank. Returns what it wrote to standard error and
    the number of broken calls."""
    shard_file.BLOCK_BYTES = format_module.BLOCK_BYTES = BLOCK_BYTES
    rank = int(os.environ["RANK"])
    if log or (breakage and breakage.rank == rank):
        mine = breakage if breakage and breakage.rank == rank else None
        # Saves in the background number their calls differently in each run: a single failure
        # must not meet the last save, whose loss ends the run.
        is_single_failure = mine and mine.first == mine.last and mine.action >= Action.ENOSPC
        arm(Path(under), log and Path(log), mine, f"-{STEPS:08d}." if is_single_failure else "")
    if rank in deaths:
        kill_after(deaths[rank])
    run_tree(tree)
    sys.stderr.flush()
    return Path(os.readlink("/proc/self/fd/2")).read_text(), hits()


def live(
    pool: RankPool,
    tree: dict[str, Any],
    *,
    under: Path | None = None,
    log: Path | None = None,
    breakage: Breakage | None = None,
    deaths: Mapping[int, float] | None = None,
    grace_s: float = 20.0,
) -> list[Outcome]:
    """Run it; how each rank ended, nothing if all got to the end. Fails if one ended otherwise than
    by SIGKILL, by the loss of a peer, or by being stopped while it waited for one."""
    under = under or checkpoints(tree)
    arguments = (tree, str(under), log and str(log), breakage, dict(deaths or {}))
    try:
        pool.run(RANKS, run_broken, *arguments, start_world=False, timeout_s=120, grace_s=grace_s)
    except RanksFailed as error:
        for one in error.outcomes:
            if one.how == "died" and "SIGKILL" in one.text:
                continue
            if one.how == "raised" and one.value().kind is OutcomeKind.LOST_PEER:
                continue
            if one.how not in ("returned", "stopped"):
                raise
        return error.outcomes
    return []


def checkpoints(tree: Mapping[str, Any]) -> Path:
    return store.checkpoints_dir(tree["train"]["run_dir"])


def a_tree(data: Path, run_dir: Path, **overrides: Any) -> dict[str, Any]:
    """A run of STEPS; `overrides` as of `tiny_tree`."""
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


class Save(NamedTuple):
    """The save of step BROKEN in a run that goes on from `base`, and what must become of it."""

    base: Path
    unbroken: Path
    overrides: Mapping[str, Any]
    calls: list[list[Call]]
    """Of each rank, those with which it changes files, from the first of this save on."""

    def numbers(self, rank: int) -> range:
        """Of all its calls, those that only read included."""
        return range(self.calls[rank][0].number, self.calls[rank][-1].number + 1)

    def cases(self) -> list[Breakage]:
        """Deaths before and behind each call of each rank, and half-way through each write."""
        cases = []
        for rank in range(RANKS):
            writes = {call.number for call in self.calls[rank] if call.op == "write"}
            for number in self.numbers(rank):
                actions = [Action.KILL_BEFORE, Action.KILL_BEHIND]
                actions += [Action.KILL_HALF_WAY] * (number in writes)
                cases += [Breakage(rank, action, number, number) for action in actions]
        return cases

    def errors(self) -> list[Breakage]:
        """Each call of each rank fails or, a write, is short; or the disk is full from then on."""
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


def prepare(pool: RankPool, data: Path, scratch: Path, **overrides: Any) -> Save:
    """Make what the broken runs start from and are compared with; record the save."""
    base, unbroken, log = scratch / "base", scratch / "unbroken", scratch / "save.log"
    assert not live(pool, a_tree(data, unbroken, **overrides))
    assert not live(pool, a_tree(data, base, train__stop_at_step=BASE, **overrides))
    recorded = scratch / "recorded"
    shutil.copytree(base, recorded)
    assert not live(pool, a_tree(data, recorded, **overrides), log=log)
    assert_same_run(recorded, unbroken)
    calls = _of_one_save(read_log(log))
    return Save(base, unbroken, overrides, calls)


def _of_one_save(calls: Sequence[Call]) -> list[list[Call]]:
    """By rank, the calls of the save of step BROKEN: up to the first of the next."""
    first = next(call.pid for call in calls if call.op == "mkdir")
    ends = next(n for n, call in enumerate(calls) if f"-{STEPS:08d}." in call.path)
    begins = next(n for n, call in enumerate(calls) if f"-{BROKEN:08d}." in call.path)
    here = calls[begins:ends]
    others = {call.pid for call in here} - {first}
    assert len(others) == RANKS - 1
    return [[call for call in here if call.pid == pid] for pid in (first, *others)]


def break_save(pool: RankPool, data: Path, run_dir: Path, save: Save, breakage: Breakage) -> int:
    """Break a run in its save; look what is left; go on to the end and compare with the unbroken.

    The step that it went on from.
    """
    shutil.copytree(save.base, run_dir)
    tree = a_tree(data, run_dir, **save.overrides)
    ended = live(pool, tree, breakage=breakage)
    assert ended and ended[breakage.rank].how == "died", "nobody was killed"
    assert not any(one.how == "stopped" for one in ended), "a rank waited for one that had died"
    step = look(run_dir)
    assert step in (BASE, BROKEN), step
    assert not live(pool, tree)
    assert_same_run(run_dir, save.unbroken)
    assert not temporaries(run_dir)
    shutil.rmtree(run_dir)
    return step


def record(pool: RankPool, data: Path, root: Path, log: Path, **overrides: Any) -> list[Call]:
    """The calls of a whole run in a directory below `root`."""
    assert not live(pool, a_tree(data, root / RUN, **overrides), under=root, log=log)
    return read_log(log)


def fail_save(pool: RankPool, data: Path, run_dir: Path, save: Save, breakage: Breakage) -> str:
    """Let calls of a run's save fail: it must go on to its end, like the unbroken one, and say so
    where something was not saved. Returns what became of it; NOT_REACHED where no call was broken,
    as may happen with saves in the background."""
    shutil.copytree(save.base, run_dir)
    tree = a_tree(data, run_dir, **save.overrides)
    told, went_on, broken = _told(pool, tree, breakage)
    if went_on and not broken:
        shutil.rmtree(run_dir)
        return NOT_REACHED
    assert look(run_dir) == STEPS if went_on else look(run_dir) >= BASE
    there = {kind: place(run_dir, BROKEN).exists() for kind, place in _PLACES.items()}
    lost = [kind for kind, is_there in there.items() if went_on and not is_there]
    assert not lost or ("warning:" in told and f"step {BROKEN} is not saved" in told), (lost, told)
    assert breakage.action is not Action.SHORT or not lost, told
    assert not live(pool, tree)  # the next start tidies up and, where the last save failed, goes on
    assert_same_run(run_dir, save.unbroken)
    assert not temporaries(run_dir)
    shutil.rmtree(run_dir)
    if not went_on:
        return "the last save failed"
    return f"lost {' and '.join(lost)}" if lost else "warned" if "warning:" in told else "all saved"


def _told(pool: RankPool, tree: dict[str, Any], breakage: Breakage) -> tuple[str, bool, int]:
    """Return what the first rank printed, whether the run reached its end, and how many calls were
    broken. If it did not, all its ranks must say that the last step is not saved, which nothing but
    a lasting failure excuses."""
    arguments = (tree, str(checkpoints(tree)), None, breakage, {})
    try:
        ranks = pool.run(RANKS, run_broken, *arguments, start_world=False, timeout_s=120)
        return ranks[0][0], True, ranks[breakage.rank][1]
    except RanksFailed as error:
        ends = [one.value() for one in error.outcomes]
        if breakage.first == breakage.last or not all(isinstance(e, OptimusError) for e in ends):
            raise
        if not all(f"step {STEPS} is not saved" in str(e) for e in ends):
            raise
        return str(ends[0]), False, 1


_PLACES = {"the full one": store.full_path, "the model": store.model_path}


def temporaries(run_dir: Path) -> list[str]:
    return [path.name for path in store.checkpoints_dir(run_dir).glob(".*")]


def look(run_dir: Path) -> int:
    """The step that a run would go on from, 0 for none. Every name of ours has all its files."""
    directory = store.checkpoints_dir(run_dir)
    for path in directory.glob("*-????????"):
        assert is_checkpoint(path), path
        read_manifest(path).verify()
    newest = store.newest_valid(run_dir)
    return newest.step if newest else 0
