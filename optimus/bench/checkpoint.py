"""`optimus bench checkpoint`: saving and loading full states against the disk itself and others.

The parent starts local ranks of `optimus bench checkpoint --ranks N --result FILE`. There the ways
of checkpoint_ways.py take turns at the same states, in fresh directories of one file system. Before
a load the kernel is told to forget the files.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from optimus.bench.checkpoint_ways import STEP, Stall, Way, flats_of, make_ways
from optimus.bench.meters import paired, race, versions
from optimus.bench.ours import make_ours
from optimus.bench.peak import peak_above
from optimus.bench.ranks import mula_like, on_ranks
from optimus.checkpoint.format import read_manifest
from optimus.checkpoint.save import RankStates
from optimus.distributed.collectives import all_gather_objects, barrier
from optimus.distributed.world import World
from optimus.errors import ConfigError
from optimus.io import files
from optimus.rank.states import states_of_rank


def bench_checkpoint(
    directory: str, counts: Sequence[int], hidden: int, rounds: int
) -> dict[str, Any]:
    """What each number of ranks found, on the file system of `directory`. Raises OptimusError."""
    if hidden < 64 or hidden % 64 or min(counts) < 1 or rounds < 1:
        raise ConfigError("--ranks and --rounds begin at 1, --hidden is a multiple of 64")
    if not os.path.isdir(directory):
        raise ConfigError(f"--dir {directory}: no such directory")
    found = on_ranks("checkpoint", counts, hidden, rounds, directory)
    return {"versions": versions(), "directory": os.path.abspath(directory), "ranks": found}


def _make_states(world: World, hidden: int) -> RankStates:
    """Those of a model of Mula's proportions, divided over all ranks, of random numbers."""
    config = mula_like(hidden, world.size, sharding="epso", chunk_length=1 << 24)
    ours = make_ours(config, world)
    states = states_of_rank(config.model, ours.part.layout, ours.groups, ours.states)
    generator = torch.Generator().manual_seed(world.everyone.rank)
    for one in states.shards:
        for flat in one.states.values():
            flat.normal_(generator=generator)
    return states


def _at(place: Place, act: Callable[[Path], None]) -> Callable[[], None]:
    return lambda: act(place.now)


def measure_checkpoint(world: World, hidden: int, rounds: int, scratch: Path) -> dict[str, Any]:
    """All ways in turn at the same states, in directories of `scratch`. A collective of all."""
    states = _make_states(world, hidden)
    ways = make_ways(states, world)
    places = {name: Place(scratch / name, world) for name in ways}
    save_s = _race(
        {name: _at(places[name], way.save) for name, way in ways.items()},
        {name: place.renew for name, place in places.items()}, rounds, world,
    )  # fmt: skip
    load_s = _race(
        {name: _at(places[name], way.load) for name, way in ways.items()},
        {name: place.forget for name, place in places.items()}, rounds, world,
    )  # fmt: skip
    own = sum(flat.nbytes for flat in flats_of(states))
    return {
        "ranks": world.size,
        "bytes": sum(all_gather_objects(own, world.everyone, int)),
        "save": save_s,
        "load": load_s,
        "verify": _verify(places, rounds, world),
        "stall": _stall(states, scratch / "stall", rounds, world),
        "peak_bytes": {name: _peaks(way, places[name], world) for name, way in ways.items()},
        "bytes_of_a_rank": own,
    }


class Place:
    """Where one way keeps what it saves. The methods are collectives of all ranks."""

    def __init__(self, directory: Path, world: World) -> None:
        self._directory, self._world, self._number = directory, world, 0
        if world.is_first:
            directory.mkdir()

    @property
    def now(self) -> Path:
        return self._directory / str(self._number)

    def renew(self) -> None:
        """An empty directory; what was there before is gone."""
        self._number += 1
        if self._world.is_first:
            for old in self._directory.iterdir():
                shutil.rmtree(old)
            self.now.mkdir()
            files.fsync_dir(self._directory)

    def forget(self) -> None:
        """Have the kernel read from the disk again what is there."""
        if self._world.is_first:
            for path in self.now.rglob("*"):
                if path.is_file():
                    with open(path, "rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _race(
    contestants: Mapping[str, Callable[[], None]],
    before: Mapping[str, Callable[[], None]],
    rounds: int,
    world: World,
) -> dict[str, Any]:
    """Seconds by name, and how fast ours is by each other: ratios of speed of one round."""
    seconds = race(contestants, rounds, world, before=before)
    ours_by = {name: paired(s, seconds["ours"]) for name, s in seconds.items() if name != "ours"}
    return {"s": seconds, "ours_by": ours_by}


def _verify(places: Mapping[str, Place], rounds: int, world: World) -> dict[str, Any]:
    """What `optimus checkpoint verify` does, in one process, against reading the raw files with
    checksums, one behind the other."""

    def verify() -> None:
        if world.is_first:
            read_manifest(places["ours"].now / STEP).verify()

    def read_raw() -> None:
        if world.is_first:
            for path in places["raw"].now.iterdir():
                files.xxh3_file(path)

    before = {name: places[name].forget for name in ("ours", "raw")}
    return _race({"ours": verify, "raw": read_raw}, before, rounds, world)


def _stall(states: RankStates, directory: Path, rounds: int, world: World) -> dict[str, Any]:
    """What training waits for with checkpoint.async_save, against a copy of the same memory."""
    stall, place = Stall(states), Place(directory, world)

    def ready() -> None:
        stall.wait()
        place.renew()

    found = _race(
        {"ours": lambda: stall.begin(place.now), "copy": stall.copy},
        {"ours": ready, "copy": stall.wait},
        rounds,
        world,
    )
    stall.wait()
    return found


def _peaks(way: Way, place: Place, world: World) -> dict[str, int]:
    """The most memory that the process took above what it had before, on the worst rank."""
    place.renew()
    barrier(world.everyone)
    found = {}
    for what, run in (("save", way.save), ("load", way.load)):
        peak = peak_above(functools.partial(run, place.now))
        found[what] = max(all_gather_objects(peak, world.everyone, int))
    return found


def format_result(result: Mapping[str, Any]) -> str:
    """In Markdown."""
    lines = [
        "| ranks | GB | what | ours, MB/s | ours by others: least, median, greatest |",
        "|---|---|---|---|---|",
    ]
    for one in result["ranks"]:
        for what in ("save", "load", "verify", "stall"):
            speeds = [one["bytes"] / s / 1e6 for s in sorted(one[what]["s"]["ours"], reverse=True)]
            others = "; ".join(
                f"{name} {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
                for name, ratios in one[what]["ours_by"].items()
            )
            lines.append(
                f"| {one['ranks']} | {one['bytes'] / 1e9:.2f} | {what} | {speeds[0]:.0f} to "
                f"{speeds[-1]:.0f} | {others} |"
            )
    lines += ["", "| ranks | MB a rank | peak above it, MB: save, load |", "|---|---|---|"]
    for one in result["ranks"]:
        peaks = "; ".join(
            f"{name} {peak['save'] / 1e6:.0f}, {peak['load'] / 1e6:.0f}"
            for name, peak in one["peak_bytes"].items()
        )
        lines.append(f"| {one['ranks']} | {one['bytes_of_a_rank'] / 1e6:.0f} | {peaks} |")
    return "\n".join(lines)
