#!/usr/bin/env python3
"""Damage the newest checkpoint of four writers in every way, and look what a run would load.

    python scripts/drills/corruption.py [--out corruption.jsonl] [--flips 10000] [--others 1000]

Two full checkpoints stand side by side. Each time the newer is damaged: a bit flipped, a file cut,
lengthened, removed, a stretch zeroed, two blocks or two files exchanged, a file of the other slot
put in its place. Then `verify` must find it, and a run must load the older one, or the newer where
its every element is right (what lies between parameters is not read). Counts are added to --out
every hundred times; give the same command to go on. Exit status 0: nothing went unseen or wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import random
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

from results import Results

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from optimus.checkpoint import index as index_module  # noqa: E402
from optimus.checkpoint import manager, manifest, shards  # noqa: E402
from optimus.checkpoint.index import INDEX, encode  # noqa: E402
from optimus.checkpoint.pieces import spans_to_write  # noqa: E402
from optimus.checkpoint.shards import Identity  # noqa: E402
from optimus.checkpoint.transfer import write_shard  # noqa: E402
from optimus.dist.collectives import Group  # noqa: E402
from optimus.model.tensor_files import as_bytes  # noqa: E402
from tests.checkpoint.test_corruption import load_as_a_run_does  # noqa: E402
from tests.helpers import damage, kill_points  # noqa: E402

WRITERS, BLOCK_BYTES = 4, 1000
UNSEEN, WRONG = "unseen by verify", "wrong values loaded"
FAULTS = {UNSEEN, WRONG}


def save(run_dir: Path, step: int) -> None:
    """What four ranks would."""
    final, name = manager.full_path(run_dir, step), uuid.uuid4().hex
    directory, written = manifest.begin(final), []
    for rank in range(WRITERS):
        states = kill_points.make_states(step, Group(WRITERS, rank))
        mesh, place = states.groups.mesh, states.groups.place
        parts = states.parts(spans_to_write(states.held, states.boxes, mesh, place))
        bytes_of = lambda state, span, of=states: as_bytes(of.memory(state, span))  # noqa: E731
        written.append(write_shard(directory, Identity(name, step, rank), parts, bytes_of))
    (directory / INDEX).write_bytes(encode(name, step, written, kill_points.SHAPES))
    (directory / "config.toml").write_text(f"step = {step}\n")
    names = {one.shard.name for one in written}
    manifest.finish(directory, final, kind="full", step=step, updates=step, shards=names)


Damage = Callable[[Path, Path, random.Random], None]


def in_content(change: Callable[[bytearray, random.Random], None]) -> Damage:
    def do(path: Path, other: Path, generator: random.Random) -> None:
        content = bytearray(path.read_bytes())
        change(content, generator)
        path.write_bytes(content)

    return do


def lengthen(path: Path, other: Path, generator: random.Random) -> None:
    path.write_bytes(path.read_bytes() + generator.randbytes(generator.randrange(1, 5000)))


def remove(path: Path, other: Path, generator: random.Random) -> None:
    path.unlink()


def exchange_blocks(path: Path, other: Path, generator: random.Random) -> None:
    content = path.read_bytes()
    if len(content) < 3 * BLOCK_BYTES:
        return
    blocks = [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]
    a, b = generator.sample(range(len(blocks) - 1), 2)
    blocks[a], blocks[b] = blocks[b], blocks[a]
    path.write_bytes(b"".join(blocks))


def exchange_files(path: Path, other: Path, generator: random.Random) -> None:
    """Two writers' files, or any two."""
    with_it = generator.choice([one for one in path.parent.iterdir() if one != path])
    content = path.read_bytes()
    path.write_bytes(with_it.read_bytes())
    with_it.write_bytes(content)


def stale(path: Path, other: Path, generator: random.Random) -> None:
    path.write_bytes((other / path.name).read_bytes())


KINDS: dict[str, Damage] = {
    "flip": in_content(damage.flip_one),
    "cut": in_content(damage.truncate),
    "zero": in_content(damage.zero),
    **{one.__name__: one for one in (lengthen, remove, exchange_blocks, exchange_files, stale)},
}


def try_once(run_dir: Path, kind: str, seed: int) -> str:
    """What became of it: "unchanged" if the damage changed no byte."""
    newest, older = (manager.full_path(run_dir, step) for step in (2, 1))
    whole = {path: path.read_bytes() for path in sorted(newest.iterdir())}
    generator = random.Random(f"{kind} {seed}")
    KINDS[kind](generator.choice(list(whole)), older, generator)
    try:
        if all(path.exists() and path.read_bytes() == content for path, content in whole.items()):
            return "unchanged"
        if manager.newest_valid(run_dir).step != 1:
            return UNSEEN
        return f"loaded {'the older' if load_as_a_run_does(run_dir) == 1 else 'rightly'}"
    except AssertionError:
        return WRONG
    finally:
        for path, content in whole.items():
            path.write_bytes(content)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="corruption.jsonl", help="counts so far")
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--others", type=int, default=1000, help="of each other kind")
    args = parser.parse_args()
    shards.BLOCK_BYTES = index_module.BLOCK_BYTES = BLOCK_BYTES
    kill_points.SHAPES = {"a": (70, 9), "b": (330,), "c": (40, 50)}  # several blocks a file
    results = Results(args.out)
    done = {kind: collections.Counter() for kind in KINDS}
    for record in results.records:
        done[record["kind"]].update(record["found"])
    with tempfile.TemporaryDirectory() as scratch:
        for step in (1, 2):
            save(Path(scratch), step)
        assert load_as_a_run_does(Path(scratch)) == 2
        for kind in KINDS:
            wanted = args.flips if kind == "flip" else args.others
            for first in range(done[kind].total(), wanted, 100):
                with contextlib.redirect_stderr(io.StringIO()):  # what a run says each time
                    found = collections.Counter(
                        try_once(Path(scratch), kind, seed)
                        for seed in range(first, min(first + 100, wanted))
                    )
                done[kind] += found
                results.add(kind=kind, found=found)
            print(f"{kind}: {dict(done[kind])}", flush=True)
    return int(any(found.keys() & FAULTS for found in done.values()))


if __name__ == "__main__":
    sys.exit(main())
