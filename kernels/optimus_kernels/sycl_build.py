"""Compilation of csrc/sycl for torch's xpu devices.

The build uses torch's SyclExtension, or DPCPPExtension of IPEX (Intel Extension for PyTorch). When
this module is run as a script, it builds the extension like a setup.py. The resulting libraries
have not been run on an Intel GPU yet.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from optimus_kernels.cache import KernelError

NAME = "optimus_sycl"
DEFAULT_ARCHS = "pvc"
FLAGS = (
    "-std=c++17",
    "-O3",
    # icpx enables fast-math by default, which loses NaN and reorders sums.
    "-fno-fast-math",
    "-ffp-contract=fast",
    "-foffload-fp32-prec-div",
    "-foffload-fp32-prec-sqrt",
    "-fno-sycl-id-queries-fit-in-int",
)
IPEX = "intel_extension_for_pytorch"


def arch_list() -> str:
    """Return the GPU architectures to compile for, separated by commas: the value of the
    environment variable TORCH_XPU_ARCH_LIST, or "pvc" by default."""
    # Without a list of devices, every process would compile the kernels at run time.
    return os.environ.get("TORCH_XPU_ARCH_LIST") or DEFAULT_ARCHS


def way() -> str:
    """Return the name of the extension for the build: "torch" for torch's SyclExtension, or "ipex"
    for IPEX's DPCPPExtension.

    Raises:
        KernelError: neither extension is available.
    """
    spec = importlib.util.find_spec("torch.utils.cpp_extension")
    source = Path(spec.origin).read_text() if spec and spec.origin else ""
    if getattr(torch.version, "xpu", None) and "def SyclExtension" in source:
        return "torch"
    # IPEX must not be imported here, because its import changes torch's operators. find_spec would
    # import IPEX if it were called for a submodule.
    spec = importlib.util.find_spec(IPEX)
    folders = (spec.submodule_search_locations if spec else None) or ()
    has_dpcpp = any((Path(folder) / "xpu" / "cpp_extension.py").exists() for folder in folders)
    if has_dpcpp and torch.xpu.is_available():
        return "ipex"
    raise KernelError(
        f"torch {torch.__version__} has no xpu support; install torch's xpu build (or, with torch "
        "before 2.8, the GPU build of intel-extension-for-pytorch)"
    )


def find_compiler() -> list[str]:
    """Return the compiler command, ["icpx"].

    Raises:
        KernelError: icpx, ninja or torch's xpu support is missing.
    """
    extension = way()
    if shutil.which("icpx") is None:
        raise KernelError(
            "no compiler: icpx is not on PATH; load the oneAPI module or source setvars.sh"
        )
    if extension == "torch" and shutil.which("ninja") is None:
        raise KernelError(
            "SyclExtension needs ninja, which is not on PATH; run `pip install ninja`"
        )
    return ["icpx"]


def command(sources: Sequence[Path], include: Path, work: Path) -> tuple[list[str], dict[str, str]]:
    """Return (command that builds the SYCL library in the folder `work`, environment variables for
    the command)."""
    job = {"way": way(), "sources": [str(s) for s in sources], "include": str(include)}
    parents = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [parents, os.environ.get("PYTHONPATH")]))
    environ = {"TORCH_XPU_ARCH_LIST": arch_list(), "PYTHONPATH": path}
    # -P: do not import modules from the working directory, which another user may have written.
    return [sys.executable, "-P", "-m", __name__, json.dumps(job), str(work)], environ


def built_library(work: Path) -> Path:
    """Return the path of the library that the build wrote to `work`.

    Raises:
        KernelError: the build did not write exactly one library.
    """
    libraries = list(work.glob(f"{NAME}*.so"))
    if len(libraries) != 1:
        raise KernelError(f"the SYCL build wrote {len(libraries)} libraries to {work}, not one")
    return libraries[0]


def torch_arguments(sources: Sequence[str], include: str) -> dict[str, Any]:
    """Return the keyword arguments for the constructor of torch's SyclExtension."""
    return {
        "name": NAME,
        "sources": list(sources),
        "include_dirs": [include],
        "extra_compile_args": {"cxx": ["-std=c++17", "-O3"], "sycl": list(FLAGS)},
        "py_limited_api": True,  # a plain library without Python's API
    }


def ipex_arguments(sources: Sequence[str], include: str, work: Path) -> dict[str, Any]:
    """Copy the source files to `work`. Return the keyword arguments for the constructor of IPEX's
    DPCPPExtension."""
    # The extension accepts only .cpp files.
    copies = []
    for source in map(Path, sources):
        copy = work / f"{source.stem}_sycl.cpp"
        shutil.copyfile(source, copy)
        copies.append(str(copy))
    ahead = ["-fsycl-targets=spir64_gen", "-Xs", f"-device {arch_list()}"]
    return {
        "name": NAME,
        "sources": copies,
        "include_dirs": [include, *sorted({str(Path(source).parent) for source in sources})],
        "extra_compile_args": {"cxx": [*FLAGS, ahead[0]]},  # the extension adds -fsycl
        "extra_link_args": ["-fsycl", *ahead],
    }


def main(arguments: Sequence[str]) -> None:
    """Build the extension and write the library to the work folder.

    Args:
        arguments: the last two arguments of the command that `command` returns. The first argument
            is JSON with the extension, the sources and the include folder. The second argument is
            the path of the work folder.
    """
    from setuptools import setup

    job, work = json.loads(arguments[0]), Path(arguments[1]).resolve()
    sources, include = job["sources"], job["include"]
    extension: Any
    command_class: Any
    if job["way"] == "torch":
        from torch.utils.cpp_extension import BuildExtension, SyclExtension

        extension, command_class = (
            SyclExtension(**torch_arguments(sources, include)),
            BuildExtension,
        )
    else:
        ipex = importlib.import_module(f"{IPEX}.xpu.cpp_extension")
        extension = ipex.DPCPPExtension(**ipex_arguments(sources, include, work))
        command_class = ipex.DpcppBuildExtension
    os.chdir(work)
    setup(
        name=NAME,
        ext_modules=[extension],
        cmdclass={"build_ext": command_class},
        script_args=["-q", "build_ext", "--build-lib", str(work), "--build-temp", str(work / "o")],
    )


if __name__ == "__main__":
    main(sys.argv[1:])
