"""Lock file of a run directory: only its owner can open it, and it must not be a symbolic link."""

from __future__ import annotations

import os
import stat

import pytest

from optimus.errors import ConfigError
from optimus.io.workspace import LOCK, check_not_in_use
from optimus.train.run_dir import RunDirectory


def test_lock_is_for_this_user_only(tmp_path, capsys):
    """A user who can open the lock file can lock it. The mode must become 0600, also for an
    existing file."""
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
    assert f"warning: {tmp_path}: every user of this machine may write to it" in line
