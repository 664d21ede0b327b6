"""Whole training runs on the rank pool, and what two runs must have in common."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import torch

from optimus.checkpoint import store
from optimus.chunks.layout import STATES
from optimus.config import make_config
from optimus.distributed.agreement import RunEnded
from optimus.launch.environment import read_launch_env
from optimus.observe.metrics import read_json_lines
from optimus.train.loop import train
from tests.helpers.whole import read_whole

TIMES = ("step_time_s", "tokens_per_s", "tflops_per_device", "mfu", "mem_bytes")
"""Of metrics.jsonl: what no two runs share."""


def run_tree(tree: dict) -> None:
    train(make_config(tree), read_launch_env())


def run_and_catch(tree: dict) -> tuple[int, str]:
    """A run's exit status and what it raised."""
    try:
        run_tree(tree)
    except RunEnded as ended:
        assert ended.is_shared or read_launch_env().world_size == 1
        return ended.exit_code, str(ended)
    return 0, ""


def told_by(tree: dict) -> str:
    """What a run says on standard error."""
    with contextlib.redirect_stderr(io.StringIO()) as told:
        run_tree(tree)
    return told.getvalue()


def train_on(ranks, size: int, tree: dict) -> None:
    ranks(size, run_tree, tree, start_world=False, timeout_s=120)


def metrics_of(run_dir: Path) -> list[dict]:
    lines = read_json_lines(run_dir / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    """Every state of the newest checkpoint."""
    newest, tensors = store.newest_valid(run_dir), {}
    index = newest.index()
    for state in STATES:
        whole = {name: torch.empty(shape) for name, shape in index.shapes.items()}
        if state != "master":  # parameters that are not trained have none
            column = 4 + STATES.index(state)
            kept = {name for name in whole if (index.stored(name).rows[:, column] >= 0).all()}
            whole = {name: whole[name] for name in kept}
        read_whole(newest, whole, state)
        tensors |= {f"{state}.{name}": tensor for name, tensor in whole.items()}
    return tensors


def assert_same_run(one: Path, other: Path) -> None:
    assert metrics_of(one) == metrics_of(other)
    a, b = weights_of(one), weights_of(other)
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different
