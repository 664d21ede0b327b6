"""Functions that describe checkpoints as JSON values, for the commands `optimus checkpoint`. Only
`verify` needs torch."""

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
from optimus.checkpoint.store import QUARANTINE
from optimus.config.axes import AXES
from optimus.errors import CheckpointError, OptimusError, one_line
from optimus.io import files
from optimus.io.workspace import find_workspaces

_HEADER_BYTES = 100_000_000
"""Maximum size, in bytes, of the header of a safetensors file. The safetensors library has the same
limit."""
_MOST = 1 << 56
_HASHED_BYTES = 64 << 20
"""Maximum size, in bytes, of a file whose hash `describe` checks."""
_UNKNOWN = (
    *("kind", "step", "tokens", "updates", "origin", "layout", "ranks"),
    *("params", "bytes_per_param", "saved_at", "age_s"),
)


def find(path: str | os.PathLike) -> list[Path]:
    """Return the directories of all checkpoints at `path`.

    Args:
        path: A checkpoint or a run directory.

    Returns:
        For a run directory, the checkpoints in the order of steps, then the checkpoints in the
        folder QUARANTINE, then the temporary directories of unfinished saves and removals. For a
        checkpoint, only `path`.

    Raises:
        CheckpointError: There is no checkpoint at `path`.
    """
    path = Path(path)
    if is_checkpoint(path):
        return [path]
    directory = store.checkpoints_dir(path)
    if not directory.is_dir():
        reason = (
            "neither a run directory nor a checkpoint" if path.exists() else "no such directory"
        )
        raise CheckpointError(f"{path}: {reason}")
    aside = [entry for entry in (directory / QUARANTINE).glob("*") if entry.is_dir()]
    unfinished = [
        path
        for folder in (directory, *find_workspaces(directory))
        for path in folder.iterdir()
        if files.is_temporary(path) and path.is_dir()
    ]
    paths = store.find_all(path) + sorted(aside) + sorted(unfinished)
    if not paths:
        raise CheckpointError(f"{path}: a run directory without a checkpoint")
    return paths


def describe(path: Path) -> dict[str, Any]:
    """Check a checkpoint and return a dict that describes it.

    The function checks the hashes of small files, but only the sizes and headers of large files. In
    the dict, `state` is "valid", "damaged" or "unsealed" (an unfinished save or removal). `problem`
    describes the damage or the unfinished action, and is "" for a valid checkpoint. `bytes` is the
    size of the directory, and `bytes_per_param` is `bytes` divided by the number of parameters.
    Unknown values are None.
    """
    about: dict[str, Any] = {
        "name": path.name,
        "path": str(path),
        "state": "valid",
        "problem": "",
        "set_aside": path.parent.name == QUARANTINE,
        **dict.fromkeys(_UNKNOWN),
        "bytes": 0,
    }
    try:
        about["bytes"] = _directory_bytes(path)
        if files.is_temporary(path):
            reason = "a save that is in progress or was interrupted"
            if store.is_removed(path):
                reason = "an old checkpoint whose removal is in progress or has failed"
            return about | {"state": "unsealed", "problem": reason}
        manifest = read_manifest(path)
        about |= _facts(manifest)
        manifest.check(_HASHED_BYTES)
        if manifest.is_sharded:
            manifest.check_rows(index := manifest.index())
            params = sum(math.prod(shape) for shape in index.shapes.values())
        else:
            names = (entry.name for entry in manifest.files)
            params = sum(_count_elements(path / n) for n in names if n.endswith(".safetensors"))
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
    """Return the number of ranks of a mesh: the product of the axis sizes in `Manifest.ranks`. The
    size of an axis without an entry is 1."""
    return math.prod(ranks.get(axis, 1) for axis in AXES)


