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
    "-fno-math-errno",
    "-fno-trapping-math",  # never -ffast-math: it breaks NaN
]
PORTABLE = "portable"
# A file named *_avx2.cpp is compiled for such machines alone; dispatch.cpp chooses when it runs.
CPU_ISAS = {
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
}
CPU_ALONE = ("-DOPTIMUS_PORTABLE_ALONE",)
"""Instead, for compilers that do not know them: before g++ 11 and clang++ 12."""
# A file named adamw_* rounds every product, as torch's optimizer does.
CPU_FILE_FLAGS = {"adamw": ("-ffp-contract=off",)}
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
    """What it calls itself, and the flags that CXX or NVCC holds beside its name."""

    @property
    def name(self) -> str:
        return f"{self.backend}-{cache.key_of(asdict(self))}"


def csrc() -> Path:
    """The sources, inside the package (in a checkout by a link)."""
    return Path(__file__).resolve().parent / "csrc"


def sources(backend: str) -> list[Path]:
    """The backend's own files to compile. Raises KernelError if there are none."""
    files = sorted((csrc() / backend).glob(f"*{SUFFIX[backend]}"))
    if not files:
        raise KernelError(f"{csrc() / backend} holds no *{SUFFIX[backend]} files")
    return files


def interface_functions() -> list[str]:
    """Return the names of the functions that every library exports."""
    text = (csrc() / "include" / "interface.h").read_text()
    return re.findall(r"^OPTIMUS_API .*?\b(optimus_\w+)\(", text, re.MULTILINE)


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
    backend, info = entry.info["backend"], entry.info
    alone = info.get("arch") == PORTABLE
    for field, here in (
        ("torch", torch.__version__),
        ("machine", platform.machine()),
        ("arch", arch(backend, alone)),
    ):
        if info.get(field) != here:
            return f"built for {field} {info.get(field)}, this is {here}"
    if info.get("sources") != source_hash(backend):
        return "built from other sources"
    if info.get("flags") not in [flags(backend, clang, alone) for clang in (False, True)]:
        return "built with other compiler flags"
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
    version = compiler_version(tuple(compiler))
    alone = backend == "cpu" and not _knows_isas(tuple(compiler))
    target = Target(
        backend=backend,
        sources=source_hash(backend),
        torch=torch.__version__,
        machine=platform.machine(),
        arch=arch(backend, alone),
        flags=flags(backend, is_clang(version), alone),
        compiler=" ".join([version, *compiler[1:]]),
    )
    return target, compiler


def arch(backend: str, alone: bool = False) -> str:
    """The devices, or instruction sets, that a library is compiled for; `alone`: of the latter, the
    portable one only."""
    if backend == "cuda":
        return ",".join(f"sm_{number}" for number in CUDA_ARCHS)
    if backend == "sycl":
        return sycl_build.arch_list()
    return PORTABLE if alone else ",".join([PORTABLE, *CPU_ISAS])


def flags(backend: str, clang: bool, alone: bool = False) -> str:
    """Everything that a command says beyond its files, for the key."""
    if backend == "cpu":
        isas = (CPU_ALONE,) if alone else CPU_ISAS.values()
        groups = (*isas, *CPU_FILE_FLAGS.values())
        every = [*CPU_FLAGS, *(flag for more in groups for flag in more)]
        return " ".join([*every, *_openmp_flags(clang), Path(openmp_runtime()).name])
    return " ".join(CUDA_FLAGS if backend == "cuda" else sycl_build.FLAGS)


def is_clang(version: str) -> bool:
    """By a compiler's first line of --version; Intel's compilers are clang, too."""
    return "clang" in version.lower() or "oneapi" in version.lower()


@functools.cache
def openmp_runtime() -> str:
    """The file of the OpenMP runtime that torch has loaded, so that no second pool of threads is
    made and torch.set_num_threads holds for our kernels; "" where there is none."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return ""
    found = set(re.findall(r"\S*/(?:libgomp|libiomp5|libomp)[-.]\S*", maps))
    # Other packages may have brought runtimes of their own; torch's stands in its own folders.
    own = str(Path(torch.__file__).parent)
    return min(found, key=lambda path: (not path.startswith(own), path), default="")


def _openmp_flags(clang: bool) -> list[str]:
    """What makes `omp parallel` work on torch's runtime: clang's code wants LLVM's or Intel's,
    g++'s runs on any. Otherwise loops are vectorised only, on one thread."""
    runtime = openmp_runtime()
    if not runtime or (clang and "libgomp" in Path(runtime).name):
        return ["-fopenmp-simd"]
    return ["-fopenmp"]


@functools.cache
def _knows_isas(compiler: tuple[str, ...]) -> bool:
    """Whether it can compile for AVX2 and AVX-512; otherwise the portable kernels stand alone."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    every = [flag for isa in CPU_ISAS.values() for flag in isa]
    try:
        _run([*compiler, *every, "-E", "-x", "c++", os.devnull], limit_s=60)
    except KernelError:
        return False
    return True


def find_compiler(backend: str) -> list[str]:
    """The command that compiles for `backend`. Raises KernelError if there is none."""
    if backend == "sycl":
        return sycl_build.find_compiler()
    names = {"cpu": ("g++", "clang++", "c++"), "cuda": ("nvcc",)}[backend]
    variable = {"cpu": "CXX", "cuda": "NVCC"}[backend]
    named = os.environ.get(variable)
    if named:
        try:
            command = shlex.split(named)
        except ValueError as error:
            raise KernelError(f"{variable}={named}: it is no command ({error})") from error
        if not command or shutil.which(command[0]) is None:
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
    openmp = _openmp_flags(is_clang(compiler_version(tuple(compiler))))
    alone = not _knows_isas(tuple(compiler))
    common = [*compiler, *CPU_FLAGS, *openmp, "-I", str(csrc() / "include")]
    common += CPU_ALONE if alone else ()
    objects = []
    for source in sources("cpu"):
        part, _, isa = source.stem.rpartition("_")
        if isa in CPU_ISAS and alone:
            continue
        out = work / f"{source.stem}.o"
        own = (*CPU_ISAS.get(isa, ()), *CPU_FILE_FLAGS.get(part, ()))
        _run([*common, *own, "-c", source, "-o", out])
        objects.append(out)
    library = work / "liboptimus_cpu.so"
    # Not -fopenmp here: it would bring the compiler's own runtime beside torch's.
    runtime = [openmp_runtime()] if "-fopenmp" in openmp else []
    _run([*compiler, "-shared", *objects, *runtime, "-o", library])
    return library


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
