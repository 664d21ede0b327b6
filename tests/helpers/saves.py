"""Runs with hooks around their updates, how they end, and what their saves leave."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from optimus.checkpoint import save as save_module
from optimus.checkpoint import store
from optimus.checkpoint.shard_file import HEADER_BYTES
from optimus.checkpoint.weights import ModelSaver
from optimus.config import make_config
from optimus.distributed.agreement import RunEnded
from optimus.errors import OutcomeKind
from optimus.launch.environment import read_launch_env
from optimus.train.loop import Run, train

BOTH = pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
Hook = Callable[[int], None]


class Ended(NamedTuple):
    """How this rank's run ended: exit status and message, and what it printed."""

    status: int
    message: str
    printed: list[str]


def run_with(
    tree: dict[str, Any], before: Hook, behind: Callable[[Run], None] = lambda run: None
) -> Ended:
    """A whole run of this rank, with hooks around its updates; all ranks end on the same word."""
    plain, printed, launch = Run.update, io.StringIO(), read_launch_env()

    def update(run: Run, step: int) -> None:
        before(step)
        plain(run, step)
        behind(run)

    Run.update = update
    status, message = 0, ""
    with contextlib.redirect_stderr(printed):
        try:
            train(make_config(tree), launch)
        except RunEnded as ended:
            is_alone = launch.world_size == 1
            assert is_alone or ended.is_shared or ended.kind is OutcomeKind.LOST_PEER, ended
            status, message = ended.exit_code, str(ended)
    return Ended(status, message, printed.getvalue().splitlines())


def warnings(ended: Ended) -> list[str]:
    return [line for line in ended.printed if "warning:" in line]


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
