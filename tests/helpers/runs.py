"""Whole training runs on the rank pool, and what two runs must have in common."""

from __future__ import annotations

from pathlib import Path

import torch

from optimus.checkpoint import manager
from optimus.checkpoint.index import STATES
from optimus.config import make_config
from optimus.launch_env import read_launch_env
from optimus.observe.metrics import read_json_lines
from optimus.train.loop import train
from tests.helpers.whole import read_whole

TIMES = ("step_time_s", "tokens_per_s", "tflops_per_device", "mfu", "mem_bytes")
"""Of metrics.jsonl: what no two runs share."""


def run_tree(tree: dict) -> None:
    train(make_config(tree), read_launch_env())


def train_on(ranks, size: int, tree: dict) -> None:
    ranks(size, run_tree, tree, start_world=False, timeout_s=120)


def metrics_of(run_dir: Path) -> list[dict]:
    lines = read_json_lines(run_dir / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    """Every state of the newest checkpoint."""
    newest, tensors = manager.newest_valid(run_dir), {}
    for state in STATES:
        whole = {name: torch.empty(shape) for name, shape in newest.index().shapes.items()}
        if state != "master":  # parameters that are not trained have none
            whole = {name: t for name, t in whole.items() if newest.index().has(name, state)}
        read_whole(newest, whole, state)
        tensors |= {f"{state}.{name}": tensor for name, tensor in whole.items()}
    return tensors


def assert_same_run(one: Path, other: Path) -> None:
    assert metrics_of(one) == metrics_of(other)
    a, b = weights_of(one), weights_of(other)
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different
