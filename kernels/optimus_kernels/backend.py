"""The ladder of backends: which library serves a device's ops, chosen in one place and said once.

xpu: sycl, then torch. cuda: cuda, then torch. cpu: cpu, then torch. `OPTIMUS_KERNELS`, or else what
`choose` was given, names one: auto (the default) takes the first that can be had and says in one
line why it was not an earlier one; any other name is taken or refused.
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
"""Ranks beyond which a run compiles nothing: it loads what `optimus kernels build` left."""

_WORLD_SIZES = (
    *("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
)
"""torchrun's, MPICH's and PALS', Open MPI's and Slurm's name for the number of processes."""


@dataclass(frozen=True)
class Backend:
    """What computes a device's ops."""

    name: str
    """sycl, cuda, cpu or torch."""
    key: str = ""
    """The cache entry of its library, which stands for sources, torch, compiler and flags."""
    library: ctypes.CDLL | None = field(default=None, compare=False)
    """None for torch."""
    why_not: str = field(default="", compare=False)
    """Under auto: why the device's own backend is not it."""


_configured = "auto"
_active: dict[str, Backend] = {}


def choose(name: str) -> None:
    """What the configuration asks for; the environment's OPTIMUS_KERNELS wins over it."""
    global _configured
    if name not in CHOICES:
        raise KernelError(f"kernels {name!r}: it is one of {', '.join(CHOICES)}")
    if name != _configured:
        _configured = name
        _active.clear()


def chosen() -> tuple[str, str]:
    """The choice in force, and where it comes from. Raises KernelError for an unknown name."""
    named = os.environ.get("OPTIMUS_KERNELS", "")
    if not named:
        return _configured, "kernels.backend"
    if named not in CHOICES:
        raise KernelError(f"OPTIMUS_KERNELS={named!r}: it is one of {', '.join(CHOICES)}")
    return named, "OPTIMUS_KERNELS"


def active(device: torch.device | str) -> Backend:
    """The backend that serves a device, found and loaded at its first use.

    Raises KernelError where an explicit choice cannot be had.
    """
    kind = device.type if isinstance(device, torch.device) else device.partition(":")[0]
    found = _active.get(kind)
    if found is None:
        found = _active[kind] = find(kind)
        if found.why_not:
            _say(f"optimus kernels: plain torch on {kind}, since {found.why_not}")
    return found


def find(kind: str, may_build: bool | None = None, key: str = "") -> Backend:
    """As `active`, without remembering or saying anything.

    `may_build`: compile what is not there; by default up to MAX_BUILDING_WORLD ranks do so, one of
    them at a time. `key` names the library to prefer where several fit.
    """
    name, origin = chosen()
    own = _BACKEND_OF.get(kind)
    if name == "torch" or (name == "auto" and own is None):
        return Backend("torch")
    if name not in ("auto", own):
        raise KernelError(
            f"{origin} = {name}: it computes on {DEVICE_OF[name]}, and the data lies on {kind}; "
            f"use {' or '.join(filter(None, (own, 'torch', 'auto')))}"
        )
    assert own is not None
    try:
        entry = obtain(own, _may_build() if may_build is None else may_build, key)
        return Backend(own, entry.key, load(entry))
    except KernelError as error:
        if name != "auto":
            raise KernelError(f"{origin} = {name} cannot be had: {error}") from error
        return Backend("torch", why_not=f"{own} kernels cannot be had: {error}")


def use(kind: str, backend: Backend) -> None:
    """Make `backend` the active one of a device: what all ranks have agreed on."""
    _active[kind] = backend


def obtain(backend: str, may_build: bool, key: str = "") -> Entry:
    """A compiled library: this machine's compiler's, built now if need be, or one that came from
    elsewhere and fits. Raises KernelError."""
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
    others += [f"{entry.key} is {build.fits(entry)}" for entry in cache.entries(backend)]
    hint = f" ({others[0]})" if others else ""
    raise KernelError(
        f"none is built in {cache.cache_dir()}{hint}; run `optimus kernels build` once, since "
        f"a run of more than {MAX_BUILDING_WORLD} ranks compiles nothing"
    )


def load(entry: Entry) -> ctypes.CDLL:
    """The library, once it has said which C interface it has. Raises KernelError."""
    path = entry.library
    try:
        library = ctypes.CDLL(str(path))
        version = library.optimus_kernels_abi()
    except (OSError, AttributeError) as error:
        raise KernelError(f"{path} does not load: {' '.join(str(error).split())}") from error
    if version != build.interface_version():
        raise KernelError(
            f"{path} has interface {version}, this package needs {build.interface_version()}; "
            "run `optimus kernels build`"
        )
    missing = [name for name in build.interface_functions() if not hasattr(library, name)]
    if missing:
        raise KernelError(
            f"{path} has no function {missing[0]}; remove {path.parent} and run `optimus kernels "
            "build`"
        )
    return library


def status() -> list[dict[str, Any]]:
    """Of each backend: is its device here, is it built, for what, or why not. Compiles nothing."""
    return [_status_of(backend) for backend in build.BACKENDS]


def _status_of(backend: str) -> dict[str, Any]:
    found, entry, untrusted = [], None, {}
    try:
        untrusted = cache.refused(backend)
        found, entry = cache.entries(backend), build.prebuilt(backend)
        reason = _why_not(backend, entry)
    except KernelError as error:
        reason = str(error)
    return {
        "backend": backend,
        "device": DEVICE_OF[backend],
        "device_is_here": device_is_here(DEVICE_OF[backend]),
        "built": entry is not None,
        "usable": entry is not None and not reason,
        "why_not": reason,
        "built_for": {} if entry is None else _built_for(entry),
        "library": "" if entry is None else str(entry.library),
        "refused": {other.key: why for other in found if (why := build.fits(other))} | untrusted,
    }


def _why_not(backend: str, entry: Entry | None) -> str:
    """Why an entry is of no use, "" if it is of use. Raises KernelError where none can be made."""
    if entry is None:
        build.plan(backend)
        return "not built yet; `optimus kernels build` does it, or the first run"
    # Another device's library may link against what only its machines have.
    if device_is_here(DEVICE_OF[backend]):
        load(entry)
    return ""


def device_is_here(kind: str) -> bool:
    """Whether torch finds such a device."""
    module = getattr(torch, kind, None)
    return kind == "cpu" or bool(module is not None and module.is_available())


def _built_for(entry: Entry) -> dict[str, Any]:
    return {key: entry.info.get(key) for key in ("torch", "machine", "arch", "compiler", "flags")}


def _may_build() -> bool:
    """By the first variable that says how many processes there are; none: one process."""
    sizes = (os.environ.get(name, "") for name in _WORLD_SIZES)
    world = next((size for size in sizes if size.isdigit()), "1")
    return int(world) <= MAX_BUILDING_WORLD


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
