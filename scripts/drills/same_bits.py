#!/usr/bin/env python3
"""Compare the results of this checkout and of another commit: prepared data, training and
generation.

    python scripts/drills/same_bits.py [--against COMMIT] [--only TEXT] [--work DIR]

The two versions run on this machine, because the bits of results depend on the processor. Each
version prepares a data set from the documentation of COMMIT, trains models under eight layouts for
8 steps, with a stop and a resume after step 5, and generates text from the last checkpoint. The
drill compares the token files and tokenizers, the lines of metrics.jsonl (without times) and
eval.jsonl, all parameters and optimizer states of the last checkpoint, and the generated text. A
refactoring must not change any of these results. Exit status 0: all results are bit-identical.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from optimus.observe.metrics import read_json_lines  # noqa: E402
from tests.kit.runs.results import metrics_of, weights_of  # noqa: E402

START = "85d2d92"
"""Default commit of --against."""
STEPS, STOP = 8, 5

CONFIG = """
[model]
architecture = "olmoe"
num_layers = 4
hidden_size = 64
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 32
num_experts = 8
num_experts_per_tok = 2
vocab_size = 512

[train]
max_steps = 8
seq_len = 64
global_batch_tokens = 512
microbatch_size = 1
deterministic = true
device = "cpu"
eval_interval = 4

[optim]
lr = 3e-3
min_lr = 3e-4
warmup_steps = 3
clip_norm = 0.5

[checkpoint]
interval = 5

