"""Fixtures for tests of kernels: small sources, and the CPU kernels of each instruction set."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from optimus_kernels import backend, build

SOURCE = """
#include "interface.h"
extern "C" __attribute__((visibility("default"))) int optimus_kernels_abi(void) {
  return ABI_OF_THIS_LIBRARY;
}
"""


@pytest.fixture
def small_csrc(tmp_path, monkeypatch) -> Iterator[Path]:
    """Replace the kernel sources by a few lines, use an empty cache and select no backend."""
    csrc = tmp_path / "csrc"
    for folder in ("include", "cpu", "cuda", "sycl"):
        (csrc / folder).mkdir(parents=True)
    header = csrc / "include" / "interface.h"
    header.write_text("#define OPTIMUS_ABI 7\n#define ABI_OF_THIS_LIBRARY OPTIMUS_ABI\n")
    (csrc / "cpu" / "kernels.cpp").write_text(SOURCE)
    (csrc / "cuda" / "kernels.cu").write_text(SOURCE)
    monkeypatch.setattr(build, "csrc", lambda: csrc)
    monkeypatch.setenv("OPTIMUS_KERNELS_CACHE", str(tmp_path / "cache"))
    for name in ("OPTIMUS_KERNELS", "CXX", "NVCC", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(backend, "_configured", "auto")
    monkeypatch.setattr(backend, "_active", {})
    build.source_hash.cache_clear()
    yield csrc
    build.source_hash.cache_clear()


@pytest.fixture
def filled() -> Iterator[None]:
    """Make torch fill new tensors with NaN, so that tests detect elements that are not written."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


OLD_COMPILER = """#!/bin/sh
case "$*" in *-march=x86-64-v*)
  echo "cc1plus: error: bad value ('x86-64-v3') for '-march=' switch" >&2; exit 1;;
esac
exec g++ "$@"
"""


def old_compiler(folder: Path) -> str:
    """Write a fake compiler that refuses -march=x86-64-v3 and -v4, and return its path."""
    path = folder / "old-g++"
    path.write_text(OLD_COMPILER)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def too_old(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", old_compiler(tmp_path))


@pytest.fixture(scope="module", params=["portable", "portable alone", "avx2", "avx512"])
def cpu_library(request, tmp_path_factory) -> ctypes.CDLL:
    """Return the CPU kernels of one instruction set. `portable alone` is a build without AVX."""
    folder = tmp_path_factory.mktemp("isa")
    library = _build_portable(folder) if "alone" in request.param else backend.active("cpu").library
    if library is None:
        pytest.skip(f"no CPU kernels: {backend.active('cpu').why_not}")
    # A loaded library selects its instruction set only once, so each set needs a copy.
    path = shutil.copy(library._name, folder / "copy.so")
    isa = request.param.removesuffix(" alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTIMUS_CPU_ISA", isa)
        loaded = ctypes.CDLL(str(path))
        loaded.optimus_cpu_isa.restype = ctypes.c_char_p
        chosen = loaded.optimus_cpu_isa().decode()
    if chosen != isa:
        pytest.skip(f"this processor has no {isa}")
    return loaded


def _build_portable(folder: Path) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on PATH")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", old_compiler(folder))
        patch.setenv("OPTIMUS_KERNELS_CACHE", str(folder / "cache"))
        return backend.load(build.build("cpu"))
