"""Optimus pretrains Mixture-of-Experts and dense language models.

Importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "load_model":
        return importlib.import_module("optimus.evaluate").load_model
    if name == "hf":
        return importlib.import_module("optimus.hf")
    if name == "offload":
        return importlib.import_module("optimus.offloading").offload
    raise AttributeError(f"module 'optimus' has no attribute {name!r}")
