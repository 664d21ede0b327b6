"""Which forms of grouped products this torch has on a CPU; torch 2.8 has none of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from optimus_kernels.grouped_mm import set_form, torch_form_works

TORCH_FORM_WORKS = torch_form_works("cpu", torch.float32)
needs_torch_form = pytest.mark.skipif(
    not TORCH_FORM_WORKS, reason=f"torch {torch.__version__} has no grouped products on CPUs"
)


@contextlib.contextmanager
def in_form(name: str) -> Iterator[None]:
    set_form(name)
    try:
        yield
    finally:
        set_form("auto")


FORMS = ("loop", pytest.param("torch", marks=needs_torch_form))
