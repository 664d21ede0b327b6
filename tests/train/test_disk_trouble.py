"""Runs whose disk hangs, is full, is read-only, or has too little free space."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from optimus.checkpoint import store
from optimus.checkpoint.save import FullSaver
from optimus.launch.environment import read_launch_env
from optimus.observe.metrics import JsonLines
from optimus.train.loop import Run
from tests.kit.faults.disk import immutable, small_disk
from tests.kit.runs.results import assert_same_run, metrics_of
from tests.kit.runs.saves import SYNC_AND_ASYNC, delay_writes, steps_kept, wait_for_saves_after
from tests.kit.runs.tiny import small_batch_tree
from tests.kit.runs.training import Ended, run_with, train_on


def run_with_a_hanging_disk(tree: dict[str, Any]) -> Ended:
    """Train. On rank 1, the write of the checkpoint of step 4 hangs until update 10 begins."""
    release_writes = delay_writes({4: 10} if read_launch_env().rank == 1 else {})
    return run_with(tree, release_writes, wait_for_saves_after([11]))


@SYNC_AND_ASYNC
def test_hanging_disk_delays_a_run_by_at_most_the_timeout(ranks, tiny_data, tmp_path, async_save):
    settings = {"checkpoint__interval": 4, "train__max_steps": 12, "checkpoint__timeout_s": 3.0}
    tree = small_batch_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=async_save)
    ended = ranks(2, run_with_a_hanging_disk, tree, start_world=False)
    assert [rank_end[:2] for rank_end in ended] == [(0, "")] * 2
    first, second = ended[0].warnings()
    assert "step-00000004 not written within checkpoint.timeout_s = 3: the disk of rank 1" in first
    assert "step 8 is not saved: the failed save of step 4 still waits for the disk" in second
    assert steps_kept(tmp_path) == [12]
    assert len(metrics_of(tmp_path)) == 12


def run_on_a_full_disk(tree: dict[str, Any], folder: str) -> Ended:
    """Train. Rank 0 fills the disk before update 8 and frees the space before update 18."""
    filler = Path(folder) / "filler"

    def before(step: int) -> None:
        if read_launch_env().rank == 0 and step == 8:
            with pytest.raises(OSError, match="No space"), open(filler, "wb", 0) as file:
                while file.write(bytes(1 << 16)):
                    pass
        if read_launch_env().rank == 0 and step == 18:
            filler.unlink()

    return run_with(tree, before, wait_for_saves_after([7]))


def run_on_a_read_only_disk(tree: dict[str, Any], folder: str) -> Ended:
    """Train. Rank 0 makes the file system at `folder` read-only before update 12, and writable
    before update 21."""

    def before(step: int) -> None:
        if read_launch_env().rank == 0 and step in (12, 21):
            mode = "ro" if step == 12 else "rw"
            subprocess.run(["mount", "-o", f"remount,{mode}", folder], check=True)

    return run_with(tree, before, wait_for_saves_after([11]))


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """Mount a separate file system of 3 MB and return its path."""
    with small_disk(tmp_path / "disk", "3m"):
        yield tmp_path / "disk"


@SYNC_AND_ASYNC
def test_full_disk_loses_no_result_and_is_used_again(ranks, tiny_data, tmp_path, disk, async_save):
    """The disk is full during the saves of steps 10 and 15. Metrics must be kept and written when
    the disk has space again."""
    settings = {"checkpoint__interval": 5, "checkpoint__model_interval": 5}
    settings |= {"checkpoint__keep_models": 1, "observe__tensorboard": True}
    train_on(ranks, 2, small_batch_tree(tiny_data, tmp_path / "unbroken", **settings))
    run = disk / "run"
    tree = small_batch_tree(tiny_data, run, **settings, checkpoint__async_save=async_save)
    ended = ranks(2, run_on_a_full_disk, tree, str(disk), start_world=False)
    assert [rank_end[:2] for rank_end in ended] == [(0, "")] * 2, ended
    lines = ended[0].warnings()
    for step in (10, 15):
        for kind in ("step", "model"):
            words = f"warning: step {step} is not saved: {kind}-000000{step} not written: "
            assert any(words in line and "free disk space" in line for line in lines), lines
    assert any("metrics.jsonl: No space left on device; new lines wait" in line for line in lines)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["model-00000020", "step-00000005", "step-00000020"]
    for name in names:
        store.read_manifest(run / "checkpoints" / name).verify()
    assert_same_run(tmp_path / "unbroken", run)


@SYNC_AND_ASYNC
def test_read_only_directory_delays_saves_only(ranks, tiny_data, tmp_path, disk, async_save):
    settings = {
        "train__max_steps": 24,
        "checkpoint__interval": 6,
        "checkpoint__async_save": async_save,
    }
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(disk)
    tree = small_batch_tree(tiny_data, run, **settings)
    ended = ranks(2, run_on_a_read_only_disk, tree, str(disk), start_world=False)
    assert [rank_end[:2] for rank_end in ended] == [(0, "")] * 2, ended
    lines = ended[0].warnings()
    assert len(lines) == 2 and all("Read-only file system" in line for line in lines), lines
    assert steps_kept(run) == [6, 24]


def run_with_waiting_lines(tree: dict[str, Any], steps: Sequence[int]) -> Ended:
    """Train. In the updates `steps`, writes of metrics.jsonl fail, but writes of checkpoints
    succeed."""
    plain = JsonLines._write

    def before(step: int) -> None:
        def write(lines: JsonLines) -> None:
            if step in steps:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            plain(lines)

        JsonLines._write = write

    return run_with(tree, before, wait_for_saves_after([steps[0] - 1, steps[-1]]))


@SYNC_AND_ASYNC
def test_checkpoint_without_its_metrics_is_not_committed(ranks, tiny_data, tmp_path, async_save):
    settings = {
        "train__max_steps": 12,
        "checkpoint__interval": 4,
        "checkpoint__async_save": async_save,
    }
    tree = small_batch_tree(tiny_data, tmp_path, **settings)
    ended = ranks(2, run_with_waiting_lines, tree, (7, 8, 9, 10, 11), start_world=False)
    assert [rank_end[:2] for rank_end in ended] == [(0, "")] * 2, ended
    words = "step 8 is not saved: step-00000008 not written: "
    (warning,) = (line for line in ended[0].warnings() if words in line)
    assert "metrics.jsonl: No space left on device" in warning
    assert steps_kept(tmp_path) == [4, 12]
    assert [line["step"] for line in metrics_of(tmp_path)] == list(range(1, 13))


def run_with_space_for_full_or_model(tree: dict[str, Any]) -> Ended:
    """Train on a disk with space for either the full checkpoint or the model-only checkpoint of a
    step. For both checkpoints together, one byte is missing."""
    plain, due = shutil.disk_usage, []
    release_writes = delay_writes({10: 11} if tree["checkpoint"]["async_save"] else {})

    def before(step: int) -> None:
        due.append(step)
        release_writes(step)

    def after(run: Run) -> None:
        saver, model = run.saves._saver, run.saves._model_saver.bytes

        def disk_usage(path: Path) -> Any:
            is_committed = store.full_path(run_dir, due[-1]).exists()
            free = model - 1 + (0 if is_committed else saver.unwritten())
            return plain(path)._replace(free=free)

        shutil.disk_usage = disk_usage

    run_dir = tree["train"]["run_dir"]
    return run_with(tree, before, after)


def run_with_space_for_both(tree: dict[str, Any]) -> Ended:
    """Train on a disk that has just enough space for the full checkpoint of a step. After this
    checkpoint is written, the disk gets just enough space for the model-only checkpoint."""
    plain, ask = shutil.disk_usage, FullSaver.unwritten

    def unwritten(saver: FullSaver) -> int:
        while missing := ask(saver):
            time.sleep(0.01)  # threads of the ranks are writing
        return missing

    def after(run: Run) -> None:
        full, model = run.saves._saver.bytes, run.saves._model_saver.bytes

        def disk_usage(path: Path) -> Any:
            return plain(path)._replace(free=model if run.saves._fulls.save else full)

        shutil.disk_usage = disk_usage

    FullSaver.unwritten = unwritten
    return run_with(tree, lambda step: None, after)


def run_without_space(tree: dict[str, Any]) -> Ended:
    """Train on a disk without free space. Assert that failed saves keep no fp32 copies of frozen
    parameters in memory."""
    plain = shutil.disk_usage
    shutil.disk_usage = lambda path: plain(path)._replace(free=0)
    seen = []

    def after(run: Run) -> None:
        seen.append(run.saves._states.frozen._wide)

    ended = run_with(tree, lambda step: None, after)
    assert seen[1:] == [[]] * 2
    return ended


def test_save_that_cannot_begin_keeps_no_copies(ranks, tiny_data, tmp_path):
    settings = {"checkpoint__interval": 1, "train__max_steps": 3, "train__dtype": "bf16"}
    settings |= {"optim__frozen": ["embed.weight"], "checkpoint__max_failures": 0}
    tree = small_batch_tree(tiny_data, tmp_path, **settings)
    (ended,) = ranks(1, run_without_space, tree, start_world=False)
    assert len(ended.warnings()) == 2 and ended.status == 1, ended
    assert "checkpoint needs " in ended.message
    assert "older checkpoints are removed only after a save; free disk space" in ended.message


def test_space_of_a_written_full_checkpoint_is_not_counted_again(ranks, tiny_data, tmp_path):
    settings = {"train__max_steps": 9, "checkpoint__interval": 3, "checkpoint__model_interval": 3}
    tree = small_batch_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=True)
    ended = ranks(2, run_with_space_for_both, tree, start_world=False)
    assert [rank_end[:2] for rank_end in ended] == [(0, "")] * 2 and not ended[0].warnings(), ended
    assert (tmp_path / "checkpoints" / "model-00000009").is_dir()


@SYNC_AND_ASYNC
def test_full_checkpoint_precedes_model_without_space_for_both(
    ranks, tiny_data, tmp_path, async_save
):
    settings = {"checkpoint__interval": 10, "checkpoint__model_interval": 5}
    tree = small_batch_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=async_save)
    ended = ranks(2, run_with_space_for_full_or_model, tree, start_world=False)
    lines = ended[0].warnings()
    assert "step 10 is not saved: model-00000010 not written: " in lines[0], ended
    if async_save:  # without async_save, the full checkpoint is already written
        assert " and the full checkpoint of the same step " in lines[0], lines
    assert ended[0].status == 1 and "step 20 is not saved: model-00000020" in ended[0].message
    workspace, *names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert workspace.startswith(".work-")  # as after every error
    assert names == ["model-00000005", "model-00000015", "step-00000010", "step-00000020"]


def run_on_a_filling_disk(tree: dict[str, Any], folder: str) -> Ended:
    """Train. Before update 11, write a file of 700 kB to `folder`."""

    def before(step: int) -> None:
        if step == 11:
            (Path(folder) / "filler").write_bytes(bytes(700_000))

    return run_with(tree, before)


@SYNC_AND_ASYNC
def test_undeletable_checkpoints_do_not_keep_others(ranks, tiny_data, tmp_path, async_save):
    """Two old checkpoints cannot be deleted. The run must still delete other old checkpoints. It
    must print one warning about each of the two undeletable checkpoints, and must mention their
    number when it warns that space is low."""
    settings = {"train__max_steps": 12, "checkpoint__interval": 2, "checkpoint__model_interval": 2}
    settings |= {"checkpoint__keep_models": 1, "checkpoint__async_save": async_save}
    with small_disk(tmp_path / "disk", "4m"):
        directory = tmp_path / "disk" / "checkpoints"
        tree = small_batch_tree(tiny_data, tmp_path / "disk", **settings)
        train_on(ranks, 1, tree | {"train": tree["train"] | {"stop_at_step": 4}})
        with immutable(directory / "step-00000002", directory / "step-00000004"):
            (ended,) = ranks(
                1, run_on_a_filling_disk, tree, str(tmp_path / "disk"), start_world=False
            )
        assert ended[:2] == (0, ""), ended
        lines = ended.warnings()
        for step in (2, 4):
            (line,) = (line for line in lines if f"step-0000000{step}" in line)
            assert line.endswith(f"{directory}/step-0000000{step}: Operation not permitted")
        spaces = [line for line in lines if "GB free, and a save takes 0.00" in line]
        shared = [line for line in lines if "every user of this machine" in line]
        assert len(lines) == len(spaces) + len(shared) + 2, lines
        if not async_save:  # with async_save, threads can count files of other threads
            assert len(spaces) == 3, lines  # 2 name a directory, 1 reports little space
        assert "2 old checkpoint directories cannot be removed; " in spaces[-1]
        names = sorted(path.name for path in directory.iterdir())
        assert names == ["model-00000012", *(f"step-{step:08d}" for step in (2, 4, 10, 12))]
