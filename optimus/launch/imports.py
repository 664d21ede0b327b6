"""Context manager that makes imports of torch faster."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Context manager that disables Python's garbage collection.

    In a run, garbage collections take a tenth of the processor time of the imports, and a fifth of
    the processor time of a profile of activations (optimus/rank/profile.py). These collections find
    little garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
