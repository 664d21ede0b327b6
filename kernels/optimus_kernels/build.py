"""Compilation of the kernels in `csrc`: sources, targets, compilers and flags.

Each backend is compiled to one shared library with the C interface of csrc/include/interface.h.
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
    "-fno-trapping-math",  # -ffast-math must not be used: it breaks NaN
]
PORTABLE = "portable"
# The files *_avx2.cpp and *_avx512.cpp are compiled with the flags of their instruction set.
# dispatch.cpp selects an instruction set at run time.
CPU_ISAS = {
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
}
PORTABLE_FLAGS = ("-DOPTIMUS_PORTABLE_ALONE",)
"""Flags of a CPU build without AVX2 and AVX-512. Such a build is needed for processors other than
x86-64, and for compilers that do not support these instruction sets."""
# The files adamw_* must round every product before it is added, as torch's optimizer does.
CPU_FILE_FLAGS = {"adamw": ("-ffp-contract=off",)}
CUDA_ARCHS = ("80", "90")
CUDA_FLAGS = ["-std=c++17", "-O3", "-shared", "-cudart", "static", "-Xcompiler", "-fPIC"]
_COMPILE_S = 1800.0


@dataclass(frozen=True)
class Target:
    """All inputs of a backend's compilation. The name of the library in the cache contains a hash
    of these inputs."""

    backend: str
    sources: str
    """Hash of all files of csrc that the backend uses."""
    torch: str
    machine: str
    """Architecture of the processor, such as x86_64."""
    arch: str
    """GPU architectures or CPU instruction sets to compile for, such as sm_80,sm_90."""
    flags: str
    compiler: str
    """Version line of the compiler, followed by the arguments in the environment variable CXX or
    NVCC."""

    @property
    def name(self) -> str:
        return f"{self.backend}-{cache.key_of(asdict(self))}"


def csrc() -> Path:
    """Return the path of the folder `csrc`, which contains the source files of the kernels."""
    return Path(__file__).resolve().parent / "csrc"


def sources(backend: str) -> list[Path]:
    """Return the source files to compile for a backend. Raises KernelError if no file exists."""
    files = sorted((csrc() / backend).glob(f"*{SUFFIX[backend]}"))
    if not files:
        raise KernelError(
            f"{csrc() / backend} has no *{SUFFIX[backend]} files; reinstall the package"
        )
    return files


def interface_functions() -> list[str]:
    """Return the names of the C functions that every backend's library exports."""
    text = (csrc() / "include" / "interface.h").read_text()
    return re.findall(r"^OPTIMUS_API .*?\b(optimus_\w+)\(", text, re.MULTILINE)


def interface_version() -> int:
    """Return the version of the C interface, OPTIMUS_ABI in csrc/include/interface.h."""
    text = (csrc() / "include" / "interface.h").read_text()
    match = re.search(r"define OPTIMUS_ABI (\d+)", text)
    assert match, "interface.h does not define OPTIMUS_ABI"
    return int(match[1])


