"""How much memory this process may take: the machine's, or less in a container or a Slurm job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def usable_memory() -> int:
    """Bytes of physical memory, or the least of the limits of the control groups it is in."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_limits()])


def _limits() -> Iterator[int]:
    """Limits of version 2 (`0::/PATH`) and version 1 (`N:memory:/PATH`), of it and those above."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = _CGROUPS, "memory.max"
        if controllers:
            root, name = _CGROUPS / "memory", "memory.limit_in_bytes"
        place = root / path.lstrip("/")
        for folder in (place, *place.parents):
            with contextlib.suppress(OSError, ValueError):  # not there, or `max`
                yield int((folder / name).read_text())
            if folder == root:
                break