[observe]
tensorboard = false
"""
DENSE = (
    "model.architecture=olmo model.num_experts=0 model.num_experts_per_tok=0 "
    "model.intermediate_size=128 model.tie_embeddings=true"
)
# fp16 and all-to-all do not support deterministic mode. With these settings, repeated runs have the
# same bits even without deterministic mode.
FAST = "train.deterministic=false train.threads=1 kernels.grouped_gemm=loop"


class Layout(NamedTuple):
    """Name, number of ranks and settings of a run."""

    name: str
    ranks: int
    overrides: str


LAYOUTS = (
    Layout("one-process", 1, "recompute.modules=['moe','norm']"),
    Layout("dp2-epso-bf16", 2, "train.dtype=bf16 optim.sharding=epso"),
    Layout(
        "pp2-interleaved-tied",
        2,
        f"parallel.pp=2 parallel.schedule=interleaved parallel.virtual_stages=2 {DENSE}",
    ),
    Layout("pp2-zb-fp16", 2, f"parallel.pp=2 parallel.schedule=zb-h1 train.dtype=fp16 {FAST}"),
    Layout("ep2-alltoall", 2, f"parallel.ep=2 parallel.ep_dispatch=alltoall {FAST}"),
    Layout("tp2-sequence-bf16", 2, "parallel.tp=2 parallel.sequence_parallel=true"),
    Layout("ep2-epso", 2, "parallel.ep=2 optim.sharding=epso"),
    Layout("pp2-ep2-so", 4, "parallel.pp=2 parallel.ep=2 optim.sharding=so"),
)


class Version:
    """A version of Optimus (a checkout of a commit, or this working tree), and the directory of its
    results."""

    def __init__(self, name: str, root: Path, work: Path) -> None:
        self.name, self.root, self.work = name, root, work / name
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / "run.toml").write_text(CONFIG)

    def run(self, module: str, *arguments: str) -> str:
        """Run a command of this version and return its standard output. If the command fails, end
        the drill and print the standard error of the command."""
        paths = os.pathsep.join([str(self.root), str(self.root / "kernels")])
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-m", module, *arguments]
        done = subprocess.run(command, cwd=self.work, env=environment, capture_output=True)
        errors = done.stderr.decode(errors="replace")
        if done.returncode:
            sys.exit(f"{self.name}: {' '.join(command[3:])}: status {done.returncode}\n{errors}")
        return done.stdout.decode(errors="replace")

    def prepare(self, text: Path) -> None:
        """Train a tokenizer on the Markdown files in the folder `text`. Then prepare a data set,
        including held-out instances, from these files."""
        source = ["--input", str(text / "**" / "*.md")]
        vocabulary = ["--vocab-size", "512", "--out", "tokenizer.json"]
        self.run("data_prep.cli", "train-tokenizer", *source, *vocabulary)
        sizes = ["--context", "64", "--eval-fraction", "0.2", "--workers", "2"]
        out = ["--tokenizer", "tokenizer.json", "--out", "data"]
        self.run("data_prep.cli", "run", *source, *sizes, *out)

    def train(self, layout: Layout) -> str:
        """Train a model under `layout`, with a stop after step 5 and a resume. Return the text that
        `optimus generate` samples from the last checkpoint."""
        command = ["train", "run.toml", "data.path=data", f"train.run_dir={layout.name}"]
        command += layout.overrides.split()
        ranks = ["--nproc", str(layout.ranks)] if layout.ranks > 1 else []
        for stop in (STOP, STEPS):
            self.run("optimus.cli", *command, f"train.stop_at_step={stop}", *ranks)
        sampling = ["--prompt", "The run", "--tokens", "12", "--seed", "1"]
        return self.run("optimus.cli", "generate", layout.name, *sampling)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", default=START, metavar="COMMIT", help="default: %(default)s")
    parser.add_argument("--only", default="", help="layouts whose name contains this text")
    parser.add_argument(
        "--work", help="an empty directory that is kept; default: a temporary directory"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="same-bits-") as scratch:
        work = Path(arguments.work or scratch).resolve()
        checkout = work / "checkout"
        if not checkout.exists():
            git = ["git", "-C", str(ROOT)]
            subprocess.run([*git, "clone", "-q", str(ROOT), str(checkout)], check=True)
            command = ["git", "-C", str(checkout), "checkout", "-q", arguments.against]
            subprocess.run(command, check=True)
        old, new = Version("before", checkout, work), Version("after", ROOT, work)
        return _compare_all(old, new, arguments.only)


def _compare_all(old: Version, new: Version, only: str) -> int:
    text = old.root / "docs"
    for version in (old, new):
        version.prepare(text)
    different = _report("data set", _different_files(old.work / "data", new.work / "data"))
    for layout in LAYOUTS:
        if only not in layout.name:
            continue
        samples = [version.train(layout) for version in (old, new)]
        names = _different_runs(old.work / layout.name, new.work / layout.name)
        names += ["the samples"] if samples[0] != samples[1] else []
        different += _report(layout.name, names)
    return 1 if different else 0


def _report(name: str, different: list[str]) -> int:
    verdict = f"DIFFERENT: {', '.join(different[:5])}" if different else "the same bits"
    print(f"{name}: {verdict}", flush=True)
    return len(different)


def _different_files(old: Path, new: Path) -> list[str]:
    """Return the names of the token files and tokenizers that differ between the data sets `old`
    and `new`. Manifests are not compared, because they contain times and paths."""
    files = [
        {
            path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in root.rglob("*")
            if path.suffix in (".npy", ".bin") or path.name == "tokenizer.json"
        }
        for root in (old, new)
    ]
    assert files[0], f"no token files in {old}"
    names = files[0].keys() | files[1].keys()
    return sorted(name for name in names if files[0].get(name) != files[1].get(name))


def _different_runs(old: Path, new: Path) -> list[str]:
    """Compare the runs in the directories `old` and `new`. Return the names of different metrics
    files, and the names of different parameters and optimizer states in the last checkpoints."""
    different = ["metrics.jsonl"] if metrics_of(old) != metrics_of(new) else []
    evaluations = [read_json_lines(run / "eval.jsonl") for run in (old, new)]
    if evaluations[0] != evaluations[1]:
        different.append("eval.jsonl")
    before, after = weights_of(old), weights_of(new)
    names = sorted(before.keys() | after.keys())
    return different + [
        name
        for name in names
        if name not in before or name not in after or not torch.equal(before[name], after[name])
    ]


if __name__ == "__main__":
    sys.exit(main())
