"""Runs of `optimus train` on a CUDA device, compared with the same runs on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from optimus import platform
from optimus.config.load import dump_toml
from optimus.observe.metrics import read_json_lines
from tests.kit.runs.tiny import DENSE, tiny_config

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason=f"torch {torch.__version__} finds no CUDA device"
)
DEVICE = "cuda"
FAST = {"train__deterministic": False}
MANUAL = {"offload__mode": "manual"}
RUNS = {
    "fp32": ({}, 1e-4),
    "bf16": (FAST | {"train__dtype": "bf16"}, 1e-2),
    "fp16": (FAST | {"train__dtype": "fp16"}, 1e-2),
    "dense": (FAST | DENSE | {"train__dtype": "bf16", "optim__sharding": "so"}, 1e-2),
}


def losses(data: Path, run_dir: Path, device: str, settings: dict) -> list[float]:
    """Train for 3 steps, resume for 3 further steps, and return the losses of all 6 steps."""
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


@pytest.mark.parametrize(
    "offload",
    [
        {"offload__host_share": 1.0},
        {"offload__host_share": 0.5, "optim__cache_chunks": 8, "optim__chunk_length": 4096},
        {"offload__host_share": 1.0, "offload__order": "layer", "checkpoint__async_save": True},
    ],
    ids=["all", "half", "layer"],
)
def test_offloading_on_a_gpu_changes_no_bit(tiny_data, tmp_path, offload):
    """A run with states on the host has the losses of a run with states on the device, bit for bit.
    The losses would differ if code did not wait for each copy between host and device."""
    run = {"train__dtype": "bf16", "train__deterministic": True}
    expected = losses(tiny_data, tmp_path / "whole", DEVICE, run)
    assert losses(tiny_data, tmp_path / "off", DEVICE, run | offload | MANUAL) == expected


def test_host_memory_is_locked_at_its_exact_size():
    flat = platform.host_zeros((1 << 20) + 1, torch.uint8, torch.device("cuda"))
    assert flat.is_pinned() and len(flat) == (1 << 20) + 1 and not flat.any()
