#!/usr/bin/env python3
"""Measure the time and memory of shuffling and sharding, and the scaling of tokenization.

    python scripts/bench/data_shuffle.py ratio [--megabytes 1000] [--context 4096] [--rounds 5]
    python scripts/bench/data_shuffle.py memory [--instances 10000000] [--memory 256MB]
    python scripts/bench/data_shuffle.py scaling --input GLOB --tokenizer FILE [--rounds 3]

`ratio` divides the time of shuffling and sharding by the time to copy the same bytes, for each
sharding strategy (`gather` and `bucket`). `memory` measures the peak resident memory of shuffling
and sharding under the limit `--memory`. `scaling` compares two times: one worker tokenizes a
corpus, and two workers tokenize two copies of the corpus. Each command prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from data_loader import save_tokenizer  # noqa: E402

from data_prep import layout  # noqa: E402
from data_prep.cli import main as optimus_data  # noqa: E402
from data_prep.cli.options import size as parse_size  # noqa: E402
from data_prep.cli.options import whole  # noqa: E402
from data_prep.pipeline.run import ShardRequest, shard  # noqa: E402
from data_prep.pipeline.shard import divide_memory  # noqa: E402
from data_prep.pipeline.shuffle import ShuffleRequest, shuffle  # noqa: E402
from data_prep.sources.inputs import find_inputs  # noqa: E402
from optimus.io import files  # noqa: E402
from tests.data_prep.corpus import peak_memory  # noqa: E402

VOCAB = 1 << 16
UNIT_TOKENS = 32 << 20


def make_token_arrays(out: Path, tokens: int) -> None:
    """Write `tokens` random 16-bit token ids to token files in `out`, with `optimus-data
    import`."""
    save_tokenizer(out.with_suffix(".json"), VOCAB)
    rng, folder = np.random.default_rng(0), out.with_suffix(".ids")
    folder.mkdir()
    for number, first in enumerate(range(0, tokens, UNIT_TOKENS)):
        ids = rng.integers(1, VOCAB, min(UNIT_TOKENS, tokens - first), np.uint16)
        ids[-1] = 0  # the end of a document
        np.save(folder / f"{number:05d}.npy", ids)
    words = ["import", "--input", str(folder), "--tokenizer", str(out.with_suffix(".json"))]
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for the JSON result
        assert optimus_data([*words, "--out", str(out), "--workers", "1"]) == 0
    shutil.rmtree(folder)


def copy(source: Path, target: Path, block_bytes: int, file_bytes: int) -> None:
    """Copy the token ids of all unit-*.npy files in `source`, in order, to new files of
    `file_bytes` bytes in `target`. Read and write at most `block_bytes` bytes at a time."""
    target.mkdir()
    names = sorted(source.glob("unit-?????.npy"))
    buffer = memoryview(bytearray(block_bytes))
    left, number, out = 0, 0, None
    for name in names:
        with open(name, "rb", buffering=0) as file:
            file.seek(layout.HEADER_BYTES)
            while count := file.readinto(buffer[: min(block_bytes, left or file_bytes)]):
                if out is None:
                    out = open(target / str(number), "wb", buffering=0)  # noqa: SIM115
                    left, number = file_bytes, number + 1
                out.write(buffer[:count])
                left -= count
                if left == 0:
                    os.fsync(out.fileno())
                    out.close()
                    out = None
    if out is not None:
        os.fsync(out.fileno())
        out.close()


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Call `work`. Return the wall-clock seconds and the CPU seconds of the call."""
    os.sync()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def ratio(args: argparse.Namespace) -> dict:
    row_bytes = 2 * args.context
    rows = args.megabytes * 10**6 // row_bytes
    request = ShuffleRequest(args.context, seed=1, shard_bytes=args.shard_size)
    _, memory = divide_memory(args.memory, 1)
    block = min(memory * 3 // 4, args.shard_size)  # a shard that fits in memory is one block
    times: dict[str, list[tuple[float, float]]] = {"copy": [], "gather": [], "bucket": []}
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="data-shuffle-") as base:
        source = Path(base, "source")
        make_token_arrays(source, rows * args.context)

        def prepare(out: Path, strategy: str) -> None:
            shuffle(source, out, request)
            shard(out, ShardRequest(1, args.memory, strategy))

        for turn in range(args.rounds + 1):
            for name in times:
                out = Path(base, "out")
                done = timed(
                    functools.partial(copy, source / "tokens", out, block, args.shard_size)
                    if name == "copy"
                    else functools.partial(prepare, out, name)
                )
                shutil.rmtree(out)
                if turn:  # the first turn only warms the page cache
                    times[name].append(done)
    result: dict = {"rows": rows, "row_bytes": row_bytes, "block_bytes": block}
    for name, pairs in times.items():
        walls = sorted(wall for wall, _ in pairs)
        result[name] = {
            "wall_s": round(statistics.median(walls), 3),
            "wall_range_s": [round(walls[0], 3), round(walls[-1], 3)],
            "cpu_s": round(statistics.median(cpu for _, cpu in pairs), 3),
        }
        against = [a / b for (a, _), (b, _) in zip(pairs, times["copy"], strict=True)]
        result[name]["to_copy"] = [round(q, 3) for q in np.quantile(against, [0, 0.5, 1])]
    return result


