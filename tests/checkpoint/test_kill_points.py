"""Killed at any call that changes a file, a save leaves a valid checkpoint of one step."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shim(tmp_path_factory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler (cc) and Linux to build what kills a save at each call")
    library = tmp_path_factory.mktemp("shim") / "kill_points.so"
    source = ROOT / "tests" / "helpers" / "kill_points.c"
    flags = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-U_FORTIFY_SOURCE"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library), "-ldl"], check=True)
    return library


@pytest.mark.parametrize(
    ("mode", "ranks", "victim", "stride", "calls"),
    [
        pytest.param(0, 1, 0, 1, 40, id="before-each"),
        pytest.param(1, 1, 0, 1, 40, id="behind-each"),
        pytest.param(2, 1, 0, 1, 40, id="half-way-through-each-write"),
        pytest.param(0, 2, 0, 7, 35, id="the-first-of-two-ranks"),
        pytest.param(2, 2, 1, 2, 8, id="the-second-of-two-ranks"),
    ],
)
def test_a_save_killed_at_any_call_leaves_a_valid_checkpoint(
    shim, tmp_path, mode, ranks, victim, stride, calls
):
    what = [tmp_path, mode, ranks, victim, stride]
    environ = os.environ | {"LD_PRELOAD": str(shim), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.kill_points", *map(str, what)],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= calls  # a shim that saw nothing would have killed nothing
