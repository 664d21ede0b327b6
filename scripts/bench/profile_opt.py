#!/usr/bin/env python3
"""Measure the time to profile the memory and operations of a model with the shape of OPT-175B.

    python scripts/bench/profile_opt.py

The profile needs no GPU and allocates no parameter. `optimus.offload` profiles each module of a
transformers model (96 layers); `optimus plan` profiles one layer of each kind. The script prints
the processor time of both profiles, with and without recomputed layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from transformers import OPTConfig, OPTForCausalLM

from optimus.config import make_config
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.offloading.placement import profile_step
from optimus.rank.profile import profile_stages

SEQ_LEN, LAYERS, HIDDEN, HEADS, VOCAB = 2048, 96, 12288, 96, 50272


def whole_model(recompute: bool) -> int:
    """Profile a transformers model. Return the number of profiled uses of model segments (forward
    or backward of a segment)."""
    config = OPTConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        word_embed_proj_dim=HIDDEN,
        num_hidden_layers=LAYERS,
        ffn_dim=4 * HIDDEN,
        num_attention_heads=HEADS,
        max_position_embeddings=SEQ_LEN,
        dropout=0.0,
    )
    with torch.device("meta"):
        model = OPTForCausalLM(config).bfloat16()
    if recompute:
        model.gradient_checkpointing_enable()
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    return len(profile_step(model.train(), {"input_ids": tokens, "labels": tokens}))


def layer_kinds(recompute: bool) -> int:
    """Profile a model of Optimus with the same hidden size. Return the number of profiled
    stages."""
    model = {
        "architecture": "olmo",
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "intermediate_size": 8 * HIDDEN // 3,
        "vocab_size": VOCAB,
    }
    train = {"seq_len": SEQ_LEN, "microbatch_size": 1, "dtype": "bf16"}
    modules = ["block"] if recompute else []
    config = make_config({"model": model, "train": train, "recompute": {"modules": modules}})
    return len(profile_stages(config, Mesh(1, 1, 1, 1), Coordinate(0, 0, 0, 0)))


def main() -> None:
    cases: list[tuple[str, Callable[[bool], int]]] = [
        ("transformers, 96 layers", whole_model),
        ("Optimus, one layer of each kind", layer_kinds),
    ]
    print("| model | recomputed layers | processor s |\n| --- | --- | --- |")
    for name, profile in cases:
        profile(False)  # the first profile imports modules of torch
        for recompute in (False, True):
            start = time.process_time()
            profile(recompute)
            print(f"| {name} | {recompute} | {time.process_time() - start:.2f} |")


if __name__ == "__main__":
    main()
