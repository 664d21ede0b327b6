"""Tests of killed saves, failed saves and power cuts in real runs of two ranks.

The tests run random samples of the cases. scripts/drills/checkpoint_kill.py runs all cases.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from optimus.io import files
from tests.kit.faults import broken_runs, power_check
from tests.kit.faults.broken_runs import RecordedSave
from tests.kit.faults.disk import Action, Call, why_not
from tests.kit.faults.power_check import replay
from tests.kit.faults.power_loss import Disk
from tests.kit.ranks.pool import RankPool

DEATHS = (2, 1)
"""(number of tested kills of the first rank, number of tested kills of the second rank). There are
about 250 possible kills."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[RankPool]:
    if why := why_not():
        pytest.skip(why)
    with broken_runs.breaking_pool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture(scope="module", params=[False, True], ids=["at-once", "in-the-background"])
def save(request, pool, tiny_data, tmp_path_factory) -> RecordedSave:
    scratch = tmp_path_factory.mktemp("save")
    return broken_runs.record_save(pool, tiny_data, scratch, checkpoint__async_save=request.param)


def sample(cases: list, count: int) -> list:
    """Divide `cases` into `count` ranges of equal length. Return one case from each range."""
    rng, limits = random.Random(0), [n * len(cases) // count for n in range(count + 1)]
    return [cases[rng.randrange(low, high)] for low, high in itertools.pairwise(limits)]


@pytest.mark.parametrize("victim", [0, 1], ids=["the-first-rank", "the-second-rank"])
def test_a_run_killed_during_a_save_resumes_with_the_same_result(
    pool, save, tiny_data, tmp_path, victim
):
    cases = [case for case in save.kills() if case.rank == victim]
    assert len(save.numbers(victim)) >= (60, 3)[victim]
    for number, case in enumerate(sample(cases, DEATHS[victim])):
        broken_runs.kill_save(pool, tiny_data, tmp_path / f"run-{number}", save, case)


def test_a_run_with_a_failed_save_continues_and_reports_it(pool, save, tiny_data, tmp_path):
    cases = save.errors()
    for action in (Action.EIO, Action.ENOSPC, Action.SHORT):
        tried = sample([case for case in cases if case.action is action], 3)
        ends = (
            broken_runs.fail_save(pool, tiny_data, tmp_path / action.name, save, c) for c in tried
        )
        assert any(end != broken_runs.NOT_REACHED for end in ends)


@pytest.fixture(scope="module")
def recorded(pool, tiny_data, tmp_path_factory) -> tuple[Path, list[Call]]:
    """Return the directory of a run, and the recorded calls of the run that change files."""
    root = tmp_path_factory.mktemp("disk")
    return root, broken_runs.record_run(pool, tiny_data, root, root.parent / f"{root.name}.log")


def test_all_calls_that_change_a_file_are_recorded(recorded):
    root, calls = recorded
    disk = Disk(str(root))
    for call in calls:
        disk.apply(call)
    assert disk.current(lambda path: True) == power_check.tree_of(root)


def test_a_run_resumes_after_any_power_cut(recorded):
    root, calls = recorded
    summary = replay(calls, root, samples=100)
    assert summary.faults == []
    assert summary.windows > 50 and summary.most_pending > power_check.WINDOW
    assert summary.different >= 10


@pytest.mark.parametrize("op", ["shard", "model", "directory"])
def test_power_cuts_detect_a_missing_fsync(recorded, op):
    """Remove the fsyncs of one kind of file from the recorded calls. `replay` must then report a
    fault."""
    root, calls = recorded
    end = {"shard": ".bin", "model": ".safetensors", "directory": "/checkpoints"}[op]
    forgotten = {n for n, c in enumerate(calls) if c.op == "fsync" and c.path.endswith(end)}
    assert len(forgotten) >= 4
    left = [call for n, call in enumerate(calls) if n not in forgotten]
    assert replay(left, root, samples=0, max_faults=1).faults


def test_power_cuts_detect_a_removal_before_the_commit(recorded):
    """In the recorded calls, put the removal of the oldest checkpoint before the rename that
    commits the newest checkpoint. `replay` must report a fault."""
    root, calls = recorded
    goes = next(n for n, c in enumerate(calls) if c.op == "rename" and "/step-" in c.path)
    sealed = [n for n, c in enumerate(calls[:goes]) if c.op == "rename" and "/step-" in c.other]
    early = [*calls[: sealed[-1]], calls[goes], *calls[sealed[-1] : goes], *calls[goes + 1 :]]
    (fault,) = replay(early, root, samples=0, max_faults=1).faults
    assert fault.endswith("1 full checkpoints instead of 2")


def test_new_directories_are_durable(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files, "fsync_dir", lambda path: synced.append(Path(path)))
    files.make_dirs(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert synced[:2] == [tmp_path / "a", tmp_path]
