"""Lets ranks of `optimus launch` fail from the inside.

Interpreters import this module if its folder is on PYTHONPATH.

The variable OPTIMUS_TEST_FAULTS names a file. Each of its lines has a kind of fault, the name of a
node, the number of a rank on this node, and a step: the rank has the fault in this update, or in
the next one that it does. "*" is any node or rank. The kinds are:

- nan: the output of the rank's first block is NaN.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_FAULTS = "OPTIMUS_TEST_FAULTS"
_MODULE = "optimus.train.loop"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `optimus.train.loop` and changes it after it is loaded."""

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
    update = loop.Run.update

    def update_with_faults(run: Any, step: int) -> None:
        for kind in _due(run.world.launch.local_rank, step):
            _FAULT[kind](run)
        update(run, step)

    loop.Run.update = update_with_faults


def _due(local_rank: int, step: int) -> list[str]:
    """Return the kinds of faults that this rank has in update `step`."""
    try:
        lines = Path(os.environ[_FAULTS]).read_text().splitlines()
    except OSError:
        return []
    due = []
    for kind, node, rank, first in map(str.split, lines):
        is_here = node in ("*", os.environ.get("OPTIMUS_NODE")) and rank in ("*", str(local_rank))
        if is_here and step >= int(first):
            due.append(kind)
    return due


def _nan(run: Any) -> None:
    block = next(iter(run.model.blocks.values()))
    block.register_forward_hook(lambda module, inputs, out: (out[0] * float("nan"), out[1]))


_FAULT = {"nan": _nan}

if _FAULTS in os.environ:
    sys.meta_path.insert(0, _Finder())
