"""Runs csrc/cuda on a CPU, for its logic: g++, cuda_on_cpu/cuda_runtime.h, threads as fibers."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from optimus_kernels.library import Native

HERE = Path(__file__).resolve().parent / "cuda_on_cpu"


class CudaOnCpu(Native):
    """The launchers of a kernels.cu, for tensors in a CPU's memory; they wait for their work."""

    def __init__(self, source: Path, work: Path) -> None:
        library = work / "libcuda_on_cpu.so"
        # -Bsymbolic: several such libraries may be loaded, each with globals of its own.
        command = [
            *("g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"),
            *("-Wall", "-Wextra", "-Werror", "-DOPTIMUS_NO_SIMD", "-fno-gnu-unique"),
            *("-Wl,-Bsymbolic", "-I", HERE, "-x", "c++", source, "-o", library),
        ]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        super().__init__(ctypes.CDLL(str(library)), "cpu")
