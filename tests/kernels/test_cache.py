"""Tests of the cache of compiled libraries. Entries are complete or absent, even with concurrent,
killed or hostile processes."""

from __future__ import annotations

import hashlib
import json
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
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OPTIMUS_KERNELS_CACHE", str(tmp_path / "cache"))


def write_library(work: Path) -> Path:
    library = work / "lib.so"
    library.write_bytes(b"library")
    (work / "part.o").write_bytes(b"object")
    return library


def test_entry_is_compiled_once_and_reused(tmp_path):
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


@pytest.mark.parametrize("damage", ["shorter", "other", "no record", "no library"])
def test_damaged_entry_is_ignored_and_compiled_again(damage):
    entry = cache.install("cpu-1", write_library, {"backend": "cpu"})
    if damage == "shorter":
        os.truncate(entry.library, 3)
    elif damage == "other":
        entry.library.write_bytes(b"lobrary")
    else:
        (entry.path / ("info.json" if damage == "no record" else "lib.so")).unlink()
    assert cache.entries("cpu") == []
    again = cache.install("cpu-1", write_library, {"backend": "cpu"})
    assert again.library.read_bytes() == b"library" and len(cache.entries("cpu")) == 1
    assert not list(cache.cache_dir().glob(".*.tmp"))


def test_leftovers_of_killed_builders_are_removed_and_never_read(tmp_path):
    leftover = tmp_path / "cache" / ".cpu-1.0123abcd.tmp"
    leftover.mkdir(parents=True)
    write_library(leftover)
    assert cache.entries("cpu") == []
    cache.install("cpu-1", write_library, {"backend": "cpu"})
    assert not leftover.exists()


def compile_slowly(log: Path, fails: bool, barrier: Barrier | None = None) -> None:
    def compile_into(work: Path) -> Path:
        with open(log, "a") as file:
            file.write("x")
        time.sleep(0.5)
        if fails:
            raise KernelError("the compiler is broken")
        return write_library(work)

    if barrier is not None:
        barrier.wait()  # all processes start together, even if forks are slow
    try:
        cache.install("cpu-1", compile_into, {"backend": "cpu"})
    except KernelError as error:
        assert fails and "broken" in str(error)
    else:
        assert not fails


