"""What `optimus bench` refuses, in one line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimus.cli import main

DEMO = Path(__file__).parents[2] / "configs" / "run" / "demo.toml"
SMALL = "--size 4096 --threads 1 --rounds 1 --peers torch"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("checkpoint --hidden 100", "multiple of 64"),
        ("checkpoint --ranks 0", "begin at 1"),
        ("checkpoint --dir /nowhere", "no such directory"),
        (f"step {DEMO} --steps 1 --profile --nproc 2", "--profile is of one process, not of 2"),
        ("moe --device cpu --case tiny-fp32", "--case tiny-fp32 must be SHAPE-fp32"),
        ("moe --device cpu --case small-fp64", "SHAPE-bf16 with SHAPE one of small, mula-7b-a1b"),
        ("moe --device cpu --peers loop,megablocks", "--peers megablocks: known are"),
        ("moe --device cpu --rounds 0", "--rounds and --threads must be at least 1"),
        ("moe --device cpu --tokens -1 --case small-fp32", "--tokens -1 must be at least 1"),
        (f"optimizer {SMALL} --ranks=3", "--ranks are even numbers"),
        (f"optimizer {SMALL} --hidden=100", "--ranks are even numbers"),
        *((f"optimizer {wrong} 0", wrong) for wrong in ("--rounds", "--threads")),
        ("optimizer --peers sgd", "--peers"),
        ("optimizer --size 3", "--size"),
    ],
)
def test_a_mistake_is_one_line(arguments, words, capsys):
    assert main(["bench", *arguments.split()]) == 2
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1