def memory(args: argparse.Namespace) -> dict:
    """Measure the peak resident memory of shuffling and sharding many short rows, with each
    strategy (`gather` and `bucket`). Return the peaks, and True if the two strategies write
    identical shards."""
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="data-shuffle-") as base:
        source = Path(base, "source")
        make_token_arrays(source, args.instances * args.context)
        result: dict = {"instances": args.instances, "context": args.context, "limit": args.memory}
        for strategy in ("gather", "bucket"):
            out, start = str(Path(base, strategy)), time.time()
            order = ["shuffle", str(source), "--to", out, "--context", str(args.context)]
            shards = ["shard", out, "--workers", "1", "--memory", str(args.memory)]
            peak = max(map(peak_memory, (order, [*shards, "--strategy", strategy])))
            result[strategy] = {
                "peak_bytes": peak,
                "within_limit": peak <= args.memory,
                "wall_s": round(time.time() - start, 1),
            }
        gather, bucket = (
            sorted(Path(base, name, "shards").iterdir()) for name in ("gather", "bucket")
        )
        result["identical"] = all(
            files.xxh3_file(a) == files.xxh3_file(b) for a, b in zip(gather, bucket, strict=True)
        )
    return result


def scaling(args: argparse.Namespace) -> dict:
    """Measure the weak scaling of tokenization: one worker tokenizes a corpus, and two workers
    tokenize two copies of the corpus. Return the wall-clock seconds of each round, and the minimum,
    median and maximum of two efficiencies. The first is computed from wall-clock time, the second
    from CPU time."""
    times: dict[int, list[float]] = {1: [], 2: []}
    cpu: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="data-shuffle-") as base:
        inputs = find_inputs(args.input)
        for half in ("a", "b"):
            for number, file in enumerate(inputs):
                link = Path(base, half, f"{number:06d}-{Path(file.name).name}")
                link.parent.mkdir(exist_ok=True)
                shutil.copyfile(file.name, link)
        for turn in range(args.rounds + 1):
            for workers, halves in ((1, ["a"]), (2, ["a", "b"])):
                out = Path(base, "out")
                command = [sys.executable, "-m", "data_prep.cli", "tokenize", "--input"]
                command += [str(Path(base, half)) for half in halves]
                command += ["--tokenizer", args.tokenizer, "--out", str(out)]
                # The documents of the two copies have the same ids. Without `--id-field ""`,
                # tokenize would refuse the second document of each id.
                command += ["--workers", str(workers), "--unit-size", "1MB", "--id-field", ""]
                start, before = time.perf_counter(), os.times()
                subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
                after = os.times()
                if turn:
                    times[workers].append(time.perf_counter() - start)
                    used = after.children_user + after.children_system
                    cpu[workers].append(used - before.children_user - before.children_system)
                shutil.rmtree(out)
    against = [single / double for single, double in zip(times[1], times[2], strict=True)]
    return {
        "input_bytes": sum(file.size for file in inputs),
        "one_worker_s": [round(s, 2) for s in sorted(times[1])],
        "two_workers_twice_the_text_s": [round(s, 2) for s in sorted(times[2])],
        "efficiency": [round(q, 3) for q in np.quantile(against, [0, 0.5, 1])],
        "efficiency_by_cpu": [
            round(q, 3)
            for q in np.quantile(
                [2 * single / double for single, double in zip(cpu[1], cpu[2], strict=True)],
                [0, 0.5, 1],
            )
        ],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("ratio", "memory", "scaling"))
    parser.add_argument("--megabytes", type=whole(1), default=1000)
    parser.add_argument("--context", type=whole(2), default=0)
    parser.add_argument("--shard-size", type=parse_size, default=64 << 20)
    parser.add_argument("--memory", type=parse_size, default=0)
    parser.add_argument("--instances", type=whole(1), default=10**7)
    parser.add_argument("--rounds", type=whole(1), default=5)
    parser.add_argument("--input", nargs="+")
    parser.add_argument("--tokenizer")
    parser.add_argument("--dir", help="directory for the temporary files (default: the system's)")
    args = parser.parse_args(argv)
    args.context = args.context or (4096 if args.what == "ratio" else 16)
    args.memory = args.memory or (10**9 if args.what == "ratio" else 256 * 10**6)
    result = {"ratio": ratio, "memory": memory, "scaling": scaling}[args.what](args)
    result = {
        "what": args.what,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 1),
        **result,
    }
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
