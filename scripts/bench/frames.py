#!/usr/bin/env python3
"""Count the source files that operations use, and the stack frames of a gradient reduction.

    python scripts/bench/frames.py [--files] [--json]

An operation uses a source file of Optimus if a thread of the first rank calls a function of the
file. Three operations run on two local ranks with a small model: a training step with expert
parallelism (ep = 2), a save of a full checkpoint, and a load of this checkpoint. The fourth
operation is `optimus-data tokenize` with one document, in one process. The stack frames of a
gradient reduction are the functions of Optimus on the call stack between torch's backward and a
reduce-scatter.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import common
import torch.distributed as distributed

from data_prep.cli import main as optimus_data
from optimus.bench.step import make_rank
from optimus.checkpoint.load import load_full
from optimus.checkpoint.save import FullSaver
from optimus.checkpoint.store import read_manifest
from optimus.distributed.world import World
from optimus.errors import OptimusError
from optimus.rank.states import states_of_rank

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = tuple(f"{_ROOT / name}/" for name in ("optimus", "data_prep", "kernels"))
_TEXT = "A document of a few words, which the tokenizer divides into tokens.\n"


@contextlib.contextmanager
def entered_files() -> Iterator[set[str]]:
    """Context manager that yields a set of paths. If a function of Optimus is called in the `with`
    block, the path of the function's source file is added to the set."""
    files: set[str] = set()

    def enter(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and frame.f_code.co_name != "<module>" and name.startswith(_PACKAGES):
            files.add(str(Path(name).relative_to(_ROOT)))

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@contextlib.contextmanager
def reduce_scatter_frames() -> Iterator[list[list[str]]]:
    """Context manager that yields a list. For each reduce-scatter during a backward pass, a list of
    function names is appended: the functions of Optimus on the call stack between torch's autograd
    and torch's reduce-scatter, outermost first."""
    stacks: list[list[str]] = []
    name = "reduce_scatter_single"
    if not hasattr(distributed, name):
        name = "reduce_scatter_tensor"
    scatter = getattr(distributed, name)

    def record(*args: Any, **kwargs: Any) -> Any:
        functions: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and "/torch/autograd/" not in frame.f_code.co_filename:
            if frame.f_code.co_filename.startswith(_PACKAGES):
                functions.append(frame.f_code.co_qualname)
            frame = frame.f_back
        if frame is not None:
            stacks.append(functions[::-1])
        return scatter(*args, **kwargs)

    setattr(distributed, name, record)
    try:
        yield stacks
    finally:
        setattr(distributed, name, scatter)


def measure_ranks(world: World, folder: Path) -> dict[str, Any]:
    """Run a training step, a save and a load. Record the source files that these operations use,
    and the call stack of a reduce-scatter. All ranks must call this function.

    Returns:
        A dict with two keys. `files`: for each operation, the source files that it uses.
        `reduce-scatter`: the functions of Optimus on the longest stack from backward to a
        reduce-scatter.
    """
    rank = make_rank(common.mula_config(64, world.size, ep=2, sharding="epso"), world)
    updater, microbatches = rank.updater(), rank.microbatches()
    updater.run(1, microbatches)
    with entered_files() as update:
        updater.run(2, microbatches)
    rank.states.wait()
    states = states_of_rank(rank.config.model, rank.local.layout, rank.groups, rank.states)
    saver = FullSaver(states, "balanced")

    def write_config(directory: Path) -> None:
        (directory / "config.toml").write_text("")

    with entered_files() as save:
        outcome = saver.begin(states, folder / "full", write_config, step=2).drain()
    assert outcome is not None, "a thread of the save hangs"
    if outcome.failure:
        raise OptimusError(outcome.failure.message)
    with entered_files() as load:
        problem = load_full(states, read_manifest(folder / "full"), "broadcast")
    if problem:
        raise OptimusError(problem)
    dense = make_rank(common.mula_config(64, world.size, sharding="epso"), world)
    with reduce_scatter_frames() as stacks:
        dense.updater().run(1, dense.microbatches())
    files = {"an update, ep = 2": update, "a full save": save, "a load": load}
    return {
        "files": {operation: sorted(entered) for operation, entered in files.items()},
        "reduce-scatter": max(stacks, key=len),
    }


def measure_tokenize(folder: Path) -> list[str]:
    """Tokenize a document with `optimus-data tokenize`. Return the paths of the Python files
    whose code the command runs."""
    text, tokenizer = folder / "text.txt", folder / "tokenizer.json"
    text.write_text(_TEXT)
    source = ["--input", str(text)]
    train = ["train-tokenizer", *source, "--vocab-size", "280", "--out", str(tokenizer)]
    _run_data(train)
    command = ["tokenize", *source, "--tokenizer", str(tokenizer), "--out", str(folder / "out")]
    with entered_files() as files:
        _run_data([*command, "--workers", "1"])
    return sorted(files)


def _run_data(command: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        status = optimus_data(command)
    if status:
        raise OptimusError(f"optimus-data {' '.join(command)} ended with status {status}")


def format_result(result: dict[str, Any], lists_files: bool) -> str:
    """Return `result` as Markdown text.

    The text contains a table with the number of source files that each operation uses, and a list
    of the functions on the call stack between backward and a reduce-scatter. With `lists_files`,
    the text also contains the names of the source files.
    """
    functions = result["reduce-scatter"]
    lines = ["| operation | files entered |", "|---|---|"]
    lines += [f"| {name} | {len(files)} |" for name, files in result["files"].items()]
    lines += ["", f"Frames from backward to reduce-scatter: {len(functions)}"]
    lines += [f"- {name}" for name in functions]
    if lists_files:
        for name, files in result["files"].items():
            lines += ["", name, *(f"- {file}" for file in files)]
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", action="store_true", help="also list the source files")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    result = common.run_ranks(2, measure_ranks)
    with tempfile.TemporaryDirectory(prefix="optimus-bench-") as folder:
        result["files"]["a tokenized document"] = measure_tokenize(Path(folder))
    print(json.dumps(result) if args.json else format_result(result, args.files))


if __name__ == "__main__":
    sys.exit(common.run_script(main))