@pytest.mark.parametrize("fails", [False, True])
def test_of_concurrent_processes_only_the_first_compiles(tmp_path, fails):
    context, log = multiprocessing.get_context("fork"), tmp_path / "log"
    arguments = (log, fails, context.Barrier(4))
    processes = [context.Process(target=compile_slowly, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert log.read_text() == "x"
    compile_slowly(log, fails)  # a later process tries again
    assert log.read_text() == ("xx" if fails else "x")


def test_wait_for_the_lock_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "LOCK_WAIT_S", 0.3)
    root = cache.cache_dir()
    root.mkdir()
    with cache._locked(root / ".cpu-1.lock"), pytest.raises(KernelError, match="has been held"):
        cache.install("cpu-1", write_library, {"backend": "cpu"})


def test_unwritable_cache_folder_is_named(monkeypatch):
    monkeypatch.setenv("OPTIMUS_KERNELS_CACHE", "/proc/none")
    with pytest.raises(KernelError, match="/proc/none.*OPTIMUS_KERNELS_CACHE"):
        cache.install("cpu-1", write_library, {"backend": "cpu"})


def read_as_nobody(root: str) -> None:
    """Use the cache as a user without write permission. If this process runs as root, it first
    becomes the user `nobody`."""
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    os.environ["OPTIMUS_KERNELS_CACHE"] = root
    entry = cache.install("cpu-1", write_library, {"backend": "cpu"})
    assert entry.library.read_bytes() == b"library"
    with pytest.raises(KernelError, match="OPTIMUS_KERNELS_CACHE to a writable"):
        cache.install("cpu-2", write_library, {"backend": "cpu"})


def test_read_only_cache_is_used(monkeypatch):
    with tempfile.TemporaryDirectory() as root:  # pytest's folders are closed to other users
        monkeypatch.setenv("OPTIMUS_KERNELS_CACHE", root)
        cache.install("cpu-1", write_library, {"backend": "cpu"})
        os.chmod(root, 0o555)
        process = multiprocessing.get_context("fork").Process(target=read_as_nobody, args=(root,))
        process.start()
        process.join(30)
        os.chmod(root, 0o755)
        assert process.exitcode == 0


def use_cache(path: Path) -> list[str]:
    """Use the cache at `path`, and return the keys of the entries that this user trusts."""
    os.environ["OPTIMUS_KERNELS_CACHE"] = str(path)
    return [entry.key for entry in cache.entries("cpu")]


@pytest.mark.parametrize("mode", [0o020, 0o002], ids=["group", "others"])
@pytest.mark.parametrize("target", ["cache", "entry", "record", "library"])
def test_entry_that_others_can_write_is_refused_with_path_and_mode(target, mode):
    entry = cache.install("cpu-1", write_library, {"backend": "cpu"})
    path = {
        "cache": cache.cache_dir(),
        "entry": entry.path,
        "record": entry.path / "info.json",
        "library": entry.library,
    }[target]
    path.chmod(path.stat().st_mode | mode)
    assert cache.entries("cpu") == []
    reason = cache.refused("cpu")["cpu-1"]
    assert str(path) in reason and f"mode {path.stat().st_mode & 0o7777:04o}" in reason
    path.chmod(path.stat().st_mode & ~mode)
    assert cache.entries("cpu") == [entry] and cache.refused("cpu") == {}


def test_folder_that_others_can_write_receives_no_entry(tmp_path):
    root = cache.cache_dir()
    root.mkdir()
    root.chmod(0o1777)
    with pytest.raises(KernelError, match="mode 1777.*chmod go-w.*OPTIMUS_KERNELS_CACHE"):
        cache.install("cpu-1", write_library, {"backend": "cpu"})


def test_cache_below_a_folder_that_others_can_rename_is_refused(tmp_path, monkeypatch):
    above = tmp_path / "scratch"
    above.mkdir()
    monkeypatch.setenv("OPTIMUS_KERNELS_CACHE", str(above / "cache"))
    cache.install("cpu-1", write_library, {"backend": "cpu"})
    above.chmod(0o777)
    assert cache.entries("cpu") == []
    reason = cache.refused("cpu")["cpu-1"]
    assert f"other users may replace the cache folder through {above}" in reason
    above.chmod(0o1777)  # the sticky bit lets only the owner rename
    assert [entry.key for entry in cache.entries("cpu")] == ["cpu-1"]


@pytest.mark.parametrize("umask", [0o002, 0o000, 0o077])
def test_entries_are_usable_whatever_the_umask(umask, tmp_path, monkeypatch):
    monkeypatch.setenv("OPTIMUS_KERNELS_CACHE", str(tmp_path / "a" / "b" / "cache"))
    before = os.umask(umask)
    try:
        entry = cache.install("cpu-1", write_library, {"backend": "cpu"})
    finally:
        os.umask(before)
    assert cache.entries("cpu") == [entry]
    for folder in (cache.cache_dir(), *cache.cache_dir().parents[:2]):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert all(lock.stat().st_mode & 0o077 == 0 for lock in cache.cache_dir().glob("*.lock"))


@pytest.mark.parametrize(
    "kind", ["absolute", "parent", "link", "fifo", "number", "time", "digits", "backend", "large"]
)
def test_library_outside_the_entry_is_refused(tmp_path, kind):
    entry = cache.install("cpu-1", write_library, {"backend": "cpu"})
    outside = tmp_path / "evil.so"
    outside.write_bytes(b"library")  # the content whose hash info.json has
    record = json.loads((entry.path / "info.json").read_text())
    if kind in ("link", "fifo"):
        entry.library.unlink()
        entry.library.symlink_to(outside) if kind == "link" else os.mkfifo(entry.library)
    else:
        name = {"absolute": str(outside), "parent": "../../evil.so", "number": 5}.get(kind)
        other = {
            "time": {"built_at": "x"},
            "digits": {"built_at": "1.5"},
            "backend": {"backend": "../.."},
            "large": {},
        }
        record |= other.get(kind, {"library": name})
    padding = " " * (cache._MAX_RECORD_BYTES if kind == "large" else 0)
    (entry.path / "info.json").write_text(padding + json.dumps(record))
    assert cache.entries("cpu") == [] and cache.refused("cpu")["cpu-1"]


def plant_as_nobody(root: Path, name: str) -> None:
    os.setgid(65534)
    os.setuid(65534)
    (root / name).mkdir(mode=0o755)
    (root / name / "lib.so").write_bytes(b"planted")
    record = {
        "backend": "cpu",
        "library": "lib.so",
        "sha256": hashlib.sha256(b"planted").hexdigest(),
    }
    (root / name / "info.json").write_text(json.dumps({**record, "built_at": 4e9}))


def run_in_child(function, *arguments) -> None:
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join(30)
    assert process.exitcode == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as two users")
def test_entries_of_another_user_are_refused_and_built_again():
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        root = Path(directory) / "cache"
        root.mkdir()
        os.environ["OPTIMUS_KERNELS_CACHE"] = str(root)
        os.chmod(root, 0o1777)  # until the next chmod, any user can write
        run_in_child(plant_as_nobody, root, "cpu-1")
        run_in_child(plant_as_nobody, root, "cpu-2")
        os.chmod(root, 0o755)
        assert use_cache(root) == []
        assert all("owner nobody" in reason for reason in cache.refused("cpu").values())
        entry = cache.install("cpu-1", write_library, {"backend": "cpu"})
        assert entry.library.read_bytes() == b"library" and use_cache(root) == ["cpu-1"]


def take_from_root(root: Path, expected: list[str]) -> None:
    os.setgid(1234)
    os.setuid(1234)
    assert use_cache(root) == expected


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as two users")
def test_read_only_cache_of_a_colleague_is_used_where_other_users_cannot_write():
    with tempfile.TemporaryDirectory() as directory:
        shared = Path(directory)
        os.chmod(shared, 0o755)
        root = shared / "cache"
        root.mkdir()
        os.chmod(root, 0o1777)
        os.environ["OPTIMUS_KERNELS_CACHE"] = str(root)
        run_in_child(plant_as_nobody, root, "cpu-1")
        os.chown(root, 65534, 65534)
        os.chmod(root, 0o755)
        # In a folder such as /tmp, where any user can write, another user could have created the
        # cache.
        os.chmod(shared, 0o1777)
        run_in_child(take_from_root, root, [])
        os.chmod(shared, 0o755)
        run_in_child(take_from_root, root, [])  # any user can write to /tmp
    safe = next((path for path in map(Path, ("/opt", "/srv", "/var/lib")) if path.is_dir()), None)
    if safe is None:
        pytest.skip("this machine has no folder that only root can write")
    with tempfile.TemporaryDirectory(dir=safe) as directory:
        root = Path(directory) / "cache"
        root.mkdir()
        os.chmod(directory, 0o755)
        os.chmod(root, 0o1777)
        run_in_child(plant_as_nobody, root, "cpu-1")
        os.chown(root, 65534, 65534)
        os.chmod(root, 0o755)
        run_in_child(take_from_root, root, ["cpu-1"])
        assert use_cache(root) == []  # root trusts only root's files


def make_colleagues_cache(home: Path) -> Path:
    """Create a cache with one entry, and return the path of the cache. The user `nobody` owns the
    cache and the entry."""
    root = home / "cache"
    root.mkdir(parents=True)
    root.chmod(0o777)
    run_in_child(plant_as_nobody, root, "cpu-1")
    for path in (root, home):
        path.chmod(0o755)
        os.chown(path, 65534, 65534)
    return root


def read_while_exchanged(root: Path, other: Path) -> None:
    """Rename `other` to `root` directly after the check that `root` can be trusted. Assert that
    `read_entry` returns no entry of `other`."""
    check = cache._why_untrusted_cache

    def exchange(*arguments) -> str:
        reason = check(*arguments)
        os.seteuid(0)
        if root.exists():
            root.rename(root.with_name("before"))
        other.rename(root)
        os.seteuid(1234)
        return reason

    cache._why_untrusted_cache = exchange
    os.setegid(1234)
    os.seteuid(1234)
    entry = cache.read_entry(root / "cpu-1")
    assert entry is None or entry.record["built_at"] != 4e9


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as two users")
@pytest.mark.parametrize("exists", [True, False])
def test_cache_that_is_exchanged_after_its_check_is_not_used(exists):
    with tempfile.TemporaryDirectory() as directory:
        top = Path(directory)
        top.chmod(0o755)
        other, root = make_colleagues_cache(top / "theirs"), top / "cache"
        if exists:
            root.mkdir(mode=0o700)
            os.chown(root, 1234, 1234)
        run_in_child(read_while_exchanged, root, other)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as two users")
@pytest.mark.parametrize("owner", [65534, 1234], ids=["other user", "this user"])
@pytest.mark.parametrize("mode", [0o2775, 0o1777, 0o777], ids=["group", "sticky", "open"])
def test_writable_folder_between_two_links_is_detected(mode, owner):
    """`.cache` is a link to project/v, which is a link to another user's cache. Another user can
    replace the second link, so the cache must not be trusted."""
    safe = next((path for path in map(Path, ("/opt", "/srv", "/var/lib")) if path.is_dir()), None)
    if safe is None:
        pytest.skip("this machine has no folder that only root can write")
    with tempfile.TemporaryDirectory(dir=safe) as directory:
        top = Path(directory)
        top.chmod(0o755)
        theirs = make_colleagues_cache(top / "theirs")
        project, home = top / "project", top / "home"
        for path in (project, home):
            path.mkdir()
        (home / ".cache").symlink_to("../project/v")
        (project / "v").symlink_to(theirs)
        os.lchown(project / "v", owner, owner)
        os.lchown(home / ".cache", 1234, 1234)
        project.chmod(mode)
        run_in_child(take_from_root, home / ".cache", [])
        project.chmod(0o755)  # only root could have created the link
        run_in_child(take_from_root, home / ".cache", ["cpu-1"] if owner == 1234 else [])


@pytest.mark.parametrize("name", ["plain", "relative", "absolute", "dots", "chain"])
def test_path_is_resolved_as_by_the_system(tmp_path, name):
    (tmp_path / "plain" / "deep").mkdir(parents=True)
    (tmp_path / "relative").symlink_to("plain/deep/../")
    (tmp_path / "absolute").symlink_to(tmp_path / "relative")
    (tmp_path / "dots").symlink_to("absolute/../plain/./deep")
    (tmp_path / "chain").symlink_to("dots/../../absolute/deep")
    real, folders, links = cache._walk(tmp_path / name / "..")
    assert real == (tmp_path / name / "..").resolve() and tmp_path in folders
    assert all(link.is_symlink() for link in links) and bool(links) is (name != "plain")


def test_links_in_a_loop_are_an_error(tmp_path):
    (tmp_path / "a").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        cache._walk(tmp_path / "a")
