"""Report the devices, packages and kernels of this machine: `optimus doctor`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import platform as system
import shutil
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as distributed

from optimus import peak, platform
from optimus.errors import ConfigError, printable
from optimus.launch.environment import available_cores
from optimus_kernels import backend, build
from optimus_kernels.cache import KernelError, cache_dir

logger = logging.getLogger(__name__)

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
    """Return the dict that `optimus doctor --json` prints. The function runs no collective and
    compiles no kernel."""
    return {
        "versions": _versions(),
        "machine": _machine(),
        "devices": _devices(),
        "collectives": _collectives(),
        "intel": {
            "torch built with xpu": getattr(torch.version, "xpu", None) or False,
            "ipex": platform.import_ipex(),
            "icpx": shutil.which("icpx") or "absent",
            "oneAPI (ONEAPI_ROOT)": os.environ.get("ONEAPI_ROOT", "not set"),
            "ZE_FLAT_DEVICE_HIERARCHY": os.environ.get("ZE_FLAT_DEVICE_HIERARCHY", "not set"),
        },
        "compilers": _compilers(),
        "peaks": {
            str(path): f"{measured}; {measured.setup.name}" for path, measured in peak.kept_peaks()
        },
        "kernels": _kernels(),
    }


def format_examination(examination: dict[str, Any]) -> str:
    """Format the result of `examine` as text, one line for each entry."""
    lines = []
    for title, facts in examination.items():
        lines.append(title)
        if title == "kernels":
            lines += [f"  {line}" for line in format_status(facts).splitlines()]
            continue
        rows = facts.items() if isinstance(facts, dict) else enumerate(facts)
        for key, value in rows:
            if isinstance(value, dict):
                value = ", ".join(f"{name} {entry}" for name, entry in value.items())
            elif isinstance(value, bool):
                value = "yes" if value else "no"
            lines.append(f"  {key}: {value}")
    return "\n".join(map(printable, lines))


def kernels_status() -> dict[str, Any]:
    """Return the dict that `optimus kernels status --json` prints.

    Raises:
        ConfigError: The value of OPTIMUS_KERNELS is unknown.
    """
    try:
        backend.chosen()
    except KernelError as error:
        raise ConfigError(str(error)) from error
    return _kernels()


def build_kernels(names: Sequence[str]) -> None:
    """Compile kernels before a run needs them.

    Args:
        names: Backends to compile. If `names` is empty, compile all backends that this machine can
            compile.

    Raises:
        ConfigError: A name is unknown, or a backend cannot be compiled. Also raised if `names` is
            empty and this machine can compile no backend.
    """
    for name in names:
        if name not in build.BACKENDS:
            raise ConfigError(
                f"kernels build {name}: unknown backend; use one of {', '.join(build.BACKENDS)}"
            )
    wanted = list(dict.fromkeys(names))
    if not names:
        for name in build.BACKENDS:
            with contextlib.suppress(KernelError):
                build.plan(name)
                wanted.append(name)
    if not wanted:
        reasons = "; ".join(
            f"{status['backend']}: {status['why_not']}" for status in backend.status()
        )
        raise ConfigError(f"kernels build: this machine cannot compile any backend: {reasons}")
    for name in wanted:
        try:
            entry = build.build(name)
        except KernelError as error:
            raise ConfigError(f"kernels build {name}: {error}") from error
        logger.info("the %s kernels are in %s", name, entry.library)


def format_status(kernels: dict[str, Any]) -> str:
    """Format the result of `kernels_status` as text."""
    lines = [f"choice: {kernels['choice']}", f"cache: {kernels['cache']}"]
    for status in kernels["backends"]:
        text = status["why_not"]
        if status["built"]:
            text = "built for {arch} with torch {torch} by {compiler}".format(**status["built_for"])
            if status["why_not"]:
                text += f", but {status['why_not']}"
            elif not status["device_is_here"]:
                text += f"; no {status['device']} device here"
        lines.append(f"{status['backend']} (for {status['device']}): {text}")
        lines += [f"  {key}: {why}" for key, why in status["refused"].items()]
    return "\n".join(map(printable, lines))


def _versions() -> dict[str, str]:
    versions = {"python": system.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return {**versions, "torch": torch.__version__}


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
    devices: list[dict[str, Any]] = []
    for kind in ("xpu", "cuda"):
        if not backend.device_is_present(kind):
            continue
        module = getattr(torch, kind)
        for number in range(module.device_count()):
            properties = module.get_device_properties(number)
            devices.append(
                {
                    "device": f"{kind}:{number}",
                    "name": properties.name,
                    "memory_gib": round(properties.total_memory / _GIB, 1),
                }
            )
    return [*devices, {"device": "cpu", "name": system.processor() or system.machine()}]


def _collectives() -> dict[str, bool]:
    has = {
        "xccl": getattr(distributed, "is_xccl_available", lambda: False)(),
        "ccl (oneccl_bindings_for_pytorch)": importlib.util.find_spec(
            "oneccl_bindings_for_pytorch"
        ),
        "nccl": distributed.is_nccl_available(),
        "gloo": distributed.is_gloo_available(),
        "mpi": distributed.is_mpi_available(),
    }
    return {name: bool(value) for name, value in has.items()}


def _compilers() -> dict[str, str]:
    compilers = {}
    for name in build.BACKENDS:
        try:
            compiler = build.find_compiler(name)
            compilers[name] = f"{compiler[0]}: {build.compiler_version(tuple(compiler))}"
        except KernelError as error:
            compilers[name] = str(error)
    return compilers


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
