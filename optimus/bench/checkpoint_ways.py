"""Ways to keep a rank's states on disk, for `optimus bench checkpoint`.

`raw` writes the same bytes by pwrite and fsync, and reads them back with a checksum: what no format
can be without. `dcp` is torch.distributed.checkpoint, `torch` torch.save of every rank; both are
handed a few flat tensors, which spares them the bookkeeping of many small ones.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from optimus.checkpoint.async_save import AsyncSave
from optimus.checkpoint.format import read_manifest
from optimus.checkpoint.load import load_full
from optimus.checkpoint.save import FullSaver, RankStates
from optimus.checkpoint.shard_file import BLOCK_BYTES
from optimus.distributed.world import World
from optimus.io import files
from optimus.io.safetensors import as_bytes

STEP = "step-00000001"
"""The name of ours in its directory."""


class Way(NamedTuple):
    """Collectives of all ranks: to `save` the states into an empty directory, and to `load` them
    from there, in place."""

    save: Callable[[Path], None]
    load: Callable[[Path], None]


def flats_of(states: RankStates) -> list[Tensor]:
    return [flat for one in states.shards for flat in one.states.values()]


def make_ways(states: RankStates, world: World) -> dict[str, Way]:
    """`cached` is ours through the kernel's cache (`checkpoint.direct_io = false`)."""
    flats = flats_of(states)
    return {
        "ours": ours(states),
        "cached": ours(states, direct=False),
        "raw": raw(flats, world),
        "dcp": dcp(flats, world),
        "torch": by_torch(flats, world),
    }


def _write_config(directory: Path) -> None:
    """Write the file that every checkpoint has."""
    (directory / "config.toml").write_text("", encoding="utf-8")


def ours(states: RankStates, direct: bool = True) -> Way:
    saver = FullSaver(states, "balanced", direct=direct)

    def save(directory: Path) -> None:
        outcome = saver.begin(states, directory / STEP, _write_config, step=1).drain()
        assert outcome is not None
        assert outcome.failure is None, outcome.failure

    def load(directory: Path) -> None:
        problem = load_full(states, read_manifest(directory / STEP), "broadcast")
        assert not problem, problem

    return Way(save, load)


class Stall:
    """What training waits for where a save goes on beside it: until the states have been copied to
    memory that was made before; and the copy alone."""

    def __init__(self, states: RankStates) -> None:
        self._states, self._saver = states, FullSaver(states, "balanced", staged=True)
        self._copies = [(flat, torch.zeros_like(flat)) for flat in flats_of(states)]
        self._save: AsyncSave | None = None

    def begin(self, directory: Path) -> None:
        self._save = self._saver.begin(self._states, directory / STEP, _write_config, step=1)

    def copy(self) -> None:
        for flat, memory in self._copies:
            memory.copy_(flat)

    def wait(self) -> None:
        """For a save that `begin` began. A collective of all ranks."""
        if self._save is not None:
            outcome = self._save.drain()
            assert outcome is not None
            assert outcome.failure is None, outcome.failure
        self._save = None


def raw(flats: Sequence[Tensor], world: World) -> Way:
    hashes: list[str] = []

    def save(directory: Path) -> None:
        fd = os.open(directory / f"{world.everyone.rank}.bin", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for block in _blocks(flats):
            while block:
                block = block[os.write(fd, block) :]
        os.fsync(fd)
        os.close(fd)
        files.fsync_dir(directory)
        if not hashes:  # in the first save, which is not timed
            hashes.extend(xxhash.xxh3_64_hexdigest(block) for block in _blocks(flats))

    def load(directory: Path) -> None:
        fd = os.open(directory / f"{world.everyone.rank}.bin", os.O_RDONLY)
        for block, expected in zip(_blocks(flats), hashes, strict=True):
            rest = block
            while rest:
                rest = rest[os.readv(fd, [rest]) :]
            assert xxhash.xxh3_64_hexdigest(block) == expected
        os.close(fd)

    return Way(save, load)


def _blocks(flats: Sequence[Tensor]) -> Iterator[memoryview]:
    for flat in flats:
        memory = as_bytes(flat)
        for at in range(0, len(memory), BLOCK_BYTES):
            yield memory[at : at + BLOCK_BYTES]


def dcp(flats: Sequence[Tensor], world: World) -> Way:
    """Of several ranks every flat tensor is a part of one that all hold together."""
    from torch.distributed import checkpoint

    tree: dict[str, Any] = {str(number): flat for number, flat in enumerate(flats)}
    if world.size > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (world.size,))
        tree = {
            name: DTensor.from_local(flat, mesh, [Shard(0)], run_check=False)
            for name, flat in tree.items()
        }

    warnings.filterwarnings("ignore", "torch.distributed is disabled")

    def save(directory: Path) -> None:
        checkpoint.save(tree, storage_writer=checkpoint.FileSystemWriter(directory))

    def load(directory: Path) -> None:
        checkpoint.load(tree, storage_reader=checkpoint.FileSystemReader(directory))

    return Way(save, load)


def by_torch(flats: Sequence[Tensor], world: World) -> Way:
    """With the fsync without which it would not be on the disk."""

    def save(directory: Path) -> None:
        with open(directory / f"{world.everyone.rank}.pt", "xb") as file:
            torch.save(list(flats), file)
            file.flush()
            os.fsync(file.fileno())
        files.fsync_dir(directory)

    def load(directory: Path) -> None:
        found = torch.load(directory / f"{world.everyone.rank}.pt", weights_only=True)
        for flat, one in zip(flats, found, strict=True):
            flat.copy_(one)

    return Way(save, load)
