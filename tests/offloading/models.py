"""Tiny models with random weights, and training loops, for the tests of `optimus.offload`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimus
from optimus.chunks.residency import Residency
from optimus.offloading import placement

transformers = pytest.importorskip("transformers")

VOCAB = 64
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def set_residency(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Set fields of `Residency` in all engines that `optimus.offload` makes during the test."""
    monkeypatch.setattr(placement, "Residency", partial(Residency, **settings))


def llama(**fields: Any) -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **fields}))


def gpt2(**fields: Any) -> nn.Module:
    """Return a GPT-2 with tied embeddings and dropout."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=4, n_head=4, bos_token_id=1,
        eos_token_id=1, **fields,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def olmoe(**fields: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    config = transformers.OlmoeConfig(**{**SHAPE, "num_hidden_layers": 3, **sizes, **fields})
    return transformers.OlmoeForCausalLM(config)


def fast_olmoe(**fields: Any) -> nn.Module:
    return optimus.hf.use_fast_moe(olmoe(**fields))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "olmoe": olmoe,
    "fast_olmoe": fast_olmoe,
}


def tokens(seed: int, size: tuple[int, ...] = (2, 8)) -> Tensor:
    return torch.randint(1, VOCAB, size, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    """Return the loss of a microbatch. `seed` determines its tokens and the dropout."""
    torch.manual_seed(seed)
    batch = tokens(seed)
    return model(input_ids=batch, labels=batch).loss


def adamw(model: nn.Module, params: Any = None, **options: Any) -> torch.optim.AdamW:
    params = [p for p in model.parameters() if p.requires_grad] if params is None else params
    return torch.optim.AdamW(params, fused=True, **options)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[int] = (1, 3, 2, 4),
    max_norm: float | None = 0.5,
    after: Callable[[int], None] = lambda step: None,
    first: int = 0,
) -> list[float]:
    """Train one step for each element of `microbatches`. The element is the number of microbatches
    of the step. Steps are numbered from `first`. `after` is called with the number of each
    completed step.

    Unless `max_norm` is None, torch's clip_grad_norm_ clips the gradients of each step to this
    norm. Return the losses of the microbatches of each step, followed by the gradient norm of the
    step if gradients are clipped.
    """
    values = []
    for step, count in enumerate(microbatches, first):
        for number in range(count):
            loss = loss_of(model, 10 * step + number) / count
            loss.backward()
            values.append(loss.item())
        if max_norm is not None:
            values.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return values


def weights(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
