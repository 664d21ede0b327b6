"""Tests of workspaces (each start of a run has a separate workspace): no process of an earlier
start can change the run directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading

import pytest

from optimus.checkpoint import store
from optimus.errors import OptimusError
from optimus.io.workspace import find_workspaces
from tests.kit.runs.saves import make_states, save_full


def tree(folder):
    """Return a dict that maps the relative path of each file below `folder` to its content."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def save(run_dir, step, workspace):
    """Write the files of a model-only checkpoint. Return a function that commits the checkpoint."""
    path = store.model_path(run_dir, step)
    temporary = store.create(path, workspace=workspace)
    (temporary / "config.toml").write_text("")
    (temporary / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return lambda: store.commit(temporary, path, kind="model", step=step, tokens=step)


def test_an_earlier_start_cannot_change_the_directory(tmp_path):
    earlier = store.open_workspace(tmp_path)
    earlier.write_bytes(tmp_path / "config.toml", b"earlier")
    commit, aside = save(tmp_path, 4, earlier), earlier.path / ".aside-step-2.tmp"
    for step in (1, 2, 3):
        save(tmp_path, step, earlier)()
    fd = earlier.open_append(tmp_path / "metrics.jsonl", b"1\n")

    later = store.open_workspace(tmp_path)
    later.write_bytes(tmp_path / "config.toml", b"later")
    os.close(later.open_append(tmp_path / "metrics.jsonl", b"1\n"))
    assert find_workspaces(tmp_path / "checkpoints") == [later.path] and not earlier.is_open()
    before = tree(tmp_path)
    for change in (
        commit,
        lambda: save(tmp_path, 5, earlier),
        lambda: earlier.write_bytes(tmp_path / "config.toml", b"earlier again"),
        lambda: earlier.open_append(tmp_path / "metrics.jsonl", b""),
        lambda: os.rename(store.model_path(tmp_path, 1), aside),
        lambda: store.prepare_directory(tmp_path, store.Start("none"), earlier),
    ):
        with pytest.raises((OSError, store.CheckpointError)):
            change()
    assert store.remove_old(tmp_path, earlier, keep_models=1)  # returns why nothing is removed
    os.write(fd, b"2\n")
    os.close(fd)
    earlier.close()
    assert tree(tmp_path) == before
    store.prepare_directory(tmp_path, store.decide_start(tmp_path, "auto"), later)
    later.close()
    assert not find_workspaces(tmp_path / "checkpoints")


@pytest.mark.parametrize("directory", ["checkpoints", "checkpoints/.work-earlier"])
@pytest.mark.parametrize("name", [".work-link", ".old-link", ".aside-step-00000001.x"])
def test_files_behind_a_link_are_not_moved(tmp_path, directory, name):
    foreign, folder = tmp_path / "foreign", tmp_path / "run" / directory
    foreign.mkdir()
    (foreign / "notes").write_text("of another project")
    folder.mkdir(parents=True)
    (folder / name).symlink_to(foreign)
    before = tree(foreign)
    for _ in range(2):
        workspace = store.open_workspace(tmp_path / "run")
        store.prepare_directory(tmp_path / "run", store.Start("none"), workspace)
        workspace.close()
    assert tree(foreign) == before


def test_content_of_an_earlier_workspace_is_removed_or_goes_to_quarantine(tmp_path):
    earlier = store.open_workspace(tmp_path)
    save(tmp_path, 3, earlier)()
    unfinished = store.create(store.model_path(tmp_path, 4), workspace=earlier)
    moved = earlier.temporary(store.model_path(tmp_path, 3).with_name("aside-model-00000003"))
    os.rename(store.model_path(tmp_path, 3), moved)  # the start was killed before the next rename
    later = store.open_workspace(tmp_path)
    (aside,) = (tmp_path / "checkpoints" / store.QUARANTINE).iterdir()
    assert aside.name.startswith("model-00000003.") and (aside / "manifest.json").is_file()
    assert [path.name for path in later.path.iterdir()] == [unfinished.name]
    store.prepare_directory(tmp_path, store.Start("none"), later)
    assert not list(later.path.iterdir())


def test_several_starts_at_the_same_time_keep_at_most_a_single_workspace(tmp_path):
    for _ in range(30):
        opened, barrier = [], threading.Barrier(4)

        def start(opened=opened, barrier=barrier):
            barrier.wait()
            with contextlib.suppress(OptimusError, OSError):  # another start can remove the file
                opened.append(store.open_workspace(tmp_path))

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(workspace.is_open() for workspace in opened) <= 1
        assert len(find_workspaces(tmp_path / "checkpoints")) <= 1


def test_a_process_that_creates_files_without_pause_is_stopped(tmp_path):
    earlier, errors, has_written = store.open_workspace(tmp_path), [], threading.Event()

    def write():
        try:
            while True:
                earlier.write_bytes(tmp_path / "config.toml", b"earlier")
                has_written.set()
        except OSError as error:
            errors.append(error)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    has_written.wait()
    later = store.open_workspace(tmp_path)
    writer.join(10)
    assert not writer.is_alive() and isinstance(errors[0], FileNotFoundError)
    assert later.is_open() and not earlier.is_open()


def test_files_on_another_file_system_are_replaced(tmp_path):
    """`checkpoints/` is a link to another file system. No file can be renamed from there to the run
    directory."""
    other = tempfile.mkdtemp(dir="/dev/shm")
    try:
        if os.stat(other).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("/dev/shm is on the same file system as the test directory")
        (tmp_path / "checkpoints").symlink_to(other)
        workspace = store.open_workspace(tmp_path)
        workspace.write_bytes(tmp_path / "config.toml", b"x")
        assert (tmp_path / "config.toml").read_bytes() == b"x"
        save_full(make_states(1), store.full_path(tmp_path, 1), step=1)
        workspace.close()
    finally:
        shutil.rmtree(other)


def test_files_on_another_mount_of_the_same_file_system_are_replaced(tmp_path):
    """A rename between two mounts fails, although both mounts have the same device number."""
    (tmp_path / "other").mkdir()
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    command = ["mount", "--bind", str(tmp_path / "other"), str(checkpoints)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mount --bind is not possible: {error}")
    try:
        workspace = store.open_workspace(tmp_path / "run")
        workspace.write_bytes(tmp_path / "run" / "config.toml", b"x")
        assert (tmp_path / "run" / "config.toml").read_bytes() == b"x"
        assert list(workspace.path.iterdir()) == []
        workspace.close()
    finally:
        subprocess.run(["umount", str(checkpoints)], check=True)
