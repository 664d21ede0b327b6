#!/usr/bin/env python3
"""Measure the tokens per CPU-second of `optimus-data tokenize` and other programs on one corpus.

    python scripts/bench/data_tokenize.py --corpus corpus.jsonl --tokenizer tokenizer.json \
        --work DIR --rounds 3 --peer datatrove=VENV/bin/python --peer dolma=VENV/bin/python \
        --peer megatron=VENV/bin/python --megatron-tree Megatron-LM

`--megatron-tree` is a Git checkout of Megatron-LM, of the same version as the package
megatron-core. Each of the other programs (peers) needs a separate virtual environment:

    pip install datatrove tokenizers orjson
    uv pip install dolma
    pip install torch==2.13.0 megatron-core transformers sentencepiece six triton

All programs use the same tokenizer and one worker. CPU seconds include the start-up and all
processes of a program. The program `bare` is a minimal loop that encodes the corpus. The token ids
of each program are compared with the token ids of `bare`.

The corpus should not contain the text of special tokens, because the peers encode such text as the
special tokens. If dolma is a peer, the script rewrites the corpus to a form that dolma accepts, and
all programs read the rewritten corpus.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]

BARE = """
import json, sys
import numpy as np
from tokenizers import Tokenizer
corpus, tokenizer, out, eos = sys.argv[1:]
t = Tokenizer.from_file(tokenizer)
t.encode_special_tokens = True
with open(corpus, "rb") as file, open(out + "/ids.bin", "wb") as ids:
    batch = []
    def flush():
        for one in t.encode_batch_fast(batch, add_special_tokens=False):
            ids.write(np.array([*one.ids, int(eos)], np.uint16).tobytes())
        batch.clear()
    for line in file:
        batch.append(json.loads(line)["text"])
        if len(batch) == 128:
            flush()
    flush()
"""
DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
import os
corpus, tokenizer, out, eos = sys.argv[1:]
folder, name = os.path.split(corpus)
LocalPipelineExecutor(
    pipeline=[
        JsonlReader(folder, glob_pattern=name),
        DocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token="<|endoftext|>",
                          shuffle_documents=False, max_tokens_per_file=10**12),
    ],
    logging_dir=out + "/logs",
).run()
"""
DOLMA = """
import json, sys
corpus, tokenizer, out, eos = sys.argv[1:]
from dolma.cli.main import main
with open(tokenizer) as file: # merges as strings: dolma's tokenizers version reads no pairs
    written = json.load(file)
merges = written["model"]["merges"]
written["model"]["merges"] = [one if isinstance(one, str) else " ".join(one) for one in merges]
tokenizer = out + "/tokenizer.json"
with open(tokenizer, "w") as file:
    json.dump(written, file)
main(["tokens", "--documents", corpus, "--destination", out, "--tokenizer.name_or_path", tokenizer,
      "--tokenizer.eos_token_id", eos, "--tokenizer.pad_token_id", eos, "--dtype", "uint16",
      "--processes", "1", "--ring_size", "1", "--batch_size", "10000"])
"""
OURS = "import sys; from data_prep.cli import main; sys.exit(main(sys.argv[1:]))"
PEERS = ("datatrove", "dolma", "megatron")


def command(name: str, python: str, args: argparse.Namespace, out: Path, eos: int) -> list[str]:
    """Return the command line for tokenizing the corpus with the program `name`."""
    corpus, tokenizer = str(args.corpus.resolve()), str(args.tokenizer.resolve())
    if name == "optimus-data":
        arguments = ["tokenize", "--input", corpus, "--tokenizer", tokenizer, "--out", str(out)]
        return [python, "-c", OURS, *arguments, "--workers", "1"]
    if name == "megatron":
        tool = [python, str(args.megatron_tree / "tools" / "preprocess_data.py"), "--append-eod"]
        tool += ["--input", corpus, "--output-prefix", str(out / "ids"), "--workers", "1"]
        return [*tool, "--tokenizer-type=HuggingFaceTokenizer", f"--tokenizer-model={out}"]
    code = {"bare": BARE, "datatrove": DATATROVE, "dolma": DOLMA}[name]
    return [python, "-c", code, corpus, tokenizer, str(out), str(eos)]


def run_once(
    name: str, python: str, args: argparse.Namespace, eos: int
) -> tuple[float, float, Path]:
    """Tokenize the corpus with the program `name`. Return (CPU seconds, wall-clock seconds, output
    directory)."""
    out = args.work / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if name == "megatron":  # Megatron-LM reads a tokenizer directory
        shutil.copy(args.tokenizer, out / "tokenizer.json")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
        (out / "tokenizer_config.json").write_text(json.dumps(config))
    environment = os.environ | {
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if name in ("optimus-data", "bare"):
        environment["PYTHONPATH"] = str(ROOT)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        command(name, python, args, out, eos), env=environment, capture_output=True, text=True
    )
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, wall, out


