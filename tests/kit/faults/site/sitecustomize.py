"""Makes ranks of `optimus launch` compute NaN on the nodes that a file names.

Interpreters import this module if its folder is on PYTHONPATH.

The variable OPTIMUS_TEST_NAN names the file. Each of its lines is a node and a step: the first rank
of the node that reaches this step or a later one computes NaN in the first block.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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

    def update_with_nan(run: Any, step: int) -> None:
        if run.world.launch.local_rank == 0 and _is_due(step):
            block = next(iter(run.model.blocks.values()))
            block.register_forward_hook(lambda module, inputs, out: (out[0] * float("nan"), out[1]))
        update(run, step)

    loop.Run.update = update_with_nan


def _is_due(step: int) -> bool:
    try:
        lines = Path(os.environ["OPTIMUS_TEST_NAN"]).read_text().splitlines()
    except OSError:
        return False
    pairs = [line.split() for line in lines]
    return any(node == os.environ.get("OPTIMUS_NODE") and step >= int(at) for node, at in pairs)


if "OPTIMUS_TEST_NAN" in os.environ:
    sys.meta_path.insert(0, _Finder())
