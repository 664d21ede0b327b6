"""Tests of manifests, and of the creation and commit of checkpoints."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from optimus.checkpoint import store
from optimus.checkpoint.format import MANIFEST, read_manifest
from optimus.checkpoint.shard_file import Stop
from optimus.checkpoint.store import create, write_checkpoint
from optimus.errors import CheckpointError, OptimusError
from optimus.io import files


def write_files(directory):
    """Write the files that a model must have, and two other files."""
    (directory / "config.toml").write_text("")
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (directory / "a.bin").write_bytes(os.urandom(1000))
    (directory / "sub").mkdir()
    (directory / "sub" / "b.bin").write_bytes(b"")


@pytest.fixture
def committed(tmp_path):
    return write_checkpoint(
        tmp_path / "c", write_files, kind="model", step=3, settings={"train.seed": 1}
    )


def test_a_committed_checkpoint_reads_back(committed):
    manifest = read_manifest(committed.path)
    assert manifest == committed and manifest.step == 3
    assert [entry.name for entry in manifest.files] == [
        "a.bin",
        "config.toml",
        "model.safetensors",
        "sub/b.bin",
    ]
    manifest.verify()


def test_all_files_are_durable_before_the_rename(tmp_path, monkeypatch):
    synced, real_fsync, real_rename = set(), os.fsync, os.rename

    def fsync(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        real_fsync(fd)

    def rename(old: Path, new: Path) -> None:
        inside = [Path(old), *Path(old).rglob("*")]
        assert [path.name for path in inside if path.stat().st_ino not in synced] == []
        real_rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    write_checkpoint(tmp_path / "c", write_files, kind="model")
    assert (tmp_path / "c" / MANIFEST).is_file()


def test_a_file_above_the_hash_limit_is_compared_by_its_size(committed):
    path = committed.path / "a.bin"
    os.truncate(path, 999)
    with pytest.raises(
        CheckpointError, match="a.bin: the file has 999 bytes, but the manifest says"
    ):
        committed.check(hashed_bytes=0)
    path.unlink()
    with pytest.raises(CheckpointError, match="a.bin: No such file"):
        committed.check(hashed_bytes=0)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 99}'])
def test_an_invalid_manifest_is_refused(committed, content):
    (committed.path / MANIFEST).write_text(content)
    with pytest.raises(CheckpointError):
        read_manifest(committed.path)


def test_a_failed_write_leaves_no_files(tmp_path):
    def fail(directory):
        write_files(directory)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        write_checkpoint(tmp_path / "c", fail, kind="model")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_refused_and_kept(committed):
    before = json.loads((committed.path / MANIFEST).read_text())
    with pytest.raises(CheckpointError, match="exists already"):
        write_checkpoint(committed.path, write_files, kind="model")
    assert json.loads((committed.path / MANIFEST).read_text()) == before
    committed.verify()


@pytest.mark.parametrize("kind", ["model", "full"])
def test_only_models_of_format_1_are_read(tmp_path, kind):
    committed = write_checkpoint(tmp_path / "c", write_files, kind="model", step=3)
    raw = json.loads((committed.path / MANIFEST).read_text())
    del raw["self_xxh3"]
    (committed.path / MANIFEST).write_text(json.dumps(raw | {"format": 1, "kind": kind}))
    if kind == "model":
        assert read_manifest(committed.path) == committed
    else:
        with pytest.raises(
            CheckpointError, match="full checkpoint of format 1; this version reads"
        ):
            read_manifest(committed.path)
    (committed.path / MANIFEST).write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="not readable: damaged"):
        read_manifest(committed.path)


def test_create_without_enough_space_is_refused(tmp_path):
    needs = r"c not written: .* GB free, but the checkpoint needs 1000000000.000"
    with pytest.raises(OptimusError, match=needs):
        create(tmp_path / "c", needed_bytes=10**18)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "set-aside" / "old").mkdir(parents=True)
    (tmp_path / "set-aside" / "old" / "data").write_bytes(bytes(2_000_000))
    with pytest.raises(
        OptimusError, match=r"free disk space, for example in set-aside/ \(0.002 GB\)"
    ):
        create(tmp_path / "c", needed_bytes=10**18)


def test_a_commit_that_fails_after_the_rename_reverts_it(tmp_path, monkeypatch):
    """The fsync after the rename fails. The commit reports an error, so the checkpoint must not
    keep its final name."""
    plain = files.fsync_dir

    def fsync_dir(path):
        if Path(path) == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        plain(path)

    monkeypatch.setattr(files, "fsync_dir", fsync_dir)
    with pytest.raises(OSError, match="Input/output error"):
        write_checkpoint(tmp_path / "c", write_files, kind="model")
    assert list(tmp_path.iterdir()) == []


def test_a_stop_after_the_rename_is_refused(tmp_path, monkeypatch):
    """After the rename, a request to stop has no effect. The commit also does not read the manifest
    after the rename, because this read could fail."""
    plain = store.read_manifest

    def read(path):
        assert Path(path) != tmp_path / "c"
        return plain(path)

    monkeypatch.setattr(store, "read_manifest", read)
    stop = Stop()
    committed = write_checkpoint(tmp_path / "c", write_files, kind="model", stop=stop)
    assert committed == plain(tmp_path / "c")
    assert not stop.set() and not stop.is_set()  # too late


def test_a_stopped_save_is_not_committed(tmp_path):
    stop = Stop()
    assert stop.set()
    with pytest.raises(OptimusError, match="c: the save was stopped"):
        write_checkpoint(tmp_path / "c", write_files, kind="model", stop=stop)
    assert list(tmp_path.iterdir()) == []
