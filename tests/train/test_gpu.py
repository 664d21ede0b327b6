"""Runs of `optimus train` on a CUDA device, compared with the same runs on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from optimus.config.load import dump_toml
from optimus.observe.metrics import read_json_lines
from tests.kit.runs.tiny import DENSE, tiny_config

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason=f"torch {torch.__version__} finds no CUDA device"
)
FAST = {"train__deterministic": False}
RUNS = {
    "fp32": ({}, 1e-4),
    "bf16": (FAST | {"train__dtype": "bf16"}, 1e-2),
    "fp16": (FAST | {"train__dtype": "fp16"}, 1e-2),
    "dense": (FAST | DENSE | {"train__dtype": "bf16", "optim__sharding": "so"}, 1e-2),
}


def losses(data: Path, run_dir: Path, device: str, settings: dict) -> list[float]:
    """Train for 6 steps, with a resume at step 3, and return all losses."""
    config = tiny_config(
        data, run_dir, train__device=device, train__max_steps=6, train__eval_interval=2,
        train__eval_instances=8, **settings,
    )  # fmt: skip
    file = run_dir.with_suffix(".toml")
    file.write_text(dump_toml(config))
    command = [sys.executable, "-P", "-m", "optimus.cli", "train", str(file)]
    for stop in (3, 6):
        subprocess.run([*command, f"train.stop_at_step={stop}"], check=True, timeout=120)
    return [line["loss"] for line in read_json_lines(run_dir / "metrics.jsonl")]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_gpu_has_the_losses_of_the_cpu(tiny_data, tmp_path, name):
    settings, tolerance = RUNS[name]
    expected = losses(tiny_data, tmp_path / "cpu", "cpu", settings)
    actual = losses(tiny_data, tmp_path / "gpu", "cuda", settings)
    assert len(actual) == 6
    assert actual == pytest.approx(expected, rel=tolerance)
