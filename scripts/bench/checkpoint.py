#!/usr/bin/env python3
"""Compare the speed of saves and loads in Optimus, in other libraries and with plain file
operations.

    python scripts/bench/checkpoint.py [--dir FOLDER] [--ranks N] [--hidden N] [--rounds N] [--json]

For each value of --ranks, the following methods save and load the same states in turn, in new
folders of one file system. Before a load, the files are removed from the page cache.

`ours` is Optimus; `cached` is Optimus with `checkpoint.direct_io = false`.

`raw` writes the same bytes with write and fsync, and reads them and verifies their checksums.

`dcp` is torch.distributed.checkpoint; `torch` is torch.save on each rank. `dcp` and `torch` receive
a few large tensors instead of many small tensors, because each tensor adds an overhead.

There are two more comparisons: `verify` and `stall`. `verify` compares `optimus checkpoint verify`
in one process with reading and hashing the files of `raw`. `stall` compares two times: the pause of
training at the start of an asynchronous save, and the time to copy the states in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
import xxhash
from torch import Tensor

from optimus.bench.meters import paired
from optimus.bench.step import make_rank
from optimus.checkpoint import async_save
from optimus.checkpoint.format import read_manifest
from optimus.checkpoint.load import load_full
from optimus.checkpoint.save import FullSaver, RankStates
from optimus.checkpoint.shard_file import BLOCK_BYTES
from optimus.distributed.collectives import all_gather_objects, barrier
from optimus.distributed.world import World
from optimus.errors import ConfigError
from optimus.io import files
from optimus.io.safetensors import as_bytes
from optimus.rank.states import states_of_rank

_STEP = "step-00000001"


class Method(NamedTuple):
    """Checkpoint method to measure. `save` writes the states to an empty folder, and `load` reads
    the states from this folder into the same tensors. All ranks must call `save` and `load`."""

    save: Callable[[Path], None]
    load: Callable[[Path], None]


class SaveFolder:
    """Folder for the checkpoints of a `Method`. All ranks must call `renew` and `drop_cache`."""

    def __init__(self, path: Path, world: World) -> None:
        self._path, self._world, self._number = path, world, 0
        if world.is_first:
            path.mkdir()

    @property
    def current(self) -> Path:
        return self._path / str(self._number)

    def renew(self) -> None:
        """Remove all saved checkpoints, and create an empty folder `current` for the next
        checkpoint."""
        self._number += 1
        if self._world.is_first:
            for old in self._path.iterdir():
                shutil.rmtree(old)
            self.current.mkdir()
            files.fsync_dir(self._path)

    def drop_cache(self) -> None:
        """Remove the files in `current` from the page cache."""
        if self._world.is_first:
            for path in self.current.rglob("*"):
                if path.is_file():
                    with open(path, "rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class SaveStall:
    """Operations that the comparison `stall` measures: the start of an asynchronous save, and a
    copy of the same states in memory."""

    def __init__(self, states: RankStates) -> None:
        self._states, self._saver = states, FullSaver(states, "balanced", staged=True)
        self._copies = [(flat, torch.zeros_like(flat)) for flat in _flat_tensors(states)]
        self._save: async_save.AsyncSave | None = None

    def start(self, folder: Path) -> None:
        """Start an asynchronous save of the states to `folder`. In a training run, the next step
        would wait until this function returns."""
        self._save = self._saver.begin(self._states, folder / _STEP, _write_config, step=1)

    def copy(self) -> None:
        """Copy the states of this rank to preallocated tensors."""
        for flat, memory in self._copies:
            memory.copy_(flat)

    def wait(self) -> None:
        """Wait until the save that `start` started is complete. All ranks must call this method."""
        if self._save is not None:
            outcome = self._save.drain()
            assert outcome is not None
            assert outcome.failure is None, outcome.failure
        self._save = None


def measure_checkpoint(world: World, folder: Path, hidden: int, rounds: int) -> dict[str, Any]:
    """Measure the speed of saves and loads of a model's states by Optimus, other libraries and
    plain file operations. All ranks must call this function.

    The function also compares the time to verify a checkpoint with the time to hash plain files,
    and the time to start an asynchronous save with the time to copy the states in memory.

    Args:
        world: All ranks.
        folder: Empty folder that all ranks share.
        hidden: Hidden size of the model whose states are saved.
        rounds: Number of timed rounds.

    Returns:
        The results for this number of ranks. Times are in seconds, memory peaks in bytes.
    """
    states = _make_states(world, hidden)
    methods = _make_methods(states, world)
    folders = {name: SaveFolder(folder / name, world) for name in methods}
    save_s = _compare(
        {name: _in_folder(folders[name], method.save) for name, method in methods.items()},
        {name: target.renew for name, target in folders.items()}, rounds, world,
    )  # fmt: skip
    load_s = _compare(
        {name: _in_folder(folders[name], method.load) for name, method in methods.items()},
        {name: target.drop_cache for name, target in folders.items()}, rounds, world,
    )  # fmt: skip
    rank_bytes = sum(flat.nbytes for flat in _flat_tensors(states))
    return {
        "ranks": world.size,
        "bytes": sum(all_gather_objects(rank_bytes, world.everyone, int)),
        "save": save_s,
        "load": load_s,
        "verify": _verify(folders, rounds, world),
        "stall": _stall(states, folder / "stall", rounds, world),
        "peak_bytes": {
            name: _peak_bytes(method, folders[name], world) for name, method in methods.items()
        },
        "bytes_of_a_rank": rank_bytes,
    }


def _make_states(world: World, hidden: int) -> RankStates:
    """Return the states of a model (master weights and moments), sharded over all ranks and filled
    with random numbers."""
    config = common.mula_config(hidden, world.size, sharding="epso", chunk_length=1 << 24)
    ours = make_rank(config, world)
    states = states_of_rank(config.model, ours.local.layout, ours.groups, ours.states)
    generator = torch.Generator().manual_seed(world.everyone.rank)
    for flat in _flat_tensors(states):
        flat.normal_(generator=generator)
    return states


def _flat_tensors(states: RankStates) -> list[Tensor]:
    return [flat for shard in states.shards for flat in shard.states.values()]


def _make_methods(states: RankStates, world: World) -> dict[str, Method]:
    flats = _flat_tensors(states)
    return {
        "ours": _optimus(states),
        "cached": _optimus(states, direct=False),
        "raw": _raw(flats, world),
        "dcp": _dcp(flats, world),
        "torch": _torch_save(flats, world),
    }


def _optimus(states: RankStates, direct: bool = True) -> Method:
    saver = FullSaver(states, "balanced", direct=direct)

    def save(folder: Path) -> None:
        outcome = saver.begin(states, folder / _STEP, _write_config, step=1).drain()
        assert outcome is not None
        assert outcome.failure is None, outcome.failure

    def load(folder: Path) -> None:
        problem = load_full(states, read_manifest(folder / _STEP), "broadcast")
        assert not problem, problem

    return Method(save, load)


def _write_config(folder: Path) -> None:
    (folder / "config.toml").write_text("", encoding="utf-8")


def _raw(flats: Sequence[Tensor], world: World) -> Method:
    hashes: list[str] = []

    def save(folder: Path) -> None:
        fd = os.open(folder / f"{world.everyone.rank}.bin", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for block in _blocks(flats):
            while block:
                block = block[os.write(fd, block) :]
        os.fsync(fd)
        os.close(fd)
        files.fsync_dir(folder)
        if not hashes:  # in the first save, which is not timed
            hashes.extend(xxhash.xxh3_64_hexdigest(block) for block in _blocks(flats))

    def load(folder: Path) -> None:
        fd = os.open(folder / f"{world.everyone.rank}.bin", os.O_RDONLY)
        for block, expected in zip(_blocks(flats), hashes, strict=True):
            rest = block
            while rest:
                rest = rest[os.readv(fd, [rest]) :]
            assert xxhash.xxh3_64_hexdigest(block) == expected
        os.close(fd)

    return Method(save, load)


def _blocks(flats: Sequence[Tensor]) -> Iterator[memoryview]:
    for flat in flats:
        memory = as_bytes(flat)
        for start in range(0, len(memory), BLOCK_BYTES):
            yield memory[start : start + BLOCK_BYTES]


def _dcp(flats: Sequence[Tensor], world: World) -> Method:
    """Return a `Method` that uses torch.distributed.checkpoint. With several ranks, each tensor in
    `flats` is saved as the local shard of a DTensor."""
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

    def save(folder: Path) -> None:
        checkpoint.save(tree, storage_writer=checkpoint.FileSystemWriter(folder))

    def load(folder: Path) -> None:
        checkpoint.load(tree, storage_reader=checkpoint.FileSystemReader(folder))

    return Method(save, load)


def _torch_save(flats: Sequence[Tensor], world: World) -> Method:
    """Return a `Method` that uses torch.save, followed by fsync, and torch.load. Each rank has a
    separate file."""

    def save(folder: Path) -> None:
        with open(folder / f"{world.everyone.rank}.pt", "xb") as file:
            torch.save(list(flats), file)
            file.flush()
            os.fsync(file.fileno())
        files.fsync_dir(folder)

    def load(folder: Path) -> None:
        loaded = torch.load(folder / f"{world.everyone.rank}.pt", weights_only=True)
        for flat, values in zip(flats, loaded, strict=True):
            flat.copy_(values)

    return Method(save, load)


def _in_folder(target: SaveFolder, run: Callable[[Path], None]) -> Callable[[], None]:
    return lambda: run(target.current)


def _compare(
    contestants: Mapping[str, Callable[[], None]],
    before: Mapping[str, Callable[[], None]],
    rounds: int,
    world: World,
) -> dict[str, Any]:
    """Measure the time of each function in `contestants`, in turn. The function named `ours` runs
    Optimus.

    Returns:
        A dict with two keys. `s`: seconds of each contestant in each round. `ours_by`: for each
        other contestant, the minimum, median and maximum over all rounds of the ratio (time of the
        contestant) / (time of `ours`).
    """
    seconds = common.race(contestants, rounds, world, before=before)
    ours_by = {name: paired(s, seconds["ours"]) for name, s in seconds.items() if name != "ours"}
    return {"s": seconds, "ours_by": ours_by}


def _verify(folders: Mapping[str, SaveFolder], rounds: int, world: World) -> dict[str, Any]:
    def verify() -> None:
        if world.is_first:
            read_manifest(folders["ours"].current / _STEP).verify()

    def read_raw() -> None:
        if world.is_first:
            for path in folders["raw"].current.iterdir():
                files.xxh3_file(path)

    before = {name: folders[name].drop_cache for name in ("ours", "raw")}
    return _compare({"ours": verify, "raw": read_raw}, before, rounds, world)


def _stall(states: RankStates, path: Path, rounds: int, world: World) -> dict[str, Any]:
    save, folder = SaveStall(states), SaveFolder(path, world)

    def prepare() -> None:
        save.wait()
        folder.renew()

    result = _compare(
        {"ours": lambda: save.start(folder.current), "copy": save.copy},
        {"ours": prepare, "copy": save.wait},
        rounds,
        world,
    )
    save.wait()
    return result


def _peak_bytes(method: Method, folder: SaveFolder, world: World) -> dict[str, int]:
    """Run a save and a load. Return a dict with the keys "save" and "load". Each value is the
    increase of resident memory from the start of the operation to its peak, in bytes, on the rank
    with the largest increase."""
    meter = common.MemoryMeter()
    folder.renew()
    barrier(world.everyone)
    increases = {}
    for name, run in (("save", method.save), ("load", method.load)):
        before = meter.start()
        run(folder.current)
        increases[name] = max(all_gather_objects(meter.peak() - before, world.everyone, int))
    return increases


def format_result(result: Mapping[str, Any]) -> str:
    """Return the results as two Markdown tables. The first table contains the speeds of Optimus and
    the ratios (time of an alternative) / (time of Optimus). The second table contains the memory
    peaks."""
    lines = [
        "| ranks | GB | operation | ours, MB/s | time / time of ours: min, median, max |",
        "|---|---|---|---|---|",
    ]
    for row in result["ranks"]:
        for name in ("save", "load", "verify", "stall"):
            speeds = [row["bytes"] / s / 1e6 for s in sorted(row[name]["s"]["ours"], reverse=True)]
            others = "; ".join(
                f"{other} {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
                for other, ratios in row[name]["ours_by"].items()
            )
            lines.append(
                f"| {row['ranks']} | {row['bytes'] / 1e9:.2f} | {name} | {speeds[0]:.0f} to "
                f"{speeds[-1]:.0f} | {others} |"
            )
    lines += ["", "| ranks | MB a rank | memory increase, MB: save, load |", "|---|---|---|"]
    for row in result["ranks"]:
        peaks = "; ".join(
            f"{name} {peak['save'] / 1e6:.0f}, {peak['load'] / 1e6:.0f}"
            for name, peak in row["peak_bytes"].items()
        )
        lines.append(f"| {row['ranks']} | {row['bytes_of_a_rank'] / 1e6:.0f} | {peaks} |")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dir", default=".", help="folder on the file system to measure (default: .)"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        action="append",
        help="number of local ranks; may be repeated (default: 1, 2)",
    )
    parser.add_argument(
        "--hidden",
        type=int,
        default=512,
        help="hidden size of the model (default: 512, with states of 1.3 GB)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: 5)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    counts = args.ranks or (1, 2)
    if args.hidden < 64 or args.hidden % 64 or min(counts) < 1 or args.rounds < 1:
        raise ConfigError(
            "--ranks and --rounds must be at least 1, and --hidden must be a multiple of 64"
        )
    if not os.path.isdir(args.dir):
        raise ConfigError(f"--dir {args.dir}: no such directory; create it")
    result = {
        "versions": common.versions(),
        "directory": os.path.abspath(args.dir),
        "ranks": [
            common.run_ranks(
                count, measure_checkpoint, args.hidden, args.rounds, directory=args.dir
            )
            for count in counts
        ],
    }
    print(json.dumps(result) if args.json else format_result(result))


if __name__ == "__main__":
    sys.exit(common.run_script(main))
