"""Kills a save at every call that changes files and looks what is left; the shim is preloaded.

`python -m tests.helpers.kill_points DIRECTORY ACTION RANKS VICTIM STRIDE` prints how many calls the
victim, one of RANKS, makes; it is killed at every STRIDE-th of them.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed

from optimus.checkpoint import index, manager, shards
from optimus.checkpoint.load import load_full
from optimus.checkpoint.pieces import Scatter
from optimus.checkpoint.rank_states import RankStates
from optimus.checkpoint.save import FullSaver
from optimus.chunks.layout import STATES, Parameter, lay_out
from optimus.chunks.states import Home, StateShard
from optimus.dist.collectives import ALONE, Group, group_of
from optimus.dist.groups import Groups
from optimus.dist.mesh import Mesh
from optimus.errors import LostPeerError, OptimusError
from tests.helpers.file_calls import Action, Breakage, arm
from tests.helpers.whole import read_whole

BLOCK_BYTES = 256
"""So that a shard file is some thirty writes."""
SHAPES = {"a": (7, 9), "b": (33,), "c": (40, 5)}


def make_states(step: int, group: Group = ALONE) -> RankStates:
    """States of which every element tells the step, divided over the group."""
    parameters = [
        Parameter(name, shape, adders=group.size, shards=group.size)
        for name, shape in SHAPES.items()
    ]
    chunks = lay_out(parameters, 100).chunks
    home = Home(adders=group, shards=group)
    shards = []
    for chunk in chunks:
        flat = torch.full((chunk.shard_length,), float(step))
        first = group.rank * chunk.shard_length
        shards.append(StateShard(chunk, first, home, {state: flat.clone() for state in STATES}))
    boxes = {name: tuple(((0, size),) for size in shape) for name, shape in SHAPES.items()}
    mesh = Mesh(dp=group.size)
    groups = Groups(mesh, mesh.place(group.rank), group, dp=group, data=group)
    return RankStates(groups, shards, boxes, SHAPES)


def save_full(
    states: RankStates,
    final: Path,
    write_companions: Callable[[Path], None] = lambda directory: None,
    scatter: Scatter = "balanced",
    **facts: Any,
) -> None:
    """Write and seal the checkpoint `final`, and wait for it. A collective of all ranks.

    Raises OptimusError on every rank, with nothing left behind, if any rank cannot write.
    """
    underway = FullSaver(states, scatter).begin(states, final, write_companions, **facts)
    if failure := underway.drain().failure:
        raise OptimusError(failure.what, on_every_rank=True)


def save(run_dir: Path, step: int, group: Group = ALONE) -> None:
    """What a run does when a full checkpoint is due."""

    def write(directory: Path) -> None:
        (directory / "config.toml").write_text(f"step = {step}\n")

    path = manager.full_path(run_dir, step)
    save_full(make_states(step, group), path, write, step=step, updates=step)
    if group.rank == 0:
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


def join(rank: int, ranks: int, store: Path) -> Group:
    """The group of all ranks, over a file."""
    if ranks == 1:
        return ALONE
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    return group_of(distributed.group.WORLD)


def child(rank: int, ranks: int, run_dir: Path, kill: Breakage) -> int:
    """One rank's third save; its exit status."""
    group = join(rank, ranks, run_dir.parent / f"store-{run_dir.name}")
    if rank == kill.rank:
        arm(run_dir, breakage=kill)
    try:
        save(run_dir, 3, group)
    except LostPeerError:
        return LostPeerError.exit_code
    return 0


def kill_once(run_dir: Path, kill: Breakage, ranks: int) -> bool:
    """Whether the third save got to its end though a rank was to be killed."""
    children = []
    for rank in range(ranks):
        children.append(os.fork())
        if not children[-1]:
            status = 1
            try:
                status = child(rank, ranks, run_dir, kill)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    died = ended.pop(kill.rank)
    assert died in (0, -signal.SIGKILL), died
    # Behind the last word of the first rank the others have done all that is theirs.
    assert all(one in (0, LostPeerError.exit_code) for one in ended), ended
    return died == 0


def main(directory: Path, action: int, ranks: int, victim: int, stride: int) -> None:
    torch.set_num_threads(1)
    shards.BLOCK_BYTES = index.BLOCK_BYTES = BLOCK_BYTES
    base, number, left = directory / "base", 1, []
    for step in (1, 2):
        save(base, step)
    while True:
        run_dir = directory / f"run-{number}"
        shutil.copytree(base, run_dir)
        if kill_once(run_dir, Breakage(victim, Action(action), number, number), ranks):
            break
        for path in manager.checkpoints_dir(run_dir).glob("step-*"):
            manager.read_manifest(path).verify()  # no name without all that belongs to it
        left.append(look(run_dir, (2, 3)))
        save(run_dir, 4)  # and the run can go on
        assert look(run_dir, (4,)) == 4
        names = sorted(path.name for path in manager.checkpoints_dir(run_dir).iterdir())
        assert names == [f"step-{step:08d}" for step in (left[-1], 4)], names
        number += stride
    assert left == sorted(left), left
    assert set(left) == ({2, 3} if victim == 0 else {2}), left
    assert look(run_dir, (3,)) == 3
    print(number - 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
