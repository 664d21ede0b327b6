"""Tests that wrong arguments of `optimus bench` and of the scripts in scripts/bench are refused."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from common import run_script

from optimus.cli import main

DEMO = Path(__file__).parents[2] / "configs" / "run" / "demo.toml"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (f"step {DEMO} --steps 1 --profile --nproc 2", "--profile measures one process, not 2"),
        ("moe --device cpu --case small-bf16 --json", "run python scripts/bench/moe.py"),
        ("checkpoint", "run python scripts/bench/checkpoint.py"),
        ("optimizer", "run python scripts/bench/optimizer.py or"),
        ("optimizer --ranks 4", "for --ranks, scripts/bench/sharding.py"),
        (
            "speed",
            "bench speed does not exist; use optimus bench step or",
        ),
    ],
)
def test_mistake_of_the_command_is_refused_in_a_line(arguments, words, capsys):
    assert main(["bench", *arguments.split()]) == 2
    errors = capsys.readouterr().err
    assert words in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("checkpoint --hidden 100", "multiple of 64"),
        ("checkpoint --ranks 0", "at least 1"),
        ("checkpoint --dir /nowhere", "no such directory"),
        ("moe --device cpu --case tiny-fp32", "--case tiny-fp32 must be SHAPE-fp32"),
        ("moe --device cpu --case small-fp64", "SHAPE-bf16 with SHAPE one of small, mula-7b-a1b"),
        ("moe --device cpu --peers loop,megablocks", "--peers megablocks is unknown"),
        ("moe --device cpu --rounds 0", "--rounds and --threads must be at least 1"),
        ("moe --device cpu --tokens -1 --case small-fp32", "--tokens -1 must be at least 1"),
        ("sharding --ranks=3", "--ranks must be even numbers"),
        ("sharding --hidden=100", "--ranks must be even numbers"),
        ("sharding --rounds=0", "--rounds 0 must be at least 1"),
        *((f"optimizer {option} 0", option) for option in ("--rounds", "--threads")),
        ("optimizer --peers sgd", "--peers"),
        ("optimizer --size 3", "--size"),
    ],
)
def test_mistake_of_a_script_is_refused_in_a_line(arguments, words, capsys):
    script, *rest = arguments.split()
    assert run_script(importlib.import_module(script).main, rest) == 2
    errors = capsys.readouterr().err
    assert words in errors and errors.count("\n") == 1
