"""Fixtures for all tests."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from optimus.observe.log import set_up_logging
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny import make_tiny_data

# Before torch is imported: with one thread, results do not depend on the machine's number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where Intel's extension is installed, each rank would spend 8 s on importing it (docs/intel.md);
# tests/test_ipex.py asks for it.
os.environ.setdefault("OPTIMUS_IPEX", "0")
# A peak measured beside tests is not what the user's runs should refer to.
if "OPTIMUS_PEAK_CACHE" not in os.environ:
    os.environ["OPTIMUS_PEAK_CACHE"] = tempfile.mkdtemp(prefix="optimus-peaks-")
    atexit.register(shutil.rmtree, os.environ["OPTIMUS_PEAK_CACHE"], ignore_errors=True)
# Shells ignore these for what they start in the background, and children would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


set_up_logging()  # as a process of a command does; tests read the lines on standard error


@pytest.fixture(scope="session")
def rank_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """The server of forked ranks; it starts with the first job."""
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture
def ranks(rank_pool: RankPool) -> Callable:
    """`ranks(n, function, *arguments, timeout_s=60) -> results by rank`; see RankPool.run."""
    return rank_pool.run


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's number that no account has, and no HOME."""
    for name in ("HOME", "XDG_CACHE_HOME", "OPTIMUS_KERNELS_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def no_entry(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", no_entry)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny data set, made once; tests must not change it."""
    return make_tiny_data(tmp_path_factory.mktemp("tiny"))
