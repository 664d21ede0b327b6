"""Tests of states on disk: training gives the same bits as with states on the device, an error of
the disk ends a run, and the file of the states is removed."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus.chunks import state_file
from optimus.chunks.disk import BUFFERS, DiskTier, file_bytes
from optimus.chunks.engine import ChunkEngine
from optimus.chunks.memory import Memory, Tier
from optimus.chunks.state_file import StateFile, align
from optimus.config.machine import Links
from optimus.distributed.collectives import ALONE
from optimus.errors import ConfigError, OptimusError
from tests.kit.faults.disk import small_disk
from tests.kit.layouts.tower import CHUNK, LR, Case, Tower, batch, make_engine, train_in_order

CPU = torch.device("cpu")


def make_tier(directory: Path, length: int = 5000, rank: int = 0) -> tuple[DiskTier, torch.Tensor]:
    """Return (DiskTier, buffer of `length` fp32 elements that the tier stores on disk)."""
    size = file_bytes(length, [torch.float32])
    tier = DiskTier(Memory(CPU), str(directory), rank, [size])
    return tier, tier.new(length, torch.float32)


def random_case(generator: random.Random, directory: Path) -> Case:
    """Return random settings for training a tower (a stack of equal layers) with some or all states
    on disk."""
    n = generator.randint(2, 8)  # can exceed BUFFERS
    rates = [CHUNK * 4 / generator.choice([1e-5, 1e-3, 3e-3]) for _ in range(5)]
    keys = ("to_device", "to_host", "host_adam", "disk_read", "disk_write")
    return Case(
        n,
        generator.randint(1, n),
        generator.randint(1, 3),
        gradients=True,
        parameters=False,
        dtype=generator.choice([torch.float32, torch.bfloat16]),
        steps=3,
        poison=True,
        host_share=generator.choice([0.3, 0.7, 1.0]),
        disk_share=generator.choice([1.0, generator.uniform(0.01, 1.0)]),
        disk=str(directory),
        copies=generator.choice(["early", "late", "random"]),
        delay_s=generator.choice([0.0, 0.003]),
        early=generator.random() < 0.5,
        links=generator.choice([None, Links(**dict(zip(keys, rates, strict=True)))]),
    )


@pytest.mark.parametrize("seed", range(12))
def test_random_plans_train_to_the_bits_of_states_on_the_device(tmp_path, monkeypatch, seed):
    """Training with states on disk gives the same bits as with states on the device. Reads and
    writes are done early, late or at random times, in one block or in several blocks."""
    monkeypatch.setattr(state_file, "BLOCK_BYTES", random.Random(seed).choice([4096, 4 << 20]))
    case = random_case(random.Random(seed), tmp_path)
    order = random.Random(seed).choice(["forward", "skip", "alternate"])
    plain = Case(case.n, case.slots, case.microbatches, 0, False, False, dtype=case.dtype, steps=3)
    assert train_in_order(case, order)[:2] == train_in_order(plain, order)[:2], case
    assert not list(tmp_path.iterdir())


def test_a_missing_wait_for_writes_changes_bits(tmp_path, monkeypatch):
    """Each write takes 30 ms. Without the wait for the writes, code that reads the masters reads
    old values."""
    links = Links(to_device=1e12, to_host=1e12, host_adam=1e12, disk_read=1e12, disk_write=4e5)
    case = Case(2, 2, parameters=False, steps=3, host_share=1.0, poison=True, links=links)
    case = case._replace(dtype=torch.bfloat16, disk_share=1.0, disk=str(tmp_path))
    expected = train_in_order(case, "forward")
    monkeypatch.setattr(DiskTier, "flush", DiskTier.check)
    assert train_in_order(case, "forward")[:2] != expected[:2]


def test_states_that_are_set_after_an_update_stay_set(tmp_path):
    """Each update takes 10 ms, and a write is done only when code waits for it. Values that are set
    after an update must not be overwritten by the update."""
    case = Case(3, parameters=False, host_share=1.0, disk_share=1.0, disk=str(tmp_path))
    case = case._replace(delay_s=0.01, copies="late", poison=True, dtype=torch.bfloat16)
    engine = make_engine(Tower(3), case, ALONE)
    slots, values = engine.chunks[2].chunk.slots, torch.full((CHUNK,), 3.0)
    for is_set, expected in ((True, 3.0), (False, 0.0)):
        engine.start_step()
        engine.gradients.finish()
        engine.update(LR)
        for slot in slots if is_set else ():
            engine.put("exp_avg", slot.name, values)
        if not is_set:
            engine.clear_moments()
        engine.wait()
        moment = engine.read(engine.chunks[2].moments["exp_avg"])
        assert all(bool((moment[s.start : s.stop] == expected).all()) for s in slots)
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_each_tier_are_counted(tmp_path, dtype):
    """The file has masters and moments, or only moments if the parameters are the masters. For the
    updates, the host has buffers for at most BUFFERS chunks."""
    states, per_state = (2 if dtype is torch.float32 else 3), 4 * CHUNK
    for n, share, on_disk in ((4, 0.5, 2), (4, 1.0, 4), (6, 0.9, 6)):
        case = Case(n, parameters=False, host_share=1.0, disk_share=share, disk=str(tmp_path))
        engine = make_engine(Tower(n), case._replace(dtype=dtype), ALONE)
        (file,) = tmp_path.iterdir()
        assert file.stat().st_size == on_disk * states * per_state
        assert 512 * file.stat().st_blocks >= file.stat().st_size
        sizes = engine.state_bytes()
        assert sizes["disk"] == file.stat().st_size == engine.memory.num_bytes[Tier.DISK]
        assert sizes["total"] == engine.memory.num_bytes[Tier.DEVICE] == 0
        assert engine.disk is not None
        staged = min(BUFFERS, on_disk) * (states * per_state + 4096)
        assert engine.disk.staging_bytes == staged
        in_memory = n * (per_state + CHUNK * dtype.itemsize) + (n - on_disk) * states * per_state
        assert engine.memory.num_bytes[Tier.HOST] == in_memory + staged
        assert sizes["host"] == in_memory + staged + engine.gradients.staging_bytes
        tiers = engine.bytes_by_tier()
        assert {tier: sum(of_tier.values()) for tier, of_tier in tiers.items()} == {
            "device": sizes["total"],
            "host": sizes["host"],
            "disk": sizes["disk"],
        }
        assert tiers["disk"]["moments"] == on_disk * 2 * per_state
        assert tiers["host"]["moments"] == (n - on_disk) * 2 * per_state
        assert tiers["host"]["parameters"] == n * CHUNK * dtype.itemsize
        engine.close()


@pytest.mark.parametrize("most", [4096, 1 << 20])
def test_any_range_of_a_buffer_is_read_and_written(tmp_path, monkeypatch, most):
    """Reads and writes of ranges that are not aligned change no other element. Reads and writes of
    one buffer do not affect another buffer. A system call moves at most `most` bytes."""

    def move(call: Any, fd: int, buffers: list[memoryview], at: int) -> int:
        return call(fd, [buffers[0][:most]], at)

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, partial(move, getattr(os, name)))
    generator, length = random.Random(3), 5000
    tier, first = make_tier(tmp_path, length)
    buffers = [first, tier.new(3000, torch.bfloat16)]
    expected = [torch.zeros(len(flat), dtype=flat.dtype) for flat in buffers]
    for _ in range(60):
        number = generator.randrange(2)
        low, high = sorted(generator.sample(range(len(buffers[number]) + 1), 2))
        values = torch.rand(high - low)
        tier.write(buffers[number][low:high], values)
        expected[number][low:high] = values
        low, high = sorted(generator.sample(range(len(buffers[number]) + 1), 2))
        assert torch.equal(tier.read(buffers[number][low:high]), expected[number][low:high])
    tier.zero(buffers[0][100:200])
    expected[0][100:200] = 0
    assert all(map(torch.equal, map(tier.read, buffers), expected))
    in_memory = torch.ones(3)
    assert tier.read(in_memory) is in_memory
    tier.close()


def failing(call: Any, fails: Any) -> Any:
    """Return a replacement of the system call `call`. The replacement first calls `fails(fd)`,
    which can raise an error, and then `call`. The replacement returns the result of `fails` or, if
    this result is None, the result of `call`."""

    def function(fd: int, buffers: list[memoryview], at: int) -> int:
        changed = fails(fd)
        count = call(fd, buffers, at)
        return count if changed is None else changed

    return function


def run_with_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fails: Any) -> Any:
    """Complete a training step. Then let each call of `os.<name>` fail as defined by `fails`, and
    train until a step raises an error. Return (engine, message of the error)."""
    case = Case(6, 2, parameters=False, host_share=1.0, disk_share=0.5, disk=str(tmp_path))
    tower = Tower(6)
    engine = make_engine(tower, case._replace(dtype=torch.bfloat16), ALONE)
    with pytest.raises(OptimusError) as raised:
        for step in range(3):
            engine.start_step()
            tower(batch(step, torch.bfloat16)).float().square().sum().backward()
            engine.gradients.reduce(0)
            engine.gradients.finish()
            engine.update(LR)
            if step == 0:
                engine.wait()
                monkeypatch.setattr(os, name, failing(getattr(os, name), fails))
    return engine, str(raised.value)


def no_space(fd: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken(fd: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(
    ("name", "fails", "reason"),
    [
        ("pwritev", no_space, "No space left on device"),
        ("pwritev", broken, "Input/output error"),
        ("pwritev", lambda fd: 512, "512 of 12,288 bytes at byte"),
        ("preadv", broken, "Input/output error"),
        ("preadv", lambda fd: 0, "0 of 12,288 bytes at byte"),
    ],
    ids=["full", "write", "short-write", "read", "short-read"],
)
def test_an_error_of_the_disk_ends_the_updates(tmp_path, monkeypatch, name, fails, reason):
    """The error contains the path of the file. States that are only partly updated cannot be read
    after the error."""
    engine, message = run_with_failure(tmp_path, monkeypatch, name, fails)
    verb = "write" if name == "pwritev" else "read"
    assert message.startswith(f"offload.disk: cannot {verb} {tmp_path / 'optimus-states-rank'}")
    assert (
        reason in message
        and "start again from the newest checkpoint" in message
        and "\n" not in message
    )
    uses: list[Any] = [engine.shards, engine.wait, engine.clear_moments, lambda: engine.update(LR)]
    for use in uses:
        with pytest.raises(OptimusError, match="offload.disk: cannot"):
            use()
    engine.close()
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_last_write_is_raised_by_wait(tmp_path, monkeypatch):
    """The write of the last chunk is late: it begins after all updates are complete."""
    case = Case(3, parameters=False, host_share=1.0, disk_share=0.3, disk=str(tmp_path))
    engine = make_engine(Tower(3), case._replace(copies="late"), ALONE)
    engine.start_step()
    engine.gradients.finish()
    engine.update(LR)
    monkeypatch.setattr(os, "pwritev", failing(os.pwritev, no_space))
    with pytest.raises(OptimusError, match="cannot write"):
        engine.wait()
    engine.close()


def test_close_of_a_file_waits_for_its_reads_and_writes(tmp_path, monkeypatch):
    """If `close` did not wait, a read or write could use the number of the closed descriptor after
    another file has received this number."""
    file = StateFile(tmp_path, 0, 4096)
    begins, is_complete = threading.Event(), threading.Event()

    def read(fd: int, buffers: list[memoryview], at: int) -> int:
        begins.set()
        time.sleep(0.05)
        is_complete.set()
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", read)
    buffer = align(torch.empty(8192, dtype=torch.uint8))[:4096]
    reader = threading.Thread(target=file.read, args=(0, buffer))
    reader.start()
    assert begins.wait(30)
    file.close()
    assert is_complete.is_set()
    reader.join(30)


def test_an_error_of_a_block_waits_for_the_other_blocks(tmp_path, monkeypatch):
    """A read is divided into blocks, and the read of the first block fails. The error must be
    raised only after the reads of all other blocks have ended. After the error, the caller can free
    the memory to which these reads write."""
    monkeypatch.setattr(state_file, "BLOCK_BYTES", 4096)
    tier, flat = make_tier(tmp_path)
    active: list[int] = []
    read = os.preadv

    def read_slowly(fd: int, buffers: list[memoryview], at: int) -> int:
        if at == 0:
            broken(fd)
        active.append(at)
        time.sleep(0.02)
        count = read(fd, buffers, at)
        active.remove(at)
        return count

    monkeypatch.setattr(os, "preadv", read_slowly)
    with pytest.raises(OptimusError, match="Input/output error"):
        tier.read(flat)
    assert not active
    tier.close()


def test_an_error_of_an_update_ends_the_reads(tmp_path, monkeypatch):
    """The engine raises the error of the update. After the error, no thread waits for a free
    buffer."""
    case = Case(8, parameters=False, host_share=1.0, disk_share=1.0, disk=str(tmp_path))
    engine = make_engine(Tower(8), case, ALONE)
    engine.start_step()
    engine.gradients.finish()

    def no_memory(*args: Any) -> None:
        time.sleep(0.05)
        raise MemoryError("no memory")

    monkeypatch.setattr(engine.optimizer, "update", no_memory)
    engine.update(LR)
    with pytest.raises(MemoryError, match="no memory"):
        engine.wait()
    with pytest.raises(MemoryError, match="no memory"):
        engine.shards()
    engine.close()
    assert not list(tmp_path.iterdir())


def test_a_second_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(state_file, "_LOCK_S", 0.1)
    tier, flat = make_tier(tmp_path)
    tier.write(flat, torch.arange(5000.0))
    with pytest.raises(ConfigError) as refused:
        make_tier(tmp_path)
    assert str(refused.value) == (
        f"offload.disk = '{tmp_path}': another optimizer of this process uses "
        "optimus-states-rank00000; call its close(), or use another directory"
    )
    other, _ = make_tier(tmp_path, rank=1)
    assert torch.equal(tier.read(flat), torch.arange(5000.0))
    tier.close()
    other.close()
    assert not list(tmp_path.iterdir())
    with open(tmp_path / "optimus-states-rank00000", "wb") as file:  # as another process does
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError) as refused:
            make_tier(tmp_path)
    assert str(refused.value) == (
        f"offload.disk = '{tmp_path}': another run uses optimus-states-rank00000; wait for its "
        "end, or use another directory"
    )


def test_files_of_users_are_kept_and_not_counted_as_free(tmp_path, monkeypatch):
    users = [f"optimus-states-rank{end}" for end in ("-notes.txt", "0000", "000000", "00001.txt")]
    for name in users:
        (tmp_path / name).write_bytes(b"x" * 1000)
    disk = os.statvfs(tmp_path)
    # Other tests write to this disk, so keep the reported free space constant.
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    free = disk.f_bavail * disk.f_frsize
    assert state_file.free_bytes(tmp_path) == free
    stale = tmp_path / "optimus-states-rank00001"
    stale.write_bytes(b"x" * (1 << 20))
    assert state_file.free_bytes(tmp_path) == free + 512 * stale.stat().st_blocks > free
    tier, _ = make_tier(tmp_path)
    tier.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(users)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from tests.chunks.test_disk import make_tier
tiers = [make_tier(Path(sys.argv[1]), rank=rank) for rank in range(3)]
for tier, flat in tiers:
    tier.write(flat, torch.ones(5000))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_of_a_killed_run_are_replaced(tmp_path):
    """A run with three ranks was killed. The next run, with one rank, removes all files of the
    killed run."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    assert subprocess.run(command, cwd=Path(__file__).parents[2]).returncode == -9
    assert len(list(tmp_path.iterdir())) == 3
    (tmp_path / "other").touch()
    tier, flat = make_tier(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["optimus-states-rank00000", "other"]
    assert not tier.read(flat).any()
    tier.close()


def test_a_file_ends_with_its_process(tmp_path):
    """A process that ends without a call of `close` removes its file."""
    code = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "raise KeyError('planned')")
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ended.returncode == 1 and "KeyError: 'planned'" in ended.stderr
    assert not list(tmp_path.iterdir())


