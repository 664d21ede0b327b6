"""Tests of staging: each node gets a copy of the Python environment on its local disk."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from optimus.errors import ConfigError
from optimus.io.workspace import Workspace
from optimus.resilience.supervision import staging
from optimus.resilience.supervision.agent import Agent


@pytest.fixture
def environment(tmp_path, monkeypatch) -> Path:
    """Make a small virtual environment, and set sys.prefix as if this interpreter ran in the
    environment. Return the path of the environment."""
    folder = tmp_path / "venv"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "only_in_venv.py").write_text("")
    monkeypatch.setattr(sys, "prefix", str(folder))
    return folder


@pytest.fixture
def packed(environment, tmp_path) -> tuple[Path, str]:
    archive = tmp_path / staging.ARCHIVE
    digest = staging.pack_environment(archive, Workspace.open(tmp_path / "run"))
    return archive, digest


def test_copy_imports_no_file_of_the_original(packed, environment, tmp_path):
    archive, digest = packed
    assert staging.pack_environment(archive, Workspace.open(tmp_path / "run")) == digest
    disk = tmp_path / "disk"
    disk.mkdir()
    for _ in range(2):  # the second agent of a node finds the copy of the first
        staging.unpack_environment(archive, digest, disk)
    (folder,) = disk.iterdir()
    environment.rename(tmp_path / "moved")
    code = "import only_in_venv, optimus; print(only_in_venv.__file__, optimus.__file__)"
    environ = {**os.environ, "PYTHONPATH": "", **staging.staged_variables(folder, {})}
    command = [staging.staged_python(folder), "-P", "-c", code]
    output = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    assert all(Path(path).is_relative_to(folder) for path in output.split())
    staging.remove_environment(digest, disk)
    assert not [*disk.iterdir()]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("changed", "has changed since it was packed"),
        ("missing", "No such file or directory"),
        ("file", "is not a directory that only this user can write"),
        ("open", "is not a directory that only this user can write"),
        ("parent", "other users can replace folders of"),
        ("race", "is not a directory that only this user can write"),
        ("disk", "No such file or directory"),
    ],
)
def test_agent_reports_why_it_cannot_unpack(packed, tmp_path, monkeypatch, fault, message):
    archive, digest = packed
    disk = tmp_path / "disk"
    theirs, rename = staging.staged_folder(disk, digest), os.rename

    def make_theirs(*names: object) -> None:
        """Make the folder in which the copy will be unpacked, with write permission for all users.
        Another user could do this at any time. Then rename `names[0]` to `names[1]`, if `names` are
        given."""
        (theirs / "prefix").mkdir(parents=True)
        theirs.chmod(0o777)
        if names:
            rename(*names)

    if fault != "disk":
        disk.mkdir()
    if fault == "changed":
        with open(archive, "r+b") as file:
            file.seek(600)
            file.write(b"other")
    elif fault == "missing":
        archive.unlink()
    elif fault == "file":
        theirs.touch()
    elif fault == "open":
        make_theirs()
    elif fault == "parent":
        disk.chmod(0o777)
    elif fault == "race":
        monkeypatch.setattr(os, "rename", make_theirs)

    async def stage() -> str:
        agent = Agent(tmp_path, "n1", tmp_path / "agent")
        agent.staged = (digest, disk)
        return agent._stage(archive)

    problem = asyncio.run(stage())
    assert message in problem and "\n" not in problem
    assert fault == "disk" or {*disk.iterdir()} <= {theirs}


def test_environment_without_a_folder_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    with pytest.raises(ConfigError, match="is not a virtual environment; install Optimus in one"):
        staging.check_environment()
