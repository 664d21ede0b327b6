"""Saves beside training, saves that fail, and runs that end while one is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optimus.checkpoint import manager
from optimus.checkpoint import save as save_module
from optimus.checkpoint.shards import HEADER_BYTES
from optimus.config import make_config
from optimus.errors import LostPeerError, OptimusError
from optimus.launch_env import read_launch_env
from optimus.train.loop import Run, train
from tests.helpers.runs import assert_same_run, train_on
from tests.helpers.tiny import tiny_tree

Hook = Callable[[int], None]


def run_with(tree: dict[str, Any], before_update: Hook = lambda step: None) -> str:
    """A whole run of this rank; "" or its exit status and message."""
    plain = Run.update

    def update(run: Run, step: int) -> None:
        before_update(step)
        plain(run, step)

    Run.update = update
    try:
        train(make_config(tree), read_launch_env())
    except OptimusError as error:
        assert error.on_every_rank or isinstance(error, LostPeerError), error
        return f"{error.exit_code} {error}"
    return ""


def hold_writes(until: dict[int, int]) -> Hook:
    """Saves of step s begin to write no earlier than update until[s]; the hook that lets them."""
    gates = {step: threading.Event() for step in until}
    plain = save_module.write_shard

    def write_late(directory, identity, *rest):
        if identity.step in gates:
            assert gates[identity.step].wait(60)
        return plain(directory, identity, *rest)

    save_module.write_shard = write_late

    def before_update(step: int) -> None:
        for saved, gate in gates.items():
            if step == until[saved]:
                gate.set()

    return before_update


def run_with_held_writes(tree: dict[str, Any], until: dict[int, int]) -> str:
    return run_with(tree, hold_writes(until))


def slots(run_dir: Path) -> dict[str, bytes]:
    """The states in the run's full checkpoints, which are all valid and all there is."""
    content = {}
    for path in sorted((run_dir / "checkpoints").iterdir()):
        manager.read_manifest(path).verify()
        for file in sorted(path.glob("shard-*")):
            content[f"{path.name}/{file.name}"] = file.read_bytes()[HEADER_BYTES:]
    return content


@pytest.mark.parametrize(
    ("size", "variant"),
    [
        (1, {}),
        (2, {}),
        (2, {"train__dtype": "bf16", "optim__frozen": ["embed.weight"]}),
        (4, {"parallel__pp": 2, "checkpoint__scatter": "paper", "model__tie_embeddings": True}),
    ],
)
def test_what_is_written_beside_training_is_what_a_wait_would_have_written(
    ranks, tiny_data, tmp_path, size, variant
):
    """The first save is written while further updates change the states; both slots are equal."""
    both = {"train__max_steps": 8, "checkpoint__interval": 4, "optim__sharding": "so"} | variant
    train_on(ranks, size, tiny_tree(tiny_data, tmp_path / "sync", **both))
    tree = tiny_tree(tiny_data, tmp_path / "async", **both, checkpoint__async_save=True)
    told = ranks(size, run_with_held_writes, tree, {4: 7}, start_world=False, timeout_s=120)
    assert told == [""] * size
    assert_same_run(tmp_path / "sync", tmp_path / "async")
    assert slots(tmp_path / "sync") == slots(tmp_path / "async")
