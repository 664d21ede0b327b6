"""Builders with a real compiler: side by side, killed, or waiting for a compiler that hangs."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from optimus_kernels import backend, build, cache
from optimus_kernels.cache import KernelError
from tests.helpers.processes import wait_until

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
HELD = """#!/bin/sh
case "$*" in
  *--version*) echo held 1.0; exit;;
  *" -c "*) echo x >> '{log}'; while [ -e '{hold}' ]; do sleep 0.1; done;;
esac
exec g++ "$@"
"""


@pytest.fixture
def held_compiler(small_csrc, tmp_path, monkeypatch) -> tuple[Path, Path]:
    """g++, which waits before it compiles while the first path exists, and notes each call in the
    second."""
    hold, log, path = tmp_path / "hold", tmp_path / "log", tmp_path / "held-g++"
    hold.touch()
    log.touch()
    path.write_text(HELD.format(hold=hold, log=log))
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return hold, log


def build_and_load() -> None:
    assert backend.load(build.build("cpu")).optimus_kernels_abi() == 7


def start() -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=build_and_load)
    process.start()
    return process


def test_after_a_killed_builder_the_next_one_builds(held_compiler):
    hold, log = held_compiler
    killed = start()
    wait_until(log.read_text, within_s=60)
    second = start()
    os.kill(killed.pid, signal.SIGKILL)
    killed.join(10)
    wait_until(lambda: log.read_text() == "x\nx\n", within_s=60)
    assert cache.entries("cpu") == []
    hold.unlink()
    second.join(60)
    assert second.exitcode == 0 and len(cache.entries("cpu")) == 1
    assert not list(cache.cache_dir().glob(".*.tmp"))


def test_a_compiler_that_hangs_ends_in_one_line(tmp_path):
    """Also where it is a child of the command's that holds its output open."""
    path = tmp_path / "hangs"
    path.write_text("#!/bin/sh\nsleep 20\n")
    path.chmod(0o755)
    started = time.monotonic()
    with pytest.raises(KernelError, match=f"{path} took more than 1 s") as refusal:
        build._run([path], limit_s=1)
    assert time.monotonic() - started < 10 and "\n" not in str(refusal.value)
