"""Fixtures for all tests."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from optimus.launch.signals import STOP_SIGNALS
from optimus.observe.log import set_up_logging
from tests.kit.ranks.pool import RankPool
from tests.kit.runs.tiny import make_tiny_data

# With one thread, results do not depend on the number of cores. torch reads the variable when it is
# imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# If Intel's extension is installed, its import takes 8 s on each rank (docs/intel.md).
# tests/test_ipex.py sets the variable to import it.
os.environ.setdefault("OPTIMUS_IPEX", "0")
# The user's runs should not use a peak FLOP/s that was measured while tests ran.
if "OPTIMUS_PEAK_CACHE" not in os.environ:
    os.environ["OPTIMUS_PEAK_CACHE"] = tempfile.mkdtemp(prefix="optimus-peaks-")
    atexit.register(shutil.rmtree, os.environ["OPTIMUS_PEAK_CACHE"], ignore_errors=True)
# A shell can start this process with SIGINT or SIGHUP ignored, and child processes would ignore the
# signals, too. Tests send these signals to child processes, so the default handlers are restored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The handlers are read here, not before each test, because a module's fixture can train before.
HANDLERS = {number: signal.getsignal(number) for number in STOP_SIGNALS}

# Garbage collection would take a third of the time to import and collect the tests.
gc.disable()


def pytest_collection_finish() -> None:
    """Enable garbage collection again. Exclude objects that already exist (modules and the list of
    tests) from later collections."""
    gc.enable()
    gc.freeze()


set_up_logging()  # as commands do; tests read the lines on stderr


@pytest.fixture(autouse=True)
def process_settings() -> Iterator[None]:
    """After a test, undo two changes that training makes in a process: torch's deterministic mode
    (optimus.train.loop.fix_arithmetic) and the handlers of the stop signals
    (optimus.train.stop.StopRequest)."""
    yield
    for number, handler in HANDLERS.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    if torch := sys.modules.get("torch"):
        torch.set_deterministic_debug_mode("default")
        torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(scope="session")
def rank_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Return the pool of forked ranks. The first call of its method `run` starts the process from
    which the ranks are forked."""
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture
def ranks(rank_pool: RankPool) -> Callable:
    """Return `RankPool.run`. `ranks(n, function, *arguments)` calls the function on n forked ranks
    and returns the list of their results."""
    return rank_pool.run


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a container in which the user has no home directory and no account."""
    for name in ("HOME", "XDG_CACHE_HOME", "OPTIMUS_KERNELS_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def no_entry(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", no_entry)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny data set. All tests share this directory and must not change
    its files."""
    return make_tiny_data(tmp_path_factory.mktemp("tiny"))