def _layout(manifest: Manifest) -> str | None:
    """Return the layout of a run as text, such as "pp2 dp4 ep1 tp1 epso 1f1b bf16": sizes of the
    mesh axes, sharding, pipeline schedule and dtype. Return None for a checkpoint that was
    converted from a Hugging Face directory."""
    settings = manifest.settings
    if "optim.sharding" not in settings:
        return None
    sizes = manifest.ranks or {axis: settings.get(f"parallel.{axis}", 1) for axis in AXES}
    words = [f"{axis}{sizes.get(axis, 1) or '?'}" for axis in AXES] + [settings["optim.sharding"]]
    # The settings of a manifest may have values of any JSON type.
    if sizes["pp"] not in (0, 1):
        words.append(settings.get("parallel.schedule", "?"))
    return " ".join(map(str, [*words, settings.get("train.dtype", "?")]))


def _directory_bytes(path: Path) -> int:
    """Return the total size of all files in a directory and its subdirectories, in bytes."""
    # A loop instead of recursion: a downloaded directory may have thousands of nested directories.
    total, directories = 0, [str(path)]
    while directories:
        with os.scandir(directories.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    directories.append(entry.path)
                elif entry.is_file():
                    total += entry.stat().st_size
    return total


def _count_elements(path: Path) -> int:
    """Count the elements of all tensors in a safetensors file. Only the header of the file is
    read."""
    try:
        with files.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size  # a damaged file may give a longer header
            length = min(size, _HEADER_BYTES, int.from_bytes(file.read(8), "little"))
            header = json.loads(file.read(length))
        shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
        if any(type(n) is not int or not 0 <= n < _MOST for shape in shapes for n in shape):
            raise ValueError("a shape is not a list of sizes")
        params = sum(map(math.prod, shapes))
        if params >= _MOST:
            raise ValueError(f"more than {_MOST} parameters")
        return params
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {one_line(error)}") from None


def list_checkpoints(path: str | os.PathLike) -> dict[str, Any]:
    """Describe all checkpoints of a run.

    Returns:
        A dict with the keys `path`; `checkpoints`, a list of the results of `describe`;
        `next_start`, the name of the checkpoint from which a run with `checkpoint.load = "auto"`
        would continue; and `full_by_model`, the size of the newest valid full checkpoint divided by
        the size of the newest valid model-only checkpoint. `next_start` is None if there is no
        valid full checkpoint. `full_by_model` is None if a valid checkpoint of either kind is
        missing.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    checkpoints = [describe(checkpoint) for checkpoint in find(path)]
    # A run may have renamed or removed some checkpoints in the meantime.
    checkpoints = [about for about in checkpoints if os.path.isdir(about["path"])]
    newest: dict[str, Any] = {}
    for about in checkpoints:
        if about["state"] == "valid" and not about["set_aside"]:
            newest[about["kind"]] = about
    full, model = newest.get("full"), newest.get("model")
    ratio = full["bytes"] / model["bytes"] if full and model else None
    return {
        "path": str(path),
        "checkpoints": checkpoints,
        "next_start": full["name"] if full else None,
        "full_by_model": ratio,
    }


def verify(path: str | os.PathLike, threads: int = 0) -> dict[str, Any]:
    """Compare every byte of each checkpoint with the checksums in the checkpoint's manifest. Also
    compare the names and shapes of the weights with the model configuration of the checkpoint.
    Imports torch.

    Args:
        path: A checkpoint, or a run directory. For a run directory, all checkpoints outside
            QUARANTINE are verified.
        threads: Number of threads, as for `in_threads`.

    Returns:
        A dict with the keys `path`; `valid`, True if no file is damaged; `damaged`, the names of
        damaged checkpoints; and `checkpoints`, a list with a dict for each checkpoint. This dict
        has the keys `name`, `kind`, `bytes`, `s` (duration of the check in seconds) and `problems`
        (a line for each damaged file).

    Raises:
        CheckpointError: There is no checkpoint.
    """
    paths = [Path(path)] if is_checkpoint(path) else store.find_all(path)
    if not paths:
        find(path)
        raise CheckpointError(
            f"{path}: nothing to verify, since the run has only unfinished saves or checkpoints in "
            f"{QUARANTINE}/; to verify a checkpoint in {QUARANTINE}/, give its path"
        )
    results = [(checkpoint, _verify_path(checkpoint, threads)) for checkpoint in paths]
    checked = [result for checkpoint, result in results if checkpoint.is_dir()]  # not removed
    if not checked:
        raise CheckpointError(
            f"{path}: every checkpoint was removed while it was read; run the same command again"
        )
    damaged = [result["name"] for result in checked if result["problems"]]
    return {"path": str(path), "valid": not damaged, "damaged": damaged, "checkpoints": checked}


def _verify_path(path: Path, threads: int) -> dict[str, Any]:
    from optimus.checkpoint.weights import check_content

    start, kind, size = time.perf_counter(), None, 0
    try:
        manifest = read_manifest(path)
        kind, size = manifest.kind, sum(entry.size for entry in manifest.files)
        problems = manifest.problems(threads)
        if not problems:
            check_content(manifest)
        if manifest.is_sharded and not problems:
            size += sum(shard.size for shard in manifest.index().shards)
    except OptimusError as error:  # ConfigError: invalid configuration file
        problems = [str(error)]
    seconds = time.perf_counter() - start
    return {"name": path.name, "kind": kind, "bytes": size, "s": seconds, "problems": problems}


def show(path: str | os.PathLike) -> dict[str, Any]:
    """Describe one checkpoint in detail.

    Args:
        path: A checkpoint or a run directory. For a run directory, the function describes the
            newest valid full checkpoint of the run.

    Returns:
        A dict with the keys of `describe`, and `files` (size in bytes of each file), `settings`,
        `loss_scale`, `mesh` and `writers`. A valid checkpoint with shard files also has the keys
        `tensors` (number of parameters) and `scatter` (value of `checkpoint.scatter`). For such a
        checkpoint, `writers` is a dict with the key `files` (number of shard files) and, if `mesh`
        is known, the keys of `balance`. For other checkpoints, `writers` is None.

    Raises:
        CheckpointError: There is no checkpoint, the run has no valid full checkpoint, or the
            manifest cannot be read.
    """
    directory = Path(path)
    if not is_checkpoint(directory):
        find(path)
        newest = store.newest_valid(path, thorough=False)
        if newest is None:
            raise CheckpointError(f"{path}: a run directory without a valid full checkpoint")
        directory = newest.path
    manifest, about = read_manifest(directory), describe(directory)
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
    """Return measures of the balance of shard file sizes over ranks and over nodes.

    The imbalance of sizes is their maximum divided by their mean. It is computed separately for
    each pipeline stage, because the stages have different parameters.

    Args:
        sizes: Bytes of the shard file of each rank. The keys are ranks.
        ranks: `Manifest.ranks`.

    Returns:
        A dict with four keys. `rank_max_by_mean` is the imbalance of the ranks of a stage: the
        greatest value of all stages. `node_max_by_mean` is the imbalance of the nodes of a stage:
        the greatest value of all stages. `largest_bytes` and `smallest_bytes` are the largest and
        the smallest number of bytes of a rank.
    """
    world = _world(ranks)
    stage = world // ranks["pp"]
    all_sizes = [sizes.get(rank, 0) for rank in range(world)]
    by_rank, by_node = [], []
    for first in range(0, world, stage):
        written = all_sizes[first : first + stage]
        by_rank.append(_greatest_by_mean(written))
        nodes = itertools.groupby(range(first, first + stage), lambda r: r // ranks["per_node"])
        groups = [[all_sizes[rank] for rank in node] for _, node in nodes]
        most = max(map(len, groups))  # ignore nodes that several stages share
        by_node.append(_greatest_by_mean([sum(node) for node in groups if len(node) == most]))
    return {
        "largest_bytes": max(all_sizes),
        "smallest_bytes": min(all_sizes),
        "rank_max_by_mean": max(by_rank),
        "node_max_by_mean": max(by_node),
    }


def _greatest_by_mean(sizes: Sequence[int]) -> float:
    return max(sizes) * len(sizes) / sum(sizes) if any(sizes) else 1.0
