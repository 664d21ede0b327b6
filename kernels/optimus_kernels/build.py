"""Compiles `csrc` for a backend: what is built, for what, and with which command.

Every backend becomes one shared library with the C interface of csrc/include/interface.h, so that
neither the cpu nor the cuda build needs torch's headers.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from optimus_kernels import cache, sycl_build
from optimus_kernels.cache import Entry, KernelError

BACKENDS = ("sycl", "cuda", "cpu")
SUFFIX = {"sycl": ".sycl", "cuda": ".cu", "cpu": ".cpp"}

CPU_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
]
# Runtime dispatch: a file named *_avx2.cpp or *_avx512.cpp is compiled for such machines and called
# only there; on another architecture it is left out.
CPU_FILE_FLAGS = {
    "_avx2": ("-march=x86-64-v3",),
    "_avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
}
CUDA_ARCHS = ("80", "90")
CUDA_FLAGS = ["-std=c++17", "-O3", "-shared", "-cudart", "static", "-Xcompiler", "-fPIC"]
_COMPILE_S = 1800.0


@dataclass(frozen=True)
class Target:
    """Everything that a compiled library depends on, besides the C interface's version."""

    backend: str
    sources: str
    """Hash of every file of csrc that the backend reads."""
    torch: str
    machine: str
    """The processor's architecture, such as x86_64."""
    arch: str
    """The devices compiled for, such as sm_80,sm_90."""
    flags: str
    compiler: str
    """First line of its --version."""

    @property
    def name(self) -> str:
        return f"{self.backend}-{cache.key_of(asdict(self))}"


def csrc() -> Path:
    """The sources: beside the package in a checkout, inside it once installed."""
    here = Path(__file__).resolve().parent
    inside = here / "csrc"
    return inside if inside.is_dir() else here.parent / "csrc"


def sources(backend: str) -> list[Path]:
    """The backend's own files to compile. Raises KernelError if there are none."""
    files = sorted((csrc() / backend).glob(f"*{SUFFIX[backend]}"))
    if backend == "cpu" and platform.machine() not in ("x86_64", "AMD64"):
        files = [file for file in files if not _file_flags(file)]
    if not files:
        raise KernelError(f"{csrc() / backend} holds no *{SUFFIX[backend]} files")
    return files


def interface_version() -> int:
    """OPTIMUS_ABI of csrc/include/interface.h, which every library reports."""
    text = (csrc() / "include" / "interface.h").read_text()
    found = re.search(r"define OPTIMUS_ABI (\d+)", text)
    assert found, "interface.h does not define OPTIMUS_ABI"
    return int(found[1])


