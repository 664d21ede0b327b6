"""A compiled library is there whole or not at all, whoever compiles, dies or reads meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from optimus_kernels import cache
from optimus_kernels.cache import KernelError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OPTIMUS_KERNELS_CACHE", str(tmp_path / "cache"))


def write_library(work: Path) -> Path:
    library = work / "lib.so"
    library.write_bytes(b"library")
    (work / "part.o").write_bytes(b"object")
    return library


def test_an_entry_is_made_once_and_found_again(tmp_path):
    calls = []

    def compile_into(work: Path) -> Path:
        calls.append(work)
        return write_library(work)

    first = cache.install("cpu-1", compile_into, {"backend": "cpu"})
    again = cache.install("cpu-1", compile_into, {"backend": "cpu"})
    assert first == again and len(calls) == 1
    assert first.library.read_bytes() == b"library"
    assert sorted(p.name for p in first.path.iterdir()) == ["info.json", "lib.so"]
    assert [entry.key for entry in cache.entries("cpu")] == ["cpu-1"]
    assert cache.entries("cuda") == []


@pytest.mark.parametrize("damage", ["shorter", "other", "no info", "no library"])
def test_what_is_not_whole_is_not_found_and_made_again(damage):
    entry = cache.install("cpu-1", write_library, {"backend": "cpu"})
    if damage == "shorter":
        os.truncate(entry.library, 3)
    elif damage == "other":
        entry.library.write_bytes(b"lobrary")
    else:
        (entry.path / ("info.json" if damage == "no info" else "lib.so")).unlink()
    assert cache.entries("cpu") == []
    again = cache.install("cpu-1", write_library, {"backend": "cpu"})
    assert again.library.read_bytes() == b"library" and len(cache.entries("cpu")) == 1
    assert not list(cache.cache_dir().glob(".*.tmp"))


def test_leftovers_of_killed_builders_go_and_are_never_read(tmp_path):
    left = tmp_path / "cache" / ".cpu-1.0123abcd.tmp"
    left.mkdir(parents=True)
    write_library(left)
    assert cache.entries("cpu") == []
    cache.install("cpu-1", write_library, {"backend": "cpu"})
    assert not left.exists()


def compile_slowly(log: Path, fails: bool, together: Barrier | None = None) -> None:
    def compile_into(work: Path) -> Path:
        with open(log, "a") as file:
            file.write("x")
        time.sleep(0.5)
        if fails:
            raise KernelError("the compiler is broken")
        return write_library(work)

    if together is not None:
        together.wait()  # a busy machine may take longer over a fork than compiling takes here
    try:
        cache.install("cpu-1", compile_into, {"backend": "cpu"})
    except KernelError as error:
        assert fails and "broken" in str(error)
    else:
        assert not fails


@pytest.mark.parametrize("fails", [False, True])
def test_of_processes_that_come_together_one_compiles(tmp_path, fails):
    context, log = multiprocessing.get_context("fork"), tmp_path / "log"
    given = (log, fails, context.Barrier(4))
    processes = [context.Process(target=compile_slowly, args=given) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert log.read_text() == "x"
    compile_slowly(log, fails)  # afterwards a failure is no reason not to try again
    assert log.read_text() == ("xx" if fails else "x")


def test_waiting_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "LOCK_WAIT_S", 0.3)
    root = cache.cache_dir()
    root.mkdir()
    with cache._locked(root / ".cpu-1.lock"), pytest.raises(KernelError, match="has been held"):
        cache.install("cpu-1", write_library, {"backend": "cpu"})


def test_a_place_that_cannot_be_written_is_named(monkeypatch):
    monkeypatch.setenv("OPTIMUS_KERNELS_CACHE", "/proc/none")
    with pytest.raises(KernelError, match="/proc/none.*OPTIMUS_KERNELS_CACHE"):
        cache.install("cpu-1", write_library, {"backend": "cpu"})


def read_as_nobody(root: str) -> None:
    """Files that root may not write can be had on few file systems, so root becomes another."""
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    os.environ["OPTIMUS_KERNELS_CACHE"] = root
    entry = cache.install("cpu-1", write_library, {"backend": "cpu"})
    assert entry.library.read_bytes() == b"library"
    with pytest.raises(KernelError, match="OPTIMUS_KERNELS_CACHE to a writable"):
        cache.install("cpu-2", write_library, {"backend": "cpu"})


def test_a_cache_that_cannot_be_written_serves_what_it_holds(monkeypatch):
    with tempfile.TemporaryDirectory() as root:  # pytest's own folders are closed to others
        monkeypatch.setenv("OPTIMUS_KERNELS_CACHE", root)
        cache.install("cpu-1", write_library, {"backend": "cpu"})
        os.chmod(root, 0o555)
        process = multiprocessing.get_context("fork").Process(target=read_as_nobody, args=(root,))
        process.start()
        process.join(30)
        os.chmod(root, 0o755)
        assert process.exitcode == 0
