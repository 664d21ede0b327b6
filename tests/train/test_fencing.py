"""Tests of suspended runs that continue after another process has taken over the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.ranks.processes import PYTHONPATH, wait_until
from tests.kit.runs.results import assert_same_run
from tests.kit.runs.tiny import small_batch_tree
from tests.kit.runs.training import train_on

SUSPENDED = """
import json, os, signal, sys
from optimus.config import make_config
from optimus.distributed.agreement import RunEnded
from optimus.io import files
from optimus.io.workspace import Workspace
from optimus.launch.environment import read_launch_env
from optimus.train.loop import Run, train

where = sys.argv[2]

def suspend_before(owner, name, condition):
    plain = getattr(owner, name)
    def replaced(*args):
        if condition(*args):
            os.kill(os.getpid(), signal.SIGSTOP)
        return plain(*args)
    setattr(owner, name, replaced)

if where == "update":
    suspend_before(Run, "update", lambda run, step: step == 10)
elif where == "commit":
    suspend_before(files, "commit", lambda temporary, final: str(final).endswith("step-00000012"))
elif where == "removal":
    suspend_before(files, "commit", lambda temporary, final: "removed-step" in str(final))
else:
    suspend_before(Workspace, "write_bytes", lambda self, path, data: path.name == "config.toml")
try:
    train(make_config(json.loads(sys.argv[1])), read_launch_env({}))
except RunEnded as ended:
    print(ended)
    sys.exit(ended.exit_code)
"""


def files_of(folder):
    """Return the contents of all files of a run except its lock file, by path."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def unbroken(rank_pool, tiny_data, tmp_path_factory) -> Path:
    """Return the directory of a run that is not suspended."""
    path = tmp_path_factory.mktemp("unbroken") / "run"
    train_on(rank_pool.run, 1, small_batch_tree(tiny_data, path, train__max_steps=24))
    return path


@pytest.mark.parametrize("where", ["start", "update", "commit", "removal"])
def test_suspended_run_changes_nothing_when_it_continues(
    ranks, tiny_data, tmp_path, unbroken, where
):
    """A run is suspended before it changes its directory. A second process takes over the run and
    trains to the end. Then the suspended process continues. It must end with status 1 and change no
    file. The start of a process takes 3 s."""
    tree = small_batch_tree(tiny_data, tmp_path / "run", train__max_steps=24)
    code = [sys.executable, "-P", "-c", SUSPENDED, json.dumps(tree), where]
    environ, pipe = os.environ | {"PYTHONPATH": PYTHONPATH}, subprocess.PIPE
    with subprocess.Popen(code, env=environ, stdout=pipe, stderr=pipe, text=True) as run:
        try:
            os.waitid(os.P_PID, run.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            (tmp_path / "run" / ".lock").unlink()  # the suspended process holds the lock
            train_on(ranks, 1, tree)
            before = files_of(tmp_path / "run")
            run.send_signal(signal.SIGCONT)
            printed, errors = run.communicate(timeout=60)
        finally:
            run.kill()
    assert run.returncode == 1, errors
    assert files_of(tmp_path / "run") == before
    if where == "update":
        assert "another start of this run uses the directory now" in printed
    assert_same_run(tmp_path / "run", unbroken)
    wait_until(lambda: not list((tmp_path / "run" / "checkpoints").glob(".*")), within_s=1)
