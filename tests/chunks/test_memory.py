"""Tests of the memory of chunks: freed buffers, and copies that threads make."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from optimus.chunks.memory import Memory, Tier
from optimus.config.machine import Links


@pytest.mark.parametrize("poison", [False, True])
def test_freed_buffer_has_no_memory_or_contains_nan(poison):
    """Without `poison`, a freed buffer has no memory. With `poison`, a freed buffer contains NaN,
    so that a test detects code that reads the buffer."""
    memory = Memory(torch.device("cpu"), poison)
    flat = memory.new(8, torch.float32)
    memory.free(flat)
    assert not memory.has(flat) and memory.num_bytes[Tier.DEVICE] == 0
    assert flat.untyped_storage().nbytes() == (32 if poison else 0)
    assert not poison or flat.isnan().all()
    memory.allocate(flat)
    assert memory.has(flat) and flat.untyped_storage().nbytes() == 32


def slow_memory() -> Memory:
    """Return the memory of an emulated device whose links copy 4 kB in 0.1 s."""
    return Memory(torch.device("cpu"), links=Links(to_device=4e4, to_host=4e4))


def copy_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith(("to ", "after to "))]


@pytest.mark.parametrize("closes", [True, False])
def test_threads_of_copies_end_after_all_copies(closes):
    """The threads that make copies complete all copies and end, also if the memory is deleted
    without a call of `close`."""
    before, memory = copy_threads(), slow_memory()
    host, zeros = (memory.new(1000, torch.float32, Tier.HOST) for _ in range(2))
    uploaded, followed = torch.ones(1000), []
    memory.copy(host, torch.ones(1000), then=lambda: followed.append(host.sum().item()))
    memory.copy(uploaded, zeros)
    assert len(copy_threads()) == len(before) + 3
    if closes:
        memory.close()
        assert copy_threads() == before
    del memory
    deadline = time.monotonic() + 10
    while copy_threads() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert copy_threads() == before
    assert followed == [1000.0] and not uploaded.any()


@pytest.mark.parametrize("argument", ["after", "then"])
def test_error_in_a_thread_is_raised_by_wait(argument):
    """After the error, the thread makes the next copy."""
    memory, values = slow_memory(), torch.ones(8)
    host = memory.new(8, torch.float32, Tier.HOST)

    def fail() -> None:
        raise OSError("broken")

    copy = memory.copy(host, values, **{argument: fail})
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            copy.wait()
    memory.copy(host, values * 2, then=lambda: None).wait()
    assert host.sum() == 16
    memory.close()
    with pytest.raises(AssertionError, match="the thread has ended"):
        memory.copy(host, values)


UNFINISHED = """
import torch
from optimus.chunks.memory import Memory, Tier
from optimus.config.machine import Links
memory = Memory(torch.device("cpu"), links=Links(to_host=4e4))
host = memory.new(1000, torch.float32, Tier.HOST)
for number in range(5):
    memory.copy(host, torch.ones(1000), then=lambda: print(host.sum().item()))
"""


def test_a_process_with_copies_in_progress_ends_after_these_copies():
    """The main thread of the process ends while threads make copies."""
    command = [sys.executable, "-c", UNFINISHED]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[2], timeout=60, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split() == ["1000.0"] * 5
