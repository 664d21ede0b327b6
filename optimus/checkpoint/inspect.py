"""Facts about checkpoints, ready for JSON. Only `verify` needs torch."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optimus.checkpoint import store
from optimus.checkpoint.format import MANIFEST, Manifest, is_checkpoint, read_manifest
from optimus.checkpoint.store import SET_ASIDE
from optimus.config.axes import AXES
from optimus.errors import CheckpointError, OptimusError, one_line
from optimus.io import files

_HEADER_BYTES = 100_000_000
"""Of a safetensors file, at most: as the safetensors library has it."""
_MOST = 1 << 56
_HASHED_BYTES = 64 << 20
"""Larger files are left to `optimus checkpoint verify`."""
_UNKNOWN = (
    *("kind", "step", "tokens", "updates", "origin", "layout", "ranks"),
    *("params", "bytes_per_param", "saved_at", "age_s"),
)


def find(path: str | os.PathLike) -> list[Path]:
    """The checkpoints of a run by step, then those set aside and what is not sealed; or the one
    checkpoint that `path` is. Raises CheckpointError where there is none."""
    path = Path(path)
    if is_checkpoint(path):
        return [path]
    directory = store.checkpoints_dir(path)
    if not directory.is_dir():
        what = "neither a run directory nor a checkpoint" if path.exists() else "no such directory"
        raise CheckpointError(f"{path}: {what}")
    aside = [one for one in (directory / SET_ASIDE).glob("*") if one.is_dir()]
    unsealed = [one for one in directory.iterdir() if files.is_temporary(one) and one.is_dir()]
    found = store.find_all(path) + sorted(aside) + sorted(unsealed)
    if not found:
        raise CheckpointError(f"{path}: a run directory without a checkpoint")
    return found


def look_at(path: Path) -> dict[str, Any]:
    """What can be told at once: of large files sizes and headers are compared, not every byte.

    `state` is "valid", "damaged" or "unsealed", and `problem` says why; what cannot be known is
    None. `bytes` are all on disk, `bytes_per_param` of them.
    """
    about: dict[str, Any] = {
        "name": path.name,
        "path": str(path),
        "state": "valid",
        "problem": "",
        "set_aside": path.parent.name == SET_ASIDE,
        **dict.fromkeys(_UNKNOWN),
        "bytes": 0,
    }
    try:
        about["bytes"] = _directory_bytes(path)
        if files.is_temporary(path):
            why = "a save that has not ended or never will"
            return about | {"state": "unsealed", "problem": why}
        manifest = read_manifest(path)
        about |= _facts(manifest)
        manifest.check(_HASHED_BYTES)
        if manifest.is_sharded:
            manifest.check_rows(manifest.index())
        params = _count_params(manifest)
        about |= {"params": params, "bytes_per_param": about["bytes"] / params if params else None}
    except CheckpointError as error:
        about |= {"state": "damaged", "problem": str(error)}
    except OSError as error:
        problem = f"{error.filename or path}: {error.strerror}"
        about |= {"state": "damaged", "problem": problem}
    return about


def _facts(manifest: Manifest) -> dict[str, Any]:
    saved_at = (manifest.path / MANIFEST).stat().st_mtime
    return {
        "kind": manifest.kind,
        "step": manifest.step,
        "tokens": manifest.tokens,
        "updates": manifest.updates,
        "origin": manifest.origin,
        "layout": _layout(manifest),
        "ranks": _world(manifest.ranks) if manifest.ranks else None,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(saved_at)),
        "age_s": round(time.time() - saved_at, 3),
    }


def _world(ranks: Mapping[str, int]) -> int:
    """`ranks` as in a manifest, which may be older than an axis."""
    return math.prod(ranks.get(axis, 1) for axis in AXES)


def _layout(manifest: Manifest) -> str | None:
    """Such as "pp2 dp4 ep1 tp1 epso 1f1b bf16"; None for a model that no run of ours saved."""
    settings = manifest.settings
    if "optim.sharding" not in settings:
        return None
    sizes = manifest.ranks or {axis: settings.get(f"parallel.{axis}", 1) for axis in AXES}
    words = [f"{axis}{sizes.get(axis, 1) or '?'}" for axis in AXES] + [settings["optim.sharding"]]
    words += [settings.get("parallel.schedule", "?")] if sizes["pp"] > 1 else []
    return " ".join([*words, settings.get("train.dtype", "?")])


def _directory_bytes(path: Path) -> int:
    """Return the size of all files below a directory. A loop, since a directory from somebody else
    may contain thousands of nested ones."""
    total, directories = 0, [str(path)]
    while directories:
        with os.scandir(directories.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    directories.append(entry.path)
                elif entry.is_file():
                    total += entry.stat().st_size
    return total


def _count_params(manifest: Manifest) -> int:
    """Raises CheckpointError."""
    if manifest.is_sharded:
        return sum(math.prod(shape) for shape in manifest.index().shapes.values())
    names = [one.name for one in manifest.files if one.name.endswith(".safetensors")]
    return sum(_count_elements(manifest.path / name) for name in names)


def _count_elements(path: Path) -> int:
    """Of all tensors of a safetensors file, from its header."""
    try:
        with files.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size  # more than that is damage
            length = min(size, _HEADER_BYTES, int.from_bytes(file.read(8), "little"))
            header = json.loads(file.read(length))
        shapes = [one["shape"] for name, one in header.items() if name != "__metadata__"]
        if any(type(n) is not int or not 0 <= n < _MOST for shape in shapes for n in shape):
            raise ValueError("a shape is no list of sizes")
        params = sum(map(math.prod, shapes))
        if params >= _MOST:
            raise ValueError(f"more than {_MOST} parameters")
        return params
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {one_line(error)}") from None


def list_checkpoints(path: str | os.PathLike) -> dict[str, Any]:
    """All that are there. `next_start` is the name of that from which `checkpoint.load = "auto"`
    would go on, `full_by_model` how often the newest model-only one fits into the newest full one.
    Raises CheckpointError where there is none."""
    found = [look_at(one) for one in find(path)]
    found = [one for one in found if os.path.isdir(one["path"])]  # a run may seal or remove some
    newest: dict[str, Any] = {}
    for one in found:
        if one["state"] == "valid" and not one["set_aside"]:
            newest[one["kind"]] = one
    full, model = newest.get("full"), newest.get("model")
    ratio = full["bytes"] / model["bytes"] if full and model else None
    return {
        "path": str(path),
        "checkpoints": found,
        "next_start": full["name"] if full else None,
        "full_by_model": ratio,
    }


def verify(path: str | os.PathLike, threads: int = 0) -> dict[str, Any]:
    """Compare every byte of a checkpoint, or of all that a run could load, with its checksums, and
    its weights with its configurations, as a load does. Imports torch.

    Each of `checkpoints` has `name`, `kind`, `bytes`, `s` and `problems`, a line for each file that
    is damaged. Raises CheckpointError where there is nothing to verify.
    """
    paths = [Path(path)] if is_checkpoint(path) else store.find_all(path)
    if not paths:
        find(path)
        raise CheckpointError(f"{path}: no sealed checkpoint; only unsealed or set aside ones")
    results = [(one, _verify_one(one, threads)) for one in paths]
    checked = [result for one, result in results if one.is_dir()]  # a run may remove old ones
    if not checked:
        raise CheckpointError(f"{path}: removed while it was read; give the command again")
    damaged = [one["name"] for one in checked if one["problems"]]
    return {"path": str(path), "valid": not damaged, "damaged": damaged, "checkpoints": checked}


def _verify_one(path: Path, threads: int) -> dict[str, Any]:
    from optimus.checkpoint.weights import check_content

    start, kind, size = time.perf_counter(), None, 0
    try:
        manifest = read_manifest(path)
        kind, size = manifest.kind, sum(one.size for one in manifest.files)
        problems = manifest.problems(threads)
        if not problems:
            check_content(manifest)
        if manifest.is_sharded and not problems:
            size += sum(shard.size for shard in manifest.index().shards)
    except OptimusError as error:  # ConfigError: of a configuration in it
        problems = [str(error)]
    seconds = time.perf_counter() - start
    return {"name": path.name, "kind": kind, "bytes": size, "s": seconds, "problems": problems}


def show(path: str | os.PathLike) -> dict[str, Any]:
    """All that is known of one checkpoint, of a run's newest valid full one: what `look_at` tells,
    its files, its settings, and how evenly its ranks wrote. Raises CheckpointError."""
    one = Path(path)
    if not is_checkpoint(one):
        find(path)
        newest = store.newest_valid(path, thorough=False)
        if newest is None:
            raise CheckpointError(f"{path}: a run directory without a valid full checkpoint")
        one = newest.path
    manifest, about = read_manifest(one), look_at(one)
    about["files"] = {entry.name: entry.size for entry in manifest.files}
    about["loss_scale"], about["settings"] = manifest.loss_scale, dict(manifest.settings)
    about["mesh"] = manifest.ranks
    about["writers"] = None
    if manifest.is_sharded and about["state"] == "valid":
        index = manifest.index()
        about["tensors"] = len(index.shapes)
        sizes = {shard.writer: shard.size for shard in index.shards}
        even = balance(sizes, manifest.ranks) if manifest.ranks else {}
        about["writers"] = {"files": len(sizes)} | even
        about["scatter"] = manifest.settings.get("checkpoint.scatter")
    return about


def balance(sizes: Mapping[int, int], ranks: Mapping[str, int]) -> dict[str, Any]:
    """How evenly ranks and nodes wrote: `sizes` are bytes by rank, `ranks` as in a manifest.

    Stages hold different parameters, which nobody else could write: so greatest by mean is taken
    of the ranks of each stage, and of the nodes that have ranks of it, and the worst stage counts.
    """
    world = _world(ranks)
    stage = world // ranks["pp"]
    every = [sizes.get(rank, 0) for rank in range(world)]
    by_rank, by_node = [], []
    for first in range(0, world, stage):
        written = every[first : first + stage]
        by_rank.append(_greatest_by_mean(written))
        nodes = itertools.groupby(range(first, first + stage), lambda r: r // ranks["per_node"])
        groups = [[every[rank] for rank in node] for _, node in nodes]
        most = max(map(len, groups))  # a node that stages share is in part another's
        by_node.append(_greatest_by_mean([sum(node) for node in groups if len(node) == most]))
    return {
        "largest_bytes": max(every),
        "smallest_bytes": min(every),
        "rank_max_by_mean": max(by_rank),
        "node_max_by_mean": max(by_node),
    }


def _greatest_by_mean(sizes: Sequence[int]) -> float:
    return max(sizes) * len(sizes) / sum(sizes) if any(sizes) else 1.0
