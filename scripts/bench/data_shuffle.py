#!/usr/bin/env python3
"""What shuffling and sharding cost, against reading and writing the same bytes; and at many rows.

    python scripts/bench/data_shuffle.py ratio [--megabytes 1000] [--context 4096] [--rounds 5]
    python scripts/bench/data_shuffle.py memory [--instances 10000000] [--memory 256MB]
    python scripts/bench/data_shuffle.py scaling --input GLOB --tokenizer FILE [--rounds 3]

`ratio` makes random token arrays, then takes turns within one run: a plain copy (read a block in
order, write it, fsync each file) in blocks and files as large as sharding's, `shuffle` + `shard` by
gather, and by bucket. `memory` measures the peak resident memory of sharding N short rows under a
limit. `scaling` gives one worker a corpus and two workers two such corpora. One JSON object each.
"""

from __future__ import annotations

import argparse
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

from data_prep import layout  # noqa: E402
from data_prep.options import size as parse_size  # noqa: E402
from data_prep.options import whole  # noqa: E402
from data_prep.run import ShardRequest, shard  # noqa: E402
from data_prep.shard import divide_memory  # noqa: E402
from data_prep.shuffle_run import ShuffleRequest, shuffle  # noqa: E402
from data_prep.sources import InputFile  # noqa: E402
from data_prep.token_arrays import array_path, docs_path, sidecar_path  # noqa: E402
from data_prep.token_plan import TokenPlan  # noqa: E402
from data_prep.tokenizer import TokenizerFacts  # noqa: E402
from optimus import files  # noqa: E402

UNIT_TOKENS = 32 << 20


def make_token_arrays(out: Path, tokens: int) -> None:
    """Random uint16 token arrays, as tokenizing would leave them, of `tokens` in all."""
    folder = out / layout.TOKENS_DIR
    folder.mkdir(parents=True)
    counts = [UNIT_TOKENS] * (tokens // UNIT_TOKENS)
    counts += [tokens % UNIT_TOKENS] if tokens % UNIT_TOKENS else []
    inputs = tuple(InputFile(f"random{number:05d}", 1) for number in range(len(counts)))
    facts = TokenizerFacts("0" * 64, 1 << 16, "<|endoftext|>", 0)
    plan = TokenPlan(facts, "text", 0.0, inputs, tuple((n, n + 1) for n in range(len(counts))))
    files.write_bytes(folder / layout.PLAN, files.checked_json(plan.to_json()))
    plan_xxh3 = files.xxh3_file(folder / layout.PLAN)
    rng = np.random.default_rng(0)
    for number, count in enumerate(counts):
        body = rng.integers(0, 1 << 16, count, np.uint16)
        array = layout.npy_header((count,), "uint16") + body.tobytes()
        docs = layout.npy_header((1, 3), "int64") + np.array([count, number, 0], "<i8").tobytes()
        files.write_bytes(array_path(folder, number), array)
        files.write_bytes(docs_path(folder, number), docs)
        record = {"format": "optimus-token-array", "version": layout.VERSION, "plan": plan_xxh3}
        record |= {"part": "train", "unit": number, "tokens": count, "documents": 1}
        record["array"] = {"size": len(array), "xxh3": files.xxh3_bytes(array)}
        record["docs"] = {"size": len(docs), "xxh3": files.xxh3_bytes(docs)}
        record |= {"inputs": ["0" * 16], "set_aside": []}
        layout.write_checked_json(sidecar_path(folder, number), record)
    files.write_bytes(out / layout.TOKENIZER, b"{}")


def copy(source: Path, target: Path, block_bytes: int, file_bytes: int) -> None:
    """Read the arrays in order and write files of `file_bytes`, in blocks, each file durably."""
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
    """Wall and CPU seconds."""
    os.sync()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def ratio(args: argparse.Namespace) -> dict:
    row_bytes = 2 * args.context
    rows = args.megabytes * 10**6 // row_bytes
    request = ShuffleRequest(args.context, seed=1, shard_bytes=args.shard_size)
    _, memory = divide_memory(args.memory, 1)
    block = min(memory * 3 // 4, args.shard_size)  # a shard that fits is written at once
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
                    (lambda out=out: copy(source / "tokens", out, block, args.shard_size))
                    if name == "copy"
                    else (lambda out=out, name=name: prepare(out, name))
                )
                shutil.rmtree(out)
                if turn:  # the first warms the page cache
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
    """Peak memory of a process that shards N rows of `context` tokens."""
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="data-shuffle-") as base:
        source = Path(base, "source")
        make_token_arrays(source, args.instances * args.context)
        result: dict = {"instances": args.instances, "context": args.context, "limit": args.memory}
        for strategy in ("gather", "bucket"):
            out = Path(base, strategy)
            code = (
                "import sys, time; from data_prep.cli import main; t = time.time()\n"
                f"a = main(['shuffle', {str(source)!r}, '--to', {str(out)!r}, '--context', "
                f"'{args.context}'])\n"
                f"b = main(['shard', {str(out)!r}, '--workers', '1', '--memory', '{args.memory}', "
                f"'--strategy', '{strategy}'])\n"
                "high = next(x for x in open('/proc/self/status') if x.startswith('VmHWM'))\n"
                "print(a + b, int(high.split()[1]) * 1024, time.time() - t)"
            )
            done = subprocess.run(
                [sys.executable, "-c", code],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                check=True,
                text=True,
            )
            status, peak, seconds = done.stdout.splitlines()[-1].split()
            assert status == "0"
            result[strategy] = {
                "peak_bytes": int(peak),
                "within_limit": int(peak) <= args.memory,
                "wall_s": round(float(seconds), 1),
            }
        one, two = (sorted(Path(base, name, "shards").iterdir()) for name in ("gather", "bucket"))
        result["identical"] = all(
            files.xxh3_file(a) == files.xxh3_file(b) for a, b in zip(one, two, strict=True)
        )
    return result


