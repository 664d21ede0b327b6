"""Run csrc/cuda and csrc/sycl on a CPU.

CUDA: g++ compiles kernels.cu with cuda_on_cpu/cuda_runtime.h, which runs threads as fibers.

SYCL: the wheels of `pip install optimus[sycl]` contain headers, the OpenCL device for CPUs, and
DPC++ as a library of SYCL's kernel_compiler extension, but no compiler driver. g++ compiles the
launchers of kernels.sycl with sycl_proof/launch.h in place of launch.h. At run time,
sycl_proof/proof.cpp compiles the functors of the same file with DPC++, and launches them with the
requested sub-group size.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from optimus_kernels import build, sycl_build
from optimus_kernels.library import Native

_CUDA = Path(__file__).resolve().parent / "cuda_on_cpu"


class CudaOnCpu(Native):
    """Launchers of kernels.cu for tensors in host memory. A launcher returns after the kernel has
    ended."""

    def __init__(self, source: Path, work: Path) -> None:
        library = work / "libcuda_on_cpu.so"
        # -Bsymbolic: a process can load several such libraries. Each uses its separate global
        # variables.
        command = [
            *("g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"),
            *("-Wall", "-Wextra", "-Werror", "-DOPTIMUS_NO_SIMD", "-fno-gnu-unique"),
            *("-Wl,-Bsymbolic", "-I", _CUDA, "-x", "c++", source, "-o", library),
        ]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        super().__init__(ctypes.CDLL(str(library)), "cpu")


_SYCL = Path(__file__).resolve().parent / "sycl_proof"
LANES = (16, 32)
_LOG_BYTES = 1 << 16


def find_wheels() -> Path | str:
    """Return the prefix (path) of Intel's SYCL and OpenCL runtimes, or a text with the reason why
    the runtimes cannot be used.

    OPTIMUS_SYCL_PREFIX can name the prefix of another environment.
    """
    named = os.environ.get("OPTIMUS_SYCL_PREFIX")
    try:
        files = [] if named else importlib.metadata.files("intel-sycl-rt") or []
    except importlib.metadata.PackageNotFoundError:
        return "intel-sycl-rt is not installed; `make test-sycl` does it"
    prefixes = [Path(f.locate()).resolve().parents[1] for f in files if f.name == "libsycl.so"]
    prefix = Path(named) if named else prefixes[0]
    needed = ("lib/libsycl.so", "lib/libsycl-jit.so", "lib/libintelocl.so", "include/sycl/sycl.hpp")
    missing = [name for name in needed if not (prefix / name).exists()]
    if missing:
        return f"{prefix} lacks {', '.join(missing)}; install optimus[sycl]"
    return prefix if shutil.which("g++") else "g++ is not on PATH"


def compile_launchers(prefix: Path, csrc: Path, into: Path) -> Path:
    """Compile kernels.sycl with the host's compiler, with warnings as errors. Return the shared
    library."""
    library = into / "libsycl_proof.so"
    command = [
        *("g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"),
        *("-Wall", "-Wextra", "-Werror", "-DSYCL_DISABLE_FSYCL_SYCLHPP_WARNING"),
        "-DOPTIMUS_NO_SIMD",
        f'-DOPTIMUS_SYCL_LAUNCH="{_SYCL / "launch.h"}"',
        *("-I", csrc, "-isystem", prefix / "include", "-isystem", prefix / "include/std"),
        *(_SYCL / "proof.cpp", "-x", "c++", csrc / "sycl/kernels.sycl", "-o", library),
        *("-L", prefix / "lib", "-lsycl", f"-Wl,-rpath,{prefix / 'lib'}"),
    ]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return library


class DeviceCodeError(Exception):
    """DPC++ refuses the source code. The message is DPC++'s message."""


class SyclOnCpu(Native):
    """Launchers of csrc/sycl for tensors in host memory."""

    def __init__(self, prefix: Path, work: Path) -> None:
        # The OpenCL loader reads the variable once, at the first use of the library.
        os.environ["OCL_ICD_FILENAMES"] = str(prefix / "lib/libintelocl.so")
        self.source = build.csrc() / "sycl/kernels.sycl"
        self._proof = ctypes.CDLL(str(compile_launchers(prefix, build.csrc(), work)))
        self._proof.proof_queue.restype = ctypes.c_void_p
        super().__init__(self._proof, "cpu")
        self._queue = self._proof.proof_queue()

    @property
    def device(self) -> str:
        """Runtime and processor that run the functors, as SYCL names them."""
        log = self._log()
        self._proof.proof_device(log, _LOG_BYTES)
        return log.value.decode()

    @property
    def num_functors(self) -> int:
        """Number of functors that the launchers use. Each element type and each vector width has a
        separate functor."""
        return self._proof.proof_num_functors()

    def compile(self, source: Path, more: Sequence[str] = ()) -> None:
        """Compile a file with the flags of icpx. Raise DeviceCodeError if DPC++ refuses the
        file."""
        self._call_compiler("proof_compile", str(source).encode(), options=more)

    def build(self, source: Path, functor: str = "") -> None:
        """Compile the functors whose names contain `functor`. Raise DeviceCodeError if DPC++
        refuses the source."""
        csrc = source.parents[1]
        options = (f'-DOPTIMUS_SYCL_LAUNCH="{_SYCL / "device_only.h"}"', f"-I{csrc}")
        self._call_compiler("proof_build", str(source).encode(), functor.encode(), options=options)

    def use(self, source: Path, lanes: int) -> None:
        """Launch the functors built from `source` in sub-groups of `lanes` from now on."""
        self._proof.proof_use(str(source).encode(), lanes)

    def call(self, name, on, *arguments) -> None:
        code = self._functions[name](*arguments, self._queue)
        if code:
            raise RuntimeError(f"optimus_{name} failed: {code}")
        log = self._log()
        assert self._proof.proof_wait(log, _LOG_BYTES) == 0, log.value.decode()

    def _call_compiler(self, function: str, *words: bytes, options: Sequence[str]) -> None:
        # The production flags without those that only the driver of icpx accepts.
        flags = [flag for flag in sycl_build.FLAGS if not flag.startswith(("-foffload", "-std"))]
        texts = [text.encode() for text in (*flags, *options)]
        array, log = (ctypes.c_char_p * len(texts))(*texts), self._log()
        code = getattr(self._proof, function)(*words, array, len(texts), log, _LOG_BYTES)
        if code:
            raise DeviceCodeError(log.value.decode(errors="replace"))

    @staticmethod
    def _log() -> ctypes.Array[ctypes.c_char]:
        return ctypes.create_string_buffer(_LOG_BYTES)
