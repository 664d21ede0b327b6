"""Kills a save at every call that changes files and looks what is left; the shim is preloaded.

`python -m tests.helpers.kill_points DIRECTORY MODE` prints the number of calls.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from optimus.checkpoint import manager
from optimus.checkpoint.full import RankStates, load_full, read_whole, save_full
from optimus.checkpoint.index import STATES
from optimus.chunks.layout import Parameter, lay_out
from optimus.chunks.states import Home, StateShard
from optimus.dist.collectives import ALONE
from optimus.dist.groups import Groups
from optimus.dist.mesh import Mesh

SHAPES = {"a": (7, 9), "b": (33,), "c": (40, 5)}


def make_states(step: int) -> RankStates:
    """States of which every element tells the step."""
    chunks = lay_out([Parameter(name, shape) for name, shape in SHAPES.items()], 100).chunks
    shards = [
        StateShard(c, 0, Home(), {state: torch.full((c.length,), float(step)) for state in STATES})
        for c in chunks
    ]
    boxes = {name: tuple(((0, size),) for size in shape) for name, shape in SHAPES.items()}
    groups = Groups(Mesh(), Mesh().place(0), ALONE)
    return RankStates(groups, shards, boxes, SHAPES)


def save(run_dir: Path, step: int) -> None:
    """What a run does when a full checkpoint is due."""

    def write(directory: Path) -> None:
        (directory / "config.toml").write_text(f"step = {step}\n")

    save_full(
        make_states(step),
        manager.full_path(run_dir, step),
        "balanced",
        write,
        step=step,
        updates=step,
    )
    manager.forget_old(run_dir, keep_models=0)


def look(run_dir: Path, steps: tuple[int, ...]) -> int:
    """The step of the newest valid checkpoint, one of `steps`, all of whose bytes are its own."""
    newest = manager.newest_valid(run_dir)
    assert newest is not None, "no valid checkpoint is left"
    assert newest.step in steps, newest.step
    for state in STATES:
        whole = {name: torch.empty(shape) for name, shape in SHAPES.items()}
        read_whole(newest, whole, state)
        assert all((tensor == newest.step).all() for tensor in whole.values()), "a mixture"
    start = manager.decide_start(run_dir, "auto")
    assert start.step == newest.step and start.full is not None
    states = make_states(0)
    assert load_full(states, start.full, "broadcast") == ""
    manager.prepare_directory(run_dir, start)
    return newest.step


def kill_once(base: Path, run_dir: Path, number: int, mode: int) -> bool:
    """Whether the third save got to its end although it was to be killed at call `number`."""
    shutil.rmtree(run_dir, ignore_errors=True)
    shutil.copytree(base, run_dir)
    child = os.fork()
    if not child:
        try:
            shim = ctypes.CDLL(None)
            shim.kill_points_arm(ctypes.c_long(number), mode, os.fsencode(run_dir))
            save(run_dir, 3)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    ended = os.waitstatus_to_exitcode(status)
    assert ended in (0, -signal.SIGKILL), ended
    return ended == 0


def main(directory: Path, mode: int) -> None:
    torch.set_num_threads(1)
    base, run_dir = directory / "base", directory / "run"
    for step in (1, 2):
        save(base, step)
    number, left = 1, []
    while not kill_once(base, run_dir, number, mode):
        left.append(look(run_dir, (2, 3)))
        save(run_dir, 4)  # and the run can go on
        assert look(run_dir, (4,)) == 4
        names = sorted(path.name for path in manager.checkpoints_dir(run_dir).iterdir())
        assert names == [f"step-{step:08d}" for step in (left[-1], 4)], names
        number += 1
    assert left == sorted(left) and {2, 3} == set(left), left
    assert look(run_dir, (3,)) == 3
    print(number - 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
