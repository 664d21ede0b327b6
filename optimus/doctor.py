"""What this machine and this installation offer to a run: `optimus doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform as system
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as distributed

from optimus import peak, platform
from optimus.errors import ConfigError, printable
from optimus.launch.environment import available_cores
from optimus_kernels import backend, build
from optimus_kernels.cache import KernelError, cache_dir

_PACKAGES = (
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "intel_extension_for_pytorch",
    "oneccl_bindings_for_pytorch",
    "triton",
    "liger_kernel",
)
_GIB = 1 << 30


def examine() -> dict[str, Any]:
    """Everything `optimus doctor --json` prints. Runs no collective and compiles nothing."""
    return {
        "versions": _versions(),
        "machine": _machine(),
        "devices": _devices(),
        "collectives": _collectives(),
        "intel": _intel(),
        "compilers": _compilers(),
        "peaks": _peaks(),
        "kernels": _kernels(),
    }


def format_examination(found: dict[str, Any]) -> str:
    """The same for people, a line a fact."""
    lines = []
    for title, facts in found.items():
        lines.append(title)
        if title == "kernels":
            lines += [f"  {line}" for line in format_status(facts).splitlines()]
            continue
        rows = facts.items() if isinstance(facts, dict) else enumerate(facts)
        lines += [f"  {key}: {_text(value)}" for key, value in rows]
    return "\n".join(map(printable, lines))


def kernels_status() -> dict[str, Any]:
    """What `optimus kernels status --json` prints. Raises ConfigError for an OPTIMUS_KERNELS that
    names no backend."""
    try:
        backend.chosen()
    except KernelError as error:
        raise ConfigError(str(error)) from error
    return _kernels()


def build_kernels(names: Sequence[str]) -> None:
    """Compile these backends, or without names all whose compiler is here, before any run does.

    Raises ConfigError for the first that cannot be built, and where there is nothing to build.
    """
    for name in names:
        if name not in build.BACKENDS:
            raise ConfigError(f"kernels build {name}: it is one of {', '.join(build.BACKENDS)}")
    wanted = list(dict.fromkeys(names)) or [name for name in build.BACKENDS if _can_build(name)]
    if not wanted:
        reasons = "; ".join(f"{one['backend']}: {one['why_not']}" for one in backend.status())
        raise ConfigError(f"kernels build: no backend can be compiled here ({reasons})")
    for name in wanted:
        try:
            entry = build.build(name)
        except KernelError as error:
            raise ConfigError(f"kernels build {name}: {error}") from error
        print(f"optimus: {name} kernels in {entry.library}", file=sys.stderr, flush=True)


def _can_build(name: str) -> bool:
    try:
        build.plan(name)
    except KernelError:
        return False
    return True


def format_status(kernels: dict[str, Any]) -> str:
    """A line or two of each backend: usable or why not, and what was built for something else."""
    lines = [f"choice: {kernels['choice']}", f"cache: {kernels['cache']}"]
    for one in kernels["backends"]:
        text = one["why_not"]
        if one["built"]:
            text = "built for {arch} with torch {torch} by {compiler}".format(**one["built_for"])
            if one["why_not"]:
                text += f", but {one['why_not']}"
            elif not one["device_is_here"]:
                text += f"; no {one['device']} device here"
        lines.append(f"{one['backend']} (for {one['device']}): {text}")
        lines += [f"  {key}: {why}" for key, why in one["refused"].items()]
    return "\n".join(map(printable, lines))


def _versions() -> dict[str, str]:
    found = {"python": system.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return {**found, "torch": torch.__version__}


def _machine() -> dict[str, Any]:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "system": f"{system.system()} {system.release()}",
        "processor": system.machine(),
        "cores": available_cores(),
        "memory_gib": round(pages * size / _GIB, 1),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _devices() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for kind in ("xpu", "cuda"):
        if not backend.device_is_here(kind):
            continue
        module = getattr(torch, kind)
        for number in range(module.device_count()):
            properties = module.get_device_properties(number)
            found.append(
                {
                    "device": f"{kind}:{number}",
                    "name": properties.name,
                    "memory_gib": round(properties.total_memory / _GIB, 1),
                }
            )
    return [*found, {"device": "cpu", "name": system.processor() or system.machine()}]


def _collectives() -> dict[str, bool]:
    has = {
        "xccl": getattr(distributed, "is_xccl_available", lambda: False)(),
        "ccl (oneccl_bindings_for_pytorch)": _is_installed("oneccl_bindings_for_pytorch"),
        "nccl": distributed.is_nccl_available(),
        "gloo": distributed.is_gloo_available(),
        "mpi": distributed.is_mpi_available(),
    }
    return {name: bool(value) for name, value in has.items()}


def _intel() -> dict[str, Any]:
    return {
        "torch built with xpu": getattr(torch.version, "xpu", None) or False,
        "ipex": platform.import_ipex(),
        "icpx": shutil.which("icpx") or "absent",
        "oneAPI (ONEAPI_ROOT)": os.environ.get("ONEAPI_ROOT", "not set"),
        "ZE_FLAT_DEVICE_HIERARCHY": os.environ.get("ZE_FLAT_DEVICE_HIERARCHY", "not set"),
    }


def _compilers() -> dict[str, str]:
    found = {}
    for name in build.BACKENDS:
        try:
            compiler = build.find_compiler(name)
            found[name] = f"{compiler[0]}: {build.compiler_version(tuple(compiler))}"
        except KernelError as error:
            found[name] = str(error)
    return found


def _kernels() -> dict[str, Any]:
    try:
        name, origin = backend.chosen()
        choice = f"{name} ({origin})"
    except KernelError as error:
        choice = str(error)
    try:
        cache = str(cache_dir())
    except KernelError as error:
        cache = str(error)
    return {"choice": choice, "cache": cache, "backends": backend.status()}


def _peaks() -> dict[str, str]:
    """The measured peaks of MFU by file. A run measures what is not there: remove a file to have
    its peak measured again."""
    return {str(path): f"{found}; {found.setup.name}" for path, found in peak.kept_peaks()}


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
