"""Check that a run can resume from each state of its checkpoints that is possible after a power
cut."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import NamedTuple

import torch
import xxhash

from optimus.checkpoint import store
from optimus.checkpoint.format import Manifest, read_manifest
from optimus.checkpoint.index import ADAMW_STATES
from optimus.errors import CheckpointError
from optimus.io.safetensors import as_bytes
from tests.kit.faults.disk import Call
from tests.kit.faults.power_loss import Disk, Tree
from tests.kit.runs.results import read_whole

RUN = "run"
"""Name of the run directory below the root of the modelled disk."""
_NAMES = re.compile(r"(step|model)-\d{8}")
WINDOW = 12
"""If at most this number of changes is pending, the check examines each subset of the pending
changes."""


def is_examined(path: PurePath) -> bool:
    """Return True for paths that a starting run reads: checkpoints with final names, such as
    `step-00000010`, and their parent directories."""
    names = path.parts
    return names[:2] == (RUN, "checkpoints")[: len(names)] and (
        len(names) < 3 or _NAMES.fullmatch(names[2]) is not None
    )


def tree_of(path: Path) -> Tree:
    """Return the tree of a file or directory."""
    if path.is_dir():
        return tuple((entry.name, tree_of(entry)) for entry in sorted(path.iterdir()))
    return path.read_bytes()


class StartState(NamedTuple):
    """State from which a run starts on a disk."""

    step: int = 0
    fulls: int = 0
    """Number of full checkpoints."""
    models: tuple[int, ...] = ()
    states: str = ""
    """Hash of all states that the run loads."""
    fault: str = ""
    """Error message if a checkpoint is not valid."""


@dataclass
class Summary:
    """Counts and faults of a replay."""

    moments: int = 0
    windows: int = 0
    """Number of file calls after which 1 to WINDOW changes are pending."""
    most_pending: int = 0
    states: int = 0
    """Number of examined states of the checkpoints, summed over all power cuts."""
    different: int = 0
    samples: int = 0
    """Number of tests that start a run with a random state of the whole disk."""
    faults: list[str] = field(default_factory=list)


class Loader:
    """Writes states of a disk to a file system in memory, where fsync takes no time, and loads the
    checkpoints in these states."""

    def __init__(self) -> None:
        memory = "/dev/shm"
        parent = memory if os.access(memory, os.W_OK) else None
        self._scratch = tempfile.TemporaryDirectory(prefix="power-loss-", dir=parent)
        self._pool, self._disk = (Path(self._scratch.name, name) for name in ("contents", "disk"))
        self._pool.mkdir()
        self._known: dict[Tree, StartState] = {}

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    def load(self, tree: Tree) -> StartState:
        """Verify all checkpoints in the tree. Return the state from which a run would start."""
        if tree not in self._known:
            self._write(tree)
            self._known[tree] = self._load()
        return self._known[tree]

    def start(self, tree: Tree) -> StartState:
        """Write a whole disk and prepare its run directory as a starting run does. Return the state
        from which this run starts."""
        self._write(tree)
        before = self._load()
        if before.fault:
            return before
        run = self._disk / RUN
        # Models of steps after the start are quarantined, with a warning.
        with contextlib.redirect_stderr(io.StringIO()):
            workspace = store.open_workspace(run)
            store.prepare_directory(run, store.decide_start(run, "auto"), workspace)
            workspace.close()
        if remaining := list(store.checkpoints_dir(run).glob(".*")):
            return before._replace(fault=f"{remaining[0].name} was not removed")
        return self._load()._replace(models=before.models)

    @property
    def num_loaded(self) -> int:
        """Number of different trees that were loaded."""
        return len(self._known)

    def _write(self, tree: Tree) -> None:
        shutil.rmtree(self._disk, ignore_errors=True)
        self._fill(self._disk, tree)

    def _fill(self, path: Path, tree: Tree) -> None:
        """Write a tree. Each file content is written only once, and files with equal content are
        hard links to the same file."""
        if isinstance(tree, tuple):
            path.mkdir()
            for name, below in tree:
                self._fill(path / name, below)
            return
        content = self._pool / xxhash.xxh3_128_hexdigest(tree)
        if not content.exists():
            content.write_bytes(tree)
        os.link(content, path)

    def _load(self) -> StartState:
        run = self._disk / RUN
        try:
            paths = sorted(store.checkpoints_dir(run).glob("*-????????"))
            for path in paths:
                read_manifest(path).verify()
            start = store.decide_start(run, "auto")
            models = tuple(int(p.name[6:]) for p in paths if p.name.startswith("model-"))
            return StartState(start.step, len(paths) - len(models), models, _states(start.full))
        except CheckpointError as error:
            return StartState(fault=str(error).removeprefix(f"{self._disk}/"))


def _states(full: Manifest | None) -> str:
    """Return the hash of all states of a full checkpoint."""
    digest = xxhash.xxh3_128()
    if full is not None:
        for state in ADAMW_STATES:
            whole = {name: torch.empty(shape) for name, shape in full.index().shapes.items()}
            read_whole(full, whole, state)
            for name in sorted(whole):
                digest.update(as_bytes(whole[name]))
    return digest.hexdigest()


class Promise(NamedTuple):
    """Checkpoints that must exist after a power cut.

    These checkpoints are a full checkpoint of `step` or a later step, at least `fulls` full
    checkpoints in total, and a model-only checkpoint of each step in `models`.
    """

    step: int = 0
    fulls: int = 0
    models: tuple[int, ...] = ()


def promises(calls: Sequence[Call], asynchronous: bool = False) -> Iterator[Promise]:
    """Yield, for each call, the promise that holds after the call.

    A save counts as complete when the metrics of the next step are written, or when a checkpoint
    that the save replaces is removed. For saves in the background, only the removal counts.
    """
    step, committed, models = 0, [0], dict[int, bool]()
    for call in calls:
        name = PurePath(call.path).name
        if call.op == "rename" and (renamed := _NAMES.fullmatch(PurePath(call.other).name)):
            number = int(call.other[-8:])
            if renamed[1] == "step":
                committed.append(number)
            else:
                models[number] = False
        if call.op == "rename" and _NAMES.fullmatch(name):  # the oldest checkpoint is removed
            step = committed[-1]
            if name.startswith("model-"):
                models.pop(int(name[6:]), None)
        if call.op == "write" and name == "metrics.jsonl" and not asynchronous:
            current = json.loads(call.data.splitlines()[-1])["step"]
            step = max(step, max(number for number in committed if number < current))
            models |= {number: True for number in models if number < current}
        fulls = min(store.KEPT_FULL, committed.index(step))
        yield Promise(step, fulls, tuple(n for n, returned in models.items() if returned))


def replay(
    calls: Sequence[Call],
    root: Path,
    samples: int,
    seed: int = 0,
    asynchronous: bool = False,
    max_faults: int = 100,
) -> Summary:
    """Cut the power after each call, and compare the states of the disk with the promises.

    A run must start from the promised checkpoint or from a newer checkpoint. The run must load the
    bits that the save of this checkpoint wrote.

    Args:
        calls: The recorded calls.
        root: The directory that contains the run directory.
        samples: Number of random states of the whole disk.
        seed: Seed of the random states.
        asynchronous: True if saves ran in the background.
        max_faults: Number of faults after which the replay ends.
    """
    summary, rng, disk = Summary(), random.Random(seed), Disk(str(root))
    with Loader() as loader:
        saved_states, pending = _read_saves(calls, root, loader)
        large = [n for n, count in enumerate(pending) if count > WINDOW] or range(len(calls))
        draws = Counter(rng.choices(large, k=samples))
        for number, (call, promise) in enumerate(
            zip(calls, promises(calls, asynchronous), strict=True)
        ):
            disk.apply(call)
            summary.moments += 1
            summary.windows += 0 < pending[number] <= WINDOW
            starts = [loader.load(tree) for tree in disk.trees(is_examined, rng, draws=100)]
            summary.states += len(starts)
            starts += [loader.start(disk.draw(rng)) for _ in range(draws[number])]
            summary.samples += draws[number]
            faults = {_fault_of(start, promise, saved_states) for start in starts}
            for fault in (faults | {_lost_metrics(disk, call)}) - {""}:
                summary.faults.append(f"after call {number} ({call.op} {call.path}): {fault}")
            if len(summary.faults) >= max_faults:
                break
        summary.most_pending, summary.different = max(pending), loader.num_loaded
    return summary


def _read_saves(
    calls: Sequence[Call], root: Path, loader: Loader
) -> tuple[dict[int, str], list[int]]:
    """Return two values: a dict that maps each step to the hash of the states that the save of the
    step wrote, and a list with the number of pending changes after each call."""
    disk, saved_states, pending = Disk(str(root)), {0: _states(None)}, []
    for call in calls:
        disk.apply(call)
        pending.append(disk.num_pending())
        if call.op == "rename" and "/step-" in call.other:
            start = loader.load(disk.current(is_examined))
            assert not start.fault and start.step == int(call.other[-8:]), start
            saved_states[start.step] = start.states
    return saved_states, pending


def _lost_metrics(disk: Disk, call: Call) -> str:
    """Return a message if a full checkpoint has its final name, but the metrics up to the
    checkpoint's step are not durable."""
    if call.op != "rename" or "/step-" not in call.other:
        return ""
    lines = disk.durable(PurePath(RUN, "metrics.jsonl")).splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    expected = list(range(1, int(call.other[-8:]) + 1))
    return "" if steps[: len(expected)] == expected else f"only metrics of {steps} are durable"


def _fault_of(start: StartState, promise: Promise, saved_states: dict[int, str]) -> str:
    """Return the broken promise; "" if there is none."""
    if start.fault:
        return start.fault
    if start.step < promise.step:
        return f"starts from step {start.step}, but the save of step {promise.step} had returned"
    if start.fulls < promise.fulls:
        return f"{start.fulls} full checkpoints instead of {promise.fulls}"
    if start.states != saved_states.get(start.step):
        return f"loads states of step {start.step} that no save wrote"
    if missing := set(promise.models) - set(start.models):
        return f"the models of {sorted(missing)} are missing"
    return ""
