"""Runs whose disk hangs, is full, takes nothing, or has too little room."""

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

from optimus.checkpoint import manager
from optimus.checkpoint.save import FullSaver
from optimus.launch.environment import read_launch_env
from optimus.observe.metrics import JsonLines
from optimus.train.loop import Run
from tests.helpers.disks import immutable, small_disk
from tests.helpers.runs import assert_same_run, metrics_of, train_on
from tests.helpers.saves import (
    BOTH,
    Ended,
    hold_writes,
    run_with,
    steps_kept,
    warnings,
)
from tests.helpers.tiny import tiny_tree


def run_with_a_hanging_disk(tree: dict[str, Any]) -> Ended:
    """The second rank's write of step 4 hangs until update 10."""
    return run_with(tree, hold_writes({4: 10} if read_launch_env().rank == 1 else {}))


@BOTH
def test_a_disk_that_hangs_holds_nobody_up_for_longer_than_the_limit(
    ranks, tiny_data, tmp_path, beside
):
    settings = {"checkpoint__interval": 4, "train__max_steps": 12, "checkpoint__timeout_s": 3.0}
    tree = tiny_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=beside)
    ended = ranks(2, run_with_a_hanging_disk, tree, start_world=False)
    assert [one[:2] for one in ended] == [(0, "")] * 2
    first, second = warnings(ended[0])
    assert "step-00000004 not written within checkpoint.timeout_s = 3: the disk of rank 1" in first
    assert "step 8 is not saved: the disk has not taken what step 4 gave it" in second
    assert steps_kept(tmp_path) == [12]
    assert len(metrics_of(tmp_path)) == 12


def run_on_a_full_disk(tree: dict[str, Any], folder: str) -> Ended:
    """No byte is free from update 8 to before update 18."""
    filler = Path(folder) / "filler"

    def before(step: int) -> None:
        if read_launch_env().rank == 0 and step == 8:
            with pytest.raises(OSError, match="No space"), open(filler, "wb", 0) as file:
                while file.write(bytes(1 << 16)):
                    pass
        if read_launch_env().rank == 0 and step == 18:
            filler.unlink()

    return run_with(tree, before)


