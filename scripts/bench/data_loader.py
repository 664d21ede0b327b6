"""Compare the tokens per CPU-second that Optimus' Loader and Megatron-LM's GPTDataset read.

GPTDataset needs a separate virtual environment:

    python -m venv peer && peer/bin/pip install torch==2.13.0 && peer/bin/pip install megatron-core
    python scripts/bench/data_loader.py --peer peer/bin/python

The Loader and GPTDataset read the same tokens. Each run is a new process, and the CPU time of a run
includes all threads. Our Loader reads complete batches. GPTDataset reads single samples, without
collation, workers or masks. Our Loader is also measured with a permuted order, with document masks,
and with a mixture of three data sets. The script also measures the time to open a data set of
10,000 shards.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

VOCAB = 50257
BATCH = 8
MEAN_DOCUMENT = 500
SHARDS = 10_000
PASSES = 10
"""Number of timed passes of our Loader. A single pass is too short to be timed precisely."""
VARIANTS = ("epoch 0", "later epoch", "document mask", "mix of three")


def save_tokenizer(path: Path, size: int) -> None:
    """Save a word-level tokenizer with a vocabulary of `size` tokens to `path`. Id 0 is the
    end-of-document token."""
    from tokenizers import Tokenizer, models

    words = {"<|endoftext|>": 0} | {f"w{number}": number for number in range(1, size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))


def make_data(folder: Path, tokens: int, context: int) -> None:
    """Create data sets in `folder`: a Megatron-LM data set of about `tokens` random token ids, and
    three Optimus data sets that contain the same tokens in different orders."""
    import numpy as np

    from data_prep.cli import main as optimus_data

    save_tokenizer(folder / "tokenizer.json", VOCAB)
    rng = np.random.default_rng(0)
    lengths = rng.geometric(1 / MEAN_DOCUMENT, tokens // MEAN_DOCUMENT).astype(np.int32) + 1
    stops = np.cumsum(lengths, dtype=np.int64)
    # The time to read token ids does not depend on the values of the ids.
    ids = rng.integers(1, VOCAB, int(stops[-1]), dtype=np.uint16)
    ids[stops - 1] = 0
    ids.tofile(folder / "peer.bin")
    with open(folder / "peer.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([8]))
        file.write(np.array([len(lengths), len(lengths) + 1], "<u8").tobytes())
        file.write(lengths.tobytes() + ((stops - lengths) * 2).tobytes())
        file.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())
    out = str(folder / "ours")
    options = ["--tokenizer", str(folder / "tokenizer.json"), "--out", out, "--workers", "1"]
    assert optimus_data(["import", "--input", str(folder / "peer.bin"), *options]) == 0
    for seed, name in ((0, out), (1, f"{out}-1"), (2, f"{out}-2")):
        shuffle = ["shuffle", out, "--to", name, "--context", str(context), "--seed", str(seed)]
        assert optimus_data(shuffle) == 0 and optimus_data(["shard", name, "--workers", "1"]) == 0


def read_ours(folder: Path, variant: str) -> dict[str, Any]:
    """Measure the time of Optimus' Loader on the data sets that `make_data` has created.

    Args:
        folder: Folder that contains the data sets.
        variant: One of VARIANTS.

    Returns:
        A dict. `tokens`: number of tokens read. `cpu_s`: CPU seconds to read the tokens. `open_s`:
        CPU seconds to open the first data set.
    """
    import torch

    from optimus.data.dataset import TokenDataset
    from optimus.data.loader import Loader
    from optimus.data.mixture import MixedDataset

    torch.set_num_threads(1)
    start = time.process_time()
    dataset = TokenDataset(folder / "ours")
    source: TokenDataset | MixedDataset = dataset
    open_s = time.process_time() - start
    if variant == "mix of three":
        others = [TokenDataset(folder / f"ours-{seed}") for seed in (1, 2)]
        source = MixedDataset([dataset, *others], [5, 3, 2])
    steps = dataset.num_instances // BATCH
    first = 1 + (steps * 2 if variant == "later epoch" else 0)
    cpu_s, tokens = 0.0, 0
    for round_number in range(1 + PASSES):
        with Loader(source, BATCH, BATCH, 0, 1, variant == "document mask") as loader:
            start = time.process_time()
            read = sum(
                microbatch.tokens.numel()
                for step in range(first, first + steps)
                for microbatch in loader.microbatches(step)
            )
            if round_number:  # the first pass only warms the page cache
                cpu_s, tokens = cpu_s + time.process_time() - start, tokens + read
    return {"tokens": tokens, "cpu_s": cpu_s, "open_s": open_s}


def open_many(folder: Path) -> float:
    """Return the median time to open a data set of SHARDS shards, in wall-clock seconds."""
    from dataclasses import replace

    from data_prep import layout
    from data_prep.dataset.manifest import ShardEntry, read_manifest
    from optimus.data.dataset import TokenDataset

    few = read_manifest(folder / "ours")
    row_bytes = few.context * layout.little_endian(few.dtype).itemsize
    size = layout.HEADER_BYTES + few.instances_per_shard * row_bytes
    shards = tuple(
        ShardEntry(
            f"shards/shard-{number:05d}.npy", few.instances_per_shard, size, few.shards[0].xxh3
        )
        for number in range(SHARDS)
    )
    many = folder / "many"
    many.mkdir(exist_ok=True)
    count = few.instances_per_shard * SHARDS
    layout.write_checked_json(
        many / "manifest.json", replace(few, num_instances=count, shards=shards).to_json()
    )
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        TokenDataset(many)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def child(command: list[str]) -> dict[str, Any]:
    """Run a command. Return the JSON object in the last line of its standard output. If the command
    fails, end this script with the command's standard error as the message."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, the minimum and the maximum of `values`."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def bench(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Create the data sets in `folder`. In each round, run each variant of our Loader and then
    GPTDataset. Return the speeds in all rounds."""
    make_data(folder, args.tokens, args.context)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (*VARIANTS, "GPTDataset")}
    for _ in range(args.rounds):
        for variant in VARIANTS:
            command = [sys.executable, __file__, "--pass-of", str(folder), "--variant", variant]
            runs[variant].append(child(command))
        if args.peer:
            script = str(Path(__file__).with_name("megatron_loader.py"))
            stem, cache = str(folder / "peer"), str(folder / "cache")
            command = [args.peer, script, stem, str(args.context), cache]
            runs["GPTDataset"].append(child(command))
    rates = {name: [run["tokens"] / run["cpu_s"] for run in done] for name, done in runs.items()}
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "tokens": args.tokens,
        "context": args.context,
        "batch": BATCH,
        "rounds": args.rounds,
        "tokens_per_cpu_s": {name: spread(rate) for name, rate in rates.items() if rate},
        f"open_{SHARDS}_shards_s": open_many(folder),
    }
    if args.peer:
        pairs = zip(rates["epoch 0"], rates["GPTDataset"], strict=True)
        result["ratio"] = spread([ours / theirs for ours, theirs in pairs])
        result["peer_open_cpu_s"] = spread([run["open_s"] for run in runs["GPTDataset"]])
        result["peer"] = runs["GPTDataset"][0]["versions"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="Python with megatron-core; default: only our Loader")
    parser.add_argument("--tokens", type=int, default=32_000_000)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pass-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pass_of:
        print(json.dumps(read_ours(args.pass_of, args.variant)))
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        # optimus-data's output goes to standard error: standard output is for the JSON result.
        result = bench(args, Path(folder))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