@functools.cache
def source_hash(backend: str) -> str:
    """Of the backend's files and the shared headers, names included."""
    digest = hashlib.sha256()
    folders = (csrc() / "include", csrc() / backend)
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                digest.update(f"{path.relative_to(csrc())}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def fits(entry: Entry) -> str:
    """Why a compiled library cannot be used here; "" if it can. The compiler is left aside: a
    library may come from another machine."""
    own = {
        "sources": (source_hash(entry.info["backend"]), "other kernel sources"),
        "torch": (torch.__version__, f"torch {entry.info.get('torch')}, this is"),
        "machine": (platform.machine(), f"{entry.info.get('machine')} processors, this is"),
        "arch": (arch(entry.info["backend"]), f"{entry.info.get('arch')}, wanted is"),
        "flags": (flags(entry.info["backend"]), "other compiler flags"),
    }
    for field, (here, text) in own.items():
        if entry.info.get(field) != here:
            shown = f" {here}" if field in ("torch", "machine", "arch") else ""
            return f"built for {text}{shown}" if shown else f"built from {text}"
    return ""


def prebuilt(backend: str, key: str = "") -> Entry | None:
    """A compiled library that fits, of whatever compiler: the one named `key`, or the newest."""
    fitting = [entry for entry in cache.entries(backend) if not fits(entry)]
    return next((entry for entry in fitting if entry.key == key), next(iter(fitting), None))


def build(backend: str) -> Entry:
    """Compile for `backend`, or find it done. Raises KernelError with the reason if it cannot."""
    target, compiler = plan(backend)
    compilers = {"cpu": _compile_cpu, "cuda": _compile_cuda, "sycl": _compile_sycl}
    info = {**asdict(target), "compiler_path": compiler[0]}
    return cache.install(target.name, lambda work: compilers[backend](compiler, work), info)


def plan(backend: str) -> tuple[Target, list[str]]:
    """What `build` would make here, and the compiler's command. Raises KernelError."""
    compiler = find_compiler(backend)
    sources(backend)
    target = Target(
        backend=backend,
        sources=source_hash(backend),
        torch=torch.__version__,
        machine=platform.machine(),
        arch=arch(backend),
        flags=flags(backend),
        compiler=compiler_version(tuple(compiler)),
    )
    return target, compiler


def arch(backend: str) -> str:
    """The devices that a library is compiled for."""
    if backend == "cuda":
        return ",".join(f"sm_{number}" for number in CUDA_ARCHS)
    return sycl_build.arch_list() if backend == "sycl" else "generic"


def flags(backend: str) -> str:
    """The flags in one string, for the key."""
    if backend == "cpu":
        return " ".join([*CPU_FLAGS, *(f for part in CPU_FILE_FLAGS.values() for f in part)])
    return " ".join(CUDA_FLAGS if backend == "cuda" else sycl_build.FLAGS)


def find_compiler(backend: str) -> list[str]:
    """The command that compiles for `backend`. Raises KernelError if there is none."""
    if backend == "sycl":
        return sycl_build.find_compiler()
    names = {"cpu": ("g++", "clang++", "c++"), "cuda": ("nvcc",)}[backend]
    variable = {"cpu": "CXX", "cuda": "NVCC"}[backend]
    named = os.environ.get(variable)
    if named:
        command = shlex.split(named)
        if shutil.which(command[0]) is None:
            raise KernelError(f"{variable}={named}: no such compiler")
        return command
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    more = [f"{home}/bin/nvcc"] if backend == "cuda" else []
    for name in (*names, *more):
        path = shutil.which(name)
        if path:
            return [path]
    raise KernelError(
        f"no compiler: {' or '.join(names)} is not on PATH; install it or set {variable}"
    )


@functools.cache
def compiler_version(compiler: tuple[str, ...]) -> str:
    """What the compiler calls itself. Raises KernelError if it does not run."""
    text = _run([*compiler, "--version"], limit_s=60)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise KernelError(f"{shlex.join(compiler)} --version says nothing; is it a compiler?")
    # nvcc's release stands on a later line than its name.
    return next((line for line in lines if "release" in line.lower()), lines[0])


def _compile_cpu(compiler: Sequence[str], work: Path) -> Path:
    objects = []
    for source in sources("cpu"):
        out = work / f"{source.stem}.o"
        include = ("-I", str(csrc() / "include"))
        _run([*compiler, *CPU_FLAGS, *_file_flags(source), *include, "-c", str(source), "-o", out])
        objects.append(out)
    library = work / "liboptimus_cpu.so"
    # Not -fopenmp: it would name the system's OpenMP, and two in a process are two thread pools.
    _run([*compiler, "-shared", *objects, *torch_openmp(), "-o", library])
    return library


def torch_openmp() -> list[Path]:
    """The OpenMP runtime that torch has loaded: linked by its own name (wheels rename it), so that
    kernels run on torch's threads. Raises KernelError where torch has none."""
    folder = Path(torch.__file__).parent
    found = sorted({*folder.glob("lib/lib*omp*.so*"), *folder.parent.glob("torch.libs/lib*omp*")})
    if found:
        return found[:1]
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    mapped = {line.split()[-1] for line in lines if re.search(r"/lib[a-z]*omp[^/]*\.so", line)}
    if not mapped:
        raise KernelError("torch has no OpenMP runtime whose threads the kernels could use")
    return [Path(min(mapped))]


def _compile_cuda(compiler: Sequence[str], work: Path) -> Path:
    library = work / "liboptimus_cuda.so"
    codes = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in CUDA_ARCHS]
    newest = CUDA_ARCHS[-1]
    codes.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")  # for later cards
    include = ("-I", str(csrc() / "include"))
    _run([*compiler, *CUDA_FLAGS, *codes, *include, *sources("cuda"), "-o", library])
    return library


def _compile_sycl(compiler: Sequence[str], work: Path) -> Path:
    command, environ = sycl_build.command(sources("sycl"), csrc() / "include", work)
    _run(command, environ=environ)
    return sycl_build.built_library(work)


def _file_flags(source: Path) -> tuple[str, ...]:
    for suffix, more in CPU_FILE_FLAGS.items():
        if source.stem.endswith(suffix):
            return more
    return ()


def _run(
    command: Sequence[object], limit_s: float = _COMPILE_S, environ: dict[str, str] | None = None
) -> str:
    """Its standard output. Raises KernelError with the first line that tells of an error."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            env={**os.environ, "LC_ALL": "C", **(environ or {})},
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise KernelError(f"{words[0]} does not run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise KernelError(f"{words[0]} took more than {limit_s:.0f} s") from error
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower()] or lines or ["no message"]
        raise KernelError(
            f"{Path(words[0]).name} ended with {done.returncode}: {telling[0].strip()}"
        )
    return done.stdout
