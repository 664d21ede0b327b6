"""Functions for tests that save three small parameters, delay the saves of runs, and read saved
checkpoints."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from optimus.checkpoint import index, shard_file, store
from optimus.checkpoint import save as save_module
from optimus.checkpoint.index import ADAMW_STATES, ShardReport
from optimus.checkpoint.save import FullSaver, Generation, RankStates
from optimus.checkpoint.shard_file import HEADER_BYTES, Identity, Stop
from optimus.checkpoint.slices import Scatter
from optimus.checkpoint.weights import ModelSaver
from optimus.chunks.buffers import StateShard
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.layout import Parameter, lay_out
from optimus.distributed.collectives import ALONE, Group
from optimus.distributed.groups import Groups
from optimus.distributed.mesh import Mesh
from optimus.errors import OptimusError
from optimus.io.safetensors import Checksum
from optimus.train.loop import Run
from tests.kit.runs.training import Hook

SHAPES = {"a": (7, 9), "b": (33,), "c": (40, 5)}


def make_states(step: int, group: Group = ALONE) -> RankStates:
    """Return states of the parameters SHAPES, sharded over the group. All elements are `step`."""
    parameters = [
        Parameter(name, shape, reduce_size=group.size, shard_size=group.size)
        for name, shape in SHAPES.items()
    ]
    chunks = lay_out(parameters, 100).chunks
    home = ParamProcessGroups(reduce_group=group, shard_group=group)
    shards = []
    for chunk in chunks:
        flat = torch.full((chunk.shard_length,), float(step))
        first = group.rank * chunk.shard_length
        states = {state: flat.clone() for state in ADAMW_STATES}
        shards.append(StateShard(chunk, first, home, states))
    boxes = {name: tuple(((0, size),) for size in shape) for name, shape in SHAPES.items()}
    mesh = Mesh(dp=group.size)
    along = {axes: group if "dp" in axes else ALONE for axes in mesh.groups_of(group.rank)}
    groups = Groups(mesh, mesh.coordinate(group.rank), group, along)
    return RankStates(groups, torch.device("cpu"), shards, ADAMW_STATES, boxes, SHAPES)


def write_config(directory: Path) -> None:
    """Write config.toml, which every manifest must list."""
    (directory / "config.toml").write_text("")


def save_full(
    states: RankStates,
    final: Path,
    write_sidecars: Callable[[Path], None] = write_config,
    scatter: Scatter = "balanced",
    **facts: Any,
) -> None:
    """Write the checkpoint `final`, and return after the checkpoint is committed. All ranks must
    call this function.

    Args:
        states: The states of this rank.
        final: Path of the checkpoint.
        write_sidecars: Function that writes the other files to a directory.
        scatter: Value of `checkpoint.scatter`, which divides the writes among ranks.
        facts: Entries of the manifest, including `step`.

    Raises:
        OptimusError: A rank cannot write. All ranks raise OptimusError, and no file remains.
    """
    save = FullSaver(states, scatter).begin(states, final, write_sidecars, **facts)
    outcome = save.drain()
    if outcome is not None and outcome.failure:
        raise OptimusError(outcome.failure.message)


def save(run_dir: Path, step: int) -> None:
    """Save a full checkpoint and remove old checkpoints, as a run does."""

    def write(directory: Path) -> None:
        (directory / "config.toml").write_text(f"step = {step}\n")

    path = store.full_path(run_dir, step)
    save_full(make_states(step), path, write, step=step, updates=step)
    workspace = store.open_workspace(run_dir)
    store.remove_old(run_dir, workspace, keep_models=0)
    workspace.close()


SYNC_AND_ASYNC = pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])


@contextlib.contextmanager
def block_bytes(size: int) -> Iterator[None]:
    """Context manager in which the checksummed blocks of shard files have `size` bytes. The default
    is 4 MiB."""
    with (
        mock.patch.object(shard_file, "BLOCK_BYTES", size),
        mock.patch.object(index, "BLOCK_BYTES", size),
    ):
        yield


def delay_writes(until: dict[int, int]) -> Hook:
    """Delay the writes of saves on this forked rank.

    Args:
        until: Maps the step of each delayed save to the number of an update. The writes of the save
            start just before this update.

    Returns:
        The hook to call before each update.
    """
    gates = {step: threading.Event() for step in until}
    write_shard, write_model = save_module.write_shard, ModelSaver._write

    def write_shard_late(directory: Path, identity: Identity, *rest: Any) -> ShardReport:
        if identity.step in gates:
            assert gates[identity.step].wait(60)
        return write_shard(directory, identity, *rest)

    def write_model_late(
        saver: ModelSaver, states: RankStates, generation: Generation, step: int, stop: Stop
    ) -> dict[str, Checksum]:
        if step in gates:
            assert gates[step].wait(60)
        return write_model(saver, states, generation, step, stop)

    # The patches are not undone, because saves in the background can write until the rank ends.
    mock.patch.object(save_module, "write_shard", write_shard_late).start()
    mock.patch.object(ModelSaver, "_write", write_model_late).start()

    def before(step: int) -> None:
        for saved_step, gate in gates.items():
            if step == until[saved_step]:
                gate.set()

    return before


def wait_for_saves_after(steps: Collection[int]) -> Callable[[Run], None]:
    """Return a hook to call after each update. After the updates `steps`, the hook waits until all
    saves have ended. The hook is a collective of all ranks.

    Saves in the background take an arbitrary number of updates. Tests that change the disk during
    a run must wait for the saves that the change must not affect.
    """

    def after(run: Run) -> None:
        if run.step in steps:
            for pending in (run.saves._fulls, run.saves._models):
                while pending.save is not None:  # `poll` does not wait for a thread that hangs
                    run.saves._handle(pending, pending.poll(wait=True))

    return after


def full_states(run_dir: Path) -> dict[str, bytes]:
    """Verify all checkpoints of a run. Return a dict that maps the path of each shard file of the
    full checkpoints, such as `step-00000004/shard-00000.bin`, to its state bytes.

    Assert that no workspace remains, except an empty workspace of a run that ended with an error.
    """
    content = {}
    for path in sorted((run_dir / "checkpoints").iterdir()):
        if path.name.startswith(".work-"):
            assert list(path.iterdir()) == []
            continue
        store.read_manifest(path).verify()
        for file in sorted(path.glob("shard-*")):
            content[f"{path.name}/{file.name}"] = file.read_bytes()[HEADER_BYTES:]
    return content


def steps_kept(run_dir: Path) -> list[int]:
    """Verify all checkpoints of a run. Return the steps of its full checkpoints."""
    return sorted({int(name[5:13]) for name in full_states(run_dir)})
