from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from optimus.train.malloc_trim import MallocTrim
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import run_tree

BROKEN = """
from optimus.train.malloc_trim import MallocTrim, private_bytes

def update(blocks=0):
    "Allocate blocks of 120 KB, which glibc takes from the heap, and free 3 of every 4."
    made = [b"x" * 120_000 for _ in range(blocks)]
    del made[1::2], made[1::2]
    return made

heap, kept = MallocTrim(), []
for blocks in (500, 0, 20, 120, *[0] * 14):
    before = private_bytes()
    kept.append(update(blocks))
    grown = private_bytes()
    heap.after_update()
    print(grown - before, private_bytes() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tests glibc's malloc")
def test_fragmented_heap_shrinks_and_a_stable_heap_is_kept():
    output = subprocess.check_output([sys.executable, "-c", BROKEN], text=True)
    lines = [[int(word) for word in line.split()] for line in output.splitlines()]
    start, _, little, much, *between, late = lines
    assert start[0] > 59e6 and start[1] < 25e6  # the first trim frees most
    assert little[0] > 2e6 and abs(little[1] - little[0]) < 1e5  # no trim; can differ by a page
    assert much[0] > 12e6 and much[1] > 12e6  # no trim: too soon after the last trim
    assert all(abs(grown) < 1e6 for _, grown in between)
    assert late[0] < 1e6 and late[1] < -6e6  # this trim frees the holes


def test_no_op_with_another_c_library_or_without_proc(monkeypatch):
    monkeypatch.setattr("optimus.train.malloc_trim.Path", lambda name: Path("/nowhere"))
    MallocTrim().after_update()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    MallocTrim().after_update()


def count_checks(tree):
    checks = []
    MallocTrim.after_update = lambda self: checks.append(self)  # only in this forked process
    run_tree(tree)
    return len(checks)


def test_run_checks_its_heap_after_each_update(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path, train__max_steps=3)
    assert ranks(2, count_checks, tree, start_world=False, timeout_s=120) == [3, 3]
