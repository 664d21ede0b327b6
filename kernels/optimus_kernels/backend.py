"""Selection of the backend that runs the ops on a device: a compiled library or plain torch.

Each device type has one compiled backend: sycl for xpu, cuda for cuda, cpu for cpu. The environment
variable OPTIMUS_KERNELS selects a backend by name and takes precedence over `choose`. With "auto"
(the default), ops run in plain torch if the compiled backend is not available. With any other name,
KernelError is raised if this backend is not available.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from optimus_kernels import build, cache
from optimus_kernels.cache import Entry, KernelError

CHOICES = ("auto", "sycl", "cuda", "cpu", "torch")
DEVICE_OF = {"sycl": "xpu", "cuda": "cuda", "cpu": "cpu"}
_BACKEND_OF = {device: backend for backend, device in DEVICE_OF.items()}
MAX_BUILDING_WORLD = 16
"""Maximum number of ranks with which a run compiles missing kernels. In a run with more ranks, the
ranks only load libraries from the cache."""

_WORLD_SIZES = (
    *("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
)
"""Environment variables for the number of processes, set by torchrun, MPICH, Open MPI and Slurm."""
_BUILD_FACTS = ("torch", "machine", "arch", "compiler", "flags")


@dataclass(frozen=True)
class Backend:
    """Implementation of the ops for a device: a compiled library, or plain torch."""

    name: str
    """Name of the backend: sycl, cuda or cpu, or torch for the reference implementations."""
    key: str = ""
    """Name of the library's cache entry; "" for torch."""
    library: ctypes.CDLL | None = field(default=None, compare=False)
    """The loaded library; None for torch."""
    why_not: str = field(default="", compare=False)
    """Reason why "auto" selected torch although the device type has a compiled backend; "" in all
    other cases."""


_configured = "auto"
_active: dict[str, Backend] = {}
_loaded: dict[tuple[int, int], ctypes.CDLL] = {}
"""Loaded libraries. The key is the pair (st_dev, st_ino) from fstat of the library's file."""


def choose(name: str) -> None:
    """Select a backend by its name, the value of the setting kernels.backend.

    Args:
        name: one of CHOICES. The environment variable OPTIMUS_KERNELS takes precedence.

    Raises:
        KernelError: `name` is unknown.
    """
    global _configured
    if name not in CHOICES:
        raise KernelError(
            f"kernels.backend = {name!r}: unknown backend; use one of {', '.join(CHOICES)}"
        )
    if name != _configured:
        _configured = name
        _active.clear()


def chosen() -> tuple[str, str]:
    """Return (name of the selected backend, name of the setting that selects it).

    Raises:
        KernelError: OPTIMUS_KERNELS has an unknown value.
    """
    name = os.environ.get("OPTIMUS_KERNELS", "")
    if not name:
        return _configured, "kernels.backend"
    if name not in CHOICES:
        raise KernelError(
            f"OPTIMUS_KERNELS={name!r}: unknown backend; use one of {', '.join(CHOICES)}"
        )
    return name, "OPTIMUS_KERNELS"


def active(device: torch.device | str) -> Backend:
    """Return the backend of a device. The first call for a device type loads the backend.

    Raises:
        KernelError: the backend is selected by a name other than "auto", and is not available.
    """
    kind = device.type if isinstance(device, torch.device) else device.partition(":")[0]
    backend = _active.get(kind)
    if backend is None:
        backend = _active[kind] = find(kind)
        if backend.why_not and os.environ.get("RANK", "0") == "0":
            line = f"optimus kernels: ops use plain torch on {kind}, since {backend.why_not}"
            print(line, file=sys.stderr, flush=True)
    return backend


def find(kind: str, may_build: bool | None = None, key: str = "", name: str = "") -> Backend:
    """Select, load and return the backend of a device type.

    The active backend of the device type does not change. `use` makes a backend active.

    Args:
        kind: device type: cpu, cuda or xpu.
        may_build: True to compile the library if the cache does not have it; False to only load
            libraries from the cache; None to compile only if this run has at most
            MAX_BUILDING_WORLD ranks.
        key: name of the preferred cache entry.
        name: name of the backend to use; "" for the selected backend.

    Raises:
        KernelError: the backend is selected by a name other than "auto", and is not available.
    """
    selected, origin = chosen()
    name = name or selected
    device_backend = _BACKEND_OF.get(kind)
    if name == "torch" or (name == "auto" and device_backend is None):
        return Backend("torch")
    if name not in ("auto", device_backend):
        raise KernelError(
            f"{origin} = {name}: this backend runs on {DEVICE_OF[name]}, not on {kind}; "
            f"use {' or '.join(filter(None, (device_backend, 'torch', 'auto')))}"
        )
    assert device_backend is not None
    if may_build is None:
        sizes = (os.environ.get(variable, "") for variable in _WORLD_SIZES)
        world = next((int(size) for size in sizes if size.isdigit()), 1)
        may_build = world <= MAX_BUILDING_WORLD
    try:
        entry = obtain(device_backend, may_build, key)
        return Backend(device_backend, entry.key, load(entry))
    except KernelError as error:
        if name != "auto":
            raise KernelError(f"{origin} = {name} is not available: {error}") from error
        return Backend("torch", why_not=f"{device_backend} kernels are not available: {error}")


