"""Tiny data set, and configuration of a tiny run that trains on this data set."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from optimus.config import Config, make_config

CONTEXT = 32
VOCAB = 320


def make_tiny_data(directory: Path, documents: int = 120, tokenizer: Path | None = None) -> Path:
    """Make a data set of about 600 instances of CONTEXT tokens, with held-out instances.

    Args:
        directory: Directory in which the data set `data` is made.
        documents: Number of documents.
        tokenizer: Path of the tokenizer; None to train a tokenizer and write it to
            `directory`/tokenizer.json.

    Returns:
        The path of the data set.
    """
    from data_prep.cli import main as optimus_data

    random.seed(7)
    words = [
        "".join(random.choices("abcdefghijklmnop", k=random.randint(2, 7))) for _ in range(150)
    ]
    text = directory / "text"
    text.mkdir(parents=True)
    with open(text / "docs.jsonl", "w", encoding="utf-8") as file:
        for _ in range(documents):
            body = " ".join(random.choices(words, k=random.randint(20, 90)))
            file.write(json.dumps({"text": body}) + "\n")
    source, out = ["--input", str(text / "docs.jsonl")], directory / "data"
    if tokenizer is None:
        tokenizer = directory / "tokenizer.json"
        options = ["--vocab-size", str(VOCAB), "--out", str(tokenizer)]
        assert optimus_data(["train-tokenizer", *source, *options]) == 0
    run = ["run", *source, "--tokenizer", str(tokenizer), "--context", str(CONTEXT)]
    assert optimus_data([*run, "--out", str(out), "--workers", "1", "--eval-fraction", "0.1"]) == 0
    return out


def reshuffle(source: Path, to: Path, *options: str, context: int = CONTEXT) -> Path:
    """Write the documents of a data set in another order, or as instances of another length, to the
    data set `to`. Return `to`."""
    from data_prep.cli import main as optimus_data

    shuffle = ["shuffle", str(source), "--to", str(to), "--context", str(context), *options]
    assert optimus_data(shuffle) == 0
    assert optimus_data(["shard", str(to), "--workers", "1"]) == 0
    return to


def tiny_tree(data: Path | str, run_dir: Path | str, **overrides: Any) -> dict[str, Any]:
    """Return the configuration of a tiny OLMoE run.

    Args:
        data: The data set.
        run_dir: The run directory.
        overrides: Other settings, as `section__key=value`.
    """
    tree: dict[str, Any] = {
        "model": {
            "architecture": "olmoe",
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "vocab_size": VOCAB,
        },
        "data": {"path": str(data)},
        "train": {
            "run_dir": str(run_dir),
            "max_steps": 20,
            "seq_len": CONTEXT,
            "global_batch_tokens": 8 * CONTEXT,
            "microbatch_size": 1,
            "dtype": "fp32",
            "device": "cpu",
            "fit_check": "off",  # the check would start a process
            "eval_instances": 9,  # fewer than all 77, to save time; odd, so that 2 ranks differ
            "deterministic": True,
        },
        "optim": {"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 3},
        "checkpoint": {"interval": 6},
        "observe": {"tensorboard": False},
    }
    for name, value in overrides.items():
        section, key = name.split("__")
        tree.setdefault(section, {})[key] = value
    return tree


def small_batch_tree(data: Path | str, run_dir: Path | str, **overrides: Any) -> dict[str, Any]:
    """Return the configuration of `tiny_tree` with 2 instead of 8 instances per update. Tests of
    saves and disks use this configuration, because their results do not depend on the batch
    size."""
    return tiny_tree(data, run_dir, **{"train__global_batch_tokens": 2 * CONTEXT, **overrides})


def tiny_config(data: Path | str, run_dir: Path | str, **overrides: Any) -> Config:
    """Return the validated configuration of `tiny_tree`."""
    return make_config(tiny_tree(data, run_dir, **overrides))


DENSE = {
    "model__architecture": "olmo",
    "model__num_experts": 0,
    "model__num_experts_per_tok": 0,
    "model__intermediate_size": 64,
}
"""Overrides for a tiny run of a dense model."""
