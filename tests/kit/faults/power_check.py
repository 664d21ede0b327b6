"""Whether a run finds its way from all that a power cut may leave of its checkpoints."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import NamedTuple

import torch
import xxhash

from optimus.checkpoint import store
from optimus.checkpoint.format import ADAMW_STATES, Manifest, read_manifest
from optimus.errors import CheckpointError
from optimus.io.safetensors import as_bytes
from tests.kit.faults.disk import Call
from tests.kit.faults.power_loss import Disk, Tree
from tests.kit.runs.results import read_whole

RUN = "run"
"""The run directory's name, in a directory that is durable."""
_NAMES = re.compile(r"(step|model)-\d{8}")
WINDOW = 12
"""Un-synced operations up to which every subset of them is tried."""


def wanted(path: PurePath) -> bool:
    """What a run that starts looks at: its checkpoints, under their final names."""
    parts = path.parts
    return parts[:2] == (RUN, "checkpoints")[: len(parts)] and (
        len(parts) < 3 or _NAMES.fullmatch(parts[2]) is not None
    )


def tree_of(path: Path) -> Tree:
    """What lies at a path."""
    if path.is_dir():
        return tuple((one.name, tree_of(one)) for one in sorted(path.iterdir()))
    return path.read_bytes()


class Found(NamedTuple):
    """What a look at one state of the disk told."""

    step: int = 0
    fulls: int = 0
    """How many full checkpoints are there."""
    models: tuple[int, ...] = ()
    states: str = ""
    """The hash of all states that are loaded."""
    fault: str = ""


@dataclass
class Summary:
    """What a replay came to."""

    moments: int = 0
    windows: int = 0
    """Moments with 1 to WINDOW un-synced operations."""
    most_pending: int = 0
    states: int = 0
    """After power cuts at all moments, of all that can be seen of a checkpoint."""
    different: int = 0
    samples: int = 0
    """Of whole disks, each also prepared as a run that starts does."""
    faults: list[str] = field(default_factory=list)


class Loader:
    """Puts states of a disk where a run can look at them: in memory, where fsync costs nothing."""

    def __init__(self) -> None:
        memory = "/dev/shm"
        place = memory if os.access(memory, os.W_OK) else None
        self._scratch = tempfile.TemporaryDirectory(prefix="power-loss-", dir=place)
        self._pool, self._place = (Path(self._scratch.name, name) for name in ("contents", "disk"))
        self._pool.mkdir()
        self._known: dict[Tree, Found] = {}

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    def look(self, tree: Tree) -> Found:
        """What a run would start from; every name of ours must have all that belongs to it."""
        if tree not in self._known:
            self._put(tree)
            self._known[tree] = self._look()
        return self._known[tree]

    def start_from(self, tree: Tree) -> Found:
        """The same of a whole disk, behind what a run does before it trains."""
        self._put(tree)
        before = self._look()
        if before.fault:
            return before
        run = self._place / RUN
        with contextlib.redirect_stderr(io.StringIO()):  # models behind the start are set aside
            store.prepare_directory(run, store.decide_start(run, "auto"))
        left = list(store.checkpoints_dir(run).glob(".*"))
        if left:
            return before._replace(fault=f"{left[0].name} is left")
        return self._look()._replace(models=before.models)

    @property
    def num_looks(self) -> int:
        return len(self._known)

    def _put(self, tree: Tree) -> None:
        shutil.rmtree(self._place, ignore_errors=True)
        self._fill(self._place, tree)

    def _fill(self, path: Path, tree: Tree) -> None:
        """Files are links to contents that were written once."""
        if isinstance(tree, tuple):
            path.mkdir()
            for name, below in tree:
                self._fill(path / name, below)
            return
        content = self._pool / xxhash.xxh3_128_hexdigest(tree)
        if not content.exists():
            content.write_bytes(tree)
        os.link(content, path)

    def _look(self) -> Found:
        run = self._place / RUN
        try:
            here = sorted(store.checkpoints_dir(run).glob("*-????????"))
            for path in here:
                read_manifest(path).verify()
            start = store.decide_start(run, "auto")
            models = tuple(int(p.name[6:]) for p in here if p.name.startswith("model-"))
            return Found(start.step, len(here) - len(models), models, _states(start.full))
        except CheckpointError as error:
            return Found(fault=str(error).removeprefix(f"{self._place}/"))


def _states(full: Manifest | None) -> str:
    """The hash of every state that is loaded."""
    digest = xxhash.xxh3_128()
    for state in ADAMW_STATES if full else ():
        whole = {name: torch.empty(shape) for name, shape in full.index().shapes.items()}
        read_whole(full, whole, state)
        for name in sorted(whole):
            digest.update(as_bytes(whole[name]))
    return digest.hexdigest()