def test_close_ends_an_update_that_waits_for_a_cancelled_read(tmp_path):
    """The read of the first chunk is late and blocks the only thread for reads. The update of the
    second chunk waits for the read of the second chunk, which `close` cancels."""
    size = file_bytes(5000, [torch.float32])
    tier = DiskTier(Memory(CPU, copies="late"), str(tmp_path), 0, [size] * 2)
    for number in range(2):
        tier.begin_read(number, {"moment": tier.new(5000, torch.float32)})

    def update() -> None:
        with tier.updating(1):
            raise AssertionError("the states are closed")

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(update)
        while 1 in tier._reads:
            time.sleep(0.001)
        tier.close()
        with pytest.raises(OptimusError, match="the file of the states on disk is closed"):
            job.result(timeout=5)


UNFINISHED = """
import sys
from pathlib import Path
import torch
from optimus.chunks.disk import DiskTier, file_bytes
from optimus.chunks.memory import Memory, worker
import threading
import time
size = file_bytes(5000, [torch.float32])
tier = DiskTier(Memory(torch.device("cpu")), sys.argv[1], 0, [size] * 8)
states = [{"moment": tier.new(5000, torch.float32)} for _ in range(8)]
for number, of_chunk in enumerate(states):
    tier.begin_read(number, of_chunk)

def update():
    for number in range(8):
        with tier.updating(number):
            time.sleep(0.2)

worker("optimizer", 1).submit(update)
"""