def scaling(args: argparse.Namespace) -> dict:
    """Tokenize a corpus with one worker, two copies of it with two: weak scaling."""
    times: dict[int, list[float]] = {1: [], 2: []}
    cpu: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="data-shuffle-") as base:
        from data_prep.sources import find_inputs

        found = find_inputs(args.input)
        for half in ("a", "b"):
            for number, file in enumerate(found):
                link = Path(base, half, f"{number:06d}-{Path(file.name).name}")
                link.parent.mkdir(exist_ok=True)
                shutil.copyfile(file.name, link)
        for turn in range(args.rounds + 1):
            for workers, halves in ((1, ["a"]), (2, ["a", "b"])):
                out = Path(base, "out")
                command = [sys.executable, "-m", "data_prep.cli", "tokenize", "--input"]
                command += [str(Path(base, half)) for half in halves]
                command += ["--tokenizer", args.tokenizer, "--out", str(out)]
                command += ["--workers", str(workers), "--unit-size", "1MB"]
                start, before = time.perf_counter(), os.times()
                subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
                after = os.times()
                if turn:
                    times[workers].append(time.perf_counter() - start)
                    used = after.children_user + after.children_system
                    cpu[workers].append(used - before.children_user - before.children_system)
                shutil.rmtree(out)
    against = [one / two for one, two in zip(times[1], times[2], strict=True)]
    return {
        "input_bytes": sum(file.size for file in found),
        "one_worker_s": [round(s, 2) for s in sorted(times[1])],
        "two_workers_twice_the_text_s": [round(s, 2) for s in sorted(times[2])],
        "efficiency": [round(q, 3) for q in np.quantile(against, [0, 0.5, 1])],
        "efficiency_by_cpu": [
            round(q, 3)
            for q in np.quantile(
                [2 * one / two for one, two in zip(cpu[1], cpu[2], strict=True)], [0, 0.5, 1]
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
    parser.add_argument("--dir", help="where the files are made (the temporary directory)")
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