def ids_of(name: str, out: Path) -> np.ndarray:
    """Return the token ids that the program `name` has written to the directory `out`."""
    if name == "optimus-data":
        return np.load(next((out / "tokens").glob("unit-?????.npy")))
    pattern = {"datatrove": "*.ds", "dolma": "*.npy", "megatron": "*.bin"}.get(name, "ids.bin")
    files = sorted(out.rglob(pattern))
    return np.concatenate([np.fromfile(file, np.uint16) for file in files])


def same_ids(name: str, ids: np.ndarray, expected: np.ndarray, eos: int) -> str:
    """Compare `ids` with `expected` and return the result as text.

    The text is "equal", or "equal, other order" if only the order of documents differs. If the ids
    differ, the text contains the number of ids in each array.
    """
    if np.array_equal(ids, expected):
        return "equal"
    ours, theirs = (  # sorted, because dolma changes the order of documents
        sorted(document.tobytes() for document in np.split(a, np.flatnonzero(a == eos) + 1))
        for a in (ids, expected)
    )
    if ours == theirs:
        return "equal, other order"
    return f"DIFFER ({len(ids)} ids against {len(expected)})"


def rewritten(corpus: Path, work: Path) -> Path:
    """Write a copy of the corpus to `work` in a form that dolma accepts, and return the path of the
    copy. In the copy, ids are strings, and texts do not begin or end with white space. Empty
    documents are left out."""
    work.mkdir(parents=True, exist_ok=True)
    path = work / "corpus.jsonl"
    with open(corpus, "rb") as file, open(path, "w", encoding="utf-8") as out:
        for number, line in enumerate(file):
            if text := json.loads(line)["text"].strip():
                document = {"id": str(number), "text": text}
                out.write(json.dumps(document, ensure_ascii=False) + "\n")
    return path


def version_of(python: str, names: tuple[str, ...]) -> str:
    """Return the names and versions of the packages `names` that are installed for the interpreter
    `python`, such as "torch 2.13.0, triton 3.4.0"."""
    code = "import sys, importlib.metadata as m\nfor n in sys.argv[1:]:\n print(n, m.version(n))"
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True)
    return ", ".join(done.stdout.split("\n")[:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--megatron-tree", type=Path, metavar="DIR", help="Megatron-LM's checkout")
    args = parser.parse_args()
    from tokenizers import Tokenizer

    eos = Tokenizer.from_file(str(args.tokenizer)).token_to_id("<|endoftext|>")
    if eos is None:
        parser.error(f"{args.tokenizer} has no token <|endoftext|>; use another --tokenizer")
    pythons = dict.fromkeys(("bare", "optimus-data"), sys.executable)
    pythons |= dict(peer.split("=", 1) for peer in args.peer)
    if "megatron" in pythons and args.megatron_tree is None:
        parser.error("--peer megatron needs a checkout of Megatron-LM; set --megatron-tree")
    if "dolma" in pythons:
        args.corpus = rewritten(args.corpus, args.work)
    packages = {
        "megatron": ("megatron-core", "torch", "transformers", "tokenizers"),
        "bare": ("tokenizers", "numpy"),
    }
    print(platform.platform(), "Python", platform.python_version(), os.cpu_count(), "cores")
    for name in ("bare", *(name for name in pythons if name in PEERS)):
        print(name, version_of(pythons[name], packages.get(name, (name, "tokenizers"))))
    spent: dict[str, list[float]] = {name: [] for name in pythons}
    expected: np.ndarray | None = None
    answers = {}
    for _ in range(args.rounds):
        for name, python in pythons.items():
            cpu, wall, out = run_once(name, python, args, eos)
            ids = ids_of(name, out)
            expected = ids if expected is None else expected
            answers[name] = same_ids(name, ids, expected, eos)
            spent[name].append(cpu)
            print(
                f"# {name}: {cpu:.2f} CPU-s, {wall:.2f} s wall-clock, ids: {answers[name]}",
                flush=True,
            )
    assert expected is not None
    tokens, size = len(expected), args.corpus.stat().st_size
    print(f"corpus: {size / 1e6:.1f} MB, {tokens} tokens; {args.rounds} rounds")
    best = max((tokens / statistics.median(spent[n]) for n in pythons if n in PEERS), default=None)
    for name, seconds in spent.items():
        rates = sorted(tokens / second / 1e6 for second in seconds)
        middle = tokens / statistics.median(seconds)
        ratio = f"{middle / best:.2f}x the best peer" if best else ""
        print(
            f"{name:13} {middle / 1e6:6.3f} Mtok/CPU-s ({rates[0]:.3f}-{rates[-1]:.3f})  {ratio:22}"
            f" ids: {answers[name]}"
        )
    print(json.dumps({"tokens": tokens, "cpu_s": spent}))


if __name__ == "__main__":
    main()
