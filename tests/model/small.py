"""Small models for the tests in this folder."""

from __future__ import annotations

from typing import Any

import torch

from optimus.config import ModelConfig, make_config
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer

_SHARED = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "init_std": 0.1,
}
_SPARSE = {"num_experts": 5, "num_experts_per_tok": 2}


def small_config(architecture: str = "olmoe", **fields: Any) -> ModelConfig:
    sparse = _SPARSE if architecture == "olmoe" else {}
    tree = {"architecture": architecture, **_SHARED, **sparse, **fields}
    return make_config({"model": tree}).model


def small_model(architecture: str = "olmoe", seed: int = 0, **fields: Any) -> Transformer:
    model = Transformer(small_config(architecture, **fields))
    initialise_(model, seed)
    return model


def some_tokens(batch: int = 3, length: int = 16, vocab: int = 61, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the relative error ||value - reference|| / ||reference||."""
    return float((value - reference).detach().norm() / reference.detach().norm())
