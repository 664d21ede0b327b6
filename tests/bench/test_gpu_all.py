"""Tests of scripts/bench/gpu_all.sh without a GPU: the commands that the script runs, and the table
that it writes."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from optimus.cli import _parse

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "bench" / "gpu_all.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT
    )


@pytest.mark.parametrize("mode", [[], ["--rehearse"]])
def test_commands_exist(mode):
    done = run("--dry-run", *mode)
    assert done.returncode == 0, done.stderr
    commands = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    names = {name.split()[0] for name in commands}
    assert names >= {"build", "tests", "pass_demo", "step", "table"}
    assert any("scripts/bench/moe.py" in command for command in commands.values())
    for command in commands.values():
        words = shlex.split(command)
        if "optimus.cli" in words:
            _parse(words[words.index("optimus.cli") + 1 :])  # exits if an argument is wrong
        if words[1].startswith("scripts/bench/"):
            importlib.import_module(Path(words[1]).stem).make_parser().parse_args(words[2:])
        for word in words[1:]:
            if "/" in word and not word.startswith("/"):
                assert (ROOT / word.partition("=")[2] or word).exists(), word


def test_mistakes_are_refused(tmp_path):
    done = run("--out", str(tmp_path))
    assert done.returncode == 2 and "finds no CUDA device" in done.stderr
    assert run("--budget", "ten").returncode == 2
    assert run("--fast").returncode == 2


def test_only_files_of_an_earlier_run_are_removed(tmp_path):
    """A budget of 1 s ends the script before any benchmark. The script removes the files of an
    earlier run, but no other files."""
    for name in ("notes.json", "train.log", "build.log", "step.json", "step.err.log", "parts.tsv"):
        (tmp_path / name).write_text("old\n")
    done = run("--rehearse", "--budget", "1", "--out", str(tmp_path))
    assert done.returncode == 1
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["notes.json", "parts.tsv", "table.md", "train.log"]
    assert "old" not in (tmp_path / "parts.tsv").read_text()


def test_table_names_failed_benchmarks(tmp_path):
    (tmp_path / "parts.tsv").write_text("build\t9\tdone\ntests\t3\tfailed with status 1\n")
    (tmp_path / "tests.log").write_text("..F\n1 failed, 2 passed in 1 s\n\n")
    (tmp_path / "build.log").write_text("built\n")
    table = [sys.executable, ROOT / "scripts/bench/gpu_table.py", tmp_path]
    subprocess.run(table, check=True, capture_output=True, cwd=ROOT)
    text = (tmp_path / "table.md").read_text()
    assert "| build | 9 | done: built |" in text
    assert "| tests | 3 | failed with status 1: 1 failed, 2 passed in 1 s |" in text


def test_table_shows_figures(tmp_path):
    row = {"forward_s": [1, 1], "backward_s": [2, 2], "forward_backward_s": [3, 3], "tflops": 500.0}
    row |= {"of_peak": 0.63, "ours_is_faster": 1.0, "ours_is_faster_paired": [1, 1, 1]}
    case = {"name": "x-bf16", "hidden": 1, "inner": 1, "experts": 1, "top_k": 1, "tokens": 1}
    case |= {"threads": 1, "clock": "wall", "peak_tflops": 790.0, "blocks": {"ours": row}}
    case["absent"] = {"liger": "not installed"}
    result = {"device": "Card 1", "date": "2026-01-02", "versions": {}, "rounds": 1}
    (tmp_path / "moe.json").write_text(json.dumps(result | {"cases": [case]}))
    (tmp_path / "parts.tsv").write_text("moe\t9\tdone\n")
    docs = tmp_path / "docs"
    docs.mkdir()
    table = [sys.executable, ROOT / "scripts/bench/gpu_table.py", tmp_path, "--docs", docs]
    subprocess.run(table, check=True, capture_output=True, cwd=ROOT)
    text = (docs / "card_1.md").read_text()
    assert "2026-01-02" in text and "| ours | 1000.0 | 2000.0 |" in text and "63%" in text