def test_a_process_with_updates_in_progress_ends(tmp_path):
    """The main thread of the process ends while updates are in progress. The writes of these
    updates can no longer start, and the process must still end."""
    command = [sys.executable, "-c", UNFINISHED, str(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).parents[2], timeout=25, check=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_another_file_with_the_name_is_refused(tmp_path, kind):
    path = tmp_path / "optimus-states-rank00000"
    {
        "link": lambda: path.symlink_to(tmp_path / "elsewhere"),
        "folder": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
    }[kind]()
    with pytest.raises(ConfigError, match=f"offload.disk: cannot create {path}: ") as refused:
        make_tier(tmp_path)
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("length", "needed", "missing"), [(400_000, 1_601_536, 552_960), (200_000, 802_816, 557_056)]
)
def test_a_full_disk_is_refused_with_the_missing_bytes(tmp_path, length, needed, missing):
    """In the first case, the first buffer of the file does not fit on the disk. In the second case,
    the second buffer does not fit."""
    folder = tmp_path / "disk"
    with small_disk(folder, "1m"):
        with pytest.raises(ConfigError) as refused:
            tier, _ = make_tier(folder, length)
            tier.new(length, torch.float32)
        assert str(refused.value) == (
            f"offload.disk: {folder}/optimus-states-rank00000 needs {needed:,} bytes, {missing:,} "
            "more than are free; use a directory with more space, or keep fewer states on disk"
        )
        if length == 200_000:
            tier.close()
        assert not list(folder.iterdir())


def test_a_file_system_without_direct_access_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    plain = os.open

    def open_cached(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(path, flags, *rest)

    monkeypatch.setattr(os, "open", open_cached)
    tier, flat = make_tier(tmp_path)
    tier.write(flat, torch.ones(5000))
    assert tier.read(flat).all()
    tier.close()
    (record,) = caplog.records
    assert "has no direct reads and writes (O_DIRECT)" in record.message


def test_engines_of_plans_make_no_file(tmp_path):
    with torch.device("meta"):
        tower = Tower(4)
    case = Case(4, parameters=False, host_share=1.0, disk_share=1.0, disk=str(tmp_path))
    planned: ChunkEngine = make_engine(tower, case, ALONE)
    actual = make_engine(Tower(4), case, ALONE)
    assert planned.state_bytes() == actual.state_bytes()
    actual.close()
    assert not list(tmp_path.iterdir())
