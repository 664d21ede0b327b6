"""Tests of shard files: hashes, errors of writes, and the detection of damage."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
import time

import numpy
import pytest
import xxhash

from optimus.checkpoint import shard_file
from optimus.checkpoint.shard_file import Identity, ShardReader, ShardWriter, Stop, header
from optimus.errors import CheckpointError, OptimusError
from tests.kit.faults.disk import flip, flip_bit, lengthen, truncate, zero

OURS = Identity("g", 3, 0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(shard_file, "BLOCK_BYTES", 5000)


def write(directory, contents, identity=OURS, direct=True):
    size = shard_file.HEADER_BYTES + sum(shard_file.aligned(len(data)) for data in contents)
    with ShardWriter(directory, identity, size, direct=direct) as file:
        offsets = [file.write(memoryview(data)) for data in contents]
        return file.finish(), offsets


def test_hashes_are_those_of_the_blocks_in_the_file(tmp_path):
    contents = [os.urandom(size) for size in (7000, 64, 1, 12345)]
    shard, offsets = write(tmp_path, contents)
    content = (tmp_path / shard.name).read_bytes()
    assert len(content) == shard.size and content.startswith(header(OURS, shard.size))
    for data, offset in zip(contents, offsets, strict=True):
        assert offset % 64 == 0 and content[offset : offset + len(data)] == data
    blocks = [content[at : at + 5000] for at in range(0, len(content), 5000)]
    assert shard.hashes == "".join(map(xxhash.xxh3_64_hexdigest, blocks))


def test_whole_blocks_are_written_directly_if_possible(tmp_path, monkeypatch):
    """Whole blocks are written with O_DIRECT. After the first direct write that the file system
    refuses, all writes use the page cache."""
    monkeypatch.setattr(shard_file, "BLOCK_BYTES", 8192)
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system has no direct writes")
    ways, plain = [], os.write

    def look(fd, data):
        ways.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        if refused and ways[-1] and len(ways) > 2:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(fd, data)

    monkeypatch.setattr(os, "write", look)
    for refused, expected in ((False, [1, 1, 1, 0]), (True, [1, 1, 1, 0, 0])):
        ways.clear()
        directory = tmp_path / str(refused)
        directory.mkdir()
        shard, _ = write(directory, [os.urandom(3 * 8192 + 100)])
        assert ways == expected
        with ShardReader(directory, OURS, shard, 8192) as file:
            file.verify(range(shard.num_blocks))


@pytest.mark.parametrize("direct", [True, False])
def test_a_finished_file_is_durable_with_all_its_bytes(tmp_path, monkeypatch, direct):
    """`finish` must sync the file. The commit begins as soon as all writers have finished, and it
    does not sync shard files."""
    synced, fsync = [], os.fsync

    def look(fd):
        fsync(fd)
        synced.append((os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_size))

    monkeypatch.setattr(os, "fsync", look)
    shard, _ = write(tmp_path, [os.urandom(12_345)], direct=direct)
    assert synced[-1] == (str(tmp_path / shard.name), shard.size)


def broken_at(block, error, seen):
    """Return a replacement of os.write that needs two calls for each block. The second call for
    block number `block`, counted from 1, raises an OSError with the errno `error`. Each call
    appends its thread to `seen`."""
    plain, count = os.write, [0]

    def write(fd, data):
        seen.append(threading.current_thread())
        count[0] += 1
        if count[0] == 2 * block:
            raise OSError(error, os.strerror(error))
        return plain(fd, data[: len(data) // 2] if count[0] % 2 else data)

    return write


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("block", [1, 2, 4, 9])
def test_an_error_of_the_writing_thread_is_raised_by_the_writer(
    tmp_path, monkeypatch, block, error
):
    """The write of the first, a middle or the last block fails. After the failure, no thread of the
    writer remains."""
    seen, before = [], threading.active_count()
    monkeypatch.setattr(os, "write", broken_at(block, error, seen))
    with pytest.raises(OSError) as raised:
        write(tmp_path, [os.urandom(36_864)], direct=False)
    assert raised.value.errno == error
    assert set(seen) - {threading.current_thread()} == set(seen)  # the main thread writes nothing
    assert threading.active_count() == before
    assert (tmp_path / "shard-00000.bin").stat().st_size < 5000 * block  # no later block is written


def test_short_writes_are_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", broken_at(1000, 0, []))
    shard, _ = write(tmp_path, [os.urandom(36_864)])
    monkeypatch.undo()
    monkeypatch.setattr(shard_file, "BLOCK_BYTES", 5000)
    with ShardReader(tmp_path, OURS, shard, 5000) as file:
        file.verify(range(shard.num_blocks))


@pytest.mark.parametrize("how", ["stop", "owner"])
def test_a_stopped_writer_leaves_no_thread(tmp_path, how):
    before, stop = threading.active_count(), Stop()
    expected = OptimusError if how == "stop" else KeyError
    with pytest.raises(expected), ShardWriter(tmp_path, OURS, 10_000_000, stop) as file:
        file.write(memoryview(bytes(1_000_000)))
        if how == "owner":
            raise KeyError
        stop.set()
        for _ in range(9):
            file.write(memoryview(bytes(1_000_000)))
    assert threading.active_count() == before


def test_a_block_is_filled_while_another_is_written(tmp_path, monkeypatch):
    """A writer has two buffers. A caller that fills blocks waits only while both buffers are in
    use."""
    started, resume, plain = threading.Event(), threading.Event(), os.write

    def slowly(fd, data):
        started.set()
        assert resume.wait(60)
        return plain(fd, data)

    monkeypatch.setattr(os, "write", slowly)
    data, written = os.urandom(5000), []
    with ShardWriter(tmp_path, OURS, 1 << 20) as file:

        def fill():
            for number in range(8):
                file.write(memoryview(data))
                written.append(number)

        owner = threading.Thread(target=fill)
        owner.start()
        assert started.wait(60)  # a full block: 4096 bytes of header, 904 of data
        deadline = time.monotonic() + 60
        while len(written) < 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        assert written == [0]  # the second write has filled the other buffer and waits
        resume.set()
        owner.join(60)
        assert written == list(range(8))


def test_a_file_that_ends_with_a_block_has_no_empty_block(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_file, "BLOCK_BYTES", 4096 + 64)
    shard, _ = write(tmp_path, [b"x" * 64])
    assert len(shard.hashes) == shard_file.HASH_CHARS


def test_ranges_are_read_to_their_targets(tmp_path):
    data = os.urandom(40_000)
    shard, (offset,) = write(tmp_path, [data])
    generator = random.Random(1)
    cuts = sorted(generator.sample(range(len(data)), 40))
    targets = [memoryview(bytearray(len(data))) for _ in range(2)]
    kept = [(a, b, n % 2) for n, (a, b) in enumerate(zip(cuts[::2], cuts[1::2], strict=True))]
    runs = numpy.array([[offset + a, number, a, b - a] for a, b, number in kept])
    with ShardReader(tmp_path, OURS, shard, 5000) as file:
        file.read(runs, targets)
    for number, target in enumerate(targets):
        expected = bytearray(len(data))
        for a, b, source in kept:
            if source == number:
                expected[a:b] = data[a:b]
        assert target == expected


@pytest.mark.parametrize("damage", [flip_bit, truncate, lengthen, zero])
def test_all_damage_is_detected_by_a_read_of_all_bytes(tmp_path, damage):
    shard, (offset,) = write(tmp_path, [os.urandom(30_000)])
    path, target = tmp_path / shard.name, memoryview(bytearray(30_000))
    whole = path.read_bytes()
    everything = numpy.array([[offset, 0, 0, 30_000]])
    generator = random.Random(damage.__name__)
    for _ in range(1000 if damage is flip_bit else 50):
        content = bytearray(whole)
        damage(content, generator)
        path.write_bytes(content)
        refused = pytest.raises(CheckpointError, match=shard.name)
        with refused, ShardReader(tmp_path, OURS, shard, 5000) as file:
            file.verify(range(shard.num_blocks))
        refused = pytest.raises(CheckpointError, match=shard.name)
        with refused, ShardReader(tmp_path, OURS, shard, 5000) as file:
            file.read(everything, [target])
    path.write_bytes(whole)
    with ShardReader(tmp_path, OURS, shard, 5000) as file:
        file.verify(range(shard.num_blocks))


def test_damage_outside_the_blocks_that_are_read_is_ignored(tmp_path):
    data = os.urandom(30_000)
    shard, (offset,) = write(tmp_path, [data])
    path, target = tmp_path / shard.name, memoryview(bytearray(100))
    flip(path, 20_000)
    with ShardReader(tmp_path, OURS, shard, 5000) as file:
        file.read(numpy.array([[offset + 50, 0, 0, 100]]), [target])
    assert target == data[50:150]


@pytest.mark.parametrize("other", [{"generation": "h"}, {"step": 4}, {"writer": 1}], ids=str)
def test_a_file_of_another_save_or_writer_is_refused(tmp_path, other):
    ours, _ = write(tmp_path, [b"x" * 1000])
    (tmp_path / ours.name).unlink()
    theirs, _ = write(tmp_path, [b"x" * 1000], OURS._replace(**other))
    (tmp_path / theirs.name).rename(tmp_path / ours.name)
    with pytest.raises(CheckpointError, match="belongs to another checkpoint or rank"):
        ShardReader(tmp_path, OURS, ours)


def test_a_missing_file_is_refused(tmp_path):
    shard, _ = write(tmp_path, [b"x"])
    (tmp_path / shard.name).unlink()
    with pytest.raises(CheckpointError, match=r"shard-00000.bin: No such file"):
        ShardReader(tmp_path, OURS, shard)
