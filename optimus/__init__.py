"""Optimus pretrains Mixture-of-Experts and dense language models. Importing it imports no torch."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {"load_model": "optimus.evaluate.load_model"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name == "hf":
        return importlib.import_module("optimus.hf")
    raise AttributeError(f"module 'optimus' has no attribute {name!r}")
