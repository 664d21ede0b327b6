"""Lock file of a run directory. Only the user who owns the lock file can open it, and the lock file
must not be a symbolic link. A run that cannot start removes the files that it has created."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from unittest import mock

import pytest

from optimus.errors import ConfigError
from optimus.io import workspace
from optimus.io.workspace import LOCK, check_not_in_use, lock_run_dir
from optimus.train.run_dir import RunDirectory
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import run_and_catch


def test_lock_is_for_this_user_only(tmp_path, capsys):
    """A user who can open the lock file can lock it and thereby block the run. A run must therefore
    set the mode of the lock file to 0600, even if the file exists already."""
    (tmp_path / LOCK).touch()
    (tmp_path / LOCK).chmod(0o644)
    directory = RunDirectory(tmp_path)
    assert stat.S_IMODE((tmp_path / LOCK).stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="is in use by another run"):
        check_not_in_use(tmp_path)
    directory._lock.close()
    check_not_in_use(tmp_path)
    assert capsys.readouterr().err == ""


def test_lock_that_is_a_link_or_a_fifo_is_refused(tmp_path):
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"\.lock: a symbolic link that .*; choose another"):
        RunDirectory(tmp_path)
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / LOCK).unlink()
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(ConfigError, match=r"\.lock: not a regular file; choose another"):
        check_not_in_use(tmp_path)


def test_directory_writable_by_all_users_causes_a_warning(tmp_path, capsys):
    tmp_path.chmod(0o777)
    RunDirectory(tmp_path)._lock.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert f"warning: {tmp_path}: every user of this machine can write to this directory" in line


def test_run_that_cannot_start_removes_only_files_that_it_has_created(tmp_path):
    run = tmp_path / "a" / "b"
    RunDirectory(run).close(others_have_ended=True)
    assert not list(tmp_path.iterdir())
    (run / "checkpoints").mkdir(parents=True)
    (run / "notes").touch()
    RunDirectory(run).close(others_have_ended=True)
    assert sorted(run.rglob("*")) == [run / "checkpoints", run / "notes"]
    (run / "checkpoints").rmdir()
    (run / "checkpoints").touch()  # the workspace cannot be opened
    with pytest.raises(OSError, match="checkpoints"):
        RunDirectory(run)
    assert sorted(run.iterdir()) == [run / "checkpoints", run / "notes"]
    (run / LOCK).touch()
    with lock_run_dir(run), pytest.raises(ConfigError, match="in use"):
        RunDirectory(run)
    assert (run / LOCK).exists()


def test_lock_file_that_a_refused_run_removes_is_created_again(tmp_path):
    """A process opens the lock file. Before the process locks this file, a refused run removes it.
    The process must create the lock file again and lock the new file."""
    lock = workspace._lock

    def remove_and_lock(file, path, kind):
        removed.append(path)
        if len(removed) == 1:
            (path / LOCK).unlink()
        lock(file, path, kind)

    removed: list[Path] = []
    with mock.patch.object(workspace, "_lock", remove_and_lock), lock_run_dir(tmp_path):
        assert len(removed) == 2
        with pytest.raises(ConfigError, match="is in use by another run"):
            check_not_in_use(tmp_path)


REFUSALS = [
    ({"checkpoint__load": "/nowhere"}, "/nowhere"),
    ({"checkpoint__load": "model@3"}, "model@3"),
    ({"kernels__backend": "sycl"}, "sycl"),
    ({"offload__mode": "manual", "offload__host_share": 1.0, "offload__host_memory": "10"}, "host"),
    (
        {"offload__mode": "auto", "offload__device_memory": "1000TB"},
        "offload.device_memory = '1000TB'",
    ),
]
"""Settings with which a run is refused after its directory is opened, and words of the message."""


@pytest.mark.parametrize(("settings", "words"), REFUSALS)
def test_refused_run_leaves_no_file(ranks, tiny_data, tmp_path, settings, words):
    tree = tiny_tree(tiny_data, tmp_path / "runs" / "first", **settings)
    ((status, message),) = ranks(1, run_and_catch, tree, start_world=False)
    assert status == 2 and words in message, message
    assert not list(tmp_path.iterdir())