@functools.cache
def source_hash(backend: str) -> str:
    """Return a hash of the names and contents of the backend's files and the shared headers."""
    digest = hashlib.sha256()
    folders = (csrc() / "include", csrc() / backend)
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                digest.update(f"{path.relative_to(csrc())}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def why_incompatible(entry: Entry) -> str:
    """Return the reason why a cached library does not fit this machine and package; "" if it
    fits."""
    backend, record = entry.record["backend"], entry.record
    portable_only = record.get("arch") == PORTABLE
    # The compiler is not compared, because another machine may have compiled the library.
    for field, expected in (
        ("torch", torch.__version__),
        ("machine", platform.machine()),
        ("arch", arch(backend, portable_only)),
    ):
        if record.get(field) != expected:
            return f"built for {field} {record.get(field)}, not for {expected}"
    if record.get("sources") != source_hash(backend):
        return "built from other source files than this package has"
    if record.get("flags") not in [flags(backend, clang, portable_only) for clang in (False, True)]:
        return "built with other compiler flags than this package uses"
    return ""


def prebuilt(backend: str, key: str = "") -> Entry | None:
    """Return a compatible library of a backend from the cache; None if there is none.

    If several libraries are compatible, return the entry named `key`, or the newest entry if `key`
    is not among them.
    """
    compatible = [entry for entry in cache.entries(backend) if not why_incompatible(entry)]
    return next((entry for entry in compatible if entry.key == key), next(iter(compatible), None))


def build(backend: str) -> Entry:
    """Return the library of a backend. Compile the library if the cache does not contain a library
    for the same `Target`.

    Raises:
        KernelError: the library cannot be compiled.
    """
    target, compiler = plan(backend)
    compilers = {"cpu": _compile_cpu, "cuda": _compile_cuda, "sycl": _compile_sycl}
    record = {**asdict(target), "compiler_path": compiler[0]}
    return cache.install(target.name, lambda work: compilers[backend](compiler, work), record)


def plan(backend: str) -> tuple[Target, list[str]]:
    """Return (inputs for the compilation of a backend on this machine, compiler command).

    Raises:
        KernelError: there is no working compiler or no source file.
    """
    compiler = find_compiler(backend)
    sources(backend)
    version = compiler_version(tuple(compiler))
    portable_only = backend == "cpu" and not _supports_isas(tuple(compiler))
    target = Target(
        backend=backend,
        sources=source_hash(backend),
        torch=torch.__version__,
        machine=platform.machine(),
        arch=arch(backend, portable_only),
        flags=flags(backend, is_clang(version), portable_only),
        compiler=" ".join([version, *compiler[1:]]),
    )
    return target, compiler


def arch(backend: str, portable_only: bool = False) -> str:
    """Return the GPU architectures or CPU instruction sets to compile for, separated by commas.

    Args:
        backend: sycl, cuda or cpu.
        portable_only: True to return the instruction sets of a CPU build without AVX2 and AVX-512.
    """
    if backend == "cuda":
        return ",".join(f"sm_{number}" for number in CUDA_ARCHS)
    if backend == "sycl":
        return sycl_build.arch_list()
    return PORTABLE if portable_only else ",".join([PORTABLE, *CPU_ISAS])


def flags(backend: str, clang: bool, portable_only: bool = False) -> str:
    """Return the compiler flags of all source files of a backend as one string, for `Target.flags`.

    Args:
        backend: sycl, cuda or cpu.
        clang: True if the compiler is clang or Intel's compiler.
        portable_only: True for a CPU build without AVX2 and AVX-512.
    """
    if backend == "cpu":
        isas = (PORTABLE_FLAGS,) if portable_only else CPU_ISAS.values()
        groups = (*isas, *CPU_FILE_FLAGS.values())
        all_flags = [*CPU_FLAGS, *(flag for group in groups for flag in group)]
        return " ".join([*all_flags, *_openmp_flags(clang), Path(openmp_runtime()).name])
    return " ".join(CUDA_FLAGS if backend == "cuda" else sycl_build.FLAGS)


def is_clang(version: str) -> bool:
    """Return True if `version`, a line of `--version` output, is from clang or Intel's compiler."""
    return "clang" in version.lower() or "oneapi" in version.lower()


@functools.cache
def openmp_runtime() -> str:
    """Return the path of the OpenMP runtime that torch has loaded; "" if there is none."""
    # Kernels with the same runtime share torch's threads and obey torch.set_num_threads.
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return ""
    runtimes = set(re.findall(r"\S*/(?:libgomp|libiomp5|libomp)[-.]\S*", maps))
    # Other packages may have loaded their own runtimes; torch's runtime is in torch's folder.
    torch_folder = str(Path(torch.__file__).parent)
    return min(runtimes, key=lambda path: (not path.startswith(torch_folder), path), default="")


def _openmp_flags(clang: bool) -> list[str]:
    """Return the compiler's OpenMP flags that work with torch's OpenMP runtime."""
    # OpenMP code from clang does not run with gcc's runtime, libgomp. With -fopenmp-simd, loops are
    # vectorized but use a single thread.
    runtime = openmp_runtime()
    if not runtime or (clang and "libgomp" in Path(runtime).name):
        return ["-fopenmp-simd"]
    return ["-fopenmp"]


@functools.cache
def _supports_isas(compiler: tuple[str, ...]) -> bool:
    """Return True if this machine is x86-64 and the compiler accepts the AVX2 and AVX-512 flags."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    isa_flags = [flag for isa in CPU_ISAS.values() for flag in isa]
    try:
        _run([*compiler, *isa_flags, "-E", "-x", "c++", os.devnull], limit_s=60)
    except KernelError:
        return False
    return True


def find_compiler(backend: str) -> list[str]:
    """Return the compiler command for `backend`. Raises KernelError if no compiler is found."""
    if backend == "sycl":
        return sycl_build.find_compiler()
    names = {"cpu": ("g++", "clang++", "c++"), "cuda": ("nvcc",)}[backend]
    variable = {"cpu": "CXX", "cuda": "NVCC"}[backend]
    setting = os.environ.get(variable)
    if setting:
        try:
            command = shlex.split(setting)
        except ValueError as error:
            raise KernelError(
                f"{variable}={setting}: not a shell command ({error}); fix or unset {variable}"
            ) from error
        if not command or shutil.which(command[0]) is None:
            raise KernelError(f"{variable}={setting}: no such compiler; fix or unset {variable}")
        return command
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    fallback = [f"{home}/bin/nvcc"] if backend == "cuda" else []
    for name in (*names, *fallback):
        path = shutil.which(name)
        if path:
            return [path]
    raise KernelError(
        f"no compiler: {' or '.join(names)} is not on PATH; install a compiler or set {variable}"
    )


@functools.cache
def compiler_version(compiler: tuple[str, ...]) -> str:
    """Return the line with the version from the `--version` output of a compiler.

    Raises:
        KernelError: the compiler cannot be run or prints nothing.
    """
    text = _run([*compiler, "--version"], limit_s=60)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise KernelError(
            f"{shlex.join(compiler)} --version prints nothing; set CXX or NVCC to a compiler"
        )
    # nvcc prints its name on the first line and its release on a later line.
    return next((line for line in lines if "release" in line.lower()), lines[0])


def _compile_cpu(compiler: Sequence[str], work: Path) -> Path:
    openmp = _openmp_flags(is_clang(compiler_version(tuple(compiler))))
    portable_only = not _supports_isas(tuple(compiler))
    common = [*compiler, *CPU_FLAGS, *openmp, "-I", str(csrc() / "include")]
    common += PORTABLE_FLAGS if portable_only else ()
    objects = []
    for source in sources("cpu"):
        name, _, isa = source.stem.rpartition("_")
        if isa in CPU_ISAS and portable_only:
            continue
        out = work / f"{source.stem}.o"
        file_flags = (*CPU_ISAS.get(isa, ()), *CPU_FILE_FLAGS.get(name, ()))
        _run([*common, *file_flags, "-c", source, "-o", out])
        objects.append(out)
    library = work / "liboptimus_cpu.so"
    # Link torch's OpenMP runtime, without -fopenmp, which would also link the compiler's runtime.
    runtime = [openmp_runtime()] if "-fopenmp" in openmp else []
    _run([*compiler, "-shared", *objects, *runtime, "-o", library])
    return library


def _compile_cuda(compiler: Sequence[str], work: Path) -> Path:
    library = work / "liboptimus_cuda.so"
    codes = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in CUDA_ARCHS]
    newest = CUDA_ARCHS[-1]
    codes.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")  # PTX for later GPUs
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
    """Run a command and return its standard output. Raises KernelError if the command fails."""
    arguments = [str(word) for word in command]
    try:
        result = subprocess.run(
            arguments,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            env={**os.environ, "LC_ALL": "C", **(environ or {})},
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise KernelError(f"{arguments[0]} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise KernelError(
            f"{arguments[0]} took more than {limit_s:.0f} s and was stopped"
        ) from error
    if result.returncode:
        lines = [line for line in (result.stderr + result.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines or ["no message"]
        raise KernelError(
            f"{Path(arguments[0]).name} failed with status {result.returncode}: {errors[0].strip()}"
        )
    return result.stdout
