"""Tests of compilation in several processes, with killed processes and compilers that hang."""

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
from tests.kit.ranks.processes import wait_until

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")
BLOCKED = """#!/bin/sh
case "$*" in
  *--version*) echo blocked 1.0; exit;;
  *" -c "*) echo x >> '{log}'; while [ -e '{hold}' ]; do sleep 0.1; done;;
esac
exec g++ "$@"
"""


@pytest.fixture
def blocked_compiler(small_csrc, tmp_path, monkeypatch) -> tuple[Path, Path]:
    """Set CXX to a wrapper of g++ that logs each call and waits while the file `hold` exists.
    Return the paths of `hold` and of the log."""
    hold, log, path = tmp_path / "hold", tmp_path / "log", tmp_path / "blocked-g++"
    hold.touch()
    log.touch()
    path.write_text(BLOCKED.format(hold=hold, log=log))
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return hold, log


def build_and_load() -> None:
    assert backend.load(build.build("cpu")).optimus_kernels_abi() == 7


def start() -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=build_and_load)
    process.start()
    return process


def test_after_a_killed_builder_the_next_builder_compiles(blocked_compiler):
    hold, log = blocked_compiler
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


def test_compiler_that_hangs_is_a_single_line_error(tmp_path):
    """A child process of the compiler hangs and keeps the compiler's output open."""
    path = tmp_path / "hangs"
    path.write_text("#!/bin/sh\nsleep 20\n")
    path.chmod(0o755)
    started = time.monotonic()
    with pytest.raises(KernelError, match=f"{path} took more than 1 s") as refusal:
        build._run([path], limit_s=1)
    assert time.monotonic() - started < 10 and "\n" not in str(refusal.value)
