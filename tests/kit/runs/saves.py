"""Saves of three small parameters, and what the saves of a run leave."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus.checkpoint import save as save_module
from optimus.checkpoint import store
from optimus.checkpoint.format import ADAMW_STATES
from optimus.checkpoint.save import FullSaver, RankStates
from optimus.checkpoint.shard_file import HEADER_BYTES
from optimus.checkpoint.slices import Scatter
from optimus.checkpoint.weights import ModelSaver
from optimus.chunks.buffers import StateShard
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.layout import Parameter, lay_out
from optimus.distributed.collectives import ALONE, Group
from optimus.distributed.groups import Groups
from optimus.distributed.mesh import Mesh
from optimus.errors import OptimusError
from tests.kit.runs.training import Hook

SHAPES = {"a": (7, 9), "b": (33,), "c": (40, 5)}


def make_states(step: int, group: Group = ALONE) -> RankStates:
    """States of which every element tells the step, divided over the group."""
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
        shards.append(
            StateShard(chunk, first, home, {state: flat.clone() for state in ADAMW_STATES})
        )
    boxes = {name: tuple(((0, size),) for size in shape) for name, shape in SHAPES.items()}
    mesh = Mesh(dp=group.size)
    along = {axes: group if "dp" in axes else ALONE for axes in mesh.groups_of(group.rank)}
    groups = Groups(mesh, mesh.coordinate(group.rank), group, along)
    return RankStates(groups, shards, ADAMW_STATES, boxes, SHAPES)


def write_config(directory: Path) -> None:
    """Write the file that every checkpoint lists."""
    (directory / "config.toml").write_text("")


def save_full(
    states: RankStates,
    final: Path,
    write_sidecars: Callable[[Path], None] = write_config,
    scatter: Scatter = "balanced",
    **facts: Any,
) -> None:
    """Write and commit the checkpoint `final`, and wait for it. A collective of all ranks.

    Raises OptimusError on every rank, with nothing left behind, if any rank cannot write.
    """
    save = FullSaver(states, scatter).begin(states, final, write_sidecars, **facts)
    if failure := save.drain().failure:
        raise OptimusError(failure.message)


def save(run_dir: Path, step: int) -> None:
    """What a run does when a full checkpoint is due."""

    def write(directory: Path) -> None:
        (directory / "config.toml").write_text(f"step = {step}\n")

    path = store.full_path(run_dir, step)
    save_full(make_states(step), path, write, step=step, updates=step)
    store.remove_old(run_dir, keep_models=0)


BOTH = pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])


def hold_writes(until: dict[int, int]) -> Hook:
    """Saves of step s begin to write no earlier than update until[s]; the hook that lets them."""
    gates = {step: threading.Event() for step in until}
    plain = save_module.write_shard

    def write_late(directory, identity, *rest):
        if identity.step in gates:
            assert gates[identity.step].wait(60)
        return plain(directory, identity, *rest)

    plain_model = ModelSaver._write

    def write_model_late(saver, states, generation, step, stop):
        if step in gates:
            assert gates[step].wait(60)
        return plain_model(saver, states, generation, step, stop)

    save_module.write_shard, ModelSaver._write = write_late, write_model_late

    def before(step: int) -> None:
        for saved, gate in gates.items():
            if step == until[saved]:
                gate.set()

    return before


def slots(run_dir: Path) -> dict[str, bytes]:
    """The states in the run's full checkpoints; all are valid, and so is all that there is."""
    content = {}
    for path in sorted((run_dir / "checkpoints").iterdir()):
        store.read_manifest(path).verify()
        for file in sorted(path.glob("shard-*")):
            content[f"{path.name}/{file.name}"] = file.read_bytes()[HEADER_BYTES:]
    return content


def steps_kept(run_dir: Path) -> list[int]:
    return sorted({int(name[5:13]) for name in slots(run_dir)})
