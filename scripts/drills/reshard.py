#!/usr/bin/env python3
"""Save under one layout and load under another, to the bit: layouts of 1, 2, 4 and 8 ranks.

    python scripts/drills/reshard.py (--all | --row LAYOUT | --sample N) [--first N] [--out FILE]

A layout is a mesh with a way to divide the states, a length of chunks, a schedule and a rule who
writes. Ranks are simulated one behind the other; shard files, index, plans and reads are real, and
every element of the master and both moments is compared. `--all`: every layout to every other;
`--row`: from and to this one, all others; `--sample`: that many random pairs besides. Results are
added to --out line by line, and pairs that stand there are not run again: give the same command to
go on. Exit status 0: all that were compared hold; 2: none was chosen.
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

from optimus.checkpoint import format as format_module  # noqa: E402
from optimus.checkpoint import shard_file  # noqa: E402
from optimus.checkpoint.format import Index  # noqa: E402
from tests.kit.layouts.reshard import (  # noqa: E402  # noqa: E402
    BLOCK_BYTES,
    Layout,
    Pair,
    all_layouts,
    all_shapes,
    assert_loads,
    save,
    whole_states,
)


def choose(every: list[Layout], args: argparse.Namespace) -> list[Pair]:
    """Pairs (saved under, loaded under), those of one save together."""
    pairs = list(itertools.product(every, every)) if args.all else []
    if args.row:
        (one,) = [layout for layout in every if str(layout) == args.row]
        pairs += [(one, other) for other in every] + [(other, one) for other in every]
    generator = random.Random(args.seed)
    pairs += [(generator.choice(every), generator.choice(every)) for _ in range(args.sample)]
    return sorted(dict.fromkeys(pairs))


class Saved:
    """The files of one layout at a time."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._layout: Layout | None = None

    def under(self, layout: Layout) -> tuple[Path, Index, dict]:
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
    shard_file.BLOCK_BYTES = format_module.BLOCK_BYTES = BLOCK_BYTES
    every = all_layouts()
    if args.row and args.row not in map(str, every):
        print(f"--row {args.row}: no such layout; one is {every[-1]}", file=sys.stderr)
        return 2
    if not (args.all or args.row or args.sample > 0):
        print("nothing to compare: give --all, --row LAYOUT or --sample N", file=sys.stderr)
        return 2
    results = Results(args.out)
    done = {record["pair"]: record for record in results.records}
    pairs = choose(every, args)
    left = [pair for pair in pairs if _name(pair) not in done][: args.first or None]
    print(f"{len(every)} layouts, {len(pairs)} pairs, {len(pairs) - len(left)} done or put off")
    with tempfile.TemporaryDirectory() as scratch:
        saved = Saved(Path(scratch))
        for number, (one, other) in enumerate(left, 1):
            start, broken = time.monotonic(), ""
            try:
                directory, index, states = saved.under(one)
                assert_loads(directory, index, other.holdings(), states)
            except Exception:  # whatever it is, it is this pair's, and the next is to be tried
                broken = traceback.format_exc()
                print(f"{_name((one, other))}:\n{broken}", flush=True)
            pair, seconds = _name((one, other)), time.monotonic() - start
            done[pair] = results.add(pair=pair, broken=broken, s=seconds)
            if number % 50 == 0:
                print(f"{number}/{len(left)}", flush=True)
    records = [done[_name(pair)] for pair in pairs if _name(pair) in done]
    failed = [record["pair"] for record in records if record["broken"]]
    print(f"{len(records)} pairs of {len(pairs)} compared; broken: {len(failed)}")
    print("\n".join(failed), end="\n" if failed else "")
    return 1 if failed else 0


def _name(pair: Pair) -> str:
    return f"{pair[0]} to {pair[1]}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="reshard.jsonl", help="results")
    parser.add_argument("--all", action="store_true", help="every layout to every other")
    parser.add_argument("--row", default="", metavar="LAYOUT", help="from and to this one, all")
    parser.add_argument("--sample", type=int, default=0, help="random pairs")
    parser.add_argument("--seed", type=int, default=0, help="of the random pairs")
    parser.add_argument("--first", type=int, default=0, help="stop after so many; 0: all")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