def run_on_a_read_only_disk(tree: dict[str, Any], folder: str) -> Ended:
    """What is mounted there takes nothing from update 12 to before update 21."""

    def before(step: int) -> None:
        if read_launch_env().rank == 0 and step in (12, 21):
            how = "ro" if step == 12 else "rw"
            subprocess.run(["mount", "-o", f"remount,{how}", folder], check=True)

    return run_with(tree, before)


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A file system of 3 MB of its own."""
    with small_disk(tmp_path / "disk", "3m"):
        yield tmp_path / "disk"


@BOTH
def test_a_full_disk_harms_nothing_and_is_used_again(ranks, tiny_data, tmp_path, disk, beside):
    """Not even metrics find room; they are written later."""
    settings = {"checkpoint__interval": 5, "checkpoint__model_interval": 5}
    settings |= {"checkpoint__keep_models": 1, "observe__tensorboard": True}
    train_on(ranks, 2, tiny_tree(tiny_data, tmp_path / "unbroken", **settings))
    run = disk / "run"
    tree = tiny_tree(tiny_data, run, **settings, checkpoint__async_save=beside)
    ended = ranks(2, run_on_a_full_disk, tree, str(disk), start_world=False)
    assert [one[:2] for one in ended] == [(0, "")] * 2, ended
    told = warnings(ended[0])
    for step in (10, 15):
        for kind in ("step", "model"):
            words = f"warning: step {step} is not saved: {kind}-000000{step} not written: "
            assert any(words in line and "make room" in line for line in told), told
    assert any("metrics.jsonl: No space left on device; its lines wait" in line for line in told)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["model-00000020", "step-00000005", "step-00000020"]
    for name in names:
        manager.read_manifest(run / "checkpoints" / name).verify()
    assert_same_run(tmp_path / "unbroken", run)


@BOTH
def test_a_directory_that_takes_nothing_harms_nothing(ranks, tiny_data, tmp_path, disk, beside):
    settings = {"train__max_steps": 24, "checkpoint__interval": 6, "checkpoint__async_save": beside}
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(disk)
    tree = tiny_tree(tiny_data, run, **settings)
    ended = ranks(2, run_on_a_read_only_disk, tree, str(disk), start_world=False)
    assert [one[:2] for one in ended] == [(0, "")] * 2, ended
    told = warnings(ended[0])
    assert len(told) == 2 and all("Read-only file system" in line for line in told), told
    assert steps_kept(run) == [6, 24]


def run_with_waiting_lines(tree: dict[str, Any], steps: Sequence[int]) -> Ended:
    """The disk of metrics.jsonl takes nothing in these steps; that of checkpoints does."""
    plain = JsonLines._write

    def before(step: int) -> None:
        def write(lines: JsonLines) -> None:
            if step in steps:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            plain(lines)

        JsonLines._write = write

    return run_with(tree, before)


@BOTH
def test_no_checkpoint_is_sealed_that_the_curve_does_not_reach(ranks, tiny_data, tmp_path, beside):
    settings = {"train__max_steps": 12, "checkpoint__interval": 4, "checkpoint__async_save": beside}
    tree = tiny_tree(tiny_data, tmp_path, **settings)
    ended = ranks(2, run_with_waiting_lines, tree, (7, 8, 9, 10, 11), start_world=False)
    assert [one[:2] for one in ended] == [(0, "")] * 2, ended
    words = "step 8 is not saved: step-00000008 not written: "
    (told,) = (line for line in warnings(ended[0]) if words in line)
    assert "metrics.jsonl: No space left on device" in told
    assert steps_kept(tmp_path) == [4, 12]
    assert [line["step"] for line in metrics_of(tmp_path)] == list(range(1, 13))


def run_with_room_for_one(tree: dict[str, Any]) -> Ended:
    """There is room for a full checkpoint and for a model, but a byte too little for both."""
    plain, due = shutil.disk_usage, []
    let = hold_writes({10: 11} if tree["checkpoint"]["async_save"] else {})

    def before(step: int) -> None:
        due.append(step)
        let(step)

    def behind(run: Run) -> None:
        saver, model = run.saves._saver, run.saves._model_saver.bytes

        def disk_usage(path: Path) -> Any:
            is_sealed = manager.full_path(run_dir, due[-1]).exists()
            free = model - 1 + (0 if is_sealed else saver.unwritten())
            return plain(path)._replace(free=free)

        shutil.disk_usage = disk_usage

    run_dir = tree["train"]["run_dir"]
    return run_with(tree, before, behind)


def run_with_room_for_both(tree: dict[str, Any]) -> Ended:
    """There is just room for a full checkpoint, and once it lies on the disk for a model."""
    plain, ask = shutil.disk_usage, FullSaver.unwritten

    def unwritten(saver: FullSaver) -> int:
        while missing := ask(saver):
            time.sleep(0.01)  # the ranks' threads are at it
        return missing

    def behind(run: Run) -> None:
        full, model = run.saves._saver.bytes, run.saves._model_saver.bytes

        def disk_usage(path: Path) -> Any:
            return plain(path)._replace(free=model if run.saves._fulls.save else full)

        shutil.disk_usage = disk_usage

    FullSaver.unwritten = unwritten
    return run_with(tree, lambda step: None, behind)


def run_without_room(tree: dict[str, Any]) -> Ended:
    """There is no room at all; nor do copies of what is frozen stay behind a save that is not."""
    plain = shutil.disk_usage
    shutil.disk_usage = lambda path: plain(path)._replace(free=0)
    seen = []

    def behind(run: Run) -> None:
        seen.append(run.saves._states.frozen._wide)

    ended = run_with(tree, lambda step: None, behind)
    assert seen[1:] == [[]] * 2
    return ended


def test_a_save_that_cannot_begin_leaves_no_copies(ranks, tiny_data, tmp_path):
    settings = {"checkpoint__interval": 1, "train__max_steps": 3, "train__dtype": "bf16"}
    settings |= {"optim__frozen": ["embed.weight"], "checkpoint__max_failures": 0}
    tree = tiny_tree(tiny_data, tmp_path, **settings)
    (ended,) = ranks(1, run_without_room, tree, start_world=False)
    assert len(warnings(ended)) == 2 and ended.status == 1, ended
    assert "it needs " in ended.message and "removes older checkpoints; make room" in ended.message


def test_room_that_the_full_one_has_taken_is_not_asked_for_again(ranks, tiny_data, tmp_path):
    settings = {"train__max_steps": 9, "checkpoint__interval": 3, "checkpoint__model_interval": 3}
    tree = tiny_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=True)
    ended = ranks(2, run_with_room_for_both, tree, start_world=False)
    assert [one[:2] for one in ended] == [(0, "")] * 2 and not warnings(ended[0]), ended
    assert (tmp_path / "checkpoints" / "model-00000009").is_dir()


@BOTH
def test_where_there_is_no_room_for_both_the_full_one_is_saved(ranks, tiny_data, tmp_path, beside):
    settings = {"checkpoint__interval": 10, "checkpoint__model_interval": 5}
    tree = tiny_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=beside)
    ended = ranks(2, run_with_room_for_one, tree, start_world=False)
    told = warnings(ended[0])
    assert "step 10 is not saved: model-00000010 not written: " in told[0], ended
    if beside:  # else the full one has its room already
        assert "older checkpoints, and the full one of its step " in told[0], told
    assert ended[0].status == 1 and "step 20 is not saved: model-00000020" in ended[0].message
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["model-00000005", "model-00000015", "step-00000010", "step-00000020"]


def run_on_a_filling_disk(tree: dict[str, Any], folder: str) -> Ended:
    """At update 11 other files take 700 kB."""

    def before(step: int) -> None:
        if step == 11:
            (Path(folder) / "filler").write_bytes(bytes(700_000))

    return run_with(tree, before)


@BOTH
def test_checkpoints_that_cannot_be_removed_keep_no_others(ranks, tiny_data, tmp_path, beside):
    """Each is named once; the warning says how much room is left, again as it gets little."""
    settings = {"train__max_steps": 12, "checkpoint__interval": 2, "checkpoint__model_interval": 2}
    settings |= {"checkpoint__keep_models": 1, "checkpoint__async_save": beside}
    with small_disk(tmp_path / "disk", "4m"):
        directory = tmp_path / "disk" / "checkpoints"
        tree = tiny_tree(tiny_data, tmp_path / "disk", **settings)
        train_on(ranks, 1, tree | {"train": tree["train"] | {"stop_at_step": 4}})
        with immutable(directory / "step-00000002", directory / "step-00000004"):
            (ended,) = ranks(
                1, run_on_a_filling_disk, tree, str(tmp_path / "disk"), start_world=False
            )
        assert ended[:2] == (0, ""), ended
        told = warnings(ended)
        for step in (2, 4):
            (line,) = (line for line in told if f"step-0000000{step}" in line)
            assert line.endswith(f"{directory}/step-0000000{step}: Operation not permitted")
        rooms = [line for line in told if "GB free, and a save takes 0.00" in line]
        shared = [line for line in told if "every user of this machine" in line]
        assert len(told) == len(rooms) + len(shared) + 2, told
        if not beside:  # threads may find each other's work there
            assert len(rooms) == 3, told  # two with a name, then the disk gets full
        assert "2 old directories of checkpoints cannot be removed; " in rooms[-1]
        names = sorted(path.name for path in directory.iterdir())
        assert names == ["model-00000012", *(f"step-{step:08d}" for step in (2, 4, 10, 12))]