class Promise(NamedTuple):
    """What must be there at a moment: the save of `step` and those of `models` have returned, and
    so many full ones are kept."""

    step: int = 0
    fulls: int = 0
    models: tuple[int, ...] = ()


def promises(calls: Sequence[Call], asynchronous: bool = False) -> Iterator[Promise]:
    """After each call. A save has returned once the next step is told, or something that it
    replaces goes; one in the background only by the latter."""
    step, sealed, models = 0, [0], {}
    for call in calls:
        name = PurePath(call.path).name
        if call.op == "rename" and (renamed := _NAMES.fullmatch(PurePath(call.other).name)):
            number = int(call.other[-8:])
            if renamed[1] == "step":
                sealed.append(number)
            else:
                models[number] = False
        if call.op == "rename" and _NAMES.fullmatch(name):  # the oldest goes
            step = sealed[-1]
            models.pop(int(name[6:]) if name.startswith("model-") else None, None)
        if call.op == "write" and name == "metrics.jsonl" and not asynchronous:
            told = json.loads(call.data.splitlines()[-1])["step"]
            step = max(step, max(number for number in sealed if number < told))
            models |= {number: True for number in models if number < told}
        fulls = min(store.KEPT_FULL, sealed.index(step))
        yield Promise(step, fulls, tuple(n for n, returned in models.items() if returned))


def replay(
    calls: Sequence[Call],
    root: Path,
    samples: int,
    seed: int = 0,
    asynchronous: bool = False,
    max_faults: int = 100,
) -> Summary:
    """Cut the power after every call: every state that the checkpoints may be in, and `samples` of
    the whole disk. The loader must find what was promised, or what is newer, and nothing else.
    Ends with `max_faults`."""
    with Loader() as loader:
        return _replay(calls, root, loader, samples, seed, asynchronous, max_faults)


def _replay(
    calls: Sequence[Call],
    root: Path,
    loader: Loader,
    samples: int,
    seed: int,
    asynchronous: bool,
    max_faults: int,
) -> Summary:
    summary, rng, disk = Summary(), random.Random(seed), Disk(str(root))
    truth, pending = _truth(calls, root, loader)
    beyond = [n for n, count in enumerate(pending) if count > WINDOW] or range(len(calls))
    drawn = rng.choices(beyond, k=samples)
    drawn = {n: drawn.count(n) for n in set(drawn)}
    for number, (call, promise) in enumerate(
        zip(calls, promises(calls, asynchronous), strict=True)
    ):
        disk.apply(call)
        summary.moments += 1
        summary.windows += 0 < pending[number] <= WINDOW
        trees = disk.trees(wanted, rng, draws=100)
        found = [loader.look(tree) for tree in trees]
        summary.states += len(found)
        wholes = [disk.draw(rng) for _ in range(drawn.get(number, 0))]
        found += [loader.start_from(tree) for tree in wholes]
        summary.samples += len(wholes)
        faults = {_judge(one, promise, truth) for one in found} | {_lost_metrics(disk, call)}
        for fault in faults - {""}:
            summary.faults.append(f"behind call {number} ({call.op} {call.path}): {fault}")
        if len(summary.faults) >= max_faults:
            break
    summary.most_pending, summary.different = max(pending), loader.num_looks
    return summary


def _truth(calls: Sequence[Call], root: Path, loader: Loader) -> tuple[dict[int, str], list[int]]:
    """By step, the states as its save wrote them; and the un-synced operations behind each call."""
    disk, truth, pending = Disk(str(root)), {0: _states(None)}, []
    for call in calls:
        disk.apply(call)
        pending.append(disk.num_pending())
        if call.op == "rename" and "/step-" in call.other:
            found = loader.look(disk.now(wanted))
            assert not found.fault and found.step == int(call.other[-8:]), found
            truth[found.step] = found.states
    return truth, pending


def _lost_metrics(disk: Disk, call: Call) -> str:
    """Once a full checkpoint has its name, the metrics up to its step must be durable."""
    if call.op != "rename" or "/step-" not in call.other:
        return ""
    lines = disk.durable(PurePath(RUN, "metrics.jsonl")).splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    wanted = list(range(1, int(call.other[-8:]) + 1))
    return "" if steps[: len(wanted)] == wanted else f"metrics only of steps {steps} are durable"


def _judge(found: Found, promise: Promise, truth: dict[int, str]) -> str:
    """What is wrong, or nothing."""
    if found.fault:
        return found.fault
    if found.step < promise.step:
        return f"starts from step {found.step}, though that of {promise.step} had returned"
    if found.fulls < promise.fulls:
        return f"{found.fulls} full checkpoints are there, though {promise.fulls} are kept"
    if found.states != truth.get(found.step):
        return f"loads for step {found.step} what no save wrote"
    if missing := set(promise.models) - set(found.models):
        return f"the models of {sorted(missing)} are gone"
    return ""