def use(kind: str, backend: Backend) -> None:
    """Set the active backend of a device type."""
    _active[kind] = backend


def obtain(backend: str, may_build: bool, key: str = "") -> Entry:
    """Return the cache entry of a backend's compiled library. Compile the library if necessary.

    Args:
        backend: sycl, cuda or cpu.
        may_build: True to compile the library if the cache has no library from this machine's
            compiler. If `may_build` is False or the compilation fails, the cache is searched for
            any compatible library.
        key: name of the cache entry to use if several libraries are compatible.

    Raises:
        KernelError: no compatible library exists, and the library cannot be compiled.
    """
    failure = ""
    if may_build:
        try:
            return build.build(backend)
        except KernelError as error:
            failure = str(error)
    entry = build.prebuilt(backend, key)
    if entry is not None:
        return entry
    if failure:
        raise KernelError(failure)
    others = [f"{name} is refused: {why}" for name, why in cache.refused(backend).items()]
    others += [
        f"{entry.key} is {build.why_incompatible(entry)}" for entry in cache.entries(backend)
    ]
    hint = f" ({others[0]})" if others else ""
    raise KernelError(
        f"{cache.cache_dir()} has no compatible kernel library{hint}, and a run of more than "
        f"{MAX_BUILDING_WORLD} ranks compiles none; run `optimus kernels build` once before the run"
    )


def load(entry: Entry) -> ctypes.CDLL:
    """Load and return the library of a cache entry, and check its C interface.

    Raises:
        KernelError: the library cannot be loaded, or does not have the interface that this package
            needs.
    """
    path = entry.library
    try:
        library = _load_descriptor(cache.open_library(entry))
        version = library.optimus_kernels_abi()
    except (OSError, AttributeError) as error:
        raise KernelError(
            f"{path} does not load: {' '.join(str(error).split())}; remove "
            f"{path.parent} and run `optimus kernels build`"
        ) from error
    if version != build.interface_version():
        raise KernelError(
            f"{path} has interface version {version}, but this package needs "
            f"{build.interface_version()}; run `optimus kernels build`"
        )
    missing = [name for name in build.interface_functions() if not hasattr(library, name)]
    if missing:
        raise KernelError(
            f"{path} has no function {missing[0]}; remove {path.parent} and run `optimus kernels "
            "build`"
        )
    return library


def _load_descriptor(file: int) -> ctypes.CDLL:
    """Load and return a library from the open descriptor of its file. Raises OSError if loading
    fails."""
    status = os.fstat(file)
    inode = status.st_dev, status.st_ino
    if inode in _loaded:
        os.close(file)
        return _loaded[inode]
    # The linker identifies a library by its path, /proc/self/fd/N. Descriptor N stays open: if a
    # second library got the same N, the linker would return the first library.
    try:
        library = _loaded[inode] = ctypes.CDLL(f"/proc/self/fd/{file}")
    except OSError:
        os.close(file)
        raise
    return library


def status() -> list[dict[str, Any]]:
    """Return a list with one dict for each compiled backend. A dict contains the state of the
    device (present or not) and of the library (built, usable)."""
    return [_status_of(backend) for backend in build.BACKENDS]


def _status_of(backend: str) -> dict[str, Any]:
    entries, entry, untrusted = [], None, {}
    try:
        untrusted = cache.refused(backend)
        entries, entry = cache.entries(backend), build.prebuilt(backend)
        reason = _why_not(backend, entry)
    except KernelError as error:
        reason = str(error)
    return {
        "backend": backend,
        "device": DEVICE_OF[backend],
        "device_is_here": device_is_present(DEVICE_OF[backend]),
        "built": entry is not None,
        "usable": entry is not None and not reason,
        "why_not": reason,
        "built_for": {key: entry.record.get(key) for key in _BUILD_FACTS} if entry else {},
        "library": "" if entry is None else str(entry.library),
        "refused": {other.key: why for other in entries if (why := build.why_incompatible(other))}
        | untrusted,
    }


def _why_not(backend: str, entry: Entry | None) -> str:
    """Return the reason why a backend cannot be used; "" if it can be used.

    Args:
        backend: sycl, cuda or cpu.
        entry: the compatible library of the backend; None if the cache does not contain a
            compatible library. The reason is then that the library is not built yet.

    Raises:
        KernelError: the library of `entry` cannot be loaded, or `entry` is None and the library
            cannot be built, because the compiler or the source files are missing.
    """
    if entry is None:
        build.plan(backend)
        return "not built yet; run `optimus kernels build`, or the first run builds it"
    # The library of an absent device may link to a runtime that is not installed here.
    if device_is_present(DEVICE_OF[backend]):
        load(entry)
    return ""


def device_is_present(kind: str) -> bool:
    """Return True if torch finds a device of the type `kind`."""
    module = getattr(torch, kind, None)
    return kind == "cpu" or bool(module is not None and module.is_available())
