from __future__ import annotations

import errno
import io
import os

import pytest
import xxhash

from optimus.errors import ConfigError
from optimus.io import files


def test_atomic_writer_that_fails_keeps_the_old_content(tmp_path):
    path = tmp_path / "f"
    files.write_bytes(path, b"old")
    with pytest.raises(RuntimeError), files.atomic_writer(path) as file:
        file.write(b"new but unfinished")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_hash_of_a_file_equals_hash_of_its_bytes(tmp_path):
    data = os.urandom(5 << 20)
    (tmp_path / "f").write_bytes(data)
    assert (
        files.xxh3_file(tmp_path / "f") == xxhash.xxh3_64_hexdigest(data) == files.xxh3_bytes(data)
    )


def test_write_syncs_content_then_renames_then_syncs_the_directory(tmp_path, monkeypatch):
    order: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        size = os.fstat(fd).st_size
        order.append("directory" if path == str(tmp_path) else f"content of {size} bytes")
        real_fsync(fd)

    def rename(old, new) -> None:
        order.append(f"rename to {os.path.basename(new)}")
        real_rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    files.write_bytes(tmp_path / "f", b"12345")
    assert order == ["content of 5 bytes", "rename to f", "directory"]


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EIO])
def test_fsync_dir_without_support_of_the_file_system_warns_once(
    tmp_path, monkeypatch, capsys, error
):
    def refuse(fd):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(files, "_warned_devices", set())
    if error == errno.EIO:
        with pytest.raises(OSError):
            files.fsync_dir(tmp_path)
        return
    files.fsync_dir(tmp_path)
    files.fsync_dir(tmp_path)
    warnings = capsys.readouterr().err
    assert warnings.count("cannot fsync directories") == 1 and str(tmp_path) in warnings


def test_sync_to_disk_without_posix_fadvise_succeeds(tmp_path, monkeypatch):
    def refuse(fd, *_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    with open(tmp_path / "f", "wb") as file:
        files.sync_to_disk(file.fileno())
    monkeypatch.delattr(os, "posix_fadvise")
    with open(tmp_path / "f", "wb") as file:
        files.sync_to_disk(file.fileno())


def test_a_name_that_no_file_can_have_is_an_os_error():
    """A lone surrogate, which JSON allows, cannot be encoded in a file name."""
    with pytest.raises(OSError) as refused:
        files.open_regular("\ud800.safetensors")
    assert refused.value.errno == errno.EILSEQ


@pytest.mark.parametrize("limit_bytes", [10, None])
def test_read_regular_of_a_file_with_more_bytes_than_its_metadata_says(
    tmp_path, monkeypatch, limit_bytes
):
    """Files in /proc have a size of 0 in their metadata, although a read returns bytes. Some files
    in /proc have no end."""
    monkeypatch.setattr(files, "_READ_BYTES", 10)
    path = tmp_path / "f"
    path.touch()
    reported, real_fstat = os.stat(path), os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: reported)
    path.write_bytes(b"x" * 10)
    assert files.read_regular(path, limit_bytes) == b"x" * 10
    path.write_bytes(b"x" * 11)
    for read in (lambda: files.read_regular(path, limit_bytes), lambda: files.xxh3_file(path)):
        with pytest.raises(OSError, match="larger than 10 bytes") as refused:
            read()
        assert refused.value.filename == str(path)
    monkeypatch.setattr(os, "fstat", real_fstat)
    assert files.read_regular(path) == b"x" * 11


def test_read_regular_of_a_file_without_bytes_yet_is_an_os_error(tmp_path, monkeypatch):
    """A non-blocking read returns None if the file has no bytes yet, as for /proc/kmsg if the
    kernel has no messages."""

    class Waiting(io.FileIO):
        def readinto(self, _):
            return None

        def readall(self):
            return None

    path = tmp_path / "f"
    path.touch()
    monkeypatch.setattr(files, "open_regular", lambda path, _: Waiting(path))
    with pytest.raises(BlockingIOError) as refused:
        files.read_regular(path, 10)
    assert refused.value.filename == str(path)


def test_outputs_that_cannot_be_created_are_refused(tmp_path):
    """A command writes a temporary file and renames the file to the name of the output. If the
    output is a pipe or a device, the rename would replace the pipe or device. No user can create a
    file in /proc, although the mode of /proc permits this."""
    os.mkfifo(tmp_path / "pipe")
    for path, problem in (
        (tmp_path, "Is a directory; use another file"),
        (tmp_path / "absent" / "f", "No such file or directory; use another file"),
        (tmp_path / "pipe", "not a regular file; use another file"),
        (tmp_path / "pipe" / "f", "Not a directory; use another file"),
        ("/proc/f", "use another file"),
    ):
        with pytest.raises(ConfigError, match=f"^--out {path}: .*{problem}$"):
            files.check_output(path, "--out")
    for path in (tmp_path / "pipe", tmp_path / "pipe" / "a" / "b", "/proc/a/b"):
        with pytest.raises(ConfigError, match=f"^--out {path}: .*; use another directory$"):
            files.check_output_dir(path, "--out")
    (tmp_path / "f").write_text("old")
    for path in (tmp_path / "f", tmp_path / "new"):
        files.check_output(path, "--out")
    files.check_output_dir(tmp_path / "a" / "b", "--out")
    assert sorted(os.listdir(tmp_path)) == ["f", "pipe"]
    assert (tmp_path / "f").read_text() == "old"
