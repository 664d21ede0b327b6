"""Lets ranks of `optimus launch` fail from the inside.

Interpreters import this module if its folder is on PYTHONPATH.

The variable OPTIMUS_TEST_FAULTS names a file. Each line of this file has a kind of fault, the name
of a node, the number of a rank on this node, and a step. For the node and the rank, "*" is any node
or rank. For the rank, "g2" is rank 2 of the run. The rank has the fault in the update of the step.
If the rank has already passed this step, it has the fault in its next update. The kinds are:

- nan: the output of the rank's first block is NaN;
- data: in exactly this step, the embedding layer returns NaN for the first microbatch;
- skip: the update of exactly this step is skipped;
- raise: an error that Optimus does not expect;
- exit: the process ends with exit status 17;
- memory: the kernel refuses memory;
- data-error: a read of the data fails;
- bad-save: the checkpoint of exactly this step has weights so large that they give NaN;
- kill-in-update, kill-in-save, kill-in-load: SIGKILL within 50 ms after the start of an update, of
  a save, or of the load of a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.abc
import importlib.machinery
import os
import random
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_FAULTS = "OPTIMUS_TEST_FAULTS"
_MODULE = "optimus.train.loop"


class _Finder(importlib.abc.MetaPathFinder):
    """Import finder that changes the module `optimus.train.loop` after the module is loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            _change(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


def _change(loop: Any) -> None:
    update, load, save = loop.Run.update, loop.load_start, loop.Saves.after

    def update_with_faults(run: Any, step: int) -> float:
        due = _due(run.world.launch, step)
        for kind in due:
            if kind in _IN_UPDATE:
                _IN_UPDATE[kind](run)
        if due.get("skip") == step:
            run.updater._skipped_steps |= {step}
        with _broken_data(run, step) if due.get("data") == step else contextlib.nullcontext():
            return update(run, step)

    def load_with_faults(config: Any, world: Any, *more: Any) -> Any:
        if "kill-in-load" in _due(world.launch, sys.maxsize):
            _kill_soon()
        return load(config, world, *more)

    def save_with_faults(saves: Any, step: int, last: bool) -> None:
        due = _due(saves._world.launch, step)
        is_saved = step % saves._config.checkpoint.interval == 0
        if "kill-in-save" in due and is_saved:
            _kill_soon()
        if due.get("bad-save") != step:
            save(saves, step, last)
            return
        masters = [shard.states["master"] for shard in saves._states.shards()]
        copies = [master.clone() for master in masters]
        for master in masters:
            master.mul_(1e30)
        save(saves, step, last)
        for master, copy in zip(masters, copies, strict=True):
            master.copy_(copy)

    loop.Run.update, loop.load_start = update_with_faults, load_with_faults
    loop.Saves.after = save_with_faults


def _due(launch: Any, step: int) -> dict[str, int]:
    """Return the faults that this rank has in update `step`: a dict from the kind of a fault to the
    first step in which the fault can occur."""
    try:
        lines = Path(os.environ[_FAULTS]).read_text().splitlines()
    except OSError:
        return {}
    due = {}
    for kind, node, rank, first in map(str.split, lines):
        is_here = node in ("*", os.environ.get("OPTIMUS_NODE"))
        is_here &= rank in ("*", str(launch.local_rank), f"g{launch.rank}")
        if is_here and step >= int(first):
            due[kind] = int(first)
    return due


def _nan(run: Any) -> None:
    block = next(iter(run.model.blocks.values()))
    block.register_forward_hook(lambda module, inputs, out: (out[0] * float("nan"), out[1]))


@contextlib.contextmanager
def _broken_data(run: Any, step: int) -> Iterator[None]:
    start = (step - 1) * run.plan.batch.instances
    bad = run.plan.data.training.read(start, start + run.plan.batch.microbatch_size)

    def break_bad(module: Any, inputs: Any, out: Any) -> Any:
        return out * float("nan") if (inputs[0].numpy() == bad).all() else None

    handle = run.model.embed.register_forward_hook(break_bad)
    try:
        yield
    finally:
        handle.remove()


def _raise(run: Any) -> None:
    raise RuntimeError("a defect of the program")


def _exit(run: Any) -> None:
    os._exit(17)


def _exhaust_memory(run: Any) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    bytearray(1 << 30)


def _fail_to_read(run: Any) -> None:
    def microbatches(step: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "data/train/shard-00000.bin")

    run.loader.microbatches = microbatches


def _kill_soon(run: Any = None) -> None:
    delay_s = 0.05 * random.Random(os.getpid()).random()
    threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


_IN_UPDATE = {
    "nan": _nan,
    "raise": _raise,
    "exit": _exit,
    "memory": _exhaust_memory,
    "data-error": _fail_to_read,
    "kill-in-update": _kill_soon,
}

if _FAULTS in os.environ:
    sys.meta_path.insert(0, _Finder())
