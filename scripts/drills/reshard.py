#!/usr/bin/env python3
"""Save checkpoints under one layout, load them under another, and compare the bits of the states.

    python scripts/drills/reshard.py (--all | --row LAYOUT | --sample N) [--first N] [--out FILE]

A layout is a mesh of 1, 2, 4 or 8 ranks, and values of optim.sharding, optim.chunk_length,
parallel.schedule and checkpoint.scatter. Ranks are simulated one after the other, but the simulated
ranks write and read real shard files. All elements of the master weights and of the two moments are
compared. `--all` selects all pairs of a saving and a loading layout; `--row` selects all pairs that
contain LAYOUT; `--sample` selects N random pairs in addition to the pairs of the other options.
Results are appended to --out; the same command continues after the last result. Exit status 0: all
loaded bits equal the saved bits; 2: no pair was selected.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from results import Results

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from optimus.checkpoint.index import Index  # noqa: E402
from tests.kit.layouts.reshard import (  # noqa: E402
    BLOCK_BYTES,
    Layout,
    Pair,
    WholeStates,
    all_layouts,
    all_shapes,
    assert_loads,
    save,
    whole_states,
)
from tests.kit.runs.saves import block_bytes  # noqa: E402


def select(layouts: list[Layout], args: argparse.Namespace) -> list[Pair]:
    """Return the pairs (saving layout, loading layout) that the options select, without duplicates,
    sorted by saving layout."""
    pairs = list(itertools.product(layouts, layouts)) if args.all else []
    if args.row:
        (row,) = [layout for layout in layouts if str(layout) == args.row]
        pairs += [(row, other) for other in layouts] + [(other, row) for other in layouts]
    generator = random.Random(args.seed)
    pairs += [(generator.choice(layouts), generator.choice(layouts)) for _ in range(args.sample)]
    return sorted(dict.fromkeys(pairs))


class Saver:
    """Writer of checkpoints in the directory `scratch`. If `save` is called twice in succession
    with the same layout, the second call returns the checkpoint of the first call."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._layout: Layout | None = None

    def save(self, layout: Layout) -> tuple[Path, Index, WholeStates]:
        """Save a checkpoint under `layout`. Return the directory of the checkpoint, its index, and
        the saved states."""
        if layout != self._layout:
            holdings = layout.holdings()
            self._states = whole_states(all_shapes(holdings), seed=1)
            self._directory = self._scratch / str(layout)
            self._directory.mkdir()
            self._index = save(self._directory, holdings, self._states, layout.scatter)
            self._layout = layout
        return self._directory, self._index, self._states


def main() -> int:
    args = _arguments()
    layouts = all_layouts()
    if args.row and args.row not in map(str, layouts):
        print(f"--row {args.row}: no such layout; use for example {layouts[-1]}", file=sys.stderr)
        return 2
    if not (args.all or args.row or args.sample > 0):
        print(
            "no pair of layouts is selected; use --all, --row LAYOUT or --sample N", file=sys.stderr
        )
        return 2
    results = Results(args.out)
    done = {record["pair"]: record for record in results.records}
    pairs = select(layouts, args)
    remaining = [pair for pair in pairs if _name(pair) not in done][: args.first or None]
    print(f"{len(layouts)} layouts, {len(pairs)} pairs, {len(remaining)} to do now")
    with tempfile.TemporaryDirectory() as scratch, block_bytes(BLOCK_BYTES):
        saver = Saver(Path(scratch))
        for number, (saving, loading) in enumerate(remaining, 1):
            pair, start, broken = _name((saving, loading)), time.monotonic(), ""
            try:
                directory, index, states = saver.save(saving)
                assert_loads(directory, index, loading.holdings(), states)
            except Exception:  # record the error, and continue with the next pair
                broken = traceback.format_exc()
                print(f"{pair}:\n{broken}", flush=True)
            done[pair] = results.add(pair=pair, broken=broken, s=time.monotonic() - start)
            if number % 50 == 0:
                print(f"{number}/{len(remaining)}", flush=True)
    records = [done[_name(pair)] for pair in pairs if _name(pair) in done]
    failed = [record["pair"] for record in records if record["broken"]]
    print(f"{len(records)} of {len(pairs)} pairs of layouts compared; failed: {len(failed)}")
    print("\n".join(failed), end="\n" if failed else "")
    return 1 if failed else 0


def _name(pair: Pair) -> str:
    return f"{pair[0]} to {pair[1]}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="reshard.jsonl", help="file of the results; -: none")
    parser.add_argument("--all", action="store_true", help="all pairs")
    parser.add_argument("--row", default="", metavar="LAYOUT", help="all pairs with this layout")
    parser.add_argument("--sample", type=int, default=0, help="number of random pairs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random pairs")
    parser.add_argument("--first", type=int, default=0, help="number of pairs to run; 0: all")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
