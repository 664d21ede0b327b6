#!/usr/bin/env python3
"""Compare the times of a training step in this checkout and in another checkout.

    git worktree add /tmp/before COMMIT && python scripts/bench/paired_step.py /tmp/before

Each round runs `optimus bench step` in the two checkouts, in alternating order. The ratio of a
round is the time in this checkout divided by the time in the other checkout. The script prints the
median ratio of all rounds with its 95 % confidence interval, once for CPU time and once for
wall-clock time. An interrupt (Ctrl-C) ends the measurement and prints the result so far.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]


def bench(checkout: Path, config: Path, steps: int, overrides: list[str]) -> dict:
    words = [sys.executable, "-m", "optimus.cli", "bench", "step", str(config)]
    settings = ["train.dtype=fp32", "train.threads=1", "train.device=cpu", *overrides]
    command = [*words, *settings, "--steps", str(steps), "--json"]
    # Without PYTHONPATH, the kernels of both checkouts would come from the installed checkout.
    env = os.environ | {"PYTHONPATH": f"{checkout}:{checkout / 'kernels'}"}
    done = subprocess.run(
        command, cwd=checkout, env=env, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def interval(ratios: list[float], samples: int = 10_000) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median of `ratios`, estimated by bootstrap with
    `samples` random samples and a fixed seed."""
    chance = random.Random(0)
    medians = sorted(
        statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(samples)
    )
    return medians[samples // 40], medians[-samples // 40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--config", type=Path, default=HERE / "configs/run/demo.toml")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    ratios: dict[str, list[float]] = {"cpu": [], "wall": []}
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(args.rounds):
            both = (HERE, args.other.resolve())
            order = both if number % 2 else both[::-1]
            settings = (args.config.resolve(), args.steps, args.overrides)
            results = {checkout: bench(checkout, *settings) for checkout in order}
            for clock, values in ratios.items():
                new, old = (results[checkout][f"ours_{clock}_s"] for checkout in both)
                values.append(new / old)
    if not ratios["wall"]:
        parser.exit(1, "no round is complete\n")
    for clock, values in ratios.items():
        low, high = interval(values)
        print(
            f"{clock} time, this / other checkout: {statistics.median(values):.3f} "
            f"[{low:.3f}, {high:.3f}], {len(values)} rounds"
        )


if __name__ == "__main__":
    main()
